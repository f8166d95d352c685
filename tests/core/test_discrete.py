"""The exact samplers against their laws, against exact arithmetic, and against scripted adversarial bits."""

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedflat.core import discrete
from fedflat.core.checks import InputError
from fedflat.core.discrete import (
    SecureBits,
    bernoulli_exp_rational,
    discrete_gaussian,
    exact_square,
    inflated_bound,
    rounded_gaussian,
    uniform_below,
)
from fedflat.core.rng import stream

KEY = bytes(range(32))


class Scripted:
    """A source that hands out the words it was given, in order."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def integers64(self, count: int) -> np.ndarray:
        taken, self.words = self.words[:count], self.words[count:]
        if len(taken) < count:
            raise AssertionError("the sampler asked for more words than the script has")
        return np.array(taken, dtype=np.uint64)


def gaussian_pmf(x: np.ndarray, sigma2: float) -> np.ndarray:
    wide = np.arange(-200, 201) if sigma2 < 100 else np.arange(-20 * int(sigma2**0.5), 20 * int(sigma2**0.5) + 1)
    return np.exp(-(x**2) / (2 * sigma2)) / np.exp(-(wide**2) / (2 * sigma2)).sum()


def rounded_pmf(x: np.ndarray, sigma: float) -> np.ndarray:
    return stats.norm.cdf((x + 0.5) / sigma) - stats.norm.cdf((x - 0.5) / sigma)


def fit(drawn: np.ndarray, law, reach: int) -> float:
    """p-value of a chi-square test; bins expecting fewer than 10 draws are merged into one."""
    x = np.arange(-reach, reach + 1)
    expected = law(x) * drawn.size
    seen = np.array([(drawn == v).sum() for v in x], dtype=float)
    large = expected >= 10
    expected = np.append(expected[large], drawn.size - expected[large].sum())
    seen = np.append(seen[large], drawn.size - seen[large].sum())
    if expected[-1] < 1e-3:
        assert seen[-1] == 0
        expected, seen = expected[:-1], seen[:-1]
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1))


@pytest.mark.parametrize("sigma2", [0.05, Fraction(1, 3), 1.0, 7.3, 400.0])
@pytest.mark.parametrize("secure", [False, True])
def test_discrete_gaussian_has_its_law(sigma2, secure):
    drawn = discrete_gaussian(sigma2, 100_000, (SecureBits(KEY, "fit") if secure else stream(11, "fit")))
    reach = max(4, int(5 * float(sigma2) ** 0.5))
    assert fit(drawn, lambda x: gaussian_pmf(x, float(sigma2)), reach) > 1e-4
    # The broken twin: a law whose variance is 5 % off (50 % where nearly all draws are 0) does not pass.
    wrong = (1.5 if sigma2 == 0.05 else 1.05) * float(sigma2)
    assert fit(drawn, lambda x: gaussian_pmf(x, wrong), reach) < 1e-4


@pytest.mark.parametrize("log2_sigma", [0, 1, 4])
def test_rounded_gaussian_has_its_law_and_is_not_the_discrete_one(log2_sigma):
    drawn = rounded_gaussian(log2_sigma, 200_000, stream(12, "fit"))
    reach = 5 * 2**log2_sigma
    assert fit(drawn, lambda x: rounded_pmf(x, 2**log2_sigma), reach) > 1e-4
    if log2_sigma == 0:
        assert fit(drawn, lambda x: gaussian_pmf(x, 1.0), reach) < 1e-4


@pytest.mark.parametrize("sigma", [2.0**13, 2.0**30, 2.0**40])
def test_large_scales_match_the_continuous_gaussian(sigma):
    for drawn in (
        discrete_gaussian(sigma**2, 20_000, stream(1, "large")),
        rounded_gaussian(int(np.log2(sigma)), 20_000, stream(2, "large")),
    ):
        assert stats.kstest(drawn / sigma, "norm").pvalue > 1e-4
        assert stats.kstest(drawn / sigma, "norm", args=(0, 1.1)).pvalue < 1e-6


def test_tiny_and_zero_scales():
    assert not discrete_gaussian(1e-9, 5000, stream(1, "tiny")).any()
    assert not discrete_gaussian(0, 10, stream(1, "tiny")).any()
    assert discrete_gaussian(1.0, 0, stream(1, "tiny")).shape == (0,)
    variance = discrete_gaussian(0.25, 50_000, stream(3, "tiny")).var()
    assert variance < 0.25  # Canonne et al. 2020, corollary 9
    x = np.arange(-30, 31)
    assert abs(variance - (x**2 * gaussian_pmf(x, 0.25)).sum()) < 0.01


DRAWS = {
    "discrete": lambda source: discrete_gaussian(Fraction(1001, 7), 200, source),
    "wide": lambda source: discrete_gaussian(Fraction(2**61 + 1, 3), 200, source),
    "narrow": lambda source: discrete_gaussian(0.1, 200, source),
    "rounded": lambda source: rounded_gaussian(9, 200, source),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_filter_never_changes_an_outcome(draw, monkeypatch):
    """With a margin over 1 every comparison is made in whole numbers; the draws stay the same, one by one."""
    fast = draw(SecureBits(KEY, "filter"))
    settled = []
    inner = discrete._settle
    monkeypatch.setattr(discrete, "_settle", lambda *a: settled.append(1) or inner(*a))
    monkeypatch.setattr(discrete, "MARGIN", 4.0)
    assert np.array_equal(draw(SecureBits(KEY, "filter")), fast)
    assert len(settled) > 500


@pytest.mark.parametrize("numerator, denominator", [(0, 1), (1, 3), (1, 1), (7, 2), (22, 7)])
def test_bernoulli_exp_frequency(numerator, denominator):
    n = 200_000
    hits = bernoulli_exp_rational(np.full(n, numerator), denominator, stream(5, "exp", numerator)).sum()
    assert stats.binomtest(int(hits), n, float(np.exp(-numerator / denominator))).pvalue > 1e-4


THIRD = (2**64 - 1) // 3  # the first 64 bits of 1/3, again and again
HIGH = 2**64 - 1


@pytest.mark.parametrize(
    "words, accepted",
    [
        # First uniform number against 1/3 = 0.0101…b; k = 1 fails: accept.
        ([THIRD, THIRD, THIRD, THIRD + 1], True),
        # Below 1/3 only in the fourth word; then Bernoulli(1/6) fails at k = 2: reject.
        ([THIRD, THIRD, THIRD, THIRD - 1, HIGH], False),
        # Below at k = 1 and, by the third word only, at k = 2 (1/6); fails at k = 3: accept.
        ([THIRD, THIRD - 1, THIRD // 2, HIGH // 3 * 2, HIGH // 3 * 2 - 1, HIGH], True),
    ],
)
def test_ties_are_settled_by_further_bits(words, accepted):
    """Doubles cannot tell these numbers apart: the second and later words are 2^-64 of the first and less."""
    script = Scripted(*words)
    assert bernoulli_exp_rational(np.array([1]), 3, script)[0] == accepted
    assert not script.words


def test_every_threshold_of_the_series_is_exact():
    """Uniform numbers two units of 2^-128 under γ, and just over it, decide as rational arithmetic says."""
    for p, q in [(1, 3), (2, 7), (355, 1130), (10**6 - 1, 10**6), (1, 2**50)]:
        edge = -(-(p << 128) // q)  # smallest u with u/2^128 ≥ p/q
        for u, below in [(edge - 2, True), (edge, False)]:
            found = bernoulli_exp_rational(np.array([p]), q, Scripted(u >> 64, u & (2**64 - 1), HIGH, HIGH))[0]
            assert found == (not below), (p, q, u)  # fail at k = 1 accepts; pass then fail at k = 2 rejects


def test_uniform_below_has_no_modulo_bias():
    limit = 3 * 2**60
    top = 2**64 - 2**64 % limit
    assert uniform_below(limit, 2, Scripted(top, 5, limit + 7)).tolist() == [7, 5]  # `top` itself is drawn again
    assert stats.chisquare(np.bincount(uniform_below(7, 70_000, stream(4, "uniform")), minlength=7)).pvalue > 1e-4
    assert uniform_below(8, 3, Scripted(9, 16, 7)).tolist() == [1, 0, 7]


def test_secure_bits_are_one_key_stream_per_name():
    a, b = SecureBits(KEY, "noise", 3, 1), SecureBits(KEY, "noise", 3, 1)
    assert np.array_equal(np.concatenate([a.integers64(3), a.integers64(5)]), b.integers64(8))
    others = [SecureBits(KEY, "noise", 3, 2), SecureBits(KEY, "rounding", 3, 1), SecureBits(bytes(32), "noise", 3, 1)]
    first = SecureBits(KEY, "noise", 3, 1).integers64(4)
    assert all(not np.intersect1d(first, other.integers64(4)).size for other in others)
    bits = np.unpackbits(SecureBits(KEY, "count").integers64(20_000).view(np.uint8))
    assert stats.binomtest(int(bits.sum()), bits.size).pvalue > 1e-4


def test_draws_repeat_with_the_key_and_change_with_it():
    def draw(key):
        return discrete_gaussian(9.0, 50, SecureBits(key, "noise"))

    assert np.array_equal(draw(KEY), draw(KEY))
    assert not np.array_equal(draw(KEY), draw(bytes(32)))


def test_exact_square_beyond_int64():
    assert exact_square(np.array([2**51, -(2**51), 12345, -1])) == 2 * 2**102 + 12345**2 + 1
    many = stream(1, "square").integers(-(2**40), 2**40, size=5000)
    assert exact_square(many) == sum(int(v) ** 2 for v in many)


def test_inflated_bound_takes_the_smaller_term():
    assert inflated_bound(1.0, 0.01, 4, 0.0) == pytest.approx(1.02)
    beta = float(np.exp(-0.5))
    by_hand = (1 + 0.01**2 * 4096 / 4 + 0.01 * (1 + 0.01 * 64 / 2)) ** 0.5
    assert inflated_bound(1.0, 0.01, 4096, beta) == pytest.approx(by_hand)
    assert inflated_bound(1.0, 0.01, 4096, beta) < 1 + 0.01 * 64


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: discrete_gaussian(-1.0, 3, stream(1, "e")), "sigma2 of the discrete Gaussian: found -1;"),
        (lambda: discrete_gaussian(2.0**81, 3, stream(1, "e")), "≤ 1.20893e+24"),
        (lambda: discrete_gaussian(1.0, -1, stream(1, "e")), "size of the noise: found -1"),
        (lambda: rounded_gaussian(41, 3, stream(1, "e")), "a whole number ≥ 0 and ≤ 40"),
        (lambda: SecureBits(b"short", "noise"), "at least 32 bytes"),
    ],
)
def test_error_sentences(call, sentence):
    with pytest.raises(InputError, match=sentence.replace("+", r"\+")):
        call()
