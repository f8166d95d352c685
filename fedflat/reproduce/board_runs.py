"""How a cell of the leaderboard is measured: one rule and one budget for every method, and no look at test data.

Settings are tried on a tenth of the *training* examples, held back from all clients, with a seed that is not reported;
the best one (the earlier of equals) is then trained on all of them with the seeds that are, and tested on the test set.
A body's features are computed once for a data set and shared by all of its cells.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.assembly.inputs import module_of
from fedflat.backends.features import with_features
from fedflat.config.recipe import Recipe
from fedflat.core.checks import wrong
from fedflat.core.loss import CROSS_ENTROPY
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData
from fedflat.data.partition import partition
from fedflat.simulation.run import run

TUNING, REPORTED = 100, (0, 1, 2)
"""Seeds of partition, noise and all else: of the trials, and of what is reported."""
HELD_BACK = 0.1
"""Share of the training examples that trials are tested on."""
Settings = Sequence[Mapping[str, Any]]
SETTINGS: Settings = [{"server.lr": rate} for rate in (50, 100, 200, 400)]
"""What is tried of a method: four values of one key, with the packaged recipe's rounds and clip."""


@dataclass(frozen=True)
class Cell:
    """What is measured: data set (as its packaged recipe's name has it), Dirichlet alpha, ε and method.

    method: the recipe's ``algorithm`` section. settings: what is tried, as overrides by dotted key.
    """

    data: str
    alpha: float
    epsilon: float
    method: Mapping[str, Any]
    settings: Settings

    def recipe(self, seed: int, setting: Mapping[str, Any]) -> Recipe:
        """The packaged recipe with the cell's data, ε and method, and one setting."""
        changes = {"seed": seed, "data.partition.alpha": self.alpha, "privacy.epsilon": self.epsilon, **setting}
        named = Recipe.load(f"{self.data}-representation").dump() | {"algorithm": dict(self.method)}
        made = Recipe.of(named, [f"{key}={value}" for key, value in changes.items()])
        return Recipe.of(made, [f"evaluation.every={made.rounds}"])


@dataclass(frozen=True)
class Examples:
    """Features and targets of a data set's training and test examples, and an untrained head for them."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    name: str
    head: torch.nn.Module

    def federation(self, alpha: float, clients: int, seed: int, tuning: bool) -> FederatedData:
        """Clients by Dirichlet(alpha). tuning: of nine tenths, with a tenth that the seed draws as test set."""
        known, test, test_targets = np.arange(len(self.targets)), self.test_inputs, self.test_targets
        if tuning:
            order = stream(seed, "leaderboard: held back").permutation(len(known))
            count = int(HELD_BACK * len(order))
            known, held = np.sort(order[count:]), torch.from_numpy(np.sort(order[:count]))
            test, test_targets = self.inputs[held], self.targets[held]
        targets = self.targets[torch.from_numpy(known)]
        parts = partition(targets.numpy(), {"kind": "dirichlet", "alpha": alpha}, clients, seed, None)
        parts = tuple(known[rows] for rows in parts)
        return FederatedData(
            self.inputs, self.targets, parts, (), test, test_targets, self.classes, self.name,
        )  # fmt: skip


@cache
def examples(data: str) -> Examples:
    """Features of a data set by its packaged recipe's body: computed once, and kept in the cache."""
    from fedflat.data.sources import load

    recipe = Recipe.load(f"{data}-representation")
    alike = {"kind": "iid"}  # the bits of features follow from who shares a batch: nobody's partition but one
    images = load({"dataset": recipe.data.dataset, "partition": alike, "clients": recipe.data.clients}, 0)
    module, _ = module_of(recipe, None, images, CROSS_ENTROPY)
    found = with_features(images, module)
    if found.test_inputs is None or found.test_targets is None:
        raise wrong("leaderboard --data", data, "a data set with a test set")
    head = torch.nn.Sequential(*module.linear_layers())  # type: ignore[operator]
    return Examples(found.inputs, found.targets, found.test_inputs, found.test_targets, found.classes, found.name, head)


def measure(cell: Cell, known: Examples, told: Callable[[str], None] = print) -> dict[str, Any]:
    """One row of the leaderboard: the setting that trials chose, and what it gave."""
    tried = [_accuracy(cell, known, TUNING, setting, True)[0] for setting in cell.settings]
    best = max(range(len(tried)), key=lambda place: (tried[place], -place))
    told(f"{cell.data} {cell.alpha} ε {cell.epsilon} {cell.method['name']}: tried {tried}")
    setting = cell.settings[best]
    return report(cell, known, setting, told) | {"tried": tried, "settings": list(map(dict, cell.settings))}


def report(
    cell: Cell, known: Examples, setting: Mapping[str, Any], told: Callable[[str], None] = print
) -> dict[str, Any]:
    """The row of a setting that was chosen: accuracies on test data for the reported seeds."""
    began = time.monotonic()
    found = [_accuracy(cell, known, seed, setting, False) for seed in REPORTED]
    seconds = (time.monotonic() - began) / len(found)
    told(f"{cell.data} {cell.alpha} ε {cell.epsilon} {cell.method['name']}: {[one for one, _ in found]}")
    return {
        "data": cell.data, "alpha": cell.alpha, "epsilon": cell.epsilon, "method": dict(cell.method),
        "setting": dict(setting), "seeds": list(REPORTED), "accuracy": [one for one, _ in found],
        "proven": max(proven for _, proven in found), "seconds": round(seconds, 1),
    }  # fmt: skip


def _accuracy(cell: Cell, known: Examples, seed: int, setting: Mapping[str, Any], tuning: bool) -> tuple[float, float]:
    """Accuracy in per cent after the last round, and the proven ε."""
    recipe = cell.recipe(seed, setting)
    federation = known.federation(cell.alpha, int(recipe.data.clients or 0), seed, tuning)
    result = run(recipe, model=copy.deepcopy(known.head), data=federation)
    return round(100 * result.history[-1]["test_accuracy"], 2), float(result.privacy["proven_epsilon"])


__all__ = ["REPORTED", "TUNING", "Cell", "Examples", "examples", "measure", "report"]
