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
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.mlp.lowrank import LowRankProblem
from fedflat.backends.sequential import Sequential
from fedflat.core.checks import InputError, RunError
from fedflat.core.held import global_generators
from fedflat.core.personal import ClientContext, PersonalState
from fedflat.core.rng import seeded_torch
from fedflat.core.threads import using_threads
from fedflat.core.types import Algorithm, Broadcast, Local, PartedSum
from fedflat.data.clients import FederatedData
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.batches import BlockBatches, Order
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import out_of_memory, sent
from fedflat.engine.factored import Declined, Factored
from fedflat.engine.kept import add_trained, states_of
from fedflat.engine.problem import BlockProblem, Problem

SWITCH_SECONDS = 2e-4
"""Well below the time a small block takes, and long beside the switch itself (microseconds)."""
AT_ONCE = 16
"""Messages added together where some clients of a block have no data."""


@dataclass(frozen=True)
class _Trained:
    """A trained block: what its clients have (None if nobody has data), without messages where their clipped sum is in
    ``part`` already."""

    clients: np.ndarray
    result: LocalResult | None
    part: Accumulator | None


class _Drew(Exception):
    """Training drew random numbers: in a block, one client's numbers would depend on who else is in it."""


@dataclass
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort).

    Blocks are cut from the cohort: a client without data keeps its place, and its message is zero. So a client's
    message is, bit for bit, a function of its own data and its place, whatever is in the others' data.
    alone: trains one client as the sequential back end does. Models and methods that draw random numbers are trained
    so, each client with its own stream, and so is every block from the first that was found to draw.
    problem: works on weights written out. factors: the low-rank form, or None; a block that it declines, and those
    after it, are trained on weights written out. A block that does not fit into memory is halved and tried again.
    threads: cores. apart: each core takes a block of its own, and numbers do not depend on how many there are (for
    problems that touch no module); otherwise they work on one block together, and another number may round differently.
    """

    algorithm: Algorithm
    problem: Problem
    local: Local
    data: FederatedData
    seed: int
    block: int
    factors: LowRankProblem | None = None
    threads: int = 1
    apart: bool = False
    name: str = "vectorized"
    alone: Sequential | None = None
    random: bool = False

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train the cohort in blocks of neighbours and add the messages to the accumulator, in client order."""
        broadcast = sent(broadcast, self.data.inputs.device)
        done, together = 0, 1 if self.apart else self.threads
        before = torch.default_generator.get_state()
        with using_threads(together):
            while done < len(cohort):
                for count in self._blocks(cohort[done:], broadcast, accumulator, heads):
                    done += count
        _settle(self.problem, everything=True)
        if self.alone is not None:
            self.alone.settle()
        if self.apart and not torch.equal(before, torch.default_generator.get_state()):
            raise InputError(
                f"algorithm: found {self.algorithm.name}, which draws random numbers while blocks of clients train; "
                "allowed: engine.backend=sequential."
            )

    def _blocks(
        self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState
    ) -> Iterator[int]:
        """Train and add blocks, and say how many clients each had; ends early where memory was short."""
        size = self.block if self.local.epochs is None and not self._one_by_one else 1  # a block steps together
        blocks = [cohort[start : start + size] for start in range(0, len(cohort), size)]

        def work(clients: np.ndarray) -> _Trained:
            return self._one(clients, broadcast, accumulator, heads)

        with contextlib.closing(_in_order(work, blocks, self.threads if self.apart else 1)) as outcomes:
            for clients, ready in zip(blocks, outcomes):
                try:
                    trained = ready()
                except (RuntimeError, MemoryError) as error:
                    self._halve(error, len(clients), broadcast)
                    return
                self._keep(trained, broadcast, accumulator, heads)
                yield len(clients)

    @property
    def _one_by_one(self) -> bool:
        return self.random and self.alone is not None

    def _one(
        self, clients: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState
    ) -> _Trained:
        """Train one block and, where the round's sum allows it, clip and add its messages up."""
        if not self.data.sizes[clients].any():
            return _Trained(clients, None, None)
        result = self._trained(clients, broadcast, heads)
        device = result.message.device
        alone = len(clients) == 1 or self.algorithm.client_state  # its state follows from its factor in the sum
        if alone or not isinstance(accumulator, PartedSum):
            return _Trained(clients, result, None)
        part = accumulator.part(device)
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

    def _trained(self, clients: np.ndarray, broadcast: Broadcast, heads: PersonalState) -> LocalResult:
        if self._one_by_one:
            return self._each(clients, broadcast, heads)
        factors = self.factors  # another block's thread may decline in between
        if factors is not None:
            try:
                return self._run(factors, clients, broadcast, factors.start(broadcast.shared, len(clients)), heads)  # type: ignore[arg-type]
            except Declined:
                self.factors = None
        if heads.first.numel():
            weights = torch.stack([heads.whole(broadcast.shared, c) for c in clients])
        else:
            weights = broadcast.shared.repeat(len(clients), 1)
        try:
            return self._run(self.problem, clients, broadcast, weights, heads)
        except _Drew:
            self.random = True
            return self._each(clients, broadcast, heads)

    def _each(self, clients: np.ndarray, broadcast: Broadcast, heads: PersonalState) -> LocalResult:
        """One client after the other, each from its own stream; zeros for those without data."""
        train, found = cast(Sequential, self.alone).one, list[LocalResult | None]()
        for client in clients.tolist():
            there = len(self.data.parts[client]) > 0
            states = states_of(self.algorithm, heads, client, broadcast.shared)
            found.append(train(client, broadcast, heads.whole(broadcast.shared, client), states) if there else None)
        some = next(one for one in found if one is not None)
        zero = LocalResult(*(torch.zeros_like(value) for value in vars(some).values()))
        return LocalResult(*map(torch.stack, zip(*(vars(one or zero).values() for one in found))))

    def _run(
        self, problem: Problem, clients: np.ndarray, broadcast: Broadcast, weights: Tensor, heads: PersonalState
    ) -> LocalResult:
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        local_data = BlockBatches(self.data, clients.tolist(), order, [self.data.parts[c] for c in clients])
        local = self.local.of(len(local_data.rows[0]))
        rows = [states_of(self.algorithm, heads, c, broadcast.shared) for c in clients.tolist()]
        own = ClientContext(
            {state.name: torch.stack([row[state.name] for row in rows]) for state in self.algorithm.client_state}
        )
        if self.apart:  # no module, so nothing that could draw or remember but the method's pieces
            return train_client(self.algorithm, problem, broadcast, local, local_data, weights, own)
        with seeded_torch(self.seed, "block", broadcast.round, int(clients[0])):
            before = global_generators()
            result = train_client(self.algorithm, problem, broadcast, local, local_data, weights, own)
            drawn = before != global_generators()
        _settle(problem)
        if drawn and self.alone is not None:
            raise _Drew
        return result

    def _keep(self, trained: _Trained, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        result, present = trained.result, self.data.sizes[trained.clients] > 0
        if result is None:
            self._add_zeros(len(trained.clients), accumulator)
            return
        if self.algorithm.client_state:
            self._add_zeros(len(present) - int(present.sum()), accumulator)
            for place in np.flatnonzero(present).tolist():
                client, alone = int(trained.clients[place]), LocalResult(*(v[place] for v in vars(result).values()))
                size = int(self.data.sizes[client])
                add_trained(accumulator, heads, self.algorithm, self.local, broadcast, client, size, alone)
            return
        if heads.first.numel():
            for client in np.flatnonzero(present).tolist():
                heads.keep(int(trained.clients[client]), result.personal[client])
        if trained.part is not None and isinstance(accumulator, PartedSum):
            accumulator.merge(trained.part)
        else:
            self._add(trained.clients, result, accumulator)

    def _add(self, clients: np.ndarray, result: LocalResult, accumulator: Accumulator) -> None:
        """Add a block's messages; exactly zero for clients without data."""
        sizes, message = self.data.sizes[clients], result.message
        present = np.flatnonzero(sizes)
        if len(present) == len(clients):
            facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
            accumulator.add(message, sizes.tolist(), facts)
            return
        if isinstance(message, Factored):  # as a whole: others must be measured as they are beside anybody
            rows = torch.from_numpy(present).to(message.device)
            facts = {"train_loss": result.loss[rows], "train_accuracy": result.accuracy[rows]}
            accumulator.add(message.without(torch.from_numpy(sizes == 0).to(message.device)), sizes.tolist(), facts)
            return
        self._add_zeros(len(clients) - len(present), accumulator)
        for some in np.split(present, range(AT_ONCE, len(present), AT_ONCE)):
            rows = torch.from_numpy(some).to(message.device)
            facts = {"train_loss": result.loss[rows], "train_accuracy": result.accuracy[rows]}
            accumulator.add(message[rows], sizes[some].tolist(), facts)

    def _add_zeros(self, count: int, accumulator: Accumulator) -> None:
        size = self.algorithm.vectors * self.problem.layout.dimension
        accumulator.add(torch.zeros(1, size).expand(count, size), [0] * count)


def _settle(problem: Problem, *, everything: bool = False) -> None:
    """What a module kept of a block (a problem without a module keeps nothing)."""
    if isinstance(problem, BlockProblem):
        problem.settle(everything=everything)


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
    """Let a thread that comes back from arithmetic wait ``SWITCH_SECONDS`` for the interpreter, not 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
