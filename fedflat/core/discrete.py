"""Draw integer noise exactly: the discrete Gaussian, and the continuous Gaussian rounded to integers.

No floating-point number decides an outcome. Every accept step is "is this uniform number below that rational number?".
IEEE double arithmetic (+, −, ×, ÷ only) serves as a filter with a proven error far below its margin of 2^-34; the rare
comparison inside the margin is settled with whole-number arithmetic and as many further random bits as it takes.

Sources: Canonne et al. 2020 "The Discrete Gaussian for Differential Privacy" (algorithms 1-3);
Karney 2016 "Sampling Exactly from the Normal Distribution" (algorithm N). Running time depends on the values drawn:
timing is not protected.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedflat.core.checks import in_range, whole, wrong
from fedflat.core.rng import digest

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Enclosure = Callable[[int, int], tuple[Fraction, Fraction]]

MARGIN = 2.0**-34  # comparisons closer than this are settled in whole numbers
_SLACK = 2.0**-34  # far above the rounding error of any γ here
MIN_SIGMA, MAX_SIGMA = 2.0**-20, 2.0**40
MIN_SHARE_STD = 0.5  # in grid steps; below, nothing is known of a sum of discrete Gaussians
_CHUNK = 1 << 15


def inflated_bound(clip: float, granularity: float, padded: int, beta: float) -> float:
    """Return the largest norm after conditional randomised rounding to a grid of pitch γ, in the update's units.

    Δ₂ = min{√(C² + γ²d'/4 + √(2 ln(1/β))·γ(C + γ√d'/2)), C + γ√d'} (Kairouz et al. 2021, theorem 1); for β = 0
    the second term. The first holds with probability 1 − β for one rounding, hence the repetition.
    """
    root = math.sqrt(padded)
    worst = clip + granularity * root
    if beta == 0:
        return worst
    spread = math.sqrt(2 * math.log(1 / beta)) * granularity * (clip + granularity * root / 2)
    return min(math.sqrt(clip**2 + granularity**2 * padded / 4 + spread), worst)


@dataclass(frozen=True, kw_only=True)
class ShareNumbers:
    """What every party of the distributed discrete Gaussian agrees on: its mechanism and its account are made of it.

    dimension: d of the update. clip: C > 0, in L2 units of the update. noise_multiplier: σ: min_cohort shares have
    total std σC in the update's units (before the inflation of Δ₂, which accounting sees). min_cohort: honest shares
    that every released sum holds. granularity: γ, the size of one grid step. beta: of the conditional rounding.
    bits: modulus 2^bits. Raises InputError on impossible values.
    """

    dimension: int
    clip: float
    noise_multiplier: float
    min_cohort: int
    granularity: float
    beta: float = math.exp(-0.5)
    bits: int = 16

    def __post_init__(self) -> None:
        whole("dimension", self.dimension, 1)
        in_range("clip", self.clip, 0, open_low=True)
        in_range("noise_multiplier", self.noise_multiplier, 0)
        whole("cohort.min", self.min_cohort, 1)
        whole("bits", self.bits, 2, 48)
        in_range("beta", self.beta, 0, 1, open_high=True)
        in_range("granularity", self.granularity, 0, open_low=True)

    @property
    def padded(self) -> int:
        """d': d padded to a power of two; the length of a message."""
        return 1 << (self.dimension - 1).bit_length()

    @property
    def bound(self) -> float:
        """Δ₂: the largest norm of an encoded update before noise, in the update's units."""
        return inflated_bound(self.clip, self.granularity, self.padded, self.beta)


DEVIATIONS = 4.0
"""Standard deviations inside the modulus; one coordinate in 16,000 wraps, an error that does not show."""


