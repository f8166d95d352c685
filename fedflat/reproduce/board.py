"""The leaderboard: what is in ``leaderboard.json``, as Markdown, as a page and as curves. Nothing is trained here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedflat.report.figures import Figure, Series
from fedflat.report.html import cards
from fedflat.report.pages import Section, Table, page
from fedflat.report.plates import draw_on
from fedflat.report.styles import styles

FILE = Path(__file__).with_name("leaderboard.json")
EPSILONS = (1, 2, 4, 8, 10)
TASKS = (("cifar10", 0.6), ("cifar10", 0.1), ("mnist", 0.6), ("fashion-mnist", 0.6))
NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
HEADS = ("data", "Dirichlet", "ε", "method", "accuracy %", "seeds", "proven ε", "seconds", "prior")
Row = Mapping[str, Any]


def load(path: Path = FILE) -> dict[str, Any]:
    """``rows``, ``ceilings`` (per cent, by data set) and ``about``."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By task, ε, and from the best mean down."""
    tasks = {task: place for place, task in enumerate(TASKS)}
    return sorted(
        rows,
        key=lambda row: (tasks.get((row["data"], row["alpha"]), len(tasks)), row["epsilon"], -_mean(row)),
    )


def spread_of(row: Row, digits: int = 2) -> str:
    """Mean ± standard deviation over the seeds; without spaces in one digit."""
    between = " ± " if digits > 1 else "±"
    sd = f"{between}{statistics.stdev(row['accuracy']):.{digits}f}" if len(row["accuracy"]) > 1 else ""
    return f"{_mean(row):.{digits}f}{sd}"


def command(row: Row) -> str:
    """The command whose run is one of the row's, for its first seed."""
    keys = {
        "seed": row["seeds"][0], "privacy.epsilon": row["epsilon"], "data.partition.alpha": row["alpha"],
        **{f"algorithm.{key}": value for key, value in row["method"].items()}, **row["setting"],
    }  # fmt: skip
    return " ".join(
        [f"fedflat run {row['data']}-representation", *(f"-o {key}={value}" for key, value in keys.items())]
    )


def cells(row: Row) -> list[str]:
    """A row's texts under ``HEADS``."""
    accuracy, seconds = spread_of(row), f"{row['seconds']:.0f}"
    return [
        NAMES.get(row["data"], row["data"]), f"{row['alpha']:g}", f"{row['epsilon']:g}", method_name(row), accuracy,
        str(len(row["accuracy"])), f"{row['proven']:.2f}", seconds, row.get("prior", "random process"),
    ]  # fmt: skip


def method_name(row: Row) -> str:
    """The method, with the options that are not its defaults."""
    options = [f"{key} {value}" for key, value in row["method"].items() if key != "name"]
    name = str(row["method"]["name"]).rpartition(":")[2]
    return f"{name} ({', '.join(options)})" if options else name


def best(rows: Iterable[Row]) -> dict[tuple[str, float, float], Row]:
    """The best row of each (data, alpha, ε)."""
    found: dict[tuple[str, float, float], Row] = {}
    for row in rows:
        key = (row["data"], row["alpha"], row["epsilon"])
        if key not in found or _mean(row) > _mean(found[key]):
            found[key] = row
    return found


def summary(found: Mapping[str, Any], short: bool = False) -> list[list[str]]:
    """Each task's best accuracy at every ε, and its ceiling; what nobody measured says so. short: for 80 columns."""
    top = best(found["rows"])
    table = []
    for data, alpha in TASKS:
        rows = [top.get((data, alpha, epsilon)) for epsilon in EPSILONS]
        ceiling = found["ceilings"].get(data)
        digits, unknown = (1, "–") if short else (2, "not measured")
        shown = [unknown if row is None else spread_of(row, digits) for row in rows]
        name = f"{NAMES[data]}, {alpha:g}" if short else f"{NAMES[data]}, Dirichlet {alpha:g}"
        table.append([name, *shown, unknown if ceiling is None else f"{ceiling:.{digits}f}"])
    return table


def markdown(found: Mapping[str, Any]) -> str:
    """``docs/leaderboard.md``."""
    rows = ordered(found["rows"])
    heads = ["", *(f"ε = {epsilon}" for epsilon in EPSILONS), "ceiling, no privacy"]
    lines = [
        "# Leaderboard", "", "<!-- Written by `fedflat leaderboard --out docs`, from leaderboard.json. -->", "",
        *found["about"], "", "## The best at each ε", "", *_grid(heads, summary(found)), "",
        "![Accuracy against ε, with the ceiling](images/leaderboard.svg)", "", "## All rows", "",
        *_grid(list(HEADS), [cells(row) for row in rows]), "", "## The command of each row", "",
        "Each with its first seed; the others differ in `seed` alone.", "", "```console",
        *(f"$ {command(row)}" for row in rows), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def html(found: Mapping[str, Any], version: str) -> str:
    """The page: curves, then the tables."""
    rows = ordered(found["rows"])
    heads = ["", *(f"ε = {epsilon}" for epsilon in EPSILONS), "ceiling"]
    caption = "Test accuracy in per cent, mean ± sd over seeds that tuning never saw."
    sections = [
        Section("curves", "Accuracy against ε", "cards", cards(figures(found))),
        Section("best", "The best at each ε", "table", Table(caption, heads, summary(found))),
        Section("rows", "All rows", "table", Table(caption, HEADS, [cells(row) for row in rows], left=1)),
    ]
    return page("Leaderboard", " ".join(found["about"][:1]), sections, version)


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """One figure a task: a line for each method, and the ceiling."""
    made = []
    for data, alpha in TASKS:
        lines: dict[str, list[Row]] = {}
        for row in ordered(found["rows"]):
            if (row["data"], row["alpha"]) == (data, alpha):
                lines.setdefault(method_name(row), []).append(row)
        drawn = styles([str(own[0]["method"]["name"]) for own in lines.values()])
        series = [_series(name, own, style) for (name, own), style in zip(lines.items(), drawn)]
        ceiling = found["ceilings"].get(data)
        level = () if ceiling is None else (("ceiling, no privacy", ceiling / 100),)
        title = f"{NAMES[data]}, Dirichlet {alpha:g}"
        if series:
            shown = Figure(f"{data}-{alpha:g}", title, tuple(series), "%", percent=True, lines=level)
            made.append(replace(shown, x_title="ε", y_title="Test accuracy"))
    return made


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """The curves as one SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Sheet

    every = figures(found)
    with rc_context({"svg.hashsalt": "leaderboard", "svg.fonttype": "none"}):
        sheet = Sheet(figsize=(9, 2.6 * -(-len(every) // 2)), layout="constrained")
        places = sheet.subplots(-(-len(every) // 2), 2, squeeze=False).flat
        for axes, one in zip(places, every):
            draw_on(axes, one)
            axes.legend(fontsize="x-small", frameon=False)
        for axes in places:
            axes.axis("off")
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.savefig(path, metadata={"Date": None})
    return path


def _series(name: str, rows: Sequence[Row], style: int) -> Series:
    x = tuple(float(row["epsilon"]) for row in rows)
    return Series(name, {"round": x}, tuple(_mean(row) / 100 for row in rows), style=style)


def _mean(row: Row) -> float:
    return statistics.fmean(row["accuracy"])


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
