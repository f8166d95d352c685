"""The best attacker against what a run released, from its ledger: what nobody can do better, whatever they know.

Such an attacker knows every other client's data and the client's own, sees all that was released, and asks whether the
client was in it. Its true positives at a fixed share of false ones say what an ε means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedflat.core.checks import in_range
from fedflat.privacy.accounting.tradeoff import gaussian_mu, positives_at, true_positives
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


def attacker(
    entries: Sequence[Mapping[str, Any]], epsilon: float | None, delta: float,
    false_positives: float = FALSE_POSITIVES,
) -> Attacker | None:  # fmt: skip
    """Against one run: its ledger's lines, its proven ε at δ; None where no finite ε is proven."""
    return attacker_of([Published("this run", epsilon, delta, entries)], epsilon, delta, false_positives)


def attacker_of(
    runs: Sequence[Published], epsilon: float | None, delta: float, false_positives: float = FALSE_POSITIVES
) -> Attacker | None:
    """Against several runs published together, whose total is (ε, δ); None where that ε is not finite."""
    in_range("false positives", false_positives, 0, 1)
    if epsilon is None or not math.isfinite(epsilon):
        return None
    # Lists have no hash, so the lines are kept as text.
    kept = tuple((run.name, run.epsilon, run.delta, json.dumps(list(run.entries)), run.folder) for run in runs)
    return _found(kept, epsilon, delta, false_positives)


@lru_cache(maxsize=16)
def _found(kept: tuple[tuple[Any, ...], ...], epsilon: float, delta: float, false_positives: float) -> Attacker:
    """Kept: a page, its card and an export ask for the same."""
    found = curve([Published(n, known, at, json.loads(lines), where) for n, known, at, lines, where in kept])
    # Nothing is known of the law but one pair (ε, δ), which still bounds every attacker.
    if found is None:
        return Attacker(positives_at(epsilon, delta, false_positives), false_positives, None, 0.0, STATED)
    if found.mu is not None:
        return Attacker(gaussian_positives(found.mu, false_positives), false_positives, found.mu, 0.0, GAUSSIAN)
    mu = gaussian_mu(found.epsilon_of, delta)
    at = true_positives(found.epsilon_of, false_positives)
    return Attacker(at, false_positives, mu if math.isfinite(mu) else None, delta, PROVEN)


def gaussian_positives(mu: float, false_positives: float) -> float:
    """Φ(Φ⁻¹(α) + μ): what the best attacker on a Gaussian with sensitivity / std = μ reaches."""
    from scipy.stats import norm

    return float(norm.cdf(norm.ppf(false_positives) + mu))
