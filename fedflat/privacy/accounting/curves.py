"""ε after any number of identical rounds by one accountant, cheaply once set up.

What dp-accounting 0.6 may be asked, and how: its PLD and RDP accountants disagree on what REPLACE_ONE means for a
Gaussian (PLD doubles the sensitivity, RDP does not), so it is never used for Poisson or plain Gaussian events. Their
multiplier is always std / sensitivity *under the relation*, and the events are composed under add-remove. Only
SampledWithoutReplacement is composed under REPLACE_ONE, the one relation the library accepts for it.

T releases of Gaussian noise with multiplier σ (std / sensitivity) are one release with μ = √T/σ, and
δ(ε; μ) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018, Theorem 8). All of it in logarithms, so that
ε in the thousands neither overflows nor loses digits.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedflat.core import InputError, in_range, insist, one_of, whole, wrong
from fedflat.privacy.accounting.composition import Floats, LossDistribution, sampled_gaussian, truncated_gaussian
from fedflat.privacy.accounting.independent import epsilon_bounds, loss_moments

PROVEN = ("pld", "rdp", "fft")
"""pld: privacy loss distributions (tight). rdp: Rényi. fft: this project's own composition."""
APPROXIMATIONS = ("gdp",)
"""gdp: the central limit of Gaussian DP. It proves nothing, so no function here that returns an ε knows it."""
ACCOUNTANTS = (*PROVEN, *APPROXIMATIONS)
RDP_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 256), 288, 320, 384, 448, 512, 640, 768, 896, 1024)
"""1.1…10.9 by 0.1 and 11…255, the grid of Shi et al. 2023a; the few beyond only matter where ε is small."""
WITHOUT_REPLACEMENT_ORDERS = (*(1 + x / 10 for x in range(1, 50)), *range(6, 65), 80, 96, 128)
"""Fewer: the library's bound costs the square of the order."""
EXPECTED = ("failed to converge", "Negative Renyi divergence")
"""Notes of the library that change no bound: an order that it leaves out then, and a divergence that was rounded below
zero (much noise; δ alone covers what is left)."""


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


def gdp_mu(q: float, multiplier: float, rounds: int) -> float:
    """μ of the central-limit approximation q·√(T(e^{1/σ²} − 1)) (Bu et al. 2019); √T/σ at q = 1; inf at σ = 0."""
    if multiplier == 0:
        return math.inf
    if q == 1:
        return math.sqrt(rounds) / multiplier
    exponent = multiplier**-2
    return q * math.sqrt(rounds * math.expm1(exponent)) if exponent < 700 else math.inf


def _kind(event: Any, accountant: str = "pld") -> tuple[str, float, float]:
    """Return (cohort law, q, multiplier) of an event that the accountant has a bound for, else raise InputError."""
    import dp_accounting as dp

    match event:
        case dp.GaussianDpEvent(noise_multiplier=sigma):
            kind, q = "full", 1.0
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=sigma)):
            kind = "poisson"
        case dp.TruncatedSubsampledGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            kind = "truncated"
        case dp.SampledWithoutReplacementDpEvent(event=dp.GaussianDpEvent(noise_multiplier=sigma)):
            kind, q = "fixed", event.sample_size / event.source_dataset_size
        case _:
            raise wrong("event", type(event).__name__, "a round of Gaussian noise: everybody's, or of sampled clients")
    refuse_unproven(kind, accountant)
    return kind, q, sigma


def refuse_unproven(sampling: str, accountant: str) -> None:
    """Raise InputError if ``accountant`` has no bound for rounds of this cohort law."""
    reason = ""
    if sampling == "truncated" and accountant != "pld":
        reason = f"{accountant} has no bound for truncated Poisson sampling; use pld"
    if sampling == "fixed" and accountant == "fft":
        reason = f"{accountant} covers Poisson sampling, not cohorts of fixed size; use rdp or pld"
    insist(not reason, InputError(f"privacy.accountant: {reason}."))


def grid_step(q: float, multiplier: float) -> float:
    """Grid spacing: 1/300 of the loss's standard deviation (error below 1e-5 of ε), finer only as far as is cheap.

    Never coarser than dp-accounting's own 1e-4 unless the losses are that large; at most about 40,000 points then.
    """
    deviation, span = loss_moments(q, multiplier)
    # One step moves ε by at most itself; a step of 1/300 of the spread is lost among the rounds.
    return max(deviation / 300, min(span / 40_000, 1e-4))


