"""Build and check everything live that a run needs, before anything is trained."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedflat.assembly import plans, records
from fedflat.assembly.inputs import Clients, as_given, data_of, module_of
from fedflat.assembly.piece_check import try_pieces
from fedflat.assembly.plans import local_of, plan_of
from fedflat.assembly.records import identity, settled
from fedflat.assembly.tasks import metrics_of, objective_of, suited, try_metrics, with_public_classes
from fedflat.backends.choose import backend_for
from fedflat.backends.features import with_features
from fedflat.backends.in_process import Sequential
from fedflat.config.method import algorithm_of
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core import CustomLoss, Objective, StateWatch, fresh_key, noise_key, wrong
from fedflat.core.identity import identity_of
from fedflat.core.params import Layout, flatten, last_linear, layout_of, zero
from fedflat.core.types import Algorithm, Broadcast, Factory, RoundState
from fedflat.data.clients import FederatedData
from fedflat.data.sources import public_training
from fedflat.engine import device as place
from fedflat.engine.device import device_for, exact, placed
from fedflat.engine.evaluate import outputs_of
from fedflat.engine.job import Job, Metric
from fedflat.engine.problem import ModuleProblem, refuse_change
from fedflat.methods import noise as noising
from fedflat.methods import votes
from fedflat.methods.rounds import check_logits, parts_of
from fedflat.models import is_sized


def prepare(
    recipe: Recipe, model: nn.Module | None = None, clients: Clients | None = None, test: Any = None, *,
    algorithm: Algorithm | Factory | None = None, data: FederatedData | None = None, loss: CustomLoss | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None, features: bool = True,
) -> Job:  # fmt: skip
    """Everything live that a run of ``recipe`` needs, checked; no training is done.

    loss, metrics: of the user's own, see ``fedflat.run``. features: whether the job's data become a frozen body's
    features, or stay as they are.
    """
    # From here on the recipe says `given` wherever Python gave something, so no name can mislead.
    recipe = as_given(recipe, model, clients, data, algorithm, loss)
    ingredients = _ingredients(recipe, model, clients, test, algorithm, data, loss)
    wanted = metrics_of(metrics, recipe, ingredients.data)
    if recipe.evaluation.keep != "last" and ingredients.data.test_inputs is None:
        raise wrong("evaluation.keep", recipe.evaluation.keep, "last where there are no public test data")
    job = _job(recipe, ingredients, features)
    job.metrics = wanted
    tests, targets = job.data.test_inputs, job.data.test_targets
    if job.metrics and tests is not None and targets is not None:
        outputs = outputs_of(job.problem, job.initial_weights, tests, job.evaluation.batch_size)
        try_metrics(job.metrics, outputs, targets.cpu())
    return job


@dataclass(frozen=True)
class _Ingredients:
    """What a job is made of, wherever it then computes. queries: what votes are about; public: Fed-SMP's own data.
    user_code: method, module and loss where they are the user's own. random: whether training draws random numbers.
    """

    method: Algorithm
    data: FederatedData
    queries: torch.Tensor | None
    public: FederatedData | None
    module: nn.Module
    layout: Layout
    random: bool
    objective: Objective
    user_code: tuple[Any, ...]

    @property
    def digest(self) -> str:
        """Of every example, the public ones too."""
        more = [] if self.public is None else [self.public.fingerprint()]
        more += [] if self.queries is None else [str(identity_of(self.queries))]
        return hashlib.sha256(" ".join([self.data.fingerprint(), *more]).encode()).hexdigest()


def _ingredients(
    recipe: Recipe, model: nn.Module | None, clients: Clients | None, test: Any,
    algorithm: Algorithm | Factory | None, data: FederatedData | None, loss: CustomLoss | None,
) -> _Ingredients:  # fmt: skip
    method, objective = algorithm_of(recipe, algorithm), objective_of(recipe, loss)
    if not objective.cross_entropy and (method.kind == "votes" or method.options.get("public")):
        raise wrong("task", recipe.task, "classification, without a loss of one's own", hint=f"So is {method.name}.")
    asked, cohort = recipe.data.clients, recipe.cohort.size
    # Impossible privacy settings stop before data is read, but of more clients than data sets have examples, and not
    # where the data say that their clients are others.
    if asked is not None and asked <= 100_000 and not (recipe.data.natural and cohort > asked):
        plan_of(recipe, method, asked)
    data, in_python = data_of(recipe, clients, test) if data is None else data, clients is not None
    records.check(recipe)  # after a data set that is not there has been named
    data = suited(data, recipe.task)
    data, queries, public = _apart(recipe, method, data, in_python)
    data = with_public_classes(recipe, data, method.private, named=model is None and is_sized(recipe.model.name))
    module, random, classes = module_of(recipe, model, data, objective)
    data = replace(data, classes=classes)
    if method.zero_head:
        zero(module, last_linear(module))
    user_code: tuple[Any, ...] = (method,) if algorithm is not None or ":" in recipe.algorithm.name else ()
    user_code += (module,) if model is not None or ":" in recipe.model.name else ()
    user_code += (objective.own,) if objective.own is not None else ()
    layout = layout_of(module, method.head)
    zeros = data.inputs.new_zeros(2, *data.inputs.shape[1:])  # a server may hold no rows
    check_logits(method, objective, module, layout, zeros, data.targets)
    random = random or objective.own is not None
    return _Ingredients(method, data, queries, public, module, layout, random, objective, user_code)


def _apart(
    recipe: Recipe, method: Algorithm, data: FederatedData, in_python: bool
) -> tuple[FederatedData, torch.Tensor | None, FederatedData | None]:
    """Return the federation without what the method takes for public, the queries of votes, and a mask's examples."""
    own, source = in_python or not plans.is_public(recipe.data.dataset), method.options.get("public")
    if method.kind == "votes":
        return *votes.split(recipe, method, data, in_python, own=own), None
    if method.kind != "update" or not source:
        return data, None, None
    data, public = public_training(data, str(source), recipe.seed, None if in_python else recipe.data.dataset, own=own)
    return data, None, public


