"""What ``fedflat reproduce`` prints and gives as JSON: a table and a verdict for each column of a paper's table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.reproduce import Outcome
    from fedflat.reproduce.outcome import Row

WIDTH = 80


def lines(found: Outcome, dry_run: bool = False) -> list[str]:
    """The outcome as text of at most 80 columns: a table and a verdict for each column of the paper's."""
    from fedflat.reproduce.verdict import sentences

    table = found.table
    shown = [*wrapped(f"Paper {table.paper}, {table.table}: {table.title}"), *wrapped(table.about)]
    simulated = any(row.simulated is not None for row in found.rows)
    verdicts = {} if dry_run else found.verdicts()
    for column, rows in found.columns().items():
        shown += [
            "",
            *wrapped(_headed(column, rows[0], found)),
            *_grid([_heads(dry_run, simulated), *_body(rows, dry_run, simulated)]),
        ]
        why = dict.fromkeys(row.missing for row in rows if row.missing)
        shown += [text for reason in why for text in wrapped(f"  {reason}")]
        shown += [text for said in sentences(verdicts.get(column)) for text in wrapped(f"  {said}")]
    return [*shown, "", *_remarks(found, dry_run)]


def _headed(column: str, row: Row, found: Outcome) -> str:
    """The column's name, its target, and what was changed in it by hand."""
    target = "" if row.cell.target is None or row.cell.measure != "rounds" else f" to {row.cell.target:g} %"
    return column + target + (f" ({', '.join(found.by_hand)})" if found.by_hand else "")


def _heads(dry_run: bool, simulated: bool) -> list[str]:
    own = [] if dry_run else ["ours", "diff."]
    return ["method", "published", *own, "claimed ε", "proven ε", *(["simul. ε"] if simulated else []), "δ"]


def _body(rows: Iterable[Row], dry_run: bool, simulated: bool) -> list[list[str]]:
    found = []
    for row in rows:
        own = [] if dry_run else [_ours(row), _points(row.difference)]
        more = [_epsilon(row.simulated)] if simulated else []
        delta = "–" if row.delta is None else f"{row.delta:.2g}"
        epsilons = [_epsilon(row.claimed), _epsilon(row.proven), *more]
        found.append([row.cell.method, row.cell.published, *own, *epsilons, delta])
    return found


def _grid(texts: list[list[str]]) -> list[str]:
    """Rows of texts under each other; headings fold at their space where the whole would be wider than WIDTH."""
    widths = [max(map(len, column)) for column in zip(*texts)]
    if sum(widths) + len(widths) - 1 > WIDTH:
        folded = [text.split(" ", 1) if " " in text else ["", text] for text in texts[0]]
        texts = [[top for top, _ in folded], [low for _, low in folded], *texts[1:]]
        widths = [max(map(len, column)) for column in zip(*texts)]
    return [_line(row, widths) for row in texts]


def _remarks(found: Outcome, dry_run: bool) -> list[str]:
    table = found.table
    remarks = [_counted(found)]
    claimed = "what the paper's formula gives" if table.claimed == "formula" else "the budget that the paper names"
    remarks.append(
        f"Claimed ε: {claimed} for its setting. Proven ε, at δ: of "
        + ("what is planned here" if dry_run else "what ran here")
        + (", the paper's released procedure." if found.protocol == "published" else ", the sound round.")
    )
    if any(row.simulated is not None for row in found.rows):
        remarks.append(
            "Simulated ε: of the paper's clients, cohort and σ over the rounds here, a projection. The noise in each "
            "coordinate of the mean is that of the paper's cohort (privacy.noise_cohort)."
        )
    if not dry_run and any(row.fates for row in found.rows):
        remarks += [f"{mark} {text}: the last round is shown, never the best." for mark, text in _marks(found)]
    if not dry_run and found.verdicts():
        remarks.append(
            "τ: τ-b of the means, with a 95 % interval from means redrawn with their spread over seeds and trials. "
            "Orderings at 95 %: two-sided paired t test over the seeds."
        )
    if not found.comparable:
        own = ("" if found.as_printed else ", tuned") + (", changed by hand" if found.by_hand else "")
        remarks.append(f"Scale {found.scale}{own}: NOT COMPARABLE with the published values.")
    texts = dict.fromkeys(found.changed.values())
    for changes in texts:
        if changes:
            of = [name for name, mine in found.changed.items() if mine == changes]
            where = "" if len(texts) == 1 else f" ({'; '.join(of)})"
            remarks.append(f"Changed{where}: {', '.join(changes)}.")
    remarks += _choices(found)
    remarks += [f"Differs: {note}." for note in table.said(found.protocol)]
    remarks += [f"Missing: {text}" for text in found.missing]
    if found.folder is not None:
        remarks.append(f"Runs: {found.folder}")
    return [text for remark in remarks for text in wrapped(remark)]


