"""The audit's small federation: real parts from ``prepare``, clients whose update is chosen.

A canary is a client whose loss is linear: its gradient is constant, so the real local loop, gradient rule, mask and
transforms of the method turn a chosen direction into the message that the method would send.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.assembly.plans import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core.params import Layout
from fedflat.core.personal import ClientContext
from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Algorithm, Broadcast, Local, Part, RoundState
from fedflat.engine.client import train_client
from fedflat.engine.parts import Parts
from fedflat.engine.problem import Batch, Gradient
from fedflat.engine.round import accumulator_of, broadcast_of, select_cohort
from fedflat.engine.train import Job

TENSORS, ENTRIES, CLIENTS = 16, 12, 3
"""The model has 16 tensors of 12 entries and a linear head of 26; two clients are there beside the canary."""
SIGMA, CLIP, DELTA = 3.0, 1.0, 1e-5
"""The fixed configuration of the mechanism audit (docs/specification.md): one round at q = 1; claimed ε 1.27."""


class AuditModel(nn.Module):
    """Many small tensors, so that a per-tensor clip shows; a head for personal methods; a still buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(ENTRIES)) for _ in range(TENSORS)])
        self.head = nn.Linear(ENTRIES, 2)
        self.register_buffer("scale", torch.ones(ENTRIES))
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs ``(n, 12)`` -> logits ``(n, 2)``."""
        return self.head(inputs * self.scale * torch.stack(list(self.blocks)).sum(0))  # type: ignore[no-any-return]


@dataclass
class LinearProblem:
    """A loss linear in the weights; a batch's inputs are its gradient ``(…, D)``."""

    layout: Layout

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """The constant gradient of one part."""
        zero = torch.zeros(weights.shape[:-1])
        return Gradient(batch.inputs[..., self.layout.span(part)].clone(), zero, zero)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A linear loss has one mode."""
        yield


@dataclass(frozen=True)
class LinearData:
    """Data of a client, or a block of clients, whose gradient ``(…, D)`` is the same at every step."""

    slope: Tensor

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """The same gradient at every step."""
        for _ in range(steps):
            yield Batch(self.slope, torch.zeros(0))

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """The one batch, whose share of the data is 1."""
        yield Batch(self.slope, torch.zeros(0)), torch.ones(1)

    def class_shares(self, classes: int) -> Tensor:
        """All classes alike."""
        return torch.full((*self.slope.shape[:-1], classes), 1 / classes)


def linear_message(
    algorithm: Algorithm, layout: Layout, local: Local, broadcast: Broadcast, update: Tensor, personal: Tensor
) -> Tensor:
    """The messages ``(…, d)`` of clients that pull into ``update`` ``(…, d)``, through the real ``train_client``."""
    slope = torch.cat([-update / (local.lr * local.steps), torch.zeros(*update.shape[:-1], personal.numel())], -1)
    start = torch.cat([broadcast.shared, personal])
    weights = start.expand(slope.shape).clone()
    problem = LinearProblem(layout)
    own = ClientContext({state.name: torch.zeros_like(update) for state in algorithm.client_state})
    return train_client(algorithm, problem, broadcast, local, LinearData(slope), weights, own).message


@dataclass(frozen=True)
class Bench:
    """Real parts and a public state to start the round from."""

    parts: Parts
    state: RoundState
    personal: Tensor
    seed: int = 0

    def changed(self, **parts: Any) -> Bench:
        """The same with other parts: how a defect is planted."""
        return replace(self, parts=replace(self.parts, **parts))

    def random(self, purpose: str) -> Tensor:
        """A standard normal vector ``(d,)`` of a named public stream."""
        draw = stream(self.seed, "audit: " + purpose).standard_normal(self.state.shared.numel())
        return torch.from_numpy(draw).float()


@dataclass(frozen=True)
class Client:
    """An update ``(d,)`` and the number of examples its client says it has."""

    update: Tensor
    size: int = 1


@dataclass(frozen=True)
class World:
    """What the server holds before noise: the round's broadcast, the aggregate and the accumulator's own divisor."""

    broadcast: Broadcast
    aggregate: Aggregate
    divisor: float | None


def bench_of(name: str, options: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None) -> Bench:
    """The audit's federation for a method: q = 1, σ = 3, C = 1, δ = 1e-5, one round.

    options: the algorithm's keys. sections: recipe sections to audit as they are (``privacy`` may bring a clip of its
    own, ``server`` an optimiser); the fixed configuration overrides what it fixes.
    """
    job = prepare_job(name, options, sections)
    width = job.parts.layout.dimension
    start = stream(0, "audit: start").standard_normal(width) * 0.1
    state = job.parts.first_state(torch.from_numpy(start).float(), job.threshold)
    bench = Bench(job.parts, state, job.first[width:].clone())
    slots = {
        slot: value + 0.1 * bench.random("slot " + slot) if value.shape == state.shared.shape else value
        for slot, value in state.slots.items()
    }
    return replace(bench, state=replace(state, slots=slots))


def prepare_job(
    name: str,
    options: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    inputs: Tensor | None = None,
) -> Job:
    """A live job of the audit's federation; ``inputs`` ``(12,)`` is the last client's only example."""
    given = {key: dict(value) for key, value in (sections or {}).items()}
    privacy: dict[str, Any] = {"clip": CLIP} | given.get("privacy", {})
    privacy |= {"noise_multiplier": SIGMA, "delta": DELTA, "epsilon": None, "budget": None, "noise_cohort": None}
    recipe = Recipe.of(
        {
            "name": "audit",
            "rounds": 1,
            "algorithm": {"name": name, **(options or {})},
            "cohort": {"size": CLIENTS},
            "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
            "privacy": privacy,
            "server": given.get("server", {}),
            "engine": {"device": "cpu", "backend": "sequential"},
        }
    )
    if algorithm_of(recipe).kind == "ddgauss" or recipe.privacy.trust == "distributed":
        recipe = Recipe.of(recipe, [f"cohort.min={CLIENTS - 1}"])  # met with and without the client
    return prepare(recipe, AuditModel(), *examples_of(CLIENTS, inputs))


def examples_of(
    clients: int, inputs: Tensor | None = None
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """A pair of one example for each client, of zeros but for the last client's ``inputs`` ``(12,)``; and test data."""
    examples = [torch.zeros(1, ENTRIES) for _ in range(clients)]
    if inputs is not None:
        examples[-1] = inputs.reshape(1, ENTRIES)
    pairs = [(x, torch.zeros(1, dtype=torch.int64)) for x in examples]
    return pairs, (torch.zeros(2, ENTRIES), torch.tensor([0, 1]))


def world_of(bench: Bench, others: Client, canary: Client | None, key: bytes) -> World:
    """Broadcast, local training, clip and sum of a round; ``canary`` None: world 0, the client removed.

    The cohort comes from the real sampler: at q = 1 everybody. The last client is the canary. Where clients bring the
    noise (trust distributed, local), a removed client's slot still sends its share of it, and a zero update.
    """
    parts = bench.parts
    if canary is None and parts.plan.trust != "central":
        canary = Client(torch.full_like(bench.state.shared, math.nan))
    cohort = select_cohort(parts, key, bench.state.round)
    broadcast = broadcast_of(parts, bench.state, bench.seed)
    accumulator = accumulator_of(parts, broadcast, key)
    for client in cohort.tolist():
        chosen = canary if client == CLIENTS - 1 else others
        if chosen is None:
            continue
        message = linear_message(
            parts.algorithm, parts.layout, parts.local, broadcast, chosen.update[None], bench.personal
        )
        accumulator.add(message, [chosen.size])
    return World(broadcast, accumulator.result(), accumulator.divisor)
