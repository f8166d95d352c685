"""Where a recipe's noise comes from: default trust model, the round's mechanism, and its account in the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection
from fedflat.core.checks import wrong
from fedflat.core.types import Algorithm, Mechanism
from fedflat.methods.correlated import CorrelatedGridNoise, CorrelatedNoise
from fedflat.methods.ddgauss.mechanism import DistributedDiscreteGaussian, SharedDiscreteNoise
from fedflat.methods.ddgauss.plan import DDGaussPlan
from fedflat.pieces.mechanisms import GaussianNoise
from fedflat.pieces.secure import GridNoise
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.plan import Plan

DISCRETE = (
    "Distributed discrete Gaussian: clipped, rotated, rounded updates with integer noise shares, added modulo 2^bits."
)
SECURE_ROWS = " Its rows are exact samples on a grid of whole numbers."
GRID = "Exact rounded Gaussian noise on the whole-number sum of clipped updates, divided by a public constant."


def trust_of(recipe: Recipe, method: Algorithm) -> str:
    """The recipe's trust model; where it names none, distributed for ddgauss and central for every other method."""
    return recipe.privacy.trust or ("distributed" if method.kind == "ddgauss" else "central")


def check(recipe: Recipe, method: Algorithm) -> None:
    """Refuse combinations of secure noise, trust model, cohorts and method for which there is no proven mechanism.

    Raises:
        InputError: with the reason.
    """
    _check_what_is_kept(recipe, method)
    _check_message(recipe, method)
    trust, discrete = trust_of(recipe, method), method.kind == "ddgauss"
    if discrete and trust != "distributed":
        raise wrong("privacy.trust", trust, f"distributed for {method.name}", hint="Its noise is clients' shares.")
    if recipe.privacy.secure_rng and trust == "distributed" and not discrete:
        hint = "A sum of rounded Gaussian shares has no proven ε; the distributed discrete Gaussian has."
        raise wrong("privacy.secure_rng", True, "false with trust: distributed, or algorithm ddgauss", hint=hint)
    if discrete and recipe.privacy.noise_cohort is not None:
        hint = "The grid is made for the cohort that runs."
        raise wrong("privacy.noise_cohort", recipe.privacy.noise_cohort, f"nothing for {method.name}", hint=hint)


def _check_what_is_kept(recipe: Recipe, method: Algorithm) -> None:
    """What clients keep between rounds: amplification then needs coins that are independent of one another.

    Given the others' coins and randomness, a release is (1 − q)·P₀ + q·E[P₁], however a client's state was made. Where
    the others' places in a cohort depend on its own, that is not so. Local trust and public schedules claim no
    amplification.
    """
    trust, sampling = trust_of(recipe, method), recipe.cohort.sampling
    keeps = "a state" if method.client_state else "personal heads" if method.head is not None else ""
    if not keeps or not method.private:
        return
    if method.client_state and trust == "distributed":
        hint = "Its clients keep a state, moved by what they sent; of a round that is aborted nothing is added."
        raise wrong("privacy.trust", trust, f"central or local for {method.name}", hint=hint)
    sound = recipe.privacy.protocol == "sound" and recipe.privacy.noise_multiplier != 0
    if sound and trust != "local" and sampling not in ("poisson", "full", "min-separation"):
        hint = f"Its clients keep {keeps} between rounds: amplification is proven for independent coins only."
        raise wrong("cohort.sampling", sampling, f"poisson for {method.name}, full or min-separation", hint=hint)


def _check_message(recipe: Recipe, method: Algorithm) -> None:
    """What a message of several vectors, a factor or a state of the method's own does not go with."""
    several = method.vectors > 1 or method.scale is not None or bool(method.client_state)
    if several and method.private and recipe.privacy.protocol == "published":
        raise wrong("privacy.protocol", "published", f"sound for {method.name}")
    if method.vectors < 1 or (method.vectors > 1 and not method.transforms):
        raise wrong("algorithm.vectors", method.vectors, "1, or as many as the last of algorithm.transforms makes")
    names = [state.name for state in method.client_state]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise wrong("algorithm.client_state", ", ".join(map(repr, names)), "different names that are identifiers")
    if method.vectors > 1 and method.mask is not None:
        raise wrong("algorithm.mask", f"a common mask, and {method.vectors} vectors in a message", "one of both")
    if method.scale is not None and not method.private:
        raise wrong("algorithm.scale", f"{method.name}, which is not private", "nothing where nothing is clipped")


