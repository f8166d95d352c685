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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedflat.backends.ray.package import array_of, packed, view_of
from fedflat.backends.ray.session import connect, one_line, workers
from fedflat.backends.resident import keep_freed_memory
from fedflat.backends.sequential import Sequential, words_of
from fedflat.core.checks import InputError, RunError
from fedflat.core.personal import PersonalState
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

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train each client of the cohort and add its message, in client order."""
        sizes = {int(c): len(self.inner.data.parts[c]) for c in cohort}
        self._start(broadcast, heads)
        results = self._results([c for c, size in sizes.items() if size], broadcast, heads)
        for client, size in sizes.items():
            if size == 0:
                accumulator.add(torch.zeros(1, self.inner.algorithm.vectors * broadcast.shared.numel()), [0])
                continue
            self.inner.keep(accumulator, heads, broadcast, client, LocalResult(**view_of(next(results))))
        refuse_change(self.inner._pieces, "algorithm", everything=True)

    def _start(self, broadcast: Broadcast, heads: PersonalState) -> None:
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

    def _results(self, clients: list[int], broadcast: Broadcast, heads: PersonalState) -> Iterator[dict[str, Any]]:
        """Trained clients in client order; a block is handed out for each one taken back."""
        import ray

        count, told = workers(), ray.put(array_of(vars(broadcast)))
        waiting = iter(self.blocks(clients, count))
        pending: deque[tuple[list[int], Any]] = deque()

        def send(most: int) -> None:
            for block in itertools.islice(waiting, most):
                states = (states_of(self.inner.algorithm, heads, client, broadcast.shared) for client in block)
                own = [array_of({"": heads.of(client), **each}) for client, each in zip(block, states)]
                # In a list a reference is passed as it is: the worker looks the run up, and unpacks it once.
                pending.append((block, self._task.remote([self._run], told, block, own)))

        try:
            send(IN_FLIGHT * count)
            while pending:
                found = self._fetch(pending, broadcast.round)
                send(1)
                yield from found
        finally:
            for _, lost in pending:
                ray.cancel(lost)

    def _fetch(self, pending: deque[tuple[list[int], Any]], round: int) -> list[dict[str, Any]]:
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
        if isinstance(found, tuple):
            kind, text = found
            raise kind(text)
        pending.popleft()
        return found  # type: ignore[no-any-return]


_UNPACKED: dict[str, Sequential] = {}
"""In a worker: the run it works for, by the name of its object."""


def train_block(
    run: list[Any], told: dict[str, Any], clients: list[int], own: list[dict[str, np.ndarray]]
) -> list[dict[str, Any]] | tuple[type[Exception], str]:
    """A task: train clients one after the other on one thread, each with what is its own by name (its head's is
    empty). Gives their results as arrays, or what to raise."""
    client: int | None = None
    try:
        inner, broadcast, found = _unpacked(run[0]), Broadcast(**view_of(told)), []
        for client, states in zip(clients, map(view_of, own)):
            result = inner.one(client, broadcast, torch.cat([broadcast.shared, states.pop("")]), states)
            found.append(array_of(vars(result)))
        inner.problem.settle(everything=True)
        return found
    except InputError as error:
        return InputError, str(error)
    except Exception as error:
        return RunError, f"Ray task{'' if client is None else f', client {client}'}: {words_of(error)}"


def _unpacked(reference: Any) -> Sequential:
    """The run behind a reference; kept until this worker is asked to work for another."""
    import ray

    if reference.hex() not in _UNPACKED:
        torch.set_num_threads(1)
        keep_freed_memory()
        _UNPACKED.clear()
        _UNPACKED[reference.hex()] = ray.get(reference).open()
    return _UNPACKED[reference.hex()]
