"""Pretrain a small network on images of a random process (``fedflat pretrain``), without labels.

Four convolutions, each followed by a group norm and a rectifier; of the last two, means over the cells of a grid. All
of it looks at one image at a time. How it is trained: ``pretraining``.

Of each dead-leaves image two views are made, and each view is to find the other among all views of the batch by its
direction alone (InfoNCE: Oord et al. 2018, Chen et al. 2020). No label and no photograph is met.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import one_of, whole, wrong
from fedflat.core.durable import digest_of, read_about, read_tensors, write_tensors
from fedflat.core.process import report_progress
from fedflat.core.rng import seeded_torch, stream
from fedflat.models.patches import dead_leaves

LAYERS = ((32, 5, 2), (64, 3, 1), (128, 3, 2), (256, 3, 1))
"""Channels, side and stride of each convolution."""
COLOURS = 3
GROUPS = 8


@dataclass(frozen=True)
class ContrastiveOptions:
    """network: the file that ``fedflat pretrain`` wrote. sha256: the digest it must have. cells: the grid's side."""

    network: str | None = None
    sha256: str | None = None
    cells: int = 2

    def __post_init__(self) -> None:
        whole("model.body.cells", self.cells, 1)

    def known(self) -> ContrastiveOptions:
        """With the digest of the network that is in the file. Raises InputError where it is not the one asked for."""
        found = digest_of(self.tensors())
        if self.sha256 not in (None, found):
            raise wrong("model.body.sha256", f"{self.sha256} for a network of {found}", "the digest of the network")
        return replace(self, sha256=found)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is in the file. Raises InputError."""
        found = read_tensors(Path(self.network)) if isinstance(self.network, str) else None
        if found is None:
            raise wrong("model.body.network", self.network, "a sound file that fedflat pretrain wrote")
        return found

    @property
    def prior(self) -> str:
        """What the network was made from, as its file says."""
        return "random process" if "fedflat pretrain" in read_about(Path(str(self.network))).values() else "unknown"


class Network(nn.Module):
    """Images (b, c, h, w), c of 1 or 3 -> maps (b, 384, cells²). Buffers only; grey is three equal colours."""

    def __init__(self, shape: tuple[int, int, int], options: ContrastiveOptions) -> None:
        super().__init__()
        if shape[0] not in (1, COLOURS) or min(shape[1:]) < 4 * options.cells:
            least = 4 * options.cells
            raise wrong("model.body", f"images of {shape}", f"1 or {COLOURS} channels, at least {least} × {least}")
        self.cells, self.options, before = options.cells, options, COLOURS
        for number, (channels, side, _) in enumerate(LAYERS):
            self.register_buffer(f"filters{number}", torch.zeros(channels, before, side, side))
            self.register_buffer(f"gain{number}", torch.ones(channels))
            self.register_buffer(f"shift{number}", torch.zeros(channels))
            before = channels

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self._maps(image) for image in images.split(1)])

    def _maps(self, image: Tensor) -> Tensor:
        pooled = [F.adaptive_avg_pool2d(layer, self.cells).flatten(2) for layer in self.layers(image)[-2:]]
        return torch.cat(pooled, dim=1)

    def layers(self, images: Tensor) -> list[Tensor]:
        """Return what each layer makes of images (b, c, h, w)."""
        found = [images.expand(-1, COLOURS, -1, -1)]
        for number, (_, side, stride) in enumerate(LAYERS):
            filters, gain, shift = (self.get_buffer(f"{name}{number}") for name in ("filters", "gain", "shift"))
            answers = F.conv2d(found[-1], filters, stride=stride, padding=side // 2)
            found.append(F.group_norm(answers, GROUPS, gain, shift).relu())
        return found[1:]

    def fit(self, images: Tensor, seed: int) -> None:
        """Fill it from its file; it was trained before, on images of its own."""
        tensors = self.options.tensors()
        try:
            self.load_state_dict(tensors)
        except RuntimeError:  # names or shapes of another network
            found = ", ".join(sorted(tensors)[:3])
            raise wrong("model.body.network", found, "a file that fedflat pretrain wrote") from None


TEMPERATURE = 0.2
WIDTH = 256
"""Of the projection that the loss sees, and that is thrown away afterwards."""
RATE, DECAY, WARM = 2e-3, 1e-4, 100
"""Of AdamW: the largest rate, the weights' decay, and the steps that lead to that rate; then half a cosine."""
SMALLEST, JITTER, GREY = 0.2, 0.5, 0.2
"""Views: the least share of the area, the strength of changes of colour, how often all colour is taken out."""
KEPT = 100
"""Steps between two states on disk, from which a training that was stopped goes on."""


@dataclass(frozen=True)
class Pretraining:
    """What a network is a function of. side: of a view in pixels; images are half as large again."""

    seed: int = 0
    steps: int = 1000
    images: int = 10_000
    batch: int = 256
    side: int = 32
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("steps", 1), ("batch", 2), ("side", 8), ("images", self.batch)):
            whole(f"--{name}", getattr(self, name), least)
        one_of("--precision", self.precision, ("fp32", "bf16"))

    @property
    def command(self) -> str:
        """What makes it again."""
        return "fedflat pretrain " + " ".join(f"--{key} {value}" for key, value in asdict(self).items())


