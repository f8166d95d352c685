"""A paper's figure, run and drawn: one function for each kind of drawing, from runs to values (``report.figures``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.config.recipe import Recipe
from fedflat.core.checks import RunError
from fedflat.report.fates import FATES, fate
from fedflat.report.figures import NORMS, Figure, Series, figures_of_run, quantiles, thin
from fedflat.report.groups import Group, spread
from fedflat.report.metrics import Run, column
from fedflat.report.overlays import figures_of_groups
from fedflat.report.progress import RunEvent
from fedflat.report.styles import styles
from fedflat.reproduce import numbers
from fedflat.reproduce.figures import SIZES, Line, Panel, PaperFigure
from fedflat.reproduce.outcome import UNSEEN
from fedflat.reproduce.rows import finished, lacking
from fedflat.reproduce.scales import SCALES, differences
from fedflat.simulation.experiment import compare
from fedflat.simulation.experiment_settings import expand

BINS = 40
Ran = Sequence[tuple[Line, Sequence[Run]]]
"""A panel's lines with their runs that have ended, by seed."""


@dataclass(frozen=True)
class Drawn:
    """A figure as values. landscapes: what ``analysis.flatness.measure`` found for each panel that asks for it.

    missing: why panels or lines are not drawn. remarks: what differs from the paper's setting, and runs that came to
    nothing.
    """

    of: PaperFigure
    scale: str
    figures: tuple[Figure, ...]
    landscapes: tuple[Mapping[str, Any], ...] = ()
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    folder: Path | None = None
    runs: tuple[Run, ...] = field(default=(), repr=False)


