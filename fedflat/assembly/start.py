"""``start: class-statistics``: round 0 is one clipped release of class sums, from which the recipe's method goes on."""

from __future__ import annotations

from dataclasses import replace

from fedflat.algorithms import class_statistics
from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection
from fedflat.core.checks import wrong
from fedflat.core.types import Algorithm
from fedflat.engine.parts import Parts
from fedflat.methods import noise as noising
from fedflat.pieces.clipping import whole_vector
from fedflat.pieces.server import optimizer


def check(recipe: Recipe, method: Algorithm) -> None:
    """Refuse what cannot begin with class sums.

    Raises:
        InputError: with the reason.
    """
    if recipe.start is None:
        return
    if recipe.after is not None:
        raise wrong("start", recipe.start.kind, "nothing with after", hint="It would put the head back to zero.")
    if recipe.privacy.protocol != "sound":
        raise wrong("privacy.protocol", recipe.privacy.protocol, "sound with start")
    if recipe.task != "classification" or recipe.loss is not None:
        found = recipe.task if recipe.loss is None else "a loss of one's own"
        raise wrong("task", found, "classification with start", hint="Its release are sums by class.")
    if method.kind != "update" or method.head is not None or method.zero_head:
        hint = "Such a method averages updates of a model whose last layer is shared, and has steps of its own."
        raise wrong("algorithm.name", f"{method.name} with start", "a method that goes on from there", hint=hint)


def with_start(recipe: Recipe, parts: Parts) -> Parts:
    """The parts with those of round 0, if the recipe begins with class sums."""
    if recipe.start is None:
        return parts
    plan, clip = parts.plan.at_round(0), whole_vector(clip_of(recipe))
    plain = optimizer("sgd", lr=recipe.start.lr, momentum=0.0)
    first = replace(
        parts, algorithm=class_statistics(), plan=plan, clip=clip, mechanism=noising.mechanism_of(recipe, plan),
        optimizer=lambda view: plain, threshold=clip.threshold,
    )  # fmt: skip
    return replace(parts, first=first)


def clip_of(recipe: Recipe) -> float:
    """C of round 0: its own, or the recipe's where that is one number."""
    given = recipe.privacy.clip
    clip = (recipe.start and recipe.start.clip) or (given.value if isinstance(given, ClipSection) else given)
    if clip is None:
        raise wrong("start.clip", "nothing", "a number > 0, since privacy.clip is none")
    return float(clip)
