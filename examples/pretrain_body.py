"""A frozen body of one's own, trained without labels on images of a random process (``body: {kind: contrastive}``).

Run it: python examples/pretrain_body.py --steps 2 --images 16 --batch 8 --side 8 --out network.safetensors. With the
defaults it takes hours.

Of each dead-leaves image two views are made, and each view is to find the other among all views of the batch by its
direction alone (InfoNCE: Oord et al. 2018, Chen et al. 2020). No label and no photograph is met.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.durable import digest_of, write_tensors
from fedflat.core.rng import seeded_torch, stream
from fedflat.models.patches import COLOURS, LAYERS, ContrastiveOptions, Network, dead_leaves

TEMPERATURE = 0.2
WIDTH = 256
"""Of the projection that the loss sees, and that is thrown away afterwards."""
RATE, DECAY, WARM = 2e-3, 1e-4, 100
"""Of AdamW: the largest rate, the weights' decay, and the steps that lead to that rate; then half a cosine."""
SMALLEST, JITTER, GREY = 0.2, 0.5, 0.2
"""Views: the least share of the area, the strength of changes of colour, how often all colour is taken out."""


def pretrain(out: Path, *, seed: int, steps: int, images: int, batch: int, side: int, bf16: bool) -> str:
    """Train, write the network to ``out`` and return its digest. Views are ``side`` pixels wide, images half more."""
    network = Network((COLOURS, side, side), ContrastiveOptions())
    with seeded_torch(seed, "pretraining: start"):
        for name, value in network.named_buffers():
            if name.startswith("filters"):
                nn.init.kaiming_normal_(value)
        head = nn.Sequential(nn.Linear(LAYERS[-1][0], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH // 2))
    weights = [*(value.requires_grad_() for value in network.buffers()), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, weight_decay=DECAY)
    pictures = dead_leaves(images, (COLOURS, side * 3 // 2, side * 3 // 2), seed)
    for step in range(steps):
        warm_up, cosine = min(1.0, (step + 1) / WARM), (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = RATE * warm_up * cosine
        draw = stream(seed, "pretraining", step)
        chosen = pictures[torch.from_numpy(draw.choice(images, batch, replace=False))]
        views = torch.cat([view_of(chosen, side, draw) for _ in range(2)])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            last = network.layers(views)[-1]
        loss = info_nce(head(last.float().mean((2, 3))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {float(loss.detach()):.4f}", flush=True)
    tensors = {name: value.detach() for name, value in network.named_buffers()}
    write_tensors(out, tensors, {"made_by": "fedflat pretrain"})  # the statement's prior: a random process
    return digest_of(tensors)


def info_nce(found: Tensor) -> Tensor:
    """Return the loss of embeddings (2n, d): row i and row i + n are of one image."""
    rows = F.normalize(found)
    likeness = (rows @ rows.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(likeness, torch.arange(len(rows)).roll(len(rows) // 2))


def view_of(images: Tensor, side: int, draw: np.random.Generator) -> Tensor:
    """Return one view of each image (n, c, h, w): a random crop ``(n, c, side, side)``, mirrored or not, in other
    colours."""
    n, channels = images.shape[:2]

    def some(low: float, high: float, *shape: int) -> Tensor:
        return torch.from_numpy(draw.uniform(low, high, (n, *shape)).astype(np.float32))

    size, shape = some(SMALLEST, 1).sqrt(), some(-0.2, 0.2).exp()
    wide, high = (size * shape).clamp_max(1), (size / shape).clamp_max(1)
    x, y, none, mirror = some(-1, 1) * (1 - wide), some(-1, 1) * (1 - high), torch.zeros(n), some(-1, 1).sign()
    where = torch.stack([torch.stack([wide * mirror, none, x], 1), torch.stack([none, high, y], 1)], 1)
    grid = F.affine_grid(where, [n, channels, side, side], align_corners=False)
    found = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    mean = found.mean((1, 2, 3), keepdim=True)
    found = (found - mean) * (1 + some(-JITTER, JITTER, 1, 1, 1)) + mean + some(-JITTER, JITTER, 1, 1, 1)
    grey = found.mean(1, keepdim=True)
    coloured = (1 + some(-JITTER, JITTER, 1, 1, 1)) * (some(0, 1, 1, 1, 1) >= GREY)
    return grey + (found - grey) * coloured + some(-JITTER / 2, JITTER / 2, channels, 1, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network without labels on images of a random process.")
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("seed", 0), ("steps", 1000), ("images", 10_000), ("batch", 256), ("side", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true", help="faster where the processor has it")
    options = parser.parse_args()
    print(f"{options.out}: sha256 {pretrain(**vars(options))}")
