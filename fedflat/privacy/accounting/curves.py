"""ε after any number of rounds: identical ones by one accountant, cheaply once set up; others by convolving them.

What dp-accounting 0.6 may be asked, and how: its PLD and RDP accountants disagree on what REPLACE_ONE means for a
Gaussian (PLD doubles the sensitivity, RDP does not), so it is never used for Poisson or plain Gaussian events. Their
multiplier is always std / sensitivity *under the relation*, and the events are composed under add-remove. Only
SampledWithoutReplacement is composed under REPLACE_ONE, the one relation the library accepts for it.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import InputError, in_range, one_of, whole, wrong
from fedflat.privacy.accounting.composition import LossDistribution, one_round, together
from fedflat.privacy.accounting.gaussian import LITTLE, gaussian_epsilon, schedule_epsilon
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


def gdp_mu(q: float, multiplier: float, rounds: int) -> float:
    """μ of the central-limit approximation q·√(T(e^{1/σ²} − 1)) (Bu et al. 2019); √T/σ at q = 1; inf at σ = 0."""
    if multiplier == 0:
        return math.inf
    if q == 1:
        return math.sqrt(rounds) / multiplier
    exponent = multiplier**-2
    return q * math.sqrt(rounds * math.expm1(exponent)) if exponent < 700 else math.inf


def proving(accountant: str) -> str:
    """The accountant's name if it proves what it says.

    Raises:
        InputError: an approximation, with where to get it, or no such accountant.
    """
    if accountant in APPROXIMATIONS:
        place = "fedflat.privacy.accounting.epsilon.approximate_epsilon"
        hint = f"{accountant} is an approximation, no bound: {place} gives it."
        raise wrong("privacy.accountant", accountant, ", ".join(PROVEN), hint=hint)
    return str(one_of("privacy.accountant", accountant, PROVEN))


def _kind(event: Any) -> tuple[str, float, float]:
    """Return (kind, q, multiplier) of an event: gaussian, poisson, truncated or without replacement."""
    import dp_accounting as dp

    inner = getattr(event, "event", None)
    if isinstance(event, dp.GaussianDpEvent):
        return "gaussian", 1.0, event.noise_multiplier
    if isinstance(event, dp.PoissonSampledDpEvent) and isinstance(inner, dp.GaussianDpEvent):
        return "poisson", event.sampling_probability, inner.noise_multiplier
    if isinstance(event, dp.TruncatedSubsampledGaussianDpEvent):
        return "truncated", event.sampling_probability, event.noise_multiplier
    if isinstance(event, dp.SampledWithoutReplacementDpEvent) and isinstance(inner, dp.GaussianDpEvent):
        return "without replacement", event.sample_size / event.source_dataset_size, inner.noise_multiplier
    raise wrong("event", type(event).__name__, "a round of Gaussian noise: everybody's, or of sampled clients")


def refusal(kind: str, accountant: str) -> str:
    """Return why ``accountant`` cannot account an event of this kind; empty if it can."""
    if kind == "truncated" and accountant != "pld":
        return f"{accountant} has no bound for truncated Poisson sampling; use pld"
    if kind == "without replacement" and accountant == "fft":
        return f"{accountant} covers Poisson sampling, not cohorts of fixed size; use rdp or pld"
    return ""


def _accountable(event: Any, accountant: str) -> tuple[str, float, float]:
    """Return :func:`_kind` of an event that the accountant has a bound for, else raise InputError."""
    kind, q, multiplier = _kind(event)
    reason = refusal(kind, accountant)
    if reason:
        raise InputError(f"privacy.accountant: {reason}.")
    return kind, q, multiplier


def grid_step(q: float, multiplier: float) -> float:
    """Grid spacing: 1/300 of the loss's standard deviation (error below 1e-5 of ε), finer only as far as is cheap.

    Never coarser than dp-accounting's own 1e-4 unless the losses are that large; at most about 40,000 points then.
    """
    deviation, span = loss_moments(q, multiplier)
    # One step moves ε by at most itself; a step of 1/300 of the spread is lost among the rounds.
    return max(deviation / 300, min(span / 40_000, 1e-4))


@lru_cache(maxsize=16)
def _losses(event: Any) -> tuple[LossDistribution, ...]:
    """The loss distributions of an event of kind poisson or truncated, kept: making them is what takes time."""
    kind, q, multiplier = _kind(event)
    return one_round(event, kind, q, multiplier, grid_step(q, multiplier))


def renyi(event: Any, rounds: int) -> tuple[tuple[float, ...], NDArray[np.float64]]:
    """Orders > 1 and the Rényi divergences ``(n,)`` of ``rounds`` repetitions of an event, both directions; inf of no
    noise. The event's multiplier is std / sensitivity under its relation.

    Raises:
        InputError: the library has no bound for this event.
    """
    _, _, multiplier = _accountable(event, "rdp")
    if multiplier == 0:
        return RDP_ORDERS, np.full(len(RDP_ORDERS), math.inf)
    orders, one = _renyi(event)
    return orders, rounds * one


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the library's notes that an order did not converge (it then leaves it out, which is still a bound), and that
    a divergence was rounded below zero (much noise; δ alone then covers what is left)."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "failed to converge" not in text and "Negative Renyi divergence" not in text

    # A filter and not a level: other warnings of the library must still be seen.
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@lru_cache(maxsize=16)
def _renyi(event: Any) -> tuple[tuple[float, ...], NDArray[np.float64]]:
    """Orders and the library's Rényi divergences ``(n,)`` of one repetition; kept."""
    from dp_accounting import NeighboringRelation, rdp

    # The library accepts one relation for these events, and another one for all others.
    replaced = _kind(event)[0] == "without replacement"
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    orders = WITHOUT_REPLACEMENT_ORDERS if replaced else RDP_ORDERS
    accountant = rdp.RdpAccountant(orders, relation)
    with quiet():
        accountant.compose(event)
    return tuple(float(order) for order in orders), accountant.rdp


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
    kind, q, multiplier = _accountable(event, proving(accountant))
    in_range("delta", delta, 0, 1, open_low=True, open_high=True)
    if kind == "truncated" and 0 < multiplier < LITTLE:
        raise wrong("privacy.noise_multiplier", multiplier, f"0, or at least {LITTLE:g} with truncated cohorts")
    if whole("rounds", rounds) == 0:
        return 0.0
    if multiplier == 0:
        return math.inf
    if accountant == "rdp":
        return compose_renyi([(event, rounds)], delta)
    # A sum of Gaussians is a Gaussian: no grid is as exact as the formula.
    if kind == "gaussian" or (kind == "poisson" and q >= 1):
        return gaussian_epsilon(math.sqrt(rounds) / multiplier, delta)
    if kind == "without replacement":
        # Both are bounds on their own, so the smaller one is too.
        return min(compose_renyi([(event, rounds)], delta), schedule_epsilon(rounds, q, multiplier, delta))
    if kind == "poisson" and multiplier < LITTLE:
        return schedule_epsilon(rounds, q, multiplier, delta)
    if accountant == "fft":
        return epsilon_bounds(q, multiplier, rounds, delta)[1]
    found = max(part.epsilon(rounds, delta) for part in _losses(event))
    # With hardly any noise the grid's own error is the larger one; the smaller bound is no step at LITTLE.
    near = kind == "poisson" and multiplier < 10 * LITTLE
    return min(found, schedule_epsilon(rounds, q, multiplier, delta)) if near else found


