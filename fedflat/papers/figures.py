"""Say which runs each of the papers' figures is drawn from (``figures.yaml``), train those runs and draw them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import yaml

from fedflat.config.recipe import Recipe
from fedflat.core import RunError, plain, wrong
from fedflat.papers.outcome import UNSEEN
from fedflat.papers.rows import planned, trained
from fedflat.papers.scales import differences, scaled
from fedflat.papers.tables import Cell, Table, asked_for, load, named, slug
from fedflat.report.figures import Figure, at_places, figures_of_groups, figures_of_run
from fedflat.report.groups import Group, Spread, flatten, spread
from fedflat.report.metrics import FATES, Run, fate, shown_round
from fedflat.simulation.experiment import Update

ENTRIES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text("utf-8"))
"""What ``figures.yaml`` says of each figure, by its name, as ``000 figure-4``."""
SIZES = ("local.steps", "local.epochs", "data.clients", "cohort.size")
"""Keys that a small scale shrinks: a value on the axis is shrunk by as much as the table's own."""


@dataclass(frozen=True)
class Line:
    """One setting of a panel. label: the method; x: its place on the axis, None where the axis is the round.

    cell: whose recipe runs. changes: what is changed in it before it is scaled; varied: the keys among them.
    """

    label: str
    cell: Cell
    x: float | None = None
    changes: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()

    def recipe(self, table: Table, scale: str, overrides: Sequence[str] = ()) -> Recipe:
        """Return what runs at a scale: the table's own run where nothing is changed. Raises InputError as ``dry``
        does."""
        paper = _recipe_of(self.cell)
        unvaried = planned(table, self.cell, scale, "sound", overrides if not self.changes else ()).recipe or paper
        if not self.changes:
            return unvaried
        full = Recipe.of(paper, self.changes, where=paper.name)
        small, plain = scaled(full, scale).dump(), unvaried.dump()
        for room, name in (key.split(".") for key in SIZES):
            ran = _size_that_ran(plain, room, name)
            if f"{room}.{name}" in self.varied:
                value = plain[room][ran] * full.dump()[room][name] / paper.dump()[room][name]
                small[room][ran] = value if name == "size" else max(1, round(value))
            elif room != "local":
                # A varied q would change these as well.
                small[room][name] = plain[room][name]
        marks = "_".join(re.sub(r"[^\w.+-]+", "-", text) for text in self.changes)
        return Recipe.of({**small, "name": f"{unvaried.name}_{marks}"}, overrides, where=unvaried.name)


def _size_that_ran(recipe: Mapping[str, Any], room: str, name: str) -> str:
    """Return the key of a size in a scaled recipe's section: a small scale replaces epochs by a number of steps."""
    return "steps" if name == "epochs" and recipe[room][name] is None else name


def _recipe_of(cell: Cell) -> Recipe:
    """Return the cell's recipe. Raises InputError for one whose setting the paper's text does not say."""
    if cell.recipe is None:
        raise wrong("figure", cell.column, "a column whose setting the paper says")
    return cell.recipe


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure. draw: a key of ``DRAWS``; shows: the measures of a drawing by round.

    x: the axis's name. pairs: for bars, what stands beside each method. clients: for landscapes, whose local models.
    """

    title: str
    draw: str
    table: Table
    lines: tuple[Line, ...]
    x: str = "round"
    shows: Sequence[str] = ("accuracy",)
    pairs: Mapping[str, str] = field(default_factory=dict)
    clients: Sequence[int] = ()


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper."""

    paper: str
    name: str
    about: str
    notes: tuple[str, ...]
    panels: tuple[Panel, ...]

    def only(self, panels: Sequence[str]) -> Self:
        """Return the panels that the texts name, as ``Table.only`` has it. Raises InputError for a text that names
        none.
        """
        titles = named(panels, [panel.title for panel in self.panels])
        return replace(self, panels=tuple(panel for panel in self.panels if not panels or panel.title in titles))


