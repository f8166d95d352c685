"""The method, the plan and the public numbers that a recipe asks for."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace

from fedflat.algorithms import ALGORITHMS, Factory
from fedflat.assembly import going_on
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection, ServerSection
from fedflat.core.checks import nearest, wrong
from fedflat.core.imports import imported
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, Average, Clip, Local, MeanView, Optimizer
from fedflat.data.clients import FederatedData
from fedflat.methods import noise as noising
from fedflat.methods.ae_dpfl import assembly as voting
from fedflat.methods.published import assembly as published
from fedflat.pieces import clipping
from fedflat.pieces.averaging import MovingAverage, TailAverage
from fedflat.pieces.server import optimizer
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.tuning import Selection

NOT_HELD = (
    "the same model=… and clients=… given again in Python, for example fedflat.run(recipe, model, clients, out=…, "
    "resume=True)"
)


def algorithm_of(recipe: Recipe, given: Algorithm | Factory | None = None) -> Algorithm:
    """The algorithm a recipe names, with its options checked against the factory's signature."""
    if isinstance(given, Algorithm):
        return given
    name, options = recipe.algorithm.name, recipe.algorithm.options
    source = options.pop("source", None) if options.get("source") == GIVEN else None
    if given is not None:
        if not callable(given):
            hint = "A method's name stands in the recipe." if isinstance(given, str) else ""
            raise wrong("algorithm", given, "an Algorithm, or a function that returns one", hint=hint)
        factory = given
    elif source == GIVEN:
        raise wrong("algorithm.name", f"{name}, {GIVEN}: the run's folder does not hold the method", NOT_HELD)
    elif ":" in name:
        factory = imported("algorithm.name", name)
    elif name in ALGORITHMS:
        factory = ALGORITHMS[name]
    else:
        raise wrong("algorithm.name", name, ", ".join(ALGORITHMS), hint=nearest(name, ALGORITHMS))
    allowed = list(inspect.signature(factory).parameters)
    for key in options:
        if key not in allowed:
            raise wrong(
                f"algorithm.{key}", key, f"for {name}: {', '.join(allowed) or 'no key'}", hint=nearest(key, allowed)
            )
    for one in inspect.signature(factory).parameters.values():
        named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if named and one.default is one.empty and one.name not in options:
            raise wrong(f"algorithm.{one.name}", "nothing", f"a value: {name} needs it and has no default")
        if isinstance(one.default, bool) and not isinstance(options.get(one.name, one.default), bool):
            raise wrong(f"algorithm.{one.name}", options[one.name], "true or false")
    method = factory(**options)
    if not isinstance(method, Algorithm):
        raise wrong(
            "algorithm.name", f"{name}, which returned {type(method).__name__}", "a function that returns Algorithm"
        )
    return method


def plan_of(recipe: Recipe, method: Algorithm, clients: int, dimension: int | None = None) -> Plan:
    """The privacy plan of a recipe with M = ``clients``; ``dimension`` d, where the model is known, is for ddgauss."""
    if recipe.after is not None and recipe.privacy.epsilon is not None:
        return going_on.calibrated(recipe, lambda alone: plan_of(alone, method, clients, dimension))
    noising.check(recipe, method)
    if published.applies(recipe, method):
        return published.plan_of(recipe, method, clients)
    privacy, cohort = recipe.privacy, recipe.cohort
    adaptive = isinstance(privacy.clip, ClipSection) and privacy.clip.kind == "adaptive"
    count_noise = privacy.clip.count_noise if isinstance(privacy.clip, ClipSection) else None
    votes = voting.votes_plan(recipe, method) if method.kind == "votes" else None
    plan = build_plan(
        clients=clients,
        cohort=cohort.size,
        sampling=cohort.sampling,
        max_cohort=cohort.max,
        min_cohort=cohort.min if votes is None else voting.min_cohort(recipe, method, clients),
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
        separation=cohort.separation,
        noise=privacy.noise.kind,
        bands=privacy.noise.bands,
        momentum=recipe.server.momentum if method.optimizer is None else 0.0,
        selection=selection_of(recipe),
        share=recipe.start.share if recipe.start else None,
    )
    plan = noising.settle(plan)
    if votes is not None:
        plan = voting.with_draws(plan, votes, recipe)
    if privacy.budget is not None:
        plan = replace(plan, budget=privacy.budget if plan.budget is None else min(privacy.budget, plan.budget))
    return plan


def selection_of(recipe: Recipe) -> Selection | None:
    """What the recipe's run is selected by, if it is."""
    asked = recipe.privacy.selection
    return None if asked is None else Selection.of(asked.model_dump())


