"""Train clients in worker processes of one thread each: the sequential loop over shared memory.

Data, broadcast and messages live in shared memory; only client numbers and small facts go through queues. The parent
adds the messages in client order, one by one, so the result is bit for bit that of one process with one thread, for any
number of workers; memory is O(workers), not O(cohort).
"""

import atexit
import contextlib
import copy
import os
import pickle
import queue
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from fedflat.backends.in_process import Sequential, as_sent
from fedflat.core import Algorithm, Broadcast, PersonalState, RunError, how_it_ended, leave_to_parent, slices_of
from fedflat.core.imports import Made, load_files, user_files
from fedflat.engine.client import LocalResult
from fedflat.engine.device import keep_freed_memory
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Clipped, Part, states_of

WAIT = 5.0
"""Seconds after which a process that hears nothing looks whether the other is still alive: it costs nothing, and a
worker that was left behind ends soon."""


@dataclass
class Workers:
    """Trains a cohort in ``count`` processes; started at the first round, stopped with ``close`` or the parent."""

    inner: Sequential
    count: int
    name: str = "workers"
    processes: list[Any] = field(default_factory=list, repr=False)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Train each client of the cohort in some process, and yield the results in client order."""
        if not self.processes:
            self._start(len(broadcast.vectors))
        yield from self.inner.in_order(cohort, broadcast, partial(self._results, broadcast, kept))

    def _start(self, vectors: int) -> None:
        """Start the processes, with their shared tensors and their queues."""
        context, inner, count = multiprocessing.get_context("spawn"), self.inner, self.count
        layout, slots = inner.problem.layout, 2 * count + 1
        self.spans = spans_of(inner)
        self.tasks: Any = context.Queue()
        self.answers: Any = context.Queue()
        self.slots = torch.zeros(slots, self.spans[-1].stop).share_memory_()
        self.shared = torch.zeros(2 + vectors, layout.dimension).share_memory_()
        self.free = list(range(slots))
        inputs, targets = (side.clone().share_memory_() for side in (inner.data.inputs, inner.data.targets))
        data = replace(inner.data, inputs=inputs, targets=targets, test_inputs=None, test_targets=None)
        shared_inner = replace(inner, data=data, problem=_unbound(inner.problem))
        files = Made(load_files, user_files())  # before all else that is unpacked there
        common = (files, shared_inner, self.tasks, self.answers, self.slots, self.shared)
        with _worker_environment(), _without_main():
            for _ in range(count):
                process = context.Process(target=_work, args=common, daemon=True)
                process.start()
                self.processes.append(process)  # close() joins those that did start
        atexit.register(self.close)

    def _share(self, broadcast: Broadcast) -> None:
        """Put the round's vectors where the workers read them; no task is under way then."""
        self.shared[0] = broadcast.shared
        if broadcast.mask is not None:
            self.shared[1] = broadcast.mask
        for row, vector in zip(self.shared[2:], broadcast.vectors.values()):
            row.copy_(vector)

    def _results(self, broadcast: Broadcast, heads: PersonalState, clients: list[int]) -> Iterator[LocalResult]:
        """Yield the clients' results in their order, handing out tasks as slots come free."""
        self._share(broadcast)
        (message, head), ready = self.spans[:2], dict[int, tuple[int, list[Tensor]]]()
        empty = torch.empty(0)  # the vectors themselves lie in shared memory
        names, mask = dict.fromkeys(broadcast.vectors, empty), None if broadcast.mask is None else empty
        small = replace(broadcast, shared=empty, vectors=names, mask=mask)
        # Handed out in client order; answers come in any order and wait in their slots.
        waiting = list(reversed(clients))
        for client in clients:
            while client not in ready:
                self._hand_out(waiting, small, heads)
                trained, slot, outcome = self._answer()
                if isinstance(outcome, Exception):
                    raise outcome
                ready[trained] = slot, [torch.tensor(number) for number in outcome]
            slot, numbers = ready.pop(client)
            yield LocalResult(self.slots[slot, message], self.slots[slot, head], *numbers)
            self.free.append(slot)

    def _hand_out(self, waiting: list[int], small: Broadcast, heads: PersonalState) -> None:
        _, head, *states = self.spans
        while waiting and self.free:
            client, slot = waiting.pop(), self.free.pop()
            # The slot is free: its last message has been added.
            self.slots[slot, head] = heads.of(client)
            for where, state in zip(states, states_of(self.inner.algorithm, heads, client, self.shared[0]).values()):
                self.slots[slot, where] = state
            self.tasks.put((client, slot, small))

    def _answer(self) -> Any:
        """Return what a worker says of a client: its number and slot, then its loss and accuracy, or an error."""
        while True:
            try:
                return self.answers.get(timeout=WAIT)
            except queue.Empty:
                for process in self.processes:
                    if not process.is_alive():
                        ended = how_it_ended(process.exitcode)
                        way = "resume the run, or take engine.backend=sequential"
                        raise RunError(f"a worker process is gone: {ended}; {way}") from None

    def close(self) -> None:
        """Ask the processes to end, and end those that do not."""
        atexit.unregister(self.close)
        ending, self.processes = self.processes, []
        for _ in ending:
            with contextlib.suppress(ValueError, OSError):
                self.tasks.put(None)
        for process in ending:
            process.join(timeout=WAIT)
            if process.is_alive():
                process.kill()


