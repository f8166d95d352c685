"""Turn recipes of AE-DPFL and of the published protocols into jobs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedflat.config.recipe import Recipe
from fedflat.config.sections import PrivacySection, ServerSection
from fedflat.core.checks import wrong
from fedflat.core.cohorts import make_sampler
from fedflat.core.papers import CITED
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, Clip
from fedflat.data.clients import FederatedData
from fedflat.data.public import HELD_OUT, TEST, public_examples
from fedflat.engine.job import Job
from fedflat.engine.round import RoundParts
from fedflat.methods.noise import trust_of
from fedflat.methods.plans import VotesPlan
from fedflat.methods.published import Published, paper_of, published_plan, with_tensors
from fedflat.methods.shares import NoiseShares, RealisedMean
from fedflat.methods.votes import Student, VoteClip, VoteNoise, Voters, take
from fedflat.pieces import clipping
from fedflat.pieces.mechanisms import GaussianNoise, gaussian
from fedflat.pieces.transforms import AddBackDirection, TopK
from fedflat.privacy.accounting.epsilon import default_delta
from fedflat.privacy.plan import Plan
from fedflat.privacy.trust import default_min_cohort

MECHANISM = "Gaussian noise on the sum of one-hot votes for the labels of public examples, one event per cohort draw."
UNUSED_CLIP = "privacy.clip is not used by votes: a message of one-hot votes has the fixed norm √labels_per_draw."


@dataclass(frozen=True)
class LabelQueries:
    """The public numbers of the votes: queries in all, labels per cohort draw Q, and the student's epochs."""

    queries: int
    labels: int
    epochs: int

    @property
    def draws(self) -> int:
        """Cohort draws of the whole run."""
        return self.queries // self.labels


def label_queries_of(recipe: Recipe, method: Algorithm) -> LabelQueries:
    """Return the votes a recipe asks for: ``queries`` labels in all (default: one draw a round), spread over its
    rounds.

    Raises:
        InputError: ``queries`` is no multiple of Q, or too few for one draw a round.
    """
    labels, asked = int(method.options["labels_per_draw"]), method.options["queries"]
    queries = recipe.rounds * labels if asked is None else int(asked)
    least = recipe.rounds * labels
    if queries < least or queries % labels:
        allowed = f"a multiple of labels_per_draw = {labels}, at least {least} (a cohort draw in each round)"
        raise wrong("algorithm.queries", queries, allowed)
    return LabelQueries(queries, labels, int(method.options["student_epochs"]))


def votes_plan(recipe: Recipe, method: Algorithm) -> VotesPlan:
    """Return the account of the votes that a recipe's plan carries."""
    asked = label_queries_of(recipe, method)
    # Under local trust a ballot is always there, so a neighbour changes it.
    replaced = recipe.cohort.sampling == "fixed" or trust_of(recipe, method) == "local"
    return VotesPlan(asked.labels, asked.draws, "replace-one" if replaced else "add-remove")


def min_cohort(recipe: Recipe, method: Algorithm, clients: int) -> int | None:
    """Return the minimum cohort of trust distributed; by default the largest whose aborts, over all draws, cost ≤
    δ/100.
    """
    cohort, privacy = recipe.cohort, recipe.privacy
    if trust_of(recipe, method) != "distributed" or cohort.min is not None:
        return cohort.min
    sampler = make_sampler(cohort.sampling, clients, cohort.size, cohort.max)
    delta = default_delta(clients) if privacy.delta is None else privacy.delta
    return default_min_cohort(sampler, label_queries_of(recipe, method).draws, delta, cohort.colluders)


def with_draws(plan: Plan, votes: VotesPlan, recipe: Recipe) -> Plan:
    """Return the plan with its draws (those of the non-private twin too), and a warning where the clip is not used.

    Raises:
        InputError: settings that mean nothing for votes.
    """
    _check(recipe)
    unused = recipe.privacy.clip != PrivacySection().clip
    return replace(plan, mechanism=votes, warnings=(*plan.warnings, *([UNUSED_CLIP] if unused else [])))


