"""Planted defects of noise that later rounds take back, and of turns: what one client shows in the released sums.

A run of ``ROUNDS`` rounds through the real server path, many times with and without one client at +C along the first
coordinate, others' messages chosen by the adversary. Each twin keeps everything of the real path but one line.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.assembly.jobs import prepare
from fedflat.audit.bench import DELTA, AuditModel, examples_of
from fedflat.config.recipe import Recipe
from fedflat.core.cohorts import CyclicPoisson, MinSeparation
from fedflat.core.types import Aggregate
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.round import broadcast_of, noisy_sum, select_cohort, within_cap
from fedflat.methods.noise import CorrelatedNoise
from fedflat.privacy.accounting.curves import gaussian_epsilon
from fedflat.privacy.correlated import ScheduledPlan

Floats = NDArray[np.float64]

CLIENTS, ROUNDS, SEPARATION, CLIP, SIGMA = 12, 9, 3, 0.2, 0.3
RUNS, CONFIDENCE = 300, 1 - 1e-6
LARGEST = 30.0
"""Of μ: a bound beyond says only that there is no noise."""


@dataclass(frozen=True)
class EveryRound(MinSeparation):
    """A server that asks the first client in every round, whoever else's turn it is."""

    def select_at(self, round: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """The round's cohort with client 0 in it."""
        return np.union1d([0], super().select_at(round, generator))


@dataclass(frozen=True)
class SplitEvenly(CyclicPoisson):
    """Groups of equal size among those who are there, so that one who leaves moves the others. gone: client 0 left."""

    gone: bool = False

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """The group of each client by its place among those present; the one who left keeps its own, for nothing."""
        return (np.arange(self.clients) - (np.arange(self.clients) > 0) * self.gone) % self.separation


class OneRow(CorrelatedNoise):
    """The row of Z of round 0 in every round."""

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """Row t of C⁻¹Z with all rows of Z the same."""
        return super().unit(key, 0, size) * float(self.factor.inverse[round].sum() / self.factor.inverse[0, 0])


def correlated_job(sampling: str = "min-separation", **privacy: Any) -> Job:
    """A job with banded noise whose clients take turns, or join their groups' rounds (all of them: p = 1)."""
    recipe = {
        "rounds": ROUNDS, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
        "cohort": {"size": CLIENTS // SEPARATION, "sampling": sampling, "separation": SEPARATION},
        "privacy": {"clip": CLIP, "noise_multiplier": SIGMA, "delta": DELTA, "noise": "banded", **privacy},
        "engine": {"device": "cpu", "backend": "sequential"},
    }  # fmt: skip
    return prepare(Recipe.of(recipe), AuditModel(), *examples_of(CLIENTS))


def released(job: Job, present: bool, keys: Sequence[bytes], others: Floats | None = None) -> Floats:
    """First coordinate of the rounds' noisy sums, over C: float64 ``(keys, T)``.

    Client 0 sends +C where the server lets it take part. others: what the others send, ``(M,)``; None: nothing.
    """
    sent = np.zeros(CLIENTS) if others is None else others.copy()
    sent[0] = float(present)
    found = np.empty((len(keys), ROUNDS))
    parts = job.parts if present else _without(job.parts)
    for number, key in enumerate(keys):
        state = parts.first_state(job.initial_weights, job.threshold)
        for t in range(ROUNDS):
            cohort, state = within_cap(parts, replace(state, round=t), select_cohort(parts, key, t))
            total = torch.zeros(parts.message_length, dtype=torch.float64)
            total[0] = CLIP * float(sent[cohort].sum())
            aggregate = Aggregate(total, len(cohort), 0.0, torch.zeros(0), torch.zeros(0))
            found[number, t] = float(noisy_sum(parts, broadcast_of(parts, state, job.seed), aggregate, key)[0]) / CLIP
    return found


def _without(parts: RoundParts) -> RoundParts:
    sampler = parts.plan.sampler
    gone = replace(sampler, gone=True) if isinstance(sampler, SplitEvenly) else sampler
    return replace(parts, plan=replace(parts.plan, sampler=gone))


def mu_bound(absent: Floats, present: Floats, failure: float) -> float:
    """A lower limit of the distance, in standard deviations, of the projections ``(n, T)`` of two worlds.

    The best direction is learned on the first halves.
    """
    from scipy.stats import chi2, norm

    half = len(absent) // 2
    spread = np.cov(np.concatenate([x[:half] - x[:half].mean(0) for x in (absent, present)]).T)
    shift = present[:half].mean(0) - absent[:half].mean(0)
    weights = np.linalg.solve(spread + (1e-9 * float(np.trace(spread)) * np.eye(len(shift))), shift)
    zero, one = absent[half:] @ weights, present[half:] @ weights
    freedom = 2 * (len(zero) - 1)
    variance = (float(zero.var(ddof=1)) + float(one.var(ddof=1))) / 2 * freedom / chi2.ppf(failure / 2, freedom)
    slack = float(norm.isf(failure / 2)) * math.sqrt(2 / len(zero))
    return max(0.0, float(one.mean() - zero.mean()) / math.sqrt(variance + 1e-300) - slack)


def audit_turns(job: Job, others: Floats | None = None, runs: int = RUNS) -> float:
    """Lower bound on ε of a job of ``correlated_job``, from ``runs`` runs of each world."""
    keys = [b"%032d" % number for number in range(2 * runs)]
    zero, one = released(job, False, keys[:runs], others), released(job, True, keys[runs:], others)
    return gaussian_epsilon(min(mu_bound(zero, one, 1 - CONFIDENCE), LARGEST), DELTA)


@dataclass(frozen=True)
class Twin:
    """A defect. change: the parts with it. sampling: of the job it is put into. others: what the others send."""

    change: Callable[[RoundParts, ScheduledPlan], RoundParts]
    canary: str
    sampling: str = "min-separation"
    others: Floats | None = None

    def job(self) -> Job:
        """The job with the defect; its plan still claims the ε of one without."""
        made = correlated_job(self.sampling)
        made.parts = self.change(made.parts, cast(ScheduledPlan, made.parts.plan.mechanism))
        return made


def _sampled(parts: RoundParts, sampler: Any) -> RoundParts:
    return replace(parts, plan=replace(parts.plan, sampler=sampler))


def _ignored(parts: RoundParts, own: ScheduledPlan) -> RoundParts:
    return _sampled(parts, EveryRound(CLIENTS, CLIENTS // SEPARATION, 1))


def _one_column(parts: RoundParts, own: ScheduledPlan) -> RoundParts:
    less = own.factor.largest_column() / own.scale
    return replace(parts, mechanism=CorrelatedNoise(lambda bound: parts.plan.std(bound) * less, factor=own.factor))


def _one_row(parts: RoundParts, own: ScheduledPlan) -> RoundParts:
    return replace(parts, mechanism=OneRow(parts.plan.std, factor=own.factor))


def _evenly(parts: RoundParts, own: ScheduledPlan) -> RoundParts:
    return _sampled(parts, SplitEvenly(CLIENTS, CLIENTS // SEPARATION, SEPARATION))


_GROUP_1 = np.where(np.arange(CLIENTS) % SEPARATION == 1, -1.0, 0.0)
TWINS: dict[str, Twin] = {
    "separation ignored": Twin(_ignored, "+C in every round"),
    "one column's norm instead of s": Twin(_one_column, "+C in its turns"),
    "one row of Z in every round": Twin(_one_row, "+C in its turns"),
    "groups split evenly": Twin(_evenly, "+C in its turns, every third other −C", "cyclic-poisson", _GROUP_1),
}


def caught(name: str, runs: int = RUNS) -> tuple[float, float]:
    """The audit's lower bound on ε of a defect of ``TWINS``, and the ε that its plan claims."""
    twin = TWINS[name]
    job = twin.job()
    return audit_turns(job, twin.others, runs), job.parts.plan.epsilon()