def compose_renyi(events: Sequence[tuple[Any, int]], delta: float) -> float:
    """ε of rounds, (event, how many): their Rényi divergences add up."""
    each = [(_renyi(event), count) for event, count in events]
    return renyi_epsilon(each[0][0][0], np.sum([count * one for (_, one), count in each], axis=0), delta)


def renyi_epsilon(orders: Sequence[float], divergences: NDArray[np.float64], delta: float) -> float:
    """ε at ``delta`` of Rényi divergences ``(n,)`` at these orders, by the library's conversion."""
    from dp_accounting import rdp

    with quiet():
        return float(rdp.compute_epsilon(orders, divergences, delta)[0])


def by_delta(event: Any, rounds: int) -> Callable[[float], float]:
    """ε of ``rounds`` ≥ 1 repetitions as a function of δ in (0, 1), by the accountant pld; made for many questions."""
    kind, q, multiplier = _kind(event)
    if kind not in ("poisson", "truncated") or q >= 1 or multiplier < 10 * LITTLE:
        return lambda delta: compose_epsilon(event, rounds, delta)
    each = [part.curve(rounds) for part in _losses(event)]
    return lambda delta: max(one(delta) for one in each)


# ----------------------------------------------------------------------------- rounds of different laws

MOST_POINTS = 200_000
"""Of one round's distribution on the common grid; with more the grid is coarser, and ε a little larger."""


class Step(NamedTuple):
    """The law of one round. kind: gaussian, poisson, truncated, fixed, or known (its cohort is, chance q).

    sigma: noise std / sensitivity. clients, limit: M and the cap of truncated, or the cohort of fixed.
    """

    kind: str
    q: float
    sigma: float
    clients: int = 0
    limit: int = 0


