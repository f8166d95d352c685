"""Time back ends in short runs, and remember the outcome for this machine, model and shape."""

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
from fedflat.core.params import PersonalState
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast, Local
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.accumulate import PlainSum
from fedflat.engine.batches import width_of
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Backend, RoundSum
from fedflat.engine.round import RoundParts

VERSION = 6
"""Of the back ends' speed: raised when a change makes earlier trials' outcomes doubtful."""
TRIES, SHORT = 6, 0.5
"""Tries of a back end, as long as they took fewer seconds together; two in any case."""
STEPS = 4
"""Steps of a trial whose cost grows in proportion to them."""
MADE_UP = 100
"""Examples of a made-up client at most, where no largest number is declared."""
POOL = 1 << 24
"""Numbers in the made-up inputs at most (64 MB): clients share rows beyond that."""


@dataclass(frozen=True)
class Choice:
    """A back end by name, its block size where it has one, and the cores it works with (not for workers)."""

    backend: str
    block: int | None = None
    threads: int = 1


def made_up(data: FederatedData, local: Local, clients: int) -> FederatedData:
    """Return clients of made-up examples in the form of ``data``: as many each as is public, whoever has how many.

    So neither what a trial finds, nor how long it takes, follows from anybody's data.
    """
    each = min(data.most or MADE_UP, max(1, 2 * local.batch_size))
    shape = data.input_shape
    rows = min(clients * each, max(each, POOL // max(1, math.prod(shape))))
    draw = stream(0, "trial of back ends")
    inputs, targets = made_rows(data, rows, draw)
    if data.inputs.dim() == 4 and data.inputs.is_contiguous(memory_format=torch.channels_last):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    parts = tuple((np.arange(each) + client * each) % rows for client in range(clients))
    return replace(data, inputs=inputs, targets=targets, parts=parts, held_back=(), names=())


def seconds_per_client(backend: Backend, parts: RoundParts, first: torch.Tensor, clients: int) -> float:
    """Local training, clip and sum of the first ``clients`` clients, the best of a few tries; inf if it fails.

    Nothing stays: the sum is thrown away, heads are copies, and weights are w^0's.
    """
    times: list[float] = []
    while len(times) < 2 or (len(times) < TRIES and sum(times) * clients < SHORT):
        began = time.perf_counter()
        try:
            sum_of(backend, parts, first, np.arange(clients))
        except (RunError, RuntimeError, MemoryError):
            return math.inf
        times.append((time.perf_counter() - began) / clients)
    return min(times)


def sum_of(backend: Backend, parts: RoundParts, first: torch.Tensor, clients: np.ndarray) -> torch.Tensor:
    """Return the clipped sum ``(d,)`` of some clients' messages from w^0, as in a round of its own."""
    size = parts.layout.dimension
    threshold = 1.0 if math.isfinite(parts.clip.bound(1.0)) else math.inf
    zero = torch.zeros(size)
    broadcast = Broadcast(0, first[:size].clone(), threshold, 1.0, vectors=dict.fromkeys(parts.broadcast, zero))
    sink = PlainSum(parts.clip, threshold, parts.message_tensors, parts.message_length)
    kept = PersonalState(first[size:].clone())
    RoundSum(parts.algorithm, parts.local, broadcast, sink, kept).add_cohort(backend, clients)
    return sink.total


def shortened(parts: RoundParts) -> tuple[RoundParts, float]:
    """Return the same parts with few local steps, and by what their time is to be multiplied."""
    local, phases = parts.local, parts.algorithm.phases
    steps = min(local.steps, STEPS)
    whole = sum(local.steps if p.steps is None else p.steps for p in phases)
    kept = tuple(p if p.steps is None else replace(p, steps=min(p.steps, steps)) for p in phases)
    done = sum(steps if p.steps is None else p.steps for p in kept)
    few, method = replace(local, steps=steps, epochs=None), replace(parts.algorithm, phases=kept)
    short = replace(parts, local=few, algorithm=method)
    return short, whole / max(done, 1)


def situation(parts: RoundParts, problem: ModuleProblem, data: FederatedData, cores: int) -> str:
    """Return what a trial's outcome depends on, as a short hash: machine, versions, model, method and shapes."""
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
    """Return the outcome of an earlier trial; None if there is none, or the file cannot be read."""
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
        # Written beside and renamed: runs on one machine share the file.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        fresh.replace(path)


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
