"""Keep what was measured here with the package: ours beside published, a JSON file for each table.

A file holds records, each of one command: what ran, on which machine (in words), from which commit, and its numbers.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, one_line, wrong
from fedflat.papers.figures import Drawn, PaperFigure
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.rows import dry
from fedflat.papers.scales import Chosen, options_of
from fedflat.papers.tables import ROMAN, Table
from fedflat.report.figures import Figure, Series
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


def stem_of(found: Table | PaperFigure) -> str:
    """Return the name of a table's or a figure's file."""
    if isinstance(found, PaperFigure):
        return f"{found.paper}-{found.name}"
    number = found.table.split(" ")[-1]
    return f"{found.paper}-table-{ROMAN.get(number.lower(), number)}"


def check_keep(path: Path) -> None:
    """Raise InputError for a file that could take no record, before anything runs."""
    if path.is_dir() or not (path.exists() or path.parent.is_dir() or _made(path.parent)):
        raise wrong("--keep", str(path), "a file in a folder that can be written to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise wrong("--keep", f"{path}, which cannot be written to", "a file in a folder that can be written to")
    _read(path)


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except OSError:
        return False
    return True


def keep(path: Path, command: str, found: Outcome | Drawn, overrides: Sequence[str], seconds: float) -> str:
    """Add a record to the file (made where it is not there); one of the same command is replaced.

    Returns why nothing was kept, or the empty string: a record without numbers says nothing, and one with fewer than
    that of the same command would lose some.
    """
    records = _read(path)
    old = max((_numbers(each) for each in records if each["command"] == command), default=0)
    source = Source(command, machine(), software(), commit(), datetime.date.today().isoformat(), round(seconds, 1))
    record = asdict(source) | (_table(found, overrides) if isinstance(found, Outcome) else _figure(found, overrides))
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


def _table(found: Outcome, overrides: Sequence[str]) -> Record:
    return {
        "scale": found.scale, "protocol": found.protocol, "overrides": list(overrides),
        "changed": {name: list(texts) for name, texts in found.changed.items()},
        "rows": [_row(row) for row in found.rows],
        "tuned": found.tuned, "chosen": _chosen(found),
    }  # fmt: skip


def _chosen(found: Outcome) -> list[list[Any]]:
    return [[*key, one.strength, list(map(list, one.tried.items()))] for key, one in found.chosen.items()]


def _row(row: Row) -> Record:
    return {
        "column": row.cell.column, "method": row.cell.method, "published": row.cell.published,
        "ours": {str(seed): _out(value) for seed, value in row.ours.items()},
        "fates": {str(seed): fate for seed, fate in row.fates.items()},
        "proven": _out(row.proven), "delta": row.delta, "simulated": row.simulated,
        "missing": row.missing, "void": row.void,
    }  # fmt: skip


def _out(value: float | None) -> float | str | None:
    """Return a number for JSON: four decimals of a value, ``inf`` for what has no end."""
    if value is None:
        return None
    return round(value, 4) if math.isfinite(value) else "inf"


def _in(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _figure(found: Drawn, overrides: Sequence[str]) -> Record:
    return {
        "scale": found.scale, "overrides": list(overrides), "missing": list(found.missing),
        "remarks": list(found.remarks),
        "figures": plain([asdict(figure) for figure in found.figures]), "landscapes": plain(list(found.landscapes)),
    }  # fmt: skip


def outcomes(table: Table) -> list[tuple[Source, Outcome]]:
    """Return the records of a table as outcomes, those of its cells that ``table`` has. Raises InputError where there
    is none.

    What changed against the paper is the record's own: what ran then, whatever a scale means now.
    """
    found = []
    records = _read(FOLDER / f"{stem_of(table)}.json")
    for record in records:
        rows = {(row["column"], row["method"]): row for row in record["rows"]}
        kept = [cell for cell in table.cells if (cell.column, cell.method) in rows]
        if kept:
            part = replace(table, cells=tuple(kept))
            planned = dry(part, record["scale"], record["protocol"], record["overrides"])
            recipes = {(row.cell.of, row.cell.method): row.recipe for row in planned.rows}
            chosen = {
                (of, method): Chosen(options_of(recipe, strength), strength, dict(tried))
                for of, method, strength, tried in record.get("chosen", [])
                if (recipe := recipes.get((of, method))) is not None
            }
            filled = tuple(_filled(row, rows[row.cell.column, row.cell.method]) for row in planned.rows)
            changed = {name: tuple(texts) for name, texts in record["changed"].items()}
            tuned = record.get("tuned", bool(chosen))
            filled_in = replace(planned, rows=filled, changed=changed, tuned=tuned, chosen=chosen)
            found.append((_source(record), filled_in))
    if not found:
        asked = "; ".join(dict.fromkeys(cell.column for cell in table.cells))
        have = dict.fromkeys(row["column"] for record in records for row in record["rows"])
        raise _nothing(f"paper {table.paper}, {table.table}", asked, have)
    return found


def _nothing(of: str, asked: str, have: Iterable[str]) -> InputError:
    """Return what was measured instead of what was asked for: other columns, or other tables and figures."""
    if columns := "; ".join(have):
        return wrong("--measured", f"no results of {of}, {asked}", columns)
    return wrong("--measured", f"no results of {of}", _known())


def _filled(row: Row, record: Mapping[str, Any]) -> Row:
    return replace(
        row,
        ours={int(seed): float(value) for seed, value in record["ours"].items()},
        fates={int(seed): fate for seed, fate in record["fates"].items()},
        proven=_in(record["proven"]), delta=record["delta"], simulated=record["simulated"],
        missing=record["missing"], void=record["void"],
    )  # fmt: skip


def drawings(figure: PaperFigure) -> list[tuple[Source, Drawn]]:
    """Return the records of a figure, of the panels that ``figure`` has. Raises InputError where there is none."""
    found = []
    records = _read(FOLDER / f"{stem_of(figure)}.json")
    titles = tuple(panel.title for panel in figure.panels)
    for record in records:
        figures = tuple(_figure_of(each) for each in record["figures"] if each["title"].startswith(titles))
        landscapes = tuple(record["landscapes"])
        if figures or landscapes:
            missing, remarks = tuple(record["missing"]), tuple(record.get("remarks", ()))
            drawn = Drawn(figure, record["scale"], figures, landscapes, missing, remarks)
            found.append((_source(record), drawn))
    if not found:
        have = dict.fromkeys(each["title"] for record in records for each in record["figures"])
        raise _nothing(f"paper {figure.paper}, {figure.name}", "; ".join(titles), have)
    return found


def _figure_of(record: Mapping[str, Any]) -> Figure:
    series = tuple(
        Series(
            each["label"], {axis: tuple(values) for axis, values in each["x"].items()}, tuple(each["y"]),
            tuple(each["low"]), tuple(each["high"]), each["style"],
        )
        for each in record["series"]
    )  # fmt: skip
    lines = tuple((label, value) for label, value in record["lines"])
    return Figure(**{**record, "series": series, "lines": lines, "names": tuple(record["names"])})


def _source(record: Mapping[str, Any]) -> Source:
    return Source(**{key: record[key] for key in Source.__dataclass_fields__})


def _known() -> str:
    names = sorted(path.stem.replace("-", " ", 1) for path in FOLDER.glob("*.json"))
    return ", ".join(names) or "none yet: run it without --measured"


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
