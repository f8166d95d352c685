"""``fedflat export``: what a run's guarantee covers, in a folder of its own, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.models.representation import FILE
from fedflat.privacy.ledger import read
from fedflat.records import checkpoint
from fedflat.records.folder import LEDGER, METRICS, RECIPE, SEALED, STATEMENT
from fedflat.report.metrics import Run, proven_epsilon, read_run
from fedflat.report.together import uncounted

MODEL, REPORT, SUMS = "model.safetensors", "report.html", SEALED
TIMES = ("seconds",)
"""Keys of a round's released record that follow from who took part: how long a round takes tells its cohort's size."""


@dataclass(frozen=True)
class Exported:
    """What lies in ``folder`` now, and what stayed behind: name -> why."""

    folder: Path
    files: tuple[str, ...]
    left: Mapping[str, str]
    guaranteed: bool = True
    """Whether a finite ε is proven of what was exported."""


def export(run: str | Path, out: str | Path) -> Exported:
    """Copy what the guarantee covers of a run's folder into the new folder ``out``; where none is proven, it is said.

    Written: the weights under the module's parameter names, statement, ledger, recipe, metrics, a report without what
    is private to the simulation, and the checksums of all of them. Everything that was left is named, with the reason.

    Raises:
        InputError: ``run`` is no run with a statement and a sound checkpoint; ``out`` is there already.
    """
    source, target = Path(run), Path(out)
    found = read_run(source)
    for name in (LEDGER, STATEMENT):
        if not (source / name).is_file():
            raise wrong("export", f"{source} without {name}", "the folder of a run that released something")
    if uncounted(found, read(source / LEDGER)):
        raise wrong("export", f"{source}, whose ledger has rounds that {STATEMENT} does not count", "a run at its end")
    weights, facts = _weights(source)
    public, left = _public(found)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise wrong("export", f"{target}, which already exists", "a new folder")
    target.mkdir(parents=True, exist_ok=True)
    _write(target, source, public, weights, facts)
    kept = {path.name for path in target.iterdir()}
    left |= _unwritten(source, kept)
    sums = "".join(f"{_sha256(target / name)}  {name}\n" for name in sorted(kept))
    (target / SUMS).write_text(sums, encoding="utf-8")
    return Exported(target, (*sorted(kept), SUMS), left, proven_epsilon(found) is not None)


def _weights(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The last released weights by parameter name."""
    newest = checkpoint.newest(source / "checkpoints")
    if newest is None:
        raise wrong("export", f"{source} without a sound checkpoint", "a run with released weights")
    state, _, facts = newest
    named = facts["tensors"][: facts["shared_tensors"]]
    lengths = [math.prod(shape) for _, shape in named]
    pieces = state.released.split(lengths)
    return {name: piece.reshape(shape).clone() for (name, shape), piece in zip(named, pieces)}, {
        "round": state.round,
        "made_for": facts.get("made_for") or {},
    }


def _public(run: Run) -> tuple[Run, dict[str, str]]:
    """The run without what its guarantee does not cover, and what was taken out."""
    left = {f"{METRICS}: {key}": "how long a round takes follows from who took part" for key in TIMES}
    recipe = dict(run.recipe)
    if not (recipe.get("privacy") or {}).get("secure_rng"):
        recipe.pop("seed", None)
        left[f"{RECIPE}: seed"] = "whoever knows it can draw the noise again"
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in run.metrics]
    named = str(recipe.get("name") or run.algorithm)  # the folder's name may tell the seed
    return dataclasses.replace(run, name=named, recipe=recipe, metrics=metrics, private=[], audits=[]), left


def _write(target: Path, source: Path, run: Run, weights: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    import yaml
    from safetensors.torch import save_file

    from fedflat.report.html import render

    about = {"format": "pt", "round": str(facts["round"]), "fedflat": "shared weights as released"}
    about["made_for"] = json.dumps(facts["made_for"])
    save_file(weights, target / MODEL, metadata=about)
    for name in (LEDGER, STATEMENT, *([FILE] if (source / FILE).is_file() else [])):
        shutil.copyfile(source / name, target / name)
    text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    (target / RECIPE).write_text(text, encoding="utf-8")
    (target / METRICS).write_text("".join(json.dumps(line) + "\n" for line in run.metrics), encoding="utf-8")
    (target / REPORT).write_text(render([run]), encoding="utf-8")


def _unwritten(source: Path, kept: set[str]) -> dict[str, str]:
    """Every file of the run that has no counterpart in the export."""
    reasons = {
        "private": "not covered by the guarantee", "checkpoints": "its weights are in model.safetensors",
        "ledger.lock": "needed only while the run goes on", "metrics.seals": "of the lines with their seconds",
    }  # fmt: skip
    names = sorted({path.relative_to(source).parts[0] for path in source.rglob("*") if path.is_file()})
    return {
        name: reasons.get(name, "not covered by the guarantee, or not needed") for name in names if name not in kept
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