def spans_of(inner: Sequential) -> tuple[slice, ...]:
    """Return where a client's message, its head and each of its states are in a slot."""
    layout, method = inner.problem.layout, inner.algorithm
    sizes = method.vectors * layout.dimension, layout.size - layout.dimension
    return slices_of([*sizes, *(layout.dimension for _ in method.client_state)])


def _unbound(problem: ModuleProblem, uncopied: Iterable[Tensor] = ()) -> ModuleProblem:
    """Return a problem whose module can be sent to another process: parameters unbound from any shared vector.

    uncopied: tensors that stay where they are.
    """
    module, layout = copy.deepcopy(problem.module, {id(tensor): tensor for tensor in uncopied}), problem.layout
    return ModuleProblem(module, layout, problem.precision, onednn=problem.onednn, objective=problem.objective)


@contextlib.contextmanager
def _without_main() -> Any:
    """Children must not run the user's script again, as ``spawn`` would: they need nothing of it (see ``portable``)."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(**hidden)


def portable(problem: ModuleProblem, algorithm: Algorithm) -> str:
    """Return what worker processes cannot be handed, in words; "" if they can be handed everything. It is sent as a
    pickle (nothing is read back), and nothing of it may live in the user's script, which the workers do not run.
    """
    if any(type(layer).__module__ == "__main__" for layer in problem.module.modules()):
        return "a model"
    for label, part in (("a model", problem.module), ("a method", algorithm), ("a loss", problem.objective)):
        try:
            sent = pickle.dumps(part)
        except Exception:  # any class may refuse in its own way
            return label
        if label != "a model" and b"__main__" in sent:
            return label
    return ""


@contextlib.contextmanager
def _worker_environment() -> Any:
    """Children read these when they start: one thread each, and memory in large pages where glibc and Linux offer them
    on request (activations of 10 MB are thousands of small ones)."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    pages = "" if "glibc.malloc.hugetlb" in tunables else "glibc.malloc.hugetlb=1"
    tunables, before = ":".join(filter(None, (tunables, pages))), dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLIBC_TUNABLES=tunables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _next(tasks: Any) -> Any:
    """Return the next task; None to end, also when the parent has died without saying so."""
    parent = multiprocessing.parent_process()
    while True:
        try:
            return tasks.get(timeout=WAIT)
        except queue.Empty:
            if parent is not None and not parent.is_alive():
                return None


def _work(_: None, inner: Sequential, tasks: Any, answers: Any, slots: Tensor, shared: Tensor) -> None:
    """Train, in a worker, the clients it is given until it is given None.

    What the module keeps beside its tensors is looked at before the answer that may be a worker's last of the round.
    """
    leave_to_parent()
    # One order of every sum, and one core for one client.
    torch.set_num_threads(1)
    keep_freed_memory()
    # Buffers arrive in memory that all workers share, and what a client's data write into them is its own.
    inner = replace(inner, problem=_unbound(inner.problem, inner.problem.module.parameters()))
    message, head, *states = spans_of(inner)
    task = _next(tasks)
    while task is not None:
        client, slot, small = task
        task = ()
        try:
            mask, vectors = None if small.mask is None else shared[1].bool(), dict(zip(small.vectors, shared[2:]))
            broadcast = replace(small, shared=shared[0], vectors=vectors, mask=mask)
            values = {kind.name: slots[slot, at].clone() for kind, at in zip(inner.algorithm.client_state, states)}
            result = inner.one(client, broadcast, torch.cat([shared[0], slots[slot, head]]), values)
            slots[slot, message] = result.message
            slots[slot, head] = result.personal
            with contextlib.suppress(queue.Empty):
                task = tasks.get_nowait()
            if not task and getattr(inner.problem.module, "frozen", False) is not True:  # maybe its last of the round
                inner.problem.restore_and_check(everything=True)
            answers.put((client, slot, (float(result.loss), float(result.accuracy))))
        except Exception as error:  # a user's piece or module may fail in any way
            answers.put((client, slot, as_sent(error, f"worker, client {client}")))
        task = _next(tasks) if task == () else task
