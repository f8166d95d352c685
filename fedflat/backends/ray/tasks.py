"""Ray tasks: the sequential loop over blocks of a cohort, on the cores of one machine or of many.

Data and module go into Ray's object store once a run, the broadcast once a round; workers read both in place. A task
gets client numbers (and their heads) and answers with their messages, one vector a client. The driver adds them in
client order, one by one, so the result is bit for bit that of one process with one thread, for any number of workers
and any block size. A task is a function of (seed, round, client, broadcast): one that is lost with its worker is run
again, with the same result. At most ``IN_FLIGHT`` blocks a worker are under way: memory does not grow with the cohort.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.ray.package import Package, array_of, packed, view_of
from fedflat.backends.ray.session import connect, one_line, workers
from fedflat.backends.resident import keep_freed_memory
from fedflat.backends.sequential import Sequential
from fedflat.core.checks import InputError, RunError
from fedflat.core.personal import Heads
from fedflat.core.types import Broadcast
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.client import LocalResult
from fedflat.engine.kept import states_of
from fedflat.engine.problem import refuse_change

RETRIES = 3
"""How often a task is run again whose worker process, or machine, was lost."""
IN_FLIGHT = 2
"""Blocks per worker handed out and not yet added: one that is trained, one that waits."""
PER_WORKER = 4
"""Blocks per worker in a round, at least, so that workers end at about the same time."""
LARGEST = 64
"""Clients in a block, at most, when the recipe names no block size."""
ENTRIES = 2_500_000
"""Entries of a block's messages, at most, when the recipe names no block size (10 MB in float32)."""


@dataclass(frozen=True)
class Done:
    """A trained client: its message ``(d,)``, its head ``(D − d,)`` and two numbers."""

    message: np.ndarray
    personal: np.ndarray
    loss: float
    accuracy: float


