"""Noise that later rounds partly take back: round t adds std·(row t of C⁻¹)·Z, with one Z for the whole run.

Row i of Z comes from the named stream of round i, and every round draws again the rows that it needs: t + 1 draws of d
numbers in round t, while clients train, and nothing to keep, so that a run that was killed goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.core.discrete import SecureBits, rounded_gaussian
from fedflat.core.factors import PLACES, Factor, identity
from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Broadcast
from fedflat.pieces.mechanisms import GaussianNoise
from fedflat.pieces.secure import GridGaussian, GridNoise

PIECE = 1 << 16
"""Numbers drawn at a time."""
CHUNK = 1 << 12
"""Coordinates whose exact rows are made together; part of the streams' names, so it never changes."""
MOST_BITS = 40 - PLACES
"""Of the grid: Z is drawn 2^16 times finer, and the exact sampler goes to 2^40."""


@dataclass(frozen=True)
class CorrelatedNoise:
    """Rows of C⁻¹Z on the rounds' sums, for a server that adds the noise. std: of Z on the sum, C_clip ↦ σ·s."""

    std: Callable[[float], float]
    factor: Factor

    def total_std(self, bound: float, participants: float) -> float:
        """Std of Z on the sum; that of round t's noise is ``row_norm(t)`` times as much."""
        return self.std(bound)

    def row_norm(self, round: int) -> float:
        """‖row t of C⁻¹‖₂."""
        return float(self.factor.row_norms[round])

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """Row t of C⁻¹Z, float32 ``(size,)``, for Z of std 1."""
        total = np.zeros(size)
        for i, weight in enumerate(self.factor.inverse[round, : round + 1]):
            generator = stream(key, "noise", i)
            for start in range(0, size if weight else 0, PIECE):
                part = total[start : start + PIECE]
                part += weight * generator.standard_normal(len(part), dtype=np.float32)
        return torch.from_numpy(total.astype(np.float32))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Noise ``(d,)`` float32; confined to the common mask if the round has one."""
        size = aggregate.total.numel()
        unit = torch.zeros(size) if self.std(bound) == 0 else self.unit(key, round, size)
        return self.scaled(unit, broadcast, aggregate, bound)

    def scaled(self, unit: Tensor, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The noise of a round from its ``unit``, which is overwritten.

        Leaving out what a public mask leaves out is post-processing of the whole row.
        """
        return GaussianNoise(self.std).scaled(unit, broadcast, aggregate, bound)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Refused: the plan allows no adaptive clip with correlated noise."""
        raise wrong("privacy.clip", "adaptive", "one constant clip with correlated noise")


@dataclass(frozen=True)
class CorrelatedGridNoise(GridNoise):
    """The same for ``privacy.secure_rng``: whole-number sums X, and exact samples on a grid that hide no low bits.

    Released is R_t = X_t + y_t in grid steps, y_t = ⌊(Ẑ_t − Σ_j 2¹⁶C[t, t−j]·y_{t−j}) / 2¹⁶C[t, t]⌉ in whole numbers,
    with Ẑ_t = ⌊2¹⁶Z_t⌉ an exact rounded Gaussian and 2¹⁶C whole. Since 2¹⁶C·X is whole, Ẑ + 2¹⁶C·X = ⌊2¹⁶(Z + CX)⌉, and
    by induction R_t = ⌊(⌊2¹⁶(Z + CX)_t⌉ − Σ_j 2¹⁶C[t, t−j]·R_{t−j}) / 2¹⁶C[t, t]⌉: a function of CX + Z alone. So the
    release is post-processing of the continuous mechanism, at its ε.
    """

    factor: Factor = field(default_factory=lambda: identity(1))

    def row_norm(self, round: int) -> float:
        """‖row t of C⁻¹‖₂, but for rounding."""
        return float(self.factor.row_norms[round])

    def grid(self, bound: float, dimension: int) -> GridGaussian:
        """The public grid of a round, on which Z has std 2^bits with at most ``MOST_BITS`` bits."""
        made = super().grid(bound, dimension)
        return GridGaussian(bound, made.std, dimension, min(made.log2_std, MOST_BITS))

    def _steps(self, key: bytes, broadcast: Broadcast, count: int, grid: GridGaussian) -> NDArray[np.int64]:
        drawn = np.concatenate(
            [
                self._rows(key, broadcast.round, grid.log2_std, number, min(CHUNK, grid.dimension - number * CHUNK))
                for number in range(-(-grid.dimension // CHUNK))
            ]
        )
        if broadcast.mask is not None:
            drawn[~broadcast.mask.cpu().numpy()] = 0
        return drawn

    def _rows(self, key: bytes, round: int, log2_std: int, number: int, size: int) -> NDArray[np.int64]:
        """y_round of one chunk of coordinates: rows 0 to ``round`` one after the other, as many kept as C has bands."""
        entries = np.rint(self.factor.columns * 2.0**PLACES).astype(np.int64)
        bands, kept = self.factor.bands, np.zeros((self.factor.bands, size), dtype=np.int64)
        for t in range(round + 1):
            source = SecureBits(key, "correlated noise", t, number)
            left = rounded_gaussian(log2_std + PLACES, size, source)
            for j in range(1, min(bands, t + 1)):
                left -= entries[t - j, j] * kept[(t - j) % bands]
            kept[t % bands] = (2 * left + entries[t, 0]) // (2 * entries[t, 0])
        found: NDArray[np.int64] = kept[round % bands]
        return found.copy()
