"""ε for given noise, and noise for a given ε.

``epsilon`` and ``noise_multiplier`` are ``fedflat.epsilon`` and ``fedflat.noise_multiplier``. The accountants are in
``curves`` (what each can do), the adversaries in ``trust``; every figure is the largest over the adversaries. What is
called ε here is proven; ``approximate_epsilon`` is not, and nothing else uses it as if it were.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedflat.core import in_range, make_sampler, require, whole
from fedflat.privacy.accounting.curves import gaussian_epsilon, gdp_mu
from fedflat.privacy.trust import AccountingParams, default_min_cohort, headline

MOST_EPSILON = 1e20
"""The largest target: a multiplier above the least that can be accounted reaches it."""
TOLERANCE = 2e-4
"""Calibration stops once ε lies within this relative distance below its target."""


def default_delta(clients: int) -> float:
    """0.1/M. (At δ = 1/M, publishing one random client's data would meet the definition.)"""
    return 0.1 / whole("clients", clients, 1)


def accounting_params(
    *, clients: int, cohort: float, noise_multiplier: float, rounds: int, sampling: str = "poisson",
    max_cohort: int | None = None, separation: int | None = None, delta: float | None = None, draws: int | None = None,
    **more: Any,
) -> AccountingParams:  # fmt: skip
    """The checked arguments of :func:`epsilon`; ``more`` are those that it shares with :class:`AccountingParams`.

    draws: of cohorts in all ``rounds``, any of which may be aborted; None: one a round.

    Raises:
        InputError: any value out of range, or a combination without a bound.
    """
    sampler = make_sampler(sampling, clients, cohort, max_cohort, separation)
    spent = default_delta(clients) if delta is None else delta
    params = AccountingParams(sampler, rounds, noise_multiplier, spent, **more)
    if params.trust == "distributed" and params.min_cohort is None:
        least = default_min_cohort(sampler, rounds if draws is None else draws, spent, params.colluders)
        return replace(params, min_cohort=least)
    return params


def epsilon(
    *, clients: int, cohort: float, rounds: int, noise_multiplier: float, delta: float | None = None,
    sampling: str = "poisson", trust: str = "central", accountant: str = "pld", max_cohort: int | None = None,
    min_cohort: int | None = None, max_participations: int | None = None, colluders: int = 0,
) -> float:  # fmt: skip
    """Proven ε after ``rounds`` rounds: the largest over the adversaries of the trust model.

    Args:
        clients: population M.
        cohort: expected cohort m (``fixed``: its size).
        rounds: T.
        noise_multiplier: noise std / C, whatever the neighbouring relation; at 0 the result is inf.
        delta: δ in (0, 1); default 0.1/M.
        sampling: poisson, truncated (with ``max_cohort``), fixed or full; or min-separation (zero-out neighbours) and
            cyclic-poisson, with independent noise and a client's turns ⌊M/m⌋ rounds apart.
        trust: central, distributed (``min_cohort``, ``colluders``) or local (``max_participations``).
        accountant: pld, rdp or fft; an approximation is refused (:func:`approximate_epsilon`).

    Raises:
        InputError: a value out of range, or a combination for which no bound is known, with the reason.

    >>> round(epsilon(clients=500, cohort=50, rounds=300, noise_multiplier=0.95, delta=1 / 500), 2)
    9.37
    """
    return headline(accounting_params(**locals()))


def approximate_epsilon(
    *, clients: int, cohort: float, rounds: int, noise_multiplier: float, delta: float | None = None
) -> float:
    """An approximation, not a bound: the central limit of Poisson-sampled rounds as Gaussian DP (Bu et al. 2019).

    It may lie far below: 0.43 where 2.57 is proven (M = 10,000, m = 100, T = 10, σ = 0.6). Arguments as in
    :func:`epsilon`; Poisson cohorts and a trusted server only.

    Raises:
        InputError: a value out of range.
    """
    params = accounting_params(**locals())
    if rounds == 0:
        return 0.0
    return gaussian_epsilon(gdp_mu(params.sampler.q, noise_multiplier, rounds), params.delta)


def noise_multiplier(
    *, epsilon: float, clients: int, cohort: float, rounds: int, delta: float | None = None,
    sampling: str = "poisson", trust: str = "central", accountant: str = "pld", max_cohort: int | None = None,
    min_cohort: int | None = None, max_participations: int | None = None, colluders: int = 0,
) -> float:  # fmt: skip
    """The smallest noise multiplier (std / C) whose ε is at most ``epsilon`` (within 0.1 % of it, never above).

    The other arguments are those of :func:`fedflat.epsilon`.

    Raises:
        InputError: as for :func:`fedflat.epsilon`; rounds = 0; or no multiplier reaches the target.

    >>> round(noise_multiplier(epsilon=8, clients=500, cohort=50, rounds=30, accountant="rdp"), 2)
    0.7
    """
    setting = locals() | {"noise_multiplier": 1.0}
    del setting["epsilon"]
    whole("rounds", rounds, 1)
    params = accounting_params(**setting)
    return calibrate(lambda sigma: headline(replace(params, noise_multiplier=sigma)), epsilon, guess(params, epsilon))


def guess(params: AccountingParams, target: float) -> float:
    """Return a multiplier to start from, by the central-limit approximation or an unamplified account."""
    amplified = params.trust == "central" and params.sampler.name != "fixed" and target < 1000
    q = params.sampler.q if amplified else 1.0
    share = 1.0 if amplified or params.trust == "local" else params.sampler.q
    count = max(1, round(params.rounds * share))
    # On a logarithmic scale, since multipliers span seventeen decades.
    low, high = 1e-11, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        mu = gdp_mu(q, middle / params.factor, count)
        low, high = (low, middle) if gaussian_epsilon(min(mu, 1e8), params.delta) <= target else (middle, high)
    return high


def calibrate(epsilon_of: Callable[[float], float], target: float, start: float = 1.0) -> float:
    """The smallest σ with ``epsilon_of(σ) ≤ target``, within :data:`TOLERANCE` of the target and never above it.

    ``epsilon_of`` decreases in σ, which has seven significant digits: the last bits of an account differ between
    processors, and the noise of a seeded run follows σ. A bracket is kept throughout; inside it the next point is where
    a straight line through the ends, in (log σ, log ε), meets the target, so that few evaluations are needed.

    Raises:
        InputError: ``target`` is not in (0, 10²⁰], or not reached for any σ ≤ 10⁷.
    """
    in_range("privacy.epsilon", target, 0, MOST_EPSILON, open_low=True)

    def log_at(x: float) -> float:
        """ln ε at σ = eˣ as it is returned; above ln(target) wherever ε is, also by less than ln resolves."""
        reached = epsilon_of(_sigma(x))
        least = math.nextafter(math.log(target), math.inf) if reached > target else -math.inf
        return max(math.log(reached) if reached > 0 else -math.inf, least)

    low, high = _bracket(log_at, target, math.log(start))
    aim = math.log(target) + math.log1p(-TOLERANCE / 2)
    (x0, y0), (x1, y1) = low, high
    step = 0
    while y1 < math.log(target) + math.log1p(-TOLERANCE) and x1 - x0 >= 1e-7:
        step += 1  # every fourth step halves the bracket, so this ends
        # A straight line through an infinite end would point nowhere.
        share = (y0 - aim) / (y0 - y1) if (math.isfinite(y0) and math.isfinite(y1) and step % 4 != 3) else 0.5
        x = x0 + (x1 - x0) * min(max(share, 1e-4), 1 - 1e-4)
        y = log_at(x)
        if y <= math.log(target):
            x1, y1 = x, y
        else:
            x0, y0 = x, y
    return _sigma(x1)


def _sigma(x: float) -> float:
    """σ = eˣ to seven significant digits."""
    return float(f"{math.exp(x):.6e}")


def _bracket(
    log_at: Callable[[float], float], target: float, x: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two points (log σ, log ε), one above the target, one at or under it; the search starts at ``x``."""
    log_epsilon, goal = log_at(x), math.log(target)
    enough = log_epsilon <= goal
    stride = 0.02
    while True:
        # ε falls about as fast as 1/σ: step past the target by a little, then ever further.
        reach = abs(log_epsilon - goal) * 1.2 if math.isfinite(log_epsilon) else 0.0
        other = x - max(stride, min(reach, 1.0)) if enough else x + max(stride, min(reach, 1.0))
        require(other <= math.log(1e7), "privacy.epsilon", target, "an ε that some noise multiplier up to 1e7 reaches")
        value = log_at(other)
        if (value <= goal) != enough:
            return ((other, value), (x, log_epsilon)) if enough else ((x, log_epsilon), (other, value))
        x, log_epsilon, stride = other, value, stride * 2
        # No noise at all may be enough (T·q < δ): then little will do, and the least of all is not sought.
        if enough and x < math.log(1e-6 if log_epsilon == -math.inf else 1e-11):
            return (x - 1, math.inf), (x, log_epsilon)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in [0, most] with ``fits(n)``, for a condition that once false stays false; 0 is taken to fit."""
    return most if fits(most) else bisect_left(range(1, most), True, key=lambda n: not fits(n))


def split_noise(sigma: float, count_sigma: float) -> float:
    """σ_Δ = (σ^−2 − (2σ_b)^−2)^−½: what is left for the update beside the adaptive clip's count (Andrew et al. 2021).

    Args:
        sigma: noise multiplier of the round as a whole, the one that is accounted.
        count_sigma: σ_b, std of the noise on Σ(b_i − ½), whose add-remove sensitivity is ½.

    Raises:
        InputError: σ ≥ 2σ_b: the count alone would reveal more than the round may.
    """
    in_range("privacy.noise_multiplier", sigma, 0)
    in_range("privacy.clip.count_noise", count_sigma, 0, open_low=True)
    if sigma == 0:
        return 0.0
    allowed = f"more than noise_multiplier / 2 = {sigma / 2:g}"
    hint = "With less, the count alone reveals more than the round is accounted for."
    require(sigma < 2 * count_sigma, "privacy.clip.count_noise", count_sigma, allowed, hint=hint)
    return float((sigma**-2 - (2 * count_sigma) ** -2) ** -0.5)
