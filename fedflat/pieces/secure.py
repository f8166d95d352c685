"""Noise for `privacy.secure: true` that withstands floating-point attacks, at the plain Gaussian's ε.

Floating-point noise leaves holes and uneven gaps that give the noiseless sum away (Mironov 2012; Haney et al. 2022
"Precision-based attacks and interval refining"; Holohan and Braghin 2021). Here clients' vectors are whole multiples
of a grid step g, their norm is bounded in whole-number arithmetic, their sum is exact, and the noise is an exact
sample of the *rounded* Gaussian ⌊N(0, (std/g)²)⌉. Since ⌊s + Z⌉ = s + ⌊Z⌉ for whole s, the released number is
post-processing of the continuous Gaussian mechanism with sensitivity ≤ C and the same std: the plain Gaussian's
accounting (tight privacy-loss distribution, Poisson amplification included) holds without change, in any dimension.

Covered: `central` (one noise on the sum) and `local` (each message by itself). Not `distributed`: a sum of rounded
shares is no function of the sum of continuous shares; use the distributed discrete Gaussian there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.core.checks import in_range, whole
from fedflat.core.discrete import Source, exact_square, rounded_gaussian

Integers = NDArray[np.int64]

MIN_BITS, MAX_BITS = 12, 30
ATTEMPTS = 16


@dataclass(frozen=True)
class GridGaussian:
    """The grid of one round: pitch g = std/2^bits, so that the noise has std 2^bits exactly, in grid steps.

    clip: C > 0 in L2 units. std: of the noise on the sum, σ·C > 0. dimension: d.
    bits: default the smallest in [12, 30] with √d·g/√12 ≤ C/16, so that rounding lengthens no vector at the clip by
    more than 0.2 % (what it lengthens is scaled back). Privacy holds for every choice. Raises InputError.
    """

    clip: float
    std: float
    dimension: int
    bits: int | None = None

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0, open_low=True)
        in_range("std of the noise", self.std, 0, open_low=True)
        whole("dimension", self.dimension, 1)
        if self.bits is not None:
            whole("bits of the noise grid", self.bits, 0, MAX_BITS)
        in_range("std/clip on the noise grid", self.std / self.clip, 2.0**-20, 2.0**20)

    @property
    def log2_std(self) -> int:
        """std in grid steps is 2^log2_std."""
        if self.bits is not None:
            return self.bits
        wanted = math.log2(16 * math.sqrt(self.dimension / 12) * self.std / self.clip)
        return min(MAX_BITS, max(MIN_BITS, math.ceil(wanted)))

    @property
    def pitch(self) -> float:
        """g in the update's units; exact, because 2^bits only shifts the exponent of std."""
        return math.ldexp(self.std, -self.log2_std)

    @property
    def norm_limit(self) -> int:
        """⌊(C/g)²⌋, the largest squared norm of a quantised vector; computed in rational arithmetic."""
        return math.floor((Fraction(self.clip) / Fraction(self.pitch)) ** 2)

    def quantize(self, updates: Tensor) -> Integers:
        """Clipped updates `(…, d)` -> whole numbers `(…, d)` of grid steps, each with squared norm ≤ `norm_limit`.

        Rounds to nearest; a vector beyond the limit is scaled inwards. Non-finite -> zero vector. Clipping first is the
        caller's business, but the limit holds whatever is passed in.
        """
        flat = updates.detach().cpu().to(torch.float64).numpy()
        rows = flat.reshape(-1, flat.shape[-1])
        out = np.stack([self._quantize_one(row) for row in rows]) if len(rows) else np.zeros(rows.shape, np.int64)
        return out.reshape(flat.shape)

    def _quantize_one(self, row: NDArray[np.float64]) -> Integers:
        if not np.isfinite(row).all():
            return np.zeros(row.shape, dtype=np.int64)
        # No entry of a vector within the limit exceeds C/g < 2^51: larger ones are cut before they overflow.
        reach = self.clip / self.pitch
        largest = float(np.abs(row).max(initial=0.0))
        if largest > self.clip:
            row = row / largest * self.clip
        scaled = row / self.pitch
        norm = float(np.linalg.norm(scaled))
        if norm > reach:
            scaled = scaled * (reach / norm)
        limit = self.norm_limit
        for attempt in range(ATTEMPTS):
            steps: Integers = np.rint(scaled).astype(np.int64)
            size = exact_square(steps)
            if size <= limit:
                return steps
            # Rounding again after a scaling is nearly unbiased; cutting towards zero would lose half a step each.
            scaled = scaled * (math.sqrt(limit / size) * (1 - 4.0 ** (attempt - ATTEMPTS)))
        cut: Integers = np.trunc(scaled * 0.5).astype(np.int64)
        return cut if exact_square(cut) <= limit else np.zeros_like(cut)

    def perturb(self, total: Integers, source: Source) -> Integers:
        """Sum of quantised vectors `(d,)` int64 -> the same plus exact rounded Gaussian noise of std 2^log2_std."""
        return total + rounded_gaussian(self.log2_std, total.size, source).reshape(total.shape)

    def to_float(self, released: Integers) -> Tensor:
        """Released whole numbers -> float32 in the update's units (post-processing)."""
        return torch.from_numpy((released.astype(np.float64) * self.pitch).astype(np.float32))
