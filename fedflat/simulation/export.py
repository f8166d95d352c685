"""Folders to hand over: ``fedflat export`` (what the guarantee covers), its programs, and ``fedflat attest``.

An exported folder has the released weights, the records and a page; ``--program`` and ``--onnx`` add the model as a
program that runs without this package. An attested one has the statement, the ledger and the signatures with a checker
that needs nothing of fedflat.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fedflat.config.reading import dumped
from fedflat.core import RoundState, digest_of_file, missing
from fedflat.core.checks import InputError, RunError, becoming, first_line, making, require, wrong
from fedflat.privacy.statement import refuse_seeded
from fedflat.records import checkpoint
from fedflat.records.folder import BODY, LEDGER, LOCKED, METRICS, RECIPE, REPORT, SEALED, STATEMENT, locked
from fedflat.records.signing import SIGNATURE, TIPS, own_key
from fedflat.report.metrics import Run, proven_epsilon, read_run
from fedflat.simulation.inspection import refuse_damage
from fedflat.simulation.recomputed import MODEL, PREPARATION, SAYS


@dataclass(frozen=True)
class Exported:
    """What lies in ``folder`` now, and what stayed behind: name -> why."""

    folder: Path
    files: tuple[str, ...]
    left: Mapping[str, str]
    guaranteed: bool = True
    """Whether a finite ε is proven of what was exported."""


def write_export(source: Path, target: Path, programs: Callable[[], Mapping[str, bytes]] = dict) -> Exported:
    """Write what ``fedflat.export`` promises of the run in ``source`` into the new folder ``target``.

    programs: makes further files, after all checks and before anything is written.
    """
    run = read_run(source)
    _check_ended("export", source, "the folder of a run that released something")
    if locked(source):
        raise wrong("export", f"{source}, and {LOCKED}, where its records' seals lie", "the account that owns the run")
    refuse_damage(source)
    refuse_seeded("export", run.privacy)
    newest = checkpoint.newest(source / "checkpoints", hidden=False)
    if newest is None:
        raise wrong("export", f"{source} without a sound checkpoint", "a run with released weights")
    public = _public(run)
    _check_new("export", target)
    extra = programs()  # before the folder: a model that torch.export cannot follow leaves nothing behind
    with making("export", f"{target}, which cannot be created", "a new folder"):
        target.mkdir(parents=True, exist_ok=True)
    try:
        _write(target, source, public, *newest)
        for name, content in extra.items():
            (target / name).write_bytes(content)
        names = {path.name for path in target.iterdir()}
        digests = {name: digest_of_file(target / name) for name in sorted(names)}
        sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
        (target / SEALED).write_text(sums, encoding="utf-8")
    except BaseException:  # a disk that is full: half an export would stand in the way of the next try
        shutil.rmtree(target, ignore_errors=True)
        raise
    return Exported(target, (*sorted(names), SEALED), _unwritten(source, names), proven_epsilon(run) is not None)


def _check_ended(where: str, source: Path, allowed: str) -> None:
    """Raise InputError where a folder lacks a ledger or a statement."""
    for name in (LEDGER, STATEMENT):
        require((source / name).is_file(), where, f"{source} without {name}", allowed)


def _check_new(where: str, target: Path) -> None:
    """Raise InputError where a folder that is to be written holds something already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise wrong(where, f"{target}, which already exists", "a new folder")


def _public(run: Run) -> Run:
    """Return the run without what its guarantee does not cover."""
    recipe = {key: value for key, value in run.recipe.items() if key != "seed"}
    named = str(recipe.get("name") or run.algorithm)  # the folder's name may tell the seed
    return dataclasses.replace(run, name=named, recipe=recipe, private=[], audits=[])


