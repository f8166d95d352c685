"""Noise for `privacy.secure_rng: true` that withstands floating-point attacks, at the plain Gaussian's ε.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.core.checks import in_range, whole
from fedflat.core.discrete import SecureBits, Source, exact_square, rounded_gaussian
from fedflat.core.types import Aggregate, Broadcast

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


@dataclass
class GridSum:
    """The exact sum of quantised messages of one round. ``total`` int64 ``(d,)`` in grid steps.

    >>> total = GridSum(GridGaussian(clip=1.0, std=0.5, dimension=2))
    >>> total.add(torch.tensor([[0.5, 0.0], [0.25, 0.25]]))
    >>> total.value()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    grid: GridGaussian
    total: Integers = field(init=False)

    def __post_init__(self) -> None:
        self.total = np.zeros(self.grid.dimension, dtype=np.int64)

    def add(self, clipped: Tensor) -> None:
        """Clipped messages `(n, d)`, each rounded to the grid and kept within the norm limit, are added."""
        self.total += self.grid.quantize(clipped).sum(0)

    def value(self) -> Tensor:
        """The sum in the update's units, float64 `(d,)`: what noise is added to."""
        return torch.from_numpy(self.total * self.grid.pitch)


@dataclass(frozen=True)
class GridNoise:
    """`privacy.secure_rng: true` for central and local trust: whole-number sums, exact rounded Gaussian noise.

    std, trust and count_std as in `GaussianNoise`: the plan's std function, and σ_b of the adaptive clip's count. Under
    local trust every one of the n messages carries its own noise, so that n independent draws are added.
    """

    std: Callable[[float], float]
    trust: str = "central"
    count_std: float = 0.0

    def total_std(self, bound: float, participants: float) -> float:
        """Std of everything that is added to the sum when ``participants`` clients take part, but for its rounding."""
        return self.std(bound) * (math.sqrt(participants) if self.trust == "local" else 1.0)

    def grid(self, bound: float, dimension: int) -> GridGaussian:
        """The public grid of a round whose messages have norm ≤ ``bound``."""
        return GridGaussian(bound, self.std(bound), dimension)

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float, size: int) -> GridSum:
        """What adds up a round's clipped messages."""
        return GridSum(self.grid(bound, size))

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The noisy sum, float32 `(d,)`; every value is a whole number of grid steps."""
        grid = self.grid(bound, aggregate.total.numel())
        exact = np.zeros(grid.dimension, dtype=np.int64) if aggregate.exact is None else aggregate.exact
        return grid.to_float(exact + self._steps(key, broadcast, aggregate.count, grid))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The noise alone, as `release` draws it, float32 `(d,)`."""
        grid = self.grid(bound, aggregate.total.numel())
        return grid.to_float(self._steps(key, broadcast, aggregate.count, grid))

    def _steps(self, key: bytes, broadcast: Broadcast, count: int, grid: GridGaussian) -> Integers:
        """Noise in grid steps, confined to the common mask if there is one (it never depends on the round's data)."""
        mask = None if broadcast.mask is None else broadcast.mask.cpu().numpy()
        size = grid.dimension if mask is None else int(mask.sum())
        drawn = np.zeros(size, dtype=np.int64)
        for number in [()] if self.trust == "central" else [(client,) for client in range(count)]:
            drawn = grid.perturb(drawn, SecureBits(key, "noise", broadcast.round, *number))
        if mask is None:
            return drawn
        spread = np.zeros(grid.dimension, dtype=np.int64)
        spread[mask] = drawn
        return spread

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """The adaptive clip's count: each centred bit ±½ on a grid of its own, so that no low bits tell the count."""
        signed = np.array([round_half(aggregate.bits)], dtype=np.int64)
        if self.count_std == 0:
            return 0.5 * int(signed[0])
        grid = GridGaussian(0.5, self.count_std, 1)
        half = grid.quantize(torch.tensor([0.5]))
        return float(grid.perturb(signed * half, SecureBits(key, "count noise", round))[0] * grid.pitch)


def round_half(bits: float) -> int:
    """Σ(b_i − ½) in halves: how many are inside less how many are outside, a whole number.

    >>> round_half(-1.5)
    -3
    """
    return int(np.rint(2 * bits))
