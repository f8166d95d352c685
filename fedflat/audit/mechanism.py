"""The mechanism audit: one round through the real server path at q = 1, σ = 3, C = 1, δ = 1e-5."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.algorithms import ALGORITHMS
from fedflat.audit.bench import CLIENTS, CLIP, DELTA, ENTRIES, SIGMA, TENSORS, Bench, bench_of
from fedflat.audit.bounds import choose_event, event_bound
from fedflat.audit.canaries import Canary, canaries_for
from fedflat.audit.exact import contract_violations
from fedflat.audit.releases import Neighbours, coupled_difference, must_loop, on_a_grid, releases, run_key
from fedflat.audit.result import AuditResult
from fedflat.audit.votes import vote_releases
from fedflat.config.recipe import Recipe
from fedflat.core.checks import in_range, one_of, whole
from fedflat.privacy.plan import Claiming, Plan, Unsampled

Floats = NDArray[np.float64]

AT_ONCE = 2
"""Methods audited at a time: NumPy and torch share the other cores."""
RUNS = 20_000
LOOPED_RUNS = 300
"""Runs per world where each must be a call of its own (adaptive clip, clients that draw noise themselves)."""
VOTE_RUNS = 5_000
GRID_CANARIES = 3
"""Canaries where runs are slow: exact noise on whole numbers."""
CONFIDENCE = 1 - 1e-6
ASSUMPTIONS = (
    f"One round at q = 1, σ = {SIGMA:g}, δ = {DELTA:g}, C as given (else {CLIP:g}), with {CLIENTS} clients, one local "
    "step of one example at rate 0.1, from random weights and slots, one client after the other on a processor.",
    f"The model is a small one of {TENSORS} tensors of {ENTRIES} and a head. Of a recipe only the method with its "
    "options, clip, trust, protocol, secure_rng and server are audited: not its model, data, rounds, sampling, σ, "
    "local training, simulated cohort or back end.",
    "The adversary chooses every client's update and sees the whole released state; world 0 lacks the client.",
    "Event and threshold are chosen on one half of the runs and counted on the other (Clopper–Pearson, split over the "
    "canaries): no assumption about the distribution.",
)


@dataclass(frozen=True)
class Finding:
    """The bound that one canary gave, with the statistic that gave it."""

    bound: float
    canary: str
    statistic: str
    runs: int
    looped: bool = False


def audit_method(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    runs: int = RUNS,
    confidence: float = CONFIDENCE,
) -> AuditResult:
    """Lower bound on ε of one round of a method, beside the claimed and the proven ε.

    name: of ``ALGORITHMS`` (or path.py:function). options: its keys. sections: recipe sections ``privacy`` and
    ``server`` to audit with (a clip of another kind, an optimiser). runs: per world and canary.
    Raises InputError for an unknown name, fewer than 200 runs, a confidence outside (0.5, 1).
    """
    if ":" not in name:
        one_of("audit", name, ALGORITHMS)
    whole("runs", runs, 200)
    in_range("confidence", confidence, 0.5, 1, open_low=True, open_high=True)
    began = time.perf_counter()
    bench = bench_of(name, options, sections)
    if bench.parts.algorithm.kind == "votes":
        return audit_votes(bench, name, runs, confidence, began)
    best = audit_bench(bench, runs, confidence)
    plan = bench.parts.plan
    claimed, proven = epsilons(plan)
    return AuditResult(
        kind="mechanism",
        method=name,
        claimed=claimed,
        proven=proven,
        lower_bound=best.bound,
        confidence=confidence,
        canary=best.canary,
        statistic=best.statistic,
        runs=best.runs,
        seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS + _way(best),
        violations=contract_violations(bench, name, options, sections) if plan.private and claimed == proven else (),
    )


def epsilons(plan: Plan) -> tuple[float, float]:
    """(claimed, proven) ε of one round in which the client takes part; they differ for published procedures only."""
    proven, mechanism = plan.epsilon(1), plan.mechanism
    if isinstance(mechanism, Claiming):
        return mechanism.claimed(plan, 1), proven
    if isinstance(mechanism, Unsampled) and math.isinf(proven):  # amplification knows no q = 1; this needs none
        proven = mechanism.unsampled(plan, 1).epsilon
    return proven, proven


def _way(best: Finding) -> tuple[str, ...]:
    if best.looped:
        return ("Every run is a call of the real path of its own.",)
    return ("Runs are copies side by side in one call of the real path; single calls agree, exactly and in law.",)


def audit_all(names: Iterable[str] | None = None, *, runs: int = RUNS) -> list[AuditResult]:
    """The mechanism audit of every named method (default: all), ``AT_ONCE`` at a time, in the order of the names."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda n: audit_method(n, runs=runs), list(names or ALGORITHMS)))


