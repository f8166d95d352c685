"""``fedflat export --program``: the released model as a ``torch.export`` program, which runs without this package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from fedflat.core.checks import RunError, wrong
from fedflat.simulation.export import SUMS
from fedflat.simulation.load import load, made_for

PROGRAM = "model.pt2"


def write_program(run: str | Path, out: str | Path) -> Path:
    """Add ``model.pt2`` of a run to the folder that was exported, with its checksum; batches of any size.

    Raises:
        InputError: the module was given in Python. RunError: it is none that ``torch.export`` can follow.
    """
    facts, module, target = made_for(Path(run)), load(run).model, Path(out)
    if "dtype" not in facts:
        raise wrong("--program", f"{run}, which does not say its inputs' shape", "a run of fedflat 0.2")
    example = torch.zeros(2, *facts["input_shape"], dtype=getattr(torch, facts["dtype"]))
    batch = torch.export.Dim("batch", min=1)
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # it fails in as many ways as there are models
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(f"--program: torch.export cannot follow this model ({reason}).") from error
    torch.export.save(program, target / PROGRAM)
    digest = hashlib.sha256((target / PROGRAM).read_bytes()).hexdigest()
    lines = [*(target / SUMS).read_text(encoding="utf-8").splitlines(), f"{digest}  {PROGRAM}"]
    part = target / f"{SUMS}.part"
    part.write_text("\n".join(sorted(lines, key=lambda line: line.split("  ")[-1])) + "\n", encoding="utf-8")
    os.replace(part, target / SUMS)
    return target / PROGRAM
