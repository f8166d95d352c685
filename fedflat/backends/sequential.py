"""The sequential back end: one client after the other on one module; what every other back end must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import InputError, RunError, wrong
from fedflat.core.held import Held, global_generators
from fedflat.core.personal import Heads
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import Federated
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.batches import Order, SingleFeed
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import sent
from fedflat.engine.problem import ModuleProblem, refuse_change


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """``count`` intra-op threads inside the block, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Sequential:
    """Trains a cohort client by client.

    threads: cores that work on one client; another number may round differently.
    """

    algorithm: Algorithm
    problem: ModuleProblem
    local: Local
    data: Federated
    seed: int
    name: str = "sequential"
    threads: int = 1
    _pieces: Held = field(init=False, repr=False)

    def __post_init__(self) -> None:
        method = self.algorithm
        self._pieces = Held((method.phases, method.transforms, method.finetune))

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train each client of the cohort (sorted ids) and add its message to the accumulator."""
        if self.threads > 1:
            with using_threads(self.threads):
                self._train(cohort, broadcast, accumulator, heads)
        else:
            self._train(cohort, broadcast, accumulator, heads)

    def _train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        broadcast = sent(broadcast, self.problem.device)
        for client in cohort.tolist():
            size = len(self.data.parts[client])
            if size == 0:
                accumulator.add(torch.zeros(1, broadcast.shared.numel()), [0])
                continue
            result = self.one(client, broadcast, heads.whole(broadcast.shared, client))
            heads.keep(client, result.personal)
            facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
            accumulator.add(result.message[None], [size], facts)
        self.problem.settle(everything=True)
        refuse_change(self._pieces, "algorithm", everything=True)

    def one(self, client: int, broadcast: Broadcast, weights: Tensor) -> LocalResult:
        """Train one client that has data, from ``weights`` ``(D,)``, which is overwritten, wherever it lies."""
        rows, device = self.data.parts[client], self.problem.device
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        feed = SingleFeed(self.data, client, order, rows)
        local, there = self.local.of(len(rows)), weights.to(device)
        try:
            with seeded_torch(self.seed, "dropout", broadcast.round, client):
                before = global_generators()
                result = train_client(self.algorithm, self.problem, sent(broadcast, device), local, feed, there)
                if global_generators()[1:] != before[1:]:
                    raise wrong(
                        "model or algorithm", "a draw from a global generator of NumPy or Python", "torch's own"
                    )
            self.problem.settle()
            refuse_change(self._pieces, "algorithm")
        except (InputError, RunError):
            raise
        except Exception as error:  # a user's piece or module may fail in any way
            where = f"round {broadcast.round}, client {client}, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if weights.device == device:
            return result
        weights.copy_(there)
        return LocalResult(*(value.to(weights.device) for value in vars(result).values()))
