"""``fedflat reproduce``: the papers' tables and figures, with what is proven beside what is claimed."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat.cli.reproduced import WIDTH, as_dict, lines, wrapped
from fedflat.cli.training import Json, Overrides
from fedflat.core.checks import one_of, wrong
from fedflat.core.papers import CITED

if TYPE_CHECKING:
    from fedflat.reproduce import Outcome
    from fedflat.reproduce.drawn import Drawn
    from fedflat.reproduce.figures import PaperFigure

PROTOCOLS = ("sound", "published")


def reproduce(
    paper: Annotated[str | None, typer.Argument(help="The paper: 000 to 004, or cited as by --list.")] = None,
    table: Annotated[str | None, typer.Argument(help="Its table or figure: table-1, 1, II; figure-4.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="smoke (seconds a method), small (minutes), full (the paper's size: days without a GPU). "
            "Default: small; full with --dry-run."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the column of this name, or those whose name contains it (numbers whole); of a figure, only the "
            "panels whose title contains it. May be repeated."
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method, as printed; may be repeated.")] = None,
    protocol: Annotated[
        str, typer.Option(help="sound: the guarantee holds. published: the procedure that the paper released.")
    ] = "sound",
    tuned: Annotated[
        bool,
        typer.Option(
            "--tuned",
            help="Each method at the strength (printed, a fifth, a 25th) that is best on clients held back.",
        ),
    ] = False,
    override: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each cell. Default: the scale's; at full scale the paper's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of a table's runs; of a figure, the one that its tables' are in.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: the number of cores.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Published values, claimed and proven ε; nothing is trained.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measured", help="Show what was measured here before, kept with fedflat; nothing runs.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Add what was measured to this JSON file, with command and machine."),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="What can be reproduced, one line each.")] = False,
    as_json: Json = False,
) -> None:
    """A table or a figure of the papers: the published number, ours, the claimed and the proven ε.

    Claimed is the paper's own ε for its own setting; proven is ε of what runs here. Under each column stands whether
    its methods rank as in the paper, below the table what differs from it. Runs that are done are kept: after Ctrl-C
    the same command goes on.

    Example: fedflat reproduce --list

    Example: fedflat reproduce 000 table-1 --dry-run

    Example: fedflat reproduce 000 table-1 --measured

    Example: fedflat reproduce 002 II --column "CIFAR-10, Dirichlet 0.6" --method DP-FedAvg --method DP-FedPGN

    Example: fedflat reproduce 000 figure-4 --column ρ
    """
    if list_all:
        _list(as_json)
        return
    if paper is None or table is None:
        missing = "no paper and no table" if paper is None else f"{paper} without a table"
        raise wrong("reproduce", missing, "PAPER TABLE, for example 000 table-1; --list shows all")
    one_of("--protocol", protocol, PROTOCOLS)
    from fedflat.reproduce import SCALES, dry, find
    from fedflat.reproduce.figures import find_figure, is_figure

    if measured or dry_run:
        running: dict[str, Any] = {"--keep": keep, "--tuned": tuned}
        settings = {
            "--dry-run": dry_run, "--scale": scale, "--protocol": protocol != "sound", "-o": override,
            "--seeds": seeds, "--processes": processes, "--out": out and not is_figure(table),
        }  # fmt: skip
        _refuse("--measured" if measured else "--dry-run", running | settings if measured else running)
    if keep is not None:
        from fedflat.reproduce.measured import check

        check(keep)
    size = str(one_of("--scale", scale or ("full" if dry_run else "small"), SCALES))
    if is_figure(table):
        tables = {
            "--method": method, "--dry-run": dry_run, "--protocol": protocol != "sound", "--tuned": tuned,
            "--json": as_json,
        }  # fmt: skip
        for option in (option for option, given in tables.items() if given):
            raise wrong(option, "a figure", "a table")
        _figure(find_figure(paper, table).only(column or ()), size, override, seeds, out, processes, measured, keep)
        return
    chosen = find(paper, table).only(column or (), method or ())
    if measured:
        _measured(chosen, as_json)
        return
    if dry_run:
        found = dry(chosen, size, protocol, override or ())
    else:
        found = _train(chosen, size, protocol, override, seeds, out, processes, as_json, tuned)
    if as_json:
        print(json.dumps(as_dict(found), ensure_ascii=False, indent=2))
    else:
        print("\n".join(lines(found, dry_run)))
    _keep(keep, found, override, found.seconds)
    if not dry_run and not found.complete:
        raise typer.Exit(1)


def _refuse(found: str, options: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that is given where nothing runs."""
    for option in (option for option, given in options.items() if given):
        raise wrong(option, found, f"{option} where something runs")


