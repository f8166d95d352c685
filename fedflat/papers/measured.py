"""Keep what was measured here with the package: ours beside published, a JSON file for each table.

A file holds records, each of one command: what ran, on which machine (in words), from which commit, and its numbers.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter

from fedflat.core.checks import InputError, one_line, wrong
from fedflat.papers.figures import Drawn, PaperFigure
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.rows import dry
from fedflat.papers.scales import Chosen, options_of
from fedflat.papers.tables import ROMAN, Table
from fedflat.report.figures import Figure
from fedflat.report.metrics import plain

FOLDER = Path(__file__).parent / "measured"
Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a record comes from. seconds: of all its rounds together, as the runs' clocks had them."""

    command: str
    machine: str
    software: str
    commit: str
    date: str
    seconds: float

    def sentence(self) -> str:
        """Return the source in words."""
        return (
            f"Measured {self.date} by `{self.command}`: {self.machine}; {self.software}, commit {self.commit}; "
            f"{self.seconds / 60:.0f} minutes of rounds."
        )


Rounded = Annotated[float, AfterValidator(lambda value: round(value, 4))]


class Kept(BaseModel):
    """What a record has of a row, besides whose it is: the fields of ``Row`` that are measured; ∞ is a text there."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="strings")
    ours: dict[int, Rounded]
    fates: dict[int, str]
    proven: Rounded | None
    delta: float | None
    simulated: float | None
    missing: str
    void: bool


FIGURES = TypeAdapter(tuple[Figure, ...])


def stem_of(found: Table | PaperFigure) -> str:
    """Return the name of a table's or a figure's file."""
    if isinstance(found, PaperFigure):
        return f"{found.paper}-{found.name}"
    number = found.table.split(" ")[-1]
    return f"{found.paper}-table-{ROMAN.get(number.lower(), number)}"


def check_keep(path: Path) -> None:
    """Raise InputError for a file that could take no record, before anything runs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise wrong("--keep", f"{path}, which cannot be written to", "a file in a folder that can be written to")
    _read(path)


def keep(path: Path, command: str, found: Outcome | Drawn, overrides: Sequence[str], seconds: float) -> str:
    """Add a record to the file (made where it is not there); one of the same command is replaced.

    Returns why nothing was kept, or the empty string: a record without numbers says nothing, and one with fewer than
    that of the same command would lose some.
    """
    records = _read(path)
    old = max((_numbers(each) for each in records if each["command"] == command), default=0)
    source = Source(command, machine(), software(), commit(), datetime.date.today().isoformat(), round(seconds, 1))
    record = asdict(source) | {"scale": found.scale, "overrides": list(overrides)}
    record |= _table(found) if isinstance(found, Outcome) else _figure(found)
    if not (new := _numbers(record)):
        return f"--keep: nothing was measured, so {path} is as it was."
    # A command that was stopped early must not replace the numbers of a whole one.
    if new < old:
        return (
            f"--keep: {path} has more of this command, {old} numbers where {new} were measured now, and is as it was."
        )
    records = [each for each in records if each["command"] != command]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"records": [*records, record]}, ensure_ascii=False, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    return ""


def _numbers(record: Record) -> int:
    """Return how many values of ours a record has."""
    drawn = sum(len(series["y"]) for figure in record.get("figures", ()) for series in figure["series"])
    return sum(len(row["ours"]) for row in record.get("rows", ())) + drawn + len(record.get("landscapes", ()))


def _table(found: Outcome) -> Record:
    return {
        "protocol": found.protocol, "changed": {name: list(texts) for name, texts in found.changed.items()},
        "rows": [_row(row) for row in found.rows], "tuned": found.tuned,
        "chosen": [[*key, one.strength, list(map(list, one.tried.items()))] for key, one in found.chosen.items()],
    }  # fmt: skip


def _row(row: Row) -> Record:
    whose = {key: getattr(row.cell, key) for key in ("column", "method", "published")}
    measured: Record = json.loads(Kept.model_validate(row).model_dump_json())
    return whose | measured


def _figure(found: Drawn) -> Record:
    drawn: Record = plain({"figures": [asdict(each) for each in found.figures], "landscapes": found.landscapes})
    return {"missing": list(found.missing), "remarks": list(found.remarks)} | drawn


