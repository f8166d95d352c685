"""Which back end trains a cohort: the one a recipe names, or the one a short trial on this machine finds fastest."""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np
import torch

from fedflat.backends.cuda.graphs import Graphs
from fedflat.backends.mlp.dense import DenseProblem
from fedflat.backends.mlp.lowrank import LowRankProblem
from fedflat.backends.ray import RayTasks
from fedflat.backends.sequential import Sequential
from fedflat.backends.trial import (
    Choice,
    remember,
    remembered,
    seconds_per_client,
    shortened,
    situation,
    sum_of,
)
from fedflat.backends.vectorized import Vectorized
from fedflat.backends.workers import Workers, portable
from fedflat.core.checks import InputError, one_of, wrong
from fedflat.core.extras import missing
from fedflat.core.threads import using_threads
from fedflat.data.clients import FederatedData
from fedflat.engine.batches import width_of
from fedflat.engine.device import CPU, PROCESSES, TINY, TOLERANCE, placed
from fedflat.engine.mlp import Linear, layers_of
from fedflat.engine.parts import Parts
from fedflat.engine.problem import BlockProblem, ModuleProblem, Problem
from fedflat.engine.train import Backend

BACKENDS = ("auto", "sequential", "vectorized", "vectorized-fp32", "lowrank", "workers", "ray", "graphs")
GPU_ONLY = ("graphs",)
FLOAT32 = ("vectorized-fp32", "lowrank")
"""Back ends that compute in float32 whatever the precision: where a product has few rows, bf16 is slower in blocks."""
BLOCK_ENTRIES = 32_000_000
"""Weights of a block of clients held at once, in float32 entries (128 MB), when the recipe names no block size."""
CACHED_ENTRIES = 1_000_000
"""The same for a block that stays in a core's caches."""
AT_MOST = 512
"""Clients of a block at most, however small the model: its batches and messages take memory too."""
TRIED, TRIED_FACTORS = 64, 256
"""Clients in a trial of a block, with weights written out and as factors, at most: several times what fills the cores'
vector units, and still a trial of seconds."""
PER_WORKER = 1.1
"""Time of a client in a worker process over that in this one, as reckoned: messages go through shared memory."""
CLEARLY = 0.9
"""Share of one core's time below which all cores work on one block by vmap: they may round differently."""
LONG_ROUND = 0.5
"""Seconds of local training per round above which worker processes pay for their start."""
UNEVEN = 1.1
"""A round by worker processes, over one that fills the cores evenly, above which all cores on one client are tried."""
FEW_ROWS = 1_000
"""Rows per client (steps · batch · passes) above which the low-rank form is not even tried."""
STREAMS = 4
"""Streams of ``graphs`` when the recipe names no number: a guess, for nobody has measured them."""
CHECKED_CLIENTS = 3
"""Clients whose sum on a GPU is compared with the processor's: few, for the processor trains them one by one."""
EXPERIMENTAL = "engine.backend: graphs is experimental: never run on a real GPU by us"
SMALL_STEP = 0.02
"""Seconds of one client's training below which a block by ``torch.func.vmap`` is tried."""


def backend_for(
    name: str,
    block: int | None,
    processes: int | None,
    parts: Parts,
    problem: ModuleProblem,
    data: FederatedData,
    seed: int,
    compiled: bool | None = None,
) -> Backend:
    """The back end a recipe asks for; ``auto`` measures the ones that apply, once per machine, model and shape."""
    one_of("engine.backend", name, BACKENDS)
    gpu = problem.device.type != "cpu"
    if name in (PROCESSES if gpu else GPU_ONLY):
        raise wrong("engine.backend", f"{name} on {problem.device}", _allowed(gpu))
    if compiled and name not in ("auto", "sequential", "graphs"):
        raise wrong("engine.compile", f"true with engine.backend {name}", "sequential, graphs or auto")
    makers = _Makers(parts, problem, data, seed, 1 if gpu else processes or torch.get_num_threads())
    if problem.objective.own is not None:  # what it does to the rows of a block, no trial can show
        if name not in ("auto", "sequential"):
            raise wrong("engine.backend", f"{name} with a loss of one's own", "sequential or auto")
        return makers.make("sequential", None)
    if name == "auto":
        choice = Choice("sequential") if compiled else _fastest(makers)
        return makers.make(choice.backend, block or choice.block, threads=choice.threads)
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise missing("engine.backend", "ray", "scale")
    unsent = portable(problem, parts.algorithm) if name in PROCESSES else ""
    if unsent and (name == "workers" or unsent == "a model"):  # Ray sends functions of any place
        raise InputError(
            f"engine.backend: found {name} with {unsent} that cannot be sent to another process; allowed: one whose "
            "classes and functions are defined at the top of a module, or engine.backend=sequential."
        )
    if name == "graphs":
        if parts.algorithm.client_state:
            found = f"graphs with {parts.algorithm.name}, whose clients keep a state"
            raise wrong("engine.backend", found, "sequential, vectorized or auto")
        warnings.warn(EXPERIMENTAL, stacklevel=2)
    if name == "lowrank":
        reason = makers.no_factors()
        if reason:
            raise InputError(
                f"engine.backend: found lowrank with {reason}; allowed: vectorized, sequential, workers or auto."
            )
    return makers.make(name, block, threads=_threads(name, processes, makers))