def votes_facts(plan: Plan) -> dict[str, object]:
    """Return what the privacy statement says of the mechanism; nothing for methods that send updates."""
    if not isinstance(plan.mechanism, VotesPlan):
        return {}
    return {"mechanism": MECHANISM, "clip": f"of one vote 1, of a draw's votes {math.sqrt(plan.mechanism.labels):.4g}"}


def _check(recipe: Recipe) -> None:
    if recipe.server.filled() != ServerSection().filled():
        raise wrong("server", "settings", "none for ae-dpfl", hint="Its server step is the fit of a student.")
    if recipe.privacy.secure_rng:
        raise wrong("privacy.secure_rng", True, "false for ae-dpfl")
    if recipe.privacy.protocol != "sound":
        raise wrong("privacy.protocol", recipe.privacy.protocol, "sound for ae-dpfl")


def split(recipe: Recipe, method: Algorithm, data: FederatedData, given: bool) -> tuple[FederatedData, Tensor]:
    """Return the federation without the queries, and the queries ``(N, …)``.

    given: the clients were given in Python, so that their examples may not be made public; ``public`` then is ``test``
    by default.
    """
    if data.targets.dim() > 1:
        raise wrong("data.dataset", data.name, "examples with one label each for ae-dpfl")
    source = method.options["public"] or (TEST if given else HELD_OUT)
    queries = label_queries_of(recipe, method).queries
    return public_examples(data, str(source), queries, recipe.seed, None if given else recipe.data.dataset)


def with_votes(job: Job, recipe: Recipe, queries: Tensor) -> Job:
    """Return the same job with the parts that votes need: clip, noise, back end, server step."""
    parts, data, asked = job.parts, job.data, label_queries_of(recipe, job.parts.algorithm)
    plan, classes, threshold = parts.plan, data.classes, math.sqrt(asked.labels)
    # Every client and the student begin at w^0, so votes depend on data and seed only.
    first, queries = job.initial_weights[: parts.layout.dimension], queries.to(job.problem.device)
    student = Student(job.problem, parts.local, queries, first, classes, asked.epochs, job.seed)
    added = GaussianNoise(plan.std, plan.trust, float(plan.min_cohort or plan.divisor))
    std = functools.partial(added.total_std, threshold)
    noise = VoteNoise(plan.draws, asked.labels * classes, std, plan.releases, gaussian)
    method, clip = replace(parts.algorithm, server=(student,)), VoteClip(asked.labels)
    voting = replace(parts, algorithm=method, clip=clip, mechanism=noise, optimizer=lambda view: take)
    voters = Voters(job.problem, parts.local, data, job.seed, first, queries, asked.labels, classes)
    return replace(job, parts=voting, backend=voters, threshold=threshold)


def applies(recipe: Recipe, method: Algorithm) -> bool:
    """Return whether a published procedure is asked for; a method without privacy has no other protocol than its
    own."""
    return recipe.privacy.protocol == "published" and method.private


def plan_of(recipe: Recipe, method: Algorithm, clients: int) -> Plan:
    """Return the plan of the paper's procedure; refuses what no paper's released procedure has."""
    privacy, cohort = recipe.privacy, recipe.cohort
    paper = paper_of(recipe.algorithm.name, privacy.published)
    if method.kind != "update":
        raise wrong("privacy.protocol", f"published for {method.name}", "sound")
    for where, found in (
        ("privacy.trust", privacy.trust if privacy.trust in ("distributed", "local") else None),
        ("privacy.secure_rng", privacy.secure_rng or None),
        ("privacy.noise_cohort", privacy.noise_cohort),
        ("privacy.selection", None if privacy.selection is None else "a selection"),
        ("cohort.max", cohort.max),
        ("cohort.min", cohort.min),
        ("cohort.max_participations", cohort.max_participations),
        ("cohort.separation", cohort.separation),
        ("privacy.noise.kind", None if privacy.noise.kind == "independent" else privacy.noise.kind),
    ):
        if found is not None:
            raise wrong(where, found, "its default with privacy.protocol: published")
    if cohort.sampling not in ("poisson", "fixed") or (paper == "004" and cohort.sampling != "poisson"):
        allowed = "poisson" if paper == "004" else "fixed (drawn from the round number)"
        raise wrong("cohort.sampling", cohort.sampling, f"{allowed} in the procedure of {CITED[paper]}")
    plan = published_plan(
        paper,
        clients=clients,
        cohort=cohort.size,
        rounds=recipe.rounds,
        noise_multiplier=privacy.noise_multiplier,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        clip=None if paper == "002" else threshold_of(recipe),
        epochs=recipe.local.epochs is not None,
    )
    return plan if privacy.budget is None else replace(plan, budget=privacy.budget)


