"""What a recipe for votes (ae-dpfl) becomes: its queries, its plan, and a job of the engine that runs every method."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection, PrivacySection, ServerSection
from fedflat.core.checks import wrong
from fedflat.core.cohorts import make_sampler
from fedflat.core.types import Algorithm
from fedflat.data.clients import FederatedData
from fedflat.data.public import HELD_OUT, TEST, public_examples
from fedflat.engine.train import Job
from fedflat.methods.ae_dpfl.plan import VotesPlan
from fedflat.methods.ae_dpfl.rounds import Student, VoteClip, VoteNoise, Voters, take
from fedflat.methods.noise import trust_of
from fedflat.pieces.mechanisms import GaussianNoise, gaussian
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
    """The votes a recipe asks for: ``queries`` labels in all (default: one draw a round), spread over its rounds.

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
    """The account of the votes that a recipe's plan carries."""
    asked = label_queries_of(recipe, method)
    replaced = recipe.cohort.sampling == "fixed" or trust_of(recipe, method) == "local"
    return VotesPlan(asked.labels, asked.draws, "replace-one" if replaced else "add-remove")


def min_cohort(recipe: Recipe, method: Algorithm, clients: int) -> int | None:
    """The minimum cohort of trust distributed; by default the largest whose aborts, over all draws, cost ≤ δ/100."""
    cohort, privacy = recipe.cohort, recipe.privacy
    if trust_of(recipe, method) != "distributed" or cohort.min is not None:
        return cohort.min
    sampler = make_sampler(cohort.sampling, clients, cohort.size, cohort.max)
    delta = default_delta(clients) if privacy.delta is None else privacy.delta
    return default_min_cohort(sampler, label_queries_of(recipe, method).draws, delta, cohort.colluders)


def with_draws(plan: Plan, votes: VotesPlan, recipe: Recipe) -> Plan:
    """The plan with its draws (those of the non-private twin too), and a warning where the clip is not used.

    Raises:
        InputError: settings that mean nothing for votes.
    """
    _check(recipe)
    clip = recipe.privacy.clip
    unused = isinstance(clip, ClipSection) or clip != PrivacySection().clip
    return replace(plan, mechanism=votes, warnings=(*plan.warnings, *([UNUSED_CLIP] if unused else [])))


def facts(job: Job) -> dict[str, object]:
    """What the privacy statement says of the mechanism; nothing for methods that send updates."""
    if job.parts.algorithm.kind != "votes":
        return {}
    return {"mechanism": MECHANISM, "clip": f"of one vote 1, of a draw's votes {job.threshold:.4g}"}


def _check(recipe: Recipe) -> None:
    if recipe.server.filled() != ServerSection().filled():
        raise wrong("server", "settings", "none for ae-dpfl", hint="Its server step is the fit of a student.")
    if recipe.privacy.secure_rng:
        raise wrong("privacy.secure_rng", True, "false for ae-dpfl")
    if recipe.privacy.protocol != "sound":
        raise wrong("privacy.protocol", recipe.privacy.protocol, "sound for ae-dpfl")


def split(recipe: Recipe, method: Algorithm, data: FederatedData, given: bool) -> tuple[FederatedData, Tensor]:
    """The federation without the queries, and the queries ``(N, …)``.

    given: the clients were given in Python, so that their examples may not be made public; ``public`` then is ``test``
    by default.
    """
    if data.targets.dim() > 1:
        raise wrong("data.dataset", data.name, "examples with one label each for ae-dpfl")
    source = method.options["public"] or (TEST if given else HELD_OUT)
    queries = label_queries_of(recipe, method).queries
    return public_examples(data, str(source), queries, recipe.seed, None if given else recipe.data.dataset)


def with_votes(job: Job, recipe: Recipe, queries: Tensor) -> Job:
    """The same job with the parts that votes need: clip, noise, back end, server step."""
    parts, data, asked = job.parts, job.data, label_queries_of(recipe, job.parts.algorithm)
    plan, classes, threshold = parts.plan, data.classes, math.sqrt(asked.labels)
    first, queries = job.first[: parts.layout.dimension], queries.to(job.problem.device)
    student = Student(job.problem, parts.local, queries, first, classes, asked.epochs, job.seed)
    added = GaussianNoise(plan.std, plan.trust, float(plan.min_cohort or plan.divisor))
    noise = VoteNoise(
        draws=plan.draws,
        size=asked.labels * classes,
        std=lambda count: added.total_std(threshold, count),
        releases=plan.releases,
        sample=gaussian,
    )
    voting = replace(
        parts,
        algorithm=replace(parts.algorithm, server=(student,)),
        clip=VoteClip(asked.labels),
        mechanism=noise,
        optimizer=lambda view: take,
    )
    return replace(
        job,
        parts=voting,
        backend=Voters(job.problem, parts.local, data, job.seed, first, queries, asked.labels, classes),
        threshold=threshold,
    )