def _keep(path: Path | None, found: Outcome | Drawn, override: Any, seconds: float) -> None:
    """Add to the file of ``--keep``, or say why not."""
    if path is not None:
        from fedflat.reproduce.measured import keep

        if why := keep(path, _command(), found, override or (), seconds):
            print("\n".join(wrapped(why)), file=sys.stderr)


def _command() -> str:
    """The command as it can be given again: without where its files go."""
    kept: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--out", "--keep", "--processes"):
            next(words, None)
        elif not word.startswith(("--out=", "--keep=", "--processes=")):
            kept.append(word)
    return shlex.join(["fedflat", *kept])


def _measured(chosen: Any, as_json: bool) -> None:
    """What was measured of a table before."""
    from fedflat.reproduce.measured import outcomes

    every = outcomes(chosen)
    if as_json:
        print(json.dumps([as_dict(found) | {"source": vars(source)} for source, found in every], ensure_ascii=False))
        return
    for place, (source, found) in enumerate(every):
        print("\n".join([*([""] if place else []), *lines(found), *wrapped(source.sentence())]))


def _train(
    chosen: Any,
    scale: str,
    protocol: str,
    override: Any,
    seeds: Any,
    out: Any,
    processes: Any,
    quiet: bool,
    tuned: bool,
) -> Outcome:
    from fedflat.report.progress import ExperimentProgress
    from fedflat.reproduce import train

    stem = f"{chosen.paper}-{chosen.table.lower().replace(' ', '-')}"
    folder = out or Path("runs") / f"reproduce-{stem}"
    with ExperimentProgress(quiet=quiet) as progress:
        return train(chosen, folder, scale, protocol, override or (), seeds, processes, progress.update, tuned)


def _figure(
    figure: PaperFigure, scale: str, override: Any, seeds: Any, out: Any, processes: Any, measured: bool, keep: Any
) -> None:
    """Run (or read what was measured) and draw a figure: a page, and each drawing as SVG, PNG and PDF beside it."""
    folder = (out or Path("runs")) / f"reproduce-{figure.paper}-{figure.name}"
    if measured:
        from fedflat.reproduce.measured import drawings

        for place, (source, found) in enumerate(drawings(figure)):
            _drawn(found, folder if not place else folder.with_name(f"{folder.name}-{place + 1}"), source.sentence())
        return
    from fedflat.report.metrics import summary
    from fedflat.report.progress import ExperimentProgress
    from fedflat.reproduce.drawn import draw

    with ExperimentProgress() as progress:
        found = draw(
            figure, out or Path("runs"), scale, override or (), seeds, processes, progress.update, progress.say
        )
    _drawn(found, folder)
    _keep(keep, found, override, sum(summary(run)["seconds"] for run in found.runs))


def _drawn(found: Drawn, folder: Path, source: str = "") -> None:
    from fedflat.cli.plates import print_plates
    from fedflat.report import flatness
    from fedflat.reproduce.paper_page import notes, write_pages

    for page in write_pages(found, folder, source):
        print(page)
    curves = [figure for record in found.landscapes for figure in flatness.figures(record)]
    print_plates([*found.figures, *curves], folder, found.landscapes)
    for text in notes(found, source):
        print("\n".join(wrapped(text)))


def _list(as_json: bool) -> None:
    from fedflat.reproduce import load, names
    from fedflat.reproduce.figures import abouts

    every = {name: load(name.replace(" ", "-")).about for name in names()} | abouts()
    every = dict(sorted(every.items()))
    if as_json:
        print(json.dumps(every, ensure_ascii=False, indent=2))
        return
    for name, about in every.items():
        cited = CITED[name.split(" ")[0]]
        print(textwrap.fill(f"{name:<15} {cited}. {about}", WIDTH, subsequent_indent=" " * 16))