def step(sampling: str, q: float, sigma: float, clients: int, limit: int) -> Step:
    """The law of a round of hidden cohorts; limit: the cap of truncated (no cap from M on), the cohort of fixed."""
    if sampling == "fixed" or (sampling == "truncated" and limit < clients):
        return Step(sampling, q, sigma, clients, limit)
    return Step("gaussian", 1.0, sigma) if q >= 1 else Step("poisson", q, sigma)


def steps_epsilon(steps: Mapping[Step, int], delta: float) -> float:
    """ε at ``delta`` of all rounds together: law -> how many. inf where a round has no noise, or δ ≤ 0."""
    if delta <= 0 or any(step.sigma == 0 for step in steps):
        return math.inf
    merged = gaussians_in_one(steps)
    if not merged:
        return 0.0
    # One law alone is stated exactly as a single run would state it, not through a common grid.
    if len(merged) == 1:
        ((step, count),) = merged.items()
        return alone(step, count, delta)
    # Distributions can be multiplied only if they lie on one grid.
    spacing = _spacing(merged)
    found = [(_directions(step, spacing), count) for step, count in merged.items()]
    convolved = max(together([(both[way], count) for both, count in found], delta) for way in (0, 1))
    if any(step.kind != "fixed" for step in merged):
        return convolved
    return min(convolved, compose_renyi([(_event(step), count) for step, count in merged.items()], delta))


def gaussians_in_one(steps: Mapping[Step, int]) -> dict[Step, int]:
    """Plain Gaussians are one Gaussian: their 1/σ² add up. Noise without bound or end costs nothing."""
    rest = {step: n for step, n in steps.items() if step.kind != "gaussian" and n and math.isfinite(step.sigma)}
    mu = math.sqrt(math.fsum(n / step.sigma**2 for step, n in steps.items() if step.kind == "gaussian"))
    return rest | ({Step("gaussian", 1.0, 1 / mu): 1} if mu else {})


def alone(step: Step, count: int, delta: float) -> float:
    """ε of ``count`` ≥ 1 rounds of one law: the figure that a single run of so many rounds states."""
    if step.kind == "gaussian":
        return gaussian_epsilon(math.sqrt(count) / step.sigma, delta)
    if step.kind == "known":
        return schedule_epsilon(count, step.q, step.sigma, delta)
    return compose_epsilon(_event(step), count, delta)


def alone_by_delta(step: Step, count: int) -> Callable[[float], float]:
    """As :func:`alone`, as a function of δ, for many questions."""
    if step.kind in ("gaussian", "known"):
        return lambda delta: alone(step, count, delta)
    return by_delta(_event(step), count)


def _event(step: Step) -> Any:
    import dp_accounting as dp

    if step.kind == "truncated":
        return dp.TruncatedSubsampledGaussianDpEvent(step.clients, step.q, step.limit, step.sigma)
    inner = dp.GaussianDpEvent(step.sigma)
    if step.kind == "fixed":
        return dp.SampledWithoutReplacementDpEvent(step.clients, step.limit, inner)
    return dp.PoissonSampledDpEvent(step.q, inner)


def _spacing(steps: Mapping[Step, int]) -> float:
    """One grid for all: the finest that any asks for, but no more points than fit."""
    seen = [(step.q if step.kind in ("poisson", "truncated") else 1.0, step.sigma) for step in steps]
    finest = min(grid_step(q, sigma) for q, sigma in seen)
    return max(finest, max(loss_moments(q, sigma)[1] for q, sigma in seen) / MOST_POINTS)


@lru_cache(maxsize=64)
def _directions(step: Step, spacing: float) -> tuple[LossDistribution, LossDistribution]:
    """One round's loss distribution when a client leaves, and when it joins."""
    if step.kind in ("poisson", "truncated"):
        both = one_round(_event(step), step.kind, step.q, step.sigma, spacing)
        return both[0], both[-1]
    (found,) = one_round(None, "gaussian", 1.0, step.sigma, spacing)
    if step.kind != "gaussian":
        found = _seen(found, step.q)
    return found, found


def _seen(taking_part: LossDistribution, q: float) -> LossDistribution:
    """A round of which everybody sees whether the client takes part: with chance 1 − q nothing is lost."""
    lowest = min(taking_part.lowest, 0)
    probs = np.zeros(max(taking_part.lowest + len(taking_part.probs), 1) - lowest)
    start = taking_part.lowest - lowest
    probs[start : start + len(taking_part.probs)] = q * taking_part.probs
    # Not taking part is a loss of exactly 0.
    probs[-lowest] += 1 - q
    return LossDistribution(probs, lowest, taking_part.step, q * taking_part.infinity)