def default_granularity(
    clip: float, noise_multiplier: float, dimension: int, min_cohort: int, messages: int, bits: int
) -> float:
    """Return the finest γ for which the sum stays inside ±2^(b−1)·γ up to `DEVIATIONS` standard deviations per
    coordinate.

    Per coordinate the rotated sum of n updates has variance at most (nC)²/d' (all equal), rounding adds nγ²/4 and noise
    n·(σC)²/min_cohort. Setting 2^b·γ = 2k·√(their sum) and solving for γ gives (KLS section 5, with the worst-case ρ):
    γ² = ((nC)²/d' + n(σC)²/min_cohort) / (4^b/(4k²) − n/4). A wrap is an error of the estimate, never of the privacy.
    """
    padded = 1 << (dimension - 1).bit_length()
    room = 4.0**bits / (4 * DEVIATIONS**2) - messages / 4
    if room <= 0:
        need = math.ceil(math.log2(DEVIATIONS * math.sqrt(messages))) + 1
        raise wrong("algorithm.bits", bits, f"at least {need} for sums of {messages} messages")
    signal = (messages * clip) ** 2 / padded
    return math.sqrt((signal + (messages * (noise_multiplier * clip) ** 2 / min_cohort)) / room)


def exact_square(values: Integers) -> int:
    """Return the squared norm Σv² as an exact whole number; entries up to 2^51 in size."""
    size = np.abs(values)
    high, low = size >> 26, size & ((1 << 26) - 1)
    total = 0
    for start in range(0, size.size, 1 << 10):  # so that no partial sum exceeds 2^63
        h, m = high[start : start + 1024], low[start : start + 1024]
        total += (int(h @ h) << 52) + (int(h @ m) << 27) + int(m @ m)
    return total


