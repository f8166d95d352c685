"""A block's data on fixed memory, which a recorded graph reads: rows are written there before each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.data.clients import FederatedData
from fedflat.engine.batches import BlockBatches, Order, chosen, chunk_of, ramp, repeats, width_of
from fedflat.engine.problem import Batch

Put = Callable[[Tensor, Tensor], None]
"""Copies a tensor of the processor into a buffer."""


@dataclass(frozen=True)
class Shape:
    """What is the same for every block of a run, so that one recording serves all.

    width: examples in a batch, a public number. whole: rows of the largest client in pieces of ``chunk``, where the
    method looks at all of a client's data, or 0. constant: every client's batch is all it may have. single: blocks of
    one client, without the leading axis. Minibatches always have weights: no client's arithmetic follows from whether
    another one's are padded.
    """

    batch_size: int
    width: int
    whole: int
    chunk: int
    constant: bool
    single: bool


def shape_of(data: FederatedData, batch_size: int, everything: bool, single: bool) -> Shape:
    """The shape that fits every client of a federation. everything: whether all of a client's data is asked for."""
    chunk = chunk_of(data, batch_size)
    pieces = -(-int(data.sizes.max(initial=1)) // chunk) if everything else 0
    return Shape(batch_size, width_of(data, batch_size), pieces * chunk, chunk, repeats(data, batch_size), single)


@dataclass(frozen=True)
class StaticBatches:
    """The data of a block, for the local loop.

    plans: each phase's rows ``(n, K, b)`` (K = 1: the same batch at every step). weights: 0 for padding, ``(n, K, b)``.
    everyone: all rows of each client ``(n, W)``. shares: 1/n_i for each that is there, 0 for padding ``(n, W)``.
    """

    data: FederatedData
    shape: Shape
    plans: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    everyone: Tensor
    shares: Tensor

    @classmethod
    def room(cls, data: FederatedData, shape: Shape, block: int, steps: Sequence[int]) -> StaticBatches:
        """Memory for a block, on the data's device. steps: of each phase."""
        device = data.inputs.device
        sides = [(block, 1 if shape.constant else k, shape.width) for k in steps]
        plans = tuple(torch.zeros(side, dtype=torch.int64, device=device) for side in sides)
        weights = tuple(torch.ones(side, device=device) for side in sides)
        everyone = torch.zeros(block, shape.whole, dtype=torch.int64, device=device)
        return cls(data, shape, plans, weights, everyone, torch.zeros(block, shape.whole, device=device))

    def write(self, clients: Sequence[int], seed: int, round: int, steps: Sequence[int], put: Put) -> None:
        """The rows of a block's clients in a round, as ``BlockBatches`` draws them."""
        order = Order(seed, round, self.shape.batch_size)
        drawn = BlockBatches(self.data, clients, order, [self.data.parts[c] for c in clients])
        sizes = self.data.sizes[np.asarray(clients)]
        for phase, (rows, weights) in enumerate(zip(self.plans, self.weights)):
            positions = np.full(tuple(rows.shape), -1, dtype=np.int64)
            if self.shape.constant:
                positions[:, 0] = ramp(sizes, 0, self.shape.width)
            else:
                plan = drawn.plan(phase, steps[phase])
                positions[..., : plan.shape[2]] = plan
            put(rows, torch.from_numpy(drawn.rows_at(positions)))
            put(weights, torch.from_numpy((positions >= 0).astype(np.float32)))
        if self.shape.whole:
            positions = ramp(sizes, 0, self.shape.whole)
            put(self.everyone, torch.from_numpy(drawn.rows_at(positions)))
            put(self.shares, torch.from_numpy(((positions >= 0) / np.maximum(sizes, 1)[:, None]).astype(np.float32)))

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """K minibatches of a phase."""
        rows, weights = self.plans[phase], self.weights[phase]
        batch: Batch | None = None
        for step in range(steps):
            if batch is None or not self.shape.constant:
                batch = self._take(rows[:, step], weights[:, step])
            yield batch

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """All data of the block in pieces, with each client's share in them."""
        for start in range(0, self.shape.whole, self.shape.chunk):
            shares = self.shares[:, start : start + self.shape.chunk]
            share, rows = shares.sum(1, keepdim=True), self.everyone[:, start : start + self.shape.chunk]
            yield self._take(rows, (shares > 0).to(shares.dtype)), share[0] if self.shape.single else share

    def class_shares(self, classes: int) -> Tensor:
        """Refused: they are not among what a recorded graph is given anew in each round."""
        raise wrong(
            "engine.backend", "graphs with a method that asks for class shares", "sequential, vectorized or auto"
        )

    def _take(self, rows: Tensor, weights: Tensor) -> Batch:
        if self.shape.single:
            rows, weights = rows[0], weights[0]
        return Batch(chosen(self.data.inputs, rows), chosen(self.data.targets, rows), weights)
