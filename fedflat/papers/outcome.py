"""Say what came of a table: a row for each published number, and whether ours rank alike (Kendall's τ).

τ is τ-b of ``scipy.stats.kendalltau`` between the published means and ours. An ordering is told here by the paired t
test over the seeds that both methods ran, two-sided at 5 %: either may turn out the better.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path

from fedflat.config.recipe import Recipe
from fedflat.papers.tables import LOWER, Cell, Table
from fedflat.report.groups import Spread, paired_difference, spread

NAMED = 4
"""Orderings of a kind that the verdict names."""
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
    def spread(self) -> Spread | None:
        """Mean and standard deviation of ours, or None; the mean is inf if a seed never got there."""
        return spread(self.ours.values())

    @property
    def difference(self) -> float | None:
        """Ours minus the published mean."""
        if self.spread is None or self.cell.value is None or math.isinf(self.spread.mean):
            return None
        return self.spread.mean - self.cell.value[0]


@dataclass(frozen=True)
class Ordering:
    """Two methods that the paper puts in this order. here: 1 as in the paper, −1 against it, 0 equal.

    told: whether the seeds tell them apart at the verdict's level.
    """

    better: str
    worse: str
    here: int
    told: bool


@dataclass(frozen=True)
class Verdict:
    """τ (None where all are equal), and every ordering that the paper prints among the methods that ran."""

    tau: float | None
    orderings: tuple[Ordering, ...]

    def which(self, here: int, told: bool) -> list[Ordering]:
        """Return the orderings of one kind."""
        return [ordering for ordering in self.orderings if ordering.here == here and ordering.told == told]


def judge(rows: Sequence[Row]) -> Verdict | None:
    """Return the verdict on one column; None where fewer than two of its methods have both numbers."""
    from scipy.stats import kendalltau

    values = [(row, row.cell.value, row.spread) for row in rows]
    compared = [(row, theirs[0], ours.mean) for row, theirs, ours in values if theirs and ours]
    if len(compared) < 2:
        return None
    _, published, measured = zip(*compared)
    tau = float(kendalltau(published, measured).statistic)
    return Verdict(tau if math.isfinite(tau) else None, tuple(_orderings(compared)))


def _orderings(compared: Sequence[tuple[Row, float, float]]) -> Iterator[Ordering]:
    """Yield the orderings among rows that stand beside the published mean and ours."""
    for one, other in combinations(compared, 2):
        sign = -1 if one[0].cell.measure in LOWER else 1
        # What the paper prints as equal orders nothing.
        if gap := _lead(one[1], other[1]) * sign:
            (better, _, ours), (worse, _, theirs) = (one, other) if gap > 0 else (other, one)
            here = _lead(ours, theirs) * sign
            yield Ordering(better.cell.method, worse.cell.method, here, _told_apart(better, worse))


def _lead(one: float, other: float) -> int:
    """Return which of two means is larger: 1, −1, or 0 for equal ones."""
    return (one > other) - (one < other)


def _told_apart(one: Row, other: Row) -> bool:
    """Return whether the paired t test over common seeds tells two methods apart, two-sided: zero is outside the 95 %
    interval; never from a single seed."""
    gap = paired_difference(one.ours, other.ours)
    return gap is not None and gap.low is not None and gap.high is not None and not gap.low <= 0 <= gap.high


def sentences(found: Verdict | None) -> list[str]:
    """Return the verdict in words: agreement, how many orderings hold, and which do not."""
    if found is None:
        return []
    tau = "cannot be given: all are equal" if found.tau is None else f"= {found.tau:.2f}".replace("-", "−")
    lines = [f"Rank agreement: Kendall τ {tau}."]
    if total := len(found.orderings):
        sure = found.which(1, True)
        holds = len(sure) + len(found.which(1, False))
        verb, of = "holds" if holds == 1 else "hold", f" ({_names(sure)})" if sure else ""
        lines.append(f"Of the paper's {total} orderings {holds} {verb} here, {len(sure)} of them at 95 %{of}.")
    others = {
        "Not here, at 95 %": found.which(-1, True), "Not here, within the seeds' spread": found.which(-1, False),
        "Equal here": [ordering for ordering in found.orderings if ordering.here == 0],
    }  # fmt: skip
    return lines + [f"{words}: {_names(orderings)}." for words, orderings in others.items() if orderings]


def _names(orderings: Sequence[Ordering]) -> str:
    named = [f"{ordering.better} over {ordering.worse}" for ordering in orderings[:NAMED]]
    more = len(orderings) - len(named)
    return "; ".join(named) + (f"; {more} more" if more else "")


@dataclass(frozen=True)
class Outcome:
    """The rows of a table, what each column changes against the paper's setting, and why data or runs are missing.

    seconds: of all rounds that ran, by the runs' own clocks. overrides: what was changed by hand in every recipe,
    ``key=value``.
    """

    table: Table
    rows: tuple[Row, ...]
    scale: str
    protocol: str
    changed: dict[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()
    folder: Path | None = None
    seconds: float = 0.0
    overrides: tuple[str, ...] = ()

    @property
    def by_hand(self) -> tuple[str, ...]:
        """The overrides that change what is computed."""
        return tuple(text for text in self.overrides if not text.startswith(UNSEEN))

    @property
    def comparable(self) -> bool:
        """Whether the numbers may stand beside the published ones: at the paper's setting, as far as it is known."""
        return self.scale == "full" and not self.by_hand

    @property
    def complete(self) -> bool:
        """Whether every cell whose setting is known has a value of ours, as far as there is one to have."""
        return all(row.ours or row.void or row.recipe is None for row in self.rows)

    def columns(self) -> dict[str, list[Row]]:
        """Return the rows by column."""
        return {name: list(rows) for name, rows in groupby(self.rows, key=lambda row: row.cell.column)}

    def verdicts(self) -> dict[str, Verdict]:
        """Return for each column with two methods or more that ran whether it ranks them as the paper does."""
        judged = {name: judge(rows) for name, rows in self.columns().items()}
        return {name: verdict for name, verdict in judged.items() if verdict is not None}
