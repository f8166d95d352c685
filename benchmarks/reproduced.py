"""Measure the papers' tables and figures for the record, and show the records (``benchmarks/measured/*.json``).

``python -m benchmarks.reproduced 000 table-1 --column CIFAR-10`` prints what was measured, beside what is published;
``python -m benchmarks.reproduced 000 figure-4 --out DIR`` draws it. With ``--keep`` it is measured first, as ``fedflat
reproduce`` does, and added to the records, with the command, the machine in words and the commit. ``--tuned``, for a
table that is measured: each method at the strength that ``benchmarks/strengths.py`` chooses.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter

from benchmarks.strengths import Chosen, options_of, tuned
from fedflat.cli import say, wrapped
from fedflat.cli.reproduce import lines, write_drawn
from fedflat.core.checks import InputError, RunError, wrong
from fedflat.papers.figures import Drawn, PaperFigure, draw, find_figure, is_figure
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.rows import dry, fill
from fedflat.papers.scales import SCALES
from fedflat.papers.tables import ROMAN, Table, find
from fedflat.report.figures import Figure
from fedflat.report.metrics import plain, seconds
from fedflat.report.progress import ExperimentProgress

FOLDER = Path(__file__).parent / "measured"
Record = dict[str, Any]
Choices = Mapping[tuple[str, str], Chosen]


def main(words: Sequence[str] | None = None) -> None:
    """Show what was measured, or measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", help="000 to 004, or as cited by fedflat reproduce --list")
    parser.add_argument("name", help="table-1, II, figure-4")
    parser.add_argument("--column", action="append", default=[])
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="measure it, and add it to the records")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--protocol", choices=("sound", "published"), default="sound")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="the folder of runs and drawings")
    given = parser.parse_args(words)
    try:
        if is_figure(given.name):
            _show_figure(find_figure(given.paper, given.name).only(given.column), given)
        else:
            _show_table(find(given.paper, given.name).only(given.column, given.method), given)
    except (InputError, RunError) as error:
        parser.error(str(error))


def _show_table(table: Table, given: argparse.Namespace) -> None:
    if given.keep:
        chosen: Choices = {}
        plan = dry(table, given.scale, given.protocol, given.overrides)
        folder = given.out / f"reproduce-{stem_of(table)}"
        with ExperimentProgress() as progress:
            if given.tuned:
                plan, chosen = tuned(plan, folder, given.seeds, given.processes, progress.update)
            found = fill(plan, folder, given.seeds, given.processes, progress.update)
        spent = found.seconds + sum(one.seconds for one in chosen.values())
        say(keep(FOLDER / f"{stem_of(table)}.json", command(), found, given.overrides, spent, chosen, given.tuned))
    for source, found, chosen in outcomes(table):
        choices = [f"Tuned: {column}: {one.sentence(method)}." for (column, method), one in chosen.items()]
        said = [line for text in (*choices, source.sentence()) for line in wrapped(text)]
        print("\n".join([*lines(found), *said]), end="\n\n")


def _show_figure(figure: PaperFigure, given: argparse.Namespace) -> None:
    if given.keep:
        with ExperimentProgress() as progress:
            found = draw(
                figure, given.out, given.scale, given.overrides, given.seeds, given.processes, progress.update,
                progress.say,
            )  # fmt: skip
        path = FOLDER / f"{stem_of(figure)}.json"
        say(keep(path, command(), found, given.overrides, sum(map(seconds, found.runs))))
    for place, (source, found) in enumerate(drawings(figure), start=1):
        shown = replace(found, remarks=(*found.remarks, source.sentence()))
        write_drawn(shown, given.out / f"reproduce-{stem_of(figure)}{'' if place == 1 else f'-{place}'}")


def command() -> str:
    """Return the command as it can be given again: without where its files go, which changes nothing."""
    kept: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--out", "--processes"):
            next(words, None)
        elif not word.startswith(("--out=", "--processes=")):
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks.reproduced", *kept])


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


