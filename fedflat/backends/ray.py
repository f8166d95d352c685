"""Train clients as Ray tasks: the sequential loop over blocks of a cohort, on one machine or many.

Data and module go into Ray's object store once a run, the broadcast once a round; workers read both in place. A task
gets client numbers (and what is their own) and answers with their messages, one vector a client. The driver adds them
in client order, one by one, so the result is bit for bit that of one process with one thread, for any number of workers
and any block size. A task is a function of (seed, round, client, broadcast): one that is lost with its worker is run
again, with the same result. At most ``IN_FLIGHT`` blocks a worker are under way: memory does not grow with the cohort.
"""

import copy
import functools
import itertools
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.backends.in_process import Sequential, as_sent
from fedflat.core import Broadcast, Made, PersonalState, load_files, own_code, user_files
from fedflat.core.checks import RunError, becoming, one_line, wrong
from fedflat.data.clients import FederatedData
from fedflat.engine.client import LocalResult
from fedflat.engine.device import keep_freed_memory
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Clipped, Part, states_of
from fedflat.records.opening import processor

RETRIES = 3
"""How often a task is run again whose worker process, or machine, was lost."""
IN_FLIGHT = 2
"""Blocks per worker handed out and not yet added: one that is trained, one that waits."""
PER_WORKER, LARGEST, ENTRIES = 4, 64, 2_500_000
"""When the recipe names no block size: blocks per worker in a round, at least, so that workers end at about the same
time; clients in a block and entries of its messages (10 MB in float32), at most."""


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

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Train each client of the cohort in some task, and yield the results in client order."""
        if (session := connect(self.processes)) != self._session:
            self._start(torch.cat([broadcast.shared, kept.first]))
            self._session = session
        yield from self.inner.in_order(cohort, broadcast, lambda ids: self._results(ids, broadcast, kept))

    def _start(self, weights: Tensor) -> None:
        """Put the run into the object store."""
        import ray

        self.inner.problem.bind(weights)  # buffers as at w^0
        unsent, allowed = "ray with a model or method that cannot be sent", "what can be pickled, or another back end"
        with becoming(lambda error: wrong("engine.backend", f"{unsent} ({one_line(error)})", allowed)):
            # In a list a reference is passed as it is: the worker looks the run up, and unpacks it once.
            self._run = [versions(), ray.put(packed(self.inner))]
        problem, apart = self.inner.problem, {}
        if user_files() or any(map(own_code, (problem.module, problem.objective, self.inner.algorithm))):
            # A user's code may leave in a process what nobody watches: the next run gets processes of its own.
            apart = {"runtime_env": {"env_vars": {"FEDFLAT_PROCESSES_OF": os.urandom(8).hex()}}}
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES, **apart)(train_block)

    def blocks(self, clients: list[int], count: int) -> list[list[int]]:
        """Return neighbouring clients in blocks, for ``count`` workers."""
        even = math.ceil(len(clients) / (PER_WORKER * count))
        size = self.block or max(1, min(LARGEST, ENTRIES // max(self.inner.problem.layout.size, 1), even))
        return [clients[start : start + size] for start in range(0, len(clients), size)]

    def _results(self, clients: list[int], broadcast: Broadcast, heads: PersonalState) -> Iterator[LocalResult]:
        """Yield the trained clients in client order; a block is handed out for each one taken back."""
        import ray

        count = max(1, int(ray.cluster_resources().get("CPU", 1)))  # as many tasks run at a time
        sent, waiting = ray.put(in_place(broadcast)), iter(self.blocks(clients, count))
        pending: deque[tuple[list[int], Any]] = deque()

        def send(most: int) -> None:
            for block in itertools.islice(waiting, most):
                states = (states_of(self.inner.algorithm, heads, client, broadcast.shared) for client in block)
                personal = [(in_place(heads.of(client)), in_place(values)) for client, values in zip(block, states)]
                pending.append((block, self._task.remote(self._run, sent, block, personal)))

        send(IN_FLIGHT * count)
        while pending:  # where one fails, the others are left to end: to cancel a task that ends may abort this process
            results = self._fetch(pending, broadcast.round)
            send(1)
            yield from results

    def _fetch(self, pending: deque[tuple[list[int], Any]], round: int) -> list[LocalResult]:
        """Return the oldest block's answer. Blocks that are ready on other machines are brought here meanwhile."""
        import ray

        # Asking for none only starts the transfer of those that are ready.
        ray.wait([reference for _, reference in pending], num_returns=len(pending), timeout=0, fetch_local=True)
        block, reference = pending[0]
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayError as error:
            smaller = " with engine.block=1" if isinstance(error, ray.exceptions.OutOfMemoryError) else ""
            raise RunError(
                f"round {round}, clients {block[0]} to {block[-1]}: a Ray task was lost, {RETRIES} retries included; "
                f"resume the run{smaller} ({one_line(error)})"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        pending.popleft()
        return answer  # type: ignore[no-any-return]


def train_block(
    run: list[Any], broadcast: Broadcast, clients: list[int], personal: list[tuple[Tensor, dict[str, Tensor]]]
) -> list[LocalResult] | Exception:
    """Train clients on one thread, as a Ray task, each with its head and states; return their results, or what to
    raise."""
    try:
        inner, results = _unpacked(*run), []
        for client, (head, states) in zip(clients, personal):
            results.append(in_place(inner.one(client, broadcast, torch.cat([broadcast.shared, head]), states)))
        inner.problem.restore_and_check(everything=True)
        return results
    except Exception as error:  # a user's piece or module may fail in any way
        return as_sent(error, "Ray task")


@functools.lru_cache(maxsize=1)
def _unpacked(wanted: str, reference: Any) -> Sequential:
    """Return, in a worker, the run it works for. Raises RunError where other versions or processors compute it."""
    import ray

    if versions() != wanted:
        raise RunError(f"a machine of the Ray cluster has {versions()}, the driver {wanted}")
    torch.set_num_threads(1)
    keep_freed_memory()
    return ray.get(reference)  # type: ignore[no-any-return]


def versions() -> str:
    """Return what decides the numbers a worker computes: were machines unlike, another client's coin, which moves all
    behind it to other machines, would change their messages."""
    listed = [f"{name} {sys.modules[name].__version__}" for name in ("fedflat", "torch", "numpy")]
    return ", ".join([*listed, torch.backends.cpu.get_cpu_capability(), f"processor {processor()}"])


def packed(inner: Sequential) -> Made:
    """Return what arrives as the same back end on its training data alone, without test data and held-back examples.

    The text of a user's own files is sent first, for other processes cannot import them.
    """
    data, original = inner.data, inner.problem
    used, rows = np.unique(np.concatenate([*data.parts, np.empty(0, np.int64)]), return_inverse=True)
    selected = torch.from_numpy(used) if len(used) < len(data.inputs) else slice(None)
    constants = (data.classes, data.name, data.vocabulary, data.padding, data.most)
    examples = in_place(data.inputs[selected]), in_place(data.targets[selected])
    parts = Made(tuple, Made(np.split, rows, np.cumsum(data.sizes)[:-1]))
    federation = Made(FederatedData, *examples, parts, (), None, None, *constants)
    weights = [weight for weight in original.module.parameters() if weight.is_contiguous()]
    there: dict[int, Any] = {id(w): Made(nn.Parameter, in_place(w), w.requires_grad) for w in weights}
    module = copy.deepcopy(original.module, there)
    problem = functools.partial(ModuleProblem, module, original.layout, original.precision, onednn=original.onednn)
    problem = functools.partial(problem, objective=original.objective)
    files = Made(load_files, user_files())
    return Made(_sequential, files, inner.algorithm, Made(problem), inner.local, federation, inner.seed)


def _sequential(_: None, *arguments: Any) -> Sequential:
    return Sequential(*arguments)


def in_place(value: Any) -> Any:
    """Return a tensor, or those of a dictionary, a broadcast or a result, such that it is an array on its way, which is
    read in place, never written to, where it arrives. Bfloat16, which no array has, and other things travel as they
    are.
    """
    if isinstance(value, Broadcast | LocalResult):
        return type(value)(**in_place(vars(value)))
    if isinstance(value, dict):
        return {name: in_place(item) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.dtype == torch.bfloat16:
        return value
    order = value.dim_order()  # images may be channels-last
    return Made(_view, value.detach().cpu().permute(order).contiguous().numpy(), np.argsort(order).tolist())


def _view(array: np.ndarray, order: list[int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only
        return torch.from_numpy(array).permute(order)


def _begin(ray: Any, address: str, processes: int) -> None:
    local = {"address": "local", "num_cpus": processes, "include_dashboard": False}
    place = local if address in ("", "local") else {"address": address}
    before = signal.getsignal(signal.SIGTERM)  # Ray takes it over
    try:
        ray.init(**place, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds
        where = f"RAY_ADDRESS={address} (RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE')})" if address else "a local Ray"
        raise RunError(f"engine.backend=ray: {where} could not be used: {one_line(error)}") from error
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def connect(processes: int) -> str:
    """Return the name of the session in use: one the caller has opened, the cluster at ``RAY_ADDRESS``, or a local one.

    processes: CPUs of a session that is started here; it stays for later runs. Recent versions of Ray guard it with a
    token (``~/.ray/auth_token``). Raises RunError, one line, where no session comes about.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts: it would report to its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a warning about GPUs, which no task asks for
    import ray

    if not ray.is_initialized():
        _begin(ray, os.environ.get("RAY_ADDRESS", ""), processes)
    context = ray.get_runtime_context()  # another one after every ``ray.init``, whoever called it
    return f"{context.get_node_id()} {context.get_job_id()}"
