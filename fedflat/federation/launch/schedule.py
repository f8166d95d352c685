"""What ``fedflat deploy`` does where a recipe says nothing of who takes part: a schedule instead of secret coins."""

from __future__ import annotations

from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection
from fedflat.core.types import Algorithm
from fedflat.privacy.accounting.factorisation import MOST_BANDED_ROUNDS

WHY = (
    "No cohort.sampling is named: a deployment's cohorts are seen by who runs the SuperLink or watches the network, "
    "and ε by secret coins does not hold towards them. So clients take turns by a public schedule (min-separation, "
    "{apart} rounds apart) with correlated noise ({kind}), whose ε hides nobody. For secret coins: "
    "-o cohort.sampling=poisson."
)
KEPT = "No cohort.sampling is named: secret coins (poisson) are kept, since {why}."


def scheduled(recipe: Recipe, method: Algorithm, trust: str) -> tuple[Recipe, str]:
    """The recipe to deploy, given one that names no sampling, and a sentence to say; none for a method without privacy.

    A schedule takes the place of secret coins where it is proven, and where σ follows from a target ε: a given σ is
    that of a round, which it would not be.
    """
    if not method.private:
        return recipe, ""
    why = _unfit(recipe, method, trust)
    if why:
        return recipe, KEPT.format(why=why)
    kind = "banded" if recipe.rounds <= MOST_BANDED_ROUNDS else "toeplitz"
    apart = int((recipe.data.clients or 0) / recipe.cohort.size)
    dump = recipe.dump()
    dump["cohort"] |= {"sampling": "min-separation", "separation": apart}
    dump["privacy"]["noise"] = {"kind": kind}
    return Recipe.of(dump), WHY.format(apart=apart, kind=kind)


def _unfit(recipe: Recipe, method: Algorithm, trust: str) -> str:
    """Why a schedule with correlated noise cannot stand in; empty where it can."""
    privacy, cohort, clip = recipe.privacy, recipe.cohort, recipe.privacy.clip
    if privacy.epsilon is None:
        return "privacy.noise_multiplier is that of a round, and no privacy.epsilon is given"
    if trust != "central" or method.kind != "update":
        return f"a schedule is proven for trust: central and plain Gaussian noise, not for {method.name}, {trust}"
    if recipe.start is not None:
        return "correlated noise has no account beside a start's own noise"
    if isinstance(clip, ClipSection) and clip.kind == "adaptive":
        return "correlated noise needs one constant clip"
    if privacy.noise.kind != "independent" or privacy.noise_cohort is not None or cohort.min or cohort.max:
        return "other keys of the recipe belong to secret coins"
    if cohort.size != int(cohort.size) or 2 * cohort.size > (recipe.data.clients or 0):
        return "the cohort is no whole number of at most half of the clients"
    return ""
