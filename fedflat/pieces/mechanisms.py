"""Draw a round's noise, plainly or on a grid that withstands floating-point attacks.

Floating-point noise leaves holes and uneven gaps that give the noiseless sum away (Mironov 2012; Haney et al. 2022
"Precision-based attacks and interval refining"; Holohan and Braghin 2021). Here clients' vectors are whole multiples
of a grid step g, their norm is bounded in whole-number arithmetic, their sum is exact, and the noise is an exact
sample of the *rounded* Gaussian ⌊N(0, (std/g)²)⌉. Since ⌊s + Z⌉ = s + ⌊Z⌉ for whole s, the released number is
post-processing of the continuous Gaussian mechanism with sensitivity ≤ C and the same std: the plain Gaussian's
accounting (tight privacy-loss distribution, Poisson amplification included) holds without change, in any dimension.

Covered: `central` (one noise on the sum) and `local` (each message by itself). Not `distributed`: a sum of rounded
shares is no function of the sum of continuous shares; use the distributed discrete Gaussian there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedflat.core import Aggregate, Broadcast, Encode, Mechanism, in_background, in_range, stream
from fedflat.core.discrete import Floats, Integers, SecureBits, Source, exact_square, rounded_gaussian


def gaussian(size: int, std: float, generator: np.random.Generator) -> Tensor:
    """N(0, std² I) as a float32 vector ``(size,)``; exactly zero for std = 0.

    >>> gaussian(3, 2.0, np.random.default_rng(0)).dtype, gaussian(2, 0.0, np.random.default_rng(0))
    (torch.float32, tensor([0., 0.]))
    """
    if std == 0:
        return torch.zeros(size)
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32)).mul_(std)


@dataclass(frozen=True)
class _OnTheSum(Mechanism):
    """What plain and secure Gaussian noise have in common.

    std: the plan's function from the clip's bound C to the std of the noise. trust: in law the same total as the
    parties of the trust model add together — central: the server adds N(0, std²); distributed: each of n
    participants adds N(0, std²/min_cohort), n/min_cohort·std² in total; local: each of n adds N(0, std²), n·std² in
    total. min_cohort: the minimum cohort. count_std: σ_b of the adaptive clip's count, 0 if there is none.
    """

    std: Callable[[float], float]
    trust: str = "central"
    min_cohort: float = 1.0
    count_std: float = 0.0

    def total_std(self, bound: float, participants: float) -> float:
        """Return the std of everything that is added to the sum when ``participants`` clients take part, but for what
        is rounded to a grid.
        """
        shares = {"central": 1.0, "distributed": participants / self.min_cohort, "local": participants}[self.trust]
        return self.std(bound) * math.sqrt(shares)


@dataclass(frozen=True)
class GaussianNoise(_OnTheSum):
    """Gaussian noise on the sum, drawn once from the noise key's stream of the round.

    drawn: waits for the one round's ``unit`` that is drawn ahead, which is then overwritten.
    """

    drawn: Callable[[], Tensor] | None = None

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """N(0, I) ``(size,)`` of a round: what ``noise`` multiplies with the std."""
        return gaussian(size, 1.0, stream(key, "noise", round))

    def drawn_ahead(self, key: bytes, round: int, size: int) -> Self:
        """Return the noise of one round, whose ``unit`` a thread draws from now on; its std comes with the cohort."""
        return replace(self, drawn=in_background(lambda: self.unit(key, round, size)))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the noise ``(d,)`` float32; confined to the common mask if the round has one."""
        size, std = aggregate.total.numel(), self.total_std(bound, aggregate.count)
        unit = torch.zeros(size) if std == 0 else self.drawn() if self.drawn else self.unit(key, round, size)
        noise = unit.mul_(std)
        # Sound: a common mask is drawn before, and without, the round's private data.
        return noise if broadcast.mask is None else torch.where(broadcast.mask, noise, torch.zeros_like(noise))

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Return the adaptive clip's centred count with N(0, σ_b²), as the plan accounts it; distributed:
        n/min_cohort·σ_b² of it, as for the sum.
        """
        shares = aggregate.count / self.min_cohort if self.trust == "distributed" else 1.0
        noise = float(stream(key, "count noise", round).standard_normal() * self.count_std)
        return aggregate.bits + noise * math.sqrt(shares)


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

    def _quantize_one(self, row: Floats) -> Integers:
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


@dataclass(frozen=True)
class GridNoise(_OnTheSum):
    """`privacy.secure_rng: true` for central and local trust: whole-number sums, exact rounded Gaussian noise.

    Under local trust every one of the n messages carries its own noise, so that n independent draws are added.
    """

    def grid(self, bound: float, dimension: int) -> GridGaussian:
        """Return the public grid of a round whose messages have norm ≤ ``bound``."""
        return GridGaussian(bound, self.std(bound), dimension)

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float, size: int) -> tuple[Encode, float]:
        """Return what rounds a round's clipped messages to the grid, each within its norm limit, and the pitch."""
        grid = self.grid(bound, size)
        return lambda clipped: grid.quantize(clipped).sum(0), grid.pitch

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the noisy sum, float32 `(d,)`; every value is a whole number of grid steps."""
        grid = self.grid(bound, aggregate.total.numel())
        exact = np.zeros(grid.dimension, dtype=np.int64) if aggregate.exact is None else aggregate.exact
        return grid.to_float(exact + self._steps(key, broadcast, aggregate.count, grid))

    def _steps(self, key: bytes, broadcast: Broadcast, count: int, grid: GridGaussian) -> Integers:
        """Return the noise in grid steps, confined to the common mask if there is one (it never depends on the round's
        data).
        """
        mask = None if broadcast.mask is None else broadcast.mask.cpu().numpy()
        # Noise is drawn only where the mask lets it out: the exact sampler is slow.
        drawn = np.zeros(grid.dimension if mask is None else int(mask.sum()), dtype=np.int64)
        for number in [()] if self.trust == "central" else [(client,) for client in range(count)]:
            drawn = grid.perturb(drawn, SecureBits(key, "noise", broadcast.round, *number))
        if mask is None:
            return drawn
        spread = np.zeros(grid.dimension, dtype=np.int64)
        spread[mask] = drawn
        return spread

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Return the adaptive clip's count: each centred bit ±½ on a grid of its own, so that no low bits tell the
        count.
        """
        signed = np.rint([2 * aggregate.bits]).astype(np.int64)  # Σ(b_i − ½) in halves: inside less outside
        if self.count_std == 0:
            return 0.5 * int(signed[0])
        grid = GridGaussian(0.5, self.count_std, 1)
        # Each bit is ±½ on the grid, so the sum of bits is on it as well.
        half = grid.quantize(torch.tensor([0.5]))
        return float(grid.perturb(signed * half, SecureBits(key, "count noise", round))[0] * grid.pitch)
