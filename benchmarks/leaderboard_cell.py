"""Measure a cell of the leaderboard: one rule and one budget for every method, no look at test data.

The key that is tuned is ``server.lr``: a quarter, half, one and two times what the packaged recipe advises (or what a
method with a server optimiser of its own does), and, as long as the best lies at the border, one more step beyond it.
They are tried on a tenth of the *training* examples, held back from all clients, with a seed that is not reported; the
best one (the smaller of equals) is then trained on all of them with the seeds that are, and tested on the test set. A
body's features are computed once for a data set and shared by all of its cells.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fedflat.assembly.inputs import module_of
from fedflat.backends.features import with_features
from fedflat.config.method import algorithm_of, server_of
from fedflat.config.recipe import Recipe
from fedflat.config.sections import Partition
from fedflat.core.checks import wrong
from fedflat.core.loss import CROSS_ENTROPY
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData, Indices
from fedflat.data.partition import partition
from fedflat.data.sources import load
from fedflat.models.representation import Headed
from fedflat.papers.board import Task
from fedflat.pieces.server import PgnDirection
from fedflat.simulation.run import run

TUNING, REPORTED = 100, (0, 1, 2)
"""Seeds of partition, noise and all else: of the trials, and of what is reported."""
HELD_BACK = 0.1
"""Share of the training examples that trials are tested on; of the clients in ``benchmarks/strengths.py``."""
FACTORS = (0.25, 0.5, 1.0, 2.0)
"""What of the advised ``server.lr`` is tried, with the packaged recipe's rounds, clip and local steps."""
BEYOND = 4
"""At most so many more, each twice or half the last, while the best is at the border."""
Told = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """What is measured: task, ε and method (the recipe's ``algorithm`` section). public: where public weights lie."""

    task: Task
    epsilon: float
    method: Mapping[str, Any]
    public: str | None = None

    def recipe(self, seed: int, setting: Mapping[str, Any]) -> Recipe:
        """Return the packaged recipe with the cell's data, ε and method, and one setting."""
        changes = {"seed": seed, "privacy.epsilon": self.epsilon, **self.task.changes(self.public), **setting}
        named = Recipe.load(self.task.recipe).dump() | {"algorithm": dict(self.method)}
        changes = {**changes, "privacy.randomness": "seeded"}
        made = Recipe.of(named, [f"{key}={value}" for key, value in changes.items()])
        return Recipe.of(made, [f"evaluation.every={made.rounds}"])

    def advised(self) -> dict[str, Any]:
        """Return the setting that tuning starts from: the method's own where it has a server optimiser of its own.

        A method that follows its last direction has its momentum in that, and gets none besides. Its clients send β of
        their gradient: the clip is β of the recipe's and the rate 1/β, so that a round's own part is DP-FedAvg's.
        """
        recipe = self.recipe(TUNING, {})
        method = algorithm_of(recipe)
        if method.optimizer is not None:
            return {"server.momentum": 0.0, "server.lr": method.server_lr}
        server = server_of(recipe, method)
        followed, clip = [step.beta for step in method.server if isinstance(step, PgnDirection)], recipe.privacy.clip
        if followed and isinstance(clip, float):
            rate, own = (server.lr or 1.0) / followed[0], clip * followed[0]
            return {"server.momentum": 0.0, "server.lr": float(f"{rate:.3g}"), "privacy.clip": float(f"{own:.3g}")}
        return {"server.lr": server.lr}


@dataclass(frozen=True)
class Examples:
    """A data set's features, and an untrained head for them. natural: whether its clients are those of the data."""

    data: FederatedData
    head: torch.nn.Module
    natural: bool = False

    def federation(self, alpha: float | None, clients: int, seed: int, tuning: bool) -> FederatedData:
        """Return the clients by Dirichlet(alpha), or the natural ones. tuning: of nine tenths, with a tenth that the
        seed draws as test set.
        """
        data = self.data
        known, held = self.apart(seed) if tuning else (np.arange(len(data.targets)), None)
        if self.natural:
            parts = tuple(rows[np.isin(rows, known)] for rows in data.parts)
        else:
            targets = data.targets[torch.from_numpy(known)].numpy()
            found = partition(targets, Partition(kind="dirichlet", alpha=alpha), clients, seed)
            parts = tuple(known[rows] for rows in found)
        if held is not None:
            rows = torch.from_numpy(held)
            data = replace(data, test_inputs=data.inputs[rows], test_targets=data.targets[rows])
        return replace(data, parts=parts)

    def apart(self, seed: int) -> tuple[Indices, Indices]:
        """Return the rows that trials are trained on, and those that are held back from them, both sorted."""
        order = stream(seed, "leaderboard: held back").permutation(len(self.data.targets))
        count = int(HELD_BACK * len(order))
        return np.sort(order[count:]), np.sort(order[:count])