@dataclass
class RayTasks:
    """Trains a cohort as Ray tasks. processes: CPUs of a session that is started here; a joined cluster has its own.

    block: clients of a task, or None for a size that fits the cohort, the workers and the model. It changes no result.
    """

    inner: Sequential
    processes: int
    block: int | None = None
    name: str = "ray"
    _session: str = field(default="", repr=False)
    _run: Any = field(default=None, repr=False)
    _task: Any = field(default=None, repr=False)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: Heads) -> None:
        """Train each client of the cohort and add its message, in client order."""
        sizes = {int(c): len(self.inner.data.parts[c]) for c in cohort}
        self._start(broadcast, heads)
        results = self._results([c for c, size in sizes.items() if size], broadcast, heads)
        for client, size in sizes.items():
            if size == 0:
                accumulator.add(torch.zeros(1, self.inner.algorithm.vectors * broadcast.shared.numel()), [0])
                continue
            done = next(results)
            loss, accuracy = torch.tensor([done.loss, done.accuracy], dtype=torch.float64)
            result = LocalResult(view_of(done.message), view_of(done.personal), loss, accuracy)
            self.inner.keep(accumulator, heads, broadcast, client, result)
        refuse_change(self.inner._pieces, "algorithm", everything=True)

    def _start(self, broadcast: Broadcast, heads: Heads) -> None:
        """Put the run into the object store, unless this session has it already."""
        session = connect(self.processes)
        if session == self._session:
            return
        import ray

        self.inner.problem.bind(torch.cat([broadcast.shared, heads.first]))  # buffers as at w^0
        try:
            self._run = ray.put(packed(self.inner))
        except Exception as error:  # any class may refuse in its own way
            raise InputError(
                "engine.backend: found ray with a model or method that cannot be sent to another process "
                f"({one_line(error, 160)}); allowed: one that can be pickled, or engine.backend=sequential."
            ) from error
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(train_block)
        self._session = session

    def blocks(self, clients: list[int], count: int) -> list[list[int]]:
        """Neighbouring clients in blocks, for ``count`` workers."""
        per_client = self.inner.problem.layout.size
        even = math.ceil(len(clients) / (PER_WORKER * count))
        size = self.block or max(1, min(LARGEST, ENTRIES // max(per_client, 1), even))
        return [clients[start : start + size] for start in range(0, len(clients), size)]

    def _results(self, clients: list[int], broadcast: Broadcast, heads: Heads) -> Iterator[Done]:
        """Trained clients in client order; a block is handed out for each one taken back."""
        import ray

        count = workers()
        facts = {f.name: array_of(getattr(broadcast, f.name)) for f in fields(broadcast)}
        told = ray.put(facts | {"vectors": {name: array_of(vector) for name, vector in broadcast.vectors.items()}})
        waiting = iter(self.blocks(clients, count))
        pending: deque[tuple[list[int], Any]] = deque()
        try:
            for block in itertools.islice(waiting, IN_FLIGHT * count):
                pending.append((block, self._send(block, told, broadcast, heads)))
            while pending:
                found = self._fetch(pending, broadcast.round)
                for block in itertools.islice(waiting, 1):
                    pending.append((block, self._send(block, told, broadcast, heads)))
                yield from found
        finally:
            for _, lost in pending:
                ray.cancel(lost)

    def _send(self, block: list[int], told: Any, broadcast: Broadcast, heads: Heads) -> Any:
        own = [self._own(client, broadcast, heads) for client in block]
        # In a list a reference is passed as it is: the worker looks the run up, and unpacks it once.
        return self._task.remote([self._run], told, block, own)

    def _own(self, client: int, broadcast: Broadcast, heads: Heads) -> dict[str, np.ndarray]:
        """What a client keeps, by name; its head's is empty."""
        states = states_of(self.inner.algorithm, heads, client, broadcast.shared)
        return {name: array_of(value) for name, value in {"": heads.of(client), **states}.items()}

    def _fetch(self, pending: deque[tuple[list[int], Any]], round: int) -> list[Done]:
        """The oldest block's answer. Blocks that are ready on other machines are brought here meanwhile."""
        import ray

        ray.wait([reference for _, reference in pending], num_returns=len(pending), timeout=0, fetch_local=True)
        block, reference = pending[0]
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"round {round}, clients {block[0]} to {block[-1]}: a Ray task was lost, {RETRIES} retries included; "
                f"resume the run, with engine.block=1 if memory is short ({one_line(error)})"
            ) from error
        if isinstance(found, str):
            raise (InputError if isinstance(found, Refused) else RunError)(str(found))
        pending.popleft()
        return found  # type: ignore[no-any-return]


class Refused(str):
    """What a task says of a model or method that is refused."""


_UNPACKED: dict[str, Sequential] = {}
"""In a worker: the run it works for, by the name of its object."""


def train_block(
    run: list[Any], told: dict[str, Any], clients: list[int], own: list[dict[str, np.ndarray]]
) -> list[Done] | str:
    """A task: train clients one after the other on one thread; a string says what went wrong."""
    client: int | None = None
    try:
        inner = _unpacked(run[0])
        facts: dict[str, Any] = {k: view_of(v) if isinstance(v, np.ndarray) else v for k, v in told.items()}
        vectors = {name: view_of(vector) for name, vector in facts.pop("vectors").items()}
        broadcast = Broadcast(**facts, vectors=vectors)
        found = []
        for index, client in enumerate(clients):
            found.append(_train(inner, client, broadcast, {name: view_of(v) for name, v in own[index].items()}))
        inner.problem.settle(everything=True)
        return found
    except InputError as error:
        return Refused(error)
    except Exception as error:
        text = str(error) if isinstance(error, RunError) else "".join(traceback.format_exception(error))[-2000:]
        return f"Ray task{'' if client is None else f', client {client}'}: {text}"


def _train(inner: Sequential, client: int, broadcast: Broadcast, own: dict[str, Tensor]) -> Done:
    weights = torch.cat([broadcast.shared, own.pop("")])
    result = inner.one(client, broadcast, weights, own)
    message, personal = array_of(result.message), array_of(result.personal)
    return Done(message, personal, float(result.loss), float(result.accuracy))


def _unpacked(reference: Any) -> Sequential:
    """The run behind a reference; kept until this worker is asked to work for another."""
    import ray

    name = reference.hex()
    if name not in _UNPACKED:
        torch.set_num_threads(1)
        keep_freed_memory()
        _UNPACKED.clear()
        package: Package = ray.get(reference)
        _UNPACKED[name] = package.open()
    return _UNPACKED[name]
