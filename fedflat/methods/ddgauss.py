"""Encode and decode messages of the distributed discrete Gaussian mechanism.

Kairouz et al. 2021, algorithms 1 and 2. A client calls `encode`; anybody may add messages modulo 2^b (secure
aggregation does); the server calls `decode`. The ε is in `fedflat.privacy.accounting.discrete`.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.core import Aggregate, Broadcast, Encode, Mechanism, discrete, in_range, require, stream, whole, wrong
from fedflat.core.discrete import MAX_SIGMA, MIN_SHARE_STD, SecureBits, ShareNumbers, Source

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_TRIES = 1000


def hadamard(vector: Floats) -> Floats:
    """Orthonormal Walsh-Hadamard transform of a float64 vector whose length is a power of two; its own inverse."""
    x = vector.copy()
    size = x.size
    step = 1
    while step < size:
        pairs = x.reshape(-1, 2, step)
        top = pairs[:, 0] + pairs[:, 1]
        np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
        pairs[:, 0] = top
        step *= 2
    x /= math.sqrt(size)
    return x


@dataclass(frozen=True, kw_only=True)
class DistributedDiscreteGaussian(ShareNumbers):
    """The mechanism; every party holds the same value. Raises InputError where a share is too fine for the grid, too
    (std < γ/2).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("clip/granularity", self.clip / self.granularity, 2.0**-20, 2.0**48)
        share = math.sqrt(self.share_variance)
        allowed = f"fewer: a share's noise has std {share:.3g} grid steps, of {MAX_SIGMA:.3g} at most"
        require(share <= MAX_SIGMA, "algorithm.bits", self.bits, allowed)
        if self.noise_multiplier > 0 and share < MIN_SHARE_STD:
            need = f"{MIN_SHARE_STD} are needed: use more bits or a finer one."
            hint = f"One share has std {share:.2g} grid steps, {need}"
            raise wrong("granularity", self.granularity, "a pitch of at most twice a share's std", hint=hint)

    @property
    def norm_limit(self) -> int:
        """⌊(Δ₂/γ)²⌋: the largest squared norm, in grid steps, of an encoded update before noise."""
        return math.floor((Fraction(self.bound) / Fraction(self.granularity)) ** 2)

    @property
    def share_variance(self) -> Fraction:
        """Parameter σ² of one client's discrete Gaussian, in grid steps: (σC/γ)²/min_cohort."""
        std = Fraction(self.noise_multiplier) * Fraction(self.clip) / Fraction(self.granularity)
        return std**2 / self.min_cohort

    def signs(self, public: np.random.Generator) -> Floats:
        """`(d',)` random signs ±1 of the round's rotation; every party draws them from the same public stream."""
        return 1.0 - 2.0 * public.integers(0, 2, size=self.padded).astype(np.float64)

    def round_to_grid(self, update: Tensor, signs: Floats, rounding: Source) -> Integers:
        """Update `(d,)` -> rotated whole numbers `(d',)` with squared norm at most `norm_limit`, before noise.

        Clips to C again and maps a non-finite update to zero, so the limit holds whatever is passed in.
        """
        flat = update.detach().cpu().to(torch.float64).numpy()
        require(flat.shape == (self.dimension,), "shape of the update", list(flat.shape), f"[{self.dimension}]")
        if not np.isfinite(flat).all():
            return np.zeros(self.padded, dtype=np.int64)
        largest = float(np.abs(flat).max(initial=0.0))
        if largest > 0:  # two steps, because the square of a huge entry overflows
            norm = largest * float(np.linalg.norm(flat / largest))
            flat = flat if norm <= self.clip else (flat / largest) * (self.clip / (norm / largest))
        padded = np.zeros(self.padded)
        padded[: self.dimension] = flat
        return self._round(hadamard(padded * signs) / self.granularity, rounding)

    def _round(self, scaled: Floats, rounding: Source) -> Integers:
        """Unbiased random rounding, repeated until the norm is within the limit (exact whole-number comparison)."""
        floor = np.floor(scaled)
        part = scaled - floor
        base = floor.astype(np.int64)
        for _ in range(MAX_TRIES):
            # 53 bits of a word, exact in a double.
            uniform = (discrete.random_words(rounding, part.size) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            rounded: Integers = base + (uniform < part)
            if discrete.exact_square(rounded) <= self.norm_limit:
                return rounded
        # Only a norm pushed over C by rounding errors gets here; towards zero the norm can only shrink.
        inward = np.trunc(scaled * (1 - 1e-9)).astype(np.int64)
        return inward if discrete.exact_square(inward) <= self.norm_limit else np.zeros_like(inward)

    def shares(self, count: int, noise: Source) -> Integers:
        """`count` noise shares at once, `(d',)` in grid steps: one discrete Gaussian of `count` times the parameter.

        A client draws one; the server tops a sum up, and a simulation noises a whole cohort, with one draw of many.
        That law is within the account's τ of the sum of single shares, and the account's proof covers either.
        """
        whole("shares", count, 0)
        return discrete.discrete_gaussian(count * self.share_variance, self.padded, noise)

    def encode(self, update: Tensor, signs: Floats, rounding: Source, noise: Source) -> Integers:
        """Client: update `(d,)` -> message `(d',)` int64 in [0, 2^bits). `rounding`, `noise`: private sources."""
        return self.wrap(self.round_to_grid(update, signs, rounding) + self.shares(1, noise))

    def wrap(self, values: Integers) -> Integers:
        """Return the whole numbers modulo 2^bits, in [0, 2^bits)."""
        return values & ((1 << self.bits) - 1)

    def decode(self, total: Integers, signs: Floats) -> Tensor:
        """Server: sum modulo 2^bits `(d',)` -> float32 `(d,)`, the noisy sum of clipped updates in their units."""
        half = 1 << (self.bits - 1)
        centred = (self.wrap(total) ^ half) - half  # [0, 2^b) -> [−2^(b−1), 2^(b−1))
        values = hadamard(centred.astype(np.float64)) * signs * self.granularity
        return torch.from_numpy(values[: self.dimension].astype(np.float32))


@dataclass(frozen=True)
class SharedDiscreteNoise(Mechanism):
    """The distributed discrete Gaussian as a round's mechanism.

    seed: public, of the rotation. shares: drawn for each released sum: n_max, or what clients' own lack of it. secure:
    rounding and noise from the noise key's AES stream instead of Philox.
    """

    mechanism: DistributedDiscreteGaussian
    seed: int
    shares: int
    secure: bool = False

    def longest(self, bound: float) -> float:
        """Norm that no encoded message exceeds before its noise: rounding may lengthen one beyond C."""
        return math.sqrt(self.mechanism.norm_limit) * self.mechanism.granularity

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float, size: int) -> tuple[Encode, None]:
        """Return what rotates, rounds and reduces a round's clipped messages; their noise comes with the release.

        A message's rounding bits follow from the key, its own numbers, and how many equal ones came before it: by its
        place among all, one client's coin would round everybody behind it anew. No pitch: without noise the modular sum
        is nobody's to read; diagnostics use the plain clipped sum.
        """
        signs, mechanism, equal = self._signs(broadcast), self.mechanism, Counter[int]()

        def encode(clipped: Tensor) -> Integers:
            total = np.zeros(mechanism.padded, dtype=np.int64)
            for message in clipped:
                fingerprint = int.from_bytes(hashlib.sha256(message.cpu().numpy().tobytes()).digest())
                bits = self._source(key, "rounding", broadcast.round, fingerprint, equal[fingerprint])
                equal[fingerprint] += 1
                total += mechanism.wrap(mechanism.round_to_grid(message, signs, bits))
            return total

        return encode, None

    def message(self, update: Tensor, broadcast: Broadcast, key: bytes) -> Integers:
        """Return a client's update as whole numbers with its share of noise. key: fresh, and of this message alone."""
        bits = (SecureBits(key, purpose) for purpose in ("rounding", "noise share"))
        return self.mechanism.encode(update, self._signs(broadcast), *bits)

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the decoded noisy sum, float32 `(d,)`."""
        # An empty round is released too: zero and its noise.
        total = np.zeros(self.mechanism.padded, dtype=np.int64) if aggregate.exact is None else aggregate.exact
        # So many further shares that every release carries n_max of them (see the account).
        noise = self.mechanism.shares(self.shares, self._source(key, "noise", broadcast.round))
        return self.mechanism.decode(total + noise, self._signs(broadcast))

    def _signs(self, broadcast: Broadcast) -> Floats:
        return self.mechanism.signs(stream(self.seed, "rotation", broadcast.round))

    def _source(self, key: bytes, purpose: str, *index: int) -> Source:
        return SecureBits(key, purpose, *index) if self.secure else stream(key, purpose, *index)
