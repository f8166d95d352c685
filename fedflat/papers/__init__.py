"""Reproduce the papers' tables and figures: what they print, what runs here, and whether methods rank alike.

Example: a row of a table at a small scale, with what is claimed of the paper's setting and proven of ours::

    from fedflat.papers import dry, find, train

    table = find("000", "table-1").only(["CIFAR-10, IID"], ["DP-FedSAM"])
    print([(row.cell.published, row.claimed, row.proven) for row in dry(table).rows])
    print(train(table, "runs/table-1", "smoke").rows[0].ours)

A YAML file for each table (``tables``) and one for all figures (``figures``) say what the papers print and from which
recipe. ``scales`` makes recipes smaller and tunes all methods alike, ``rows`` plans and trains them, ``outcome`` says
whether ours rank as printed, ``measured`` keeps what was measured here. ``board`` is the leaderboard.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.papers.figures import Drawn, PaperFigure, abouts, draw, find_figure, is_figure
    from fedflat.papers.measured import check_keep, drawings, keep, outcomes
    from fedflat.papers.outcome import Outcome, Row, sentences
    from fedflat.papers.rows import dry, train
    from fedflat.papers.scales import SCALES, scaled
    from fedflat.papers.tables import COUNTED, MEASURES, Cell, Table, find, load, names

__all__ = [
    "COUNTED", "MEASURES", "SCALES", "Cell", "Drawn", "Outcome", "PaperFigure", "Row", "Table", "abouts",
    "check_keep", "draw", "drawings", "dry", "find", "find_figure", "is_figure", "keep", "load", "names", "outcomes",
    "scaled", "sentences", "train",
]  # fmt: skip
_MODULES = {
    "figures": "Drawn PaperFigure abouts draw find_figure is_figure",
    "measured": "check_keep drawings keep outcomes",
    "outcome": "Outcome Row sentences",
    "rows": "dry train",
    "scales": "SCALES scaled",
    "tables": "COUNTED MEASURES Cell Table find load names",
}


def __getattr__(name: str) -> Any:
    # The leaderboard is shown from a file: it should not wait for torch, which trains the tables.
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
