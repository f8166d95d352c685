"""Canary clients in a real training run: more clients, each pulling in a random direction of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.audit.bench import linear_message
from fedflat.core.checks import wrong
from fedflat.core.cohorts import make_sampler
from fedflat.core.personal import PersonalState
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.parts import Parts
from fedflat.engine.train import Backend, Evaluation, Job, train
from fedflat.privacy.plan import Plan

Floats = NDArray[np.float64]

LOUD = 10.0
"""Norm of a canary's update before the clip, in units of C."""
KEPT_ENTRIES = 50_000_000
"""Directions are held in memory up to this many entries (200 MB), and drawn again when needed beyond it."""
BLOCK = 64


@dataclass
class Directions:
    """``count`` independent random unit vectors ``(d,)``; number i is a function of (seed, i) only."""

    seed: int
    count: int
    dimension: int
    _kept: list[Tensor] = field(default_factory=list, repr=False)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(number of the first, ``(n, d)``) for consecutive blocks."""
        keep = self.count * self.dimension <= KEPT_ENTRIES
        for index, start in enumerate(range(0, self.count, BLOCK)):
            if index < len(self._kept):
                yield start, self._kept[index]
                continue
            block = self.rows(range(start, min(start + BLOCK, self.count)))
            if keep:
                self._kept.append(block)
            yield start, block

    def rows(self, numbers: range | list[int]) -> Tensor:
        """The chosen directions ``(n, d)``."""
        draws = [
            stream(self.seed, "audit: canary", i).standard_normal(self.dimension, dtype=np.float32) for i in numbers
        ]
        stacked = torch.from_numpy(np.stack(draws))
        unit: Tensor = stacked / torch.linalg.vector_norm(stacked, dim=1, keepdim=True)
        return unit

    def cosines(self, vector: Tensor) -> Floats:
        """Cosine of every direction with ``vector`` ``(d,)``: ``(count,)``; zeros for a zero vector."""
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if not norm > 0 or not math.isfinite(norm):
            return np.zeros(self.count)
        unit = vector / norm
        return torch.cat([block @ unit for _, block in self.blocks()]).double().numpy()


@dataclass
class CanaryBackend:
    """A back end with canary clients numbered from ``first``; those not ``included`` contribute nothing.

    It sees each w^t as it is broadcast, and scores the directions against every released step w^{t+1} − w^t.
    """

    inner: Backend
    parts: Parts
    directions: Directions
    included: NDArray[np.bool_]
    first: int
    name: str = "canaries"
    start: Tensor | None = None
    last: Tensor | None = None
    largest: Floats = field(default_factory=lambda: np.zeros(0))
    total: Floats = field(default_factory=lambda: np.zeros(0))
    drawn: int = 0

    def train(
        self, cohort: NDArray[np.int64], broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState
    ) -> None:
        """The real clients by the inner back end, then the canaries of the cohort through the real local loop."""
        self.look(broadcast.shared)
        self.inner.train(cohort[cohort < self.first], broadcast, accumulator, heads)
        numbers = [int(c) - self.first for c in cohort if c >= self.first and self.included[int(c) - self.first]]
        self.drawn += len(numbers)
        length = broadcast.clip * LOUD if math.isfinite(broadcast.clip) else 1.0
        parts = self.parts
        for place in range(0, len(numbers), BLOCK):
            updates = self.directions.rows(numbers[place : place + BLOCK]) * length
            messages = linear_message(parts.algorithm, parts.layout, parts.local, broadcast, updates, heads.first)
            accumulator.add(messages, [1] * len(updates))

    def look(self, shared: Tensor) -> None:
        """Score the step that led to a released vector ``(d,)``."""
        shared = shared.detach().clone().cpu()
        if self.last is None:
            self.start, self.last = shared, shared
            self.largest = np.full(self.directions.count, -np.inf)
            self.total = np.zeros(self.directions.count)
            return
        cosines = self.directions.cosines(shared - self.last)
        self.largest, self.total = np.maximum(self.largest, cosines), self.total + cosines
        self.last = shared


@dataclass(frozen=True)
class Observed:
    """What the adversary saw, for every direction ``(count,)``: the final model's cosine, the largest and the sum of
    the rounds' cosines. drawn: canary messages in the whole run."""

    final: Floats
    largest: Floats
    total: Floats
    rounds: int
    drawn: int


def with_canaries(job: Job, directions: Directions, included: NDArray[np.bool_]) -> Job:
    """The same run with ``len(included)`` more clients: the same q, σ, C, T and δ, so the same proven ε."""
    count = job.parts.plan.sampler.clients
    if job.parts.plan.trust != "central":
        found = job.parts.plan.trust
        raise wrong("privacy.trust", found, "central for canary audits", hint="They see models, not single updates.")
    if job.parts.first is not None:
        hint = "They send updates, and its first round takes class sums."
        raise wrong("start", "class-statistics", "nothing for canary audits", hint=hint)
    plan = _larger(job.parts.plan, count + len(included))
    parts = replace(job.parts, plan=plan)
    backend = CanaryBackend(job.backend, parts, directions, included, count)
    return replace(job, parts=parts, backend=backend, folder=None, evaluation=Evaluation(every=10**9))


def _larger(plan: Plan, clients: int) -> Plan:
    """The plan for more clients at the same q; the noise multiplier that ran stays."""
    sampler = plan.sampler
    size = sampler.q * clients
    maximum = sampler.maximum
    if sampler.name == "fixed":
        size = max(1, round(size))
    separation = getattr(sampler, "separation", None) if sampler.name != "full" else None
    if separation is not None:  # as many turns as before
        size = max(1, int(size))
    if maximum is not None:
        maximum = max(math.ceil(size), round(maximum * clients / sampler.clients))
    larger = make_sampler(sampler.name, clients, size, maximum, separation)
    noise_cohort = None if plan.noise_cohort is None else plan.noise_cohort * larger.size / sampler.size
    return replace(plan, sampler=larger, noise_cohort=noise_cohort)


def observe(job: Job) -> Observed:
    """Train a job made by ``with_canaries`` and score its directions."""
    outcome = train(job)
    backend = job.backend
    if not isinstance(backend, CanaryBackend):
        raise wrong("audit", backend.name, "a job with canary clients")
    backend.look(outcome.state.shared)
    start = backend.start if backend.start is not None else outcome.state.shared
    final = backend.directions.cosines(outcome.state.shared - start)
    return Observed(final, backend.largest, backend.total, outcome.state.round, backend.drawn)
