"""Give the local loop a client's batches, or a block of clients': resident tensors and index matrices."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedflat.core import Streams, wrong
from fedflat.data.clients import FederatedData
from fedflat.engine.problem import Batch

WHOLE_CHUNK = 512
"""Examples of all of a client's data looked at together, at most: large products, and small memory."""
BLOCK_CHUNK = 64
"""Examples of all of a client's data that a block looks at together, at least; never by how many somebody has."""


def width_of(data: FederatedData, batch_size: int) -> int:
    """Return the examples in a minibatch of a block: a public number, so that no client's arithmetic follows another's
    data.
    """
    return batch_size if data.most is None else min(batch_size, max(1, data.most))


@dataclass(frozen=True)
class Order:
    """Which examples a client sees at each step: a function of (seed, round, client, phase) only."""

    seed: int
    round: int
    batch_size: int

    def indices(self, clients: Sequence[int], sizes: np.ndarray, phase: int, steps: int, width: int) -> np.ndarray:
        """Return the positions ``(n, steps, width)`` of each minibatch in each client's data, -1 where it is short.

        Every epoch is a fresh shuffle cut into ⌈size/batch⌉ minibatches, the last of which may be short; epochs follow
        each other until there are ``steps`` of these. Where a minibatch is the whole client, it has the stored order
        and nothing is drawn. The first rows do not depend on ``steps``, and a client's not on who the others are.
        """
        draws, batch = Streams(self.seed, "batches", self.round), self.batch_size
        plan = np.full((len(sizes), steps, width), -1, dtype=np.int64)
        for size in np.unique(sizes).tolist():
            of_size = np.flatnonzero(sizes == size)
            if batch >= size:
                plan[of_size, :, :size] = np.arange(size)
                continue
            per_epoch = -(-size // batch)
            order = np.full((len(of_size), -(-steps // per_epoch), per_epoch * batch), -1, dtype=np.int64)
            order[:, :, :size] = np.arange(size)
            generators = draws.each((clients[index], phase) for index in of_size.tolist())
            for place, generator in zip(order[:, :, :size], generators):
                generator.permuted(place, axis=1, out=place)
            plan[of_size, :, :batch] = order.reshape(len(of_size), -1, batch)[:, :steps]
        return plan


@dataclass(frozen=True)
class ClientBatches:
    """One client's data for ``ModuleProblem``."""

    data: FederatedData
    client: int
    order: Order
    rows: np.ndarray

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """Yield K minibatches; short ones are short (no padding)."""
        width, sizes = self.order.batch_size, np.array([len(self.rows)])
        if width >= len(self.rows):
            yield from itertools.repeat(self._take(self.rows), steps)
            return
        for row in self.order.indices([self.client], sizes, phase, steps, width)[0]:
            yield self._take(self.rows[row[row >= 0]])

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield all of the client's data in pieces with their shares."""
        for start in range(0, len(self.rows), WHOLE_CHUNK):
            rows = self.rows[start : start + WHOLE_CHUNK]
            yield self._take(rows), torch.tensor([len(rows) / len(self.rows)], device=self.data.inputs.device)

    def class_shares(self, classes: int) -> Tensor:
        """Return the shares of the classes ``(K,)`` among the client's examples."""
        return class_shares(self.data, [self.rows], classes)[0]

    def _take(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(rows).to(self.data.inputs.device)
        return Batch(self.data.inputs[index], self.data.targets[index])


@dataclass(frozen=True)
class BlockBatches:
    """A block of n clients for ``BlockProblem``: minibatches padded to one public width, always with 0/1 weights.

    Padding repeats the client's own first example at weight 0, and a client without data is made of zeros: no client
    ever computes on another's data, and no shape depends on who else is there, so that what is in one client's data
    (an infinite value, say; or nothing) cannot reach another's update, down to its rounding.
    """

    data: FederatedData
    clients: Sequence[int]
    order: Order
    rows: Sequence[np.ndarray]

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows one after the other (a last one for those who have none), each client's start, how many it has."""
        sizes = np.fromiter(map(len, self.rows), np.int64, len(self.rows))
        flat = np.concatenate([*self.rows, np.zeros(1, np.int64)])
        return flat, np.where(sizes > 0, np.cumsum(sizes) - sizes, len(flat) - 1), sizes

    @cached_property
    def _empty(self) -> Tensor | None:
        """Places ``(k,)`` of clients without data; None where everybody has some."""
        places = np.flatnonzero(self._flat[2] == 0)
        return torch.from_numpy(places).to(self.data.inputs.device) if len(places) else None

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """Yield K padded minibatches ``(n, b, …)``; the same one where a batch is all that a client may have."""
        # Where it is public that every minibatch is all that a client has, it is one tensor for all steps: a low-rank
        # trace then knows that it is the same minibatch.
        if self.data.most is not None and self.order.batch_size >= self.data.most:
            batch = self._take(ramp(self._flat[2], 0, width_of(self.data, self.order.batch_size)))
            yield from itertools.repeat(batch, steps)
            return
        plan = self.order.indices(self.clients, self._flat[2], phase, steps, width_of(self.data, self.order.batch_size))
        for step in range(steps):
            yield self._take(plan[:, step])

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield all data of the block in pieces of one public width, with each client's share; where a client has no
        more, the share is 0, and nothing is added to what it has.
        """
        _, _, sizes = self._flat
        width = min(WHOLE_CHUNK, max(BLOCK_CHUNK, width_of(self.data, self.order.batch_size)))
        for start in range(0, int(sizes.max()), width):
            piece = ramp(sizes, start, start + width)
            share = (piece >= 0).sum(1) / np.maximum(sizes, 1)
            yield self._take(piece), torch.from_numpy(share).to(self.data.inputs.device, torch.float32)[:, None]

    def class_shares(self, classes: int) -> Tensor:
        """Return the shares of the classes ``(n, K)`` among each client's examples."""
        return class_shares(self.data, self.rows, classes)

    def _take(self, positions: np.ndarray) -> Batch:
        """Return the examples at positions ``(n, …)`` into each client's rows; padding (-1) is a client's first, and
        without any the federation's.
        """
        device = self.data.inputs.device
        flat, starts, _ = self._flat
        starts = starts.reshape(-1, *(1 for _ in positions.shape[1:]))
        rows = torch.from_numpy(flat[starts + np.maximum(positions, 0)]).to(device)
        weights = torch.from_numpy((positions >= 0).astype(np.float32)).to(device)
        inputs, targets = chosen(self.data.inputs, rows), chosen(self.data.targets, rows)
        if self._empty is not None:
            # They were filled with somebody's example, since an index must point somewhere.
            inputs[self._empty], targets[self._empty] = 0, 0
        return Batch(inputs, targets, weights)


def class_shares(data: FederatedData, rows: Sequence[np.ndarray], classes: int) -> Tensor:
    """Return the shares of the classes ``(n, K)`` float32 among each client's rows; zero for a client without any.

    Raises InputError where the targets are not numbers of K classes, one for each example.
    """
    if data.targets.dim() != 1 or data.targets.is_floating_point() or data.classes != classes:
        found = f"a last layer of {classes} outputs for {data.classes} classes"
        raise wrong("algorithm", found, "a classification, and a model that ends in a linear layer with a bias")
    targets = data.targets.cpu().numpy()
    counts = np.stack([np.bincount(targets[indices], minlength=classes) for indices in rows])
    shares = (counts / np.maximum(counts.sum(1, keepdims=True), 1)).astype(np.float32)
    return torch.from_numpy(shares).to(data.inputs.device)


def ramp(sizes: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the positions ``start … stop − 1`` for each client ``(n, stop − start)``, -1 from its size on."""
    places = np.arange(start, stop, dtype=np.int64)[None]
    return np.where(places < sizes[:, None], places, -1)


def chosen(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]``; copying whole rows is several times faster than general indexing."""
    if not values.is_contiguous():
        return values[rows]
    # Several times as fast as ``values[rows]`` on long rows.
    return values.index_select(0, rows.reshape(-1)).view(*rows.shape, *values.shape[1:])
