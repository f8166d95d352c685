"""Choose how strongly each method of a paper's table leaves DP-FedAvg, by one rule for all of them.

A method's own numbers say how far it leaves DP-FedAvg: SAM's ρ, BLUR's λ, the share of coordinates that is left out,
the weight of the last direction, the smoothing. ``choose`` tries all numbers of a method together, at their printed
strength, at a fifth and at a twenty-fifth of it. A trial trains on nine tenths of the clients, with a seed that is not
reported, and is scored by its accuracy on the examples of the others. Test data are not looked at. What the clients'
data tell by the choice is in no ε: this is for comparing methods, not for a release (``fedflat tune`` is).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.leaderboard_cell import HELD_BACK, TUNING
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.inputs import lacking
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core.checks import RunError, wrong
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.scales import SCALES
from fedflat.report import metrics
from fedflat.report.progress import RunEvent
from fedflat.simulation.experiment import compare, data_for
from fedflat.simulation.settings import expand

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


def tuned(
    plan: Outcome, folder: Path, seeds: int | None = None, processes: int | None = None,
    update: Callable[[RunEvent], None] | None = None,
) -> tuple[Outcome, dict[tuple[str, str], Chosen]]:  # fmt: skip
    """Return a planned table with each method at the strength that trials chose, and the choices by column and method.

    Personal methods stay as they are printed.
    """
    absent = lacking([row.recipe for row in plan.rows if row.recipe is not None])
    recipes = {
        row.cell.run: row.recipe
        for row in plan.rows
        if row.recipe is not None and row.recipe.data.dataset not in absent and not row.cell.personal
    }
    count = seeds or SCALES[plan.scale].seeds or plan.table.seeds
    reported = {one.seed + number for one in recipes.values() for number in range(count)}
    found = dict(zip(recipes, choose(list(recipes.values()), sorted(reported), folder, processes, update)))
    chosen = {key: one for key, one in found.items() if one is not None}

    def moved(row: Row) -> Row:
        one = chosen.get(row.cell.run)
        return row if one is None or row.recipe is None else replace(row, recipe=at(row.recipe, one.strength))

    return replace(plan, rows=tuple(map(moved, plan.rows))), chosen


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
