"""Write down what a run is: recipe, fingerprint, versions and the data's public form.

Refuse seeded noise for clients of one's own. Make the model of a finished run again, from its recipe and its weights.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.assembly.inputs import options_for
from fedflat.assembly.plans import is_public
from fedflat.config.method import server_of
from fedflat.config.reading import GIVEN, dumped
from fedflat.config.recipe import Recipe
from fedflat.core import MOMENTUM, Algorithm, Identity, Layout, durable, put, require, versions, wrong
from fedflat.core.identity import identity_of
from fedflat.data.clients import FederatedData
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Backend
from fedflat.engine.resume import software
from fedflat.methods.published import Published
from fedflat.models import build
from fedflat.models.representation import Representation

UNCHANGING = ("engine", "evaluation", "name")
"""Sections of a recipe that cannot change what is released."""
LATER: dict[str, dict[str, Any]] = {
    "data": {"validation_fraction": 0.0}
    | dict.fromkeys(("test", "test_clients", "fill", "separator", "encoding", "examples_per_client", "classes")),
    "privacy": {"selection": None, "randomness": "secret", "benchmark": False},
}
"""Keys that recipes did not always have, with what stands for their absence: without them a run is what it was."""


def identity(recipe: Mapping[str, Any], data: str, module: nn.Module, layout: Layout, code: Sequence[Any]) -> Identity:
    """Return what a run is: its settled recipe, its data, the module's weights and layout before round 0, its method.

    data: a digest of all of it. code: the user's own (a method, a module), for which the recipe's names do not stand.
    """
    facts = {section: values for section, values in recipe.items() if section not in UNCHANGING}
    if recipe["evaluation"].get("private"):  # it takes noise away from the update
        facts["evaluation"] = {key: recipe["evaluation"][key] for key in ("private", "share")}
    # A key that a recipe did not have yet counts as its default, or all earlier noise would be drawn anew.
    for section, keys in LATER.items():
        facts[section] = {key: value for key, value in facts[section].items() if key not in keys or value != keys[key]}
    return Identity(
        recipe=durable.digest_of_json(facts),
        data=data,
        model=str(identity_of((str(layout), _by_name(module.named_parameters()), _by_name(module.named_buffers())))),
        method=identity_of(tuple(map(_as_in_02, code))) if code else "",
    )


def _as_in_02(part: Any) -> Any:
    """Return a method as 0.2 took its digest: with the momentum that stood for none."""
    return replace(part, momentum=MOMENTUM) if isinstance(part, Algorithm) and part.momentum is None else part


def _by_name(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in the order in which the digests of 0.2 took them."""
    return dict(sorted(named, key=lambda pair: repr(pair[0])))


def settled(recipe: Recipe, parts: RoundParts, clients: int, module: nn.Module | None = None) -> dict[str, Any]:
    """Return the recipe as a dict with what depends on data and calibration filled in; settling it again changes
    nothing.

    module: the run's; a frozen body's digest is among what is filled in.
    """
    dump, plan, local = recipe.dump(), parts.plan, parts.local
    dump["server"] = server_of(recipe, parts.algorithm).model_dump(mode="json")
    dump["data"]["clients"] = clients
    if isinstance(module, Representation):
        dump["model"] |= module.settled
    dump["privacy"]["trust"] = plan.trust
    momentum = local.momentum if local.optimizer == "sgd" else None
    dump["local"] |= {"steps": local.steps, "epochs": None, "momentum": momentum}
    if plan.private:
        spent = {"noise_multiplier": plan.noise_multiplier, "delta": plan.delta, "budget": plan.budget}
        dump["privacy"] |= {**spent, "epsilon": None}
    if isinstance(plan.mechanism, Published):
        for section, values in plan.mechanism.settled(local.epochs).items():
            dump[section] |= values
    return dump


def resolved(recipe: Recipe, job: Job, run: str | None = None) -> str:
    """recipe.yaml of a run: every default resolved, and the versions of what runs it. run: the name of its key file."""
    dump = settled(recipe, job.parts, job.data.clients, job.problem.pristine)
    # The back end that was chosen, so that a resumed run adds in the same order, bit for bit.
    dump["engine"] |= {"backend": job.backend.name, "block": getattr(job.backend, "block", None)}
    # Compiled code is made anew on another machine, so a resumed run goes without.
    dump["engine"] |= {"device": str(job.problem.device), "compile": False}
    threads = getattr(job.backend, "threads", None)
    dump["engine"] |= {} if threads is None else {"processes": threads}
    dump["versions"] = versions(("fedflat", "torch", "numpy", "dp-accounting")) | ({} if run is None else {"run": run})
    return dumped(dump)


def frozen_of(job: Job) -> dict[str, Tensor]:
    """Return the tensors of a frozen body, since another machine may make another one from the same seed; or none."""
    module = job.problem.pristine
    return module.body.saved() if isinstance(module, Representation) else {}


def is_seeded(recipe: Recipe) -> bool:
    """Return whether the recipe asks for cohorts and noise that follow its seed."""
    return recipe.privacy.randomness == "seeded"


