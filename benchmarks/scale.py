"""``python -m benchmarks.scale``: what a round on Ray costs beyond its clients' arithmetic, and a projection from that.

Three kinds of clients. *empty*: no arithmetic, a whole message; such a round is nothing but overhead. *waiting*: a
fixed wait instead of arithmetic, so that more workers than cores mean something. *W1*: real training. Rounds of the Ray
and of the worker back end take turns, the same clients alone in one process beside them. CPU seconds of all processes
stand beside wall-clock seconds, for a busy machine stretches the latter. Results go to ``benchmarks/results/ray.json``
and ``ray.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scale_paper import Costs, markdown
from benchmarks.workloads import BY_NAME, network
from fedflat.backends.in_process import Sequential
from fedflat.backends.ray import RayTasks
from fedflat.backends.workers import Workers
from fedflat.core.params import PersonalState, layout_of
from fedflat.core.process import using_threads
from fedflat.core.types import Algorithm, Broadcast, ClientView, Local, Phase
from fedflat.data.clients import FederatedData
from fedflat.engine.device import keep_freed_memory, resident
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import PlainSum, RoundSum
from fedflat.pieces.clipping import whole_vector

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WARM = 3
"""Rounds before the measured ones."""
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Pause:
    """A transform that waits, in place of arithmetic."""

    seconds: float

    def __call__(self, update: torch.Tensor, view: ClientView) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return update


@dataclass(frozen=True)
class Kind:
    """Clients to measure. model: of which workload. pause: seconds of waiting; None for real training."""

    name: str
    model: str
    clients: int
    pause: float | None = None


KINDS = [
    Kind("empty, d = 50,890", "W2", 256, 0.0),
    Kind("empty, d = 667,402", "W1", 64, 0.0),
    Kind("empty, d = 11.2 million", "W3", 8, 0.0),
    Kind("waiting 50 ms, d = 667,402", "W1", 32, 0.05),
    Kind("W1, 6 clients, d = 667,402", "W1", 6),
]


def loop(kind: Kind) -> Sequential:
    """The sequential back end of a kind, on made-up data."""
    workload = BY_NAME[kind.model]
    examples = workload.examples if kind.pause is None else 1
    rng, rows = np.random.default_rng(0), kind.clients * examples
    inputs = torch.from_numpy(rng.standard_normal((rows, *workload.shape), dtype=np.float32))
    parts = tuple(np.arange(i * examples, (i + 1) * examples) for i in range(kind.clients))
    none = (np.empty(0, dtype=np.int64),) * kind.clients
    targets = torch.from_numpy(rng.integers(0, workload.classes, rows))
    data = FederatedData(inputs, targets, parts, none, None, None, workload.classes, "benchmark")
    module = network(workload)
    problem = ModuleProblem(module, layout_of(module))
    waiting = Algorithm("pause", phases=(Phase(steps=0),), transforms=(Pause(kind.pause or 0.0),))
    steps = workload.epochs * -(-examples // workload.batch)
    local = Local(steps=steps, batch_size=workload.batch, lr=workload.lr, momentum=0.0)
    algorithm = Algorithm("fedavg") if kind.pause is None else waiting
    return Sequential(algorithm, problem, local, resident(data, module), 0)


def start_of(inner: Sequential) -> Broadcast:
    """The broadcast of a round."""
    return Broadcast(0, torch.zeros(inner.problem.layout.size), 1.0, 1.0)


@dataclass(frozen=True)
class Spent:
    """Seconds of a round: on the clock, of the driver's thread, of all processes together; and its sum."""

    seconds: float
    driver: float
    cpu: float
    total: torch.Tensor


def cpu_seconds() -> float:
    """CPU seconds so far of this process and all it has started, Ray's own included (in ticks of 10 ms)."""
    import psutil

    found = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def timed_round(backend: Any, inner: Sequential) -> Spent:
    """One round."""
    layout, broadcast = inner.problem.layout, start_of(inner)
    sink = PlainSum(whole_vector(1.0), 1.0, layout.tensors(), layout.size)
    cohort, heads = np.arange(inner.data.clients), PersonalState(torch.zeros(0))
    spent, began, busy = cpu_seconds(), time.perf_counter(), time.thread_time()
    RoundSum(inner.algorithm, inner.local, broadcast, sink, heads).add_cohort(backend, cohort)
    seconds, driver = time.perf_counter() - began, time.thread_time() - busy
    return Spent(seconds, driver, cpu_seconds() - spent, sink.total)


def alone(inner: Sequential) -> tuple[float, float]:
    """Seconds, and CPU seconds, of the clients' own work, one after the other, nothing sent and nothing added."""
    broadcast = start_of(inner)
    began, busy = time.perf_counter(), time.thread_time()
    for client in range(inner.data.clients):
        inner.one(client, broadcast, broadcast.shared.clone())
    return time.perf_counter() - began, time.thread_time() - busy


