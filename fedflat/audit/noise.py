"""Measure the noise of real rounds against the plan: its size, its independence, and its secrecy.

Clients without data send exactly zero, so what a round releases is its noise and nothing else. A recipe is run on such
clients through ``engine.train``, with its own model, method, clip, mechanism and server path, and the released means
are compared with what the ledger says. Missing noise on some coordinates, one noise in two rounds and a std that is 5 %
too small are found in seconds.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from fedflat.assembly.inputs import data_of, module_of
from fedflat.assembly.jobs import prepare
from fedflat.assembly.records import is_seeded
from fedflat.audit.bounds import AuditResult, Floats, assumptions, not_run
from fedflat.audit.worlds import CLIENTS, Case, Engine, Maker, Recorder, recorded_run, world_recipe
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import digest, using_threads
from fedflat.data.clients import FederatedData
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.round import broadcast_of
from fedflat.engine.train import train

ROUNDS = 3
ENTRIES = 60_000
"""Numbers measured in each round, over all runs: the std is then known to 1.5 % at ``FAILURE``."""
MOST_RUNS = 60
SLICE = 1 << 17
"""Neighbouring coordinates whose law and correlations are looked at; every coordinate counts in the std."""
FAILURE = 1e-7
"""Chance that one test blames sound noise."""
TOO_MUCH = 1.03
"""Noise larger than planned by more than this is a fault of the plan, though no leak."""
ALIKE = 0.9
"""Correlation from which two noises are one; it is found with a handful of coordinates already."""
ASSUMPTIONS = assumptions("noise", clients=CLIENTS, rounds=ROUNDS, failure=FAILURE)


def audit_noise(
    recipe: Recipe, *, model: nn.Module | None = None, clients: Sequence[Any] | None = None, test: Any = None
) -> AuditResult:
    """Compare the noise of a recipe's rounds with its plan.

    model, clients, test: as for ``fedflat.run``. Raises InputError where the recipe cannot run.
    """
    began, method = time.perf_counter(), algorithm_of(recipe)
    silent = not method.private or recipe.privacy.noise_multiplier == 0
    reasons = {
        "There is no noise to measure: the run is not private.": silent,
        "A published procedure: the mechanism audit measures what it leaks.": recipe.privacy.protocol == "published",
        "Votes: the mechanism audit measures what they leak.": method.kind != "update",
    }
    if reason := next((words for words, holds in reasons.items() if holds), ""):
        return not_run("noise", method.name, reason)
    data = data_of(recipe, clients, test)
    module, _, _ = module_of(recipe, model, data)
    with using_threads(1):
        small, empty = _small(recipe, data)
        noise, planned, faults = measure(prepare(small, module, data=empty))
        faults += [*_size_faults(noise), *_law_faults(noise), *_correlation_faults(noise, planned)]
        # Two starts by the command's own path show whether a secret key is drawn anew.
        starts = [recorded_run(small, module, data=empty).means[0].double().numpy() for _ in range(2)]
        if cosine(*starts) > ALIKE and recipe.privacy.randomness == "secret":
            faults.append("a second start of the same recipe has the same noise, though its randomness is secret")
    return AuditResult(
        "noise", method.name, confidence=1 - FAILURE, canary="clients without data",
        statistic="std over the planned one", runs=len(noise), seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS, violations=tuple(faults), details={"ratio": math.sqrt(float(np.square(noise).mean()))},
    )  # fmt: skip


def measure(job: Job) -> tuple[Floats, Floats, list[str]]:
    """Run a job of clients without data under several keys, and collect the noise of its rounds.

    Returns: the noise in units of the planned std, float64 ``(runs, rounds, entries)``; the correlation of two rounds
    of one run by the plan, ``(rounds, rounds)``; and what is wrong with the ledger's arithmetic or the common mask.
    """
    runs, lines, outside = list[Floats](), list[dict[str, Any]](), 0.0
    for number in range(MOST_RUNS):
        # Under one key all runs would have the same noise.
        if number:
            job.key = digest(job.key, "audit: noise", number)
        noise, lines, outside = _noise(job)
        runs.append(noise)
        if number and sum(run.shape[1] for run in runs) >= ENTRIES:
            break
    scales, planned = _plan(job.parts, lines)
    width = min(run.shape[1] for run in runs)
    std, needed = lines[0]["std"], lines[0]["noise_multiplier"] * lines[0]["sensitivity"]
    faults = {
        f"the ledger's std {std:.6g} is below σ × sensitivity, {needed:.6g}":
            lines[0]["trust"] == "central" and std < needed * (1 - 1e-9),
        "something leaves outside the common mask": outside > 0,
    }  # fmt: skip
    scaled = np.stack([run[:, :width] for run in runs]) / scales[:, None]
    return scaled, planned, [fault for fault, holds in faults.items() if holds]


def _small(recipe: Recipe, data: FederatedData) -> tuple[Recipe, FederatedData]:
    """Return the recipe for a few clients that all take part, and their federation, which holds no data."""
    small = world_recipe(recipe, CLIENTS, Engine("sequential"), ROUNDS, Case("empty", noise=True))
    privacy = recipe.privacy
    values = [f"privacy.noise_multiplier={privacy.noise_multiplier or 1.0}", f"privacy.randomness={privacy.randomness}"]
    values.append(f"privacy.benchmark={is_seeded(recipe)}")
    return Recipe.of(small, values), Maker(data).everybody("empty", CLIENTS)


def _noise(job: Job) -> tuple[Floats, list[dict[str, Any]], float]:
    """Return a run's noise on the sums ``(rounds, entries)``, its ledger lines, and what left outside the mask."""
    recorder = Recorder()
    outcome = train(replace(job, parts=recorder.in_front_of(job.parts)))
    sums = [mean.double() * job.parts.plan.divisor for mean in recorder.means]
    masks = [_mask(job, t) for t in range(len(sums))]
    outside = torch.cat([torch.zeros(1), *(total[~mask] for total, mask in zip(sums, masks))])
    inside = [total[mask] for total, mask in zip(sums, masks)]
    width = min(map(len, inside))
    return torch.stack([k[:width] for k in inside]).numpy(), outcome.entries, float(outside.abs().max())


