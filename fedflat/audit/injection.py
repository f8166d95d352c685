"""Bound ε from below with canary clients in a real training run (Steinke et al. 2023)."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.audit.bench import linear_message
from fedflat.audit.bounds import AuditResult, Floats, assumptions, one_run_bound
from fedflat.core.checks import wrong
from fedflat.core.cohorts import make_sampler
from fedflat.core.params import PersonalState
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast
from fedflat.engine.job import Evaluation, Job
from fedflat.engine.reduce import Backend, Clipped, Part, Trained
from fedflat.engine.round import RoundParts
from fedflat.engine.train import train
from fedflat.privacy.plan import Plan

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
    _kept: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def block(self, start: int) -> Tensor:
        """Return the directions ``(n, d)`` of the block that begins with number ``start``."""
        if start in self._kept:
            return self._kept[start]
        block = self.rows(range(start, min(start + BLOCK, self.count)))
        # Drawing directions again costs time, keeping them costs memory.
        if self.count * self.dimension <= KEPT_ENTRIES:
            self._kept[start] = block
        return block

    def rows(self, numbers: range | list[int]) -> Tensor:
        """Return the chosen directions ``(n, d)``."""
        draws = [
            stream(self.seed, "audit: canary", i).standard_normal(self.dimension, dtype=np.float32) for i in numbers
        ]
        stacked = torch.from_numpy(np.stack(draws))
        unit: Tensor = stacked / torch.linalg.vector_norm(stacked, dim=1, keepdim=True)
        return unit

    def cosines(self, vector: Tensor) -> Floats:
        """Return the cosine of every direction with ``vector`` ``(d,)``: ``(count,)``; zeros for a zero vector."""
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if not norm > 0 or not math.isfinite(norm):
            return np.zeros(self.count)
        unit = vector / norm
        return torch.cat([self.block(start) @ unit for start in range(0, self.count, BLOCK)]).double().numpy()


@dataclass
class CanaryBackend:
    """A back end with canary clients numbered from ``first``; those not ``included`` contribute nothing.

    It sees each w^t as it is broadcast, and scores the directions against every released step w^{t+1} − w^t.
    """

    inner: Backend
    parts: RoundParts
    directions: Directions
    included: NDArray[np.bool_]
    first: int
    name: str = "canaries"
    last: Tensor | None = None
    total: Floats = field(default_factory=lambda: np.zeros(0))
    drawn: int = 0

    def train(
        self, cohort: NDArray[np.int64], broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[Part]:
        """Train the real clients by the inner back end, then the canaries of the cohort through the real local loop."""
        self.look(broadcast.shared)
        yield from self.inner.train(cohort[cohort < self.first], broadcast, kept, clipped)
        numbers = [int(c) - self.first for c in cohort if c >= self.first and self.included[int(c) - self.first]]
        self.drawn += len(numbers)
        length = broadcast.clip * LOUD if math.isfinite(broadcast.clip) else 1.0
        parts = self.parts
        for place in range(0, len(numbers), BLOCK):
            updates = self.directions.rows(numbers[place : place + BLOCK]) * length
            messages = linear_message(parts.algorithm, parts.layout, parts.local, broadcast, updates, kept.first)
            yield Trained(messages, [1] * len(updates))

    def look(self, shared: Tensor) -> None:
        """Score the step that led to a released vector ``(d,)``."""
        shared = shared.detach().clone().cpu()
        if self.last is None:
            self.total = np.zeros(self.directions.count)
        else:
            self.total = self.total + self.directions.cosines(shared - self.last)
        self.last = shared


@dataclass(frozen=True)
class Observed:
    """What the adversary saw, for every direction ``(count,)``: the sum of the rounds' cosines. drawn: canary messages
    in the whole run."""

    total: Floats
    rounds: int
    drawn: int


def with_canaries(job: Job, directions: Directions, included: NDArray[np.bool_]) -> Job:
    """Return the same run with ``len(included)`` more clients: the same q, σ, C, T and δ, so the same proven ε."""
    count = job.parts.plan.sampler.clients
    if job.parts.plan.trust != "central":
        found = job.parts.plan.trust
        raise wrong("privacy.trust", found, "central for canary audits", hint="They see models, not single updates.")
    plan = _larger(job.parts.plan, count + len(included))
    # More clients at the same q, σ and δ have the same proven ε.
    parts = replace(job.parts, plan=plan)
    backend = CanaryBackend(job.backend, parts, directions, included, count)
    return replace(job, parts=parts, backend=backend, folder=None, evaluation=Evaluation(every=10**9))


def _larger(plan: Plan, clients: int) -> Plan:
    """Return the plan for more clients at the same q; the noise multiplier that ran stays."""
    sampler = plan.sampler
    size = sampler.q * clients
    maximum = sampler.maximum
    if sampler.name == "fixed":
        size = max(1, round(size))
    separation = getattr(sampler, "separation", None) if sampler.name != "full" else None
    # A whole number of clients has as many turns as before.
    if separation is not None:
        size = max(1, int(size))
    if maximum is not None:
        maximum = max(math.ceil(size), round(maximum * clients / sampler.clients))
    larger = make_sampler(sampler.name, clients, size, maximum, separation)
    noise_cohort = None if plan.noise_cohort is None else plan.noise_cohort * larger.size / sampler.size
    return replace(plan, sampler=larger, noise_cohort=noise_cohort)


def observe(job: Job) -> Observed:
    """Train a job made by ``with_canaries`` and score its directions."""
    outcome = train(job)
    backend = cast(CanaryBackend, job.backend)
    backend.look(outcome.state.shared)
    return Observed(backend.total, outcome.state.round, backend.drawn)


GUESSED = 0.2
"""Share of the canaries guessed at, fixed beforehand: half of it highest scores "in", half lowest "out", the rest
abstained from."""
CONFIDENCE = 0.95
ONE_RUN_ASSUMES = assumptions("one-run", loud=LOUD)


def one_run(job: Job, canaries: int) -> AuditResult:
    """Return the lower bound on ε of a run at its δ, from ``canaries`` clients that are included by fair coins."""
    began, plan = time.perf_counter(), job.parts.plan
    included = stream(job.seed, "audit: coins").random(canaries) < 0.5
    directions = Directions(job.seed, canaries, job.parts.layout.dimension)
    seen = observe(with_canaries(job, directions, included))
    guesses, correct = guess(seen.total, included, GUESSED)
    proven, failure = plan.epsilon(seen.rounds), 1 - CONFIDENCE
    details = {
        "canaries": canaries, "canary_messages": seen.drawn, "rounds": seen.rounds, "delta": plan.delta,
        "included": int(included.sum()), "guesses": guesses, "correct": correct,
        "largest_possible": one_run_bound(canaries, guesses, guesses, plan.delta, failure),
    }  # fmt: skip
    return AuditResult(
        "one-run", job.parts.algorithm.name, claimed=proven, proven=proven, runs=1, details=details,
        confidence=CONFIDENCE, assumptions=ONE_RUN_ASSUMES,
        lower_bound=one_run_bound(canaries, guesses, correct, plan.delta, failure),
        canary="random direction at C, in or out", statistic="sum of cosines over rounds",
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def guess(scores: NDArray[np.float64], included: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Return (guesses, correct ones): the highest scores are guessed in, the lowest out, as many of each.

    scores, included: ``(m,)``. share: guesses / m in (0, 1]; the number does not depend on the scores.
    """
    each = max(1, int(share * len(scores) / 2)) if len(scores) > 1 else 0
    order = np.argsort(scores, kind="stable")
    correct = int(included[order[len(order) - each :]].sum()) + int((~included[order[:each]]).sum())
    return 2 * each, correct
