"""``fedflat export``: a folder that can be handed over."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    program: Annotated[
        bool, typer.Option("--program", help="Also model.pt2, a torch.export program that runs without fedflat.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also model.onnx, for any ONNX runtime.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """What the guarantee covers and nothing else: weights, statement, ledger, recipe, metrics, report.

    Example: fedflat export runs/quick-start handed-over
    """
    from fedflat.simulation.export import export as write_export

    if onnx:
        from fedflat.simulation.program import check_onnx

        check_onnx()
    found = write_export(run, out)
    if program or onnx:
        from fedflat.simulation.program import write_onnx, write_program

        made = [write(run, out).name for write, asked in ((write_program, program), (write_onnx, onnx)) if asked]
        found = replace(found, files=(*found.files, *made))
    if as_json:
        facts = {"folder": str(found.folder), "files": found.files, "left": dict(found.left)}
        print(json.dumps(facts | {"guaranteed": found.guaranteed}, ensure_ascii=False, indent=2))
        return
    print(textwrap.fill(f"{found.folder}: {', '.join(found.files)}", 80, subsequent_indent="  "))
    if not found.guaranteed:
        print("No finite ε is proven of this run: no guarantee covers what was exported.")
    print("Left out:")
    for name, why in found.left.items():
        print(f"  {name}: {why}")
