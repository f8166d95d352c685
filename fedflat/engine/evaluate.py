"""Evaluate weights on public test data and on clients' held-back data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import seeded_torch
from fedflat.data.clients import FederatedData
from fedflat.engine.device import exact, out_of_memory
from fedflat.engine.problem import ModuleProblem

Metric = Any
"""(outputs, targets) of the test set -> a number; or an object as torchmetrics has them."""
MOST = 8
"""Batches evaluated at once, at most: each holds its layers' outputs."""

BATCH = 500
"""Examples of a test pass where the recipe says nothing: a test set of 10,000 in twenty passes."""
QUANTILES = {"min": 0.0, "0.05": 0.05, "0.25": 0.25, "0.5": 0.5, "0.75": 0.75, "0.95": 0.95, "max": 1.0}
"""What is shown of a distribution over clients: its ends, its middle, and the bands that the report draws."""


@dataclass(frozen=True)
class Scores:
    """Loss and accuracy of each example ``(N,)``."""

    loss: Tensor
    accuracy: Tensor

    def mean(self) -> tuple[float, float]:
        """Return the mean loss and mean accuracy over the examples that were scored."""
        return float(self.loss.mean()), float(self.accuracy.mean())


def scores(
    problem: ModuleProblem, weights: Tensor, inputs: Tensor, targets: Tensor, batch: int = BATCH, threads: int = 1
) -> Scores:
    """Return the loss and accuracy of every example at ``weights`` ``(D,)``, eval mode, no gradient.

    threads: as many batches at once, each by one thread; the numbers do not depend on it.
    """
    device, starts = problem.device, range(0, len(inputs), batch)
    problem.bind(weights.to(device))
    several = device.type == "cpu" and len(starts) > 1
    modules = problem.twins(min(threads, MOST, len(starts))) if several else [problem.module]

    def share(number: int) -> list[list[Tensor]]:
        """Score every n-th batch with one of n modules."""
        module, found = modules[number].eval(), []
        with torch.no_grad():
            for start in starts[number :: len(modules)]:
                rows = slice(start, start + batch)
                outputs = problem.logits(inputs[rows].to(device), module)
                found.append([each.cpu() for each in problem.objective(outputs, targets[rows].to(device))])
        return found

    try:
        # A module may draw in eval mode too: with a shared generator each owner's draws would follow the others'.
        with seeded_torch(0, "evaluation"), exact(device), problem.evaluating():
            if len(modules) == 1:
                shares = [share(0)]
            else:
                with ThreadPoolExecutor(len(modules), initializer=torch.set_num_threads, initargs=(1,)) as pool:
                    shares = list(pool.map(share, range(len(modules))))
    except RuntimeError as error:
        # A GPU's memory holds training too.
        if device.type == "cpu" or batch == 1 or not out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return scores(problem, weights, inputs, targets, batch // 2)
    losses, right = zip(*(shares[i % len(modules)][i // len(modules)] for i in range(len(starts))))
    return Scores(torch.cat(losses), torch.cat(right))


def outputs_of(problem: ModuleProblem, weights: Tensor, inputs: Tensor, batch: int = BATCH) -> Tensor:
    """Return the module's outputs ``(N, ...)`` on the processor at ``weights`` ``(D,)``, eval mode: what metrics are
    given.
    """
    device = problem.device
    problem.bind(weights.to(device))
    with exact(device), problem.evaluating(), torch.no_grad(), seeded_torch(0, "evaluation"):
        return torch.cat([problem.logits(some.to(device), problem.module).cpu() for some in inputs.split(batch)])


def measured(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return one number: of a function ``(outputs, targets)``, or of an object with ``reset``, ``update`` and
    ``compute``.
    """
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        metric.reset()
        metric.update(outputs, targets)
        return float(metric.compute())
    return float(metric(outputs, targets))


def class_accuracy(found: Scores, targets: Tensor) -> list[float | None]:
    """Return the accuracy of each class of the public test data, up to the largest there, which tells nothing of
    clients' classes; None for a class without examples, empty for sequence targets.
    """
    if targets.dim() > 1:
        return []
    targets = targets.cpu()
    counts = torch.bincount(targets)
    right = torch.bincount(targets, weights=found.accuracy.double())
    return [float(r / c) if c else None for r, c in zip(right, counts)]


def client_accuracies(
    problem: ModuleProblem, data: FederatedData, weights_of: Callable[[int], Tensor], clients: Sequence[int]
) -> np.ndarray:
    """Return the accuracy of each client on its held-back data, at the weights that ``weights_of`` gives for it; loss
    where the task has no accuracy.
    """
    which = 1 if problem.objective.scored else 0
    found = []
    for client in clients:
        rows = torch.from_numpy(data.held_back[client]).to(data.inputs.device)
        # A copy of its own: what a module writes into its weights must not reach the next client.
        own = weights_of(client).clone()
        found.append(scores(problem, own, data.inputs[rows], data.targets[rows]).mean()[which])
    return np.array(found)


STEPS = 2.0**20
"""Steps of a client's accuracy in a private evaluation: whole numbers of them add up exactly, in any order."""


def cohort_scores(problem: ModuleProblem, data: FederatedData, weights: Tensor, cohort: Sequence[int]) -> np.ndarray:
    """Return Σ(a_i − ½, ½) over a cohort, float64 ``(2,)``: a_i is client i's accuracy on what it holds back.

    A client without such examples adds nothing, every other a vector of L2 norm ≤ 1/√2, whatever its data: an accuracy
    that is no number counts as ½.
    """
    there = [int(client) for client in cohort if len(data.held_back[client])]
    accuracies = np.nan_to_num(client_accuracies(problem, data, lambda client: weights, there), nan=0.5)
    centred = np.rint((accuracies.clip(0, 1) - 0.5) * STEPS) / STEPS
    return np.array([centred.sum(), 0.5 * len(there)])


def spread(accuracies: np.ndarray) -> dict[str, float]:
    """Return the quantiles of the clients' accuracies: who is served worst."""
    return {name: float(np.quantile(accuracies, q)) for name, q in QUANTILES.items()}
