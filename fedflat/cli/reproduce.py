"""``fedflat reproduce``: the papers' tables, with what is proven beside what is claimed."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.training import Json, Overrides
from fedflat.core.checks import one_of, wrong
from fedflat.core.papers import CITED

if TYPE_CHECKING:
    from fedflat.reproduce import Outcome
    from fedflat.reproduce.rows import Row

WIDTH = 80
HEADS = ("method", "published", "ours", "claimed ε", "proven ε")
PROTOCOLS = ("sound", "published")


def reproduce(
    paper: Annotated[str | None, typer.Argument(help="The paper: 000 to 004, or cited as by --list.")] = None,
    table: Annotated[str | None, typer.Argument(help="Its table: table-1, or 1, or II.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="smoke (seconds a method), small (minutes), full (the paper's size: days without a GPU). "
            "Default: small; full with --dry-run."
        ),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Only columns of the paper whose name contains this; may be repeated.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method, as printed; may be repeated.")] = None,
    protocol: Annotated[
        str, typer.Option(help="sound: the guarantee holds. published: the procedure that the paper released.")
    ] = "sound",
    override: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each cell. Default: the scale's; at full scale the paper's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: runs/reproduce-PAPER-TABLE.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: the number of cores.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Published values, claimed and proven ε; nothing is trained.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="What can be reproduced, one line each.")] = False,
    as_json: Json = False,
) -> None:
    """A table of the papers: the published accuracy, ours, the ε that the paper claims and the ε that is proven.

    Claimed is the paper's own ε for its own setting; proven is ε of what runs here. Runs that are done are kept:
    after Ctrl-C the same command goes on. Below the table stands what differs from the paper.

    Example: fedflat reproduce --list

    Example: fedflat reproduce 000 table-1 --dry-run

    Example: fedflat reproduce 002 II --column "CIFAR-10, Dirichlet 0.6" --method DP-FedAvg --method DP-FedPGN
    """
    if list_all:
        _list(as_json)
        return
    if paper is None or table is None:
        missing = "no paper and no table" if paper is None else f"{paper} without a table"
        raise wrong("reproduce", missing, "PAPER TABLE, for example 000 table-1; --list shows all")
    one_of("--protocol", protocol, PROTOCOLS)
    from fedflat.reproduce import SCALES, dry, find

    chosen = find(paper, table).only(column or (), method or ())
    size = str(one_of("--scale", scale or ("full" if dry_run else "small"), SCALES))
    if dry_run:
        found = dry(chosen, size, protocol, override or ())
    else:
        found = _train(chosen, size, protocol, override, seeds, out, processes, as_json)
    if as_json:
        print(json.dumps(as_dict(found), ensure_ascii=False, indent=2))
    else:
        print("\n".join(lines(found, dry_run)))
    if not dry_run and not found.complete:
        raise typer.Exit(1)


def _train(
    chosen: Any, scale: str, protocol: str, override: Any, seeds: Any, out: Any, processes: Any, quiet: bool
) -> Outcome:
    from fedflat.report.progress import ExperimentProgress
    from fedflat.reproduce import train

    stem = f"{chosen.paper}-{chosen.table.lower().replace(' ', '-')}"
    folder = out or Path("runs") / f"reproduce-{stem}"
    with ExperimentProgress(quiet=quiet) as progress:
        return train(chosen, folder, scale, protocol, override or (), seeds, processes, progress.update)


def _list(as_json: bool) -> None:
    from fedflat.reproduce import load, names

    every = {name: load(name.replace(" ", "-")) for name in names()}
    if as_json:
        print(json.dumps({name: table.about for name, table in every.items()}, ensure_ascii=False, indent=2))
        return
    for name, table in every.items():
        print(textwrap.fill(f"{name:<12} {CITED[table.paper]}. {table.about}", WIDTH, subsequent_indent=" " * 13))


def lines(found: Outcome, dry_run: bool = False) -> list[str]:
    """The outcome as text of at most 80 columns."""
    table = found.table
    shown = [*_wrapped(f"{CITED[table.paper]}, {table.table}: {table.title}"), *_wrapped(table.about)]
    widths = (18, 14, 14, 11, 11)
    for column in dict.fromkeys(row.cell.column for row in found.rows):
        rows = [row for row in found.rows if row.cell.column == column]
        shown += ["", column, _line(HEADS, widths)]
        shown += [_line(_texts(row), widths) for row in rows]
        why = dict.fromkeys(row.missing for row in rows if row.missing)
        shown += [text for reason in why for text in _wrapped(f"  {reason}")]
    return [*shown, "", *_remarks(found, dry_run)]


def _remarks(found: Outcome, dry_run: bool) -> list[str]:
    table = found.table
    kept = "the best round" if table.measure == "best" else "the last round"
    remarks = [f"Published and ours: mean ± sd over seeds, of {kept}."]
    remarks.append(
        "Claimed ε: the paper's, for its setting. Proven ε: of "
        + ("what is planned here" if dry_run else "what ran here")
        + (", the paper's released procedure." if found.protocol == "published" else ", the sound round.")
    )
    if found.scale != "full":
        remarks.append(f"Scale {found.scale}: NOT COMPARABLE with the published values.")
    texts = dict.fromkeys(found.changed.values())
    for changes in texts:
        if changes:
            of = [name for name, mine in found.changed.items() if mine == changes]
            where = "" if len(texts) == 1 else f" ({'; '.join(of)})"
            remarks.append(f"Changed{where}: {', '.join(changes)}.")
    remarks += [f"Differs: {note}." for note in table.notes]
    remarks += [f"Missing: {text}" for text in found.missing]
    if found.folder is not None:
        remarks.append(f"Runs: {found.folder}")
    return [text for remark in remarks for text in _wrapped(remark)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _line(cells: Iterable[str], widths: tuple[int, ...]) -> str:
    texts = [f"{cell:<{w}}" if place == 0 else f"{cell:>{w}}" for place, (cell, w) in enumerate(zip(cells, widths))]
    return " ".join(texts).rstrip()


def _texts(row: Row) -> tuple[str, ...]:
    found = row.spread
    ours = "–" if found is None else f"{found[0]:.2f}" + ("" if found[1] is None else f" ± {found[1]:.2f}")
    return row.cell.method, row.cell.published, ours, _epsilon(row.claimed), _epsilon(row.proven)


def _epsilon(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def as_dict(found: Outcome) -> dict[str, Any]:
    """Plain values for ``--json``; an infinite ε is null."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    rows = [
        {
            "column": row.cell.column, "method": row.cell.method, "published": row.cell.published,
            "ours": list(row.ours), "claimed_epsilon": finite(row.claimed), "proven_epsilon": finite(row.proven),
            "missing": row.missing,
        }
        for row in found.rows
    ]  # fmt: skip
    table = found.table
    return {
        "paper": table.paper, "table": table.table, "measure": table.measure, "scale": found.scale,
        "comparable": found.scale == "full" and found.complete, "protocol": found.protocol, "rows": rows,
        "changed": {name: list(texts) for name, texts in found.changed.items()}, "notes": list(table.notes),
        "missing": list(found.missing), "folder": None if found.folder is None else str(found.folder),
    }  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(reproduce)
