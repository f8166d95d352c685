"""Smaller versions of a recipe: they show that a table's methods run and how they rank, not the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedflat.config.recipe import Recipe
from fedflat.core.checks import one_of


@dataclass(frozen=True)
class Scale:
    """At most so many of everything; None keeps the recipe's. model: the network for images instead of the paper's."""

    clients: int | None = None
    least_cohort: int = 1
    rounds: int | None = None
    steps: int | None = None
    batch: int | None = None
    examples: int | None = None
    test: int | None = None
    queries: int | None = None
    model: Mapping[str, Any] | None = None
    seeds: int | None = None


SCALES: dict[str, Scale] = {
    "smoke": Scale(20, 10, 2, 2, 8, 600, 200, 10, {"name": "mlp", "hidden": 16}, 1),
    "small": Scale(100, 10, 30, 10, 32, 10_000, 2_000, 200, {"name": "cnn-2-layers"}, 3),
    "full": Scale(),
}


def scaled(recipe: Recipe, name: str) -> Recipe:
    """``recipe`` at a scale: q is kept unless the cohort would be too small; σ or ε, clip and rates are kept.

    Raises InputError for a scale that does not exist.
    """
    scale = SCALES[one_of("--scale", name, SCALES)]
    if scale.clients is None:
        return recipe
    found = recipe.dump()
    before = recipe.data.clients or scale.clients
    clients = min(before, scale.clients)
    share = recipe.cohort.size / before
    found["data"].update(
        clients=clients, max_examples=_least(recipe.data.max_examples, scale.examples),
        max_test=_least(recipe.data.max_test, scale.test),
    )  # fmt: skip
    found["cohort"]["size"] = min(clients, max(scale.least_cohort, math.ceil(share * clients)))
    found["rounds"] = min(recipe.rounds, scale.rounds or recipe.rounds)
    batch = min(recipe.local.batch_size, scale.batch or recipe.local.batch_size)
    found["local"].update(steps=_least(recipe.local.steps, scale.steps), epochs=None, batch_size=batch)
    found["model"] = dict(scale.model or found["model"])
    found["evaluation"]["every"] = max(1, found["rounds"] // 10)
    if found["algorithm"].get("queries"):
        found["algorithm"].update(queries=scale.queries, student_epochs=2)
    found["name"] = f"{recipe.name}_{name}"
    return Recipe.of(found, where=found["name"])


def _least(given: int | None, limit: int | None) -> int | None:
    return min((n for n in (given, limit) if n is not None), default=None)


def differences(full: Recipe, run: Recipe) -> list[str]:
    """What ``run`` changes of ``full``, as ``key 500 → 100``; names, seeds and evaluation left out."""
    old, new = dict(_flat(full.dump())), dict(_flat(run.dump()))
    left = ("name", "seed", "evaluation.", "engine.")
    keys = [key for key in dict.fromkeys([*old, *new]) if not key.startswith(left)]
    return [f"{key} {_text(old.get(key))} → {_text(new.get(key))}" for key in keys if old.get(key) != new.get(key)]


def _flat(value: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}{key}.")
        else:
            yield path + key, item


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
