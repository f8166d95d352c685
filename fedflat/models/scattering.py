"""Compute wavelet scattering maps, and project maps to features by public numbers alone.

The filters are kymatio's (Andreux et al. 2020). Its own transform goes path by path through
a block of images; here it is one image and all angles at once, so that no image's bits follow from another's.

All of it is fitted on random-process images. Directions are products of one over channels and one over positions, so
that what is stored is small: channels² + positions², and not their product's square.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import in_range, whole, wrong
from fedflat.core.process import report_progress
from fedflat.models.patches import pooling

# Not kymatio.torch: it imports the 3-D transform too, which asks for a function that SciPy has no more.
BANK = "kymatio.scattering2d.filter_bank"


@dataclass(frozen=True)
class ScatteringOptions:
    """scales: J; means are over about 2^J pixels. angles: L. order: 1 or 2 moduli. cells: the side of the grid that the
    means are averaged over further; None: it is not.
    """

    scales: int = 2
    angles: int = 8
    order: int = 2
    cells: int | None = None

    def __post_init__(self) -> None:
        for name in ("scales", "angles", "order"):
            whole(f"model.body.{name}", getattr(self, name), 1, 2 if name == "order" else None)
        if self.cells is not None:
            whole("model.body.cells", self.cells, 1)


class Scattering(nn.Module):
    """Images (b, c, h, w) -> maps (b, c·P, positions), P = 1 + J·L + L²·J(J − 1)/2 paths of order 2. Buffers only."""

    pool: Tensor | None

    def __init__(self, shape: tuple[int, int, int], options: ScatteringOptions) -> None:
        super().__init__()
        self.scales, self.order = options.scales, options.order
        step, sides = 2**options.scales, shape[1:]
        if min(sides) < max(step + 1, step * (options.cells or 1)):
            least = max(step + 1, step * (options.cells or 1))
            raise wrong(
                "model.body", f"images of {sides[0]} × {sides[1]}", f"at least {least} × {least}, or fewer scales"
            )
        padded = [(side // step + 2) * step for side in sides]
        self.around = [more for side, to in zip(sides, padded) for more in ((to - side) // 2, (to - side + 1) // 2)]
        self.around = self.around[2:] + self.around[:2]
        bank = _bank(padded, options)
        for at, level in enumerate(bank["phi"]["levels"]):
            self.register_buffer(f"mean{at}", _filters([level], options.scales - at))
        for j in range(options.scales):
            angles = [one["levels"] for one in bank["psi"] if one["j"] == j]
            for at, levels in enumerate(zip(*angles)):
                self.register_buffer(f"wave{j}_{at}", _filters(levels, j - at))
        rows, columns = (to // step - 2 for to in padded)
        self.register_buffer("pool", pooling(rows, columns, options.cells) if options.cells else None)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._maps(image) for image in images])

    def _maps(self, image: Tensor) -> Tensor:
        """Of one image (c, h, w): its means by path, ``(c·P, positions)``."""
        known = torch.fft.fft2(F.pad(image[None], self.around, mode="reflect")[0])[:, None]
        found = [self._means(known, 0)]
        for j in range(self.scales):
            first = _modulus(known, getattr(self, f"wave{j}_0"), 2**j)
            found.append(self._means(first, j))
            for k in range(j + 1, self.scales if self.order == 2 else 0):
                second = _modulus(first[:, :, None], getattr(self, f"wave{k}_{j}"), 2 ** (k - j))
                found.append(self._means(second.flatten(1, 2), k))
        paths = torch.cat(found, 1).flatten(0, 1)
        return paths if self.pool is None else paths @ self.pool

    def _means(self, known: Tensor, level: int) -> Tensor:
        """Return the means of what has the spectrum ``known`` (c, paths, …) at a level: (c, paths, positions)."""
        smooth = _thinned(known * getattr(self, f"mean{level}"), 2 ** (self.scales - level))
        found: Tensor = torch.fft.ifft2(smooth).real[..., 1:-1, 1:-1].flatten(-2)
        return found


def _modulus(known: Tensor, waves: Tensor, step: int) -> Tensor:
    """Return the spectrum of |x ∗ ψ| for every wavelet, at every ``step``-th pixel."""
    found: Tensor = torch.fft.fft2(torch.fft.ifft2(_thinned(known * waves, step)).abs())
    return found


def _thinned(spectrum: Tensor, step: int) -> Tensor:
    """Return the spectrum of every ``step``-th pixel, where its filter is divided by step²."""
    for axis in (-1, -2):
        spectrum = functools.reduce(torch.add, spectrum.chunk(step, axis))
    return spectrum


def _filters(levels: Sequence[Any], thinned: int) -> Tensor:
    """Return the filters in Fourier space (n, rows, columns), after which every 2^thinned-th pixel is kept."""
    found: Tensor = torch.stack([torch.from_numpy(level) for level in levels]).float() / 4**thinned
    return found


def _bank(padded: list[int], options: ScatteringOptions) -> Any:
    return importlib.import_module(BANK).filter_bank(*padded, options.scales, options.angles)


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
    """Return the maps of synthetic images (n, channels, positions), in blocks."""
    with torch.no_grad():
        few = body(images[:1])
        found: Tensor = few.new_empty(len(images), *few.shape[1:])
        for start in range(0, len(images), BLOCK):
            report_progress("making the dictionary, random image", start, len(images))
            found[start : start + BLOCK] = body(images[start : start + BLOCK])
    report_progress("making the dictionary, random image", len(images), len(images))
    return found


def unit(rows: Tensor) -> Tensor:
    """Return the rows (b, n) of length 1."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-9)
    return rows / length


def _products(parts: Iterable[Tensor]) -> Tensor:
    """Σ xᵀx of matrices x (n, d), in float64."""
    return cast(Tensor, sum(part.T.double() @ part.double() for part in parts))


def _sums(rows: Tensor) -> Tensor:
    """Return the sums of rows (n, d) and of their squares, float64 ``(2, d)``."""
    return torch.stack([rows.double().sum(0), rows.double().square().sum(0)])


def _signed(vectors: Tensor) -> Tensor:
    """Eigenvectors as columns, from the largest eigenvalue on, each with its largest entry positive."""
    vectors = vectors.flip(1)
    largest = vectors.abs().argmax(0, keepdim=True)
    signs: Tensor = vectors.gather(0, largest).sign()
    return vectors * signs
