"""The neighbours of the mechanism audit: what the canary sends, and what the others send beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.audit.bench import Bench, Client

LOUD = 100.0
"""Norms before the clip, in units of C: whatever a transform keeps of such an update is still clipped."""
MANY = 1_000_000
"""Examples that a greedy client claims, where the others have one."""


@dataclass(frozen=True)
class Canary:
    """A pair of neighbours. make: (bench, C) -> (every other client, the canary)."""

    name: str
    make: Callable[[Bench, float], tuple[Client, Client]]


def _silence(bench: Bench) -> Client:
    return Client(torch.zeros_like(bench.state.shared))


def _even(bench: Bench, purpose: str) -> Tensor:
    """A random vector with the same norm, 1, in every tensor."""
    vector = bench.random(purpose)
    for where in bench.parts.layout.tensors("shared"):
        vector[where] /= torch.linalg.vector_norm(vector[where])
    return vector


def _direction(bench: Bench, threshold: float) -> tuple[Client, Client]:
    vector = bench.random("direction")
    return _silence(bench), Client(vector / torch.linalg.vector_norm(vector) * threshold * LOUD)


def _every_tensor(bench: Bench, threshold: float) -> tuple[Client, Client]:
    return _silence(bench), Client(_even(bench, "every tensor") * threshold * LOUD)


def _opposed(bench: Bench, threshold: float) -> tuple[Client, Client]:
    vector = _even(bench, "opposed") * threshold * LOUD
    return Client(vector), Client(-vector, MANY)


def _apart(bench: Bench, threshold: float) -> tuple[Client, Client]:
    """The others in the first half of every tensor, the canary in the second."""
    first, second = _even(bench, "apart") * threshold * LOUD, _even(bench, "apart too") * threshold * LOUD
    for where in bench.parts.layout.tensors("shared"):
        middle = (where.start + where.stop + 1) // 2
        second[where.start : middle] = 0
        first[middle : where.stop] = 0
    return Client(first), Client(second)


def _silent(bench: Bench, threshold: float) -> tuple[Client, Client]:
    return _silence(bench), _silence(bench)


def _sparse(bench: Bench, threshold: float) -> tuple[Client, Client]:
    """One entry of each tensor: a top-k or LUS mask keeps all of it."""
    vector = torch.zeros_like(bench.state.shared)
    vector[[where.start for where in bench.parts.layout.tensors("shared")]] = threshold * LOUD
    return _silence(bench), Client(vector)


def _against_direction(bench: Bench, threshold: float) -> tuple[Client, Client]:
    """Through PGN's re-added direction: the canary pulls against what the server broadcasts, the others along it."""
    vector = bench.state.slots.get("direction", bench.random("direction"))
    vector = vector / torch.linalg.vector_norm(vector) * threshold * LOUD
    return Client(vector), Client(-vector)


CANARIES = (
    Canary("random direction at C", _direction),
    Canary("every tensor at C", _every_tensor),
    Canary("against the others, far more data", _opposed),
    Canary("where no other mask is", _apart),
    Canary("silent client", _silent),
    Canary("one entry per tensor", _sparse),
)
AGAINST_DIRECTION = Canary("against the re-added direction", _against_direction)


def canaries_for(bench: Bench) -> tuple[Canary, ...]:
    """The canaries of a method: all, and one more against the direction that it broadcasts, if it does."""
    return (*CANARIES, AGAINST_DIRECTION) if "direction" in bench.state.slots else CANARIES
