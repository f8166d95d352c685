"""Build the plan and the public numbers that a recipe asks for."""

import math
from dataclasses import replace

from fedflat.config.method import is_published, momentum_of
from fedflat.config.recipe import Recipe
from fedflat.config.sections import PrivacySection
from fedflat.core import Algorithm, Local, require, wrong
from fedflat.data.clients import FederatedData
from fedflat.data.preparation import DATASETS
from fedflat.methods import noise as noising
from fedflat.methods import shares, votes
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.tuning import Selection

SIMULATED = "privacy.epsilon and privacy.budget are those of the simulated larger system, not of the run that happens."
WEAK = 10
"""The largest ε that Ponomareva et al. (2023, section 5.2) call a reasonable guarantee."""


def plan_of(recipe: Recipe, method: Algorithm, clients: int, dimension: int | None = None) -> Plan:
    """Return the privacy plan of a recipe with M = ``clients``; ``dimension`` d, where the model is known, is for
    ddgauss.
    """
    noising.check(recipe, method)
    evaluation = evaluation_of(recipe, method)
    if is_published(recipe, method):
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
        evaluation=evaluation,
    )  # fmt: skip
    plan, warned = noising.with_fixed_numbers(plan), list(plan.warnings)
    settings = privacy.model_dump(include=IDLE_WITHOUT_PRIVACY, exclude_defaults=True)
    idle = [key for key, value in settings.items() if value != "central"]
    if idle and not plan.private:
        warned.append(f"privacy: {', '.join(idle)} without effect, for {method.name} has no privacy.")
    if ballot is not None and privacy.clip != PrivacySection().clip:
        warned.append(votes.UNUSED_CLIP)
    # A settled recipe has its budget in epsilon's place.
    budget = min((most for most in (plan.budget, privacy.budget) if most is not None), default=None)
    if budget is not None and (plan.noise_cohort is not None or budget > WEAK):
        weak = f"ε of more than {WEAK} is a weak guarantee or none."
        warned.append(SIMULATED if plan.noise_cohort is not None else weak)
    # The draws of votes are those of the non-private twin too.
    return replace(plan, mechanism=ballot or plan.mechanism, budget=budget, warnings=tuple(warned))


def evaluation_of(recipe: Recipe, method: Algorithm) -> float | None:
    """Return the share of a round's privacy that the private evaluation takes; None where there is none.

    Raises:
        InputError: it has no account beside something else that the recipe asks for.
    """
    if not recipe.evaluation.private:
        return None
    privacy, hint = recipe.privacy, "evaluation.private: true needs it."
    plain = method.private and method.kind == "update"
    require(plain, "algorithm.name", method.name, "a private method whose clients send updates", hint=hint)
    plain_keys = {"trust", "protocol", "noise", "secure_rng"}
    for key, value in privacy.model_dump(include=plain_keys, exclude_defaults=True).items():
        require(value == "central", f"privacy.{key}", value, "its default", hint=hint)
    require(privacy.clipping.kind != "adaptive", "privacy.clip", "adaptive", "one constant clip", hint=hint)
    require(recipe.task == "classification", "task", recipe.task, "classification", hint=hint)
    return recipe.evaluation.share


def local_of(recipe: Recipe, method: Algorithm, data: FederatedData) -> Local:
    """Local training's public numbers, the same for every client."""
    local = recipe.local
    momentum = momentum_of(recipe, method)
    reason, free = f"Reason: {method.fixed_momentum}.", not method.fixed_momentum
    fixed = f"{method.momentum or 0.0:g} for {method.name}"
    require(free or momentum == method.momentum, "local.momentum", momentum, fixed, hint=reason)
    if local.optimizer != "sgd":
        require(free, "local.optimizer", local.optimizer, f"sgd for {method.name}", hint=reason)
        nothing = f"no value with local.optimizer {local.optimizer}"
        require(local.momentum is None, "local.momentum", local.momentum, nothing)
    epochs = local.epochs if is_published(recipe, method) else None
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
    if public is None and (not method.private or is_published(recipe, method)):
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
