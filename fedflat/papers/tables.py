"""Read what the papers published, and the recipe that each number is held against."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import Any, Self

from fedflat.config.reading import override
from fedflat.config.recipe import Recipe
from fedflat.core import nearest, one_of, require
from fedflat.methods.published import reproduced_paper

FOLDER = Path(__file__).parent
ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "v": "5", "vi": "6"}

MEASURES = {
    "best": "test accuracy of the best evaluated round, %", "final": "test accuracy of the last round, %",
    "train": "training accuracy of the cohort's minibatches in the round of the test accuracy, %",
    "gap": "training minus test accuracy, points", "rounds": "rounds until the test accuracy is at least the target",
    "speedup": "rounds of the table's first method over this one's, ×",
    "gain": "test accuracy minus that of the table's first method, points",
}  # fmt: skip
"""What a printed number counts, and its unit."""
COUNTED = ("rounds", "speedup")
"""Measures that count rounds."""
RELATIVE = ("speedup", "gain")
"""Measures against the first method of the table."""
LOWER = ("rounds", "gap")
"""Measures of which less is better."""


@dataclass(frozen=True)
class Cell:
    """One published number.

    published: as printed, mean ± sd where it has one; – where the text has lost it. recipe: the setting at full scale,
    sound; None where the text does not say the setting. released: what ``--protocol published`` changes in it first.
    input, classes: the data's form, for plans that need the model. personal: the accuracy is that of the clients' own
    models. measure: a key of MEASURES; base: the table's own, best or final; target: of rounds and speedup, %. of: the
    column whose runs this number is of.
    """

    column: str
    method: str
    published: str
    recipe: Recipe | None
    input: tuple[int, ...] = ()
    classes: int = 0
    personal: bool = False
    measure: str = "final"
    base: str = "final"
    target: float | None = None
    of: str = ""
    released: tuple[str, ...] = ()

    @property
    def run(self) -> tuple[str, str]:
        """The column and the method whose runs this number is taken from."""
        return self.of, self.method

    @property
    def value(self) -> tuple[float, float | None] | None:
        """The published mean and sd (None where none is printed), or None for a number that is lost."""
        return printed(self.published)


def printed(text: str) -> tuple[float, float | None] | None:
    """Return ``53.92 ± 0.55``, ``40``, ``3.3×`` or ``+1.04`` as (mean, sd or None); None for –."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)×?(?: ± (\d+(?:\.\d+)?))?", text)
    return None if match is None else (float(match[1]), None if match[2] is None else float(match[2]))


@dataclass(frozen=True)
class Note:
    """How what runs here differs from what the paper ran.

    protocol: the one under which it holds; empty for both. of: parts of names of columns or methods, without any of
    which it says nothing; none where it is about the whole table.
    """

    text: str
    protocol: str = ""
    of: tuple[str, ...] = ()

    def holds(self, protocol: str, cells: Iterable[Cell]) -> bool:
        """Return whether it is about what these cells show under a protocol."""
        names = {name for cell in cells for name in (cell.column, cell.method)}
        relevant = not self.of or any(part in name for part in self.of for name in names)
        return relevant and self.protocol in ("", protocol)


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    measure: best (over the rounds) or final accuracy. seeds: the paper's trials. claimed: whether the claimed ε is the
    paper's formula for its σ (``formula``) or the budget that the table names (``epsilon``). first: the method that
    relative numbers are against.
    """

    paper: str
    table: str
    title: str
    about: str
    measure: str
    seeds: int
    claimed: str
    notes: tuple[Note, ...]
    cells: tuple[Cell, ...]
    first: str = ""

    @property
    def folder_name(self) -> str:
        """What the folder of its runs is called."""
        return f"reproduce-{self.paper}-{self.table.lower().replace(' ', '-')}"

    def said(self, protocol: str) -> list[str]:
        """Return the notes that hold under a protocol and are about what the table's cells show."""
        return [note.text for note in self.notes if note.holds(protocol, self.cells)]

    def only(self, columns: Iterable[str] = (), methods: Iterable[str] = ()) -> Self:
        """Return the cells of these columns and these methods (exact names).

        A text that is a column's whole name means that one; any other those that contain it, numbers being whole: with
        ``Dirichlet 1`` comes no ``Dirichlet 10``. Raises InputError for a text that no column contains or a method that
        is not in the table.
        """
        known = list(dict.fromkeys(cell.method for cell in self.cells))
        wanted = [one_of("--method", name, known) for name in methods]
        chosen = named(columns, list(dict.fromkeys(cell.column for cell in self.cells)))
        cells = (cell for cell in self.cells if not chosen or cell.column in chosen)
        return replace(self, cells=tuple(cell for cell in cells if not wanted or cell.method in wanted))