def check(recipe: Recipe) -> None:
    """Refuse seeded noise for clients of one's own, unless the recipe says that it is a benchmark; warn of a paper that
    is named where the sound round runs.

    Raises:
        InputError: with what to write instead.
    """
    privacy = recipe.privacy
    if privacy.published and privacy.protocol == "sound":
        warnings.warn("privacy.published beside privacy.protocol: sound: without effect", stacklevel=2)
    if is_seeded(recipe) and not privacy.benchmark and not is_public(recipe.data.dataset):
        hint = "Seeded noise can be drawn again, so it protects nobody; privacy.benchmark: true allows it to measure."
        raise wrong("privacy.randomness", "seeded with clients of one's own", "secret", hint=hint)


def engine_facts(recipe: Recipe, problem: ModuleProblem, backend: Backend) -> str:
    """Return what a seeded key follows besides the run itself: all that may change a bit of a sum.

    For published data it is the engine as the recipe asks for it, and the versions: what a processor rounds otherwise,
    and which back end ``auto`` took here, leave the noise as it is, so that a table can be made again elsewhere.
    There is nobody whom the noise of such a run protects. For clients of one's own it is the engine that was chosen and
    the processor, so that two runs which are not the same bit for bit never share noise.
    """
    asked = recipe.engine.model_dump(mode="json") | {"precision": problem.precision}
    packages = {name: metadata.version(name).partition("+")[0] for name in ("torch", "numpy")}
    facts: dict[str, Any] = {"asked": asked, "versions": packages}
    if not is_public(recipe.data.dataset):
        facts["found"] = software(backend, problem)
    return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True)
class DataSpec:
    """The public form of the data: shape and type of one example, number of classes and clients."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    clients: int
    vocabulary: int = 0
    padding: int = 0

    @classmethod
    def of(cls, data: FederatedData) -> DataSpec:
        """Return the form of a federation's data."""
        kind = str(data.inputs.dtype).removeprefix("torch.")
        return cls(data.name, data.input_shape, kind, data.classes, data.clients, data.vocabulary, data.padding)

    def federation(
        self, client: int = 0, examples: tuple[Tensor, Tensor] | None = None,
        test: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> FederatedData:  # fmt: skip
        """Return what one party sees of the federation: a client's own examples, the public test set if it has one."""
        nobody = torch.zeros(0, *self.input_shape, dtype=getattr(torch, self.input_dtype))
        inputs, targets = examples or (nobody, torch.zeros(0, dtype=torch.int64))
        nothing = (np.empty(0, dtype=np.int64),) * self.clients
        parts = list(nothing)
        parts[client] = np.arange(len(inputs), dtype=np.int64)
        return FederatedData(
            inputs, targets, tuple(parts), nothing, *test, self.classes, self.name, self.vocabulary, self.padding,
            stated=True,
        )  # fmt: skip

    def check(self, where: str, inputs: Tensor, targets: Tensor) -> None:
        """Raise InputError unless a party's examples have this form."""
        shape, wanted = tuple(inputs.shape[1:]), tuple(self.input_shape)
        require(shape == wanted, f"{where}: inputs", f"shape {shape} per example", str(wanted))
        kind = str(inputs.dtype).removeprefix("torch.")
        require(kind == self.input_dtype, f"{where}: inputs", kind, self.input_dtype)
        if targets.dtype != torch.int64 or len(targets) != len(inputs):
            raise wrong(f"{where}: targets", f"{len(targets)} of {targets.dtype}", f"{len(inputs)} of torch.int64")
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            span = f"{int(targets.min())} to {int(targets.max())}"
            raise wrong(f"{where}: targets", span, f"0 to {self.classes - 1}")


def module_again(
    recipe: Recipe, weights: Mapping[str, Tensor], facts: Mapping[str, Any], model: nn.Module | str | None,
    body: Path | None, seeded: bool,
) -> nn.Module:  # fmt: skip
    """Return the module of a finished run, or a given one, with the run's weights.

    weights: by the names of the module's parameters. facts: what the run made its model for. body: the file of a frozen
    body that the run kept. seeded: whether the run's seed is known; an exported folder has none.
    """
    if isinstance(model, str):
        names = (facts.get("preparation") or {}).get("names")  # of a given module only its weights may say how many
        model = build(model, tuple(facts["input_shape"]), len(names or [*weights.values()][-1]), 0)
    module = copy.deepcopy(model) if model is not None else _built(recipe, weights, facts, body, seeded)
    put(module, weights, "load: model", "the run")
    return module.eval()


def _built(
    recipe: Recipe, weights: Mapping[str, Tensor], facts: Mapping[str, Any], body: Path | None, seeded: bool
) -> nn.Module:
    """Return the recipe's module. Without a seed, all that it would decide is among the weights."""
    again = "fedflat.load(path, model=MODULE)"
    allowed = f"{again}, or --model my_file.py:make"
    require(recipe.model.name != GIVEN, "load: model", "none, and the run's was given in Python", allowed)
    vocabulary, padding = (int(facts.get(name, 0)) for name in ("vocabulary", "padding"))
    options = options_for(recipe, vocabulary, padding, facts.get("preparation"))
    if body is not None:
        options["path"] = str(body)
    make = functools.partial(build, recipe.model.name, tuple(facts["input_shape"]), int(facts["classes"]), **options)
    module = make(seed=recipe.seed)
    if not seeded:
        other = make(seed=recipe.seed + 1).state_dict()
        for name, value in module.state_dict().items():
            if name not in weights and not torch.equal(value, other[name]):
                state = f"an exported folder without {name}, which was drawn by the run's seed"
                raise wrong("load: model", state, f"{again}, or the run's own folder")
    return module