class SecureBits:
    """Uniform 64-bit words from an AES-256-CTR key stream, named like `fedflat.core.rng.stream`.

    `key`: the 32-byte noise key; `purpose` and `index` (round, client) name the stream. The same name gives the same
    words again, so a resumed run repeats its noise bit for bit; never use one name for two purposes.
    """

    def __init__(self, key: bytes, purpose: str, *index: int) -> None:
        if not isinstance(key, bytes) or len(key) < 32:
            raise wrong("noise key", f"{type(key).__name__} of length {len(key)}", "at least 32 bytes of entropy")
        name = digest(key, "secure bits/" + purpose, *index)
        self._cipher = Cipher(algorithms.AES256(name), modes.CTR(bytes(16))).encryptor()

    def integers64(self, count: int) -> Words:
        """Return the next `count` words of the key stream, shape `(count,)`."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


Source = np.random.Generator | SecureBits


def random_words(source: Source, count: int) -> Words:
    """`count` uniform 64-bit words from a NumPy generator (simulation) or from `SecureBits`."""
    if isinstance(source, np.random.Generator):
        return source.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)
    return source.integers64(count)


def _settle(word: int, divisor: int, enclose: Callable[[int], tuple[Fraction, Fraction]], source: Source) -> bool:
    """Exactly: is the uniform number that starts with the 64 bits `word` below γ/divisor, γ inside `enclose(…)`?"""
    bits = 64
    while True:
        low, high = (bound / divisor for bound in enclose(bits // 64))
        if Fraction(word + 1, 1 << bits) <= low:
            return True
        if Fraction(word, 1 << bits) >= high:
            return False
        # Too close to call with the bits so far: both sides get 64 more.
        word = (word << 64) | int(random_words(source, 1)[0])
        bits += 64


def _below(limit: Floats, settle: Callable[[int, int], bool], source: Source) -> Flags:
    """Bernoulli(limit), element by element; `settle(j, word)` decides element j when `limit` is too close to call."""
    words = random_words(source, limit.size)
    gap = limit - (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    hit = gap > 0
    # Once in 2^33 comparisons; everything else is settled by doubles.
    if gap.size and np.abs(gap).min() <= MARGIN:
        for j in np.flatnonzero(np.abs(gap) <= MARGIN):
            hit[j] = settle(int(j), int(words[j]))
    return hit


def _exp_of_unit(gamma: Floats, which: Integers, pieces: Integers, enclose: Enclosure, source: Source) -> Flags:
    """Bernoulli(exp(−γ)) for γ in [0, 1]: stop at the first failing Bernoulli(γ/k); accept if k is odd (CKS alg. 1)."""
    out = np.zeros(gamma.size, dtype=bool)
    alive = np.arange(gamma.size)
    k = 1

    def settle(j: int, word: int) -> bool:
        i = alive[j]
        return _settle(word, int(pieces[i]) * k, lambda words: enclose(int(which[i]), words), source)

    while alive.size:
        hit = _below(gamma / k, settle, source)
        if k % 2:
            out[alive[~hit]] = True
        alive, gamma = alive[hit], gamma[hit]
        k += 1
    return out


def bernoulli_exp(gamma: Floats, enclose: Enclosure, source: Source) -> Flags:
    """Return independent draws of Bernoulli(exp(−γ_i)), exactly.

    gamma: `(n,)` float64 approximations of γ_i ≥ 0, each within 2^-40·(1 + γ_i).
    enclose(i, words): rational bounds low ≤ γ_i ≤ high, equal if γ_i is rational, else good to about 64·words bits.
    Returns `(n,)` booleans.
    """
    # exp(−γ) = exp(−γ/p)^p with a whole p ≥ γ, so that each factor has an exponent in [0, 1].
    pieces = np.floor(gamma * (1 + _SLACK) + _SLACK).astype(np.int64) + 1
    share = gamma / pieces
    out = np.zeros(gamma.size, dtype=bool)
    alive = np.arange(gamma.size)
    done = 0
    while alive.size:
        alive = alive[_exp_of_unit(share[alive], alive, pieces[alive], enclose, source)]
        done += 1
        last = pieces[alive] == done
        out[alive[last]] = True
        alive = alive[~last]
    return out


def bernoulli_exp_rational(numerator: Integers, denominator: int, source: Source) -> Flags:
    """Return independent draws of Bernoulli(exp(−numerator_i/denominator)); numerators below 2^53, shape `(n,)`."""

    exact = _exactly(lambda i: Fraction(int(numerator[i]), denominator))
    return bernoulli_exp(numerator / float(denominator), exact, source)


def _exactly(value: Callable[[int], Fraction]) -> Enclosure:
    """Return the bounds of numbers that are rational."""
    return lambda i, words: (value(i), value(i))


def _successes(count: int, denominator: int, source: Source) -> Integers:
    """`(count,)` geometric draws: how many Bernoulli(exp(−1/denominator)) succeed before the first failure."""
    out = np.zeros(count, dtype=np.int64)
    alive = np.arange(count)
    while alive.size:
        alive = alive[bernoulli_exp_rational(np.ones(alive.size, dtype=np.int64), denominator, source)]
        out[alive] += 1
    return out


def uniform_below(limit: int, count: int, source: Source) -> Integers:
    """`(count,)` whole numbers uniform on [0, limit), without modulo bias; 1 ≤ limit ≤ 2^62."""
    top = (1 << 64) - (1 << 64) % limit
    words = random_words(source, count)
    # Words at the top would make small results more likely.
    while top < 1 << 64 and (bad := np.flatnonzero(words >= np.uint64(top))).size:
        words = words.copy()
        words[bad] = random_words(source, bad.size)
    return (words % np.uint64(limit)).astype(np.int64)


def _signs(count: int, source: Source) -> Integers:
    """`(count,)` fair signs, ±1."""
    return 1 - 2 * np.unpackbits(random_words(source, -(-count // 64)).view(np.uint8))[:count].astype(np.int64)


def _laplace(scale: int, count: int, source: Source) -> Integers:
    """Return about 0.6·count draws with P(y) ∝ exp(−|y|/scale) (CKS alg. 2)."""
    low = uniform_below(scale, count, source)
    low = low[bernoulli_exp_rational(low, scale, source)]
    size = low + scale * _successes(low.size, 1, source)
    sign = _signs(size.size, source)
    # Both signs of zero would count zero twice.
    return cast(Integers, (size * sign)[~((size == 0) & (sign < 0))])


def _gaussian_batch(sigma2: Fraction, count: int, source: Source) -> Integers:
    """Return fewer than `count` draws of the discrete Gaussian (CKS alg. 3): a thinned discrete Laplace."""
    scale = math.isqrt(sigma2.numerator // sigma2.denominator) + 1
    y = _laplace(scale, count, source)
    size = np.abs(y)
    variance, centre = float(sigma2), float(sigma2 / scale)
    gamma = (size - centre) ** 2 / (2 * variance)
    exact = _exactly(lambda i: (int(size[i]) - sigma2 / scale) ** 2 / (2 * sigma2))
    return y[bernoulli_exp(gamma, exact, source)]


def _fill(size: int, batch: Callable[[int], Integers]) -> Integers:
    """Call a rejection sampler until `size` numbers are there."""
    out = np.empty(size, dtype=np.int64)
    done, yielded = 0, 0.3
    while done < size:
        # A little more than is needed as a rule, so that most draws take one batch.
        got = batch(min(_CHUNK, int((size - done) / yielded * 1.02) + 16))[: size - done]
        out[done : done + got.size] = got
        done += got.size
    return out


def discrete_gaussian(sigma2: Fraction | float | int, size: int, source: Source) -> Integers:
    """Return exact draws with P(x) ∝ exp(−x²/(2·sigma2)) over all whole numbers x.

    sigma2: the parameter σ² (a float is taken as the rational number it is), 0 (all zeros) or with 2^-20 ≤ σ ≤ 2^40;
    the variance is at most σ² (CKS 2020, corollary 9) and subgaussian with parameter σ². Returns int64 `(size,)`.
    Raises InputError for another sigma2 or size.
    """
    whole("size of the noise", size)
    if not isinstance(sigma2, Fraction):
        in_range("sigma2 of the discrete Gaussian", sigma2, 0)
    exact = Fraction(sigma2)
    if exact == 0:
        return np.zeros(size, dtype=np.int64)
    in_range("sigma2 of the discrete Gaussian", float(exact), MIN_SIGMA**2, MAX_SIGMA**2)
    return _fill(size, lambda count: _gaussian_batch(exact, count, source))


class _Reals:
    """Uniform real numbers in [0, 1), known to 64 bits and extended only when a comparison asks for more."""

    def __init__(self, words: Words, source: Source) -> None:
        self.words = words
        self._source = source
        self._more: dict[int, tuple[int, int]] = {}

    def floats(self) -> Floats:
        return (self.words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def bounds(self, i: int, words: int) -> tuple[Fraction, Fraction]:
        """Return the number i between neighbouring multiples of 2^(−64·words), or closer."""
        value, bits = self._more.get(i, (int(self.words[i]), 64))
        while bits < 64 * words:
            value, bits = (value << 64) | int(random_words(self._source, 1)[0]), bits + 64
        self._more[i] = (value, bits)
        return Fraction(value, 1 << bits), Fraction(value + 1, 1 << bits)


def _rounded_batch(log2_sigma: int, count: int, source: Source) -> Integers:
    """Fewer than `count` draws of the rounded Gaussian: |z| = k + x, k ∝ exp(−k²/2), x thinned (Karney alg. N)."""
    k = _successes(count, 2, source)
    k = k[bernoulli_exp_rational(k * (k - 1), 2, source)]
    real = _Reals(random_words(source, k.size), source)
    x = real.floats()

    def enclose(i: int, words: int) -> tuple[Fraction, Fraction]:
        low, high = real.bounds(i, words)
        step = 2 * int(k[i])
        return low * (step + low) / 2, high * (step + high) / 2

    accepted = bernoulli_exp(x * (2 * k + x) / 2, enclose, source)
    # 2^s·(k + x) + ½ rounded down is settled by the first s + 1 bits of x, whatever follows.
    top = (real.words[accepted] >> np.uint64(63 - log2_sigma)).astype(np.int64)
    size = (k[accepted] << log2_sigma) + ((top + 1) >> 1)
    return size * _signs(size.size, source)


def rounded_gaussian(log2_sigma: int, size: int, source: Source) -> Integers:
    """Return exact draws of ⌊Z⌉, Z ~ N(0, 4^log2_sigma) continuous: P(x) = Φ((x+½)/σ) − Φ((x−½)/σ), σ =
    2^log2_sigma.

    Because ⌊s + Z⌉ = s + ⌊Z⌉ for a whole number s, adding this noise to a whole-number query is post-processing of the
    continuous Gaussian mechanism, whose every privacy analysis therefore holds without change.
    log2_sigma: a whole number in [0, 40]. Returns int64 `(size,)`; raises InputError otherwise.
    """
    whole("size of the noise", size)
    whole("log2_sigma of the rounded Gaussian", log2_sigma, 0, 40)
    return _fill(size, lambda count: _rounded_batch(log2_sigma, count, source))