def constant_clip(recipe: Recipe) -> float:
    """C of a recipe whose mechanism needs one number for the whole run.

    Raises:
        InputError: the clip is adaptive or per tensor.
    """
    clip = recipe.privacy.clip
    if not isinstance(clip, ClipSection):
        return float(clip)
    if clip.kind != "constant" or clip.value is None:
        raise wrong("privacy.clip", clip.kind, "one number for ddgauss", hint="Its grid is made for one clip.")
    return clip.value


def account_of(recipe: Recipe, method: Algorithm, dimension: int | None) -> DDGaussPlan | None:
    """The plan's own account for ddgauss, None for the Gaussian sum. dimension: d, None while it is not known."""
    if method.kind != "ddgauss":
        return None
    return DDGaussPlan(
        1 if dimension is None else method.vectors * dimension, constant_clip(recipe), **_options(method)
    )


def settle(plan: Plan) -> Plan:
    """The plan with n_max and γ as numbers."""
    return replace(plan, mechanism=plan.mechanism.settled(plan)) if isinstance(plan.mechanism, DDGaussPlan) else plan


def _options(method: Algorithm) -> dict[str, Any]:
    return {name: method.options[name] for name in ("bits", "granularity", "beta") if name in method.options}


def mechanism_of(recipe: Recipe, plan: Plan) -> Mechanism:
    """The noise of a run's rounds, with the law that its plan accounts."""
    if isinstance(plan.mechanism, DDGaussPlan) and plan.private:
        return _discrete(plan, plan.mechanism, recipe)
    if isinstance(plan.mechanism, ScheduledPlan) and plan.mechanism.kind != "independent":
        factor = plan.mechanism.factor
        if recipe.privacy.secure_rng and plan.event_multiplier > 0:
            return CorrelatedGridNoise(plan.std, factor=factor)
        return CorrelatedNoise(plan.std, factor)
    count = plan.count_noise or 0.0
    if recipe.privacy.secure_rng and plan.effective_multiplier > 0:
        return GridNoise(plan.std, plan.trust, count)
    return GaussianNoise(plan.std, plan.trust, float(plan.min_cohort or plan.divisor), count)


def mixed_by(plan: Plan) -> str:
    """Digest of the C that mixes the rounds' noise, "" where nothing does.

    An optimiser makes C, so the same recipe may have another one elsewhere. One Z behind both would be no noise: the
    difference of the releases gives it away.
    """
    own = plan.mechanism
    return own.factor.digest if isinstance(own, ScheduledPlan) and own.kind != "independent" else ""


def _discrete(plan: Plan, account: DDGaussPlan, recipe: Recipe) -> SharedDiscreteNoise:
    numbers = account.account(plan)
    mechanism = DistributedDiscreteGaussian(
        numbers.dimension,
        numbers.clip,
        numbers.noise_multiplier,
        numbers.min_cohort,
        account.n_max(plan),
        numbers.bits,
        numbers.granularity,
        numbers.beta,
    )
    return SharedDiscreteNoise(mechanism, recipe.seed, numbers.n_max, recipe.privacy.secure_rng)


def facts(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """What the privacy statement says of a mechanism that is not float Gaussian noise."""
    if isinstance(plan.mechanism, DDGaussPlan):
        return {"mechanism": DISCRETE}
    if isinstance(plan.mechanism, ScheduledPlan) and plan.mechanism.kind != "independent":
        return {"mechanism": plan.mechanism.sentence + (SECURE_ROWS if recipe.privacy.secure_rng else "")}
    plain = plan.mechanism is None or isinstance(plan.mechanism, ScheduledPlan)
    return {"mechanism": GRID} if recipe.privacy.secure_rng and plain else {}