def named(texts: Iterable[str], every: Sequence[str]) -> set[str]:
    """Return the columns, or panels, that any of the texts names: the one of that name, or those with it as a part,
    whole numbers whole. Raises InputError for a text that names none."""
    chosen: set[str] = set()
    for text in texts:
        small = text.strip().lower()
        before = r"(?<![\d.])" if small[:1].isdigit() else ""
        part = re.compile(before + re.escape(small) + (r"(?!\d|\.\d)" if small[-1:].isdigit() else ""))
        exact = [column for column in every if column.lower() == small]
        matches = exact or [column for column in every if part.search(column.lower())]
        require(bool(matches), "--column", text, "part of one of: " + "; ".join(every), hint=nearest(text, every))
        chosen.update(matches)
    return chosen


def names() -> list[str]:
    """Return every table there is, as ``000 table-1``."""
    return sorted(path.stem.replace("-", " ", 1) for path in FOLDER.glob("*-table-*.yaml"))


def find(paper: str, table: str) -> Table:
    """Return a table by the paper's number (``000``) or name (``Shi et al. 2023a``) and the table's: ``1``, ``Table
    I``.

    Raises InputError for a paper or table that is not here, with those that are.
    """
    short = re.sub(r"^(table|tab)?[\s._-]*", "", table.strip().lower())
    number, asked = asked_for(paper, table, f"table-{ROMAN.get(short, short)}", names(), ", or a figure (--list)")
    return load(f"{number}-{asked}")


def asked_for(paper: str, given: str, name: str, every: Iterable[str], more: str = "") -> tuple[str, str]:
    """Return a paper's number and the ``name`` that ``given`` asks for, which ``every`` must have as ``000 name``."""
    pairs = [entry.split(" ", 1) for entry in every]
    number = reproduced_paper(paper, (p for p, _ in pairs))
    entries = [entry for p, entry in pairs if p == number]
    require(name in entries, f"reproduce {number}", given, ", ".join(entries) + more, hint=nearest(name, entries))
    return number, name


@cache
def load(stem: str) -> Table:
    """Return the table in the file ``stem``.yaml.

    columns: each with its recipe; methods: each with one value for each column under ``values``, and under the name of
    each of ``shows`` one for each column of what else is printed of the same runs.
    """
    import yaml

    source: dict[str, Any] = yaml.safe_load((FOLDER / f"{stem}.yaml").read_text(encoding="utf-8"))
    notes = tuple(note for entry in source.get("notes", ()) for note in _notes(entry))
    rest = {key: source[key] for key in ("paper", "table", "title", "about", "measure", "seeds", "claimed")}
    return Table(**rest, notes=notes, cells=tuple(_cells(stem, source)), first=next(iter(source["methods"])))


def _notes(entry: str | Mapping[str, Any]) -> list[Note]:
    """Return one entry under ``notes``: a text, or texts under ``note``, ``sound`` and ``published``, and ``of``
    whom."""
    if isinstance(entry, str):
        return [Note(entry)]
    of = entry.get("of", ())
    subjects = (of,) if isinstance(of, str) else tuple(of)
    return [Note(text, "" if key == "note" else key, subjects) for key, text in entry.items() if key != "of"]


def _cells(stem: str, source: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield the cells of a file, column by column, each column's further numbers after its first."""
    methods: dict[str, dict[str, Any]] = source["methods"]
    algorithms = [entry["algorithm"]["name"] for entry in methods.values()]
    # Where methods share an algorithm, the printed name tells their runs apart.
    distinct = len(set(algorithms)) == len(algorithms)
    released = tuple(source.get("released", ()))
    for place, column in enumerate(source["columns"]):
        runs = {name: _runs(stem, column, "" if distinct else name, entry) for name, entry in methods.items()}
        for label, show in [("", {"measure": source["measure"]}), *source.get("shows", {}).items()]:
            for name, entry in methods.items():
                listed = entry[label or "values"]
                if len(listed) != len(source["columns"]):
                    raise ValueError(f"{stem}: {name}, {label or 'values'}: {len(listed)} values")
                yield Cell(
                    column=f"{column['name']}: {label}" if label else column["name"], method=name,
                    published=str(listed[place]), recipe=runs[name], measure=show["measure"], base=source["measure"],
                    target=column.get("target"), of=column["name"], released=(*released, *entry.get("released", ())),
                    personal=entry.get("personal", False), input=tuple(column.get("input", ())),
                    classes=column.get("classes", 0),
                )  # fmt: skip


def _runs(stem: str, column: Mapping[str, Any], method: str, entry: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of a column's runs with a method; None where the text does not say the setting.

    The column's own algorithm keys go to the methods that take them.
    """
    if "recipe" not in column:
        return None
    name = "_".join([stem, *(slug(text) for text in (column["name"], method) if text)])
    algorithm = entry["algorithm"]
    # Naming the method keeps those of the column's keys that it takes.
    shared = {"algorithm": {"name": "", **column.get("algorithm", {})}}
    extra = override(shared, f"algorithm.name={algorithm['name']}")["algorithm"]
    mapping = reduce(override, column.get("set", ()), _packaged(column["recipe"]).dump())
    return Recipe.of({**mapping, "name": name, "algorithm": {**algorithm, **extra}}, where=name)


def slug(text: str) -> str:
    """Return a name as a part of a recipe's."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("ε", "eps")).strip("-")


_packaged = lru_cache(maxsize=32)(Recipe.load)
