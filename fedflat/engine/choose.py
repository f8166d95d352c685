"""Which back end trains a cohort."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedflat.core.checks import one_of
from fedflat.data.clients import Federated
from fedflat.engine.parts import Parts
from fedflat.engine.problem import BlockProblem, ModuleProblem
from fedflat.engine.sequential import Sequential
from fedflat.engine.train import Backend
from fedflat.engine.vectorized import Vectorized

BACKENDS = ("auto", "sequential", "vectorized")
SMALL = 1_000_000
BLOCK_ENTRIES = 32_000_000
"""Weights of a block of clients held at once, in float32 entries (128 MB), when the recipe names no block size."""


def backend_for(
    name: str, block: int | None, parts: Parts, problem: ModuleProblem, data: Federated, seed: int
) -> Backend:
    """The back end a recipe asks for; ``auto`` vectorises dense models and trains the others client by client."""
    one_of("engine.backend", name, BACKENDS)
    if name == "auto":
        name = "vectorized" if _dense(problem.module) else "sequential"
    if name == "sequential":
        return Sequential(parts.algorithm, problem, parts.local, data, seed)
    size = block or max(1, min(512, BLOCK_ENTRIES // parts.layout.size))
    return Vectorized(parts.algorithm, BlockProblem(problem.module, parts.layout), parts.local, data, seed, size)


@contextmanager
def threads_for(backend: Backend, size: int) -> Iterator[None]:
    """torch's intra-op threads during a run, put back afterwards.

    A block of small dense models is many short operations, for which waking a second thread costs more than it
    brings: one thread. Everything else keeps torch's own number.
    """
    before = torch.get_num_threads()
    if backend.name == "vectorized" and size < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _dense(module: nn.Module) -> bool:
    """Whether every layer with weights is linear, and nothing is random: batched matrix products win there."""
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    random = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
    return bool(layers) and all(isinstance(m, nn.Linear) for m in layers) and not random