def keep(
    path: Path, command: str, found: Outcome | Drawn, overrides: Sequence[str], seconds: float,
    chosen: Choices | None = None, tuned: bool = False,
) -> str:  # fmt: skip
    """Add a record to the file (made where it is not there); one of the same command is replaced. Return what was done.

    A record without numbers says nothing and is not kept, nor is one with fewer than that of the same command has.
    """
    records = _read(path)
    old = max((_numbers(each) for each in records if each["command"] == command), default=0)
    source = Source(command, machine(), software(), commit(), datetime.date.today().isoformat(), round(seconds, 1))
    record = asdict(source) | {"scale": found.scale, "overrides": list(overrides)}
    record |= _table(found, chosen or {}, tuned) if isinstance(found, Outcome) else _figure(found)
    if not (new := _numbers(record)):
        return f"Nothing was measured, so {path} is as it was."
    # A command that was stopped early must not replace the numbers of a whole one.
    if new < old:
        return f"{path} has more of this command, {old} numbers where {new} were measured now, and is as it was."
    records = [each for each in records if each["command"] != command]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"records": [*records, record]}, ensure_ascii=False, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    return f"Kept in {path}."


def _numbers(record: Record) -> int:
    """Return how many values of ours a record has."""
    drawn = sum(len(series["y"]) for figure in record.get("figures", ()) for series in figure["series"])
    return sum(len(row["ours"]) for row in record.get("rows", ())) + drawn + len(record.get("landscapes", ()))


def _table(found: Outcome, chosen: Choices, tuned: bool) -> Record:
    return {
        "protocol": found.protocol, "changed": {name: list(texts) for name, texts in found.changed.items()},
        "rows": [_row(row) for row in found.rows], "tuned": tuned,
        "chosen": [[*key, one.strength, list(map(list, one.tried.items()))] for key, one in chosen.items()],
    }  # fmt: skip


def _row(row: Row) -> Record:
    whose = {key: getattr(row.cell, key) for key in ("column", "method", "published")}
    measured: Record = json.loads(Kept.model_validate(row).model_dump_json())
    return whose | measured


def _figure(found: Drawn) -> Record:
    drawn: Record = plain({"figures": [asdict(each) for each in found.figures], "landscapes": found.landscapes})
    return {"missing": list(found.missing), "remarks": list(found.remarks)} | drawn


def outcomes(table: Table) -> list[tuple[Source, Outcome, Choices]]:
    """Return the records of a table as outcomes, those of its cells that ``table`` has, with the strengths chosen.

    What changed against the paper is the record's own: what ran then, whatever a scale means now. Raises InputError
    where there is no record.
    """
    found: list[tuple[Source, Outcome, Choices]] = []
    for record in _read(FOLDER / f"{stem_of(table)}.json"):
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
        found.append((_source(record), replace(planned, rows=filled, changed=changed), chosen))
    return found or _nothing(table)


def drawings(figure: PaperFigure) -> list[tuple[Source, Drawn]]:
    """Return the records of a figure, of the panels that ``figure`` has. Raises InputError where there is none."""
    found = []
    titles = tuple(panel.title for panel in figure.panels)
    for record in _read(FOLDER / f"{stem_of(figure)}.json"):
        figures = tuple(each for each in FIGURES.validate_python(record["figures"]) if each.title.startswith(titles))
        landscapes = tuple(record["landscapes"])
        if figures or landscapes:
            missing, remarks = tuple(record["missing"]), tuple(record.get("remarks", ()))
            drawn = Drawn(figure, record["scale"], figures, landscapes, missing, remarks)
            found.append((_source(record), drawn))
    return found or _nothing(figure)


def _nothing(of: Table | PaperFigure) -> list[Any]:
    have = ", ".join(sorted(path.stem.replace("-", " ", 1) for path in FOLDER.glob("*.json")))
    raise wrong("records", f"none of these cells of {stem_of(of)}", f"with --keep, or of {have}")


def _source(record: Record) -> Source:
    return Source(**{key: record[key] for key in Source.__dataclass_fields__})


def _read(path: Path) -> list[Record]:
    found: list[Record] = json.loads(path.read_text(encoding="utf-8"))["records"] if path.is_file() else []
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
    """Return the commit that this runs from, ``+`` where files changed since; ``unknown`` without a
    repository."""
    root = Path(__file__).parents[1]
    try:
        # A + behind the commit says that files had changed since.
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