@cache
def examples(task: Task, public: str | None = None) -> Examples:
    """Return the features of a task's data by its recipe's body: computed once, and kept in the cache. Raises
    InputError.
    """
    recipe = Recipe.of(task.recipe, [f"{key}={value}" for key, value in task.changes(public).items()])
    section = recipe.data
    # Which examples share a batch decides the last bits of features: one partition for all cells.
    if task.alpha is not None:
        section = section.model_copy(update={"partition": Partition(kind="iid")})
    loaded = load(section, 0)
    module, _, _ = module_of(recipe, None, loaded, CROSS_ENTROPY)
    found = with_features(loaded, module)
    if found.test_inputs is None:
        raise wrong("leaderboard", task.data, "a data set with a test set")
    head = module
    if isinstance(module, Headed):
        only = module.get_submodule(module.trained.rstrip("."))
        head = only if isinstance(only, torch.nn.Sequential) else torch.nn.Sequential(only)
    # What a cell runs on has no names, preparation or bounds of its own.
    data = FederatedData(
        found.inputs, found.targets, found.parts, (), found.test_inputs, found.test_targets, found.classes, found.name,
        found.vocabulary,
    )  # fmt: skip
    return Examples(data, head, task.alpha is None)


def measure(cell: Cell, known: Examples, told: Told = print) -> dict[str, Any]:
    """Return one row of the leaderboard: the setting that trials chose, and its accuracies on test data for the seeds.

    told: called with a line before and after each run; what a run does is shown where stderr is a terminal.
    """
    advised, tried = cell.advised(), dict[float, float]()

    def trial(rate: float) -> None:
        told(f"{_called(cell)}: trying server.lr {rate:g}")
        tried[rate] = _accuracy(cell, known, TUNING, advised | {"server.lr": rate}, True)[0]
        told(f"{_called(cell)}: server.lr {rate:g} {tried[rate]}")

    for factor in FACTORS:
        trial(factor * advised["server.lr"])
    for _ in range(BEYOND):
        # A best value at the border says that the range was too small.
        best = _best(tried)
        if best not in (min(tried), max(tried)):
            break
        trial(best / 2 if best == min(tried) else best * 2)
    setting = advised | {"server.lr": _best(tried)}
    began = time.monotonic()
    told(f"{_called(cell)}: measuring server.lr {setting['server.lr']:g} with {len(REPORTED)} seeds")
    found = [_accuracy(cell, known, seed, setting, False) for seed in REPORTED]
    seconds = (time.monotonic() - began) / len(found)
    told(f"{_called(cell)}: {[one for one, _ in found]}")
    return {
        "data": cell.task.data, "alpha": cell.task.alpha, "epsilon": cell.epsilon, "method": dict(cell.method),
        "setting": setting, "seeds": list(REPORTED), "accuracy": [one for one, _ in found],
        "proven": max(proven for _, proven in found), "seconds": round(seconds, 1), "prior": cell.task.prior,
        "tried": [[rate, tried[rate]] for rate in sorted(tried)],
    }  # fmt: skip


def _best(tried: Mapping[float, float]) -> float:
    return max(sorted(tried), key=lambda rate: tried[rate])


def _called(cell: Cell) -> str:
    return f"{cell.task.data} {cell.task.alpha} ε {cell.epsilon} {cell.method}"


def _accuracy(cell: Cell, known: Examples, seed: int, setting: Mapping[str, Any], tuning: bool) -> tuple[float, float]:
    """Return the accuracy in per cent after the last round, and the proven ε."""
    recipe = cell.recipe(seed, setting)
    federation = known.federation(cell.task.alpha, int(recipe.data.clients or 0), seed, tuning)
    # Training changes the head, and every cell must begin from the same one.
    result = run(recipe, model=copy.deepcopy(known.head), data=federation)
    return round(100 * result.history[-1]["test_accuracy"], 2), float(result.privacy["proven_epsilon"])
