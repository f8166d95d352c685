"""Compare several methods in a table: terminal, Markdown, JSON and LaTeX, and every run in CSV.

Accuracies of the shared model and of the clients' own models never share a column, and a claimed ε is only ever
printed beside the proven one.
"""

import io
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from fedflat.core import plain, require
from fedflat.report import groups as grouping
from fedflat.report import metrics
from fedflat.report.groups import Difference, Group, Spread, differing, finals, paired_difference, setting, spread
from fedflat.report.metrics import Run, epsilon_text
from fedflat.report.wording import duration, measured, percent_spread, text

BENEATH = 6
"""Lines of notes beneath the terminal's table at most; every note stands in ``table.md`` and on the page."""
PLAINLY = "Noise from the seeds: ε is the mechanism's, these models protect nobody."
MEASURES: dict[str, Callable[[Run], float | None]] = {
    "final": metrics.final_accuracy, "best": lambda run: metrics.summary(run)["best_accuracy"],
    "personal": metrics.personal_accuracy, "seconds": lambda run: metrics.seconds(run) or None,
    "gap": metrics.generalisation_gap, "loss": lambda run: metrics.last(run.metrics, "test_loss"),
}  # fmt: skip
"""What of a run is averaged over seeds. Seconds are private, so a public page has none. ``gap``: training minus test
accuracy at the end, private to the simulation."""


@dataclass(frozen=True)
class Row:
    """One method over its seeds. ``spreads``: by ``MEASURES``; accuracies are shares (0 to 1), ``None`` where a run has
    none.

    ``against`` is the row that its differences are from: the first with the same data and ε, empty for that row itself.
    ``fates``: of the runs that came to nothing (``metrics.FATES``), whose last round counts as their best.
    """

    method: str
    seeds: int
    spreads: dict[str, Spread | None]
    proven_epsilon: float | None
    claimed_epsilon: float | None
    delta: float | None
    difference: Difference | None
    reasons: tuple[str, ...]
    fates: tuple[str, ...] = ()
    against: str = ""
    randomness: str = "secret"


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, by ε; differences are within one ε. ``together``: what publishing all runs costs, for
    each data set; empty for a single run. ``headline``: what was found, in a sentence."""

    rows: tuple[Row, ...]
    together: tuple[metrics.Cost, ...] = ()
    headline: str = ""

    @property
    def seeded(self) -> bool:
        """Whether any row's noise follows its seed."""
        return any(row.randomness == "seeded" for row in self.rows)


def comparison_table(groups: Sequence[Group]) -> Comparison:
    """Return mean ± sd over seeds for each group, and paired differences (95 % Student-t) within each ε.

    Raises:
        InputError: no group.
    """
    require(bool(groups), "comparison", "no run", "one or more runs")
    rows = tuple(_row(group, part[0]) for part in grouping.strata(groups) for group in part)
    return Comparison(rows, metrics.costs([run for group in groups for run in group.runs]), grouping.headline(groups))


def _row(group: Group, first: Group) -> Row:
    # Where seeds differ in ε, the largest is reported.
    reported = max(group.runs, key=metrics.bound)
    return Row(
        method=group.label,
        seeds=len(group.runs),
        spreads={name: spread(map(measure, group.runs)) for name, measure in MEASURES.items()},
        proven_epsilon=metrics.proven_epsilon(reported),
        claimed_epsilon=metrics.claimed_epsilon(reported),
        delta=metrics.number(reported.privacy.get("delta")),
        randomness="seeded" if any(map(metrics.seeded, group.runs)) else "secret",
        difference=None if group is first else paired_difference(finals(first), finals(group)),
        reasons=tuple(metrics.reasons(reported)),
        fates=tuple(ending for run in group.runs if (ending := metrics.fate(run))),
        against="" if group is first else first.label,
    )


# ---------------------------------------------------------------------------------------------------------- wording


def difference_text(value: Difference | None) -> str:
    """``+1.20 [+0.31, +2.09]``, in percentage points."""
    if value is None:
        return "–"
    mean, low, high = (_points(number) for number in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]" if low and high else mean


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.2f}".replace("-", "−")


@dataclass(frozen=True)
class Column:
    """One column of the printed table: heading, alignment and how a row reads in it."""

    key: str
    heading: str
    text: Callable[[Row], str]
    left: bool = False


def columns(table: Comparison) -> list[Column]:
    """The columns this comparison needs: personal accuracy, claimed ε and differences only where there are any."""
    rows, proven = table.rows, "ε of the mechanism" if table.seeded else "ε proven"
    claimed = any(row.claimed_epsilon is not None for row in rows)
    had = {name: any(row.spreads[name] for row in rows) for name in MEASURES}
    candidates: list[tuple[bool, Column]] = [
        (True, Column("method", "method", lambda row: row.method, left=True)),
        (True, Column("seeds", "seeds", lambda row: str(row.seeds))),
        (had["final"] or not had["loss"], Column("final", "accuracy %", _final_text)),
        (had["loss"] and not had["final"], Column("loss", "loss", lambda row: _mean(row, "loss", measured))),
        (any(row.difference for row in rows), Column("difference", "Δ", lambda row: difference_text(row.difference))),
        (had["personal"], Column("personal", "personal %", lambda row: percent_spread(row.spreads["personal"]))),
        (True, Column("proven_epsilon", proven, lambda row: epsilon_text(row.proven_epsilon))),
        (claimed, Column("claimed_epsilon", "ε claimed", lambda row: epsilon_text(row.claimed_epsilon, missing="–"))),
        (had["seconds"], Column("seconds", "time", lambda row: _mean(row, "seconds", duration))),
    ]
    return [column for wanted, column in candidates if wanted]


