"""What several runs on the same clients cost when all of them are published: the sum of their ε, and of their δ.

That is basic composition, which bounds every law. Where runs differ in their neighbours the total is zero-out's: a slot
that is emptied is one way of replacing a client's data, so a replace-one account bounds it too; and beside a run whose
turns stay, only emptied ones are covered. Runs that share a noise key without being one release have no finite total.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.privacy.ledger import event


@dataclass(frozen=True)
class Published:
    """One run as its folder states it. epsilon: the proven one, None where none is. released: the digest of its weights
    and its metrics, to compare releases; None where there is no digest."""

    name: str
    epsilon: float | None
    delta: float
    entries: Sequence[Mapping[str, Any]] = ()
    released: tuple[str, Sequence[Mapping[str, Any]]] | None = None


@dataclass(frozen=True)
class Total:
    """ε (inf where none is finite) at δ of publishing ``runs`` together; ``unbounded``: those without a guarantee.

    reasons: how it was computed where that is not plain composition, or why there is no finite total.
    """

    runs: tuple[str, ...]
    unbounded: tuple[str, ...]
    epsilon: float
    delta: float
    relation: str
    reasons: tuple[str, ...] = ()


def total(runs: Sequence[Published]) -> Total:
    """What publishing all of ``runs`` costs somebody who is the same client in each; see the module."""
    private = [run for run in runs if run.epsilon is not None and math.isfinite(run.epsilon)]
    unbounded = tuple(run.name for run in runs if run not in private)
    names = tuple(run.name for run in private)
    relations = {str(e.get("relation")) for run in private for e in run.entries}
    stricter = relations == {"replace-one"} and all(run.entries for run in private)
    relation = "replace-one" if stricter else "zero-out" if "zero-out" in relations else "add-remove"
    counted, reasons, broken = _without_repeats(private)
    delta = math.fsum(run.delta for run in counted)
    if broken:
        return Total(names, unbounded, math.inf, delta, relation, (broken,))
    if len(relations) > 1 and "replace-one" in relations:
        reasons.append("Runs with replace-one accounts count for zero-out neighbours, which those accounts bound too.")
    if len(counted) > 1:
        reasons.append("ε and δ of the runs are added, which bounds runs of any law.")
    return Total(names, unbounded, math.fsum(run.epsilon or 0.0 for run in counted), delta, relation, tuple(reasons))


def _without_repeats(runs: Sequence[Published]) -> tuple[list[Published], list[str], str]:
    """The runs that count, what to say of repeats, and why there is no total where noise was used twice.

    Runs that share a noise key are one release if all that was released is the same; otherwise their difference is
    free of noise.
    """
    counted: list[Published] = []
    reasons: list[str] = []
    for run in runs:
        # The same key is the same noise: two sums under it would subtract to a sum without noise.
        twin = next((other for other in counted if _keys(run) & _keys(other)), None)
        if twin is None:
            counted.append(run)
        elif _same_release(run, twin):
            reasons.append(f"{run.name} is {twin.name} again (same noise key, same weights): it counts once.")
        else:
            why = "share a noise key but not what they released: their difference is free of noise"
            return counted, reasons, f"{twin.name} and {run.name} {why}, so no total is finite."
    return counted, reasons, ""


def _keys(run: Published) -> set[str]:
    return {str(entry["key_id"]) for entry in run.entries if entry.get("key_id")}


def _same_release(run: Published, other: Published) -> bool:
    """Whether events, released metrics and the released weights are the same, bit for bit."""
    alike = [event(e) for e in run.entries] == [event(e) for e in other.entries]
    return alike and run.released is not None and run.released == other.released
