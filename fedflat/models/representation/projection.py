"""From maps to features by public numbers alone: standardise, principal directions, whitening, length 1.

All of it is fitted on random-process images. Directions are products of one over channels and one over positions, so
that what is stored is small: channels² + positions², and not their product's square.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedflat.core.checks import in_range, whole, wrong
from fedflat.core.waiting import told

FLATTEST = 1e-3
"""Added to a map entry's standard deviation before the division."""
SHRUNK = 0.5
"""Of the least variance kept, added to all variances before whitening."""
BLOCK = 50
"""Synthetic images whose maps are computed at once."""


@dataclass(frozen=True)
class ProjectionOptions:
    """dimension: features k. whitening: w of (variance)^(−w/2), 0 none, 1 all. images: how many to fit on.

    flip: an image's directions are the mean over it and its mirror image, so that both have the same features.
    """

    dimension: int = 2000
    whitening: float = 0.8
    images: int = 4000
    flip: bool = False

    def __post_init__(self) -> None:
        whole("model.body.dimension", self.dimension, 1)
        whole("model.body.images", self.images, 100)
        in_range("model.body.whitening", self.whitening, 0, 1)
        if not isinstance(self.flip, bool):
            raise wrong("model.body.flip", self.flip, "true or false")


class Projection(nn.Module):
    """Maps (b, channels, positions) -> features (b, k) of length 1. Its buffers are empty until it is fitted."""

    mean: Tensor
    scale: Tensor
    channels: Tensor
    positions: Tensor
    chosen: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "scale", "channels", "positions", "chosen", "weight"):
            self.register_buffer(name, torch.zeros(0))

    def forward(self, *views: Tensor) -> Tensor:
        """views: maps of an image, and of its mirror image where features are of both."""
        return unit(self._mean(views)[:, self.chosen] * self.weight)

    def _mean(self, views: Sequence[Tensor]) -> Tensor:
        return cast(Tensor, sum(self._directions(maps) for maps in views)) / len(views)

    def _standard(self, maps: Tensor) -> Tensor:
        return unit(((maps - self.mean) * self.scale).flatten(1)).view_as(maps)

    def _directions(self, maps: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(self.channels, self._standard(maps)), self.positions).flatten(1)

    def fit(self, views: Sequence[Tensor], options: ProjectionOptions) -> None:
        """Fit on maps (n, channels, positions) of synthetic images; a second entry: of their mirror images."""
        maps = views[0]
        self.mean = maps.mean(0)
        self.scale = 1 / (maps.std(0) + FLATTEST)
        parts = maps.split(BLOCK)
        centre = sum(self._standard(part).sum(0) for part in parts) / len(maps)
        among, places = (
            _products((self._standard(part) - centre).transpose(1, 2 if over else 1).flatten(0, 1) for part in parts)
            for over in (True, False)
        )
        across, along = torch.linalg.eigh(among)[1], torch.linalg.eigh(places)[1]
        self.channels, self.positions = _signed(across).T.float().contiguous(), _signed(along).float().contiguous()
        pairs = list(zip(*(view.split(BLOCK) for view in views)))
        shift = self._mean(pairs[0]).mean(0)  # for the sake of the subtraction's accuracy
        sums = cast(Tensor, sum(_sums(self._mean(pair) - shift) for pair in pairs)) / len(maps)
        found = sums[1] - sums[0].square()
        variance, order = found.float().clamp_min(0).sort(descending=True)
        kept = order[: options.dimension]
        used, rows = torch.unique(kept // maps.shape[2], return_inverse=True)
        self.channels, self.chosen = self.channels[used].contiguous(), rows * maps.shape[2] + kept % maps.shape[2]
        variance = variance[: options.dimension]
        self.weight = (variance + SHRUNK * variance[-1]).pow(-options.whitening / 2)


def fitted_maps(body: nn.Module, images: Tensor) -> Tensor:
    """Maps of synthetic images (n, channels, positions), in blocks."""
    with torch.no_grad():
        few = body(images[:1])
        found: Tensor = few.new_empty(len(images), *few.shape[1:])
        for start in range(0, len(images), BLOCK):
            told("dictionary from random images", start, len(images))
            found[start : start + BLOCK] = body(images[start : start + BLOCK])
    told("dictionary from random images", len(images), len(images))
    return found


def unit(rows: Tensor) -> Tensor:
    """Rows (b, n) of length 1."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-9)
    return rows / length


def _products(parts: Iterable[Tensor]) -> Tensor:
    """Σ xᵀx of matrices x (n, d), in float64."""
    return cast(Tensor, sum(part.T.double() @ part.double() for part in parts))


def _sums(rows: Tensor) -> Tensor:
    """Sums of rows (n, d) and of their squares, float64 ``(2, d)``."""
    return torch.stack([rows.double().sum(0), rows.double().square().sum(0)])


def _signed(vectors: Tensor) -> Tensor:
    """Eigenvectors as columns, from the largest eigenvalue on, each with its largest entry positive."""
    vectors = vectors.flip(1)
    largest = vectors.abs().argmax(0, keepdim=True)
    signs: Tensor = vectors.gather(0, largest).sign()
    return vectors * signs
