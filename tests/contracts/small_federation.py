"""A federation and a model small enough for every contract, and the engine's parts for any registered method."""

import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.params import PersonalState
from fedflat.core.types import Aggregate, Broadcast, RoundState, ServerView
from fedflat.engine.job import Job
from fedflat.engine.reduce import Accumulator, RoundSum
from fedflat.engine.round import accumulator_of, broadcast_of
from fedflat.pieces.server import Sgd

PRIVATE = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update" and ALGORITHMS[name]().private]
UPDATES = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]
SIZES = (7, 3, 12, 1, 5)
NEUTRAL = {
    "rho": 0.0, "lam": 0.0, "sparsity": 0.0, "keep": 1.0, "beta": 1.0, "smoothing": 0.0, "mu": 0.0, "strength": 0.0,
    "gamma": 0.0, "kappa": 1.0, "beta1": 0.0, "floor": 1.0, "head_lr": 0.0,
}  # fmt: skip


def module(hidden: int = 5, seed: int = 4) -> nn.Module:
    """A two-layer network with four tensors."""
    return drawn(nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)), seed)


def drawn(network: nn.Module, seed: int = 4, scale: float = 0.5) -> nn.Module:
    """The same network with normal weights of its own seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return network


class Fragile(nn.Module):
    """NaN for inputs from 1e19 on, and a buffer that remembers such inputs: what a hostile example can do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = module()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        large = x.detach().abs().amax(-1, keepdim=True) > 1e19
        if not torch._C._functorch.is_functorch_wrapped_tensor(x) and bool(large.any()):
            self.seen += 1e6
        return torch.where(large, torch.full_like(x[:, :1], math.nan), self.body(x.clamp(-1e18, 1e18)))


class Meeting(Fragile):
    """In worker processes a hostile example's pass is not over before another client has read the buffer that it wrote.

    folder: where they tell each other.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        found, hostile = super().forward(x).nan_to_num(), bool(x.abs().max() > 1e19)
        if multiprocessing.parent_process() and not hostile:
            _wait_for(self.folder / "written")
        found = found + self.seen.sum() * torch.tensor([1.0, 0.0, 0.0])
        if multiprocessing.parent_process():
            (self.folder / ("written" if hostile else "read")).touch()
            _wait_for(self.folder / "read")
        return found


class Sharing(Meeting):
    """Broken twin: a worker's copy is what it was sent, buffers in memory that all workers share included."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _wait_for(file: Path) -> None:
    until = time.monotonic() + 120
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.002)


def clients(sizes: tuple[int, ...] = SIZES, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        (torch.tensor(rng.normal(size=(n, 6)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, n))) for n in sizes
    ]


def recipe(method: str, changes: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A recipe in which everybody takes part; ``changes`` replaces whole keys of its sections."""
    made: dict[str, Any] = {
        "seed": 5, "rounds": 2, "algorithm": {"name": method, **options},
        "local": {"steps": 2, "batch_size": 100, "lr": 0.3}, "cohort": {"size": len(SIZES)},
        "privacy": {"clip": 0.2, "noise_multiplier": 1.5, "delta": 1e-5, "randomness": "seeded", "benchmark": True},
        "engine": {"backend": "sequential"},
    }  # fmt: skip
    for section, values in (changes or {}).items():
        made[section] = {**made.get(section, {}), **values} if isinstance(values, Mapping) else values
    return made


def job(method: str, changes: Mapping[str, Any] | None = None, network: nn.Module | None = None, **options: Any) -> Job:
    return prepare(Recipe.of(recipe(method, changes, **options)), network or module(), clients())


def after(rounds: int) -> Callable[[], bool]:
    """A run's ``should_stop``, which it asks before each round: whether so many are over."""
    asked = itertools.count()
    return lambda: next(asked) >= rounds


def beginning(made: Job) -> tuple[RoundState, Broadcast]:
    """The state that a job begins with, and what its first round sends of it."""
    state = made.parts.first_state(made.initial_weights[: made.parts.layout.dimension], made.threshold)
    return state, broadcast_of(made.parts, state, made.seed)


def sum_of(made: Job, messages: Iterable[tuple[Tensor, int]], key: bytes = bytes(32)) -> Aggregate:
    """What the server holds, before noise, of a first round's messages, each with its client's number of examples."""
    accumulator = accumulator_of(made.parts, beginning(made)[1], key)
    for message, size in messages:
        accumulator.add(message, [size])
    return accumulator.result()


def trained_sum(made: Job, cohort: np.ndarray, sink: Accumulator | None = None) -> tuple[Accumulator, PersonalState]:
    """The sum of a cohort's first round on the job's back end, and what clients keep after it. sink: in which it is
    added."""
    broadcast = beginning(made)[1]
    sink = sink or accumulator_of(made.parts, broadcast, made.key)
    kept = PersonalState(made.initial_weights[made.parts.layout.dimension :])
    RoundSum(made.parts.algorithm, made.parts.local, broadcast, sink, kept).add_cohort(made.backend, cohort)
    return sink, kept


class Caught:
    """A server step that keeps the noisy mean of whole messages, and hands on its first vector."""

    def __init__(self, length: int) -> None:
        self.length, self.mean = length, torch.zeros(0)

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        self.mean = mean
        return mean[: self.length], {}


def at_the_sum(made: Job) -> Job:
    """The same job with nothing behind the mean and w^t = 0: the next shared vector is the noisy sum over m, and so is
    the first server step's ``mean``, which has all vectors of a message."""
    plain = Sgd()
    keep = tuple(step for step in made.parts.algorithm.server if "initial" in step.initial(torch.zeros(1)))
    bare = replace(made.parts.algorithm, server=(Caught(made.parts.layout.dimension), *keep))
    made.parts = replace(made.parts, algorithm=bare, optimizer=lambda view: plain)
    made.initial_weights = torch.zeros_like(made.initial_weights)
    return made


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])
