"""The comparison of several methods as a table: terminal, Markdown, CSV, JSON and LaTeX.

Accuracies of the shared model and of the clients' own models never share a column, and a claimed ε is only ever
printed beside the proven one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedflat.core.checks import wrong
from fedflat.report import metrics
from fedflat.report.equal import Targets, accuracy_at_epsilon, targets
from fedflat.report.equal import epsilon_at_accuracy as epsilon_at_accuracy
from fedflat.report.fates import FATES, MARKS, fate
from fedflat.report.groups import Difference, Group, Spread, paired_difference, spread
from fedflat.report.headline import headline
from fedflat.report.measures import generalisation_gap, rounds_to
from fedflat.report.metrics import Run
from fedflat.report.together import Cost, cost_record, cost_sentences, costs

if TYPE_CHECKING:
    from rich.table import Table

NO_EPSILON = "∞ (none)"
EQUAL = ("epsilon_at_accuracy", "accuracy_at_epsilon")
PRIVATE_NOTE = "Personal accuracy is private to the simulation and not covered by the guarantee."


@dataclass(frozen=True)
class Row:
    """One method over its seeds. Accuracies are shares (0 to 1); ``None`` where a run has none.

    ``epsilon_at_accuracy`` and ``accuracy_at_epsilon`` are read at the comparison's ``equal`` targets. ``fates``: of
    the runs that came to nothing (``fates.FATES``), whose last round counts as their best. ``gap``: training minus test
    accuracy at the end, private to the simulation. ``rounds_to_accuracy``: rounds until the target was first reached.
    """

    method: str
    seeds: int
    final: Spread | None
    best: Spread | None
    personal: Spread | None
    proven_epsilon: float | None
    claimed_epsilon: float | None
    delta: float | None
    seconds: Spread | None
    difference: Difference | None
    personal_difference: Difference | None
    reasons: tuple[str, ...]
    epsilon_at_accuracy: Spread | None = None
    accuracy_at_epsilon: Spread | None = None
    fates: tuple[str, ...] = ()
    gap: Spread | None = None
    rounds_to_accuracy: Spread | None = None


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison; differences are against the first. ``equal``: the accuracy and the ε that the private
    settings are compared at, ``None`` where fewer than two are private. ``together``: what publishing all runs costs,
    for each data set; empty for a single run. ``headline``: what was found, in a sentence."""

    rows: tuple[Row, ...]
    equal: Targets | None = None
    together: tuple[Cost, ...] = ()
    headline: str = ""


def comparison_table(groups: Sequence[Group]) -> Comparison:
    """Mean ± sd over seeds for each group, and paired differences (95 % Student-t) against the first group.

    Raises:
        InputError: no group.
    """
    if not groups:
        raise wrong("comparison", "no run", "one or more runs")
    equal = targets(groups)
    rows = tuple(_row(group, groups[0], equal) for group in groups)
    return Comparison(rows, equal, costs([run for group in groups for run in group.runs]), headline(groups))


def _row(group: Group, first: Group, equal: Targets | None) -> Row:
    def over(measure: Callable[[Run], float | None]) -> Spread | None:
        return spread(measure(run) for run in group.runs)

    def against(measure: Callable[[Run], float | None]) -> Difference | None:
        return None if group is first else paired_difference(first, group, measure)

    proven = [metrics.proven_epsilon(run) for run in group.runs]
    weakest = max(range(len(proven)), key=lambda place: (proven[place] is None, proven[place] or 0.0))
    shown = group.runs[weakest]  # seeds that differ in ε are reported at the largest
    return Row(
        method=group.label,
        seeds=len(group.runs),
        final=over(metrics.final_accuracy),
        best=over(metrics.best_accuracy),
        personal=over(metrics.personal_accuracy),
        proven_epsilon=proven[weakest],
        claimed_epsilon=metrics.claimed_epsilon(shown),
        delta=metrics.number(shown.privacy.get("delta")),
        seconds=over(lambda run: metrics.seconds(run) if run.metrics else None),
        difference=against(metrics.final_accuracy),
        personal_difference=against(metrics.personal_accuracy),
        reasons=tuple(metrics.reasons(shown)),
        epsilon_at_accuracy=over(lambda run: epsilon_at_accuracy(run, equal.accuracy)) if equal else None,
        accuracy_at_epsilon=over(lambda run: accuracy_at_epsilon(run, equal.epsilon)) if equal else None,
        fates=tuple(found for run in group.runs if (found := fate(run))),
        gap=over(generalisation_gap),
        rounds_to_accuracy=over(lambda run: rounds_to(run, equal.accuracy)) if equal else None,
    )


