"""From counts to bounds on ε: Clopper–Pearson, threshold choice on one half, a Gaussian pair, and one-run guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]


def lowest_rate(successes: Floats | Counts | int, trials: int, failure: float) -> Floats:
    """Clopper–Pearson: a lower limit of the success probability that is wrong with probability ≤ ``failure``."""
    from scipy.stats import beta

    k = np.asarray(successes, dtype=np.float64)
    limit: Floats = np.where(k > 0, beta.ppf(failure, np.maximum(k, 1), trials - k + 1), 0.0)
    return limit


def highest_rate(successes: Floats | Counts | int, trials: int, failure: float) -> Floats:
    """Clopper–Pearson: an upper limit of the success probability that is wrong with probability ≤ ``failure``."""
    from scipy.stats import beta

    k = np.asarray(successes, dtype=np.float64)
    limit: Floats = np.where(k < trials, beta.ppf(1 - failure, k + 1, np.maximum(trials - k, 1)), 1.0)
    return limit


def epsilon_from_rates(likely: Floats, unlikely: Floats, delta: float) -> Floats:
    """ln((p − δ)/p') from a lower limit p in one world and an upper limit p' in the other; 0 where it is negative."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.log(np.maximum(likely - delta, 0.0) / unlikely)
    return np.maximum(np.nan_to_num(found, nan=0.0, neginf=0.0), 0.0)


@dataclass(frozen=True)
class Event:
    """{statistic > threshold} (or ≤, when not ``above``); ``first`` says that world 1 is the likelier one."""

    threshold: float
    above: bool
    first: bool

    def counts(self, absent: Floats, present: Floats) -> tuple[int, int]:
        """(occurrences in the likely world, in the unlikely world) among runs ``(n,)`` of each."""
        hits = [int(((x > self.threshold) == self.above).sum()) for x in (absent, present)]
        return (hits[1], hits[0]) if self.first else (hits[0], hits[1])


def choose_event(absent: Floats, present: Floats, delta: float, failure: float) -> tuple[Event, float]:
    """The event with the best bound on these runs, and that bound (it is optimistic: evaluate it on other runs).

    absent, present: the statistic ``(n,)`` in world 0 (client removed) and world 1.
    """
    trials = len(absent)
    pooled = np.sort(np.concatenate([absent, present]))
    extreme = np.unique(np.geomspace(1, len(pooled) / 2, 80).astype(np.int64)) - 1
    places = np.unique(
        np.concatenate([extreme, len(pooled) - 1 - extreme, np.linspace(0, len(pooled) - 1, 60).astype(int)])
    )
    thresholds = np.unique(pooled[places])
    over = [trials - np.searchsorted(np.sort(x), thresholds, side="right") for x in (absent, present)]
    best = Event(float(thresholds[0]), True, True), -1.0
    for above in (True, False):
        zero, one = over if above else (trials - over[0], trials - over[1])
        for first in (True, False):
            likely, unlikely = (one, zero) if first else (zero, one)
            found = epsilon_from_rates(
                lowest_rate(likely, trials, failure / 2), highest_rate(unlikely, trials, failure / 2), delta
            )
            place = int(found.argmax())
            if found[place] > best[1]:
                best = Event(float(thresholds[place]), above, first), float(found[place])
    return best


def event_bound(event: Event, absent: Floats, present: Floats, delta: float, failure: float) -> float:
    """Lower bound on ε from fresh runs ``(n,)`` of each world; wrong with probability ≤ ``failure``."""
    likely, unlikely = event.counts(absent, present)
    trials = len(absent)
    return float(
        epsilon_from_rates(lowest_rate(likely, trials, failure / 2), highest_rate(unlikely, trials, failure / 2), delta)
    )


def largest_bound(runs: int, delta: float, failure: float) -> float:
    """The cap: what ``runs`` perfectly separated runs of each world show (half of them choose, half evaluate)."""
    trials = runs - runs // 2
    high, low = lowest_rate(trials, trials, failure / 2), highest_rate(0, trials, failure / 2)
    return float(epsilon_from_rates(high, low, delta))


def gaussian_pair_epsilon(
    mean0: float, std0: float, mean1: float, std1: float, delta: float, top: float = 1e3
) -> float:
    """The smallest ε with δ(ε) ≤ ``delta`` in both directions between N(mean0, std0²) and N(mean1, std1²).

    By quadrature on a grid; ``top`` where the two are further apart than that. Standard deviations > 0.
    """
    low = min(mean0 - 12 * std0, mean1 - 12 * std1)
    high = max(mean0 + 12 * std0, mean1 + 12 * std1)
    points = int(min(200_001, max(4001, 40 * (high - low) / min(std0, std1))))
    x = np.linspace(low, high, points)
    step = float(x[1] - x[0])
    logs = [-0.5 * ((x - m) / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)) for m, s in ((mean0, std0), (mean1, std1))]
    return max(_smallest(logs[0], logs[1], step, delta, top), _smallest(logs[1], logs[0], step, delta, top))


def _smallest(log_p: Floats, log_q: Floats, step: float, delta: float, top: float) -> float:
    """Smallest ε ≥ 0 with ∫ max(0, p − e^ε q) ≤ δ, by bisection."""
    p, loss = np.exp(log_p), log_p - log_q

    def excess(epsilon: float) -> float:
        above = loss > epsilon
        return float((p[above] * -np.expm1(epsilon - loss[above])).sum()) * step

    if excess(0.0) <= delta:
        return 0.0
    if excess(top) > delta:
        return top
    low, high = 0.0, top
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) <= delta else (middle, high)
    return high


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely ≥ ``correct`` of ``guesses`` right guesses are under (ε, δ)-DP, at most (Steinke et al.
    2023, Theorem 5.2: m canaries included by fair coins, one run; the number of guesses fixed beforehand).

    β = P[Bin(r, e^ε/(1+e^ε)) ≥ v], plus 2mδ·max_i P[v > Bin ≥ v − i]/i.
    """
    from scipy.stats import binom

    if correct == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, accuracy))
    slope = float((below / steps).max())
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_bound(canaries: int, guesses: int, correct: int, delta: float, failure: float) -> float:
    """The largest ε that the guesses refute at significance ``failure``: a lower bound on ε; 0 if none is refuted."""
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) >= failure:
        return 0.0
    high = 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) < failure:
        high *= 2
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        refuted = one_run_p_value(canaries, guesses, correct, middle, delta) < failure
        low, high = (middle, high) if refuted else (low, middle)
    return low
