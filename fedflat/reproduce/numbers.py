"""A run's number for a cell: one function for each measure that the papers print."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedflat.report import measures, metrics
from fedflat.report.fates import fate
from fedflat.report.metrics import Run
from fedflat.reproduce.tables import Cell


def measured(cell: Cell, run: Run, first: Run | None = None) -> float | None:
    """The run's number in the cell's unit; inf where the target is never reached, None where the run has none.

    first: the run of the table's first method with the same seed, for what is relative to it.
    """
    return KINDS[cell.measure](cell, run, first)


def _tested(measure: str) -> Callable[[Cell, Run, Run | None], float | None]:
    def accuracy(cell: Cell, run: Run, first: Run | None) -> float | None:
        if not cell.personal:
            shown = measures.shown_round(run, measure)
            return None if shown is None else 100 * shown[1]
        values = [value for _, value in metrics.column(run.private, "personal_accuracy")]
        if not values:
            return None
        return 100 * (max(values) if measure == "best" and not fate(run) else values[-1])

    return accuracy


def _train(cell: Cell, run: Run, first: Run | None) -> float | None:
    shown = measures.shown_round(run, cell.base)
    found = None if shown is None else measures.train_accuracy(run, shown[0])
    return None if found is None else 100 * found


def _gap(cell: Cell, run: Run, first: Run | None) -> float | None:
    found = measures.generalisation_gap(run, cell.base)
    return None if found is None else 100 * found


def _rounds(cell: Cell, run: Run, first: Run | None = None) -> float | None:
    if cell.target is None or measures.shown_round(run) is None:
        return None
    found = measures.rounds_to(run, cell.target / 100)
    return math.inf if found is None else float(found)


def _speedup(cell: Cell, run: Run, first: Run | None) -> float | None:
    own, theirs = _rounds(cell, run), None if first is None else _rounds(cell, first)
    if own is None or theirs is None or math.isinf(theirs):
        return None
    return 0.0 if math.isinf(own) else theirs / own


def _gain(cell: Cell, run: Run, first: Run | None) -> float | None:
    own = measures.shown_round(run, cell.base)
    theirs = None if first is None else measures.shown_round(first, cell.base)
    return None if own is None or theirs is None else 100 * (own[1] - theirs[1])


KINDS: dict[str, Callable[[Cell, Run, Run | None], float | None]] = {
    "best": _tested("best"),
    "final": _tested("final"),
    "train": _train,
    "gap": _gap,
    "rounds": _rounds,
    "speedup": _speedup,
    "gain": _gain,
}
"""One for each key of ``tables.MEASURES``."""