def _job(recipe: Recipe, ingredients: _Ingredients, features: bool) -> Job:
    """Return the job on its device, to which the module is moved."""
    layout, engine, objective = ingredients.layout, recipe.engine, ingredients.objective
    precision = "bf16" if engine.precision == "bf16" else "fp32"
    device = device_for(
        engine.device, engine.backend, ingredients.module, layout, ingredients.data, precision, objective
    )
    # The identity and a federation's app need the weights as they were before any device touched them.
    pristine = copy.deepcopy(ingredients.module).cpu()
    module = ingredients.module.to(device)
    untouched = StateWatch(module)
    data = _resident(ingredients.data, module, device, precision, features)
    if any(part is ingredients.module for part in ingredients.user_code):
        data = place.in_bearable_layout(module, data)
    plan = plan_of(recipe, ingredients.method, data.clients, layout.dimension)
    local = local_of(recipe, ingredients.method, data)
    parts, threshold = parts_of(recipe, ingredients.method, plan, local, layout)
    # Tried on made-up vectors, so that a fault shows before anybody's data are trained on.
    random = try_pieces(parts.algorithm, layout) or ingredients.random
    onednn = objective.cross_entropy and place.serves(module, layout, precision, data.inputs)
    # Bits of a module on a GPU are another machine's; the identity must not follow them.
    code = [pristine if part is ingredients.module else part for part in ingredients.user_code]
    origin = identity(settled(recipe, parts, data.clients, pristine), ingredients.digest, pristine, layout, code)
    refuse_change(untouched, everything=True)  # features were computed on it
    if isinstance(objective.own, nn.Module):
        objective = replace(objective, own=copy.deepcopy(objective.own).to(device))
    problem = ModuleProblem(
        module, layout, precision, onednn=onednn, random=random, pristine=pristine, objective=objective
    )
    # glibc gives memory back after each step otherwise, and taking it again costs as much as a step.
    place.keep_freed_memory()
    with exact(problem.device):
        backend = backend_for(engine.backend, engine.block, engine.processes, parts, problem, data, recipe.seed)
        facts = records.engine_facts(recipe, problem, backend)
        # An optimiser makes C, so the same recipe may have another one elsewhere. One Z behind both would be no noise:
        # the difference of the releases gives it away.
        mixing = noising.mixing_of(plan)
        origin = replace(origin, noise="" if mixing is None else mixing.factor.digest, engine=facts)
    # Code that cannot be told apart from other code gets fresh noise, whatever the seed says.
    seeded = records.is_seeded(recipe) and origin.method is not None
    job = Job(
        parts=parts,
        data=data,
        problem=problem,
        backend=backend,
        initial_weights=flatten(module, layout).cpu(),
        threshold=threshold,
        seed=recipe.seed,
        key=noise_key(recipe.seed, *origin.facts) if seeded else fresh_key(),
        evaluation=recipe.evaluation,
        threads=engine.processes or torch.get_num_threads(),
        identity=origin,
        made_for=_made_for(ingredients.data, named=recipe.model.name != GIVEN),
    )
    if ingredients.public is not None:
        job.public_update = _public_update(job, _resident(ingredients.public, module, device, precision))
    return job if ingredients.queries is None else votes.with_votes(job, ingredients.queries)


def _made_for(data: FederatedData, *, named: bool) -> dict[str, Any]:
    """Return what is public of the rows that a module takes: their shape, and the steps from a row to an input.

    named: the module was built for the data, so that the shapes of its tensors show the number of classes. Otherwise
    that number may follow from clients' targets, and is left out.
    """
    dtype = str(data.inputs.dtype).removeprefix("torch.")
    facts: dict[str, Any] = {"input_shape": list(data.input_shape), "dtype": dtype}
    if named:
        facts |= {"classes": data.classes, "vocabulary": data.vocabulary, "padding": data.padding}
    return facts if data.preparation is None else {**facts, "preparation": data.preparation.record()}


def _resident(
    data: FederatedData, module: nn.Module, device: torch.device, precision: str, features: bool = True
) -> FederatedData:
    """Return the data where training is, laid out for it: a GPU reads channels-last fast only where it uses tensor
    cores.
    """
    data = with_features(data, module, precision) if features else data
    return placed(data if device.type != "cpu" and precision == "fp32" else place.resident(data, module), device)


def _public_update(job: Job, public: FederatedData) -> Callable[[RoundState], torch.Tensor]:
    """w^t -> the update ``(d,)`` of the local loop on public data: what Fed-SMP's top_k mask is taken from."""
    parts = job.parts
    trainer = Sequential(Algorithm("public data"), job.problem, parts.local, public, job.seed)

    def update(state: RoundState) -> torch.Tensor:
        broadcast = Broadcast(state.round, state.shared, math.inf, parts.local.rate(state.round))
        return trainer.one(0, broadcast, state.shared.clone()).message

    return update