def _mean(row: Row, name: str, written: Callable[[float], str]) -> str:
    return "–" if (stats := row.spreads[name]) is None else written(stats.mean)


def _final_text(row: Row) -> str:
    return percent_spread(row.spreads["final"]) + "".join(metrics.MARKS[kind] for kind in dict.fromkeys(row.fates))


def notes(table: Comparison) -> list[str]:
    """Return what a reader must know beside the table, the most important first: what came to nothing, what was found,
    what publishing all of it costs, the differences."""
    deltas = sorted({row.delta for row in table.rows if row.proven_epsilon is not None and row.delta is not None})
    costs = cost_sentences(table.together)
    marks = {"fates": metrics.FATES, "marks": metrics.MARKS}
    return _sentences("notes.txt", table=table, costs=costs, deltas=deltas, plainly=PLAINLY, **marks)


def cost_sentences(costs: Sequence[metrics.Cost]) -> list[str]:
    """Return one or a few sentences for each data set."""
    return _sentences("costs.txt", costs=costs)


def _sentences(template: str, **values: Any) -> list[str]:
    """Return a template's lines that say something, each as one sentence or more."""
    return [" ".join(line.split()) for line in text(template, **values).splitlines() if line.strip()]


# -------------------------------------------------------------------------------------------------------- renderers


def to_terminal(table: Comparison, width: int = 80) -> str:
    """Return the terminal's table and the notes that matter most, in ``BENEATH`` lines of ``width`` at most.

    Long method names fold, and a crowded table has no time.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = table.rows
    crowded = sum(column.key in ("difference", "personal", "claimed_epsilon") for column in columns(table)) > 1
    left_out = {"seeds" if len({row.seeds for row in rows}) == 1 else "", "seconds" if crowded else ""}
    visible = [column for column in columns(table) if column.key not in left_out]
    heads = {"proven_epsilon": "ε, mechanism" if table.seeded else "ε", "claimed_epsilon": "claimed"}
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in visible:
        side: Literal["left", "right"] = "left" if column.left else "right"
        grid.add_column(heads.get(column.key, column.heading), justify=side, overflow="fold", no_wrap=not column.left)
    for row, after in zip(rows, [*rows[1:], None]):
        last = after is not None and not after.against and any(row.against for row in rows)
        # As Text, a name in [brackets] is not taken for markup.
        grid.add_row(*(Text(column.text(row)) for column in visible), end_section=last)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(grid)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    below: list[str] = []
    for note in notes(table):
        folded = textwrap.wrap(note, width, subsequent_indent="  ", break_on_hyphens=False)
        below += folded if len(below) + len(folded) <= BENEATH else []
    return "\n".join([*lines, "", *below]) + "\n"


def files(table: Comparison) -> dict[str, str]:
    """Return the table's files by their names: Markdown, LaTeX (a ``tabular`` with booktabs rules, its notes as
    comments) and ``record_of`` as JSON."""
    values = {"table": table, "columns": columns(table), "notes": notes(table)}
    texts = {name: text(name, **values) for name in ("table.md", "table.tex")}
    return texts | {"table.json": json.dumps(record_of(table), indent=2, ensure_ascii=False) + "\n"}


def record_of(table: Comparison) -> dict[str, Any]:
    """Return the rows with full precision, and what publishing all costs.

    All values are plain; what is absent or infinite is None.
    """
    together = [
        {"dataset": cost.dataset, "same_clients": cost.same_clients, **asdict(cost.total)} for cost in table.together
    ]
    plain_rows = map(asdict, table.rows)
    rows = [{"method": row["method"], "seeds": row["seeds"], **row.pop("spreads"), **row} for row in plain_rows]
    record: dict[str, Any] = plain({"rows": rows, "together": together})
    return record | {"notes": notes(table)}


def runs_csv(groups: Sequence[Group]) -> str:
    """Return one line per run: method, the settings that differ, seed, ε, accuracy, how it ended, and its folder.

    Rates are shares (0 to 1); an empty field is absent, or an ε that is infinite.
    """
    import pandas

    settings = {group.label: setting(group.runs[0]) for group in groups}
    keys = [key for key in differing(list(settings.values())) if key not in ("name", "algorithm.name")]
    measured = ["rounds", "final_accuracy", "best_accuracy", "final_loss", "proven_epsilon", "claimed_epsilon", "delta"]
    extra = sorted({key for group in groups for run in group.runs for key in metrics.own_metrics(run.metrics)})
    records = []
    for group in groups:
        for run in group.runs:
            facts = metrics.summary(run)
            line = {"label": group.label, "method": run.algorithm, "recipe": facts["recipe"]}
            line |= {key: settings[group.label].get(key) for key in keys} | {"seed": run.seed}
            line |= {key: facts[key] for key in measured} | {key: metrics.last(run.metrics, key) for key in extra}
            ended = {"ended": metrics.fate(run), "seconds": f"{facts['seconds']:.3f}" if facts["seconds"] else None}
            records.append(line | ended | {"folder": "/".join(run.path.parts[-2:])})
    return cast(str, pandas.DataFrame(records, dtype=object).to_csv(index=False, lineterminator="\n"))
