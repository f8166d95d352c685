"""Time back ends in short runs, and remember the outcome for this machine, model and shape."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from fedflat.core.checks import RunError
from fedflat.core.params import PersonalState
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast, Local
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.batches import width_of
from fedflat.engine.client import steps_of
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Backend, PlainSum, RoundSum
from fedflat.engine.round import RoundParts

VERSION = 7
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
    phases = parts.algorithm.phases
    few = replace(parts.local, steps=min(parts.local.steps, STEPS), epochs=None)
    short = tuple(p if p.steps is None else replace(p, steps=min(p.steps, few.steps)) for p in phases)
    whole, done = (sum(steps_of(p, local) for p in some) for some, local in ((phases, parts.local), (short, few)))
    return replace(parts, local=few, algorithm=replace(parts.algorithm, phases=short)), whole / max(done, 1)


def situation(parts: RoundParts, problem: ModuleProblem, data: FederatedData, cores: int) -> str:
    """Return what a trial's outcome depends on, as a short hash: machine, versions, model, method and shapes."""
    gpu, objective = problem.device.type != "cpu", problem.objective
    place = str(problem.device) if not gpu else torch.cuda.get_device_name(problem.device)
    machine = (platform.node(), platform.processor(), torch.__version__, torch.get_num_threads(), cores, place)
    model = (str(problem.module), problem.precision, problem.onednn, problem.random, str(parts.layout.shapes))
    method = repr((parts.algorithm.name, parts.algorithm.phases, parts.algorithm.transforms, type(parts.clip)))
    local = repr(replace(parts.local, lr=0.0, lr_decay=1.0, schedule="constant", warmup=0, rounds=1))
    shapes = (int(math.log2(max(parts.plan.sampler.size, 1))), width_of(data, parts.local.batch_size), data.input_shape)
    facts = (VERSION, machine, model, objective.task, objective.own is None, method, local, shapes)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def cache_file() -> Path:
    """``$XDG_CACHE_HOME/fedflat/backends.json``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedflat" / "backends.json"


def remembered(key: str) -> Choice | None:
    """Return the outcome of an earlier trial; None if there is none, or the file cannot be read."""
    return _outcomes().get(key)


def remember(key: str, choice: Choice) -> None:
    """Write an outcome down; a cache that cannot be written is no error."""
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed: runs on one machine share the file.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_bytes(_OUTCOMES.dump_json({**_outcomes(), key: choice}, indent=1))
        fresh.replace(path)


_OUTCOMES = TypeAdapter(dict[str, Choice])


def _outcomes() -> dict[str, Choice]:
    try:
        return _OUTCOMES.validate_json(cache_file().read_bytes())
    except (OSError, ValueError):
        return {}
