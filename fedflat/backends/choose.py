"""Choose the back end that trains a cohort: the one a recipe names, or what public shapes and cores speak for.

A block is taken where its sum of made-up clients is the plain loop's. A user's own pieces are recorded here first.
"""

import copy
import importlib.util
import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from fedflat.backends.in_process import LANES, WHOLE, Sequential, Vectorized
from fedflat.backends.ray import RayTasks
from fedflat.backends.workers import Workers, portable
from fedflat.core import Broadcast, Local, PersonalState, missing, own_rule, stream, using_threads
from fedflat.core.checks import one_of, require, wrong
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.batches import width_of
from fedflat.engine.device import CPU, PROCESSES, TINY, TOLERANCE, placed
from fedflat.engine.factored import Factored, LowRankProblem
from fedflat.engine.isolated import Isolated, Refused, isolated, pieces_of
from fedflat.engine.job import RoundParts
from fedflat.engine.mlp import DenseProblem, Linear, layers_of
from fedflat.engine.problem import BlockProblem, ModuleProblem
from fedflat.engine.reduce import Backend, PlainSum, RoundSum

BACKENDS = ("auto", "sequential", "vectorized", "vectorized-fp32", "lowrank", "workers", "ray")
FLOAT32 = ("vectorized-fp32", "lowrank")
"""Back ends that compute in float32 whatever the precision: where a product has few rows, bf16 is slower in blocks."""
BLOCKS = ("vectorized", *FLOAT32)
BLOCK_ENTRIES = 32_000_000
"""Weights of a block of clients held at once, in float32 entries (128 MB), when the recipe names no block size."""
CACHED_ENTRIES = 1_000_000
"""The same for a block that stays in a core's caches."""
AT_MOST = 128
"""Clients of a block with weights written out and as factors, at most: several times what fills the cores' vector
units, and a block is still a small part of a cohort."""
PER_BLOCK, LEAN = 32, 10_000
"""What a block costs beside its clients, in clients as factors or of at most so many parameters written out."""
PER_WORKER = 1.1
"""Time of a client in a worker process over that in this one: messages go through shared memory."""
TOGETHER = 0.75
"""So many cores to this power is how much faster one client is on all of them."""
LONG_ROUND, LONG_STEP = 0.5, 5e-3
"""Seconds of a round's local training above which worker processes pay for their start, and of a step above which
several cores pay."""
STEP, RATE, REUSED = 1e-3, 2e10, 32
"""What such seconds are reckoned from: a step beside its products, products a second, and over how many of an image's
positions a convolution uses a weight once."""
SHORT_PRODUCT = 100
"""Examples of a minibatch under which bf16 is slower than float32 in blocks."""
SMALL = 125_000
"""Parameters up to which several clients fit a core's caches, so that a block by ``torch.func.vmap`` pays."""
MADE_UP = 100
"""Examples of a client, as reckoned, where no largest number is declared."""
PADDED = 1_000
"""Examples of a minibatch above which blocks, which are padded to it, are not taken where no largest number is
declared: who asks for so many wants each client's whole data in a step."""
CHECKED_CLIENTS, CHECKED_STEPS = 3, 4
"""Clients whose sum in a block is compared with that of training them one by one, and their steps."""
AWAY = 0.05, 0.5
"""How far from w^0 places are tried, in each weight: at w^0 a layer may be zero, and hide what differs."""