def pretrain(options: Pretraining, out: Path) -> dict[str, object]:
    """Train, write the network to ``out`` and its card beside it, and return the card.

    Draws come from streams named by seed and step; a training that was stopped goes on from what lies beside ``out``.
    Raises InputError, before anything is trained, for a file that is there already or cannot be written.
    """
    _check_new(out)
    network, state = Network((COLOURS, options.side, options.side), ContrastiveOptions()), out.with_suffix(".state")
    with seeded_torch(options.seed, "pretraining: start"):
        for name, value in network.named_buffers():
            if name.startswith("filters"):
                nn.init.kaiming_normal_(value)
        head = nn.Sequential(nn.Linear(LAYERS[-1][0], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH // 2))
    weights = [*(value.requires_grad_() for value in network.buffers()), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, weight_decay=DECAY)
    first, minutes = _resumed(options, state, weights, optimizer)
    began, losses = time.monotonic() - 60 * minutes, []
    images = dead_leaves(options.images, (COLOURS, options.side * 3 // 2, options.side * 3 // 2), options.seed)
    for step in range(first, options.steps):
        report_progress("training without labels, step", step - first, options.steps - first)
        optimizer.param_groups[0]["lr"] = _rate(step, options.steps)
        losses.append(_step(network, head, images, options, step, optimizer))
        if (step + 1) % KEPT == 0:
            _keep(options, state, weights, optimizer, step + 1, (time.monotonic() - began) / 60)
    tensors = {name: value.detach() for name, value in network.named_buffers()}
    card = {
        "command": options.command, "sha256": digest_of(tensors), "prior": "random process",
        "minutes": round((time.monotonic() - began) / 60, 1), "loss": round(float(np.mean(losses[-KEPT:] or [0])), 4),
        "torch": torch.__version__,
    }  # fmt: skip
    write_tensors(out, tensors, {"made_by": "fedflat pretrain", "command": options.command})
    out.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    state.unlink(missing_ok=True)
    return card


def _check_new(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise wrong("--out", str(out), "a name that ends in .safetensors; its card and its state lie beside it")
    if out.exists():
        raise wrong("--out", f"{out}, which exists", "a new file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        found = f"{out}, which cannot be written ({error.strerror})"
        raise wrong("--out", found, "a file in a folder you may write to") from error


def _step(
    network: Network, head: nn.Module, images: Tensor, options: Pretraining, step: int, optimizer: torch.optim.Optimizer
) -> float:
    draw = stream(options.seed, "pretraining", step)
    chosen = images[torch.from_numpy(draw.choice(len(images), options.batch, replace=False))]
    views = torch.cat([view_of(chosen, options.side, draw) for _ in range(2)])
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
        last = network.layers(views)[-1]
    loss = info_nce(head(last.float().mean((2, 3))))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def info_nce(found: Tensor) -> Tensor:
    """Return the loss of embeddings (2n, d): row i and row i + n are of one image."""
    rows = F.normalize(found)
    likeness = (rows @ rows.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(likeness, torch.arange(len(rows)).roll(len(rows) // 2))


def view_of(images: Tensor, side: int, draw: np.random.Generator) -> Tensor:
    """Return one view of each image (n, c, h, w): a random crop ``(n, c, side, side)``, mirrored or not, in other
    colours.
    """
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


def _rate(step: int, steps: int) -> float:
    return RATE * min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / steps)) / 2


def _keep(
    options: Pretraining, path: Path, weights: list[Tensor], optimizer: torch.optim.Optimizer, step: int, minutes: float
) -> None:
    moments = optimizer.state_dict()["state"]
    tensors = {f"{i}": value.detach() for i, value in enumerate(weights)}
    tensors |= {f"{i}.{name}": value for i, one in moments.items() for name, value in one.items()}
    write_tensors(path, {**tensors, f"{options.command}": torch.tensor([float(step), minutes])})


def _resumed(
    options: Pretraining, path: Path, weights: list[Tensor], optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Return the step to go on with, and the minutes spent. Raises InputError for a state that is damaged or of
    others."""
    if not path.exists():
        return 0, 0.0
    found: Mapping[str, Tensor] = read_tensors(path) or {}
    if options.command not in found:
        other = next((name for name in found if name.startswith("fedflat pretrain")), "a damaged file")
        raise wrong("--out", f"beside it {path.name}, the state of {other}", "another file, or that command to go on")
    with torch.no_grad():
        for i, value in enumerate(weights):
            value.copy_(found[f"{i}"])
    names = ("step", "exp_avg", "exp_avg_sq")
    state = {i: {name: found[f"{i}.{name}"] for name in names} for i in range(len(weights))}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    step, minutes = found[options.command].tolist()
    return int(step), minutes
