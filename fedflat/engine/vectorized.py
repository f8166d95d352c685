"""Blocks of clients at once: the same local loop on weights ``(n, D)``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import Federated
from fedflat.engine.client import train_client
from fedflat.engine.feed import BlockFeed, Order
from fedflat.engine.heads import Heads
from fedflat.engine.problem import Problem
from fedflat.engine.round import Accumulator


@dataclass
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort)."""

    algorithm: Algorithm
    problem: Problem
    local: Local
    data: Federated
    seed: int
    block: int
    name: str = "vectorized"

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train the cohort in blocks of equal-sized neighbours and add the messages to the accumulator."""
        sizes = np.array([len(self.data.parts[c]) for c in cohort], dtype=np.int64)
        empty = int((sizes == 0).sum())
        if empty:
            accumulator.add(torch.zeros(empty, broadcast.shared.numel()), [0] * empty)
        present = cohort[sizes > 0]
        block = self.block if self.local.epochs is None else 1  # a block takes its steps together
        for start in range(0, len(present), block):
            self._block(present[start : start + block], broadcast, accumulator, heads)

    def _block(self, clients: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        feed = BlockFeed(self.data, clients.tolist(), order, [self.data.parts[c] for c in clients])
        if heads.first.numel():
            weights = torch.stack([heads.whole(broadcast.shared, c) for c in clients])
        else:
            weights = broadcast.shared.repeat(len(clients), 1)
        with seeded_torch(self.seed, "dropout", broadcast.round, int(clients[0])):
            local = self.local.of(len(feed.rows[0]))
            result = train_client(self.algorithm, self.problem, broadcast, local, feed, weights)
        for client, head in zip(clients, result.personal):
            heads.keep(int(client), head)
        sizes = [len(rows) for rows in feed.rows]
        accumulator.add(result.message, sizes, {"train_loss": result.loss, "train_accuracy": result.accuracy})
