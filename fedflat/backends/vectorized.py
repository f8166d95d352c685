"""Train blocks of clients at once: the same local loop on weights ``(n, D)``, written out or as factors."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedflat.backends.sequential import Sequential
from fedflat.core.checks import RunError, wrong
from fedflat.core.held import global_generators
from fedflat.core.params import ClientContext, PersonalState
from fedflat.core.process import set_meanwhile, using_threads
from fedflat.core.types import Broadcast
from fedflat.engine.batches import BlockBatches, Order
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import out_of_memory, sent
from fedflat.engine.factored import Declined, LowRankProblem
from fedflat.engine.mlp import DenseProblem
from fedflat.engine.problem import BlockProblem
from fedflat.engine.reduce import EMPTY, Clipped, Part, Trained, states_of

SWITCH_SECONDS = 2e-4
"""How long a thread that comes back from arithmetic waits for the interpreter (Python: 5 ms). Well below the time
a small block takes, and long beside the switch itself (microseconds)."""
_NO_ROWS = np.zeros(0, np.int64)


def placed_in_blocks(clients: np.ndarray, size: int) -> np.ndarray:
    """Return blocks ``(k, size)`` in which client i has place i mod ``size``; ``EMPTY`` where nobody is.

    A client's place follows from its number alone. Of several with the same place, the k-th is in block k.
    """
    place = clients % size
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=size)
    turn = np.empty(len(clients), np.int64)
    turn[order] = np.arange(len(clients)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.full((int(counts.max(initial=0)), size), EMPTY, np.int64)
    blocks[turn, place] = clients
    return blocks


@dataclass
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort).

    A message is, bit for bit, a function of its client alone: all blocks have one public shape, a client has the place
    that follows from its number, and an operation does the same arithmetic at a place whatever is in the others
    (docs/specification.md, "What was measured is what is released"). Places without a client compute on zeros, and are
    left out of the sum.
    inner: the same training, one client at a time. problem: works on weights written out. factors: the low-rank form,
    or None; a method that it declines is trained on
    weights written out. A block that does not fit into memory is halved and tried again.
    threads: cores. apart: each core takes a block of its own, and numbers do not depend on how many there are (for
    problems that touch no module); otherwise they work on one block together, and another number may round differently.
    """

    inner: Sequential
    problem: BlockProblem | DenseProblem
    block: int
    factors: LowRankProblem | None = None
    threads: int = 1
    apart: bool = False
    name: str = "vectorized"

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Train the cohort in blocks; zeros for clients without data."""
        broadcast = sent(broadcast, self.inner.data.inputs.device)
        left = cohort[self.inner.data.sizes[cohort] > 0]
        if len(left) < len(cohort):
            yield Trained.nothing(len(cohort) - len(left), self.inner.algorithm.vectors * self.problem.layout.dimension)
        waiting, before = _Waiting(left.tolist()), global_generators()
        with using_threads(1 if self.apart else self.threads):
            # Again from the start of what is left where memory was short and blocks became smaller.
            while len(left):
                for block, part in self._blocks(left, broadcast, kept, clipped):
                    left = np.setdiff1d(left, block, assume_unique=True)
                    yield from waiting.ready(part) if isinstance(part, Trained) else (part,)
        self.problem.restore_and_check(everything=True)
        if before != global_generators():
            found = f"{self.inner.algorithm.name}, which draws random numbers while blocks of clients train"
            raise wrong("algorithm", found, "engine.backend=sequential")

    def _blocks(
        self, clients: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[tuple[np.ndarray, Part]]:
        """Train blocks, and give each one's clients and part; end early where memory was short."""
        size = self.block if self.inner.local.epochs is None else 1  # a block steps together
        blocks = placed_in_blocks(clients, size)

        def work(block: np.ndarray) -> Part:
            sizes = np.where(block == EMPTY, EMPTY, self.inner.data.sizes[block]).tolist()
            # In the block's own thread: the round then only merges d numbers.
            return clipped(Trained.of(block.tolist(), sizes, self._trained(block, broadcast, kept)))

        with contextlib.closing(_in_order(work, list(blocks), self.threads if self.apart else 1)) as outcomes:
            for block, ready in zip(blocks, outcomes):
                try:
                    part = ready()
                except (RuntimeError, MemoryError) as error:
                    self._halve(error, size, broadcast)
                    return
                yield block[block != EMPTY], part

    def _halve(self, error: Exception, size: int, broadcast: Broadcast) -> None:
        """Half the block where memory was short; anything else, or one client that does not fit, ends the run."""
        if not out_of_memory(error) or (size == 1 and not (self.apart and self.threads > 1)):
            where = f"round {broadcast.round}, a block of {size} clients, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if self.apart and self.threads > 1:  # fewer blocks at a time change no number
            self.threads = 1
            found = f"engine.processes: blocks of {size} clients do not fit into memory side by side; going on with one"
        else:
            self.block = max(1, size // 2)
            found = f"engine.block: {size} clients did not fit into memory; going on with {self.block}"
        warnings.warn(found, stacklevel=2)

    def _trained(self, clients: np.ndarray, broadcast: Broadcast, kept: PersonalState) -> LocalResult:
        inner, ids = self.inner, clients.tolist()
        rows = [_NO_ROWS if client == EMPTY else inner.data.parts[client] for client in ids]
        order = Order(inner.seed, broadcast.round, inner.local.batch_size)
        data, local = BlockBatches(inner.data, ids, order, rows), inner.local.of(len(rows[0]))
        states = [states_of(inner.algorithm, kept, client, broadcast.shared) for client in ids]
        names = [state.name for state in inner.algorithm.client_state]
        own = ClientContext({name: torch.stack([each[name] for each in states]) for name in names})
        factors = self.factors  # another block's thread may decline in between
        if factors is not None:
            try:
                start: Any = factors.start(broadcast.shared, len(ids))
                return train_client(inner.algorithm, factors, broadcast, local, data, start, own)
            except Declined:
                self.factors = None
        if kept.first.numel():
            weights = torch.stack([kept.whole(broadcast.shared, client) for client in ids])
        else:
            weights = broadcast.shared.repeat(len(ids), 1)
        result = train_client(inner.algorithm, self.problem, broadcast, local, data, weights, own)
        self.problem.restore_and_check()
        return result


class _Waiting:
    """Parts of single clients whose turn has not come, where messages are added one by one, in client order."""

    def __init__(self, clients: list[int]) -> None:
        self._turns = deque(clients)
        self._parts: dict[int, Trained] = {}

    def ready(self, block: Trained) -> Iterator[Trained]:
        """Take a block's results, and give those whose turn it is."""
        for row, client in enumerate(block.clients):
            if client != EMPTY:  # copies: the block itself need not wait
                self._parts[client] = block.row(row)
        while self._turns and self._turns[0] in self._parts:
            yield self._parts.pop(self._turns.popleft())


def _in_order(
    work: Callable[[np.ndarray], Part], blocks: list[np.ndarray], threads: int
) -> Generator[Callable[[], Part], None, None]:
    """For each block, in order, a function that gives its outcome; ``threads`` blocks are under way at a time."""
    if threads == 1 or len(blocks) == 1:
        yield from (partial(work, block) for block in blocks)
        return
    left = deque(blocks)
    switching = set_meanwhile(sys.getswitchinterval, sys.setswitchinterval, SWITCH_SECONDS)
    with switching, ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future[Part]] = deque()
        try:
            while left or waiting:
                while left and len(waiting) <= threads:  # one more than cores: a core need not wait for the sum
                    waiting.append(pool.submit(work, left.popleft()))
                yield waiting.popleft().result
        finally:
            for future in waiting:
                future.cancel()