def _choices(found: Outcome) -> list[str]:
    """The rule of ``--tuned``, what it chose, and whom it left alone."""
    if not found.tuned:
        return []
    rule = (
        "Tuned: a method's own numbers at the printed strength, a fifth or a twenty-fifth of it, by accuracy on a "
        "tenth of the clients, held back, with a seed that is not reported. The choice looked at clients' data, and no "
        "ε here covers that."
    )
    columns = len({column for column, _ in found.chosen}) > 1
    chosen = found.chosen.items()
    own = {row.cell.method for row in found.rows if row.cell.personal}
    tuned = {method for _, method in found.chosen}
    methods = dict.fromkeys(row.cell.method for row in found.rows if row.recipe is not None)
    left = [name for name in methods if name not in tuned]
    why = ", ".join(f"{name} (its accuracy is the clients' own)" if name in own else name for name in left)
    return [
        rule,
        *(f"Tuned: {f'{of}, ' if columns else ''}{one.sentence(method)}." for (of, method), one in chosen),
        *([f"As printed, not tuned: {why}."] if left else []),
    ]


def _counted(found: Outcome) -> str:
    """What the numbers are, for each measure that is shown."""
    from fedflat.reproduce.tables import MEASURES

    kinds = dict.fromkeys(row.cell.measure for row in found.rows)
    private = "; training accuracy is private to the simulation" if {"train", "gap"} & set(kinds) else ""
    return f"Published and ours: mean ± sd over seeds, of {'; '.join(MEASURES[kind] for kind in kinds)}{private}."


def _marks(found: Outcome) -> list[tuple[str, str]]:
    from fedflat.report.fates import FATES, MARKS

    seen = {fate for row in found.rows for fate in row.fates.values()}
    return [(MARKS[fate], f"{text[:1].upper()}{text[1:]}") for fate, text in FATES.items() if fate in seen]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    texts = [f"{cell:<{w}}" if place == 0 else f"{cell:>{w}}" for place, (cell, w) in enumerate(zip(cells, widths))]
    return " ".join(texts).rstrip()


def _ours(row: Row) -> str:
    """Mean ± sd, and a mark where runs came to nothing."""
    from fedflat.report.fates import MARKS
    from fedflat.reproduce.tables import COUNTED

    found = row.spread
    marks = "".join(dict.fromkeys(MARKS[fate] for fate in row.fates.values()))
    if found is None:
        return f"–{marks}"
    if math.isinf(found[0]):
        late = sum(map(math.isinf, row.ours.values()))
        return f"never{marks}" if late == len(row.ours) else f"never in {late} of {len(row.ours)}{marks}"
    digits = 1 if row.cell.measure in COUNTED else 2
    text = f"{found[0]:.{digits}f}" + ("" if found[1] is None else f" ± {found[1]:.{digits}f}")
    return f"{text}{marks}".replace("-", "−")


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}".replace("-", "−")


def _epsilon(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def as_dict(found: Outcome) -> dict[str, Any]:
    """Plain values for ``--json``; an infinite ε, or a target that was never reached, is null."""
    from fedflat.report.metrics import plain
    from fedflat.reproduce.verdict import sentences

    table, verdicts = found.table, found.verdicts()
    return {
        "paper": table.paper, "table": table.table, "measure": table.measure, "scale": found.scale,
        "comparable": found.comparable and found.complete, "protocol": found.protocol,
        "rows": [_record(row) for row in found.rows],
        "verdicts": {name: plain(asdict(one)) | {"text": sentences(one)} for name, one in verdicts.items()},
        "changed": {name: list(texts) for name, texts in found.changed.items()},
        "tuned": found.tuned,
        "chosen": [
            {"column": column, "method": method, **asdict(one)} for (column, method), one in found.chosen.items()
        ],
        "notes": table.said(found.protocol), "missing": list(found.missing),
        "folder": None if found.folder is None else str(found.folder),
    }  # fmt: skip


def _record(row: Row) -> dict[str, Any]:
    from fedflat.report.metrics import plain

    values = {
        "column": row.cell.column, "method": row.cell.method, "measure": row.cell.measure, "target": row.cell.target,
        "published": row.cell.published, "ours": list(row.ours.values()), "seeds": list(row.ours),
        "difference": row.difference, "claimed_epsilon": row.claimed, "proven_epsilon": row.proven,
        "simulated_epsilon": row.simulated, "delta": row.delta, "fates": dict(row.fates), "missing": row.missing,
    }  # fmt: skip
    found: dict[str, Any] = plain(values)
    return found
