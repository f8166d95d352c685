"""Wavelet scattering: wavelets of several scales and angles, modulus, wavelets, local means (Bruna and Mallat 2013).

The filters are kymatio's (Andreux et al. 2020). Its own transform goes path by path through
a block of images; here it is one image and all angles at once, so that no image's bits follow from another's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import whole, wrong
from fedflat.models.representation.patches import pooling

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
        """Means of what has the spectrum ``known`` (c, paths, …) at a level: (c, paths, positions)."""
        smooth = _thinned(known * getattr(self, f"mean{level}"), 2 ** (self.scales - level))
        found: Tensor = torch.fft.ifft2(smooth).real[..., 1:-1, 1:-1].flatten(-2)
        return found


def _modulus(known: Tensor, waves: Tensor, step: int) -> Tensor:
    """The spectrum of |x ∗ ψ| for every wavelet, at every ``step``-th pixel."""
    found: Tensor = torch.fft.fft2(torch.fft.ifft2(_thinned(known * waves, step)).abs())
    return found


def _thinned(spectrum: Tensor, step: int) -> Tensor:
    """The spectrum of every ``step``-th pixel, where its filter is divided by step²."""
    for axis in (-1, -2):
        spectrum = functools.reduce(torch.add, spectrum.chunk(step, axis))
    return spectrum


def _filters(levels: Sequence[Any], thinned: int) -> Tensor:
    """Filters in Fourier space (n, rows, columns), after which every 2^thinned-th pixel is kept."""
    found: Tensor = torch.stack([torch.from_numpy(level) for level in levels]).float() / 4**thinned
    return found


def _bank(padded: list[int], options: ScatteringOptions) -> Any:
    return importlib.import_module(BANK).filter_bank(*padded, options.scales, options.angles)