def threshold_of(recipe: Recipe) -> float:
    """Return the constant clip C of the paper's procedure; InputError for a clip of another kind."""
    given = recipe.privacy.clipping
    if given.value is not None:
        return given.value
    hint = "Median clipping is that of Liu et al. 2025." if given.kind == "median" else ""
    raise wrong("privacy.clip", given.kind, "a number > 0 in this published procedure", hint=hint)


def clip_of(recipe: Recipe, plan: Plan, layout: Layout) -> tuple[Clip, float]:
    """Return the paper's clip and its threshold C (infinite where each client takes its own)."""
    paper = _mechanism(plan).paper
    if paper == "002":
        return clipping.PublishedMedian(), math.inf
    threshold = threshold_of(recipe)
    if paper == "004":
        return clipping.whole_vector(threshold), threshold
    return clipping.PublishedPerTensor(layout.shared), threshold


def parts_of(parts: RoundParts) -> RoundParts:
    """Return the same parts with the paper's own order of clip, noise and mask, its weights and its denominator."""
    plan = with_tensors(parts.plan, parts.layout.shared)
    published = _mechanism(plan)
    if published.paper == "004":
        return replace(parts, plan=plan, mechanism=RealisedMean(parts.mechanism))
    method, mask = parts.algorithm, None
    if 3 in published.items:
        mask = next((t for t in method.transforms if isinstance(t, TopK)), None)
        method = replace(method, transforms=tuple(t for t in method.transforms if t is not mask))
    beta = next((t.beta for t in method.transforms if isinstance(t, AddBackDirection)), None)
    shares = NoiseShares(plan.std, plan.divisor, 4 in published.items, mask, parts.local, beta)
    return replace(parts, plan=plan, algorithm=method, mechanism=shares)


def stated(plan: Plan, rounds: int) -> dict[str, Any]:
    """Return what the statement needs: the claimed and the proven ε after ``rounds`` rounds, and the reasons."""
    published = _mechanism(plan)
    claimed, reasons = published.claimed(plan, rounds), published.reasons(plan, rounds)
    return {"claimed": claimed, "proven": plan.epsilon(rounds), "reasons": reasons}


def published_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts for the statement: which items apply, and the procedure in a sentence."""
    published = _mechanism(plan)
    if published.paper == "004":
        text = "Each client adds N(0, σ²C²/|P_t|) to its clipped update; the mean divides by the realised cohort |P_t|."
    else:
        own = "its own median tensor norm" if 2 in published.items else "C"
        mean = "weights n_i/Σn_j" if 4 in published.items else "a constant denominator"
        masked = ", then masks it," if 3 in published.items else ""
        text = (
            f"Each client clips every tensor to {own}, adds its share N(0, σ²C²/m) of the noise{masked} and sends "
            f"that; the mean takes {mean}."
        )
    source = f"The procedure released by {CITED[published.paper]}."
    return {"paper_items": list(published.items), "mechanism": f"{source} {text}"}


def settled(plan: Plan, epochs: int | None) -> dict[str, dict[str, Any]]:
    """Return what a settled recipe says differently: the paper, its cohorts, and epochs that clients count
    themselves."""
    paper = _mechanism(plan).paper
    local: dict[str, Any] = {} if epochs is None else {"steps": None, "epochs": epochs}
    cohort = {"sampling": "poisson" if paper == "004" else "fixed"}
    return {"privacy": {"published": paper}, "cohort": cohort, "local": local}


def _mechanism(plan: Plan) -> Published:
    if not isinstance(plan.mechanism, Published):
        raise TypeError("not the plan of a published procedure")
    return plan.mechanism
