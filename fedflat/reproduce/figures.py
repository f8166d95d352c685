"""The papers' figures: which runs each is drawn from. ``figures.yaml`` has an entry for each, over cells of tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedflat.config.reading import override
from fedflat.config.recipe import Recipe
from fedflat.core.checks import nearest, wrong
from fedflat.core.papers import paper_of
from fedflat.reproduce.rows import planned
from fedflat.reproduce.scales import scaled
from fedflat.reproduce.tables import Cell, Table, load, named

FILE = Path(__file__).parent / "figures.yaml"
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
        """What runs at a scale: the table's own run where nothing is changed. Raises InputError as ``dry`` does."""
        own = _known(self.cell)
        plain = planned(table, self.cell, scale, "sound", overrides if not self.changes else ()).recipe or own
        if not self.changes:
            return plain
        full = _changed(own, self.changes)
        found = scaled(full, scale).dump()
        for key in SIZES:
            if key in self.varied:
                _shrink(found, key, own, full, plain)
            elif key in ("data.clients", "cohort.size"):  # what a varied q would move besides
                room, name = key.split(".")
                found[room][name] = plain.dump()[room][name]
        marks = "_".join(re.sub(r"[^\w.+-]+", "-", text) for text in self.changes)
        return _changed(Recipe.of({**found, "name": f"{plain.name}_{marks}"}), overrides)


def _known(cell: Cell) -> Recipe:
    """The cell's recipe. Raises InputError for one whose setting the paper's text does not say."""
    if cell.recipe is None:
        raise wrong("figure", cell.column, "a column whose setting the paper says")
    return cell.recipe


def _changed(recipe: Recipe, texts: Iterable[str]) -> Recipe:
    found = recipe.dump()
    for text in texts:
        found = override(found, text)
    return Recipe.of(found, where=recipe.name)


def _shrink(found: dict[str, Any], key: str, before: Recipe, full: Recipe, small: Recipe) -> None:
    """``key`` in ``found``: as far from the small run's own value as the full one's is from the paper's."""
    room, name = key.split(".")
    old, new, own = (each.dump()[room][name] for each in (before, full, small))
    if name == "epochs" and own is None:  # where epochs are cut, it is to a number of steps
        name, own = "steps", small.local.steps
    value = own * new / old
    found[room][name] = value if name == "size" else max(1, round(value))


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure. draw: a key of ``drawn.DRAWS``; shows: the measures of a drawing by round.

    x: the axis's name. pairs: for bars, what stands beside each method. clients: for landscapes, whose local models.
    """

    title: str
    draw: str
    table: Table
    lines: tuple[Line, ...]
    x: str = "round"
    shows: tuple[str, ...] = ("accuracy",)
    pairs: Mapping[str, str] | None = None
    clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper."""

    paper: str
    name: str
    about: str
    notes: tuple[str, ...]
    panels: tuple[Panel, ...]

    def only(self, panels: Sequence[str]) -> PaperFigure:
        """The panels that the texts name, as ``Table.only`` has it. Raises InputError for a text that names none."""
        kept = named(panels, [panel.title for panel in self.panels])
        return replace(self, panels=tuple(panel for panel in self.panels if not panels or panel.title in kept))


def figure_names() -> list[str]:
    """Every figure there is, as ``000 figure-4``."""
    return list(_entries())


def abouts() -> dict[str, str]:
    """What each figure shows, by name."""
    return {name: entry["about"] for name, entry in _entries().items()}


def is_figure(text: str) -> bool:
    """Whether a name asks for a figure: ``figure-4``, ``Fig. 4``, ``by-epsilon``."""
    return re.match(r"fig|by\b", text.strip().lower()) is not None


def find_figure(paper: str, name: str) -> PaperFigure:
    """A figure by the paper's number or name and its own: ``figure-4``, ``Fig. 4``, ``by-epsilon``.

    Raises InputError for a paper or figure that is not here, with those that are.
    """
    have = [each.split(" ", 1) for each in figure_names()]
    number = paper_of(paper, (p for p, _ in have))
    of_paper = [figure for p, figure in have if p == number]
    small = name.strip().lower()
    digits = re.fullmatch(r"fig(?:ure)?[\s._-]*(\d+)[a-z]?", small)
    asked = f"figure-{digits[1]}" if digits else small
    if asked not in of_paper:
        raise wrong(f"reproduce {number}", name, ", ".join(of_paper), hint=nearest(asked, of_paper))
    entry = _entries()[f"{number} {asked}"]
    panels = tuple(_panel(number, each) for each in entry["panels"])
    return PaperFigure(number, asked, entry["about"], tuple(entry.get("notes", ())), panels)


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    import yaml

    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def _panel(paper: str, entry: Mapping[str, Any]) -> Panel:
    table = load(f"{paper}-{entry['of'][0]}")
    shows = entry.get("shows", "accuracy")
    return Panel(
        entry["title"], entry["draw"], table, tuple(_lines(table, entry)), entry.get("x", "round"),
        (shows,) if isinstance(shows, str) else tuple(shows), entry.get("pairs"), tuple(entry.get("clients", ())),
    )  # fmt: skip


def _lines(table: Table, entry: Mapping[str, Any]) -> Iterable[Line]:
    every = {(cell.column, cell.method): cell for cell in table.cells}
    columns: Mapping[str, Any] = entry.get("columns") or {entry["of"][1]: None}
    methods = entry.get("methods", list(dict.fromkeys(cell.method for cell in table.cells)))
    fixed = tuple(entry.get("set", ()))
    for column, at in columns.items():
        placed = methods if isinstance(methods, Mapping) else dict.fromkeys(methods, at)
        chosen = {name: every[column, name] for name in placed}
        for name, algorithm in entry.get("more", {}).items():
            chosen[name] = _other(every[column, table.cells[0].method], name, algorithm)
        for name, cell in chosen.items():
            whole = Line(entry.get("label", name), cell, placed.get(name, at), fixed)
            yield from _varied(whole, entry["vary"]) if "vary" in entry else [whole]


def _other(cell: Cell, method: str, algorithm: Mapping[str, Any]) -> Cell:
    """A column's cell with a method that the table lacks."""
    own = _known(cell)
    slug = re.sub(r"[^a-z0-9.]+", "-", method.lower())
    recipe = Recipe.of({**own.dump(), "name": f"{own.name}_{slug}", "algorithm": dict(algorithm)})
    return replace(cell, method=method, published="–", recipe=recipe, personal=algorithm["name"] == "p-fedsam")


def _varied(line: Line, vary: Mapping[str, Any]) -> Iterable[Line]:
    """The line at each value of a key; ``share``: a key whose ratio to it is kept."""
    keys = [vary["key"], *([vary["share"]] if "share" in vary else [])]
    whole = _known(line.cell).dump()
    first, *rest = [whole[key.split(".")[0]].get(key.split(".")[1]) for key in keys]
    for value in vary["values"]:
        changes = [f"{keys[0]}={value}", *(f"{key}={own * value / first:g}" for key, own in zip(keys[1:], rest))]
        yield replace(line, x=float(value), changes=(*line.changes, *changes), varied=tuple(keys))