def _write(target: Path, source: Path, run: Run, state: RoundState, _: object, facts: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    from fedflat.report.html import render

    made_for = facts.get("made_for") or {}
    metadata = {**SAYS, "round": str(state.round), "made_for": json.dumps(made_for)}
    # save_file leaves it to its owner alone
    (target / MODEL).write_bytes(save(checkpoint.released(state, facts), metadata=metadata))
    for name in (LEDGER, STATEMENT, METRICS, *(name for name in (BODY, TIPS, SIGNATURE) if (source / name).is_file())):
        shutil.copyfile(source / name, target / name)
    if preparation := made_for.get("preparation"):
        text = json.dumps(preparation, ensure_ascii=False, indent=2, default=str)
        (target / PREPARATION).write_text(text + "\n", encoding="utf-8")
    (target / RECIPE).write_text(dumped(run.recipe), encoding="utf-8")
    (target / REPORT).write_text(render([dataclasses.replace(run, path=target)]), encoding="utf-8")


def _unwritten(source: Path, exported: set[str]) -> dict[str, str]:
    """Return every file of the run that has no counterpart in the export, and the seed."""
    reasons = {
        "private": "not covered by the guarantee", "checkpoints": "its weights are in model.safetensors",
        "ledger.lock": "needed only while the run goes on", "metrics.seals": "of the run's own lines",
    }  # fmt: skip
    names = {path.relative_to(source).parts[0] for path in source.rglob("*") if path.is_file()}
    left = {f"{RECIPE}: seed": "whoever knows it can draw everything again that is not secret"}
    other = "not covered by the guarantee, or not needed"
    return left | {name: reasons.get(name, other) for name in sorted(names - exported)}


PROGRAM, ONNX = "model.pt2", "model.onnx"


def programs(result: Any, *, program: bool, onnx: bool) -> dict[str, bytes]:
    """Return the files asked for, by name: ``model.pt2``, and ``model.onnx`` with input ``inputs`` and output
    ``outputs``; both take batches of any size.

    Raises:
        InputError: the module was given in Python and is not at hand, or onnx is not installed. RunError: the model
            cannot be followed by ``torch.export``, or has no ONNX form.
    """
    files: dict[str, bytes] = {}
    for name in ("onnx", "onnxscript") if onnx else ():  # which torch's exporter needs
        if importlib.util.find_spec(name) is None:
            raise missing("--onnx", name, "onnx")
    traced = _traced(result, "--program" if program else "--onnx")
    if program:
        buffer = io.BytesIO()
        with _quiet():
            torch.export.save(traced, buffer)
        files[PROGRAM] = buffer.getvalue()
    if onnx:
        files[ONNX] = _onnx(traced)
    return files


def _onnx(program: torch.export.ExportedProgram) -> bytes:
    with becoming(lambda error: RunError(f"--onnx: this model has no ONNX form ({first_line(error)}).")), _quiet():
        names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["outputs"]}
        converted: Any = torch.onnx.export(program, (), dynamo=True, external_data=False, verbose=False, **names)
        return bytes(converted.model_proto.SerializeToString())


def _traced(result: Any, option: str) -> torch.export.ExportedProgram:
    """Return the run's model on a batch of any size, as ``torch.export`` follows it."""
    facts = result.made_for
    try:
        module = result.model
    except InputError:
        origin = f"{result.folder}, whose model was given in Python"
        hint = f"In Python: fedflat.load(RUN, model=MODULE).export(FOLDER, {option.strip('-')}=True)."
        raise wrong(option, origin, "a model that the recipe names", hint=hint) from None
    example = torch.zeros(2, *facts["input_shape"], dtype=getattr(torch, facts["dtype"]))
    fault = f"{option}: torch.export cannot follow this model"
    with becoming(lambda error: RunError(f"{fault} ({first_line(error)}).")):  # it fails in as many ways as models
        traced = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    for part in traced.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # names files and folders of this machine
    return traced


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter, which logs every step; a failure is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def attest(run: str | Path, out: str | Path) -> list[str]:
    """Write the folder ``out`` from a run that ended, or from an exported one, and return its files' names.

    This account's public key goes with it, if that signed the run.

    Raises:
        InputError: no statement, a record that is wrong, or ``out`` holds something already.
    """
    source, target = Path(run), Path(out)
    _check_ended("attest", source, "the folder of a run that ended, or an exported one")
    refuse_seeded("attest", refuse_damage(source).statement or {})
    _check_new("attest", target)
    public = own_key(source)
    with making("attest", target):
        target.mkdir(parents=True, exist_ok=True)
        for name in (STATEMENT, LEDGER, SIGNATURE, TIPS):
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        if public is not None:
            shutil.copyfile(public, target / "operator.pub")
        for name, template in (("check.py", "attested_check.txt"), ("README.md", "attested_readme.md")):
            text = resources.files("fedflat.simulation").joinpath(template).read_text(encoding="utf-8")
            (target / name).write_text(text, encoding="utf-8")
    return sorted(path.name for path in target.iterdir())
