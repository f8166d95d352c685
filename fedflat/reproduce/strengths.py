"""One rule that tunes every method alike: how far it leaves DP-FedAvg, tried on training clients that are held back.

A method's own numbers say how far it leaves DP-FedAvg: SAM's ρ, BLUR's λ, the share of coordinates that is left out,
the weight of the last direction, the smoothing. All numbers of a method are tried together, at their printed strength,
at a fifth and at a twenty-fifth of it. A trial trains on nine tenths of the clients, with a seed that is not reported,
and is scored by its accuracy on the examples of the others. Test data are not looked at.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.plans import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import durable
from fedflat.data.clients import FederatedData
from fedflat.simulation.experiment_worker import data_for
from fedflat.simulation.run import run

STRENGTHS = (1.0, 0.2, 0.04)
"""Shares of the printed strength that are tried."""
SEED = 100
"""Of the trials: partition, cohorts, noise and batches."""
HELD_BACK = 0.1
"""Share of the clients that trials are scored on."""
AT_ZERO, AT_ONE = ("rho", "lam", "sparsity", "smoothing"), ("keep", "beta")
"""Options of methods, by the value at which the method is DP-FedAvg."""
FILE = "strengths.json"
"""In the folder of the runs: what trials found, so that none is done twice."""


@dataclass(frozen=True)
class Chosen:
    """The strength that trials chose for one method: accuracy in per cent on held-back clients, by strength."""

    options: Mapping[str, float]
    strength: float
    tried: Mapping[float, float]

    def sentence(self, method: str) -> str:
        """The choice in words."""
        values = ", ".join(f"{name} {value:g}" for name, value in self.options.items())
        found = ", ".join(f"{accuracy:.1f} % at {share:g}" for share, accuracy in self.tried.items())
        return f"{method}: {self.strength:g} of the printed strength ({values}); held-back clients: {found}"


def options_of(recipe: Recipe, strength: float) -> dict[str, float]:
    """The method's own numbers at a share of their strength; empty for a method that has none.

    >>> recipe = Recipe.of({"rounds": 1, "algorithm": {"name": "dp-fedsam-topk", "rho": 0.5, "keep": 0.4}})
    >>> options_of(recipe, 0.2)
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
    """The recipe at a share of its method's strength; another name, so that its runs have a folder of their own."""
    if strength == 1.0:
        return recipe
    texts = [f"algorithm.{name}={value}" for name, value in options_of(recipe, strength).items()]
    return Recipe.of(recipe, [*texts, f"name={recipe.name}_strength-{strength:g}"])


def trial(recipe: Recipe) -> float:
    """Test accuracy, in per cent, on clients that are held back from the run."""
    torch.set_num_threads(1)
    tried = Recipe.of(recipe, [f"seed={SEED}", f"evaluation.every={recipe.rounds}"])
    data = _apart(data_for(tried))
    if tried.data.clients is not None:
        tried = Recipe.of(tried, [f"data.clients={data.clients}"])
    return round(100 * float(run(tried, data=data).history[-1]["test_accuracy"]), 2)


def _apart(data: FederatedData) -> FederatedData:
    """The federation without its last clients, whose examples are the test set."""
    kept = data.clients - max(1, round(HELD_BACK * data.clients))
    rows = torch.from_numpy(np.concatenate(data.parts[kept:]))
    return replace(
        data, parts=data.parts[:kept], held_back=data.held_back[:kept], names=data.names[:kept],
        test_inputs=data.inputs[rows], test_targets=data.targets[rows],
    )  # fmt: skip


def choose(recipes: Sequence[Recipe], folder: Path, processes: int | None = None) -> list[Chosen | None]:
    """The strength for each recipe (the printed one of equals), or None for a method without numbers of its own.

    processes: trials at a time (default: the number of cores). Each is told of on stderr; those that are done are kept
    in ``folder``.
    """
    known: dict[str, float] = json.loads(path.read_text()) if (path := folder / FILE).is_file() else {}
    wanted = {_key(one): one for recipe in recipes if options_of(recipe, 1.0) for one in _tried(recipe).values()}
    todo = {key: recipe for key, recipe in wanted.items() if key not in known}
    if todo:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(todo), processes or os.cpu_count() or 1), context) as pool:
            running = {pool.submit(trial, recipe): key for key, recipe in todo.items()}
            try:
                for done in as_completed(running):
                    key = running[done]
                    known[key] = done.result()
                    durable.replace(path, json.dumps(known, indent=1) + "\n")
                    of = todo[key].algorithm
                    said = ", ".join(f"{name} {value}" for name, value in of.options.items()) or "as printed"
                    print(f"Trial: {of.name}, {said}: {known[key]:.1f} %", file=sys.stderr, flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [_best(recipe, known) for recipe in recipes]


def _tried(recipe: Recipe) -> dict[float, Recipe]:
    return {strength: at(recipe, strength) for strength in STRENGTHS}


def _best(recipe: Recipe, known: Mapping[str, float]) -> Chosen | None:
    if not options_of(recipe, 1.0):
        return None
    tried = {strength: known[_key(one)] for strength, one in _tried(recipe).items()}
    best = max(STRENGTHS, key=lambda strength: tried[strength])
    return Chosen(options_of(recipe, best), best, tried)


def _key(recipe: Recipe) -> str:
    """Names a trial: everything that it follows from."""
    found: dict[str, Any] = recipe.dump() | {"name": "", "seed": SEED, "evaluation": None}
    return f"{recipe.algorithm.name} {hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]}"
