"""Short measured trials of back ends, and the file that remembers their outcome for this machine, model and shape."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.core.checks import RunError
from fedflat.core.personal import PersonalState
from fedflat.core.types import Broadcast
from fedflat.data.clients import FederatedData
from fedflat.engine.accumulate import PlainSum
from fedflat.engine.batches import width_of
from fedflat.engine.parts import Parts
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.train import Backend

VERSION = 5
"""Of the back ends' speed: raised when a change makes earlier trials' outcomes doubtful."""
TRIES, SHORT = 6, 0.5
"""Tries of a back end, as long as they took fewer seconds together; two in any case."""
STEPS = 4
"""Steps of a trial whose cost grows in proportion to them."""


@dataclass(frozen=True)
class Choice:
    """A back end by name, its block size where it has one, and the cores it works with (not for workers)."""

    backend: str
    block: int | None = None
    threads: int = 1


def seconds_per_client(backend: Backend, parts: Parts, data: FederatedData, first: torch.Tensor, clients: int) -> float:
    """Local training, clip and sum of ``clients`` of the largest clients, the best of a few tries; inf if it fails.

    Nothing stays: the sum is thrown away, heads are copies, and weights are w^0's.
    """
    largest = np.sort(np.argsort(-data.sizes, kind="stable")[:clients])
    times: list[float] = []
    while len(times) < 2 or (len(times) < TRIES and sum(times) * len(largest) < SHORT):
        began = time.perf_counter()
        try:
            sum_of(backend, parts, first, largest)
        except (RunError, RuntimeError, MemoryError):
            return math.inf
        times.append((time.perf_counter() - began) / len(largest))
    return min(times)


def sum_of(backend: Backend, parts: Parts, first: torch.Tensor, clients: np.ndarray) -> torch.Tensor:
    """The clipped sum ``(d,)`` of some clients' messages from w^0, as in a round of its own."""
    size = parts.layout.dimension
    threshold = 1.0 if math.isfinite(parts.clip.bound(1.0)) else math.inf
    zero = torch.zeros(size)
    broadcast = Broadcast(0, first[:size].clone(), threshold, 1.0, vectors=dict.fromkeys(parts.broadcast, zero))
    sink = PlainSum(parts.clip, threshold, parts.message_tensors, parts.message_length)
    backend.train(clients, broadcast, sink, PersonalState(first[size:].clone()))
    return sink.total


def shortened(parts: Parts) -> tuple[Parts, float]:
    """The same parts with few local steps, and by what their time is to be multiplied."""
    local, phases = parts.local, parts.algorithm.phases
    steps = min(local.steps, STEPS)
    whole = sum(local.steps if p.steps is None else p.steps for p in phases)
    kept = tuple(p if p.steps is None else replace(p, steps=min(p.steps, steps)) for p in phases)
    done = sum(steps if p.steps is None else p.steps for p in kept)
    short = replace(
        parts, local=replace(local, steps=steps, epochs=None), algorithm=replace(parts.algorithm, phases=kept)
    )
    return short, whole / max(done, 1)


def situation(parts: Parts, problem: ModuleProblem, data: FederatedData, cores: int) -> str:
    """What a trial's outcome depends on, as a short hash: machine, versions, model, method and shapes."""
    facts = (
        VERSION,
        platform.node(),
        platform.processor(),
        torch.__version__,
        torch.get_num_threads(),
        cores,
        str(problem.module),
        problem.precision,
        problem.onednn,
        problem.objective.task,
        problem.objective.own is None,
        str(problem.device) if problem.device.type == "cpu" else torch.cuda.get_device_name(problem.device),
        str(parts.layout.shapes),
        repr((parts.algorithm.name, parts.algorithm.phases, parts.algorithm.transforms)),
        repr(replace(parts.local, lr=0.0, lr_decay=1.0, schedule="constant", warmup=0, rounds=1)),
        type(parts.clip).__name__,
        int(math.log2(max(parts.plan.sampler.size, 1))),
        width_of(data, parts.local.batch_size),
        problem.random,
        data.input_shape,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def cache_file() -> Path:
    """``$XDG_CACHE_HOME/fedflat/backends.json``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedflat" / "backends.json"


def remembered(key: str) -> Choice | None:
    """The outcome of an earlier trial; None if there is none, or the file cannot be read."""
    found: Any = _read().get(key)
    try:
        block = None if found["block"] is None else int(found["block"])
        return Choice(str(found["backend"]), block, int(found["threads"]))
    except (TypeError, KeyError, ValueError):
        return None


def remember(key: str, choice: Choice) -> None:
    """Write an outcome down; a cache that cannot be written is no error."""
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {**_read(), key: asdict(choice)}
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        fresh.replace(path)


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
