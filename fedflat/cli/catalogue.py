"""``fedflat list`` and ``fedflat report``."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.plates import Plates, print_plates
from fedflat.core.checks import one_of, wrong

KINDS = ("algorithms", "datasets", "models", "recipes", "accountants")
ABOUT_ACCOUNTANTS = {
    "pld": "Privacy loss distributions (dp-accounting), composed numerically: tight, the default.",
    "rdp": "Rényi differential privacy (dp-accounting): an upper bound, looser, also for fixed cohorts.",
    "fft": "This project's own composition by Fourier transform: an independent check of pld.",
    "gdp": "Gaussian differential privacy, central limit: an approximation, never a proven figure.",
}


def list_names(
    kind: Annotated[
        str, typer.Argument(help="algorithms, datasets, models, recipes or accountants. Default: all.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """What there is, one line each.

    Example: fedflat list algorithms
    """
    kinds = [str(one_of("list", kind, KINDS))] if kind else list(KINDS)
    found = {name: catalogue(name) for name in kinds}
    if as_json:
        print(json.dumps(found[kind] if kind else found, ensure_ascii=False, indent=2))
        return
    for name, rows in found.items():
        if not kind:
            print(("" if name == KINDS[0] else "\n") + name)
        _print(rows)


def _print(rows: dict[str, str]) -> None:
    """Two columns in a terminal; one line each, unwrapped, in a pipe."""
    if not sys.stdout.isatty():
        width = max(map(len, rows), default=0)
        print("\n".join(f"{name:{width}}  {about}".rstrip() for name, about in rows.items()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, about in rows.items():
        table.add_row(name, about)
    Console().print(table)


def catalogue(kind: str) -> dict[str, str]:
    """Name -> one line, for one of ``KINDS``."""
    if kind == "algorithms":
        from fedflat.algorithms import ALGORITHMS

        return {name: _about(factory) for name, factory in ALGORITHMS.items()}
    if kind == "datasets":
        from fedflat.data.sources import DATASETS

        return {name: source.about for name, source in DATASETS.items()}
    if kind == "models":
        from fedflat.models import NAMES

        return dict(NAMES)
    if kind == "recipes":
        from fedflat.config.reading import FOLDER, names

        return {name: _first_comment(FOLDER / f"{name}.yaml") for name in names()}
    from fedflat.privacy.accounting.epsilon import ACCOUNTANTS

    return {name: ABOUT_ACCOUNTANTS[name] for name in ACCOUNTANTS}


def _about(factory: object) -> str:
    """First line of the docstring, and the keys with their defaults."""
    line = (inspect.getdoc(factory) or "").splitlines()[0]
    given = {p.name: p.default for p in inspect.signature(factory).parameters.values()}  # type: ignore[arg-type]
    keys = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in given.items()]
    return f"{line} ({', '.join(keys)})" if keys else line


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. Default: report.html in the (first) run's folder.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute ε from the ledger with a second accountant.")
    ] = False,
    plates: Plates = None,
) -> None:
    """(Re)build the report page of one run, or one page over several.

    Example: fedflat report runs/quick-start --verify

    Example: fedflat report runs/a runs/b --out both.html --plates figures
    """
    from fedflat.records.folder import check_unsealed
    from fedflat.report.html import figures_of, write_report

    for run in runs:
        if not run.is_dir():
            raise wrong("report", str(run), "the folder of a run")
    if verify:
        from fedflat.privacy.verify import verify_run
        from fedflat.simulation.inspection import figures

        failed = False
        for run in runs:
            found = verify_run(run)
            failed |= not found.ok
            text = f"{run}: {'verified' if found.ok else 'NOT VERIFIED'}: {figures(found)}"
            print(textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
            for note in found.notes:
                print(f"  {note}")
        if failed:
            raise typer.Exit(1)
    page = out or runs[0] / "report.html"
    check_unsealed(page.parent)
    print(write_report(runs, page))
    if plates is not None:
        from fedflat.report.metrics import read_runs

        print_plates(figures_of(read_runs(runs)), plates)