def backend_for(
    name: str, block: int | None, processes: int | None, parts: RoundParts, problem: ModuleProblem,
    data: FederatedData, seed: int,
) -> Backend:  # fmt: skip
    """Return the back end a recipe asks for; ``auto`` decides by public shapes and this machine's cores."""
    one_of("engine.backend", name, BACKENDS)
    parts, reason = _isolated(parts, problem)
    require(name not in BLOCKS or not reason, "engine.backend", f"{name} with {reason}", "sequential, workers or auto")
    cores = (processes or torch.get_num_threads()) if problem.device.type == "cpu" else 1
    makers = _Makers(parts, problem, data, seed, cores, reason)
    if name == "auto":
        return by_shapes(makers, block)
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
    rule = own_rule((problem.module, parts.algorithm))
    try:
        parts = replace(parts, algorithm=isolated(parts.algorithm, parts.layout, parts.local))
    except Refused as error:
        warnings.warn(f"{error}, so clients train one by one, which is slower (docs/method.md)", stacklevel=4)
        return parts, f"a piece that trains clients one by one ({error})"
    if rule:
        return parts, f"{rule}, which has a vmap rule of its own or looks behind vmap"
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

    def make(self, name: str, block: int | None = None, threads: int = 1) -> Backend:
        """Return a back end by name. threads: cores it may use."""
        parts, layout = self.parts, self.parts.layout
        sequential = Sequential(parts.algorithm, self.problem, parts.local, self.data, self.seed)
        if name == "sequential":
            return replace(sequential, threads=threads)
        if name == "workers":
            return Workers(sequential, self.cores)
        if name == "ray":
            return RayTasks(sequential, self.cores, block)
        precision = "fp32" if name in FLOAT32 else self.problem.precision
        size = min(block, self.clients) if block else self.block(name == "lowrank")
        if self.layers is None:
            written = BlockProblem(self.problem.module, layout, precision, objective=self.problem.objective)
            return Vectorized(sequential, written, size, threads=threads, name=name)
        factors = LowRankProblem(layout, self.layers) if name == "lowrank" else None
        dense, apart = DenseProblem(layout, self.layers, precision), self.problem.device.type == "cpu"
        trial = partial(_lanes, self) if self._laned(size) else None
        return Vectorized(sequential, dense, size, factors, threads, apart, name, trial=trial)

    def _laned(self, block: int) -> bool:
        """Return whether places of a block may be alike, which a trial then has to show."""
        apart = self.layers is not None and self.problem.device.type == "cpu"
        few = block * self.parts.layout.size <= BLOCK_ENTRIES  # a trial writes its messages out
        return apart and few and self.parts.local.epochs is None and block % WHOLE == 0

    @property
    def clients(self) -> int:
        """The population M."""
        return self.parts.plan.sampler.clients

    def block(self, factors: bool, cached: bool = False) -> int:
        """Return the clients per block; as factors a client holds its rows, otherwise all its weights.

        Of the sizes that fit, the one at which blocks are fullest, their own cost included. cached: whether all weights
        of a block are to stay in a core's caches: they are read at every step, and inputs once.
        """
        per_client = max(self.parts.layout.size, self.width * math.prod(self.data.input_shape))
        per_client = self.held_as_factors() if factors else per_client
        most = min(AT_MOST, BLOCK_ENTRIES // max(per_client, 1), self.clients)
        most = min(most, CACHED_ENTRIES // self.parts.layout.size) if cached else most
        # A small federation goes into a few blocks without empty places.
        even = {size for turns in range(1, 9) if (size := -(-self.clients // turns)) <= most}
        halves = {max(1, most >> half) for half in range(9)}
        sizes = even | halves | {size for size in (WHOLE, 2 * WHOLE) if size <= most}
        beside = PER_BLOCK if factors else PER_BLOCK * min(1.0, LEAN / self.parts.layout.size)
        return min(sorted(sizes, reverse=True), key=lambda size: self.places(size) * (1 + beside / size))

    def places(self, block: int) -> float:
        """Return the places computed for each client of the expected cohort: 1 where every block is full."""
        sampler, rng = self.parts.plan.sampler, stream(0, "cohorts to size blocks for")
        lanes = LANES[0] if self._laned(block) else block
        counts = self.clients // lanes + (np.arange(lanes) < self.clients % lanes)
        longest = rng.binomial(counts, min(1.0, sampler.q), (8, lanes)).max(1)
        return float(np.ceil(longest * lanes / block).mean() * block / max(sampler.size, 1))

    @property
    def width(self) -> int:
        """Examples of a minibatch."""
        return width_of(self.data, self.parts.local.batch_size)

    def held_as_factors(self) -> int:
        """Return the numbers of a client's factors, about: of each layer, two rows for every example of every step."""
        rows = 2 * self.parts.local.steps * self.width
        return rows * sum(layer.inputs + layer.outputs for layer in self.layers or ())

    def no_factors(self) -> str:
        """Return why the low-rank form does not apply; empty if it does."""
        method, local = self.parts.algorithm, self.parts.local
        reasons = {
            "a loss other than cross-entropy": not self.problem.objective.cross_entropy,
            "a model that is not a stack of linear layers": self.layers is None,
            "a personal part": method.head is not None or any(phase.part != "all" for phase in method.phases),
            "clients' state, or a message of several vectors": bool(method.client_state) or method.vectors > 1,
            f"local.optimizer: {local.optimizer}": local.optimizer != "sgd",
            "local epochs of each client's own length": local.epochs is not None,
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        custom = any(isinstance(piece, Isolated) for _, piece in pieces_of(method))
        needed = not why and custom and not _is_right(self, "lowrank", CHECKED_CLIENTS)
        return "a piece of one's own that needs its vectors' entries, or whose sum is another then" if needed else why


def by_shapes(makers: _Makers, block: int | None) -> Backend:
    """Return the back end that public shapes and the cores at hand speak for; nothing is measured."""
    parts, problem, cores = makers.parts, makers.problem, makers.cores
    size = sum(parameter.numel() for parameter in problem.module.parameters())
    padded = makers.data.most is None and makers.width > PADDED
    if parts.local.epochs is None and not makers.one_by_one and not padded:
        stack = makers.layers is not None
        fits = makers.held_as_factors() < parts.layout.size and not makers.no_factors()
        coarse = stack and problem.precision == "bf16" and makers.width < SHORT_PRODUCT
        name = "lowrank" if fits else "vectorized-fp32" if coarse else "vectorized"
        block = block or makers.block(fits, cached=not fits)
        # Convolutions over clients by vmap are grouped convolutions, many times slower.
        small = size <= SMALL and not any(isinstance(layer, _ConvNd) for layer in problem.module.modules())
        if (stack and problem.device.type == "cpu") or ((stack or small) and _is_right(makers, name, block)):
            return makers.make(name, block, cores if stack else 1)
    cohort, steps = math.ceil(parts.plan.sampler.size), parts.local.steps * len(parts.algorithm.phases)
    positions = max(1.0, math.prod(makers.data.input_shape[1:]) / REUSED)
    step = STEP + 3 * size * min(makers.width, makers.data.most or MADE_UP) * positions / RATE
    if cores == 1 or cohort * steps * step < LONG_ROUND:
        return makers.make("sequential")
    # A worker's last turn may not fill the cores.
    if math.ceil(cohort / cores) * PER_WORKER <= cohort * cores**-TOGETHER and not portable(problem, parts.algorithm):
        return makers.make("workers")
    return makers.make("sequential", threads=cores if step > LONG_STEP else 1)


def _is_right(makers: _Makers, name: str, block: int) -> bool:
    """Return whether a back end runs, and its sum of made-up clients is the plain loop's on the processor."""
    # Made-up clients: nothing that is chosen may follow from real ones' data.
    parts, real = makers.parts.shortened(CHECKED_STEPS), makers.problem
    tried = replace(makers, parts=parts, data=made_up(makers.data, parts.local, CHECKED_CLIENTS))
    plain = ModuleProblem(copy.deepcopy(real.module).to(CPU), parts.layout, real.precision, objective=real.objective)
    sequential = Sequential(parts.algorithm, plain, parts.local, placed(tried.data, CPU), makers.seed)
    first, clients = torch.cat([p.detach().reshape(-1) for p in real.parameters]).cpu(), np.arange(CHECKED_CLIENTS)
    with using_threads(1):
        try:
            candidate = tried.make(name, block)
            expected, actual = (sum_of(backend, parts, first, clients) for backend in (sequential, candidate))
        except Exception:  # a module may fail in a block, and a kernel on a GPU, in a way of its own
            return False
    written = name == "lowrank" and getattr(candidate, "factors", None) is None  # vectors, which factors could not hold
    apart = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected).clamp_min(TINY)
    return not written and bool(apart <= TOLERANCE[real.precision])


class _Bits(TorchDispatchMode):
    """What the bits of each operation's results add up to, for each of n clients whose rows the first axis holds."""

    def __init__(self, clients: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clients, self.sums = clients, list[torch.Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        filled = isinstance(out, torch.Tensor) and out.is_floating_point() and not function.is_view
        filled = filled and "empty" not in function.__name__
        if filled and out.numel() and out.dim() and out.shape[0] % self.clients == 0:
            exact = out.float() if out.itemsize < 4 else out
            bits = exact.contiguous().view(torch.int32).reshape(self.clients, -1)
            # Each entry counts another odd number of times, so that no two that change places go unseen.
            self.sums.append((bits * torch.arange(1, 2 * bits.shape[1], 2, dtype=torch.int32)).sum(1))
        return out


def _lanes(makers: _Makers, blocks: Vectorized) -> int | None:
    """Return the fewest lanes in whose places each operation gives made-up clients the same bits; None if none are.

    Which instructions run follows from shapes and addresses, not from numbers, and where two orders of a sum differ
    they differ in some of every hundred results: so what holds for these clients at every operation holds for any.
    """
    # As factors a client's rows are as many as its steps, and so are the shapes.
    parts = makers.parts if blocks.factors is not None else makers.parts.shortened(CHECKED_STEPS)
    clients = np.arange(blocks.block)
    data = made_up(makers.data, parts.local, 2)
    rows = tuple((np.arange(len(data.parts[0])) + client) % len(data.inputs) for client in clients)
    data = replace(data, inputs=2 * data.inputs - 1, parts=rows)
    weights = torch.cat([p.detach().reshape(-1) for p in makers.problem.parameters])
    away = torch.from_numpy(stream(0, "trial of places").standard_normal(len(weights), np.float32))
    trial = replace(blocks, inner=Sequential(parts.algorithm, makers.problem, parts.local, data, makers.seed))

    def bits(order: np.ndarray) -> list[torch.Tensor]:
        sums = list[torch.Tensor]()
        for share in AWAY:
            broadcast, heads = trial_round(parts, weights + share * away)
            with _Bits(len(order)) as seen:
                message = trial.trained(order, broadcast, heads).message
                if isinstance(message, Factored):
                    message.dense()  # as a sum writes it out that cannot add factors
            sink = empty_sum(parts, broadcast)
            factors = sink.add(message, [1] * len(order))
            sums += [*seen.sums, factors, sink.result().norms.view(torch.int64)]
        return sums

    def alike(lanes: int) -> bool:
        """Return whether everybody gets the same from a place so far on; what all share is the same anyway."""
        pairs = zip(first, bits(np.roll(clients, lanes)), strict=True)
        return all(torch.equal(here, there) or torch.equal(here.roll(lanes), there) for here, there in pairs)

    with using_threads(1):
        try:
            first = bits(clients)
            return next(filter(alike, LANES), None)
        except Exception:  # a piece may fail; the run then says where
            return None


def made_up(data: FederatedData, local: Local, clients: int) -> FederatedData:
    """Return clients of made-up examples in the form of ``data``: as many each as is public, whoever has how many."""
    count = min(data.most or MADE_UP, max(1, 2 * local.batch_size))
    inputs, targets = made_rows(data, clients * count, stream(0, "trial of back ends"))
    if data.inputs.dim() == 4 and data.inputs.is_contiguous(memory_format=torch.channels_last):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    parts = tuple(np.arange(count) + client * count for client in range(clients))
    return replace(data, inputs=inputs, targets=targets, parts=parts, held_back=(), names=())


def sum_of(backend: Backend, parts: RoundParts, first: torch.Tensor, clients: np.ndarray) -> torch.Tensor:
    """Return the clipped sum ``(d,)`` of some clients' messages from w^0, as in a round of its own."""
    broadcast, heads = trial_round(parts, first)
    sink = empty_sum(parts, broadcast)
    RoundSum(parts.algorithm, parts.local, broadcast, sink, heads).add_cohort(backend, clients)
    return sink.total


def trial_round(parts: RoundParts, first: torch.Tensor) -> tuple[Broadcast, PersonalState]:
    """Return what clients receive and keep in a round of its own from w^0, ``first (D,)``."""
    size, threshold = parts.layout.dimension, 1.0 if math.isfinite(parts.clip.bound(1.0)) else math.inf
    vectors = dict.fromkeys(parts.broadcast, torch.linspace(-0.1, 0.1, size) / math.sqrt(size))  # 0 hides faults
    return Broadcast(0, first[:size].clone(), threshold, 1.0, vectors=vectors), PersonalState(first[size:].clone())


def empty_sum(parts: RoundParts, broadcast: Broadcast) -> PlainSum:
    """Return the plain clipped sum of a round without messages yet."""
    return PlainSum(parts.clip, broadcast.clip, parts.message_tensors, parts.message_length)
