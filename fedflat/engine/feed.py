"""A client's data, or a block of clients' data, as the local loop asks for it: resident tensors and index matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import stream
from fedflat.data.clients import Federated, batch_indices
from fedflat.engine.problem import Batch

WHOLE_CHUNK = 512


@dataclass(frozen=True)
class Order:
    """Which examples a client sees at each step: a function of (seed, round, client, phase) only."""

    seed: int
    round: int
    batch_size: int

    def indices(self, client: int, size: int, phase: int, steps: int) -> np.ndarray:
        """Positions ``(steps, b)`` into the client's data, -1 where a minibatch is short."""
        return batch_indices(
            size, steps, self.batch_size, lambda: stream(self.seed, "batches", self.round, client, phase)
        )


@dataclass(frozen=True)
class SingleFeed:
    """One client's data for ``ModuleProblem``."""

    data: Federated
    client: int
    order: Order
    rows: np.ndarray

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """K minibatches; short ones are short (no padding)."""
        plan = self.order.indices(self.client, len(self.rows), phase, steps)
        whole = self.order.batch_size >= len(self.rows)
        batch = self._take(self.rows) if whole else None
        for row in plan:
            yield batch if batch is not None else self._take(self.rows[row[row >= 0]])

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """All of the client's data in pieces with their shares."""
        for start in range(0, len(self.rows), WHOLE_CHUNK):
            rows = self.rows[start : start + WHOLE_CHUNK]
            yield self._take(rows), torch.tensor([len(rows) / len(self.rows)])

    def _take(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(rows)
        return Batch(self.data.inputs[index], self.data.targets[index])


@dataclass(frozen=True)
class BlockFeed:
    """A block of n clients for ``BlockProblem``: minibatches padded to one width, with 0/1 weights."""

    data: Federated
    clients: Sequence[int]
    order: Order
    rows: Sequence[np.ndarray]

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """K padded minibatches ``(n, b, …)``."""
        plans = [
            rows[plan] if (plan := self.order.indices(c, len(rows), phase, steps)).min() >= 0 else np.where(plan >= 0, rows[plan], -1)
            for c, rows in zip(self.clients, self.rows)
        ]
        width = max(p.shape[1] for p in plans)
        stacked = np.full((len(plans), steps, width), -1, dtype=np.int64)
        for place, plan in zip(stacked, plans):
            place[:, : plan.shape[1]] = plan
        for step in range(steps):
            yield self._take(stacked[:, step])

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """All data of the block, padded to the largest client, in pieces with each client's share."""
        sizes = np.array([len(r) for r in self.rows])
        width = int(sizes.max())
        stacked = np.full((len(sizes), width), -1, dtype=np.int64)
        for place, rows in zip(stacked, self.rows):
            place[: len(rows)] = rows
        for start in range(0, width, WHOLE_CHUNK):
            piece = stacked[:, start : start + WHOLE_CHUNK]
            share = (piece >= 0).sum(1) / sizes
            yield self._take(piece), torch.from_numpy(share).to(torch.float32)[:, None]

    def _take(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(np.maximum(rows, 0))
        weights = torch.from_numpy(rows >= 0).to(torch.float32)
        return Batch(self.data.inputs[index], self.data.targets[index], weights)
