"""Build the method, the plan and the public numbers that a recipe asks for."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedflat.algorithms import ALGORITHMS
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.config.sections import PrivacySection, ServerSection
from fedflat.core.checks import nearest, one_of, require, wrong
from fedflat.core.imports import calling, imported
from fedflat.core.params import Layout
from fedflat.core.types import MOMENTUM, Algorithm, Average, Clip, Factory, Local, MeanView, Optimizer
from fedflat.data.clients import FederatedData
from fedflat.data.preparation import DATASETS
from fedflat.methods import noise as noising
from fedflat.methods import shares, votes
from fedflat.pieces import clipping
from fedflat.pieces.server import Adaptive, MovingAverage, Sgd, TailAverage
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.tuning import Selection

NOT_HELD = (
    "the same model=… and clients=… given again in Python, for example fedflat.run(recipe, model, clients, out=…, "
    "resume=True)"
)

SIMULATED = "privacy.epsilon and privacy.budget are those of the simulated larger system, not of the run that happens."
WEAK = 10
"""The largest ε that Ponomareva et al. (2023, section 5.2) call a reasonable guarantee."""


def algorithm_of(recipe: Recipe, algorithm: Algorithm | Factory | None = None) -> Algorithm:
    """Return the algorithm a recipe names, with its options checked against the factory's signature."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    name, options = recipe.algorithm.name, recipe.algorithm.options
    # `source` is what fedflat wrote into a run's recipe, no option of the method.
    source = options.pop("source", None) if options.get("source") == GIVEN else None
    if algorithm is not None:
        if not callable(algorithm):
            hint = "A method's name stands in the recipe." if isinstance(algorithm, str) else ""
            raise wrong("algorithm", algorithm, "an Algorithm, or a function that returns one", hint=hint)
        factory = algorithm
    elif source == GIVEN:
        raise wrong("algorithm.name", f"{name}, {GIVEN}: the run's folder does not hold the method", NOT_HELD)
    elif ":" in name or name.endswith(".py"):
        factory = imported("algorithm.name", name)
    else:
        factory = ALGORITHMS[one_of("algorithm.name", name, ALGORITHMS)]
    _check_options(name, options, factory)
    with calling(f"algorithm {name}"):
        method = factory(**options)
    returned = f"{name}, which returned {type(method).__name__}"
    require(isinstance(method, Algorithm), "algorithm.name", returned, "a function that returns Algorithm")
    return method


def _check_options(name: str, options: Mapping[str, Any], factory: Factory) -> None:
    """Raise InputError for an option that a method does not take, or takes as another kind of value."""
    keys = inspect.signature(factory).parameters
    for key in options:
        allowed = f"for {name}: {', '.join(keys) or 'no key'}"
        require(key in keys, f"algorithm.{key}", key, allowed, hint=nearest(key, keys))
    for parameter in keys.values():
        value = options.get(parameter.name, parameter.default)
        # YAML's 1 and 0 would pass as truth values, and mean numbers elsewhere.
        if isinstance(parameter.default, bool) and not isinstance(value, bool):
            raise wrong(f"algorithm.{parameter.name}", value, "true or false")
        # fedflat's own methods check their numbers, with the range.
        if ":" in name and isinstance(parameter.default, (int, float)) and isinstance(value, str):
            raise wrong(f"algorithm.{parameter.name}", value, "a number")


def plan_of(recipe: Recipe, method: Algorithm, clients: int, dimension: int | None = None) -> Plan:
    """Return the privacy plan of a recipe with M = ``clients``; ``dimension`` d, where the model is known, is for
    ddgauss.
    """
    noising.check(recipe, method)
    if shares.applies(recipe, method):
        return shares.plan_of(recipe, method, clients)
    privacy, cohort = recipe.privacy, recipe.cohort
    ballot = votes.account_of(recipe, method) if method.kind == "votes" else None
    plan = build_plan(
        clients=clients, cohort=cohort.size, sampling=cohort.sampling, max_cohort=cohort.max,
        min_cohort=cohort.min, colluders=cohort.colluders, draws=None if ballot is None else ballot.total,
        max_participations=cohort.max_participations, rounds=recipe.rounds, noise_multiplier=privacy.noise_multiplier,
        epsilon=privacy.epsilon, delta=privacy.delta, trust=noising.trust_of(recipe, method),
        accountant=privacy.accountant, noise_cohort=privacy.noise_cohort,
        count_noise=privacy.clipping.count_noise if ballot is None else None,
        adaptive=privacy.clipping.kind == "adaptive" and ballot is None, private=method.private,
        mechanism=ballot or noising.account_of(recipe, method, dimension), separation=cohort.separation,
        noise=privacy.noise.kind, bands=privacy.noise.bands,
        momentum=recipe.server.momentum if method.optimizer is None else 0.0,
        selection=Selection(privacy.selection.mean) if privacy.selection else None,
        evaluation=evaluation_of(recipe, method),
    )  # fmt: skip
    settings = privacy.model_dump(include=IDLE_WITHOUT_PRIVACY, exclude_defaults=True)
    idle = [key for key, value in settings.items() if value != "central"]
    if idle and not plan.private:
        warning = f"privacy: {', '.join(idle)} without effect, for {method.name} has no privacy."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    plan = noising.with_fixed_numbers(plan)
    if ballot is not None:  # the draws are those of the non-private twin too
        warned = (*plan.warnings, *([votes.UNUSED_CLIP] if recipe.privacy.clip != PrivacySection().clip else []))
        plan = replace(plan, mechanism=ballot, warnings=warned)
    if privacy.budget is not None:
        plan = replace(plan, budget=privacy.budget if plan.budget is None else min(privacy.budget, plan.budget))
    # By the budget, which a settled recipe has in epsilon's place.
    if plan.budget is not None and (plan.noise_cohort is not None or plan.budget > WEAK):
        warning = SIMULATED if plan.noise_cohort is not None else f"ε of more than {WEAK} is a weak guarantee or none."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    return plan


