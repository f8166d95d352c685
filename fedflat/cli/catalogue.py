"""Commands that look things up: ``list``, ``explain``, ``runs``, ``report`` and ``watch``."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedflat import cli
from fedflat.core import process
from fedflat.core.checks import one_of, wrong

if TYPE_CHECKING:
    from fedflat.config.reference import Key

KINDS = ("algorithms", "datasets", "models", "recipes", "accountants")
ABOUT_ACCOUNTANTS = {
    "pld": "Privacy loss distributions (dp-accounting), composed numerically: tight, the default.",
    "rdp": "Rényi differential privacy (dp-accounting): an upper bound, looser, also for fixed cohorts.",
    "fft": "This project's own composition by Fourier transform: an independent check of pld.",
    "gdp": "Gaussian differential privacy, central limit: an approximation, never a proven figure.",
}


def list_names(kind: str = "", *, as_json: cli.Json = False) -> None:
    """What there is, one line each.

    Example: fedflat list algorithms

    Args:
        kind: algorithms, datasets, models, recipes or accountants. Default: all.
    """
    kinds = [str(one_of("list", kind, KINDS))] if kind else list(KINDS)
    found = {name: catalogue(name) for name in kinds}
    if as_json:
        cli.print_json(found[kind] if kind else found)
        return
    for name, rows in found.items():
        if not kind:
            print(("" if name == KINDS[0] else "\n") + name)
        if sys.stdout.isatty():
            width = max(map(len, rows)) + 2
            print("\n".join(line for each in rows.items() for line in cli.labelled(*each, width)))
        else:
            # In a pipe one line each, unwrapped.
            cli.print_columns(rows.items())


def catalogue(kind: str) -> dict[str, str]:
    """Return name -> one line, for one of ``KINDS``."""
    if kind == "algorithms":
        from fedflat.algorithms import ALGORITHMS

        return {name: _about(factory) for name, factory in ALGORITHMS.items()}
    if kind == "datasets":
        from fedflat.data.preparation import DATASETS

        return {name: source.about for name, source in DATASETS.items()}
    if kind == "models":
        from fedflat.models import NAMES

        return dict(NAMES)
    if kind == "recipes":
        from fedflat.config.reading import FOLDER, names

        return {name: _first_comment(FOLDER / f"{name}.yaml") for name in names()}
    from fedflat.privacy.accounting.curves import ACCOUNTANTS

    return {name: ABOUT_ACCOUNTANTS[name] for name in ACCOUNTANTS}


def _about(factory: object) -> str:
    """Return the first line of the docstring, and the keys with their defaults."""
    line = (inspect.getdoc(factory) or "").splitlines()[0]
    given = {p.name: p.default for p in inspect.signature(factory).parameters.values()}  # type: ignore[arg-type]
    keys = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in given.items()]
    return f"{line} ({', '.join(keys)})" if keys else line


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def report(runs: list[Path], *, out: Path | None = None, verify: bool = False, plates: cli.Plates = None) -> None:
    """(Re)build the report page of one run, or one page over several.

    Example: fedflat report runs/quick-start --verify

    Example: fedflat report runs/a runs/b --out both.html --plates figures

    Args:
        runs: Run folders.
        out: The page to write. Default: report.html in the (first) run's folder.
        verify: Recompute ε from the ledger with a second accountant.
    """
    from fedflat.records.folder import LOCKED, SEALED, check_unsealed, locked
    from fedflat.report.html import figures_of, write_report

    for run in runs:
        if not run.is_dir():
            raise wrong("report", str(run), "the folder of a run")
    verdicts = [_verified(run) for run in runs] if verify else []
    if not all(verdicts):
        raise typer.Exit(1)
    page = out or runs[0] / "report.html"
    if verify and out is None and (runs[0] / SEALED).is_file():
        print(f"{page}: left as it was exported")
    else:
        check_unsealed(page.parent)
        print(write_report(runs, page))
        if (page.parent / "private" / page.name).is_file():
            print(f"{page.parent / 'private' / page.name}: with what is private to the simulation, for its owner only")
        for run in filter(locked, runs):
            print(f"Left out of {run}: what is private to the simulation ({LOCKED})")
    if plates is not None:
        from fedflat.report import read_runs

        cli.print_plates(figures_of(read_runs(runs)), plates)


def _verified(run: Path) -> bool:
    """Return whether a second accountant agrees with the run's ledger and statement, and print what it found."""
    from fedflat.privacy.verify import verify_run
    from fedflat.simulation import figures

    found = verify_run(run)
    cli.say(f"{run}: {'verified' if found.ok else 'NOT VERIFIED'}: {figures(found)}")
    print("".join(f"  {note}\n" for note in found.notes), end="")
    return found.ok


