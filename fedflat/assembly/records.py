"""What is written down of a run: the settled recipe, its fingerprint, the versions, the privacy statement."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.assembly import going_on
from fedflat.assembly.plans import server_of
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection
from fedflat.core.identity import identity_of
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm
from fedflat.data.clients import GIVEN as PAIRS
from fedflat.data.public import HELD_OUT
from fedflat.engine.early import SEEN, interrupted
from fedflat.engine.parts import Parts
from fedflat.engine.train import Job, Outcome
from fedflat.methods import noise as noising
from fedflat.methods.ae_dpfl import assembly as voting
from fedflat.methods.published import assembly as published
from fedflat.models.representation import FILE, Representation, write_body
from fedflat.privacy.statement import PRIORS, rounds_charged, statement
from fedflat.records.opening import Identity, versions

UNCHANGING = ("engine", "evaluation", "name")
"""Sections of a recipe that cannot change what is released."""
LATER: dict[str, dict[str, Any]] = {"data": {"validation_fraction": 0.0}, "privacy": {"selection": None}}
"""Keys that recipes did not always have, with what stands for their absence: without them a run is what it was."""


def identity(recipe: Mapping[str, Any], data: str, module: nn.Module, layout: Layout, given: Sequence[Any]) -> Identity:
    """What a run is: its settled recipe, its data, the module's weights and layout before round 0, its method.

    data: a digest of all of it. given: code of the user's own (a method, a module), for which the recipe's names do not
    stand.
    """
    kept = {section: values for section, values in recipe.items() if section not in UNCHANGING}
    for section, keys in LATER.items():
        kept[section] = {key: value for key, value in kept[section].items() if key not in keys or value != keys[key]}
    return Identity(
        recipe=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        data=data,
        model=str(identity_of((str(layout), dict(module.named_parameters()), dict(module.named_buffers())))),
        method=identity_of(tuple(given)) if given else "",
    )


def settled(recipe: Recipe, parts: Parts, clients: int, module: nn.Module | None = None) -> dict[str, Any]:
    """The recipe as a dict with what depends on data and calibration filled in; settling it again changes nothing.

    module: the run's; a frozen body's digest is among what is filled in.
    """
    dump, plan, local = recipe.dump(), parts.plan, parts.local
    dump["server"] = server_of(recipe, parts.algorithm).model_dump(mode="json")
    dump["data"]["clients"] = clients
    if parts.first is not None:
        dump["start"]["clip"] = parts.first.threshold
    if isinstance(module, Representation):
        dump["model"]["sha256"] = module.sha256
    dump["privacy"]["trust"] = plan.trust
    dump["local"] |= {
        "steps": local.steps,
        "epochs": None,
        "momentum": local.momentum if local.optimizer == "sgd" else None,
    }
    if plan.private:
        dump["privacy"] |= {
            "noise_multiplier": plan.noise_multiplier,
            "delta": plan.delta,
            "epsilon": None,
            "budget": plan.budget,
        }
    if plan.protocol == "published":
        for section, values in published.settled(plan, local.epochs).items():
            dump[section] |= values
    return dump


def resolved(recipe: Recipe, job: Job, run: str | None = None) -> str:
    """recipe.yaml of a run: every default resolved, and the versions of what runs it. run: the name of its key file."""
    import yaml

    dump = settled(recipe, job.parts, job.data.clients, job.problem.pristine)
    # The back end that was chosen, so that a resumed run adds in the same order, bit for bit.
    dump["engine"] |= {"backend": job.backend.name, "block": getattr(job.backend, "block", None)}
    dump["engine"] |= {"device": str(job.problem.device), "compile": job.problem.compiled}
    threads = getattr(job.backend, "threads", None)
    dump["engine"] |= {} if threads is None else {"processes": threads}
    if recipe.model.name == GIVEN:
        dump["model"] |= _origin(type(job.problem.pristine))
    name = {} if run is None else {"run": run}
    return yaml.safe_dump(
        {**dump, "versions": versions(("fedflat", "torch", "numpy", "dp-accounting")) | name},
        sort_keys=False,
        allow_unicode=True,
    )


def _origin(kind: type) -> dict[str, str]:
    """Where the class of a module that was given in Python comes from: its name, and its file's, without the folder."""
    try:
        file = {"file": Path(inspect.getfile(kind)).name}
    except (OSError, TypeError):  # defined at a prompt
        file = {}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **file}


def stated_facts(recipe: Recipe, job: Job) -> dict[str, Any]:
    """The public facts that the statement puts into sentences of its own."""
    method, clip = job.parts.algorithm, recipe.privacy.clip
    shown = clip.model_dump(exclude_none=True) if isinstance(clip, ClipSection) else clip
    return {
        "clip": shown if method.private else None,
        "secure": recipe.privacy.secure_rng,
        "personal": method.head is not None,
        "finetuned": method.finetune is not None,
        **({"client_state": [state.name for state in method.client_state]} if method.client_state else {}),
        "public_data": job.data.test_inputs is not None,
        **({"unidentified": True} if job.identity.method is None else {}),
        "prior": prior_of(recipe, job.problem.pristine),
        "held_out": held_out(job.parts.algorithm, recipe.data.dataset, job.data.name),
    }


def prior_of(recipe: Recipe, module: nn.Module | None) -> str:
    """What shaped the weights before any client's data did: a key of ``privacy.statement.PRIORS``."""
    if recipe.after is not None:
        return "earlier run"
    own = recipe.model.name == GIVEN or ":" in recipe.model.name
    said = {**vars(type(module)), **vars(module)} if own and module is not None else {}  # never what it inherits
    found = said.get("prior", "unknown") if own else getattr(module, "prior", "none")
    return found if found in PRIORS else "unknown"


def write_frozen(job: Job, folder: Path) -> None:
    """Keep a frozen body beside what is trained on it: another machine may make another one from the same seed."""
    module = job.problem.pristine
    if isinstance(module, Representation) and not (folder / FILE).exists():
        write_body(module.body, folder / FILE)


def held_out(method: Algorithm, dataset: str | None, loaded: str) -> bool:
    """Whether the examples a method takes for public were clients' own (``data.public``): held out of their data."""
    source, given = method.options.get("public"), loaded == PAIRS
    if source is None and method.kind == "votes" and not given:
        source = HELD_OUT
    return source == HELD_OUT or (source is not None and source == dataset and not given)


def state_privacy(recipe: Recipe, job: Job, outcome: Outcome) -> dict[str, Any]:
    """The privacy statement of a run so far."""
    plan, asked = job.parts.plan, {}
    facts = settled(recipe, job.parts, job.data.clients, job.problem.pristine) | stated_facts(recipe, job)
    # Where it ran changes nothing that is guaranteed, and whoever knows the seed of a simulation knows its noise.
    del facts["engine"], facts["seed"]
    facts |= noising.facts(recipe, plan) | voting.facts(job)
    if plan.protocol == "published":
        asked = published.stated(plan, rounds_charged(outcome.state.round, outcome.entries))
        facts |= published.facts(plan)
    found = statement(
        plan,
        rounds_run=outcome.state.round,
        algorithm=job.parts.algorithm.name,
        facts=facts,
        key_source="os-entropy" if recipe.privacy.secure_rng or job.identity.method is None else "seed",
        entries=outcome.entries,
        **asked,
    )
    found["reasons"] += interrupted(plan, found["rounds_charged"], job.last_round)
    found["warnings"] += [SEEN] if outcome.seen else []
    found["warnings"] += going_on.warning(recipe, outcome.entries, found["proven_epsilon"])
    return found
