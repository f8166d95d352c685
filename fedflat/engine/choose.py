"""Which back end trains a cohort: the one a recipe names, or the one a short trial on this machine finds fastest."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedflat.core.checks import InputError, one_of
from fedflat.core.types import Broadcast
from fedflat.data.clients import Federated
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.heads import Heads
from fedflat.engine.parts import Parts
from fedflat.engine.problem import BlockProblem, ModuleProblem
from fedflat.engine.sequential import Sequential
from fedflat.engine.train import Backend
from fedflat.engine.vectorized import Vectorized
from fedflat.engine.workers import Workers

BACKENDS = ("auto", "sequential", "vectorized", "workers")
BLOCK_ENTRIES = 32_000_000
"""Weights of a block of clients held at once, in float32 entries (128 MB), when the recipe names no block size."""
LONG_ROUND = 0.5
"""Seconds of local training per round above which worker processes pay for their start."""


def backend_for(
    name: str,
    block: int | None,
    processes: int | None,
    parts: Parts,
    problem: ModuleProblem,
    data: Federated,
    seed: int,
) -> Backend:
    """The back end a recipe asks for; ``auto`` vectorises dense models and measures one client of the others."""
    one_of("engine.backend", name, BACKENDS)
    alone = Sequential(parts.algorithm, problem, parts.local, data, seed)
    cores = processes or torch.get_num_threads()
    if name == "auto":
        name = _fastest(alone, parts, cores)
    if name == "workers":
        if not _portable(problem.module):
            raise InputError(
                "engine.backend: found workers with a model that cannot be sent to another process; allowed: a model whose "
                "class is defined at the top of a module, or engine.backend=sequential."
            )
        return Workers(alone, cores)
    if name == "sequential":
        return alone
    size = block or max(1, min(512, BLOCK_ENTRIES // parts.layout.size))
    return Vectorized(parts.algorithm, BlockProblem(problem.module, parts.layout), parts.local, data, seed, size)


def _fastest(alone: Sequential, parts: Parts, cores: int) -> str:
    """``vectorized`` for dense models; otherwise worker processes when a round is long enough to feed them."""
    if _dense(alone.problem.module) and parts.local.epochs is None:
        return "vectorized"
    if cores < 2 or not _portable(alone.problem.module):
        return "sequential"
    return "workers" if _seconds_per_round(alone, parts) > LONG_ROUND else "sequential"


def _seconds_per_round(alone: Sequential, parts: Parts) -> float:
    """Local training of an expected cohort, from one step of the largest client; the trial leaves nothing behind."""
    client = int(np.argmax(alone.data.sizes))
    if alone.data.sizes[client] == 0:
        return 0.0
    size = parts.layout.dimension
    first = torch.cat([p.detach().reshape(-1) for p in alone.problem.parameters])
    trial = Sequential(parts.algorithm, alone.problem, replace(parts.local, steps=1, epochs=None), alone.data, alone.seed)
    threshold = 1.0 if math.isfinite(parts.clip.bound(1.0)) else math.inf
    times = []
    for _ in range(2):
        began = time.perf_counter()
        broadcast = Broadcast(0, first[:size].clone(), threshold, 1.0)
        sink = Accumulator(parts.clip, threshold, parts.layout.tensors("shared"), size)
        trial.train(np.array([client]), broadcast, sink, Heads(first[size:].clone()))
        times.append(time.perf_counter() - began)
    alone.problem.bind(first)
    return min(times) * parts.local.steps * parts.plan.sampler.size


def _portable(module: nn.Module) -> bool:
    """Whether worker processes can be handed the module (the standard library sends it as a pickle, nothing is read back)."""
    try:
        pickle.dumps(module)
    except Exception:  # any class may refuse in its own way
        return False
    return True


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread during a run, put back afterwards: cores work on different clients, not on one matrix.

    It also makes the sequential and the worker back ends equal bit for bit.
    """
    before = torch.get_num_threads()
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
