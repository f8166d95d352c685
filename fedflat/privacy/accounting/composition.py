"""Many rounds from one: a discretised privacy loss distribution raised to a power, always rounded up.

The one-round distribution (pessimistic: it dominates the mechanism's) sits on a grid of spacing ``step``: that of a
Poisson-sampled Gaussian, cohorts truncated or not, by dp-accounting's mechanisms and its algorithm
(connect-the-dots, Doroshenko et al. 2022, Algorithm 1), with all points of the grid at once. T rounds are its T-fold
convolution: one forward transform per window length, kept, then a pointwise power and one inverse transform per
question. What leaves the window above, and the transform's rounding, are charged to δ, so the answer stays an upper
bound.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]

_ORDERS = np.geomspace(1e-4, 1e2, 40)
"""Chernoff orders, in units of one over the loss's standard deviation."""
_NEGLIGIBLE = 70.0
"""Frequencies whose T-th power is below e^-70 are left out (at most 1e-24 in all)."""
_ROUNDING = 1e-15
"""Times T + 100 rounds a bound on the transform's rounding in any tail probability (measured: a tenth of that)."""


@dataclass
class LossDistribution:
    """Privacy losses ``step``·(lowest + k) with probability ``probs[k]``, and ``infinity`` at infinite loss.

    Shapes: ``probs`` is (n,), non-negative, summing with ``infinity`` to one.
    """

    probs: Floats
    lowest: int
    step: float
    infinity: float
    _spectra: dict[int, Complexes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Transforms leave values like −1e-18 behind; a negative chance would shorten a tail sum.
        self.probs = np.maximum(np.asarray(self.probs, dtype=np.float64), 0.0)
        grid = np.arange(len(self.probs), dtype=np.float64)
        # Losses are counted from the mean, so that the T-fold sum stays inside a short window.
        self._centre = round(float(self.probs @ grid))
        index = grid - self._centre
        self._orders = _ORDERS / max(math.sqrt(float(self.probs @ index**2)), 1.0)
        with np.errstate(divide="ignore"):
            logs = np.log(self.probs)
        self._above = np.array([_log_mean_exp(logs, index * order) for order in self._orders])
        self._below = np.array([_log_mean_exp(logs, -index * order) for order in self._orders])

    def _window(self, rounds: int, tail: float) -> tuple[int, int]:
        """Centred indices [low, high] outside which each side has at most ``tail`` (Chernoff, any order is valid)."""
        needed = -math.log(tail)
        high = float(np.min((rounds * self._above + needed) / self._orders))
        low = float(np.min((rounds * self._below + needed) / self._orders))
        top = (len(self.probs) - 1 - self._centre) * rounds
        return -min(math.ceil(low), self._centre * rounds), min(math.ceil(high), top)

    def _spectrum(self, length: int) -> Complexes:
        """log of the transform of the centred distribution, folded to ``length``; kept."""
        if length not in self._spectra:
            index = (np.arange(len(self.probs)) - self._centre) % length
            folded = np.bincount(index, weights=self.probs, minlength=length)
            with np.errstate(divide="ignore"):
                self._spectra[length] = np.log(np.fft.rfft(folded))
        return self._spectra[length]

    def _tail(self, rounds: int, tail: float) -> tuple[Floats, int]:
        """Probabilities of the composed losses that are ≥ 0, ascending, and the grid index of the first."""
        low, high = self._window(rounds, tail)
        length = _fast_length(high - low + 1)
        spectrum = self._spectrum(length)
        # Only frequencies that survive the T-th power are raised to it: most vanish, and exp is slow.
        power = np.zeros(len(spectrum), dtype=np.complex128)
        surviving = np.flatnonzero(spectrum.real > -_NEGLIGIBLE / rounds)
        power[surviving] = np.exp(rounds * spectrum[surviving])
        composed, offset = np.fft.irfft(power, length), rounds * (self.lowest + self._centre)
        first = max(low, -offset)
        return np.maximum(composed[np.arange(first, high + 1) % length], 0.0), first + offset

    def epsilon(self, rounds: int, delta: float) -> float:
        """An upper bound on ε after ``rounds`` rounds at ``delta``; inf where none is found."""
        tail = delta * 1e-9
        lost = -math.expm1(rounds * math.log1p(-self.infinity)) + tail + _ROUNDING * (rounds + 100)
        if lost >= delta:
            return math.inf
        probs, first = self._tail(rounds, tail)
        return _smallest_epsilon(probs, first, self.step, delta - lost)


def _log_mean_exp(log_probs: Floats, exponents: Floats) -> float:
    """log Σ p·e^x without overflow or underflow."""
    terms = log_probs + exponents
    peak = float(terms.max())
    return peak + math.log(float(np.exp(terms - peak).sum()))


# Lengths follow the tail and the rounds; without this nearly every round would need a transform of its own.
def _fast_length(least: int) -> int:
    """The next of 2^k and 3·2^(k−1): few distinct lengths, so that spectra are reused from round to round."""
    power = 1 << max(least - 1, 1).bit_length()
    return power * 3 // 4 if power * 3 // 4 >= least else power


def _smallest_epsilon(probs: Floats, first: int, step: float, delta: float) -> float:
    """The smallest ε ≥ 0 with Σ p(l)·max(0, 1 − e^(ε − l)) ≤ ``delta``.

    ``probs`` belong to the losses step·(first + k) ≥ 0. Between two grid points δ(ε) = above − e^(ε − l)·scaled,
    with scaled(l) = Σ_{l' ≥ l} p(l')·e^(l − l'), which is a first-order recursion and never overflows.
    """
    from scipy.signal import lfilter

    if len(probs) == 0:
        return 0.0
    scaled = lfilter([1.0], [1.0, -math.exp(-step)], probs[::-1])[::-1]
    above = np.cumsum(probs[::-1])[::-1]
    # δ(ε) falls from grid point to grid point, so the first that is small enough brackets the answer.
    place = int(np.argmax(above - scaled <= delta))  # the last entry is 0, so there always is one
    excess = above[place] - delta
    if excess <= 0:
        return max(0.0, step * (first + place - 1)) if place else 0.0
    return max(0.0, step * (first + place) + math.log(excess / scaled[place]))


def deltas(loss: Any, epsilons: Floats) -> Floats:
    """δ of one round at each ε ``(n,)``, as ``loss.get_delta_for_epsilon(epsilons)`` gives it point by point.

    δ is the largest μ(A) − e^ε·ν(A), reached where A is all x at which the loss is at least ε. The x found here may
    differ from the library's in their last bits; as δ is flat there, that moves it by the square of their distance.

    Args:
        loss: dp-accounting's ``GaussianPrivacyLoss`` with 0 < ``sampling_prob`` < 1, add, remove or replace.
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    if loss.adjacency_type == AdjacencyType.REPLACE:
        return _above(loss, epsilons, _where_replaced(loss, epsilons))
    q, removed = loss.sampling_prob, loss.adjacency_type == AdjacencyType.REMOVE
    sign = 1.0 if removed else -1.0
    # Beyond log(1 − q) no output has such a loss, so the logarithm below would be of a negative number.
    bounded = sign * epsilons > math.log1p(-q)
    delta = np.zeros_like(epsilons)
    if removed:
        delta[~bounded] = -np.expm1(epsilons[~bounded])  # every loss is above these ε; added, none is above the others
    inside = epsilons[bounded]
    scaled = sign * inside - math.log(q)
    with np.errstate(divide="ignore"):
        plain = sign * (scaled + np.log1p(-np.minimum(np.exp(math.log(1 / q - 1) - scaled), 1.0)))
    delta[bounded] = _above(loss, inside, -0.5 - plain * loss.standard_deviation**2 + (0.0 if removed else 1.0))
    return delta


def _above(loss: Any, epsilons: Floats, x: Floats) -> Floats:
    """μ − e^ε·ν of everything up to ``x``."""
    excess: Floats = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    return np.clip(excess, 0.0, 1.0)


def _where_replaced(loss: Any, epsilons: Floats) -> Floats:
    """x with loss ε between shifts by ±1, each taken with probability q: σ²·(arsinh(−α·sinh(ε/2)) − ε/2) with
    α = e^(1/2σ²)·(1 − q)/q, in logarithms, as none of the factors fits a float."""
    variance, q, half = loss.standard_deviation**2, loss.sampling_prob, np.abs(epsilons) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    log_product = 0.5 / variance + math.log1p(-q) - math.log(q) + log_sinh
    over = np.maximum(log_product, 0.0)
    large = over + np.log1p(np.sqrt(1 + np.exp(-2 * over)))
    arsinh = np.where(log_product > 0, large, np.arcsinh(np.exp(np.minimum(log_product, 0.0))))
    x: Floats = variance * (-np.sign(epsilons) * arsinh - epsilons / 2)
    return x


def _one_direction(adjacency: str, q: float, multiplier: float, step: float) -> Any:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    loss = GaussianPrivacyLoss(multiplier, sampling_prob=q, adjacency_type=AdjacencyType(adjacency))
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
    by_loss = deltas(loss, np.arange(low, high + 1) * step)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, by_loss)


def sampled_gaussian(q: float, multiplier: float, step: float) -> tuple[Any, ...]:
    """The library's distributions of the loss (remove, add) for q < 1, upper bounds on a grid of spacing ``step``."""
    return tuple(_one_direction(kind, q, multiplier, step) for kind in ("REMOVE", "ADD"))


def truncated_gaussian(clients: int, q: float, most: int, multiplier: float, step: float) -> tuple[Any, ...]:
    """As :func:`sampled_gaussian`, of cohorts cut to ``most``, by the library's rule: a client that is in a cohort that
    would be full without it (chance ``full``) takes the place of another one, and is one among ``most``."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from scipy.stats import binom

    plain = sampled_gaussian(q, multiplier, step)
    full = float(binom.sf(most - 1, clients - 1, q))
    if full == 0:
        return plain
    # The chance to be one of those who stay, given that the cohort was too large.
    among = float(binom.sf(most, clients, q)) * most / full / clients
    replaced = PrivacyLossDistribution(_one_direction("REPLACE", among, multiplier / 2, step))
    # No public view of the two directions either; a test notices if these names change.
    mixed = replaced.compute_mixture(PrivacyLossDistribution(*plain), full)
    return mixed._pmf_remove, mixed._pmf_add
