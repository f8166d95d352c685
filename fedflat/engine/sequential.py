"""The sequential back end: one client after the other on one module. Readable, and what every other back end must equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedflat.core.checks import RunError
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import Federated
from fedflat.engine.client import train_client
from fedflat.engine.feed import Order, SingleFeed
from fedflat.engine.heads import Heads
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.round import Accumulator


@dataclass
class Sequential:
    """Trains a cohort client by client."""

    algorithm: Algorithm
    problem: ModuleProblem
    local: Local
    data: Federated
    seed: int
    name: str = "sequential"

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train each client of the cohort (sorted ids) and add its message to the accumulator."""
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        for client in cohort.tolist():
            rows = self.data.parts[client]
            if len(rows) == 0:
                accumulator.add(torch.zeros(1, broadcast.shared.numel()), [0])
                continue
            feed = SingleFeed(self.data, client, order, rows)
            weights = heads.whole(broadcast.shared, client)
            try:
                with seeded_torch(self.seed, "dropout", broadcast.round, client):
                    result = train_client(self.algorithm, self.problem, broadcast, self.local, feed, weights)
            except RuntimeError as error:
                raise RunError(f"round {broadcast.round}, client {client}, local training: {error}") from error
            heads.keep(client, result.personal)
            facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
            accumulator.add(result.message[None], [len(rows)], facts)

