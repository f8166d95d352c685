"""Make recipes smaller: a scale shows that methods run and how they rank; the paper's numbers take the full size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fedflat.assembly.plans import plan_of
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import one_of
from fedflat.privacy.accounting.epsilon import default_delta
from fedflat.report.groups import flatten

SHARES = 30
"""Expected cohort that ddgauss needs at least."""


@dataclass(frozen=True)
class Scale:
    """At most so many of everything; None keeps the recipe's. models: what stands for the paper's networks, at scale
    ``small`` the nearest network of the same kind that a processor trains in seconds a round.

    least_cohort: clients are as many as this expected cohort needs at the paper's q.
    """

    clients: int | None = None
    least_cohort: int = 1
    rounds: int | None = None
    steps: int | None = None
    batch: int | None = None
    examples: int | None = None
    test: int | None = None
    queries: int | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int | None = None


_DATA = yaml.safe_load(Path(__file__).with_name("scales.yaml").read_text(encoding="utf-8"))
SCALES = {name: Scale(**entry) for name, entry in _DATA.items()}


def scaled(recipe: Recipe, name: str) -> Recipe:
    """``recipe`` at a scale: q, C, δ, the rates, and σ/m, the noise in each coordinate of the mean over C, are kept.

    So the noise of a round is that of the paper's cohort m (``privacy.noise_cohort``), and where the paper names an ε,
    σ is the one that all of its rounds need. The smaller network has fewer coordinates. Raises InputError for a scale
    that does not exist.
    """
    scale = SCALES[one_of("--scale", name, SCALES)]
    if scale.clients is None:
        return recipe
    small = recipe.dump()
    before = recipe.data.clients or scale.clients
    share = recipe.cohort.size / before
    # ddgauss aborts a round with too few shares, which costs δ: its cohorts must hardly ever be small.
    least = max(scale.least_cohort, SHARES) if algorithm_of(recipe).kind == "ddgauss" else scale.least_cohort
    clients = min(before, max(scale.clients, math.ceil(least / share)))
    size = share * clients if recipe.cohort.sampling == "poisson" else float(math.ceil(share * clients))
    small["data"].update(
        clients=clients, max_examples=_least(recipe.data.max_examples, scale.examples),
        max_test=_least(recipe.data.max_test, scale.test),
    )  # fmt: skip
    small["cohort"]["size"] = int(size) if size == int(size) else size
    small["rounds"] = min(recipe.rounds, scale.rounds or recipe.rounds)
    small["privacy"].update(_noise(recipe, size, before))
    batch = min(recipe.local.batch_size, scale.batch or recipe.local.batch_size)
    small["local"].update(batch_size=batch, **_training(recipe, scale, batch / (scale.examples or 1) * clients))
    small["model"] = dict(scale.models.get(recipe.model.name, small["model"]))
    if recipe.model.name == "roberta-base":
        small["data"]["tokenizer"] = None
    small["evaluation"]["every"] = max(1, small["rounds"] // 10)
    if small["algorithm"].get("queries"):
        small["algorithm"].update(queries=scale.queries, student_epochs=2)
    small["name"] = f"{recipe.name}_{name}"
    return Recipe.of(small, where=small["name"])


def _training(recipe: Recipe, scale: Scale, share: float) -> dict[str, Any]:
    """Return the steps, or epochs where a released procedure's steps follow each client's data (docs/specification.md,
    item 6).

    share: of a client's examples that one batch has. Voters train once in a run, and so keep their steps.
    """
    voters = algorithm_of(recipe).kind == "votes" and recipe.local.steps is not None
    steps = recipe.local.steps if voters else _least(recipe.local.steps, scale.steps)
    if recipe.privacy.protocol != "published" or recipe.local.epochs is None or steps is None:
        return {"steps": steps, "epochs": None}
    return {"steps": None, "epochs": max(1, round(steps * share))}


def _noise(recipe: Recipe, size: float, clients: int) -> dict[str, Any]:
    """Return the paper's σ and δ, with the noise of its cohort in each coordinate of the mean.

    A recipe says so by ``noise_cohort``; ddgauss, whose grid is made for the cohort that runs, and released procedures
    take no such key: there σ itself is smaller, and no larger system is simulated.
    """
    method, privacy = algorithm_of(recipe), recipe.privacy
    if not method.private:
        return {}
    sigma, delta = sigma_of(recipe), privacy.delta or default_delta(clients)
    if method.kind == "ddgauss" or privacy.protocol == "published":
        return {"noise_multiplier": sigma * size / recipe.cohort.size, "epsilon": None, "delta": delta}
    cohort = recipe.cohort.size if sigma else None
    return {"noise_multiplier": sigma, "epsilon": None, "delta": delta, "noise_cohort": cohort}


def sigma_of(recipe: Recipe) -> float:
    """Return σ of a recipe at full scale: as given, or what its ε needs over all of its rounds.

    ddgauss takes that of the Gaussian sum at the same ε, and a released procedure what its paper's formula asks for.
    """
    if recipe.privacy.noise_multiplier is not None:
        return recipe.privacy.noise_multiplier
    votes = algorithm_of(recipe).kind == "votes"
    return _calibrated(bare(recipe, recipe.dump()["algorithm"] if votes else {"name": "dp-fedavg"}).model_dump_json())


@lru_cache(maxsize=128)
def _calibrated(text: str) -> float:
    recipe = Recipe.model_validate_json(text)
    return plan_of(recipe, algorithm_of(recipe), recipe.data.clients or 1).noise_multiplier


def bare(recipe: Recipe, algorithm: Mapping[str, Any]) -> Recipe:
    """Return what an account asks of a recipe, for another method: recipes that share an account become equal."""
    asked = {key: value for key, value in recipe.dump().items() if key in ("rounds", "cohort", "privacy", "server")}
    data = {"clients": recipe.data.clients}
    return Recipe.of({**asked, "name": "run", "data": data, "model": "mlp", "algorithm": dict(algorithm)})


def _least(value: int | None, limit: int | None) -> int | None:
    return min((n for n in (value, limit) if n is not None), default=None)


def differences(full: Recipe, run: Recipe) -> list[str]:
    """Return what ``run`` changes of ``full``, as ``key 500 → 100``; names, seeds and evaluation left out."""
    old, new = flatten(full.dump()), flatten(run.dump())
    keys = [key for key in old | new if not key.startswith(("name", "evaluation.", "engine."))]
    return [f"{key} {_text(old.get(key))} → {_text(new.get(key))}" for key in keys if old.get(key) != new.get(key)]


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