def evaluation_of(recipe: Recipe, method: Algorithm) -> float | None:
    """Return the share of a round's privacy that the private evaluation takes; None where there is none.

    Raises:
        InputError: it has no account beside something else that the recipe asks for.
    """
    if not recipe.evaluation.private:
        return None
    privacy, trust = recipe.privacy, noising.trust_of(recipe, method)
    clip = privacy.clipping.kind
    hint = "evaluation.private: true needs it."
    plain = method.private and method.kind == "update"
    for holds, where, value, allowed in (
        (plain, "algorithm.name", method.name, "a private method whose clients send updates"),
        (trust == "central", "privacy.trust", trust, "central"),
        (privacy.protocol == "sound", "privacy.protocol", privacy.protocol, "sound"),
        (privacy.noise.kind == "independent", "privacy.noise", privacy.noise.kind, "independent"),
        (not privacy.secure_rng, "privacy.secure_rng", True, "false"),
        (clip != "adaptive", "privacy.clip", clip, "one constant clip"),
        (recipe.task == "classification", "task", recipe.task, "classification"),
    ):
        require(holds, where, value, allowed, hint=hint)
    return recipe.evaluation.share


def local_of(recipe: Recipe, method: Algorithm, data: FederatedData) -> Local:
    """Local training's public numbers, the same for every client."""
    local = recipe.local
    momentum = method.momentum if local.momentum is None else local.momentum
    if momentum is None:
        momentum = MOMENTUM
        if method.name not in ALGORITHMS and local.optimizer == "sgd":
            problem = f"local.momentum: {momentum}, for neither the recipe nor {method.name} says one"
            warnings.warn(f"{problem}; Algorithm(momentum=0.0) if its equations divide by K·η", stacklevel=2)
    reason, free = f"Reason: {method.fixed_momentum}.", not method.fixed_momentum
    fixed = f"{method.momentum or 0.0:g} for {method.name}"
    require(free or momentum == method.momentum, "local.momentum", momentum, fixed, hint=reason)
    if local.optimizer != "sgd":
        require(free, "local.optimizer", local.optimizer, f"sgd for {method.name}", hint=reason)
        nothing = f"no value with local.optimizer {local.optimizer}"
        require(local.momentum is None, "local.momentum", local.momentum, nothing)
    epochs = local.epochs if shares.applies(recipe, method) else None
    settled = {"steps": steps_of(recipe, method, data), "momentum": momentum, "epochs": epochs}
    return Local(**{**local.model_dump(), **settled, "rounds": recipe.rounds})


IDLE_WITHOUT_PRIVACY = {"budget", "trust", "noise_cohort", "secure_rng"}
"""Keys of ``privacy`` that a method without privacy leaves unread, beside those that its plan names."""
STEPS = 10
"""Local steps where neither the recipe nor a public number of examples says how many."""


def steps_of(recipe: Recipe, method: Algorithm, data: FederatedData) -> int:
    """K, the steps of every client: the recipe's, or E·⌈n̄/batch⌉ with a public n̄, which no client's size moves.

    Raises:
        InputError: there are epochs, and no public number of examples.
    """
    local = recipe.local
    if local.steps is not None:
        return local.steps
    public = public_examples(recipe, data)
    # Without a guarantee, or in a published procedure, the mean size may be looked at.
    if public is None and (not method.private or shares.applies(recipe, method)):
        public = data.examples_per_client
    if public is None and local.epochs is None:
        return STEPS
    if public is None:
        allowed = "local.steps; or epochs with data.examples_per_client or data.max_per_client, public numbers"
        raise wrong("local.epochs", local.epochs, allowed, hint=THEIRS)
    return (local.epochs or 1) * math.ceil(public / local.batch_size)


