"""``fedflat verify``: every record of a run checked."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

WORDS = {"ok": "ok", "wrong": "WRONG", "unchecked": "not checked"}


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or an exported one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Every record of a run checked, what could not be checked named; exit status 1 if anything is wrong.

    Example: fedflat verify runs/quick-start
    """
    from fedflat.simulation.inspection import inspect_run

    found = inspect_run(run)
    bad = sum(check.verdict == "wrong" for check in found)
    if as_json:
        print(json.dumps({"ok": not bad, "checks": [asdict(check) for check in found]}, ensure_ascii=False, indent=2))
    else:
        for check in found:
            print(textwrap.fill(
                f"{WORDS[check.verdict]:12}{check.record}: {check.about}", 80, subsequent_indent=" " * 12
            ))  # fmt: skip
        open_ = sum(check.verdict == "unchecked" for check in found)
        outcome = f"{bad} {'record is' if bad == 1 else 'records are'} wrong" if bad else "nothing is wrong"
        print(f"{run}: {outcome}, {open_} could not be checked")
    if bad:
        raise typer.Exit(1)