def draw(
    figure: PaperFigure,
    folder: Path,
    scale: str = "small",
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    processes: int | None = None,
    update: Callable[[RunEvent], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Drawn:
    """Train what a figure is drawn from and draw it; each table's runs are in a folder of their own under ``folder``.

    Runs that a table shares with the figure are those of ``fedflat reproduce PAPER TABLE`` in the same folder. update:
    told of each run; say: of each model whose landscape is measured. Raises InputError as ``rows.train`` does.
    """
    drawn: list[Figure] = []
    landscapes: list[Mapping[str, Any]] = []
    missing: dict[str, None] = {}
    remarks: dict[str, None] = {}
    every: list[Run] = []
    for place, panel in enumerate(figure.panels):
        recipes = [line.recipe(panel.table, scale, overrides) for line in panel.lines]
        if absent := lacking(recipes):
            missing |= dict.fromkeys(absent.values())
            continue
        count = seeds or SCALES[scale].seeds or panel.table.seeds
        where = folder_of(folder, panel)
        found = compare(recipes, (), count, where, processes, update)
        missing |= dict.fromkeys(f"{name}: {why}" for name, why in found.failed.items())
        settings = expand(recipes, (), count)
        ran = [(line, list(finished(where / s.slug, s.seeds).values())) for line, s in zip(panel.lines, settings)]
        ran = [(line, runs) for line, runs in ran if runs]
        every += [run for _, runs in ran for run in runs]
        remarks |= dict.fromkeys(_remarks(panel, recipes, ran))
        if panel.draw == "landscape" and ran:
            landscapes.append(_landscape(panel, ran, say))
        elif ran:
            made = DRAWS[panel.draw](panel, ran)
            titles = (_title(panel, each, len(made), overrides) for each in made)
            drawn += [replace(each, key=f"{each.key}-{place}", title=title) for each, title in zip(made, titles)]
    if not drawn and not landscapes:
        raise RunError("; ".join(missing) or f"{figure.paper} {figure.name}: no run ended")
    return Drawn(figure, scale, tuple(drawn), tuple(landscapes), tuple(missing), tuple(remarks), folder, tuple(every))


def _remarks(panel: Panel, recipes: Sequence[Recipe], ran: Ran) -> list[str]:
    """What every line of a panel changes in the paper's setting, runs that came to nothing, the table's notes."""
    changes = [differences(line.cell.recipe, own) for line, own in zip(panel.lines, recipes) if line.cell.recipe]
    shared = [text for text in changes[0] if all(text in each for each in changes)] if changes else []
    said = [f"Changed: {', '.join(shared)}."] if shared else []
    for kind, words in FATES.items():
        lost = [(line, sum(fate(run) == kind for run in runs), len(runs)) for line, runs in ran]
        named = [f"{_place(panel, line)} ({some} of {of} runs)" for line, some, of in lost if some]
        if named:
            said.append(f"{words[:1].upper()}{words[1:]}, the last round is shown: {', '.join(named)}.")
    said += _moved(panel, recipes)
    shown = replace(panel.table, cells=tuple(line.cell for line in panel.lines))
    return said + [f"Differs: {note}." for note in shown.said("sound")]


def _moved(panel: Panel, recipes: Sequence[Recipe]) -> list[str]:
    """What ran at each of the axis's values, where a scale shrank them."""
    pairs: dict[str, None] = {}
    for line, own in zip(panel.lines, recipes):
        for key in (key for key in line.varied[:1] if key in SIZES):
            room, name = key.split(".")
            section = own.dump()[room]
            name = "steps" if name == "epochs" and section.get(name) is None else name
            if f"{room}.{name}" != key or section[name] != line.x:
                pairs[f"{line.x:g} is {room}.{name} = {section[name]:g}"] = None
    return [f"On the axis are the paper's values; here {', '.join(pairs)}."] if pairs else []


def _place(panel: Panel, line: Line) -> str:
    """A line in words: its method, and its place where it is a point on an axis."""
    return line.label if line.x is None else f"{line.label} at {panel.x} = {line.x:g}"


def _title(panel: Panel, made: Figure, count: int, overrides: Sequence[str]) -> str:
    """The panel's title, what is drawn where it has several drawings, and what was changed by hand."""
    own = made.title if made.title != panel.title else made.y_title
    changed = [text for text in overrides if not text.startswith(UNSEEN)]
    return panel.title + (f": {own}" if count > 1 else "") + (f" ({', '.join(changed)})" if changed else "")


def folder_of(folder: Path, panel: Panel) -> Path:
    """Where the runs of a panel's table are."""
    return folder / f"reproduce-{panel.table.paper}-{panel.table.table.lower().replace(' ', '-')}"


def _rounds(panel: Panel, ran: Ran) -> list[Figure]:
    """A measure by round: means over seeds with bands of one standard deviation."""
    groups = [Group(line.label, tuple(runs), style) for (line, runs), style in zip(ran, _styles(ran))]
    made = {each.key: each for each in figures_of_groups(groups)}
    kept = [made[key] for key in panel.shows if key in made]
    return [replace(each, overlay=False, y_title=each.title) for each in kept]


def _spread(panel: Panel, ran: Ran) -> list[Figure]:
    """Update norms by round: the mean over clients, with a band of one standard deviation over clients."""
    series = []
    for (line, runs), style in zip(ran, _styles(ran)):
        means, sds = (_by_round(runs, key) for key in ("update_norm_mean", "update_norm_sd"))
        turns = [turn for turn in means if turn in sds]
        turns = [turns[at] for at in thin(len(turns))]
        y, sd = tuple(means[turn] for turn in turns), [sds[turn] for turn in turns]
        low, high = (tuple(a + sign * b for a, b in zip(y, sd)) for sign in (-1, 1))
        series.append(Series(line.label, {"round": tuple(map(float, turns))}, y, low, high, style))
    note = "Mean over the cohort with one standard deviation over clients, before the clip; means over seeds."
    return [replace(NORMS, note=note, series=tuple(series), y_title="Update norm")]


def _styles(ran: Ran) -> list[int]:
    """The lines' colours and dashes: their methods' own, as on every page."""
    return styles([runs[0].algorithm for _, runs in ran])


def _by_round(runs: Sequence[Run], key: str) -> dict[int, float]:
    """Mean over seeds at each round."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for turn, value in column(run.private, key):
            found.setdefault(turn, []).append(value)
    return {turn: math.fsum(values) / len(values) for turn, values in sorted(found.items())}


def _norms(panel: Panel, ran: Ran) -> list[Figure]:
    """Shares of updates by norm, over all rounds and seeds, from each round's quantiles with straight lines between."""
    known = [(line, [quantiles(r, "update_norm_quantiles") for run in runs for r in run.private]) for line, runs in ran]
    points = [(line, [sorted(_quantile_points(found)) for found in rows if found]) for line, rows in known]
    ends = [pair[1] for _, rows in points for row in rows for pair in row]
    edges = np.linspace(min(ends), max(ends), BINS + 1)
    series = []
    for (line, rows), style in zip(points, _styles(ran)):
        curves = [np.interp(edges, [v for _, v in row], [p for p, _ in row], left=0.0, right=1.0) for row in rows]
        shares = np.diff(np.mean(curves, axis=0))
        x = {"round": tuple(float(each) for each in (edges[1:] + edges[:-1]) / 2)}
        series.append(Series(line.label, x, tuple(float(each) for each in shares), style=style))
    clip = panel.lines[0].cell.recipe.privacy.clip if panel.lines[0].cell.recipe else ""
    note = f"Share of updates in each of {BINS} intervals of the norm before the clip (C = {clip}), all rounds."
    return [
        Figure(
            "norms", panel.title, tuple(series), "%", note, True, percent=True, x_title="norm", zero=True,
            y_title="Share of updates",
        )
    ]  # fmt: skip


def _quantile_points(found: Mapping[str, float]) -> list[tuple[float, float]]:
    places = {"min": 0.0, "max": 1.0}
    return [(places[name] if name in places else float(name), value) for name, value in found.items()]


def _bands(panel: Panel, ran: Ran) -> list[Figure]:
    """Quantiles of update norms by round, a drawing for each method; of the first seed."""
    found = []
    for place, (line, runs) in enumerate(ran):
        made = [each for each in figures_of_run(runs[0]) if each.key == "norms"]
        found += [replace(each, key=f"norms-{place}", title=line.label, y_title="Update norm") for each in made]
    return found


def _axis(panel: Panel, ran: Ran) -> list[Figure]:
    """Accuracy on a real axis: means over seeds with 95 % t intervals."""
    made: dict[str, list[tuple[float, float, float, float]]] = {}
    for line, runs in ran:
        if (point := _point(line, runs)) is not None and line.x is not None:
            made.setdefault(line.label, []).append((line.x, *point))
    series = []
    drawn = dict(zip([line.label for line, _ in ran], _styles(ran)))
    for label, points in made.items():
        x, y, low, high = zip(*sorted(points))
        several = any(a != b for a, b in zip(low, high))
        series.append(Series(label, {"round": x}, y, low if several else (), high if several else (), drawn[label]))
    personal = any(line.cell.personal for line, _ in ran)
    cell = panel.lines[0].cell
    note = f"{'Personal' if personal else 'Test'} accuracy of the {cell.base} round; mean over seeds, 95 % t interval."
    return [
        Figure(
            "axis", panel.title, tuple(series), "%", note, personal, percent=True, kind="points", x_title=panel.x,
            y_title=f"{'Personal' if personal else 'Test'} accuracy",
        )
    ]  # fmt: skip


def _point(line: Line, runs: Sequence[Run]) -> tuple[float, float, float] | None:
    """Mean accuracy and the ends of its 95 % t interval (the mean itself for one seed)."""
    cell = replace(line.cell, measure=line.cell.base)
    found = spread(None if value is None else value / 100 for value in (numbers.measured(cell, run) for run in runs))
    if found is None:
        return None
    half = found.half or 0.0
    return found.mean, max(0.0, found.mean - half), min(1.0, found.mean + half)


def _bars(panel: Panel, ran: Ran) -> list[Figure]:
    """Each method's accuracy with privacy beside its twin's without."""
    found = {line.cell.method: _point(line, runs) for line, runs in ran}
    pairs = panel.pairs or {}
    kept = [(name, twin) for name, twin in pairs.items() if found.get(name) and found.get(twin)]
    x = {"round": tuple(map(float, range(len(kept))))}
    series = []
    for place, label in enumerate(("private", "without privacy")):
        points = [found[pair[place]] for pair in kept]
        y, low, high = zip(*[point for point in points if point is not None]) if points else ((), (), ())
        series.append(Series(label, x, y, low, high, place))
    note = "Accuracy of the final round, personal models on their own data; mean over seeds, 95 % t interval."
    names = tuple(f"{name} / {twin}" for name, twin in kept)
    return [
        Figure(
            "bars", panel.title, tuple(series), "%", note, True, percent=True, kind="bars", x_title="", zero=True,
            names=names, y_title="Accuracy",
        )
    ]  # fmt: skip


def _landscape(panel: Panel, ran: Ran, say: Callable[[str], None] | None) -> Mapping[str, Any]:
    """Landscapes of each method's runs, over directions that they share."""
    from fedflat.analysis import flatness
    from fedflat.report.metrics import plain

    folders = [run.path for _, runs in ran for run in runs]

    def stage(name: str, points: int) -> None:
        if say is not None:
            say(f"landscape of {name}" + (f": {points} points, then its curvature" if points else ": its curvature"))

    settings = flatness.Settings(points=21, examples=500, clients=panel.clients)
    found: Mapping[str, Any] = plain(flatness.measure(folders, settings, stage))
    return found


DRAWS: dict[str, Callable[[Panel, Ran], list[Figure]]] = {
    "rounds": _rounds,
    "spread": _spread,
    "norms": _norms,
    "bands": _bands,
    "axis": _axis,
    "bars": _bars,
}
