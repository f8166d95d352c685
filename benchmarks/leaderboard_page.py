"""Show the leaderboard's results as ``docs/leaderboard.md`` and as one picture of its curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.papers.board import (
    EPSILONS,
    MEASURED_AT,
    TASKS,
    Row,
    Task,
    best,
    command,
    ordered,
    spread_of,
    task_of,
)  # fmt: skip
from fedflat.report.figures import Figure, Series
from fedflat.report.groups import spread
from fedflat.report.plates import draw_on
from fedflat.report.tables import PLAINLY
from fedflat.report.wording import environment

TEMPLATE = Path(__file__).with_name("leaderboard.md")
PARTNERS = [
    ("dp-fedsam", "dp-fedavg"), ("dp-fedpgn", "dp-fedavg"), ("dp-fedpgn", "dp-fedpgn (rho 0)"),
    ("dp-fedavg-ls", "dp-fedavg"), ("dp-fedpgn-ls", "dp-fedpgn"), ("dp-fedavg-blur", "dp-fedavg"),
    ("dp-fedavg-lus", "dp-fedavg"), ("dp-fedavg-la", "dp-fedavg"),
]  # fmt: skip
"""Methods that add one idea to another, and that other."""
PAIRED = "Points of accuracy over the plain method that it is added to, paired over seeds, with 95 % t intervals."
HEADS = ("data", "Dirichlet", "ε", "method", "accuracy %")
Grid = tuple[list[str], list[list[str]]]


def cells(row: Row) -> list[str]:
    """Return a row's texts under ``HEADS``."""
    alpha = "–" if row["alpha"] is None else f"{row['alpha']:g}"
    return [task_of(row).name, alpha, f"{row['epsilon']:g}", method_name(row), spread_of(row)]


def method_name(row: Row) -> str:
    """Return the method, with the options that are not its defaults."""
    options = [f"{key} {value}" for key, value in row["method"].items() if key != "name"]
    name = str(row["method"]["name"]).rpartition(":")[2]
    return f"{name} ({', '.join(options)})" if options else name


def summary(found: Mapping[str, Any]) -> list[list[str]]:
    """Return each task's best accuracy at every ε, and its ceiling; what nobody measured says so."""
    top, table = best(found["rows"]), []
    for task in TASKS:
        rows = [top.get((task, epsilon)) for epsilon in EPSILONS]
        shown = ["not measured" if row is None else spread_of(row) for row in rows]
        ceiling = found["ceilings"].get(task.features)
        table.append([task.title, *shown, "not measured" if ceiling is None else f"{ceiling:.2f}"])
    return table


def methods(found: Mapping[str, Any], epsilon: float) -> Grid:
    """Return every method that was tuned by the rule at ε, on every task; those on most tasks first, then by mean
    place.
    """
    tasks, known = _tuned(found, epsilon)
    places: dict[str, list[int]] = {}
    for task in tasks:
        ranked = sorted((name for name, own in known if own is task), key=lambda name: -_mean(known[name, task]))
        for place, name in enumerate(ranked):
            places.setdefault(name, []).append(place)
    names = sorted(places, key=lambda name: (-len(places[name]), statistics.fmean(places[name])))
    rows = [[name, *(spread_of(known[name, t]) if (name, t) in known else "–" for t in tasks)] for name in names]
    return ["", *(task.title for task in tasks)], rows


def paired(found: Mapping[str, Any], epsilon: float) -> Grid:
    """Return what each idea adds to its plain partner: mean over seeds of the paired differences, with 95 % t
    intervals.
    """
    tasks, known = _tuned(found, epsilon)
    tasks = [task for task in tasks if sum(own is task for _, own in known) > 1]
    rows = []
    for name, plain in PARTNERS:
        shown = [_difference(known.get((name, task)), known.get((plain, task))) for task in tasks]
        if set(shown) != {"–"}:
            rows.append([f"{name} − {plain}", *shown])
    return ["", *(task.title for task in tasks)], rows


def _tuned(found: Mapping[str, Any], epsilon: float) -> tuple[list[Task], dict[tuple[str, Task], Row]]:
    known = {(method_name(r), task_of(r)): r for r in found["rows"] if r["epsilon"] == epsilon and "tried" in r}
    return [task for task in TASKS if any(own is task for _, own in known)], known


def _difference(row: Row | None, plain: Row | None) -> str:
    if row is None or plain is None:
        return "–"
    gaps = spread(mine - theirs for mine, theirs in zip(row["accuracy"], plain["accuracy"], strict=True))
    if gaps is None or gaps.half is None:
        return "–"
    return f"{gaps.mean:+.2f} [{gaps.mean - gaps.half:+.2f}, {gaps.mean + gaps.half:+.2f}]".replace("-", "−")


def markdown(found: Mapping[str, Any]) -> str:
    """Return the text of ``docs/leaderboard.md``."""
    rows, at = ordered(found["rows"]), MEASURED_AT
    page = environment().overlay(autoescape=False).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        about=found["about"], plainly=PLAINLY, at=at, heads=[f"ε = {epsilon}" for epsilon in EPSILONS],
        best=summary(found), methods=methods(found, at), note=PAIRED, paired=paired(found, at),
        rows=[HEADS, *map(cells, rows)], commands=map(command, rows),
    ) + "\n"  # fmt: skip


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Return one figure a task: a line for each method, and the ceiling."""
    made = []
    for task in TASKS:
        lines: dict[str, list[Row]] = {}
        for row in ordered(row for row in found["rows"] if task_of(row) is task):
            lines.setdefault(method_name(row), []).append(row)
        series = []
        for style, (name, own) in enumerate(lines.items()):
            x = {"round": tuple(float(row["epsilon"]) for row in own)}
            series.append(Series(name, x, tuple(_mean(row) / 100 for row in own), style=style))
        ceiling = found["ceilings"].get(task.features)
        level = () if ceiling is None else (("ceiling, no privacy", ceiling / 100),)
        if series:
            made.append(Figure(
                f"{task.recipe}-{task.alpha}", task.title, tuple(series), "%", percent=True, lines=level,
                x_title="ε", y_title="Test accuracy",
            ))  # fmt: skip
    return made


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Return the curves as one SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Sheet

    every = figures(found)
    # The same numbers must give the same file, bit for bit.
    with rc_context({"svg.hashsalt": "leaderboard", "svg.fonttype": "none"}):
        sheet = Sheet(figsize=(9, 2.6 * -(-len(every) // 2)), layout="constrained")
        places = sheet.subplots(-(-len(every) // 2), 2, squeeze=False).flat
        for one, axes in zip(every, places):
            draw_on(axes, one)
            axes.legend(fontsize="x-small", frameon=False)
        for axes in places:
            axes.axis("off")
        sheet.savefig(path, metadata={"Date": None})
    return path


def _mean(row: Row) -> float:
    return statistics.fmean(row["accuracy"])
