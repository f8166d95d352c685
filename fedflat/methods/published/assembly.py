"""``privacy.protocol: published``: the pieces of a sound run swapped for those of a paper's released procedure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection
from fedflat.core.checks import wrong
from fedflat.core.papers import CITED
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, Clip
from fedflat.engine.parts import Parts
from fedflat.methods.published.accounting import Published, paper_of, published_plan, with_tensors
from fedflat.methods.published.shares import NoiseShares, RealisedMean
from fedflat.pieces import clipping
from fedflat.pieces.transforms import AddBackDirection, TopK
from fedflat.privacy.plan import Plan


def applies(recipe: Recipe, method: Algorithm) -> bool:
    """Whether a published procedure is asked for; a method without privacy has no other protocol than its own."""
    return recipe.privacy.protocol == "published" and method.private


def plan_of(recipe: Recipe, method: Algorithm, clients: int) -> Plan:
    """The plan of the paper's procedure; refuses what no paper's released procedure has."""
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
    """The constant clip C of the paper's procedure; InputError for a clip of another kind."""
    given = recipe.privacy.clip
    if not isinstance(given, ClipSection):
        return float(given)
    if given.kind == "constant" and given.value is not None:
        return given.value
    hint = "Median clipping is that of Liu et al. 2025." if given.kind == "median" else ""
    raise wrong("privacy.clip", given.kind, "a number > 0 in this published procedure", hint=hint)


def clip_of(recipe: Recipe, plan: Plan, layout: Layout) -> tuple[Clip, float]:
    """The paper's clip and its threshold C (infinite where each client takes its own)."""
    paper = _mechanism(plan).paper
    if paper == "002":
        return clipping.PublishedMedian(), math.inf
    threshold = threshold_of(recipe)
    return (
        clipping.whole_vector(threshold) if paper == "004" else clipping.PublishedPerTensor(layout.shared)
    ), threshold


def parts_of(parts: Parts) -> Parts:
    """The same parts with the paper's own order of clip, noise and mask, its weights and its denominator."""
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
    """What the statement needs: the claimed and the proven ε after ``rounds`` rounds, and the reasons."""
    published = _mechanism(plan)
    return {
        "claimed": published.claimed(plan, rounds),
        "proven": plan.epsilon(rounds),
        "reasons": published.reasons(plan, rounds),
    }


def facts(plan: Plan) -> dict[str, Any]:
    """Facts for the statement: which items apply, and the procedure in a sentence."""
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
    """What a settled recipe says differently: the paper, its cohorts, and epochs that clients count themselves."""
    paper = _mechanism(plan).paper
    local: dict[str, Any] = {} if epochs is None else {"steps": None, "epochs": epochs}
    return {
        "privacy": {"published": paper},
        "cohort": {"sampling": "poisson" if paper == "004" else "fixed"},
        "local": local,
    }


def _mechanism(plan: Plan) -> Published:
    if not isinstance(plan.mechanism, Published):
        raise TypeError("not the plan of a published procedure")
    return plan.mechanism
