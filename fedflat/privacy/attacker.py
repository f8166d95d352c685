"""The best attacker against what a run released, from its ledger: what nobody can do better, whatever they know.

Such an attacker knows every other client's data and the client's own, sees all that was released, and asks whether the
client was in it. Its true positives at a fixed share of false ones say what an ε means.

(ε, δ) bounds true positives β at false ones α by min(e^ε·α + δ, 1 − e^−ε·(1 − α − δ)) (Wasserman and Zhou 2010; Dong,
Roth and Su 2022); a mechanism has such a pair for every δ, so the least over all of them holds too. That part does not
ask what the mechanism is: it is given the accountant's ε as a function of δ.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range
from fedflat.privacy.accounting.gaussian import log_delta
from fedflat.privacy.together import Published, curve

FALSE_POSITIVES = 0.01
SLOW = ("ddgauss",)
"""Mechanisms of the ledger whose curve takes minutes, for whoever cannot wait."""
GAUSSIAN = "the releases amount to one Gaussian mechanism with this μ"
PROVEN = "the least over all (ε, δ) that the accountant proves of these rounds"
STATED = "the stated (ε, δ) alone, as no more is known of this law"


@dataclass(frozen=True)
class Attacker:
    """Bounds on every attacker. true_positives: at ``false_positives``; 1 says nothing.

    mu: every attacker has at most Φ(Φ⁻¹(α) + μ) + slack true positives; None where no such μ is known. slack: 0 for a
    Gaussian, else the run's δ. how: what the bounds are taken from.
    """

    true_positives: float
    false_positives: float
    mu: float | None
    slack: float
    how: str


def attacker(entries: Sequence[Mapping[str, Any]], epsilon: float | None, delta: float) -> Attacker | None:
    """Against one run: its ledger's lines, its proven ε at δ; None where no finite ε is proven."""
    return attacker_of([Published("this run", epsilon, delta, entries)], epsilon, delta)


def attacker_of(runs: Sequence[Published], epsilon: float | None, delta: float) -> Attacker | None:
    """Against several runs published together, whose total is (ε, δ); None where that ε is not finite."""
    if epsilon is None or not math.isfinite(epsilon):
        return None
    # Lists have no hash, so the lines are kept as text.
    kept = tuple((run.name, run.epsilon, run.delta, json.dumps(list(run.entries)), run.folder) for run in runs)
    return _found(kept, epsilon, delta)


@lru_cache(maxsize=16)
def _found(kept: tuple[tuple[Any, ...], ...], epsilon: float, delta: float) -> Attacker:
    """Kept: a page, its card and an export ask for the same."""
    found = curve([Published(n, known, at, json.loads(lines), where) for n, known, at, lines, where in kept])
    # Nothing is known of the law but one pair (ε, δ), which still bounds every attacker.
    if found is None:
        return Attacker(positives_at(epsilon, delta, FALSE_POSITIVES), FALSE_POSITIVES, None, 0.0, STATED)
    if found.mu is not None:
        return Attacker(gaussian_positives(found.mu, FALSE_POSITIVES), FALSE_POSITIVES, found.mu, 0.0, GAUSSIAN)
    mu = gaussian_mu(found.epsilon_of, delta)
    at = true_positives(found.epsilon_of, FALSE_POSITIVES)
    return Attacker(at, FALSE_POSITIVES, mu if math.isfinite(mu) else None, delta, PROVEN)


def gaussian_positives(mu: float, false_positives: float) -> float:
    """Φ(Φ⁻¹(α) + μ): what the best attacker on a Gaussian with sensitivity / std = μ reaches."""
    from scipy.stats import norm

    return float(norm.cdf(norm.ppf(false_positives) + mu))


# ------------------------------------------------------------------------------------ from (ε, δ) to an attacker

Floats = NDArray[np.float64]
EpsilonOf = Callable[[float], float]
"""δ in (0, 1) -> a proven ε, inf where none is; falling in δ, for both directions of neighbours."""

_GRID = np.linspace(-18.0, 6.0, 25)
"""log(δ/(1 − δ)) of the first questions."""
_REFINED = 8
"""Times that the interval around the best of them is made shorter by a third."""
_POINTS = 64
"""Of the curve that a Gaussian's is laid over."""
_HALVINGS = 30
_MOST_MU = 1e6


