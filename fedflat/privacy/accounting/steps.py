"""Rounds of different laws composed: ε of so many of each, by convolving their loss distributions.

Each direction of neighbours (a client leaves, a client joins) is convolved on its own; the larger ε is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedflat.privacy.accounting import composition
from fedflat.privacy.accounting.composition import LossDistribution, one_round
from fedflat.privacy.accounting.curves import by_delta, compose_epsilon, compose_renyi, grid_step
from fedflat.privacy.accounting.gaussian import gaussian_epsilon, schedule_epsilon
from fedflat.privacy.accounting.independent import loss_moments

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
    convolved = max(composition.together([(both[way], count) for both, count in found], delta) for way in (0, 1))
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
