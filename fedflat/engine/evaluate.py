"""Evaluate weights on public test data and on clients' held-back data."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedflat.core import ClientContext, PersonalState, seeded_torch, stream
from fedflat.core.types import AVERAGE, Algorithm, Broadcast, Phase, RoundState
from fedflat.data.clients import FederatedData
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import train_client
from fedflat.engine.device import exact, sent
from fedflat.engine.job import Job, Metric, Record
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.round import QUANTILES

MOST = 8
"""Batches evaluated at once, at most: each holds its layers' outputs."""

BATCH = 500
"""Examples of a test pass where the recipe says nothing: a test set of 10,000 in twenty passes."""


def scores(
    problem: ModuleProblem, weights: Tensor, inputs: Tensor, targets: Tensor, batch: int = BATCH, threads: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the loss and accuracy ``(N,)`` of every example at ``weights`` ``(D,)``, eval mode, no gradient.

    threads: as many batches at once, each by one thread; the numbers do not depend on it.
    """
    device, starts = problem.device, range(0, len(inputs), batch)
    problem.bind(weights.to(device))
    several = device.type == "cpu" and len(starts) > 1
    modules = problem.twins(min(threads, MOST, len(starts))) if several else [problem.module]

    def share(number: int) -> list[list[Tensor]]:
        """Score every n-th batch with one of n modules."""
        module, results = modules[number].eval(), []
        with torch.no_grad():
            for start in starts[number :: len(modules)]:
                rows = slice(start, start + batch)
                outputs = problem.logits(inputs[rows].to(device), module)
                results.append([values.cpu() for values in problem.objective(outputs, targets[rows].to(device))])
        return results

    # A module may draw in eval mode too: with a shared generator each owner's draws would follow the others'.
    with seeded_torch(0, "evaluation"), exact(device), problem.evaluating():
        if len(modules) == 1:
            shares = [share(0)]
        else:
            with ThreadPoolExecutor(len(modules), initializer=torch.set_num_threads, initargs=(1,)) as pool:
                shares = list(pool.map(share, range(len(modules))))
    losses, right = zip(*(shares[i % len(modules)][i // len(modules)] for i in range(len(starts))))
    return torch.cat(losses), torch.cat(right)


def outputs_of(problem: ModuleProblem, weights: Tensor, inputs: Tensor, batch: int = BATCH) -> Tensor:
    """Return the module's outputs ``(N, ...)`` on the processor at ``weights`` ``(D,)``, eval mode: what metrics are
    given.
    """
    device = problem.device
    problem.bind(weights.to(device))
    with exact(device), problem.evaluating(), torch.no_grad(), seeded_torch(0, "evaluation"):
        return torch.cat([problem.logits(chunk.to(device), problem.module).cpu() for chunk in inputs.split(batch)])


def measured(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return one number: of a function ``(outputs, targets)``, or of an object with ``reset``, ``update`` and
    ``compute``.
    """
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        metric.reset()
        metric.update(outputs, targets)
        return float(metric.compute())
    return float(metric(outputs, targets))


def class_accuracy(accuracy: Tensor, targets: Tensor) -> list[float | None]:
    """Return the accuracy of each class of the public test data, up to the largest there, which tells nothing of
    clients' classes; None for a class without examples, empty for sequence targets.
    """
    if targets.dim() > 1:
        return []
    targets = targets.cpu()
    counts = torch.bincount(targets)
    right = torch.bincount(targets, weights=accuracy.double())
    return [float(r / c) if c else None for r, c in zip(right, counts)]


def client_accuracies(
    problem: ModuleProblem, data: FederatedData, weights_of: Callable[[int], Tensor], clients: Sequence[int]
) -> np.ndarray:
    """Return the accuracy of each client on its held-back data, at the weights that ``weights_of`` gives for it; loss
    where the task has no accuracy.
    """
    figures = []
    for client in clients:
        rows = torch.from_numpy(data.held_back[client]).to(data.inputs.device)
        # A copy of its own: what a module writes into its weights must not reach the next client.
        loss, accuracy = scores(problem, weights_of(client).clone(), data.inputs[rows], data.targets[rows])
        figures.append(float((accuracy if problem.objective.scored else loss).mean()))
    return np.array(figures)


STEPS = 2.0**20
"""Steps of a client's accuracy in a private evaluation: whole numbers of them add up exactly, in any order."""


def cohort_scores(problem: ModuleProblem, data: FederatedData, weights: Tensor, cohort: Sequence[int]) -> np.ndarray:
    """Return Σ(a_i − ½, ½) over a cohort, float64 ``(2,)``: a_i is client i's accuracy on what it holds back.

    A client without such examples adds nothing, every other a vector of L2 norm ≤ 1/√2, whatever its data: an accuracy
    that is no number counts as ½.
    """
    there = [int(client) for client in cohort if len(data.held_back[client])]
    accuracies = np.nan_to_num(client_accuracies(problem, data, lambda client: weights, there), nan=0.5)
    return np.array([(np.rint((accuracies.clip(0, 1) - 0.5) * STEPS) / STEPS).sum(), 0.5 * len(there)])


PERSONAL_TIMES = 10
"""Evaluations of clients' own models in a run whose recipe says nothing: each passes over all held-back data."""
BEST = "best metric"
"""Name of the server's slot with the largest accuracy, or the smallest loss with a minus, on public test data."""


def best_so_far(state: RoundState, public: Record) -> RoundState:
    """Return the state that releases the weights of the best round so far; the later one of two must be better.

    Which round is released follows from what was released before, so it costs nothing.
    """
    value = public["test_accuracy"]
    if value is None and public["test_loss"] is not None:
        value = -public["test_loss"]
    before = state.slots.get(BEST)
    if value is None or math.isnan(value) or (before is not None and value <= float(before)):
        return state
    return replace(state, slots={**state.slots, AVERAGE: state.shared, BEST: torch.tensor(value, dtype=torch.float64)})


def evaluate_round(job: Job, state: RoundState, heads: PersonalState) -> tuple[Record, Record]:
    """Return public test metrics (released), and personal or per-client ones (private to the simulation)."""
    data, method, finished = job.data, job.parts.algorithm, state.round
    last = finished == job.last_round
    public: Record = {"test_loss": None, "test_accuracy": None}
    hidden: Record = {}
    if data.test_inputs is not None and (last or finished % job.evaluation.every == 0):
        batch, weights = job.evaluation.batch_size, torch.cat([state.released, heads.first])
        scored = scores(job.problem, weights, data.test_inputs, data.test_targets, batch, job.threads)  # type: ignore[arg-type]
        public |= _tested(job, scored, weights)
    every = job.evaluation.personal_every or max(1, job.parts.plan.rounds // PERSONAL_TIMES)
    if job.held and (last or finished % every == 0):

        def weights_of(client: int) -> Tensor:
            """Return what the client would use itself: its own head, or the model fine-tuned on its own data."""
            personal = heads.whole(state.released, client)
            return personal if method.finetune is None else finetuned(job, state, personal, client, method.finetune)

        accuracies = client_accuracies(job.problem, data, weights_of, job.held)
        figure = "accuracy" if job.problem.objective.scored else "loss"
        kind = "client" if method.head is None and method.finetune is None else "personal"
        hidden[f"{kind}_{figure}"] = float(accuracies.mean())
        # Who is served worst.
        hidden[f"client_{figure}_quantiles"] = {n: float(np.quantile(accuracies, q)) for n, q in QUANTILES.items()}
    return public, hidden


def _tested(job: Job, scored: tuple[Tensor, Tensor], weights: Tensor) -> Record:
    """Return the loss, accuracy where the task has one, and the user's own metrics, on public test data."""
    data, objective = job.data, job.problem.objective
    loss, score = (float(values.mean()) for values in scored)
    public: Record = {"test_loss": loss, "test_accuracy": score if objective.scored else None}
    if objective.task == "classification":
        public["class_accuracy"] = class_accuracy(scored[1], data.test_targets)  # type: ignore[arg-type]
    if job.metrics:
        outputs = outputs_of(job.problem, weights, data.test_inputs, job.evaluation.batch_size)  # type: ignore[arg-type]
        targets = data.test_targets.cpu()  # type: ignore[union-attr]
        public |= {f"test_{name}": measured(metric, outputs, targets) for name, metric in job.metrics.items()}
    return public


def finetuned(job: Job, state: RoundState, weights: Tensor, client: int, tune: Phase) -> Tensor:
    """Return the global model after a client's local fine-tuning ``(D,)``; used for evaluation only, never sent."""
    parts, rows = job.parts, job.data.parts[client]
    if len(rows) == 0:
        return weights
    algorithm, device = Algorithm("fine-tuning", phases=(tune,)), job.problem.device
    broadcast = Broadcast(state.round, state.released, math.inf, parts.local.rate(max(state.round - 1, 0)))
    local_data = ClientBatches(job.data, client, Order(job.seed, state.round, parts.local.batch_size), rows)
    with seeded_torch(job.seed, "dropout of fine-tuning", state.round, client):
        weights = weights.to(device)
        context = ClientContext(generator=stream(job.seed, "pieces of fine-tuning", state.round, client))
        train_client(algorithm, job.problem, sent(broadcast, device), parts.local, local_data, weights, context)
    return weights
