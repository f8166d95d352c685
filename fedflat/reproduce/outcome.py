"""What came of a table: a row for each published number, and what each column says together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.config.recipe import Recipe
from fedflat.reproduce.strengths import Chosen
from fedflat.reproduce.tables import Cell, Table
from fedflat.reproduce.verdict import Ranked, Verdict, judge

UNSEEN = ("engine.", "evaluation.", "name=", "seed=")
"""Overrides that change no number that is compared."""


@dataclass(frozen=True)
class Row:
    """One published number beside ours.

    ours: by seed, in the cell's unit (inf: the target was never reached). claimed: ε as the paper has it for its own
    setting. proven, delta: ε and δ of what runs here, inf where nothing finite is proven, None where nothing is known.
    simulated: ε of the larger system whose noise is simulated. fates: how runs came to nothing, by seed. missing: why
    there is no value of ours; void: because there is none to have, not because runs are missing.
    """

    cell: Cell
    recipe: Recipe | None
    claimed: float | None
    proven: float | None
    delta: float | None = None
    simulated: float | None = None
    ours: Mapping[int, float] = field(default_factory=dict)
    fates: Mapping[int, str] = field(default_factory=dict)
    missing: str = ""
    void: bool = False

    @property
    def spread(self) -> tuple[float, float | None] | None:
        """Mean and standard deviation (n − 1; None for one seed) of ours, or None; inf if a seed never got there."""
        values = list(self.ours.values())
        if not values:
            return None
        if any(map(math.isinf, values)):
            return math.inf, None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the published mean."""
        if self.spread is None or self.cell.value is None or math.isinf(self.spread[0]):
            return None
        return self.spread[0] - self.cell.value[0]


@dataclass(frozen=True)
class Outcome:
    """The rows of a table, what each column changes against the paper's setting, and why data or runs are missing.

    seconds: of all rounds that ran, by the runs' own clocks. tuned: whether strengths were tried; chosen: by column and
    method, which one was. overrides: what was changed by hand in every recipe, ``key=value``.
    """

    table: Table
    rows: tuple[Row, ...]
    scale: str
    protocol: str
    changed: dict[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()
    folder: Path | None = None
    seconds: float = 0.0
    tuned: bool = False
    chosen: Mapping[tuple[str, str], Chosen] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def by_hand(self) -> tuple[str, ...]:
        """The overrides that change what is computed."""
        return tuple(text for text in self.overrides if not text.startswith(UNSEEN))

    @property
    def comparable(self) -> bool:
        """Whether the numbers may stand beside the published ones: at the paper's setting, as far as it is known."""
        return self.scale == "full" and self.as_printed and not self.by_hand

    @property
    def as_printed(self) -> bool:
        """Whether every method has the numbers that the paper prints."""
        return all(one.strength == 1.0 for one in self.chosen.values())

    @property
    def complete(self) -> bool:
        """Whether every cell whose setting is known has a value of ours, as far as there is one to have."""
        return all(row.ours or row.void or row.recipe is None for row in self.rows)

    def columns(self) -> dict[str, list[Row]]:
        """The rows by column."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.cell.column, []).append(row)
        return found

    def verdicts(self) -> dict[str, Verdict]:
        """For each column with two methods or more that ran: does it rank them as the paper does?"""
        judged = {
            name: judge([Ranked(row.cell, dict(row.ours)) for row in rows], self.table.seeds)
            for name, rows in self.columns().items()
        }
        return {name: found for name, found in judged.items() if found is not None}
