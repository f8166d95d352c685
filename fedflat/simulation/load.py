"""``fedflat.load``: a run's folder, or an exported one, as the ``Result`` that the run gave back."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.assembly.inputs import data_of, options_for
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core.checks import wrong
from fedflat.core.params import put
from fedflat.models import build
from fedflat.models.representation import FILE
from fedflat.models.representation import NAME as REPRESENTATION
from fedflat.records import checkpoint
from fedflat.records.folder import METRICS, PRIVATE, RECIPE, STATEMENT, read_lines
from fedflat.simulation.export import MODEL
from fedflat.simulation.inspection import refuse_damage
from fedflat.simulation.result import Result


def load(path: str | Path, model: nn.Module | None = None) -> Result:
    """A run that ended, or an exported folder, with every record checked against its checksums.

    model: the module, where it was given in Python; its weights do not matter, and it is not changed. The weights are
    those after the last round. Nothing is trained, and data are read only if a folder of before 0.2 asks for them.
    Raises InputError: no run, one that has not ended, a damaged record (named), a module that does not fit.

    >>> import tempfile
    >>> from fedflat.simulation.run import run
    >>> recipe = {"rounds": 1, "local": {"steps": 1, "lr": 0.1}, "cohort": {"size": 2}, "algorithm": "dp-fedavg"}
    >>> recipe["privacy"] = {"clip": 0.5, "noise_multiplier": 1.0}
    >>> pairs = [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))] * 10
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run(recipe, model=nn.Linear(3, 2), clients=pairs, out=f"{folder}/first").folder.name
    ...     len(load(f"{folder}/first").history)
    'first'
    1
    """
    folder = Path(path)
    if not (folder / RECIPE).is_file():
        raise wrong("load", str(path), "the folder of a run, or an exported one")
    if not (folder / STATEMENT).is_file():
        hint = f"Go on with: fedflat run --resume {path}"
        raise wrong("load", f"{path} without {STATEMENT}", "a run that ended", hint=hint)
    refuse_damage(folder)
    recipe, history = Recipe.load(folder), read_lines(folder / METRICS)
    weights, facts, heads = _released(folder)
    seeded = "seed:" in (folder / RECIPE).read_text(encoding="utf-8")
    return Result(
        history=history,
        private_history=read_lines(folder / PRIVATE),
        privacy=json.loads((folder / STATEMENT).read_bytes()),
        recipe=recipe,
        folder=folder,
        stopped="" if len(history) >= recipe.rounds else f"stopped after {len(history)} rounds",
        heads=heads,
        stages={},
        made=functools.partial(_module, recipe, weights, facts, model, seeded, folder),
    )


def made_for(folder: Path) -> Mapping[str, Any]:
    """What the module of a run was built for: shape and kind of inputs, classes, vocabulary; empty where unknown."""
    return _released(folder)[1]


def _released(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any], dict[int, Tensor]]:
    """The last weights by parameter name, what the module was made for, and the personal heads there are."""
    if (folder / MODEL).is_file():
        from safetensors import safe_open

        with safe_open(folder / MODEL, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("made_for", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, about, {}  # noqa: SIM118
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        raise wrong("load", f"{folder} without a sound checkpoint", "a run with released weights")
    _, heads, facts = newest
    return checkpoint.named(newest), facts.get("made_for") or {}, dict(heads.kept)


def _module(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    known: Mapping[str, Any],
    given: nn.Module | None,
    seeded: bool,
    folder: Path,
) -> nn.Module:
    module = copy.deepcopy(given) if given is not None else _built(recipe, weights, known, seeded, folder)
    put(module, weights, "load: model", "the run")
    return module.eval()


def _built(
    recipe: Recipe, weights: Mapping[str, Tensor], known: Mapping[str, Any], seeded: bool, folder: Path
) -> nn.Module:
    """The recipe's module. Where the seed was left out of an exported folder, all that it would decide is in it."""
    if recipe.model.name == GIVEN:
        raise wrong("load: model", "none, and the run's was given in Python", "fedflat.load(path, model=MODULE)")
    facts = dict(known) or _facts_of_data(recipe)
    options = options_for(recipe, int(facts.get("vocabulary", 0)), int(facts.get("padding", 0)))
    if recipe.model.name == REPRESENTATION and (folder / FILE).is_file():
        options["path"] = str(folder / FILE)
    make = functools.partial(build, recipe.model.name, tuple(facts["input_shape"]), int(facts["classes"]), **options)
    module = make(seed=recipe.seed)
    if not seeded:
        other = make(seed=recipe.seed + 1).state_dict()
        for name, value in module.state_dict().items():
            if name not in weights and not torch.equal(value, other[name]):
                found = f"an exported folder without {name}, which was drawn by the run's seed"
                raise wrong("load: model", found, "fedflat.load(path, model=MODULE), or the run's own folder")
    return module


def _facts_of_data(recipe: Recipe) -> dict[str, Any]:
    data = data_of(recipe, None, None)
    return {
        "input_shape": data.input_shape,
        "classes": data.classes,
        "vocabulary": data.vocabulary,
        "padding": data.padding,
    }