def explain(key: str = "", *, as_json: cli.Json = False) -> None:
    """A recipe key: type, default, meaning, when to change it.

    Example: fedflat explain privacy.clip

    Args:
        key: A recipe key, or a section. Default: all keys, one line each.
    """
    from fedflat.config import reference

    found = reference.explain(key) if key else reference.recipe_keys()
    if as_json:
        cli.print_json([asdict(each) for each in found])
    elif key:
        print("\n\n".join(map(_paragraph, found)))
    else:
        for each in found:
            print(f"{each.path:31}{textwrap.shorten(each.meaning, cli.WIDTH - 31, placeholder=' …')}")


def _paragraph(key: Key) -> str:
    default = key.default if key.default == "required" else f"default {key.default}"
    change = f"{key.path}={key.example}"
    lines = [f"{key.path}: {key.kind}; {default}", key.meaning]
    lines += [f"-o '{change}'" if " " in change else f"-o {change}"] if key.example else []
    return "\n".join(line for place, text in enumerate(lines) for line in cli.wrapped(text, "  " if place else ""))


def watch(
    folder: Annotated[Path, Argument(metavar="RUN")],
    *,
    port: Annotated[int, Option(min=0, max=65535)] = 0,
    private: bool = False,
) -> None:
    """Follow runs on a live page on this machine, until Ctrl-C. Only who has the address with its token sees it.

    Example: fedflat watch runs/quick-start

    Args:
        folder: Folder of a run, an experiment or a federation.
        port: Port on 127.0.0.1. Default: a free one.
        private: Show what is private to the simulation too, marked so.
    """
    from fedflat.records import keys
    from fedflat.report.live import Live, Server

    if not folder.is_dir():
        raise wrong("watch", str(folder), "the folder of a run, an experiment or a federation")
    with (
        Server(Live(folder, private, keys.folder().parent / "operator"), port) as server,
        process.on_request("the page"),
    ):
        print(f"{server.address}\nCtrl-C ends it.", flush=True)
        while not process.stop_signal():
            time.sleep(0.2)


def runs(folder: Path = Path("runs"), *, as_json: cli.Json = False) -> None:
    """List the runs in a folder: method, data, accuracy, ε, state and age, the newest first.

    Example: fedflat runs

    Args:
        folder: Where to look, at any depth.
    """
    from fedflat.report import epsilon_text
    from fedflat.report.live import age_text, listed
    from fedflat.report.wording import percent

    found = listed(folder)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    rows = [("run", "method", "data", "accuracy %", "ε", "rounds", "state", "age")]
    for each in found:
        done = f"{each['rounds']}/{each['planned'] if each['planned'] is not None else '?'}"
        epsilon = epsilon_text(each["epsilon"]) if each["state"] in ("done", "stopped") else "–"
        epsilon += " of the mechanism" if epsilon != "–" and each["randomness"] == "seeded" else ""
        rows.append((each["run"], each["method"], str(each["data"] or "–"), percent(each["accuracy"]), epsilon, done,
                     each["state"], age_text(each["age"])))  # fmt: skip
    cli.print_columns(rows)
