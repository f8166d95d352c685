"""``python -m benchmarks.dictionary FILE.png``: random images and the filters made of them, as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedflat.models.patches import dead_leaves
from fedflat.models.representation import body_of

SHAPE = (3, 32, 32)
OPTIONS = {"kind": "patches", "filters": 128, "images": 500, "dimension": 200}


def sheet(images: Tensor, columns: int) -> Tensor:
    """Images (n, c, h, w), each stretched to [0, 1], as one (h', w', c) with a pixel between them."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = torch.nn.functional.pad((images - low) / (high - low), (0, 1, 0, 1), value=1.0)
    rows = [torch.cat(list(row), dim=2) for row in scaled.split(columns)]
    return torch.cat(rows, dim=1).permute(1, 2, 0)


def draw(path: Path) -> None:
    """Write the picture."""
    body = body_of(OPTIONS, SHAPE)
    filters = body.maps.filters.unflatten(1, (3, 6, 6))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for axes, shown, title in (
        (left, sheet(dead_leaves(72, SHAPE, 0), 12), "Dead leaves, seed 0"),
        (right, sheet(filters[:96], 12), "Filters: their patches, whitened"),
    ):
        axes.imshow(shown.numpy(), interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
