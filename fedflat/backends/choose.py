"""Choose the back end that trains a cohort: the one a recipe names, or the fastest in a short timing run, whose outcome
is remembered for this machine, model and shape.
"""

import contextlib
import copy
import hashlib
import importlib.util
import math
import os
import platform
import time
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn

from fedflat.backends.in_process import Sequential, Vectorized
from fedflat.backends.ray import RayTasks
from fedflat.backends.workers import Workers, portable
from fedflat.core import durable
from fedflat.core.checks import InputError, RunError, one_of, wrong
from fedflat.core.imports import missing
from fedflat.core.params import PersonalState
from fedflat.core.process import using_threads
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast, Local
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.batches import width_of
from fedflat.engine.client import steps_of
from fedflat.engine.device import CPU, PROCESSES, TINY, TOLERANCE, placed
from fedflat.engine.factored import LowRankProblem
from fedflat.engine.isolated import Isolated, Refused, isolated, pieces_of
from fedflat.engine.mlp import DenseProblem, Linear, layers_of
from fedflat.engine.problem import BlockProblem, ModuleProblem
from fedflat.engine.reduce import Backend, PlainSum, RoundSum
from fedflat.engine.round import RoundParts

BACKENDS = ("auto", "sequential", "vectorized", "vectorized-fp32", "lowrank", "workers", "ray")
FLOAT32 = ("vectorized-fp32", "lowrank")
"""Back ends that compute in float32 whatever the precision: where a product has few rows, bf16 is slower in blocks."""
BLOCKS = ("vectorized", *FLOAT32)
BLOCK_ENTRIES = 32_000_000
"""Weights of a block of clients held at once, in float32 entries (128 MB), when the recipe names no block size."""
CACHED_ENTRIES = 1_000_000
"""The same for a block that stays in a core's caches."""
AT_MOST, FACTORS_AT_MOST = 64, 256
"""Clients of a block with weights written out and as factors, at most: several times what fills the cores' vector
units, and still a trial of seconds."""
PER_BLOCK = 16
"""What a block costs beside its clients, in clients, as reckoned before a trial."""
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
CHECKED_CLIENTS = 3
"""Clients whose sum on a GPU is compared with the processor's: few, for the processor trains them one by one."""
SMALL_STEP = 0.02
"""Seconds of one client's training below which a block by ``torch.func.vmap`` is tried."""
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


def backend_for(
    name: str,
    block: int | None,
    processes: int | None,
    parts: RoundParts,
    problem: ModuleProblem,
    data: FederatedData,
    seed: int,
) -> Backend:
    """Return the back end a recipe asks for; ``auto`` measures those that apply, once per machine and model."""
    one_of("engine.backend", name, BACKENDS)
    gpu = problem.device.type != "cpu"
    if gpu and name in PROCESSES:
        left = ", ".join(other for other in BACKENDS if other not in PROCESSES)
        raise wrong("engine.backend", f"{name} on {problem.device}", f"{left}; or another engine.device")
    parts, reason = _isolated(parts, problem)
    if name in BLOCKS and reason:
        raise wrong("engine.backend", f"{name} with {reason}", "sequential, workers or auto")
    makers = _Makers(parts, problem, data, seed, 1 if gpu else processes or torch.get_num_threads(), reason)
    if name == "auto":
        choice = _fastest(makers)
        return makers.make(choice.backend, block or choice.block, threads=choice.threads)
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise missing("engine.backend", "ray", "scale")
    unsent = portable(problem, parts.algorithm) if name in PROCESSES else ""
    if unsent and (name == "workers" or unsent == "a model"):  # Ray sends functions of any place
        allowed = "one whose classes and functions are defined at the top of a module, or engine.backend=sequential"
        raise wrong("engine.backend", f"{name} with {unsent} that cannot be sent to another process", allowed)
    if name == "lowrank" and (unfit := makers.no_factors()):
        raise wrong("engine.backend", f"lowrank with {unfit}", "vectorized, sequential, workers or auto")
    return makers.make(name, block, threads=makers.cores if makers.layers is not None else processes or 1)


def _isolated(parts: RoundParts, problem: ModuleProblem) -> tuple[RoundParts, str]:
    """Return the parts with a user's own pieces recorded, and why clients must train one by one, if so.

    A piece that cannot be recorded stays as it is, and a warning says why.
    """
    try:
        parts = replace(parts, algorithm=isolated(parts.algorithm, parts.layout, parts.local))
    except Refused as error:
        warnings.warn(f"{error}, so clients train one by one, which is slower (docs/own.md)", stacklevel=4)
        return parts, f"a piece that trains clients one by one ({error})"
    if problem.objective.own is not None:  # what it does to the rows of a block, no trial can show
        return parts, "a loss of one's own"
    if any(isinstance(layer, nn.RNNBase) for layer in problem.module.modules()):  # weights in a list: vmap changes them
        return parts, "torch's own recurrent layers"
    return parts, "training that draws random numbers" if problem.random else ""


