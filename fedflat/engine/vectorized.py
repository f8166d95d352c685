"""Blocks of clients at once: the same local loop on weights ``(n, D)``, written out or kept as factors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import RunError
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import Federated
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.factored import Declined
from fedflat.engine.feed import BlockFeed, Order
from fedflat.engine.heads import Heads
from fedflat.engine.lowrank import LowRankProblem
from fedflat.engine.problem import Problem

OUT_OF_MEMORY = ("not enough memory", "out of memory", "can't allocate memory")


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
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort).

    problem: works on weights written out. factors: the low-rank form, or None; a block that it declines, and those
    after it, are trained on weights written out. A block that does not fit into memory is halved and tried again.
    threads: cores that work on one block together; another number may round differently.
    """

    algorithm: Algorithm
    problem: Problem
    local: Local
    data: Federated
    seed: int
    block: int
    factors: LowRankProblem | None = None
    threads: int = 1
    name: str = "vectorized"

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train the cohort in blocks of neighbours and add the messages to the accumulator."""
        with using_threads(self.threads):
            self._train(cohort, broadcast, accumulator, heads)

    def _train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        sizes = self.data.sizes[cohort]
        empty = int((sizes == 0).sum())
        if empty:
            accumulator.add(torch.zeros(empty, broadcast.shared.numel()), [0] * empty)
        present, start = cohort[sizes > 0], 0
        while start < len(present):
            block = self.block if self.local.epochs is None else 1  # a block takes its steps together
            clients = present[start : start + block]
            try:
                result = self._trained(clients, broadcast, heads)
            except (RuntimeError, MemoryError) as error:
                self._halve(error, len(clients), broadcast)
                continue
            self._keep(clients, result, accumulator, heads)
            start += len(clients)

    def _halve(self, error: Exception, clients: int, broadcast: Broadcast) -> None:
        """Half the block where memory was short; anything else, or one client that does not fit, ends the run."""
        short = isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)
        if not short or clients == 1:
            where = f"round {broadcast.round}, a block of {clients} clients, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        self.block = max(1, clients // 2)
        warnings.warn(
            f"engine.block: {clients} clients did not fit into memory; going on with {self.block}", stacklevel=2
        )

    def _trained(self, clients: np.ndarray, broadcast: Broadcast, heads: Heads) -> LocalResult:
        if self.factors is not None:
            try:
                return self._run(self.factors, clients, broadcast, self.factors.start(broadcast.shared, len(clients)))  # type: ignore[arg-type]
            except Declined:
                self.factors = None
        if heads.first.numel():
            weights = torch.stack([heads.whole(broadcast.shared, c) for c in clients])
        else:
            weights = broadcast.shared.repeat(len(clients), 1)
        return self._run(self.problem, clients, broadcast, weights)

    def _run(self, problem: Problem, clients: np.ndarray, broadcast: Broadcast, weights: Tensor) -> LocalResult:
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        feed = BlockFeed(self.data, clients.tolist(), order, [self.data.parts[c] for c in clients])
        with seeded_torch(self.seed, "dropout", broadcast.round, int(clients[0])):
            return train_client(self.algorithm, problem, broadcast, self.local.of(len(feed.rows[0])), feed, weights)

    def _keep(self, clients: np.ndarray, result: LocalResult, accumulator: Accumulator, heads: Heads) -> None:
        if heads.first.numel():
            for client, head in zip(clients, result.personal):
                heads.keep(int(client), head)
        sizes = self.data.sizes[clients].tolist()
        accumulator.add(result.message, sizes, {"train_loss": result.loss, "train_accuracy": result.accuracy})
