"""A run whose round 0 has noise of its own: two Gaussian laws, composed as they are (docs/representations.md).

The split is a public number that is fixed before the run: round 0 takes a share s of Σ_t 1/σ_t², which at full
participation is the squared μ of the one Gaussian that all rounds amount to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fedflat.core.checks import in_range, whole, wrong
from fedflat.privacy.trust import Planned


def ratio(share: float, rounds: int) -> float:
    """σ_0/σ at which round 0 takes ``share`` of Σ 1/σ_t² over ``rounds`` ≥ 2, of which the others have one σ."""
    in_range("start.share", share, 0, 1, open_low=True, open_high=True)
    if whole("rounds", rounds) < 2:
        raise wrong("rounds", rounds, "at least 2 with start", hint="One round of it is algorithm: class-statistics.")
    return math.sqrt((1 - share) / (share * (rounds - 1)))


def check(plan: Planned, adaptive: bool) -> None:
    """Refuse what round 0's own noise has no proven account for.

    Raises:
        InputError: with the reason.
    """
    if plan.mechanism is not None:
        raise wrong("start", f"{plan.mechanism.name} noise", "independent Gaussian noise, whose rounds may differ")
    if plan.trust != "central":
        raise wrong("privacy.trust", plan.trust, "central with start")
    for where, found in (("privacy.noise_cohort", plan.noise_cohort), ("privacy.selection", plan.selection)):
        if found is not None:
            raise wrong(where, "a value", "nothing with start", hint="Its account takes all rounds to be alike.")
    if adaptive:
        raise wrong("privacy.clip", "adaptive", "one constant clip with start")


def spent(plan: Planned, count: int) -> dict[float, int]:
    """Event multiplier -> how many of ``count`` ≥ 1 charged rounds: round 0 as often as it was charged, then others."""
    first = min(plan.begun, count)
    return Counter({plan.at_round(0).event_multiplier: first}) + Counter({plan.event_multiplier: count - first})


def begun(entries: Iterable[Mapping[str, Any]]) -> int:
    """How often a ledger's lines charge round 0; 1 before the first line."""
    return max(1, sum(int(entry["round"]) == 0 for entry in entries))