@dataclass
class _Makers:
    """Builds back ends for one run. one_by_one: why clients must train one by one, if so."""

    parts: RoundParts
    problem: ModuleProblem
    data: FederatedData
    seed: int
    cores: int
    one_by_one: str = ""

    @cached_property
    def layers(self) -> tuple[Linear, ...] | None:
        """The module's linear layers, where blocks can be trained by their products."""
        plain = self.data.targets.dim() == 1 and self.data.inputs.is_floating_point()
        plain = plain and self.problem.objective.cross_entropy
        return layers_of(self.problem.module, self.parts.layout) if plain else None

    @cached_property
    def short(self) -> tuple[RoundParts, float]:
        """The parts of a timing run, and by what their time is to be multiplied: a whole client may take minutes."""
        return shortened(self.parts)

    def make(self, name: str, block: int | None, parts: RoundParts | None = None, threads: int = 1) -> Backend:
        """Return a back end by name. parts: with fewer steps for a timing run. threads: cores it may use."""
        parts, layout = parts or self.parts, self.parts.layout
        alone = Sequential(parts.algorithm, self.problem, parts.local, self.data, self.seed)
        if name == "sequential":
            return replace(alone, threads=threads)
        if name == "workers":
            return Workers(alone, self.cores)
        if name == "ray":
            return RayTasks(alone, self.cores, block)
        precision = "fp32" if name in FLOAT32 else self.problem.precision
        size = min(block, self.clients) if block else self.block(name == "lowrank", BLOCK_ENTRIES)
        if self.layers is None:
            written = BlockProblem(self.problem.module, layout, precision, objective=self.problem.objective)
            return Vectorized(alone, written, size, threads=threads, name=name)
        factors = LowRankProblem(layout, self.layers) if name == "lowrank" else None
        dense, apart = DenseProblem(layout, self.layers, precision), self.problem.device.type == "cpu"
        return Vectorized(alone, dense, size, factors, threads, apart, name)

    @property
    def clients(self) -> int:
        """The population M."""
        return self.parts.plan.sampler.clients

    def block(self, factors: bool, entries: int) -> int:
        """Return the clients per block; as factors a client holds its rows, otherwise all its weights.

        Of the sizes that fit, the one at which blocks are fullest, their own cost included.
        """
        width = width_of(self.data, self.parts.local.batch_size)
        per_client = max(self.parts.layout.size, width * math.prod(self.data.input_shape))
        if factors and self.layers is not None:
            per_client = self.rows * sum(layer.inputs + layer.outputs for layer in self.layers)
        most = min(FACTORS_AT_MOST if factors else AT_MOST, entries // max(per_client, 1), self.clients)
        sizes = {max(1, most >> half) for half in range(9)}
        return min(sorted(sizes, reverse=True), key=lambda size: self.places(size) * (1 + PER_BLOCK / size))

    def places(self, block: int) -> float:
        """Return the places computed for each client of the expected cohort: 1 where every block is full."""
        sampler, draw = self.parts.plan.sampler, stream(0, "cohorts to size blocks for")
        own = self.clients // block + (np.arange(block) < self.clients % block)
        blocks = draw.binomial(own, min(1.0, sampler.q), (8, block)).max(1).mean()
        return float(blocks * block / max(sampler.size, 1))

    @property
    def rows(self) -> int:
        """Examples a client looks at in one round, about: two passes for every step."""
        return 2 * self.parts.local.steps * width_of(self.data, self.parts.local.batch_size)

    @cached_property
    def first(self) -> torch.Tensor:
        """w^0 ``(D,)`` on the processor."""
        return torch.cat([p.detach().reshape(-1) for p in self.problem.parameters]).cpu()

    def agrees(self, backend: Backend, short: RoundParts) -> bool:
        """On a GPU: whether a back end runs, and its sum is the processor's plain loop's up to rounding."""
        if self.problem.device.type == "cpu":
            return True
        try:
            found = sum_of(backend, short, self.first, np.arange(CHECKED_CLIENTS))
        except Exception:  # a kernel may fail in a way of its own
            return False
        expected = self._expected
        apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected).clamp_min(TINY)
        return bool(apart <= TOLERANCE[self.problem.precision])

    @cached_property
    def _expected(self) -> torch.Tensor:
        """The checked clients' sum ``(d,)``, computed on the processor."""
        mine, (short, _) = self.problem, self.short
        module = copy.deepcopy(mine.module).to(CPU)
        problem = ModuleProblem(module, self.parts.layout, mine.precision, objective=mine.objective)
        plain = Sequential(short.algorithm, problem, short.local, placed(self.data, CPU), self.seed)
        return sum_of(plain, short, self.first, np.arange(CHECKED_CLIENTS))

    def no_factors(self) -> str:
        """Return why the low-rank form does not apply; empty if it does."""
        method, local = self.parts.algorithm, self.parts.local
        reasons = {
            "a piece of one's own": any(isinstance(piece, Isolated) for _, piece in pieces_of(method)),
            "a loss other than cross-entropy": not self.problem.objective.cross_entropy,
            "a model that is not a stack of linear layers": self.layers is None,
            "a personal part": method.head is not None or any(phase.part != "all" for phase in method.phases),
            "clients' state, or a message of several vectors": bool(method.client_state) or method.vectors > 1,
            f"local.optimizer: {local.optimizer}": local.optimizer != "sgd",
            "local epochs of each client's own length": local.epochs is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def _fastest(makers: _Makers) -> Choice:
    """Return the choice of an earlier trial, or of one made now, on made-up clients."""
    key = situation(makers.parts, makers.problem, makers.data, makers.cores)
    known = remembered(key)
    if known is not None and known.backend in BACKENDS and (known.backend != "lowrank" or not makers.no_factors()):
        return known
    # Made-up clients: how fast real ones are would follow from their data.
    clients = max(CHECKED_CLIENTS, makers.cores * FACTORS_AT_MOST)
    tried = replace(makers, data=made_up(makers.data, makers.parts.local, clients))
    with using_threads(1):  # as in the run
        found = _measured(tried)
    tried.problem.bind(tried.first.to(tried.problem.device))
    remember(key, found)
    return found


def _measured(makers: _Makers) -> Choice:
    """Try what applies on a few clients and keep the least seconds per client, workers' start included."""
    parts, (short, factor) = makers.parts, makers.short

    def seconds(threads: int) -> float:
        backend = makers.make("sequential", None, short, threads)
        return factor * seconds_per_client(backend, short, makers.first, 1)

    alone = seconds(1)
    found = {Choice("sequential"): alone}
    cohort = max(1, math.ceil(parts.plan.sampler.size))
    # A worker's share of the cohort: its last turn may not fill the cores.
    turns = math.ceil(cohort / makers.cores) / cohort
    if makers.cores > 1 and alone * cohort > LONG_ROUND:
        sendable = not portable(makers.problem, parts.algorithm)
        if sendable:
            found[Choice("workers")] = alone * turns * PER_WORKER
        if turns * makers.cores > UNEVEN or not sendable:
            found[Choice("sequential", threads=makers.cores)] = seconds(makers.cores)
    if parts.local.epochs is None and not makers.one_by_one:
        _measure_blocks(makers, min(found.values()), found)
    return min(found, key=lambda choice: found[choice])


def _measure_blocks(makers: _Makers, best: float, found: dict[Choice, float]) -> None:
    """Time blocks that fit memory, and such that fit a core's caches; on all cores where that is clearly faster."""
    stack, (short, factor) = makers.layers is not None, makers.short
    if not stack and best > SMALL_STEP:
        return  # convolutions over clients by vmap are grouped convolutions, many times slower on CPUs
    names = ["vectorized"]
    names += ["vectorized-fp32"] if stack and makers.problem.precision == "bf16" else []
    names += ["lowrank"] if not makers.no_factors() and makers.rows <= FEW_ROWS else []
    for name in names:
        whole = name == "lowrank"
        # The low-rank form grows with the square of its rows, so it is timed in full.
        parts, times = (makers.parts, 1.0) if whole else (short, factor)
        for size in sorted({makers.block(whole, entries) for entries in (CACHED_ENTRIES, BLOCK_ENTRIES)}):
            if not makers.agrees(makers.make(name, size, short), short):
                continue
            least = math.inf
            for threads in sorted({1, makers.cores}):
                backend = makers.make(name, size, parts, threads)
                try:
                    taken = seconds_per_client(backend, parts, makers.first, size * (threads if stack else 1))
                except (InputError, RunError):  # a candidate that a block breaks is none
                    break
                seconds = times * makers.places(size) * taken
                # Blocks of their own give the same bits with any number of threads; by vmap they may not.
                if seconds < (1.0 if stack else CLEARLY) * least:
                    found[Choice(name, size, threads)] = least = seconds


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
        durable.replace(path, _OUTCOMES.dump_json({**_outcomes(), key: choice}, indent=1))


_OUTCOMES = TypeAdapter(dict[str, Choice])


def _outcomes() -> dict[str, Choice]:
    try:
        return _OUTCOMES.validate_json(cache_file().read_bytes())
    except (OSError, ValueError):
        return {}