def is_figure(text: str) -> bool:
    """Return whether a name asks for a figure: ``figure-4``, ``Fig. 4``, ``by-epsilon``."""
    return re.match(r"fig|by\b", text.strip().lower()) is not None


def find_figure(paper: str, name: str) -> PaperFigure:
    """Return a figure by the paper's number or name and its own: ``figure-4``, ``Fig. 4``, ``by-epsilon``.

    Raises InputError for a paper or figure that is not here, with those that are.
    """
    digits = re.fullmatch(r"fig(?:ure)?[\s._-]*(\d+)[a-z]?", name.strip().lower())
    number, asked = asked_for(paper, name, f"figure-{digits[1]}" if digits else name.strip().lower(), ENTRIES)
    entry = ENTRIES[f"{number} {asked}"]
    panels = []
    for item in entry["panels"]:
        table = load(f"{number}-{item['of'][0]}")
        options = {key: item[key] for key in ("title", "draw", "x", "shows", "pairs", "clients") if key in item}
        panels.append(Panel(table=table, lines=tuple(_lines(table, item)), **options))
    return PaperFigure(number, asked, entry["about"], tuple(entry.get("notes", ())), tuple(panels))


def _lines(table: Table, entry: Mapping[str, Any]) -> Iterable[Line]:
    every = {(cell.column, cell.method): cell for cell in table.cells}
    columns: Mapping[str, Any] = entry.get("columns") or {entry["of"][1]: None}
    methods = entry.get("methods", list(dict.fromkeys(cell.method for cell in table.cells)))
    fixed = tuple(entry.get("set", ()))
    for name, at in columns.items():
        placed = methods if isinstance(methods, Mapping) else dict.fromkeys(methods, at)
        chosen = {method: every[name, method] for method in placed}
        for method, algorithm in entry.get("more", {}).items():
            chosen[method] = _other(every[name, table.cells[0].method], method, algorithm)
        for method, cell in chosen.items():
            line = Line(entry.get("label", method), cell, placed.get(method, at), fixed)
            yield from _varied(line, entry["vary"]) if "vary" in entry else [line]


def _other(cell: Cell, method: str, algorithm: Mapping[str, Any]) -> Cell:
    """Return a column's cell with a method that the table lacks."""
    base = _recipe_of(cell)
    recipe = Recipe.of({**base.dump(), "name": f"{base.name}_{slug(method)}", "algorithm": dict(algorithm)})
    return replace(cell, method=method, published="–", recipe=recipe, personal=algorithm["name"] == "p-fedsam")


def _varied(line: Line, vary: Mapping[str, Any]) -> Iterable[Line]:
    """Yield the line at each value of a key; ``share``: a key whose ratio to it is kept."""
    key, more = vary["key"], vary.get("share")
    settings = flatten(_recipe_of(line.cell).dump())
    for value in vary["values"]:
        changes = [f"{key}={value}"] + ([f"{more}={settings[more] * value / settings[key]:g}"] if more else [])
        yield replace(line, x=float(value), changes=(*line.changes, *changes), varied=(key, more) if more else (key,))


Ran = Sequence[tuple[Line, Sequence[Run]]]
"""A panel's lines with their runs that have ended, by seed."""


@dataclass(frozen=True)
class Drawn:
    """A figure as values. landscapes: what ``landscape.flatness.measure`` found for each panel that asks for it.

    missing: why panels or lines are not drawn. remarks: what differs from the paper's setting, and runs that came to
    nothing.
    """

    of: PaperFigure
    scale: str
    figures: tuple[Figure, ...]
    landscapes: tuple[Mapping[str, Any], ...] = ()
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    runs: tuple[Run, ...] = field(default=(), repr=False)