@lru_cache(maxsize=16)
def _losses(event: Any) -> tuple[LossDistribution, ...]:
    """The loss distributions (remove, add) of an event of kind poisson or truncated, kept: making them takes time."""
    kind, q, multiplier = _kind(event)
    step = grid_step(q, multiplier)
    if kind == "truncated":
        # A cut cohort depends on who else is in it, so it needs the library's rule for full cohorts.
        masses = truncated_gaussian(event.dataset_size, q, event.truncated_batch_size, multiplier, step)
    else:
        masses = sampled_gaussian(q, multiplier, step)
    # The library offers no public view of the distribution; a test notices if these names change.
    dense = [mass.to_dense_pmf() for mass in masses]
    return tuple(LossDistribution(d._probs, d._lower_loss, step, d._infinity_mass) for d in dense)


def renyi(event: Any, rounds: int) -> tuple[tuple[float, ...], Floats]:
    """Orders > 1 and the Rényi divergences ``(n,)`` of ``rounds`` repetitions of an event, both directions; inf of no
    noise. The event's multiplier is std / sensitivity under its relation.

    Raises:
        InputError: the library has no bound for this event.
    """
    if _kind(event, "rdp")[-1] == 0:
        return RDP_ORDERS, np.full(len(RDP_ORDERS), math.inf)
    orders, divergences = _renyi(event)
    return orders, rounds * divergences


@lru_cache(maxsize=16)
def _renyi(event: Any) -> tuple[tuple[float, ...], Floats]:
    """Orders and the library's Rényi divergences ``(n,)`` of one repetition; kept."""
    accountant = rdp_accountant(event)
    accountant.compose(event)
    return tuple(float(order) for order in accountant.orders), accountant.rdp


def _is_news(record: logging.LogRecord) -> bool:
    return not any(note in record.getMessage() for note in EXPECTED)


def rdp_accountant(event: Any) -> Any:
    """Return the library's Rényi accountant for such events, with nothing composed yet; its notes that are expected are
    hidden from now on."""
    from dp_accounting import NeighboringRelation, rdp

    # A filter and not a level: other warnings of the library must still be seen.
    logging.getLogger("absl").addFilter(_is_news)
    # The library accepts one relation for cohorts without replacement, and another one for all others.
    if _kind(event)[0] == "fixed":
        return rdp.RdpAccountant(WITHOUT_REPLACEMENT_ORDERS, NeighboringRelation.REPLACE_ONE)
    return rdp.RdpAccountant(RDP_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)


def compose_epsilon(event: Any, rounds: int, delta: float, accountant: str = "pld") -> float:
    """An upper bound on ε after ``rounds`` repetitions of one dp-accounting event; 0 at 0 rounds, inf of no noise.

    Args:
        event: one round's event; its multiplier is std / sensitivity under the relation.
        delta: δ in (0, 1) of all rounds together.
        accountant: pld (tight; exact for plain Gaussians; for cohorts without replacement the smaller of RDP and of
            the bound with the schedule revealed), rdp or fft.

    Raises:
        InputError: the accountant has no bound for this event.
    """
    kind, q, multiplier = _kind(event, one_of("privacy.accountant", accountant, PROVEN))
    in_range("delta", delta, 0, 1, open_low=True, open_high=True)
    if kind == "truncated" and 0 < multiplier < LITTLE:
        raise wrong("privacy.noise_multiplier", multiplier, f"0, or at least {LITTLE:g} with truncated cohorts")
    if whole("rounds", rounds) == 0:
        return 0.0
    if multiplier == 0:
        return math.inf
    if accountant == "rdp":
        return renyi_epsilon(*renyi(event, rounds), delta)
    # A sum of Gaussians is a Gaussian: no grid is as exact as the formula.
    if kind == "full" or (kind == "poisson" and q >= 1):
        return gaussian_epsilon(math.sqrt(rounds) / multiplier, delta)
    if kind == "fixed":
        # Both are bounds on their own, so the smaller one is too.
        return min(renyi_epsilon(*renyi(event, rounds), delta), schedule_epsilon(rounds, q, multiplier, delta))
    if kind == "poisson" and multiplier < LITTLE:
        return schedule_epsilon(rounds, q, multiplier, delta)
    if accountant == "fft":
        return epsilon_bounds(q, multiplier, rounds, delta)[1]
    composed = max(part.epsilon(rounds, delta) for part in _losses(event))
    # With hardly any noise the grid's own error is the larger one; the smaller bound is no step at LITTLE.
    near = kind == "poisson" and multiplier < 10 * LITTLE
    return min(composed, schedule_epsilon(rounds, q, multiplier, delta)) if near else composed


def renyi_epsilon(orders: Sequence[float], divergences: Floats, delta: float) -> float:
    """ε at ``delta`` of Rényi divergences ``(n,)`` at these orders, by the library's conversion."""
    from dp_accounting import rdp

    return float(rdp.compute_epsilon(orders, divergences, delta)[0])
