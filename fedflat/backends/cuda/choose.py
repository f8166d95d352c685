"""The fastest way to train clients on a GPU, by a measured trial: recorded graphs of one client on some streams, of a
block of clients, and the plain loop; nothing is believed before its sum agrees with the plain loop's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.trial import Choice, seconds_per_client, shortened, sum_of
from fedflat.data.clients import Federated
from fedflat.engine.device import TOLERANCE
from fedflat.engine.parts import Parts
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.train import Backend

STREAMS = (1, 4, 8)
"""Streams that are tried, as long as more of them are faster."""
VMAPPED = 8
"""Clients of a block by ``torch.func.vmap``."""
LONG_RUN = 600.0
"""Seconds of local training in a run above which compiling the model is tried: it takes up to a minute."""
WORTH = 0.95
"""What a further choice must take of the time of the one before."""

Make = Callable[[Choice, Parts], Backend]


def fastest_on_gpu(
    make: Make,
    parts: Parts,
    problem: ModuleProblem,
    data: Federated,
    first: Tensor,
    blocks: tuple[Choice, ...],
    may_compile: bool,
) -> Choice:
    """Try what applies on a few clients and keep the least seconds per client.

    make: builds a back end for a choice. blocks: choices that train several clients together, where the model allows.
    may_compile: whether the recipe leaves it open.
    """
    short, factor = shortened(parts)
    plain = Choice("sequential")
    check = np.sort(np.argsort(-data.sizes, kind="stable")[:3])
    expected = sum_of(make(plain, short), short, first, check)

    def seconds(choice: Choice) -> float:
        backend = make(choice, short)
        if choice != plain and not _agrees(backend, short, first, check, expected, TOLERANCE[problem.precision]):
            return math.inf
        clients = 2 * max(choice.threads, 1) * max(choice.block or 1, 1)
        return factor * seconds_per_client(backend, short, data, first, min(clients, 512))

    found = {plain: seconds(plain)}
    best = plain
    for streams in (number for number in STREAMS if number <= max(1, parts.plan.sampler.size)):
        choice = Choice("graphs", 1, streams)
        found[choice] = seconds(choice)
        if found[choice] > WORTH * found[best]:
            break
        best = choice
    for choice in blocks:
        found[choice] = seconds(choice)
    best = min(found, key=lambda choice: found[choice])
    whole = found[best] * parts.plan.rounds * parts.plan.sampler.size
    if (best.block or 1) == 1 and whole > LONG_RUN and may_compile:
        compiled = replace(best, compiled=True)
        best = compiled if seconds(compiled) < WORTH * found[best] else best
    return best


def _agrees(
    backend: Backend, parts: Parts, first: Tensor, clients: np.ndarray, expected: Tensor, tolerance: float
) -> bool:
    """Whether a back end runs, and its sum is the plain loop's up to rounding."""
    try:
        found = sum_of(backend, parts, first, clients)
    except Exception:  # kernels, captures and compilers fail in ways of their own
        return False
    apart = torch.linalg.vector_norm(found - expected)
    return bool(apart <= tolerance * torch.linalg.vector_norm(expected).clamp_min(1e-12))