def draw(
    figure: PaperFigure, folder: Path, scale: str = "small", overrides: Sequence[str] = (), seeds: int | None = None,
    processes: int | None = None, update: Update | None = None, say: Callable[[str], None] | None = None,
) -> Drawn:  # fmt: skip
    """Train what a figure is drawn from and draw it; each table's runs are in a folder of their own under ``folder``.

    Runs that a table shares with the figure are those of ``fedflat reproduce PAPER TABLE`` in the same folder. update:
    told of each run; say: of each model whose landscape is measured. Raises InputError as ``rows.dry`` does.
    """
    drawn: list[Figure] = []
    landscapes: list[Mapping[str, Any]] = []
    missing: dict[str, None] = {}
    remarks: dict[str, None] = {}
    every: list[Run] = []
    for place, panel in enumerate(figure.panels):
        table = panel.table
        recipes = [line.recipe(table, scale, overrides) for line in panel.lines]
        ended, failed = trained(table, scale, recipes, folder / table.folder_name, seeds, processes, update)
        missing |= dict.fromkeys(failed)
        ran = [(line, list(runs.values())) for line, runs in zip(panel.lines, ended) if runs]
        every += [run for _, runs in ran for run in runs]
        remarks |= dict.fromkeys(_remarks(panel, recipes, ran))
        if panel.draw == "landscape" and ran:
            landscapes.append(_landscape(panel, ran, say))
        elif ran:
            plots = DRAWS[panel.draw](panel, ran)
            titles = (_title(panel, plot, len(plots), overrides) for plot in plots)
            drawn += [replace(plot, key=f"{plot.key}-{place}", title=title) for plot, title in zip(plots, titles)]
    if not drawn and not landscapes:
        raise RunError("; ".join(missing) or f"{figure.paper} {figure.name}: no run ended")
    return Drawn(figure, scale, tuple(drawn), tuple(landscapes), tuple(missing), tuple(remarks), tuple(every))


def _remarks(panel: Panel, recipes: Sequence[Recipe], ran: Ran) -> list[str]:
    """Return what every line of a panel changes in the paper's setting, runs that came to nothing, the table's
    notes."""
    changes = [differences(line.cell.recipe, recipe) for line, recipe in zip(panel.lines, recipes) if line.cell.recipe]
    shared = [text for text in changes[0] if all(text in texts for texts in changes)] if changes else []
    remarks = [f"Changed: {', '.join(shared)}."] if shared else []
    for kind, words in FATES.items():
        lost = [(line, sum(fate(run) == kind for run in runs), len(runs)) for line, runs in ran]
        named = [f"{_place(panel, line)} ({some} of {of} runs)" for line, some, of in lost if some]
        if named:
            remarks.append(f"{words[:1].upper()}{words[1:]}, the last round is shown: {', '.join(named)}.")
    remarks += _moved(panel, recipes)
    table = replace(panel.table, cells=tuple(line.cell for line in panel.lines))
    return remarks + [f"Differs: {note}." for note in table.said("sound")]


def _moved(panel: Panel, recipes: Sequence[Recipe]) -> list[str]:
    """Return what ran at each of the axis's values, where a scale shrank them."""
    pairs: dict[str, None] = {}
    for line, recipe in zip(panel.lines, recipes):
        for room, name in (key.split(".") for key in line.varied[:1] if key in SIZES):
            ran = _size_that_ran(small := recipe.dump(), room, name)
            if ran != name or small[room][ran] != line.x:
                pairs[f"{line.x:g} is {room}.{ran} = {small[room][ran]:g}"] = None
    return [f"On the axis are the paper's values; here {', '.join(pairs)}."] if pairs else []


def _place(panel: Panel, line: Line) -> str:
    """Return a line in words: its method, and its place where it is a point on an axis."""
    return line.label if line.x is None else f"{line.label} at {panel.x} = {line.x:g}"