# ---------------------------------------------------------------------------------------------------------- wording


def percent(value: float | None) -> str:
    """A share as per cent with two decimals, without the sign."""
    return "–" if value is None else f"{100 * value:.2f}"


def percent_spread(value: Spread | None) -> str:
    """``78.41 ± 0.32``, in per cent."""
    if value is None:
        return "–"
    return percent(value.mean) + ("" if value.sd is None else f" ± {percent(value.sd)}")


def epsilon_text(value: float | None) -> str:
    """Three or more significant digits; ``∞ (none)`` where no finite ε is proven."""
    if value is None:
        return NO_EPSILON
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def epsilon_spread(value: Spread | None) -> str:
    """``3.41 ± 0.12``; a dash where no ε was read."""
    if value is None:
        return "–"
    sd = "" if value.sd is None else f" ± {value.sd:.3g}" if value.mean < 1 else f" ± {value.sd:.2f}"
    return epsilon_text(value.mean) + sd


def duration(value: float | None) -> str:
    """Seconds in the unit a reader wants: ``8.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if value is None:
        return "–"
    if value < 59.95:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def difference_text(value: Difference | None) -> str:
    """``+1.20 [+0.31, +2.09]``, in percentage points; without an interval where the seeds agree to the last example."""
    if value is None:
        return "–"
    if value.pairs > 1 and value.low == value.high:
        return f"{_points(value.mean)} each seed"
    mean, low, high = (_points(each) for each in (value.mean, value.low, value.high))
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
    rows = table.rows
    claimed = any(row.claimed_epsilon is not None for row in rows)
    personal = any(row.personal for row in rows)
    found: list[tuple[bool, Column]] = [
        (True, Column("method", "method", lambda row: row.method, left=True)),
        (True, Column("seeds", "seeds", lambda row: str(row.seeds))),
        (True, Column("final", "accuracy %", _final_text)),
        (any(row.difference for row in rows), Column("difference", "Δ", lambda row: difference_text(row.difference))),
        (personal, Column("personal", "personal %", lambda row: percent_spread(row.personal))),
        (True, Column("proven_epsilon", "ε proven", lambda row: epsilon_text(row.proven_epsilon))),
        (claimed, Column("claimed_epsilon", "ε claimed", _claimed_text)),
        *_equal_columns(table),
        (True, Column("seconds", "time", lambda row: duration(row.seconds.mean if row.seconds else None))),
    ]
    return [column for wanted, column in found if wanted]


def _final_text(row: Row) -> str:
    return percent_spread(row.final) + "".join(MARKS[found] for found in dict.fromkeys(row.fates))


def _equal_columns(table: Comparison) -> list[tuple[bool, Column]]:
    """ε at equal accuracy; accuracy at equal ε only where the settings end at different ε."""
    if table.equal is None:
        return []
    reached, limit = f"ε at {percent(table.equal.accuracy)} %", f"% at ε {epsilon_text(table.equal.epsilon)}"
    return [
        (True, Column(EQUAL[0], reached, lambda row: epsilon_spread(row.epsilon_at_accuracy))),
        (not table.equal.one_epsilon, Column(EQUAL[1], limit, lambda row: percent_spread(row.accuracy_at_epsilon))),
    ]


def _claimed_text(row: Row) -> str:
    return "–" if row.claimed_epsilon is None else epsilon_text(row.claimed_epsilon)


def notes(table: Comparison, *, differences: bool = True) -> list[str]:
    """What a reader must know beside the table; first what was found, then what publishing all of it costs.

    differences: whether they stand in the table."""
    rows = table.rows
    found = [table.headline] if table.headline else []
    found += cost_sentences(table.together)
    found.append("Accuracy: test accuracy of the shared model after the last round, mean ± sd over seeds.")
    if differences and any(row.difference for row in rows):
        found.append(f"Differences (Δ) from {rows[0].method}: paired over common seeds, points, 95 % t interval.")
    deltas = sorted({row.delta for row in rows if row.proven_epsilon is not None and row.delta is not None})
    if len(deltas) > 1:
        found.append(f"ε is stated at different δ ({', '.join(f'{delta:g}' for delta in deltas)}): not one scale.")
    found += _equal_notes(table.equal)
    if any(row.personal for row in rows):
        found.append(PRIVATE_NOTE)
    for row in rows:
        for kind in dict.fromkeys(row.fates):
            found.append(f"{MARKS[kind]} {row.method}: {row.fates.count(kind)} of {row.seeds} runs {FATES[kind]}.")
    for row in rows:
        if row.proven_epsilon is None:
            found.append(f"{row.method}: no finite ε is proven. {' '.join(row.reasons[:1])}".strip())
        elif row.claimed_epsilon is not None:
            found.append(f"{row.method}: claimed is the paper's formula. {' '.join(row.reasons[:1])}".strip())
    return found


def _equal_notes(equal: Targets | None) -> list[str]:
    """The rule behind the targets, and why nobody may stop by them."""
    if equal is None:
        return []
    accuracy, limit = percent(equal.accuracy), epsilon_text(equal.epsilon)
    found = [
        f"Equal accuracy: ε spent when the shared model's test accuracy first reached {accuracy} %, the lowest final "
        "accuracy of any private run. Read off the test curve, so a comparison and no rule to stop by."
    ]
    if equal.one_epsilon:
        return [*found, f"Equal ε: every private run ends at ε = {limit}, so the accuracy column compares at equal ε."]
    rule = f"Equal ε: the shared model's test accuracy at ε = {limit}, the smallest final ε of any private run"
    rule += "; a dash where the first evaluation is past it."
    return [*found, rule]


# -------------------------------------------------------------------------------------------------------- renderers


def clock(value: float | None) -> str:
    """Seconds as ``0:08``, ``20:30`` or ``2:10:05``: the narrow form for a terminal."""
    if value is None:
        return "–"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def to_rich(table: Comparison) -> Table:
    """The main terminal table, at most 80 columns wide; long method names fold."""
    shown = [column for column in columns(table) if column.key not in ("difference", *EQUAL)]
    full = len(shown) == 7  # every optional column is there: method names get what is left of 80
    made = _rich_table()
    for column in shown:
        heading = column.heading.replace(" ", "\n") if column.key == "claimed_epsilon" else column.heading
        most = (17 if full else 28) if column.left else None
        side: Literal["left", "right"] = "left" if column.left else "right"
        made.add_column(heading, justify=side, overflow="fold", max_width=most, no_wrap=not column.left)
    for row in table.rows:
        times = {"seconds": clock(row.seconds.mean if row.seconds else None)}
        made.add_row(*_texts([times.get(column.key) or column.text(row) for column in shown]))
    return made


def to_rich_differences(table: Comparison) -> Table | None:
    """Paired differences from the first method with their intervals; ``None`` where there is nothing to pair."""
    rows = [row for row in table.rows[1:] if row.difference or row.personal_difference]
    if not rows:
        return None
    columns = 3 if any(row.personal_difference for row in rows) else 2
    made = _rich_table()
    made.add_column(f"difference from {table.rows[0].method}", overflow="fold", max_width=28)
    for heading in ("accuracy, points", "personal, points")[: columns - 1]:
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.method, difference_text(row.difference), difference_text(row.personal_difference)]
        made.add_row(*_texts(cells[:columns]))
    return made


def to_rich_equal(table: Comparison) -> Table | None:
    """The private settings at equal accuracy and at equal ε; ``None`` where fewer than two are private."""
    shown = [column for column in columns(table) if column.key in EQUAL]
    if not shown:
        return None
    made = _rich_table()
    made.add_column("compared at equal", overflow="fold", max_width=28)
    for column in shown:
        made.add_column(column.heading, justify="right", no_wrap=True)
    for row in table.rows:
        if row.epsilon_at_accuracy or row.accuracy_at_epsilon:
            made.add_row(*_texts([row.method, *(column.text(row) for column in shown)]))
    return made


def _rich_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _texts(cells: Sequence[str]) -> list[Any]:
    from rich.text import Text

    return [Text(cell) for cell in cells]  # Text: a name in [brackets] is not markup


def to_terminal(table: Comparison, width: int = 80) -> str:
    """The terminal tables with their notes as plain text, no line wider than ``width``."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(to_rich(table))
    for more in (to_rich_differences(table), to_rich_equal(table)):
        if more is not None:
            console.print()
            console.print(more)
    console.print()
    for note in _texts(notes(table)):
        console.print(note)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def to_markdown(table: Comparison) -> str:
    """A Markdown table with its notes."""

    def safe(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    cells = columns(table)
    lines = [" | ".join(column.heading for column in cells)]
    lines.append(" | ".join(":--" if column.left else "--:" for column in cells))
    lines += [" | ".join(safe(column.text(row)) for column in cells) for row in table.rows]
    body = "\n".join(f"| {line} |" for line in lines)
    return body + "\n\n" + "\n".join(f"- {safe(note)}" for note in notes(table)) + "\n"


def to_records(table: Comparison) -> list[dict[str, Any]]:
    """One plain dictionary per row; ``None`` for what is absent or infinite."""
    return [metrics.plain(asdict(row)) for row in table.rows]


def to_json(table: Comparison) -> str:
    """The rows with full precision, what the private ones are compared at, and what publishing all of them costs."""
    found: dict[str, Any] = {"rows": to_records(table), "equal": equal_record(table)}
    found |= {"together": together_record(table), "notes": notes(table)}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def equal_record(table: Comparison) -> dict[str, Any] | None:
    """The targets of the equal columns as a plain dictionary."""
    return None if table.equal is None else metrics.plain(asdict(table.equal))


def together_record(table: Comparison) -> list[dict[str, Any]]:
    """What publishing all runs costs, as plain dictionaries, one for each data set."""
    return [metrics.plain(cost_record(cost)) for cost in table.together]


def to_csv(table: Comparison) -> str:
    """One line per row with full precision; nested values as ``final.mean``, ``difference.low`` and so on."""
    records = [_flat(record) for record in to_records(table)]
    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    parts = {
        "difference": ("mean", "low", "high", "pairs"),
        "personal_difference": ("mean", "low", "high", "pairs"),
        **dict.fromkeys(("final", "best", "personal", "seconds", "gap", "rounds_to_accuracy", *EQUAL), ("mean", "sd")),
    }
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key in parts:
            flat |= {f"{key}.{part}": (value or {}).get(part) for part in parts[key]}
        else:
            flat[key] = " ".join(value) if isinstance(value, list) else value
    return flat


def to_latex(table: Comparison) -> str:
    """A ``tabular`` with booktabs rules; its notes follow as comments."""
    cells = columns(table)
    lines = ["\\begin{tabular}{" + "".join("l" if column.left else "r" for column in cells) + "}", "\\toprule"]
    lines.append(" & ".join(_latex(column.heading) for column in cells) + " \\\\")
    lines.append("\\midrule")
    lines += [" & ".join(_latex(column.text(row)) for column in cells) + " \\\\" for row in table.rows]
    lines += ["\\bottomrule", "\\end{tabular}"]
    lines += ["% " + note.replace("\n", " ") for note in notes(table)]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": "\\textbackslash{}",
    **{mark: "\\" + mark for mark in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "ε": "$\\varepsilon$",
    "∞": "$\\infty$",
    "Δ": "$\\Delta$",
    "−": "$-$",
    "–": "--",
    "\n": " ",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in text)


RENDERERS: dict[str, Callable[[Comparison], str]] = {
    "terminal": to_terminal,
    "markdown": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
}
