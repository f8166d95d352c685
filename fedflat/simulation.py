"""From a recipe to a run on this machine: build the parts once, train, write the files, hand back the result."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat import noising, published, voting
from fedflat.algorithms import ALGORITHMS, Factory
from fedflat.core.checks import nearest, wrong
from fedflat.core.imports import imported
from fedflat.core.params import Layout, flatten, layout_of
from fedflat.core.rng import fresh_key, simulation_key
from fedflat.core.types import Algorithm, Broadcast, Clip, Local, RoundState
from fedflat.data.clients import Federated, from_pairs, hold_back
from fedflat.data.public import public_training
from fedflat.engine import keys
from fedflat.engine.choose import backend_for, one_thread
from fedflat.engine.folder import RECIPE, STATEMENT, RunFolder
from fedflat.engine.folder import replace as write_whole
from fedflat.engine.parts import Parts
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.resident import keep_freed_memory, resident
from fedflat.engine.sequential import Sequential
from fedflat.engine.train import Backend, Evaluation, Job, Outcome, Record, final_module, train
from fedflat.pieces import clipping
from fedflat.pieces.server import optimizer
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.statement import rounds_charged, statement
from fedflat.recipe import ClipSection, Recipe

RecipeLike = Recipe | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Result:
    """What a run gives back.

    model: the module with the final shared weights (a personal head is w^0's). history: one record per round, the keys
    of metrics.jsonl. private_history: the keys of private.jsonl. privacy: the statement. folder: where files are, or None.
    """

    model: nn.Module
    history: list[Record]
    private_history: list[Record]
    privacy: dict[str, Any]
    recipe: Recipe
    folder: Path | None
    stopped: str
    heads: dict[int, torch.Tensor]
    stages: dict[str, float]


def run(
    recipe: RecipeLike,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    out: str | Path | None = None,
    *,
    algorithm: Algorithm | Factory | None = None,
    data: Federated | None = None,
    resume: bool = False,
    on_round: Callable[[Record, Record], None] | None = None,
    on_start: Callable[[Job], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Simulate a recipe on this machine.

    recipe: a Recipe, a dict, a packaged name or a path. model: any module; its weights are w^0 (it is not changed).
    clients: one ``(inputs, targets)`` pair per client, instead of the recipe's data. test: a public pair.
    data: the recipe's federation where it is loaded already.
    out: folder for the run's files; nothing is written without it. resume: go on with the run in ``out``.
    Raises InputError for anything wrong in what was given, before any work is done.
    """
    parsed = Recipe.of(recipe)
    job = prepare(parsed, model, clients, test, algorithm=algorithm, data=data)
    if out is not None:
        job.folder = _folder(Path(out), resume, parsed, job)
    elif resume:
        raise wrong("resume", "no folder", "out=FOLDER of the run to go on with")
    job.key = _noise_key(parsed, job)
    if on_start is not None:
        on_start(job)
    with one_thread():
        outcome = train(job, resume=resume, on_round=on_round, should_stop=should_stop)
    facts = state_privacy(parsed, job, outcome)
    if job.folder is not None:
        write_whole(job.folder.path / STATEMENT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        if parsed.privacy.secure and outcome.complete:
            keys.forget(_run_name(job.folder.path))
    return Result(
        model=final_module(job, outcome),
        history=outcome.history,
        private_history=outcome.private,
        privacy=facts,
        recipe=parsed,
        folder=None if job.folder is None else job.folder.path,
        stopped=outcome.stopped,
        heads=dict(outcome.heads.kept),
        stages=dict(job.stages),
    )


def prepare(
    recipe: Recipe,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    *,
    algorithm: Algorithm | Factory | None = None,
    data: Federated | None = None,
) -> Job:
    """Everything live that a run of ``recipe`` needs, checked; no training is done."""
    method = algorithm_of(recipe, algorithm)
    if recipe.data.clients is not None:  # impossible privacy settings stop before data is read
        plan_of(recipe, method, recipe.data.clients)
    data, given = data_of(recipe, clients, test) if data is None else data, clients is not None
    queries = None
    if method.kind == "votes":
        data, queries = voting.split(recipe, method, data, given)
    public = None
    if method.kind == "update" and method.options.get("public"):
        name = None if given else recipe.data.dataset
        data, public = public_training(data, str(method.options["public"]), recipe.seed, name)
    module = _module(recipe, model, data)
    data = resident(data, module)
    layout = layout_of(module, method.head)
    plan = plan_of(recipe, method, data.clients, layout.dimension)
    local = local_of(recipe, method, data)
    as_published = published.applies(recipe, method)
    clip, threshold = published.clip_of(recipe, plan, layout) if as_published else clip_of(recipe, method, layout)
    parts = Parts(
        algorithm=method,
        plan=plan,
        clip=clip,
        mechanism=noising.mechanism_of(recipe, plan),
        optimizer=optimizer(**_optimizer_options(recipe)),
        local=local,
        layout=layout,
        weighted=_weighted(recipe, method),
    )
    if as_published:
        parts = published.parts_of(parts)
    problem = ModuleProblem(module, layout, "bf16" if recipe.engine.precision == "bf16" else "fp32")
    job = Job(
        parts=parts,
        data=data,
        problem=problem,
        backend=_backend(recipe, parts, problem, data),
        first=flatten(module, layout),
        threshold=threshold,
        seed=recipe.seed,
        key=simulation_key(recipe.seed),
        evaluation=Evaluation(**recipe.evaluation.model_dump()),
        fingerprint=_fingerprint(settled(recipe, plan, local, data.clients), data, layout),
    )
    if public is not None:
        job.public_update = _public_update(job, resident(public, module))
    return job if queries is None else voting.with_votes(job, recipe, queries)


def _public_update(job: Job, public: Federated) -> Callable[[RoundState], torch.Tensor]:
    """w^t -> the update ``(d,)`` of the local loop on public data: what Fed-SMP's top_k mask is taken from."""
    parts = job.parts
    alone = Sequential(Algorithm("public data"), job.problem, parts.local, public, job.seed)

    def update(state: RoundState) -> torch.Tensor:
        broadcast = Broadcast(state.round, state.shared, math.inf, parts.local.rate(state.round))
        return alone.one(0, broadcast, state.shared.clone()).message

    return update


def algorithm_of(recipe: Recipe, given: Algorithm | Factory | None = None) -> Algorithm:
    """The algorithm a recipe names, with its options checked against the factory's signature."""
    if isinstance(given, Algorithm):
        return given
    name, options = recipe.algorithm.name, recipe.algorithm.options
    if given is not None:
        factory = given
    elif ":" in name:
        factory = imported("algorithm.name", name)
    elif name in ALGORITHMS:
        factory = ALGORITHMS[name]
    else:
        raise wrong("algorithm.name", name, ", ".join(ALGORITHMS), hint=nearest(name, ALGORITHMS))
    allowed = list(inspect.signature(factory).parameters)
    for key in options:
        if key not in allowed:
            raise wrong(f"algorithm.{key}", key, f"for {name}: {', '.join(allowed) or 'no key'}", hint=nearest(key, allowed))
    method = factory(**options)
    if not isinstance(method, Algorithm):
        raise wrong("algorithm.name", f"{name}, which returned {type(method).__name__}", "a function that returns Algorithm")
    return method


def data_of(recipe: Recipe, clients: Sequence[Any] | None, test: Any) -> Federated:
    """The federation: pairs given in Python, or the recipe's data section."""
    if clients is not None:
        given = from_pairs(clients, test)
        parts, held = hold_back(given.parts, recipe.data.client_test_fraction, recipe.seed)
        return replace(given, parts=parts, held_back=held)
    if test is not None:
        raise wrong("test", "a test set without clients", "clients=[(inputs, targets), …] as well, or neither")
    from fedflat.data.sources import load

    return load(recipe.data, recipe.seed)


def plan_of(recipe: Recipe, method: Algorithm, clients: int, dimension: int | None = None) -> Plan:
    """The privacy plan of a recipe with M = ``clients``; ``dimension`` d, where the model is known, is for ddgauss."""
    noising.check(recipe, method)
    if published.applies(recipe, method):
        return published.plan_of(recipe, method, clients)
    privacy, cohort = recipe.privacy, recipe.cohort
    adaptive = isinstance(privacy.clip, ClipSection) and privacy.clip.kind == "adaptive"
    count_noise = privacy.clip.count_noise if isinstance(privacy.clip, ClipSection) else None
    votes = voting.votes_plan(recipe, method) if method.kind == "votes" else None
    plan = build_plan(
        clients=clients,
        cohort_size=cohort.size,
        sampling=cohort.sampling,
        cohort_max=cohort.max,
        cohort_min=cohort.min if votes is None else voting.minimum(recipe, method, clients),
        max_participations=cohort.max_participations,
        rounds=recipe.rounds,
        noise_multiplier=privacy.noise_multiplier,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        trust=noising.trust_of(recipe, method),
        colluders=cohort.colluders,
        accountant=privacy.accountant,
        noise_cohort=privacy.noise_cohort,
        count_noise=count_noise if votes is None else None,
        adaptive=adaptive and votes is None,
        private=method.private,
        mechanism=votes or noising.account_of(recipe, method, dimension),
    )
    plan = noising.settle(plan)
    if votes is not None:
        plan = voting.with_draws(plan, votes, recipe)
    if privacy.budget is not None:
        plan = replace(plan, budget=privacy.budget if plan.budget is None else min(privacy.budget, plan.budget))
    return plan


def local_of(recipe: Recipe, method: Algorithm, data: Federated) -> Local:
    """Local training's public numbers; epochs become K = E·⌈n̄/batch⌉ for every client."""
    local = recipe.local
    momentum = method.momentum if local.momentum is None else local.momentum
    if method.fixed_momentum and momentum != method.momentum:
        raise wrong("local.momentum", momentum, f"{method.momentum:g} for {method.name}", hint=f"Reason: {method.fixed_momentum}.")
    steps = local.steps
    if steps is None:
        steps = (local.epochs or 1) * math.ceil(data.examples_per_client / local.batch_size)
    return Local(
        steps=steps,
        batch_size=local.batch_size,
        lr=local.lr,
        momentum=momentum,
        lr_decay=local.lr_decay,
        weight_decay=local.weight_decay,
        max_grad_norm=local.max_grad_norm,
        epochs=local.epochs if published.applies(recipe, method) else None,
    )


def clip_of(recipe: Recipe, method: Algorithm, layout: Layout) -> tuple[Clip, float]:
    """The clip and its first threshold C; non-private twins clip nothing."""
    if not method.private:
        return clipping.whole_vector(math.inf), math.inf
    given = recipe.privacy.clip
    if not isinstance(given, ClipSection):
        return clipping.whole_vector(given), float(given)
    if given.kind == "adaptive":
        if given.initial is None:
            raise wrong("privacy.clip.initial", "nothing", "a number > 0 to start from")
        return clipping.adaptive(given.initial, given.quantile), given.initial
    if given.kind == "per-tensor":
        if given.values is None:
            raise wrong("privacy.clip.values", "nothing", f"one number, or {layout.shared} (one for each shared tensor)")
        per_tensor = clipping.per_tensor(given.values, layout.shared)
        return per_tensor, per_tensor.threshold
    if given.kind == "constant" and given.value is not None:
        return clipping.whole_vector(given.value), given.value
    raise wrong("privacy.clip", given.kind, "a number > 0, {kind: adaptive, …} or {kind: per-tensor, values: …}")


def _optimizer_options(recipe: Recipe) -> dict[str, Any]:
    server = recipe.server
    shared = {"name": server.optimizer, "lr": server.lr}
    if server.optimizer == "sgd":
        return {**shared, "momentum": server.momentum}
    return {**shared, "beta1": server.beta1, "beta2": server.beta2, "tau": server.tau}


def _weighted(recipe: Recipe, method: Algorithm) -> bool:
    """Sample weights make the sensitivity depend on data sizes: only non-private twins may use them."""
    if recipe.server.weights == "samples" and method.private:
        raise wrong(
            "server.weights", "samples", "uniform for a private method", hint="Weights n_i make the sensitivity depend on data sizes."
        )
    return recipe.server.weights == "samples"


def _backend(recipe: Recipe, parts: Parts, problem: ModuleProblem, data: Federated) -> Backend:
    keep_freed_memory()
    engine = recipe.engine
    return backend_for(engine.backend, engine.block, engine.processes, parts, problem, data, recipe.seed)


def _module(recipe: Recipe, given: nn.Module | None, data: Federated) -> nn.Module:
    """A module of its own for this run, checked to hold nothing that would leave unclipped."""
    from fedflat.models import build, refuse_unclipped_state

    if given is not None:
        module = copy.deepcopy(given)
    else:
        options = recipe.model.options
        if data.vocabulary and recipe.model.name in ("bow",):
            options.setdefault("vocabulary", data.vocabulary)
        module = build(recipe.model.name, data.input_shape, data.classes, recipe.seed, **options)
    example = data.inputs[:2] if len(data.inputs) else torch.zeros(2, *data.input_shape)
    refuse_unclipped_state(module, torch.zeros_like(example))
    return module


def _fingerprint(recipe: Mapping[str, Any], data: Federated, layout: Layout) -> str:
    """What must be the same for a resumed run: everything but where it runs. From the settled recipe, so that the
    folder's own recipe.yaml resumes it."""
    facts = {**recipe, "engine": None, "data set": data.fingerprint(), "layout": str(layout)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _folder(path: Path, resume: bool, recipe: Recipe, job: Job) -> RunFolder:
    """A new run folder with its recipe in it, or the folder of the run that is resumed."""
    from fedflat.engine import checkpoint

    if not resume:
        folder = RunFolder.create(path)
        write_whole(path / RECIPE, resolved(recipe, job))
        return folder
    if not (path / RECIPE).is_file():
        raise wrong("--resume", str(path), "the folder of a run (it has a recipe.yaml)")
    found = checkpoint.newest(path / "checkpoints")
    if found is not None and found[2].get("fingerprint") != job.fingerprint:
        raise wrong("--resume", f"{path}, whose recipe, data or model differ from the checkpoint's", "the run as it was started")
    return RunFolder(path)


def _noise_key(recipe: Recipe, job: Job) -> bytes:
    """The key of cohorts and noise: a function of the seed, or with ``secure`` 256 bits kept outside the run's folder.

    A run in memory keeps its key in memory. A resumed run whose key is gone gets a fresh one.
    """
    if not recipe.privacy.secure:
        return job.key
    if job.folder is None:
        return fresh_key()
    keys.check_outside(job.folder.path)
    name = _run_name(job.folder.path)
    found = keys.load(name)
    return keys.create(name) if found is None else found


def _run_name(path: Path) -> str:
    """The random public name of a secure run, from its recipe.yaml."""
    import yaml

    found = yaml.safe_load((path / RECIPE).read_text(encoding="utf-8"))
    name = (found.get("versions") or {}).get("run") if isinstance(found, dict) else None
    if not isinstance(name, str):
        raise wrong(f"{path / RECIPE}: versions.run", name, "the name that fedflat wrote")
    return name


def resolved(recipe: Recipe, job: Job) -> str:
    """recipe.yaml of a run: every default resolved, and the versions of what runs it."""
    import yaml

    dump = settled(recipe, job.parts.plan, job.parts.local, job.data.clients)
    # A secure run's key file is found by a random name, so that a moved folder still resumes.
    name = {"run": secrets.token_hex(16)} if recipe.privacy.secure else {}
    return yaml.safe_dump({**dump, "versions": versions() | name}, sort_keys=False, allow_unicode=True)


def settled(recipe: Recipe, plan: Plan, local: Local, clients: int) -> dict[str, Any]:
    """The recipe as a dict with what depends on the data and on calibration filled in; settling it again changes nothing."""
    dump = recipe.dump()
    dump["data"]["clients"] = clients
    dump["privacy"]["trust"] = plan.trust
    dump["local"] |= {"steps": local.steps, "epochs": None, "momentum": local.momentum}
    if plan.private:
        dump["privacy"] |= {"noise_multiplier": plan.noise_multiplier, "delta": plan.delta, "epsilon": None, "budget": plan.budget}
    if plan.protocol == "published":
        for section, values in published.settled(plan, local.epochs).items():
            dump[section] |= values
    return dump


def versions(packages: Iterable[str] = ("fedflat", "torch", "numpy", "dp-accounting")) -> dict[str, str]:
    """Versions of Python and of the libraries that decide a run's numbers."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _stated_facts(recipe: Recipe, job: Job) -> dict[str, Any]:
    """The public facts that the statement puts into sentences of its own."""
    method, clip = job.parts.algorithm, recipe.privacy.clip
    shown = clip.model_dump(exclude_none=True) if isinstance(clip, ClipSection) else clip
    return {
        "clip": shown if method.private else None,
        "secure": recipe.privacy.secure,
        "personal": method.head is not None,
        "finetuned": method.finetune is not None,
        "public_data": job.data.test_inputs is not None,
    }


def state_privacy(recipe: Recipe, job: Job, outcome: Outcome) -> dict[str, Any]:
    """The privacy statement of a run so far."""
    plan, asked = job.parts.plan, {}
    facts = settled(recipe, plan, job.parts.local, job.data.clients) | _stated_facts(recipe, job)
    facts |= noising.facts(recipe, plan) | voting.facts(job)
    if plan.protocol == "published":
        asked = published.stated(plan, rounds_charged(outcome.state.round, outcome.entries))
        facts |= published.facts(plan)
    return statement(
        plan,
        rounds_run=outcome.state.round,
        algorithm=job.parts.algorithm.name,
        facts=facts,
        key_source="os-entropy" if recipe.privacy.secure else "seed",
        entries=outcome.entries,
        **asked,
    )