def _title(panel: Panel, figure: Figure, count: int, overrides: Sequence[str]) -> str:
    """Return the panel's title, what is drawn where it has several drawings, and what was changed by hand."""
    name = figure.title if figure.title != panel.title else figure.y_title
    changed = [text for text in overrides if not text.startswith(UNSEEN)]
    return panel.title + (f": {name}" if count > 1 else "") + (f" ({', '.join(changed)})" if changed else "")


def _rounds(panel: Panel, ran: Ran) -> list[Figure]:
    """Return a measure by round: means over seeds with bands of one standard deviation."""
    groups = [Group(line.label, tuple(runs), style) for style, (line, runs) in enumerate(ran)]
    figures = {figure.key: figure for figure in figures_of_groups(groups)}
    return [replace(figures[key], overlay=False, y_title=figures[key].title) for key in panel.shows if key in figures]


def _bands(panel: Panel, ran: Ran) -> list[Figure]:
    """Return quantiles of update norms by round, a drawing for each method; of the first seed."""
    figures = []
    for place, (line, runs) in enumerate(ran):
        norms = [figure for figure in figures_of_run(runs[0]) if figure.key == "norms"]
        figures += [replace(figure, key=f"norms-{place}", title=line.label, y_title="Update norm") for figure in norms]
    return figures


def _axis(panel: Panel, ran: Ran) -> list[Figure]:
    """Return the accuracy on a real axis: means over seeds with 95 % t intervals."""
    drawn = {line.label: style for style, (line, _) in enumerate(ran)}
    points = [
        (line.label, line.x, shares, drawn[line.label])
        for line, runs in ran
        if line.x is not None and (shares := _shares(line, runs)) is not None
    ]
    personal = any(line.cell.personal for line, _ in ran)
    y_title = f"{'Personal' if personal else 'Test'} accuracy"
    note = f"{y_title} of the {panel.lines[0].cell.base} round; mean over seeds, 95 % t interval."
    figure = Figure(
        "axis", panel.title, (), "%", note, personal, percent=True, kind="points", x_title=panel.x, y_title=y_title
    )
    return [at_places(figure, points)]


def _shares(line: Line, runs: Sequence[Run]) -> Spread | None:
    """Return the accuracies of a line's runs, from 0 to 1."""
    points = (shown_round(run, line.cell.base, line.cell.personal) for run in runs)
    return spread(None if point is None else point[1] for point in points)


SIDES = ("private", "without privacy")


def _bars(panel: Panel, ran: Ran) -> list[Figure]:
    """Return each method's accuracy with privacy beside its twin's without."""
    twins = [(place, *side) for place, pair in enumerate(panel.pairs.items()) for side in zip(pair, SIDES)]
    changes: dict[str, Any] = {name: {"x": float(place), "label": label} for place, name, label in twins}
    [figure] = _axis(panel, [(replace(line, **changes[line.cell.method]), runs) for line, runs in ran])
    note = "Accuracy of the final round, personal models on their own data; mean over seeds, 95 % t interval."
    names = tuple(f"{name} / {twin}" for name, twin in panel.pairs.items())
    figure = replace(figure, key="bars", kind="bars", note=note, names=names, private=True, zero=True)
    return [replace(figure, x_title="", y_title="Accuracy")]


def _landscape(panel: Panel, ran: Ran, say: Callable[[str], None] | None) -> Mapping[str, Any]:
    """Return the landscapes of each method's runs, over directions that they share."""
    from fedflat.landscape import flatness

    def stage(name: str, points: int) -> None:
        if say is not None:
            say(f"landscape of {name}" + (f": {points} points, then its curvature" if points else ": its curvature"))

    settings = flatness.Settings(points=21, examples=500, clients=tuple(panel.clients))
    record = flatness.measure([run.path for _, runs in ran for run in runs], settings, stage)
    return cast(Mapping[str, Any], plain(record))


DRAWS: dict[str, Callable[[Panel, Ran], list[Figure]]] = {
    "rounds": _rounds, "bands": _bands, "axis": _axis, "bars": _bars,
}  # fmt: skip
