"""What the server does once a round, beside the clients: noise, mean, optimiser — against memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def server_costs(sizes: tuple[int, ...] = (11_173_962, 124_647_170)) -> list[dict[str, Any]]:
    """Seconds of a central round's noise and of everything else, and of copying as many floats."""
    return [_one(size) for size in sizes]


def _one(size: int) -> dict[str, Any]:
    from fedflat.core.rng import stream
    from fedflat.pieces.mechanisms import gaussian
    from fedflat.pieces.server import optimizer

    shared, total = torch.zeros(size), torch.zeros(size, dtype=torch.float64)
    step, other = optimizer(name="sgd", lr=1.0, momentum=0.0), torch.empty(size)
    drawn = gaussian(size, 1.0, stream(0, "benchmark"))
    return {
        "d": size,
        "noise": _seconds(lambda: gaussian(size, 1.0, stream(0, "benchmark"))),
        "rest": _seconds(lambda: step(shared, (total + drawn).to(torch.float32) / 50.0, {})),
        "copy": _seconds(lambda: other.copy_(shared)),
    }


def _seconds(work: Callable[[], Any], tries: int = 3) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