def _threads(name: str, processes: int | None, makers: _Makers) -> int:
    """Cores of a back end asked for by name, or a GPU's streams."""
    if makers.problem.device.type != "cpu":
        return processes or STREAMS if name == "graphs" else 1
    return makers.cores if makers.layers is not None else processes or 1


def _allowed(gpu: bool) -> str:
    left = [name for name in BACKENDS if name not in (PROCESSES if gpu else GPU_ONLY)]
    return f"{', '.join(left)}; or another engine.device"


class _Makers:
    """Builds back ends for one run."""

    def __init__(self, parts: Parts, problem: ModuleProblem, data: FederatedData, seed: int, cores: int) -> None:
        self.parts, self.problem, self.data, self.seed, self.cores = parts, problem, data, seed, cores
        plain = data.targets.dim() == 1 and data.inputs.is_floating_point() and problem.objective.cross_entropy
        self.layers: tuple[Linear, ...] | None = layers_of(problem.module, parts.layout) if plain else None

    def make(self, name: str, block: int | None, parts: Parts | None = None, threads: int = 1) -> Backend:
        """A back end by name; ``parts`` with fewer steps for a trial. threads: cores for blocks, or for one client."""
        parts, layout = parts or self.parts, self.parts.layout
        alone = Sequential(parts.algorithm, self.problem, parts.local, self.data, self.seed)
        if name == "sequential":
            return replace(alone, threads=threads)
        if name == "workers":
            return Workers(alone, self.cores)
        if name == "ray":
            return RayTasks(alone, self.cores, block)
        if name == "graphs" and ((block or 1) == 1 or self.problem.random):
            return Graphs(parts.algorithm, self.problem, parts.local, self.data, self.seed, 1, threads)
        precision = "fp32" if name in FLOAT32 else self.problem.precision
        written: Problem = BlockProblem(self.problem.module, layout, precision, self.problem.objective)
        factors = None
        if self.layers is not None:
            written = DenseProblem(layout, self.layers, precision)
            factors = LowRankProblem(layout, self.layers) if name == "lowrank" else None
        if name == "graphs":
            return Graphs(parts.algorithm, written, parts.local, self.data, self.seed, block or 1, threads)
        size, random = block or self.block(name == "lowrank", BLOCK_ENTRIES), self.problem.random
        apart = self.layers is not None and self.problem.device.type == "cpu" and not random
        return Vectorized(
            parts.algorithm,
            written,
            parts.local,
            self.data,
            self.seed,
            size,
            factors,
            threads,
            apart,
            name,
            alone,
            random,
        )

    def block(self, factors: bool, entries: int) -> int:
        """Clients per block; as factors a client holds its rows, otherwise all its weights."""
        width = width_of(self.data, self.parts.local.batch_size)
        per_client = max(self.parts.layout.size, width * math.prod(self.data.input_shape))
        if factors and self.layers is not None:
            per_client = self.rows * sum(layer.inputs + layer.outputs for layer in self.layers)
        return max(1, min(AT_MOST, entries // max(per_client, 1)))

    @property
    def rows(self) -> int:
        """Examples a client looks at in one round, about: two passes for every step."""
        return 2 * self.parts.local.steps * width_of(self.data, self.parts.local.batch_size)

    @cached_property
    def first(self) -> torch.Tensor:
        """w^0 ``(D,)`` on the processor."""
        return torch.cat([p.detach().reshape(-1) for p in self.problem.parameters]).cpu()

    def agrees(self, backend: Backend, short: Parts) -> bool:
        """On a GPU: whether a back end runs, and its sum is the processor's plain loop's up to rounding."""
        if self.problem.device.type == "cpu":
            return True
        try:
            found = sum_of(backend, short, self.first, self._checked)
        except Exception:  # a kernel may fail in a way of its own
            return False
        expected = self._expected
        apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected).clamp_min(TINY)
        return bool(apart <= TOLERANCE[self.problem.precision])

    @property
    def _checked(self) -> np.ndarray:
        return np.sort(np.argsort(-self.data.sizes, kind="stable")[:CHECKED_CLIENTS])

    @cached_property
    def _expected(self) -> torch.Tensor:
        """The checked clients' sum ``(d,)``, computed on the processor."""
        mine, (short, _) = self.problem, shortened(self.parts)
        module = copy.deepcopy(mine.module).to(CPU)
        problem = ModuleProblem(module, self.parts.layout, mine.precision, objective=mine.objective)
        plain = Sequential(short.algorithm, problem, short.local, placed(self.data, CPU), self.seed)
        return sum_of(plain, short, self.first, self._checked)

    def no_factors(self) -> str:
        """Why the low-rank form does not apply; empty if it does."""
        if not self.problem.objective.cross_entropy:
            return "a loss other than cross-entropy"
        if self.layers is None:
            return "a model that is not a stack of linear layers"
        if self.parts.algorithm.head is not None or any(p.part != "all" for p in self.parts.algorithm.phases):
            return "a personal part"
        if self.parts.algorithm.client_state or self.parts.algorithm.vectors > 1:
            return "clients' state, or a message of several vectors"
        if self.parts.local.optimizer != "sgd":
            return f"local.optimizer: {self.parts.local.optimizer}"
        return "local epochs of each client's own length" if self.parts.local.epochs is not None else ""


def _fastest(makers: _Makers) -> Choice:
    """The choice of an earlier trial, or of one made now."""
    sizes = makers.data.sizes
    if not sizes.any():
        return Choice("sequential")
    key = situation(makers.parts, makers.problem, makers.data, makers.cores)
    known = remembered(key)
    if known is not None and known.backend in BACKENDS and (known.backend != "lowrank" or not makers.no_factors()):
        return known
    with using_threads(1):  # as in the run
        found = _measured(makers)
    remember(key, found)
    return found


def _measured(makers: _Makers) -> Choice:
    """Try what applies on a few clients and keep the least seconds per client, workers' start included."""
    parts, data, first = makers.parts, makers.data, makers.first
    short, factor = shortened(parts)
    alone = factor * seconds_per_client(makers.make("sequential", None, short), short, data, first, 1)
    makers.problem.bind(first.to(makers.problem.device))
    found = {Choice("sequential"): alone}
    cohort = max(1, math.ceil(parts.plan.sampler.size))
    # A worker's share of the cohort: its last turn may not fill the cores.
    turns = math.ceil(cohort / makers.cores) / cohort
    if makers.cores > 1 and alone * cohort > LONG_ROUND:
        sendable = not portable(makers.problem, parts.algorithm)
        if sendable:
            found[Choice("workers")] = alone * turns * PER_WORKER
        if turns * makers.cores > UNEVEN or not sendable:
            together = makers.make("sequential", None, short, makers.cores)
            found[Choice("sequential", threads=makers.cores)] = factor * seconds_per_client(
                together, short, data, first, 1
            )
    if parts.local.epochs is None and not makers.problem.random:
        _measure_blocks(makers, first, min(found.values()), found)
    makers.problem.bind(first.to(makers.problem.device))
    best = min(found, key=lambda choice: found[choice])
    return _with_threads(makers, first, best, found[best]) if best.block is not None and makers.cores > 1 else best


def _with_threads(makers: _Makers, first: torch.Tensor, best: Choice, seconds: float) -> Choice:
    """Smaller blocks, one for each core at a time, or (by vmap) all cores on one block, if that is clearly faster."""
    whole, cores = best.backend == "lowrank", makers.cores
    parts, factor = (makers.parts, 1.0) if whole else shortened(makers.parts)
    most = TRIED_FACTORS if whole else TRIED
    block, clients = best.block or 1, min(best.block or 1, most)
    if makers.layers is not None:
        block = min(block, most, max(1, math.ceil(makers.parts.plan.sampler.size / cores)))
        clients = cores * block
    backend = makers.make(best.backend, block, parts, cores)
    together = factor * seconds_per_client(backend, parts, makers.data, first, clients)
    least = (
        CLEARLY if makers.layers is None else 1.0
    )  # blocks of their own give the same bits with any number of threads
    return replace(best, block=block, threads=cores) if together < least * seconds else best


def _measure_blocks(makers: _Makers, first: torch.Tensor, best: float, found: dict[Choice, float]) -> None:
    parts, data = makers.parts, makers.data
    short, factor = shortened(parts)
    cohort = max(1, math.ceil(parts.plan.sampler.size))
    if makers.layers is None and best > SMALL_STEP:
        return  # convolutions over clients by vmap are grouped convolutions, many times slower on CPUs
    sizes = {min(makers.block(False, entries), cohort) for entries in (CACHED_ENTRIES, BLOCK_ENTRIES // 2)}
    both = makers.layers is not None and makers.problem.precision == "bf16"
    for name, size in product(("vectorized", "vectorized-fp32") if both else ("vectorized",), sorted(sizes)):
        backend = makers.make(name, size, short)
        if makers.agrees(backend, short):
            found[Choice(name, size)] = factor * seconds_per_client(backend, short, data, first, min(size, TRIED))
    if not makers.no_factors() and makers.rows <= FEW_ROWS:
        sizes = {min(makers.block(True, entries), cohort) for entries in (CACHED_ENTRIES, BLOCK_ENTRIES)}
        for size in sorted(sizes):
            backend = makers.make("lowrank", size)
            if makers.agrees(makers.make("lowrank", size, short), short):
                found[Choice("lowrank", size)] = seconds_per_client(
                    backend, parts, data, first, min(size, TRIED_FACTORS)
                )
