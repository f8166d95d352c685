"""Exact guarantees of Gaussian mechanisms: plain compositions, and mixtures over a public schedule.

T releases of Gaussian noise with multiplier σ (std / sensitivity) are one release with μ = √T/σ, and
δ(ε; μ) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018, Theorem 8). All of it in logarithms, so that
ε in the thousands neither overflows nor loses digits.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LITTLE = 3e-3
"""Multipliers below lose losses of one round on any grid; hiding the cohort then spares ε less than 2·10⁻⁵·log(1/q)
of itself, so rounds are accounted with their schedule seen."""


def log_delta(epsilon: float | Floats, mu: Floats) -> Floats:
    """log δ(ε; μ) for each μ > 0, shape like ``mu``, and one ε or one for each; −inf where δ underflows."""
    from scipy.special import log_ndtr

    shift = epsilon / mu
    upper = log_ndtr(mu / 2 - shift)
    # The difference of two nearly equal numbers is taken in logarithms, where digits survive.
    gap = epsilon + log_ndtr(-mu / 2 - shift) - upper
    with np.errstate(divide="ignore"):
        result: Floats = upper + np.log(-np.expm1(np.minimum(gap, 0.0)))
    return result


def _solve(delta_at: Callable[[float], float], delta: float, high: float) -> float:
    """The smallest ε with δ(ε) ≤ ``delta`` (to 1e-12, rounded up); ``high`` must already satisfy it."""
    from scipy.optimize import brentq

    if delta_at(0.0) <= delta:
        return 0.0
    root = float(brentq(lambda e: delta_at(e) - delta, 0.0, high, xtol=1e-13, rtol=1e-13))
    # The solver may stop on either side; what is stated must not be the smaller one.
    return root * (1 + 1e-12) + 1e-13


def _ceiling(mu: float, delta: float) -> float:
    """An ε that is surely enough: the conversion of zero-concentrated privacy ρ = μ²/2 (Bun and Steinke 2016)."""
    rho = mu * mu / 2
    return (rho + 2 * math.sqrt(rho * math.log(1 / delta))) * 1.01 + 1e-9


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact ε of the Gaussian mechanism with sensitivity / std = ``mu``, at δ in (0, 1); 0 at μ = 0, inf at μ = inf."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    one = np.array([mu])
    return _solve(lambda e: float(np.exp(log_delta(e, one)[0])), delta, _ceiling(mu, delta))


def schedule_epsilon(rounds: int, q: float, multiplier: float, delta: float) -> float:
    """ε towards someone who sees the schedule: δ(ε) = Σ_n Bin(rounds, q)(n)·δ(ε; √n/multiplier).

    A client takes part in each round with probability ``q`` independently, whatever its data; who sees the
    schedule sees a composition of n Gaussians, and the schedule's law is the same in both worlds, so the
    divergence is the average. Counts that are left out (mass below 1e-4·δ) are charged to δ.
    """
    from scipy.stats import binom

    if multiplier == 0:
        return math.inf
    law = binom(rounds, q)
    # Counts that are left out could be worst cases, so their whole chance is charged to δ.
    high = min(rounds, int(law.isf(delta * 1e-4)) + 1)
    counts, missing = np.arange(high + 1, dtype=np.float64), float(law.sf(high))
    weights: Floats = np.asarray(law.pmf(counts), dtype=np.float64)
    counts, weights = counts[weights > 0], weights[weights > 0]
    if counts[-1] == 0:
        return 0.0
    mus = np.sqrt(np.maximum(counts, 1)) / multiplier
    weights = np.where(counts > 0, weights, 0.0)
    return _solve(
        lambda e: float(weights @ np.exp(log_delta(e, mus))) + missing, delta, _ceiling(float(mus[-1]), delta / 2)
    )