def audit_recipe(recipe: Recipe, *, runs: int = RUNS) -> AuditResult:
    """The mechanism audit of a recipe's method, with its options, clip kind and server optimiser."""
    privacy = recipe.privacy.model_dump(mode="json")
    kept = {name: privacy[name] for name in ("clip", "trust", "protocol", "published", "secure_rng")}
    sections = {"privacy": kept, "server": recipe.server.model_dump(mode="json")}
    return audit_method(recipe.algorithm.name, options=recipe.algorithm.options, sections=sections, runs=runs)


def audit_bench(bench: Bench, runs: int, confidence: float, canaries: Iterable[Canary] | None = None) -> Finding:
    """The best bound over canaries; the failure probability 1 − confidence is split evenly over them."""
    chosen = tuple(canaries_for(bench) if canaries is None else canaries)
    failure = (1 - confidence) / len(chosen)
    looped = any(must_loop(_neighbours(bench, canary), law=canary is chosen[0]) for canary in chosen)
    count = min(runs, LOOPED_RUNS) if looped else runs
    if looped and on_a_grid(_neighbours(bench, chosen[0]).world(True, run_key(0, "grid", 0))):
        chosen = chosen[:GRID_CANARIES]
    findings = [audit_canary(bench, canary, count, failure, looped) for canary in chosen]
    return max(findings, key=lambda finding: finding.bound)


def audit_votes(bench: Bench, name: str, runs: int, confidence: float, began: float) -> AuditResult:
    """One cohort draw of noisy votes; what the server makes of them is post-processing.

    The canary votes for what nobody else votes for; world 0 lacks its votes.
    """
    runs = min(runs, VOTE_RUNS)
    zero, one = (vote_releases(bench, present, runs) for present in (False, True))
    failure, half = 1 - confidence, runs // 2
    projection = [x @ (one[:half].mean(0) - zero[:half].mean(0)) for x in (zero, one)]
    event, _ = choose_event(projection[0][:half], projection[1][:half], DELTA, failure)
    claimed, proven = epsilons(bench.parts.plan)
    return AuditResult(
        kind="mechanism",
        method=name,
        claimed=claimed,
        proven=proven,
        lower_bound=event_bound(event, projection[0][half:], projection[1][half:], DELTA, failure),
        confidence=confidence,
        canary="a vote that nobody else casts",
        statistic="projection on the learned change",
        runs=runs,
        seconds=time.perf_counter() - began,
        assumptions=(*ASSUMPTIONS, "One cohort draw; every run is a call of the real sum and its noise."),
    )


def _neighbours(bench: Bench, canary: Canary) -> Neighbours:
    clip = bench.state.clip
    return Neighbours(bench, *canary.make(bench, clip if math.isfinite(clip) else 1.0))


def audit_canary(bench: Bench, canary: Canary, runs: int, failure: float, looped: bool) -> Finding:
    """The bound from one pair of neighbours: statistic and threshold from the first half, counts from the second."""
    neighbours = _neighbours(bench, canary)
    absent = releases(neighbours, False, runs, canary.name, looped)
    present = releases(neighbours, True, runs, canary.name, looped)
    half = runs // 2
    learned = present[:half].mean(0) - absent[:half].mean(0)
    change = coupled_difference(neighbours)
    zero, one = (statistics(states, change, learned, bench) for states in (absent, present))
    tried = {name: choose_event(zero[name][:half], one[name][:half], DELTA, failure) for name in zero}
    chosen = max(tried, key=lambda name: tried[name][1])
    bound = event_bound(tried[chosen][0], zero[chosen][half:], one[chosen][half:], DELTA, failure)
    return Finding(bound, canary.name, chosen, runs, looped)


def statistics(states: Tensor, difference: Tensor, learned: Tensor, bench: Bench) -> dict[str, Floats]:
    """Statistics ``(runs,)`` of released states ``(runs, width)``; a value that is not finite counts as huge."""
    width = bench.state.shared.numel()
    safe = torch.nan_to_num(states, nan=1e12, posinf=1e12, neginf=-1e12)
    moved = safe[:, :width]
    found = {
        "projection on the change": safe @ torch.nan_to_num(difference),
        "projection on the learned change": safe @ torch.nan_to_num(learned),
        "energy": moved.square().sum(1, dtype=torch.float64),
        "support": (moved != 0).sum(1),
    }
    if safe.shape[1] % width:
        found["next clip"] = safe[:, -1]
    return {name: values.double().numpy() for name, values in found.items()}
