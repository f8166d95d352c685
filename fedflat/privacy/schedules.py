"""How far one client moves the rounds of a ledger that follow a schedule, from the columns of C in its own lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedflat.core.factors import tree

Entries = Sequence[Mapping[str, Any]]


def columns_of(entries: Entries) -> dict[int, list[float]]:
    """Round -> its column of C from the diagonal down; KeyError where a line lacks it."""
    first = entries[0]
    if first["noise"] == "independent":
        return {int(entry["round"]): [1.0] for entry in entries}
    if first["noise"] == "tree":
        made = tree(int(first["rounds"]))
        return {int(e["round"]): made.columns[int(e["round"])].tolist() for e in entries}
    return {int(entry["round"]): [float(c) for c in entry["column"]] for entry in entries}


def largest_column(entries: Entries) -> float:
    """max ‖c_t‖."""
    return max(math.hypot(*column) for column in columns_of(entries).values())


def moved_squares(entries: Entries, spans: Sequence[tuple[int, int]]) -> float:
    """Σ over spans of s², for clients whose rounds are at least the lines' ``separation`` apart.

    Columns that share no row: the largest sum of ‖c_t‖² with such gaps. Falling equal ones: the earliest rounds.
    Others: Σ_{i,j} |⟨c_i, c_j⟩|, bounded by rows.
    """
    columns, apart = columns_of(entries), int(entries[0]["separation"])
    return math.fsum(
        _moved({t: columns[t] for t in range(first, last) if t in columns}, apart) for first, last in spans
    )


def _moved(columns: Mapping[int, list[float]], apart: int) -> float:
    if all(len(column) <= apart for column in columns.values()):
        return _spaced({t: math.fsum(c * c for c in column) for t, column in columns.items()}, apart)
    dense = _dense(columns)
    products = np.abs(dense.T @ dense)
    rounds = sorted(columns)
    if _falling(list(columns.values())):
        worst = [n for n, t in enumerate(rounds) if (t - rounds[0]) % apart == 0]
        return float(products[np.ix_(worst, worst)].sum())
    rows = {
        t: products[n, n]
        + _spaced({u: products[n, k] for k, u in enumerate(rounds) if u <= t - apart}, apart)
        + _spaced({u: products[n, k] for k, u in enumerate(rounds) if u >= t + apart}, apart)
        for n, t in enumerate(rounds)
    }
    return _spaced(rows, apart)


def _spaced(values: Mapping[int, float], apart: int) -> float:
    """The largest sum of values whose rounds are at least ``apart`` apart: from the last round, with it or without."""
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
