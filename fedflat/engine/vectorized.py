"""Blocks of clients at once: the same local loop on weights ``(n, D)``, written out or kept as factors."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import RunError
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import Federated
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import out_of_memory, sent
from fedflat.engine.factored import Declined
from fedflat.engine.feed import BlockFeed, Order
from fedflat.engine.heads import Heads
from fedflat.engine.lowrank import LowRankProblem
from fedflat.engine.problem import Problem
from fedflat.engine.sequential import using_threads


@dataclass(frozen=True)
class _Trained:
    """A trained block: what its clients have, without messages where their clipped sum is in ``part`` already."""

    clients: np.ndarray
    result: LocalResult
    part: Accumulator | None


@dataclass
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort).

    problem: works on weights written out. factors: the low-rank form, or None; a block that it declines, and those
    after it, are trained on weights written out. A block that does not fit into memory is halved and tried again.
    threads: cores. apart: each core takes a block of its own, and numbers do not depend on how many there are (for
    problems that touch no module); otherwise they work on one block together, and another number may round differently.
    """

    algorithm: Algorithm
    problem: Problem
    local: Local
    data: Federated
    seed: int
    block: int
    factors: LowRankProblem | None = None
    threads: int = 1
    apart: bool = False
    name: str = "vectorized"

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train the cohort in blocks of neighbours and add the messages to the accumulator, in client order."""
        sizes = self.data.sizes[cohort]
        empty = int((sizes == 0).sum())
        if empty:
            accumulator.add(torch.zeros(empty, broadcast.shared.numel()), [0] * empty)
        broadcast = sent(broadcast, self.data.inputs.device)
        present, done = cohort[sizes > 0], 0
        together = 1 if self.apart else self.threads
        with using_threads(together):
            while done < len(present):
                for count in self._blocks(present[done:], broadcast, accumulator, heads):
                    done += count

    def _blocks(
        self, present: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads
    ) -> Iterator[int]:
        """Train and add blocks, and say how many clients each had; ends early where memory was short."""
        size = self.block if self.local.epochs is None else 1  # a block takes its steps together
        blocks = [present[start : start + size] for start in range(0, len(present), size)]

        def work(clients: np.ndarray) -> _Trained:
            return self._one(clients, broadcast, accumulator, heads)

        with contextlib.closing(_in_order(work, blocks, self.threads if self.apart else 1)) as outcomes:
            for clients, ready in zip(blocks, outcomes):
                try:
                    trained = ready()
                except (RuntimeError, MemoryError) as error:
                    self._halve(error, len(clients), broadcast)
                    return
                self._keep(trained, accumulator, heads)
                yield len(clients)

    def _one(self, clients: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> _Trained:
        """Train one block and, where the round's sum allows it, clip and add its messages up."""
        result = self._trained(clients, broadcast, heads)
        device = result.message.device
        part = accumulator.part(device) if len(clients) > 1 else None
        if part is None:
            return _Trained(clients, result, None)
        self._add(clients, result, part)
        return _Trained(clients, replace(result, message=torch.empty(0)), part)

    def _halve(self, error: Exception, clients: int, broadcast: Broadcast) -> None:
        """Half the block where memory was short; anything else, or one client that does not fit, ends the run."""
        if not out_of_memory(error) or (clients == 1 and not (self.apart and self.threads > 1)):
            where = f"round {broadcast.round}, a block of {clients} clients, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if self.apart and self.threads > 1:  # fewer blocks at a time change no number
            self.threads = 1
            warnings.warn(
                f"engine.processes: blocks of {clients} clients do not fit into memory side by side; going on with one",
                stacklevel=2,
            )
            return
        self.block = max(1, clients // 2)
        warnings.warn(
            f"engine.block: {clients} clients did not fit into memory; going on with {self.block}", stacklevel=2
        )

    def _trained(self, clients: np.ndarray, broadcast: Broadcast, heads: Heads) -> LocalResult:
        factors = self.factors  # another block's thread may decline in between
        if factors is not None:
            try:
                return self._run(factors, clients, broadcast, factors.start(broadcast.shared, len(clients)))  # type: ignore[arg-type]
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
        local = self.local.of(len(feed.rows[0]))
        # dropout draws from torch's one generator; a problem without a module has none
        seeded = seeded_torch(self.seed, "dropout", broadcast.round, int(clients[0]))
        with contextlib.nullcontext() if self.apart else seeded:
            return train_client(self.algorithm, problem, broadcast, local, feed, weights)

    def _keep(self, trained: _Trained, accumulator: Accumulator, heads: Heads) -> None:
        if heads.first.numel():
            for client, head in zip(trained.clients, trained.result.personal):
                heads.keep(int(client), head)
        if trained.part is None:
            self._add(trained.clients, trained.result, accumulator)
        else:
            accumulator.merge(trained.part)

    def _add(self, clients: np.ndarray, result: LocalResult, accumulator: Accumulator) -> None:
        sizes = self.data.sizes[clients].tolist()
        accumulator.add(result.message, sizes, {"train_loss": result.loss, "train_accuracy": result.accuracy})


def _in_order(
    work: Callable[[np.ndarray], _Trained], blocks: list[np.ndarray], threads: int
) -> Generator[Callable[[], _Trained], None, None]:
    """For each block, in order, a function that gives its outcome; ``threads`` blocks are under way at a time."""
    if threads == 1 or len(blocks) == 1:
        yield from (partial(work, block) for block in blocks)
        return
    left = deque(blocks)
    with _often_switching(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future[_Trained]] = deque()
        try:
            while left or waiting:
                while left and len(waiting) <= threads:  # one more than cores: a core need not wait for the sum
                    waiting.append(pool.submit(work, left.popleft()))
                yield waiting.popleft().result
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _often_switching() -> Iterator[None]:
    """Let a thread that comes back from arithmetic wait 0.2 ms for the interpreter, not 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
