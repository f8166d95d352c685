"""What the papers published, transcribed, and the recipe that each number is held against."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.algorithms import ALGORITHMS
from fedflat.config.recipe import Recipe, override
from fedflat.core.checks import nearest, one_of, wrong
from fedflat.core.papers import number_of

FOLDER = Path(__file__).parent
ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "v": "5", "vi": "6"}


@dataclass(frozen=True)
class Cell:
    """One published number.

    published: accuracy in percent, mean ± sd as printed; – where the text has lost it. recipe: the setting at full
    scale, sound; None where the text does not say the setting. input, classes: the data's form, for plans that need
    the model. personal: the accuracy is that of the clients' own models.
    """

    column: str
    method: str
    published: str
    recipe: Recipe | None
    input: tuple[int, ...] = ()
    classes: int = 0
    personal: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    measure: best (over the rounds) or final accuracy. seeds: the paper's trials. claimed: whether the claimed ε is the
    paper's formula for its σ (``formula``) or the budget that the table names (``epsilon``). notes: how what runs here
    differs from what the paper ran.
    """

    paper: str
    table: str
    title: str
    about: str
    measure: str
    seeds: int
    claimed: str
    notes: tuple[str, ...]
    cells: tuple[Cell, ...]

    def only(self, columns: Iterable[str] = (), methods: Iterable[str] = ()) -> Table:
        """The cells of these columns (any that contain one of the texts) and these methods (exact names).

        Raises InputError for a text that no column contains or a method that is not in the table.
        """
        every = list(dict.fromkeys(cell.column for cell in self.cells))
        known = list(dict.fromkeys(cell.method for cell in self.cells))
        kept, wanted = list(columns), [one_of("--method", name, known) for name in methods]
        for text in kept:
            if not any(text.lower() in column.lower() for column in every):
                raise wrong("--column", text, "part of one of: " + "; ".join(every), hint=nearest(text, every))
        cells = tuple(
            cell
            for cell in self.cells
            if (not kept or any(text.lower() in cell.column.lower() for text in kept))
            and (not wanted or cell.method in wanted)
        )
        return Table(**{**vars(self), "cells": cells})


def names() -> list[str]:
    """Every table there is, as ``000 table-1``."""
    return sorted(path.stem.replace("-", " ", 1) for path in FOLDER.glob("*.yaml"))


def find(paper: str, table: str) -> Table:
    """A table by the paper's number (``000``) or name (``Shi et al. 2023a``) and the table's: ``1``, ``Table I``.

    Raises InputError for a paper or table that is not here, with those that are.
    """
    have = [name.split(" ", 1) for name in names()]
    number = number_of(paper)
    one_of("reproduce PAPER", number, list(dict.fromkeys(p for p, _ in have)))
    of_paper = [t for p, t in have if p == number]
    short = re.sub(r"^(table|tab)?[\s._-]*", "", table.strip().lower())
    asked = f"table-{ROMAN.get(short, short)}"
    if asked not in of_paper:
        raise wrong(f"reproduce {number}", table, ", ".join(of_paper), hint=nearest(asked, of_paper))
    return load(f"{number}-{asked}")


def load(stem: str) -> Table:
    """The table in the file ``stem``.yaml."""
    import yaml

    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{stem}.yaml").read_text(encoding="utf-8"))
    cells = tuple(
        _cell(stem, place, column, method, entry)
        for place, column in enumerate(found["columns"])
        for method, entry in found["methods"].items()
    )
    notes = tuple(found.get("notes", ()))
    rest = {key: found[key] for key in ("paper", "table", "title", "about", "measure", "seeds", "claimed")}
    return Table(**rest, notes=notes, cells=cells)


def _cell(stem: str, place: int, column: dict[str, Any], method: str, entry: dict[str, Any]) -> Cell:
    published = entry["values"][place]
    if "recipe" not in column:
        return Cell(column["name"], method, published, None)
    slug = re.sub(r"[^a-z0-9.]+", "-", column["name"].lower().replace("ε", "eps")).strip("-")
    recipe = _recipe(f"{stem}_{slug}", column, entry["algorithm"])
    return Cell(
        column["name"],
        method,
        published,
        recipe,
        tuple(column["input"]),
        column["classes"],
        entry.get("personal", False),
    )


def _recipe(name: str, column: dict[str, Any], algorithm: dict[str, Any]) -> Recipe:
    """The column's recipe with the method in it; the column's own algorithm keys go to the methods that take them."""
    taken = inspect.signature(ALGORITHMS[algorithm["name"]]).parameters
    extra = {key: value for key, value in column.get("algorithm", {}).items() if key in taken}
    mapping = Recipe.load(column["recipe"]).dump()
    for text in column.get("set", ()):
        mapping = override(mapping, text)
    return Recipe.of({**mapping, "name": name, "algorithm": {**algorithm, **extra}}, where=name)