def _logistic(t: float) -> float:
    return 1 / (1 + math.exp(-t))


def positives_at(epsilon: float, delta: float, false_positives: float) -> float:
    """The most true positives that one (ε, δ) allows at α = ``false_positives``; at most 1."""
    if epsilon > 700:
        return 1.0
    below = math.exp(epsilon) * false_positives + delta
    return min(1.0, below, 1 - math.exp(-epsilon) * (1 - false_positives - delta))


def true_positives(epsilon_of: EpsilonOf, false_positives: float) -> float:
    """An upper bound on any attacker's true positives at α = ``false_positives`` in [0, 1].

    Every δ gives a bound; the least of about forty is returned.
    """
    in_range("false positives", false_positives, 0, 1)

    def at(t: float) -> float:
        delta = _logistic(t)
        return positives_at(epsilon_of(delta), delta, false_positives)

    found = [at(t) for t in _GRID]
    place = int(np.argmin(found))
    low, high = float(_GRID[max(place - 1, 0)]), float(_GRID[min(place + 1, len(_GRID) - 1)])
    best = found[place]
    for _ in range(_REFINED):
        # The bound has one valley in log δ, which a ternary search finds without derivatives.
        third = (high - low) / 3
        left, right = at(low + third), at(high - third)
        low, high = (low, high - third) if left <= right else (low + third, high)
        best = min(best, left, right)
    return best


def gaussian_mu(epsilon_of: EpsilonOf, slack: float) -> float:
    """The least μ found such that δ(ε) ≤ δ(ε; μ) + ``slack`` for every ε ≥ 0; inf where none is.

    Every attacker then has at most Φ(Φ⁻¹(α) + μ) + slack true positives: Gaussian DP with μ, but for ``slack``. Without
    slack hidden cohorts have no μ that says anything: far out, their losses are those of a client that is always seen.
    """
    in_range("slack", slack, 0, 1, open_low=True, open_high=True)
    largest = epsilon_of(slack)
    if largest == 0:
        return 0.0
    if not math.isfinite(largest):
        return math.inf
    deltas = _deltas(epsilon_of, slack)
    # The last δ was chosen as the one at which ε is 0.
    epsilons = np.array([epsilon_of(delta) for delta in deltas[:-1]] + [0.0])
    low, high = 0.0, 1.0
    while not _covers(epsilons, deltas - slack, high):
        low, high = high, high * 2
        if high > _MOST_MU:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(epsilons, deltas - slack, middle) else (middle, high)
    return high


def _deltas(epsilon_of: EpsilonOf, slack: float) -> Floats:
    """From ``slack`` to the least δ found at which ε is 0, evenly in log(δ/(1 − δ))."""
    start = math.log(slack) - math.log1p(-slack)
    low, high = start, 30.0
    for _ in range(_HALVINGS // 2):
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_of(_logistic(middle)) == 0 else (middle, high)
    return np.array([slack, *(_logistic(float(t)) for t in np.linspace(start, high, _POINTS)[1:])])


def _covers(epsilons: Floats, deltas: Floats, mu: float) -> bool:
    """Whether δ(·; μ) lies above the curve through the points, ε falling, everywhere between them.

    Both curves are convex in x = e^ε: the true one lies under its chords, and a Gaussian's above its tangents. So two
    straight lines are compared, at both ends of each interval, with the tangent at its one or its other end.
    """
    from scipy.special import log_ndtr

    one = np.full(len(epsilons), mu)
    height = np.exp(log_delta(epsilons, one))
    slope = np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))  # −x·dδ/dx
    (above, below), (at_above, at_below) = (epsilons[:-1], epsilons[1:]), (deltas[:-1], deltas[1:])
    gap = above - below
    from_above = height[:-1] - slope[:-1] * np.expm1(-gap)
    with np.errstate(over="ignore", invalid="ignore"):
        from_below = height[1:] - slope[1:] * np.expm1(gap)
    # A straight line lies under another one if it does at both ends.
    upper = (at_above <= height[:-1]) & (at_below <= from_above)
    lower = (at_below <= height[1:]) & (at_above <= from_below)
    return bool(np.all(upper | lower))