def _mask(job: Job, round: int) -> Tensor:
    """Return the common mask of a round, drawn from public randomness; all of the sum where there is none."""
    state = replace(job.parts.first_state(job.initial_weights, job.threshold), round=round)
    mask = broadcast_of(job.parts, state, job.seed, lambda: torch.zeros_like(state.shared)).mask
    return torch.ones(job.parts.message_length, dtype=torch.bool) if mask is None else mask


def _plan(parts: RoundParts, lines: Sequence[dict[str, Any]]) -> tuple[Floats, Floats]:
    """Return the planned std of each round's sum, and the planned correlation of two rounds."""
    source, count = parts.mechanism, len(lines)
    std = source.total_std(float(lines[0]["clip"]), CLIENTS)
    base = [line["std"] if std is None else std for line in lines]
    if source.factor is None:
        return np.array(base), np.eye(count)
    rows = np.asarray(source.factor.inverse, dtype=np.float64)[:count]
    lengths = np.linalg.norm(rows, axis=1)
    return np.array(base) * lengths, rows @ rows.T / np.outer(lengths, lengths)


def _size_faults(noise: Floats) -> list[str]:
    """Return what is wrong with the std of each round, and the noise of each coordinate."""
    faults = []
    for t in range(noise.shape[1]):
        squares, count = float(np.square(noise[:, t]).sum()), noise[:, t].size
        ratio = math.sqrt(squares / count)
        if stats.chi2.cdf(squares, count) < FAILURE:
            faults.append(f"round {t}: the noise's std is {ratio:.3f} of the planned one")
        elif ratio > TOO_MUCH and stats.chi2.sf(squares, count) < FAILURE:
            faults.append(f"round {t}: the noise's std is {ratio:.3f} times the planned one")
    weak = np.square(noise).sum((0, 1)) < stats.chi2.ppf(FAILURE / noise.shape[2], noise.shape[0] * noise.shape[1])
    if weak.any():
        faults.append(f"{weak.sum()} of {noise.shape[2]} coordinates have too little noise")
    return faults


def _law_faults(noise: Floats) -> list[str]:
    """Return a fault unless the noise is Gaussian, by Kolmogorov and Smirnov's test on a slice."""
    test = stats.kstest(noise[..., :SLICE].ravel()[:SLICE], "norm")
    # A grid, or 3 % of freedom in the std, is not a fault of the law.
    return ["the noise is not Gaussian"] if test.pvalue < FAILURE and test.statistic > 0.03 else []


def _correlation_faults(noise: Floats, planned: Floats) -> list[str]:
    """Return correlations that are not planned: between rounds, coordinates and runs."""
    faults, noise = [], noise[..., :SLICE]
    limit = _limit(noise[:, 0].size)
    for s in range(noise.shape[1]):
        for t in range(s):
            seen = cosine(noise[:, s], noise[:, t])
            if abs(seen - planned[s, t]) > limit:
                faults.append(f"rounds {t} and {s}: correlation {seen:.2f} where {planned[s, t]:.2f} is planned")
    one, other = noise[:-1], noise[1:]
    if one.size and abs(cosine(one, other)) > _limit(one.size):
        faults.append("runs under different keys share their noise")
    lag, worst = _largest_lag(noise)
    if abs(worst) > _limit(noise.size, lags=noise.shape[2]):
        faults.append(f"coordinates {lag} apart have correlation {worst:.2f}")
    return faults


def _limit(count: int, lags: int = 1) -> float:
    """Return the absolute correlation of ``count`` independent pairs that chance exceeds with ``FAILURE``."""
    return min(0.99, float(stats.norm.isf(FAILURE / 2 / lags)) / math.sqrt(count))


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of two vectors, 0 where one is zero."""
    return float((a * b).sum() / math.sqrt(float(np.square(a).sum() * np.square(b).sum()) or 1.0))


def _largest_lag(noise: Floats) -> tuple[int, float]:
    """Return the distance of coordinates with the largest circular autocorrelation, and that correlation."""
    rows = noise.reshape(-1, noise.shape[2])
    correlations = np.fft.irfft(np.square(np.abs(np.fft.rfft(rows, axis=1))).sum(0), rows.shape[1])
    correlations = correlations[1 : rows.shape[1] // 2 + 1] / (correlations[0] or 1.0)
    if not len(correlations):
        return 0, 0.0
    lag = int(np.abs(correlations).argmax())
    return lag + 1, float(correlations[lag])
