"""Turn counts into lower bounds on ε, and name an audit's result."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import beta

from fedflat.core import plain

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Event:
    """{statistic > threshold} (or ≤, when not ``above``); ``first`` says that world 1 is the likelier one."""

    threshold: float
    above: bool
    first: bool

    def counts(self, absent: Floats, present: Floats) -> tuple[int, int]:
        """Return (occurrences in the likely world, in the unlikely world) among runs ``(n,)`` of each."""
        hits = [int(((x > self.threshold) == self.above).sum()) for x in (absent, present)]
        return (hits[1], hits[0]) if self.first else (hits[0], hits[1])

    def bound(self, absent: Floats, present: Floats, delta: float, failure: float) -> float:
        """Return the lower bound on ε from fresh runs ``(n,)`` of each world; wrong with probability ≤ ``failure``."""
        return float(bound_of(*self.counts(absent, present), len(absent), delta, failure))


def bound_of(likely: Counts | int, unlikely: Counts | int, trials: int, delta: float, failure: float) -> Floats:
    """Return the lower bound on ε from how often an event occurred in ``trials`` runs of either world; wrong with
    probability ≤ ``failure``.

    It is ln((p − δ)/p'), 0 where that is negative: p a lower Clopper–Pearson limit in the likely world, p' an upper one
    in the other.
    """
    # Without a success the law has no lower limit, and without a failure no upper one, which scipy says with NaN.
    low = np.nan_to_num(beta.ppf(failure / 2, likely, trials - likely + 1), nan=0.0)
    high = np.nan_to_num(beta.ppf(1 - failure / 2, unlikely + 1, trials - unlikely), nan=1.0)
    with np.errstate(divide="ignore"):
        return cast(Floats, np.maximum(np.log(np.maximum(low - delta, 0.0) / high), 0.0))


def choose_event(absent: Floats, present: Floats, delta: float, failure: float) -> tuple[Event, float]:
    """Return the event with the best bound on these runs, and that bound (it is optimistic: evaluate it on other runs).

    absent, present: the statistic ``(n,)`` in world 0 (client removed) and world 1.
    """
    trials = len(absent)
    # Thresholds lie where the tails are, as leaks show there, and evenly in between.
    pooled = np.sort(np.concatenate([absent, present]))
    extreme = np.unique(np.geomspace(1, len(pooled) / 2, 80).astype(np.int64)) - 1
    even = np.linspace(0, len(pooled) - 1, 60).astype(int)
    thresholds = np.unique(pooled[np.concatenate([extreme, len(pooled) - 1 - extreme, even])])
    over = [trials - np.searchsorted(np.sort(x), thresholds, side="right") for x in (absent, present)]
    best = Event(float(thresholds[0]), True, True), -1.0
    for above in (True, False):
        zero, one = over if above else (trials - over[0], trials - over[1])
        for first in (True, False):
            bounds = bound_of(*((one, zero) if first else (zero, one)), trials, delta, failure)
            place = int(bounds.argmax())
            if bounds[place] > best[1]:
                best = Event(float(thresholds[place]), above, first), float(bounds[place])
    return best


def assumptions(kind: str, **numbers: float) -> tuple[str, ...]:
    """Return what audits of a kind rest on, from ``assumptions.yaml``, with the numbers that the code has."""
    text = Path(__file__).with_name("assumptions.yaml").read_text(encoding="utf-8")
    return tuple(sentence.format(**numbers) for sentence in yaml.safe_load(text)[kind])


@dataclass(frozen=True)
class AuditResult:
    """One audit of one method or run.

    kind: worlds, noise or mechanism. claimed: ε the accounting claims for what was audited;
    proven: ε that is proven for it (inf where no bound exists). lower_bound: ε it has at least, except with probability
    1 − ``confidence``; None where the audit gives none. canary, statistic: those that gave the number. runs: releases
    looked at, per world for a mechanism. violations: of the exact contract 2b (empty: it holds), for worlds every pair
    further apart than C, for noise every difference from the plan. details: of
    worlds, the greatest ``movement`` over C, by back end and data in ``table``; of noise, its std over the plan's,
    ``ratio``. assumptions: what the number rests on, one sentence each.
    """

    kind: str
    method: str
    claimed: float = math.inf
    proven: float = math.inf
    lower_bound: float | None = None
    confidence: float | None = None
    canary: str = "none"
    statistic: str = "not run"
    runs: int = 0
    seconds: float = 0.0
    assumptions: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exceeds_proven(self) -> bool:
        """The proof or the code is wrong: more leaks than is proven to leak at most, or contract 2b is broken."""
        return (self.lower_bound is not None and self.lower_bound > self.proven) or bool(self.violations)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; an infinite number becomes None."""
        return {name: plain(value) for name, value in (asdict(self) | {"exceeds_proven": self.exceeds_proven}).items()}


def not_run(kind: str, method: str, reason: str) -> AuditResult:
    """Return the result of an audit, of kind worlds or noise, that measured nothing."""
    figure = "movement" if kind == "worlds" else "ratio"
    return AuditResult(kind, method, assumptions=(reason,), details={figure: None, "reason": reason})