def outcomes(table: Table) -> list[tuple[Source, Outcome]]:
    """Return the records of a table as outcomes, those of its cells that ``table`` has. Raises InputError where there
    is none.

    What changed against the paper is the record's own: what ran then, whatever a scale means now.
    """
    found = []
    records = _read(FOLDER / f"{stem_of(table)}.json")
    for record in records:
        rows = {(row["column"], row["method"]): Kept.model_validate(row) for row in record["rows"]}
        cells = tuple(cell for cell in table.cells if (cell.column, cell.method) in rows)
        if not cells:
            continue
        planned = dry(replace(table, cells=cells), record["scale"], record["protocol"], record["overrides"])
        recipes = {row.cell.run: row.recipe for row in planned.rows}
        chosen = {
            (of, method): Chosen(options_of(recipe, strength), strength, dict(tried))
            for of, method, strength, tried in record.get("chosen", [])
            if (recipe := recipes.get((of, method))) is not None
        }
        filled = tuple(replace(row, **dict(rows[row.cell.column, row.cell.method])) for row in planned.rows)
        changed = {name: tuple(texts) for name, texts in record["changed"].items()}
        tuned = record.get("tuned", bool(chosen))
        found.append((_source(record), replace(planned, rows=filled, changed=changed, tuned=tuned, chosen=chosen)))
    if not found:
        asked = "; ".join(dict.fromkeys(cell.column for cell in table.cells))
        have = dict.fromkeys(row["column"] for record in records for row in record["rows"])
        raise _nothing(f"paper {table.paper}, {table.table}", asked, have)
    return found


def _nothing(of: str, asked: str, have: Iterable[str]) -> InputError:
    """Return what was measured instead of what was asked for: other columns, or other tables and figures."""
    if columns := "; ".join(have):
        return wrong("--measured", f"no results of {of}, {asked}", columns)
    others = ", ".join(sorted(path.stem.replace("-", " ", 1) for path in FOLDER.glob("*.json")))
    return wrong("--measured", f"no results of {of}", others or "none yet: run it without --measured")


def drawings(figure: PaperFigure) -> list[tuple[Source, Drawn]]:
    """Return the records of a figure, of the panels that ``figure`` has. Raises InputError where there is none."""
    found = []
    records = _read(FOLDER / f"{stem_of(figure)}.json")
    titles = tuple(panel.title for panel in figure.panels)
    for record in records:
        figures = tuple(each for each in FIGURES.validate_python(record["figures"]) if each.title.startswith(titles))
        landscapes = tuple(record["landscapes"])
        if figures or landscapes:
            missing, remarks = tuple(record["missing"]), tuple(record.get("remarks", ()))
            drawn = Drawn(figure, record["scale"], figures, landscapes, missing, remarks)
            found.append((_source(record), drawn))
    if not found:
        have = dict.fromkeys(each["title"] for record in records for each in record["figures"])
        raise _nothing(f"paper {figure.paper}, {figure.name}", "; ".join(titles), have)
    return found


def _source(record: Record) -> Source:
    return Source(**{key: record[key] for key in Source.__dataclass_fields__})


def _read(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    try:
        found: list[Record] = json.loads(path.read_text(encoding="utf-8"))["records"]
        for record in found:
            _source(record), _numbers(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong(str(path), one_line(error), "a file that --keep wrote, or none") from None
    return found


def machine() -> str:
    """Return this machine in words: cores, processor, memory; nothing that tells whose it is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = [f"{cores} cores" if cores > 1 else "1 core", platform.machine()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        words.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory")
    return ", ".join(words)


def software() -> str:
    """Return the versions that a result may depend on."""
    import numpy
    import torch

    import fedflat

    return f"fedflat {fedflat.__version__}, torch {torch.__version__}, NumPy {numpy.__version__}"


def commit() -> str:
    """Return the commit that this package runs from, ``+`` where files changed since; ``unknown`` without a
    repository."""
    root = Path(__file__).parents[2]
    try:
        # A + behind the commit says that files had changed since.
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"