PREFIX = "random-process/"
"""What the name of a data set that is a random process begins with."""
PUBLISHED = frozenset(DATASETS) | {source.hub for source in DATASETS.values() if source.hub}
"""Names of the data sets that anybody can have."""
THEIRS = "How many examples clients have is theirs, and what follows from it would be released."


def is_proxy(dataset: str) -> bool:
    """Return whether a recipe's ``data.dataset`` is a random process."""
    return dataset.startswith(PREFIX)


def is_public(dataset: str) -> bool:
    """Return whether a recipe's ``data.dataset`` names a published data set or a random process, nobody's own data."""
    return dataset in PUBLISHED or is_proxy(dataset)


def public_examples(recipe: Recipe, data: FederatedData) -> int | None:
    """Return n̄, the public number of a client's examples: stated, a published data set's average, or the bound."""
    if recipe.data.examples_per_client is not None:
        return recipe.data.examples_per_client
    return data.examples_per_client if is_public(recipe.data.dataset) else data.most


def clip_of(recipe: Recipe, method: Algorithm, layout: Layout) -> tuple[Clip, float]:
    """Return the clip and its first threshold C; non-private twins clip nothing."""
    if not method.private:
        return clipping.whole_vector(math.inf), math.inf
    setting = recipe.privacy.clipping
    if method.scale is not None:
        if setting.value is None:
            raise wrong("privacy.clip", setting.kind, f"one number for {method.name}, which scales messages itself")
        return clipping.MethodScale(method.scale), setting.value
    if setting.initial is not None:
        return clipping.Adaptive(setting.initial, setting.quantile), setting.initial
    if setting.values is not None:
        per_tensor = clipping.per_tensor(setting.values, layout.shared * method.vectors)
        return per_tensor, per_tensor.threshold
    if setting.value is None:
        allowed = "a number > 0, {kind: adaptive, initial: …} or {kind: per-tensor, values: …}"
        raise wrong("privacy.clip", setting.kind, allowed)
    return clipping.whole_vector(setting.value), setting.value


def server_of(recipe: Recipe, method: Algorithm) -> ServerSection:
    """Return the recipe's server section with its defaults filled in; ``optimizer`` stays None where the method has its
    own.

    Raises:
        InputError: settings of another optimiser beside the method's own, or a round whose noise it could not know.
    """
    server = recipe.server
    if method.optimizer is None:
        return server.filled()
    require(method.kind == "update", "algorithm.optimizer", f"one of its own with kind {method.kind}", "kind update")
    hint = "Its server optimizer reckons with the noise of the sound round."
    require(not shares.applies(recipe, method), "privacy.protocol", "published", f"sound for {method.name}", hint=hint)
    for key in ("optimizer", "momentum", "beta1", "beta2", "tau"):
        value, default = getattr(server, key), ServerSection.model_fields[key].default
        hint = "The method brings its own server optimizer, made for its noise."
        require(value == default, f"server.{key}", value, f"nothing for {method.name}", hint=hint)
    return server.model_copy(update={"lr": method.server_lr if server.lr is None else server.lr})


def optimizer_of(recipe: Recipe, method: Algorithm) -> Callable[[MeanView], Optimizer]:
    """Return the server optimiser of each round: the method's own, or the recipe's, which asks nothing of the noise."""
    server = server_of(recipe, method).model_dump()
    if method.optimizer is not None:
        return functools.partial(method.optimizer, server["lr"])
    if server["optimizer"] == "sgd":
        return lambda view: Sgd(server["lr"], server["momentum"])
    return lambda view: Adaptive(server["optimizer"], *(server[key] for key in ("lr", "beta1", "beta2", "tau")))


def average_of(recipe: Recipe, method: Algorithm) -> Average | None:
    """Return what is released of the server's iterates; None: the last one."""
    server, keep = recipe.server, recipe.evaluation.keep
    beside = method.name if server.average == "none" else "server.average"
    plain = server.average == "none" and method.head is None and method.kind != "votes"
    require(keep == "last" or plain, "evaluation.keep", f"{keep} with {beside}", "last")
    if server.average == "none":
        return None
    average = f"{server.average} with privacy.protocol: published"
    require(not shares.applies(recipe, method), "server.average", average, "none")
    return TailAverage(recipe.rounds) if server.average == "tail" else MovingAverage(server.decay)


def weighted(recipe: Recipe, method: Algorithm) -> bool:
    """Sample weights make the sensitivity depend on data sizes: only non-private twins may use them."""
    samples, hint = recipe.server.weights == "samples", "Weights n_i make the sensitivity depend on data sizes."
    require(not samples or not method.private, "server.weights", "samples", "uniform for a private method", hint=hint)
    return samples
