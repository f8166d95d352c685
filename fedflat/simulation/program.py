"""``fedflat export --program`` and ``--onnx``: the released model as a program that runs without this package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedflat.core.checks import RunError, wrong
from fedflat.core.extras import missing
from fedflat.simulation.export import SUMS
from fedflat.simulation.load import load, made_for

PROGRAM, ONNX = "model.pt2", "model.onnx"


def write_program(run: str | Path, out: str | Path) -> Path:
    """Add ``model.pt2`` of a run to the folder that was exported, with its checksum; batches of any size.

    Raises:
        InputError: the module was given in Python. RunError: it is none that ``torch.export`` can follow.
    """
    target = Path(out) / PROGRAM
    torch.export.save(_traced(Path(run), "--program"), target)
    return _listed(target)


def write_onnx(run: str | Path, out: str | Path) -> Path:
    """Add ``model.onnx`` likewise: input ``inputs`` (b, …), output ``outputs`` (b, …), for any ONNX runtime.

    Raises:
        InputError: the module was given in Python, or onnx is not installed. RunError: it has no form for the model.
    """
    check_onnx()
    program, target = _traced(Path(run), "--onnx"), Path(out) / ONNX
    try:
        with _quiet():
            names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["outputs"]}
            found = torch.onnx.export(program, (), dynamo=True, external_data=False, verbose=False, **names)
    except Exception as error:
        raise RunError(f"--onnx: this model has no ONNX form ({_first_line(error)}).") from error
    if found is None:
        raise RunError("--onnx: this model has no ONNX form.")
    found.save(target, external_data=False)
    return _listed(target)


def check_onnx() -> None:
    """Refuse, before anything is written, where what torch's exporter needs is not installed."""
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise missing("--onnx", name, "onnx")


def _traced(run: Path, option: str) -> torch.export.ExportedProgram:
    """The run's model on a batch of any size, as ``torch.export`` follows it."""
    facts, module = made_for(run), load(run).model
    if "dtype" not in facts:
        raise wrong(option, f"{run}, which does not say its inputs' shape", "a run of fedflat 0.2")
    example = torch.zeros(2, *facts["input_shape"], dtype=getattr(torch, facts["dtype"]))
    try:
        found = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    except Exception as error:  # it fails in as many ways as there are models
        raise RunError(f"{option}: torch.export cannot follow this model ({_first_line(error)}).") from error
    for part in found.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # names files and folders of this machine
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch's exporter tells of every step; what fails is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _listed(file: Path) -> Path:
    """Add a file to the folder's checksums, which are replaced in one step."""
    sums = file.parent / SUMS
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [*sums.read_text(encoding="utf-8").splitlines(), f"{digest}  {file.name}"]
    part = sums.with_name(f"{SUMS}.part")
    part.write_text("\n".join(sorted(lines, key=lambda line: line.split("  ")[-1])) + "\n", encoding="utf-8")
    os.replace(part, sums)
    return file