def local_of(recipe: Recipe, method: Algorithm, data: FederatedData) -> Local:
    """Local training's public numbers; epochs become K = E·⌈n̄/batch⌉ for every client."""
    local = recipe.local
    momentum = method.momentum if local.momentum is None else local.momentum
    if method.fixed_momentum and momentum != method.momentum:
        raise wrong(
            "local.momentum",
            momentum,
            f"{method.momentum:g} for {method.name}",
            hint=f"Reason: {method.fixed_momentum}.",
        )
    if local.optimizer != "sgd":
        if method.fixed_momentum:
            hint = f"Reason: {method.fixed_momentum}."
            raise wrong("local.optimizer", local.optimizer, f"sgd for {method.name}", hint=hint)
        if local.momentum is not None:
            raise wrong("local.momentum", local.momentum, f"no value with local.optimizer {local.optimizer}")
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
        optimizer=local.optimizer,
        schedule=local.schedule,
        warmup=local.warmup,
        rounds=recipe.rounds,
    )


def clip_of(recipe: Recipe, method: Algorithm, layout: Layout) -> tuple[Clip, float]:
    """The clip and its first threshold C; non-private twins clip nothing."""
    if not method.private:
        return clipping.whole_vector(math.inf), math.inf
    given = recipe.privacy.clip
    if method.scale is not None:
        if isinstance(given, ClipSection) and (given.kind != "constant" or given.value is None):
            raise wrong("privacy.clip", given.kind, f"one number for {method.name}, which scales messages itself")
        threshold = float(given.value if isinstance(given, ClipSection) else given)  # type: ignore[arg-type]
        return clipping.MethodScale(method.scale), clipping.whole_vector(threshold).threshold
    if not isinstance(given, ClipSection):
        return clipping.whole_vector(given), float(given)
    if given.kind == "adaptive":
        if given.initial is None:
            raise wrong("privacy.clip.initial", "nothing", "a number > 0 to start from")
        return clipping.adaptive(given.initial, given.quantile), given.initial
    if given.kind == "per-tensor":
        if given.values is None:
            raise wrong(
                "privacy.clip.values",
                "nothing",
                f"one number, or {layout.shared * method.vectors} (one for each shared tensor)",
            )
        per_tensor = clipping.per_tensor(given.values, layout.shared * method.vectors)
        return per_tensor, per_tensor.threshold
    if given.kind == "constant" and given.value is not None:
        return clipping.whole_vector(given.value), given.value
    raise wrong("privacy.clip", given.kind, "a number > 0, {kind: adaptive, …} or {kind: per-tensor, values: …}")


def server_of(recipe: Recipe, method: Algorithm) -> ServerSection:
    """The recipe's server section with its defaults filled in; ``optimizer`` stays None where the method has its own.

    Raises:
        InputError: settings of another optimiser beside the method's own, or a round whose noise it could not know.
    """
    server = recipe.server
    if method.optimizer is None:
        return server.filled()
    if method.kind != "update":
        raise wrong("algorithm.optimizer", f"one of its own with kind {method.kind}", "kind update")
    if published.applies(recipe, method):
        hint = "Its server optimizer reckons with the noise of the sound round."
        raise wrong("privacy.protocol", "published", f"sound for {method.name}", hint=hint)
    for key in ("optimizer", "momentum", "beta1", "beta2", "tau"):
        found = getattr(server, key)
        if found != ServerSection.model_fields[key].default:
            hint = "The method brings its own server optimizer, made for its noise."
            raise wrong(f"server.{key}", found, f"nothing for {method.name}", hint=hint)
    return server.model_copy(update={"lr": method.server_lr if server.lr is None else server.lr})


def optimizer_of(recipe: Recipe, method: Algorithm) -> Callable[[MeanView], Optimizer]:
    """The server optimiser of each round: the method's own, or the recipe's, which asks nothing of the noise."""
    server = server_of(recipe, method).model_dump()
    if method.optimizer is not None:
        return functools.partial(method.optimizer, server["lr"])
    options = ("momentum",) if server["optimizer"] == "sgd" else ("beta1", "beta2", "tau")
    made = optimizer(server["optimizer"], **{key: server[key] for key in ("lr", *options)})
    return lambda view: made


def average_of(recipe: Recipe, method: Algorithm) -> Average | None:
    """What is released of the server's iterates; None: the last one."""
    server = recipe.server
    if server.average == "none":
        return None
    if published.applies(recipe, method):
        raise wrong("server.average", f"{server.average} with privacy.protocol: published", "none")
    return TailAverage(recipe.rounds) if server.average == "tail" else MovingAverage(server.decay)


def weighted(recipe: Recipe, method: Algorithm) -> bool:
    """Sample weights make the sensitivity depend on data sizes: only non-private twins may use them."""
    if recipe.server.weights == "samples" and method.private:
        raise wrong(
            "server.weights",
            "samples",
            "uniform for a private method",
            hint="Weights n_i make the sensitivity depend on data sizes.",
        )
    return recipe.server.weights == "samples"
