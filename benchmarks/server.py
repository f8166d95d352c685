"""What the server does once a round, beside the clients — the real ``finish_round`` — against memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

INPUTS = ((1_117_395, 10), (12_464_716, 10))
"""Linear layers of 11,173,960 parameters (as many as ResNet-18 has, to a few) and 124,647,170 (RoBERTa)."""


def server_costs(shapes: tuple[tuple[int, int], ...] = INPUTS) -> list[dict[str, Any]]:
    """Per size: seconds of drawing the noise, of everything else of a round's end, of adding one client's clipped
    update, of a checkpoint, and of copying as many floats (read 4 B, write 4 B each)."""
    return [_one(*shape) for shape in shapes]


def _one(inputs: int, outputs: int) -> dict[str, Any]:
    import tempfile
    from pathlib import Path

    from fedflat.assembly.jobs import prepare
    from fedflat.config.recipe import Recipe
    from fedflat.core.params import PersonalState
    from fedflat.engine.round import accumulator_of, broadcast_of, finish_round
    from fedflat.records import checkpoint

    clients = [(torch.zeros(1, inputs), torch.zeros(1, dtype=torch.int64)) for _ in range(2)]
    job = prepare(Recipe.of(_recipe()), nn.Linear(inputs, outputs), clients)
    parts, size = job.parts, job.parts.layout.dimension
    state = parts.first_state(job.initial_weights, job.threshold)
    broadcast = broadcast_of(parts, state, 0)
    accumulator = accumulator_of(parts, broadcast, job.key)
    update = torch.full((1, size), 1e-3)
    add = _seconds(lambda: accumulator.add(update, [1]))
    aggregate = accumulator.result()
    unit = parts.mechanism.unit(job.key, 0, size)  # type: ignore[attr-defined]
    drawn = replace(parts, mechanism=replace(parts.mechanism, drawn=lambda: unit))  # type: ignore[type-var, call-arg]
    with tempfile.TemporaryDirectory() as place:
        saved = _seconds(lambda: checkpoint.save(Path(place), state, PersonalState(torch.zeros(0)), {}), 2)
    other = torch.empty(size)
    return {
        "d": size,
        "noise": _seconds(lambda: parts.mechanism.unit(job.key, 0, size)),  # type: ignore[attr-defined]
        "rest": _seconds(lambda: finish_round(drawn, state, broadcast, aggregate, job.key, lambda line: None)),
        "add": add,
        "checkpoint": saved,
        "copy": _seconds(lambda: other.copy_(job.initial_weights)),
    }


def _recipe() -> dict[str, Any]:
    return {
        "rounds": 10,
        "algorithm": {"name": "dp-fedavg"},
        "local": {"steps": 1, "batch_size": 1},
        "cohort": {"size": 1},
        "privacy": {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "engine": {"backend": "sequential"},
    }


def _seconds(work: Callable[[], Any], tries: int = 4) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
