"""How far one client moves the rounds of a ledger that follow a schedule, from the columns of C in its own lines."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedflat.core.factors import Factor, tree

Entries = Sequence[Mapping[str, Any]]

FIXED = (
    "noise", "bands", "factor", "rounds", "separation", "participations", "chance", "clients", "cohort", "relation",
)  # fmt: skip
"""What all lines of a run say alike."""


def contradictions(entries: Entries) -> list[str]:
    """What a schedule's lines say against each other; none for lines of another law.

    Fields that differ, figures that do not follow from others, and, of a tree or of a run with all its rounds, columns
    that are not the C of the digest, or rows of another inverse.
    """
    if not entries or entries[0].get("separation") is None:
        return []
    first, faults = entries[0], []
    for name in FIXED:
        other = next((e for e in entries if e.get(name) != first.get(name)), None)
        if other is not None:
            faults.append(
                f"round {other['round']} has {name} {other.get(name)}, round {first['round']} {first.get(name)}"
            )
    try:
        return faults or _figures(first) or _another_factor(entries, int(first["rounds"]))
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return ["the lines are not those of a schedule: a field is missing, or no C has such columns"]


def _figures(first: Mapping[str, Any]) -> list[str]:
    rounds, apart, chance = int(first["rounds"]), int(first["separation"]), first.get("chance")
    faults, most = [], -(-rounds // apart)
    if first["participations"] != most:
        faults.append(f"{first['participations']} participations, but {rounds} rounds {apart} apart are {most}")
    if chance is not None and not math.isclose(chance, min(1.0, first["cohort"] * apart / first["clients"])):
        faults.append(f"chance {chance:.6g} is not cohort·separation/clients")
    return faults


def _another_factor(entries: Entries, rounds: int) -> list[str]:
    columns, first = columns_of(entries), entries[0]
    if first["noise"] != "tree" and set(columns) != set(range(rounds)):
        return []  # a tree follows from the number of rounds alone
    factor = tree(rounds) if first["noise"] == "tree" else Factor(np.array([columns[t] for t in range(rounds)]))
    if factor.digest != first["factor"]:
        return ["the columns are not those of the digest"]
    norms = {int(e["round"]): float(e.get("row_norm", 1.0)) for e in entries}
    wrong = [t for t, norm in norms.items() if not math.isclose(norm, factor.row_norms[t], rel_tol=1e-6)]
    return [f"round {t} has a row_norm that is not that of its row" for t in wrong[:1]]


def columns_of(entries: Entries) -> dict[int, list[float]]:
    """Round -> its column of C from the diagonal down; KeyError where a line lacks it."""
    kind, rounds = entries[0]["noise"], [int(entry["round"]) for entry in entries]
    if kind == "independent":
        return {t: [1.0] for t in rounds}
    columns = tree(int(entries[0]["rounds"])).columns[rounds] if kind == "tree" else [e["column"] for e in entries]
    return {t: [float(c) for c in column] for t, column in zip(rounds, columns)}


def gaussians(entries: Entries, noise: float) -> tuple[float, int]:
    """(σ, n): the run is n Gaussian mechanisms of multiplier σ; noise: std of Z over the clip, > 0.

    The rounds of each noise key are one, and they compose. Where groups join by coin, each turn of a client's group is
    one Poisson-sampled Gaussian. LookupError, TypeError or ZeroDivisionError for lines of no schedule.
    """
    first, by_key = entries[0], dict[Any, list[int]]()
    for entry in entries:
        by_key.setdefault(entry.get("key_id"), []).append(int(entry["round"]))
    spans = [(min(rounds), max(rounds) + 1) for rounds in by_key.values()]
    columns = columns_of(entries)
    if first.get("chance") is not None:
        longest = max(math.hypot(*column) for column in columns.values())
        return noise / longest, sum(-(-(last - start) // first["separation"]) for start, last in spans)
    apart = int(first["separation"])
    parts = [{t: columns[t] for t in range(start, last) if t in columns} for start, last in spans]
    return noise / math.sqrt(math.fsum(_moved(span, apart) for span in parts)), 1


def _moved(columns: Mapping[int, list[float]], apart: int) -> float:
    """s² of the columns of one span, for clients whose rounds are at least ``apart`` apart.

    Columns that share no row: the largest sum of ‖c_t‖² with such gaps. Falling equal ones: the earliest rounds.
    Others: Σ_{i,j} |⟨c_i, c_j⟩|, bounded by rows.
    """
    # Columns that share no row are orthogonal, so only their own lengths count.
    if all(len(column) <= apart for column in columns.values()):
        return _spaced({t: math.fsum(c * c for c in column) for t, column in columns.items()}, apart)
    dense = _dense(columns)
    products = np.abs(dense.T @ dense)
    rounds = sorted(columns)
    if _falling(list(columns.values())):
        # Falling entries overlap most where turns begin as early as they may.
        worst = [n for n, t in enumerate(rounds) if (t - rounds[0]) % apart == 0]
        return float(products[np.ix_(worst, worst)].sum())
    rows = {}
    for n, t in enumerate(rounds):
        before = {u: products[n, k] for k, u in enumerate(rounds) if u <= t - apart}
        after = {u: products[n, k] for k, u in enumerate(rounds) if u >= t + apart}
        rows[t] = products[n, n] + _spaced(before, apart) + _spaced(after, apart)
    return _spaced(rows, apart)


def _spaced(values: Mapping[int, float], apart: int) -> float:
    """The largest sum of values whose rounds are at least ``apart`` apart: from the last round, with it or without."""
    # Dynamic programme over rounds, backwards: take a round and skip `apart`, or leave it out.
    best: dict[int, float] = {}
    later = sorted(values, reverse=True)
    for place, t in enumerate(later):
        after = next((u for u in reversed(later[:place]) if u >= t + apart), None)
        least = best[later[place - 1]] if place else 0.0
        best[t] = max(least, values[t] + (0.0 if after is None else best[after]))
    return best[later[-1]] if later else 0.0


def _dense(columns: Mapping[int, list[float]]) -> np.ndarray:
    """The columns one beside the other, ``(rows, rounds)``."""
    dense = np.zeros((max(t + len(column) for t, column in columns.items()), len(columns)))
    for place, t in enumerate(sorted(columns)):
        dense[t : t + len(columns[t]), place] = columns[t]
    return dense


def _falling(columns: Sequence[Sequence[float]]) -> bool:
    """Whether all are cut from one column whose entries fall and are not negative."""
    longest = max(columns, key=lambda column: sum(c != 0 for c in column))
    cut = all(c in (entry, 0.0) for column in columns for c, entry in zip(column, longest))
    return cut and all(a >= b >= 0 for a, b in pairwise(longest))
