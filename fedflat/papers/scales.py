"""Make recipes smaller, and choose how strongly a method leaves DP-FedAvg.

A scale shows that methods run and how they rank; the paper's numbers take the full size. A method's own numbers say how
far it leaves DP-FedAvg: SAM's ρ, BLUR's λ, the share of coordinates that is left out, the weight of the last direction,
the smoothing. ``choose`` tries all numbers of a method together, at their printed strength, at a fifth and at a
twenty-fifth of it. A trial trains on nine tenths of the clients, with a seed that is not reported, and is scored by its
accuracy on the examples of the others. Test data are not looked at. What the clients' data tell by the choice is in no
ε: this is for comparing methods, not for a release (``fedflat tune`` is).
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.plans import algorithm_of, plan_of
from fedflat.config.recipe import Recipe
from fedflat.core.checks import RunError, one_of, wrong
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData
from fedflat.papers.board_runs import HELD_BACK, TUNING
from fedflat.privacy.accounting.epsilon import default_delta
from fedflat.report import metrics
from fedflat.report.groups import flatten
from fedflat.report.progress import RunEvent
from fedflat.simulation.experiment import compare, data_for
from fedflat.simulation.settings import expand

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
    found = recipe.dump()
    before = recipe.data.clients or scale.clients
    share = recipe.cohort.size / before
    # ddgauss aborts a round with too few shares, which costs δ: its cohorts must hardly ever be small.
    least = max(scale.least_cohort, SHARES) if algorithm_of(recipe).kind == "ddgauss" else scale.least_cohort
    clients = min(before, max(scale.clients, math.ceil(least / share)))
    size = share * clients if recipe.cohort.sampling == "poisson" else float(math.ceil(share * clients))
    found["data"].update(
        clients=clients, max_examples=_least(recipe.data.max_examples, scale.examples),
        max_test=_least(recipe.data.max_test, scale.test),
    )  # fmt: skip
    found["cohort"]["size"] = int(size) if size == int(size) else size
    found["rounds"] = min(recipe.rounds, scale.rounds or recipe.rounds)
    found["privacy"].update(_noise(recipe, size, before))
    batch = min(recipe.local.batch_size, scale.batch or recipe.local.batch_size)
    found["local"].update(batch_size=batch, **_training(recipe, scale, batch / (scale.examples or 1) * clients))
    found["model"] = dict(scale.models.get(recipe.model.name, found["model"]))
    if recipe.model.name == "roberta-base":
        found["data"]["tokenizer"] = None
    found["evaluation"]["every"] = max(1, found["rounds"] // 10)
    if found["algorithm"].get("queries"):
        found["algorithm"].update(queries=scale.queries, student_epochs=2)
    found["name"] = f"{recipe.name}_{name}"
    return Recipe.of(found, where=found["name"])


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
    sigma = sigma_of(recipe)
    found = {"noise_multiplier": sigma, "epsilon": None, "delta": privacy.delta or default_delta(clients)}
    if sigma == 0:
        return found
    if method.kind == "ddgauss" or privacy.protocol == "published":
        return {**found, "noise_multiplier": sigma * size / recipe.cohort.size}
    return {**found, "noise_cohort": recipe.cohort.size}


def sigma_of(recipe: Recipe) -> float:
    """Return σ of a recipe at full scale: as given, or what its ε needs over all of its rounds.

    ddgauss takes that of the Gaussian sum at the same ε, and a released procedure what its paper's formula asks for.
    """
    if recipe.privacy.noise_multiplier is not None:
        return recipe.privacy.noise_multiplier
    found = recipe.dump()
    options = {"queries", "labels_per_draw"} if algorithm_of(recipe).kind == "votes" else set()
    kept = {key: value for key, value in found["algorithm"].items() if key in options}
    method = {"name": "ae-dpfl", **kept} if options else {"name": "dp-fedavg"}
    plain = {"name": "run", "rounds": found["rounds"], "data": {"clients": found["data"]["clients"]}, "model": "mlp"}
    plain |= {"algorithm": method, "cohort": found["cohort"], "privacy": found["privacy"]}
    return _calibrated(Recipe.of(plain).model_dump_json(), recipe.data.clients or 1)


@lru_cache(maxsize=128)
def _calibrated(text: str, clients: int) -> float:
    recipe = Recipe.model_validate_json(text)
    return plan_of(recipe, algorithm_of(recipe), clients).noise_multiplier


def _least(given: int | None, limit: int | None) -> int | None:
    return min((n for n in (given, limit) if n is not None), default=None)


def differences(full: Recipe, run: Recipe) -> list[str]:
    """Return what ``run`` changes of ``full``, as ``key 500 → 100``; names, seeds and evaluation left out."""
    old, new = flatten(full.dump()), flatten(run.dump())
    keys = [key for key in old | new if not key.startswith(("name", "evaluation.", "engine."))]
    return [f"{key} {_text(old.get(key))} → {_text(new.get(key))}" for key in keys if old.get(key) != new.get(key)]


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


STRENGTHS = (1.0, 0.2, 0.04)
"""Shares of the printed strength that are tried."""
AT_ZERO, AT_ONE = ("rho", "lam", "sparsity", "smoothing"), ("keep", "beta")
"""Options of methods, by the value at which they do nothing."""
TRIALS = "trials"
"""Their folder, beside the runs."""


@dataclass(frozen=True)
class Chosen:
    """The strength that trials chose for one method.

    tried: accuracy in per cent on held-back clients, by strength. seconds: of the trials' rounds.
    """

    options: Mapping[str, float]
    strength: float
    tried: Mapping[float, float]
    seconds: float = field(default=0.0, compare=False)

    def sentence(self, method: str) -> str:
        """Return the choice in words."""
        values = ", ".join(f"{name} {value:g}" for name, value in self.options.items())
        found = ", ".join(f"{accuracy:.1f} % at {share:g}" for share, accuracy in self.tried.items())
        alike = "; no difference, so as printed" if len(set(self.tried.values())) == 1 else ""
        return f"{method}: {self.strength:g} of the printed strength ({values}); held-back clients: {found}{alike}"


def options_of(recipe: Recipe, strength: float) -> dict[str, float]:
    """Return the method's own numbers at a share of their strength; empty for a method that has none.

    >>> private = {"privacy": {"noise_multiplier": 1.0}, "rounds": 1, "model": "mlp"}
    >>> options_of(Recipe.of({"algorithm": {"name": "dp-fedsam-topk", "rho": 0.5, "keep": 0.4}, **private}), 0.2)
    {'rho': 0.1, 'keep': 0.88}
    """
    factory, found = ALGORITHMS.get(recipe.algorithm.name), dict[str, float]()
    if factory is None or algorithm_of(recipe).kind != "update":
        return found
    for name, option in inspect.signature(factory).parameters.items():
        printed = recipe.algorithm.options.get(name, option.default)
        if name in AT_ZERO:
            found[name] = float(f"{printed * strength:.6g}")
        elif name in AT_ONE:
            found[name] = float(f"{1 - (1 - printed) * strength:.6g}")
    return found


def at(recipe: Recipe, strength: float) -> Recipe:
    """Return the recipe at a share of its method's strength; another name, so that its runs have a folder of their
    own."""
    if strength == 1.0:
        return recipe
    texts = [f"algorithm.{name}={value}" for name, value in options_of(recipe, strength).items()]
    return Recipe.of(recipe, [*texts, f"name={recipe.name}_strength-{strength:g}"])


def apart(recipe: Recipe) -> FederatedData:
    """Return a trial's federation: without a tenth of the clients that have examples, which are its test set.

    Raises InputError for fewer than two clients with examples.
    """
    data = data_for(recipe)
    able = [client for client, rows in enumerate(data.parts) if len(rows)]
    if len(able) < 2:
        raise wrong("--tuned", f"{len(able)} clients with examples", "two or more: one is held back from the trials")
    drawn = stream(recipe.seed, "strengths: held back").permutation(able)[: max(1, round(HELD_BACK * len(able)))]
    held = set(drawn.tolist())
    kept = [client for client in range(data.clients) if client not in held]
    rows = torch.from_numpy(np.concatenate([data.parts[client] for client in sorted(held)]))
    return replace(
        data,
        parts=tuple(data.parts[client] for client in kept),
        held_back=tuple(data.held_back[client] for client in kept) if data.held_back else (),
        names=tuple(data.names[client] for client in kept) if data.names else (),
        test_inputs=data.inputs[rows], test_targets=data.targets[rows],
    )  # fmt: skip


def choose(
    recipes: Sequence[Recipe], seeds: Sequence[int], folder: Path, processes: int | None = None,
    update: Callable[[RunEvent], None] | None = None,
) -> list[Chosen | None]:  # fmt: skip
    """Return the strength for each recipe (the printed one of equals), or None for a method without numbers of its own.

    Trials are runs as ``compare`` has them, in a folder of their own under ``folder``. seeds: the reported ones. Raises
    InputError where the trials' seed is among them, and RunError for a trial that failed.
    """
    # A reported seed would have been looked at when the strength was chosen.
    if TUNING in seeds:
        raise wrong("--tuned", f"seed {TUNING} among those that are reported", f"other seeds; the trials have {TUNING}")
    tried = {
        (place, strength): _trial(at(recipe, strength))
        for place, recipe in enumerate(recipes)
        if options_of(recipe, 1.0)
        for strength in STRENGTHS
    }
    if not tried:
        return [None] * len(recipes)
    found = compare(list(tried.values()), (), 1, folder / TRIALS, processes, update, apart)
    for name, why in found.failed.items():
        raise RunError(f"--tuned: the trial {name} failed: {why}")
    settings = expand(list(tried.values()), (), 1)
    runs = {key: metrics.read_run(folder / TRIALS / one.slug / f"seed-{TUNING}") for key, one in zip(tried, settings)}
    accuracy = {key: _accuracy(run) for key, run in runs.items()}
    seconds = {key: metrics.summary(run)["seconds"] for key, run in runs.items()}
    return [
        _best(
            recipe,
            {strength: accuracy[place, strength] for strength in STRENGTHS if (place, strength) in accuracy},
            sum(spent for (of, _), spent in seconds.items() if of == place),
        )
        for place, recipe in enumerate(recipes)
    ]


def _trial(recipe: Recipe) -> Recipe:
    """Return the recipe as it is tried: cohorts are smaller by as much as there are clients fewer, so that q is the
    same.
    """
    clients = recipe.data.clients
    share = 1 - HELD_BACK if clients is None else (clients - max(1, round(HELD_BACK * clients))) / clients
    size = recipe.cohort.size * share
    fewer = size if recipe.cohort.sampling == "poisson" else max(1, int(size))
    return Recipe.of(recipe, [f"seed={TUNING}", f"evaluation.every={recipe.rounds}", f"cohort.size={fewer:.6g}"])


def _accuracy(run: metrics.Run) -> float:
    last = run.metrics[-1:]
    if not last or last[0].get("test_accuracy") is None:
        raise RunError(f"--tuned: {run.path} ended before its last round and has no accuracy")
    return round(100 * float(last[0]["test_accuracy"]), 2)


def _best(recipe: Recipe, tried: Mapping[float, float], seconds: float = 0.0) -> Chosen | None:
    if not tried:
        return None
    best = max(tried, key=lambda strength: tried[strength])
    return Chosen(options_of(recipe, best), best, dict(tried), seconds)