def measure(kind: Kind, workers: int, rounds: int, others: bool = True) -> dict[str, Any]:
    """Rounds of all back ends in turn, after some that warm up (processes, memory touched first)."""
    inner = loop(kind)
    backends: dict[str, Any] = {"ray": RayTasks(inner, workers)}
    if others:
        backends["workers"] = Workers(inner, workers)
    spent: dict[str, list[Spent]] = {name: [] for name in backends}
    own: list[tuple[float, float]] = []
    load, first = os.getloadavg()[0], None
    same = True
    for index in range(rounds + WARM):
        if index >= WARM and (len(own) < 2 or not kind.pause):
            own.append(alone(inner))
        for name, backend in backends.items():
            found = timed_round(backend, inner)
            first = found.total if first is None else first
            same = same and torch.equal(found.total, first)
            spent[name] += [found] if index >= WARM else []
    if others:
        backends["workers"].close()
    usual = min if kind.pause else statistics.median  # a wait is as long as its shortest
    arithmetic, cpu = (usual(pair[i] for pair in own) for i in (0, 1))
    row: dict[str, Any] = {"kind": kind.name, "d": inner.problem.layout.size, "clients": kind.clients}
    row |= {"count": workers, "load": (load, os.getloadavg()[0]), "arithmetic": arithmetic, "cpu": cpu, "same": same}
    return row | {
        name: _summary(found, row, workers if kind.pause else min(workers, CORES)) for name, found in spent.items()
    }


def _summary(spent: list[Spent], row: dict[str, Any], side_by_side: int) -> dict[str, float]:
    """Medians (CPU: means, for its ticks are long) and what is left of them without arithmetic."""
    seconds, cpu = statistics.median(s.seconds for s in spent), statistics.mean(s.cpu for s in spent)
    return {
        "seconds": seconds,
        "min": min(s.seconds for s in spent),
        "overhead": seconds - row["arithmetic"] / side_by_side,
        "cpu_overhead": cpu - row["cpu"],
        "driver": statistics.median(s.driver for s in spent),
    }


def best(action: Callable[[], Any], tries: int = 7) -> float:
    """The least seconds of a few tries."""
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        kept = action()
        seconds.append(time.perf_counter() - began)
        del kept
    return min(seconds)


def constants() -> dict[str, float]:
    """The parts of the overhead, each by itself, on the session that runs (at least one worker)."""
    import ray

    size = 2_500_000  # 10 MB
    vector = np.ones(size, np.float32)
    answer = ray.remote(num_cpus=1)(answer_of)
    ray.get(answer.remote(size))
    empty, whole = best(lambda: ray.get(answer.remote(0)), 50), best(lambda: ray.get(answer.remote(size)))
    ready = [answer.remote(size) for _ in range(7)]
    ray.wait(ready, num_returns=len(ready))
    read = min(best(lambda r=r: float(ray.get(r).sum()), 1) for r in ready)  # type: ignore[misc]
    here = best(lambda: float(vector.sum()))
    count = 500
    began, busy = time.perf_counter(), time.thread_time()
    ray.get([answer.remote(0) for _ in range(count)])
    each, each_driver = (time.perf_counter() - began) / count, (time.thread_time() - busy) / count
    sink = PlainSum(whole_vector(1.0), 1.0, (slice(0, size),), size)
    message = torch.ones(1, size)
    return {
        "put_per_mb": best(lambda: ray.put(vector)) / 10,
        "task_latency": empty,
        "task_throughput": each,
        "task_driver": each_driver,
        "answer_per_mb": max(0.0, whole - empty) / 10,
        "read_per_mb": max(0.0, read - here) / 10,
        "add_per_mb": best(lambda: sink.add(message, [1])) / 10,
        "first_mb_puts": best(lambda: ray.put(vector[:250_000])),
    }


def answer_of(size: int) -> np.ndarray:
    """A task that answers with a vector."""
    return np.ones(size, np.float32)


def transfer() -> float:
    """Seconds per MB between the object stores of two nodes on this machine."""
    command = [sys.executable, "-m", "benchmarks.scale_transfer"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    return float(done.stdout.split()[-1])


def costs(rows: list[dict[str, Any]], constants: dict[str, float]) -> list[Costs]:
    """What the projection needs, in CPU seconds: the empty rounds' medians over numbers of workers, the clients' own.

    The worker's share is all that is not the driver's thread, Ray's processes included, and the wait for a task.
    """
    found = []
    for kind, examples in ((KINDS[0], 64), (KINDS[1], 4), (KINDS[2], 1)):
        client = alone(loop(Kind("", kind.model, examples)))[1] / examples
        mine = [row["ray"] for row in rows if row["kind"] == kind.name]
        driver = statistics.median(ray["driver"] for ray in mine) / kind.clients
        rest = statistics.median(max(0.0, ray["cpu_overhead"] - ray["driver"]) for ray in mine) / kind.clients
        size = loop(kind).problem.layout.size
        wire = 4e-6 * size * constants["transfer_per_mb"]
        found.append(Costs(kind.model, size, client, rest + constants["task_throughput"], driver, wire))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each back end")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--many", type=int, default=16, help="workers for one more measurement of waiting clients")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    import platform

    import ray

    from benchmarks.turns import machine

    keep_freed_memory()
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "rounds": given.rounds}
    report["versions"] = {"python": platform.python_version(), "ray": ray.__version__, "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    plan = [(kind, workers, True) for workers in given.workers for kind in KINDS]
    plan += [(kind, given.many, False) for kind in KINDS if kind.pause and given.many]
    with using_threads(1):
        for kind, workers, others in plan:
            rows.append(measure(kind, workers, given.rounds, others))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if workers == given.workers[0] and kind is KINDS[0]:
                report["constants"] = constants()
        ray.shutdown()
        report["constants"]["transfer_per_mb"] = transfer()
        report |= {"rows": rows, "costs": [vars(c) for c in costs(rows, report["constants"])]}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "ray.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (given.out / "ray.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    from benchmarks.scale import main as run  # workers look classes up in the module by its name

    run()
