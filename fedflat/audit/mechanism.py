"""Audit one round at σ = 3 through the real server path."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.algorithms import ALGORITHMS
from fedflat.audit import bench as room
from fedflat.audit.bench import CLIENTS, CLIP, DELTA, ENTRIES, SIGMA, TENSORS, Bench, Neighbours
from fedflat.audit.bounds import AuditResult, choose_event, event_bound
from fedflat.audit.canaries import Canary, canaries_for, contract_violations
from fedflat.core.checks import in_range, one_of, whole
from fedflat.privacy.plan import Plan

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
LEARNED = "projection on the learned change"
ALONE = "Every run is a call of the real path of its own."
TOGETHER = "Runs are copies side by side in one call of the real path; single calls agree, exactly and in law."


@dataclass(frozen=True)
class Finding:
    """The bound that one canary gave, with the statistic that gave it. way: how the runs were made, in a sentence."""

    bound: float
    canary: str
    statistic: str
    runs: int
    way: str


def audit_method(
    name: str, *, options: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None,
    runs: int = RUNS, confidence: float = CONFIDENCE,
) -> AuditResult:  # fmt: skip
    """Return the lower bound on ε of one round of a method, beside the claimed and the proven ε.

    name: of ``ALGORITHMS`` (or path.py:function). options: its keys. sections: recipe sections ``privacy`` and
    ``server`` to audit with (a clip of another kind, an optimiser). runs: per world and canary.
    Raises InputError for an unknown name, fewer than 200 runs, a confidence outside (0.5, 1).
    """
    if ":" not in name:
        one_of("audit", name, ALGORITHMS)
    whole("runs", runs, 200)
    in_range("confidence", confidence, 0.5, 1, open_low=True, open_high=True)
    began = time.perf_counter()
    bench = room.bench_of(name, options, sections)
    plan, votes = bench.parts.plan, bench.parts.algorithm.kind == "votes"
    best = audit_votes(bench, runs, confidence) if votes else audit_bench(bench, runs, confidence)
    claimed, proven = epsilons(plan)
    exact = plan.private and claimed == proven and not votes
    return AuditResult(
        kind="mechanism", method=name, claimed=claimed, proven=proven, lower_bound=best.bound, confidence=confidence,
        canary=best.canary, statistic=best.statistic, runs=best.runs, seconds=time.perf_counter() - began,
        assumptions=(*ASSUMPTIONS, best.way),
        violations=contract_violations(bench, name, options, sections) if exact else (),
    )  # fmt: skip


def epsilons(plan: Plan) -> tuple[float, float]:
    """(claimed, proven) ε of one round in which the client takes part; they differ for published procedures only."""
    proven, claimed = plan.epsilon(1), plan.account.claimed(plan, 1)
    if math.isinf(proven) and (seen := plan.account.unsampled(plan, 1)) is not None:
        # Amplification by sampling says nothing at q = 1; this account needs none.
        proven = seen.epsilon
    return proven if claimed is None else claimed, proven


def audit_all(names: Iterable[str] | None = None, *, runs: int = RUNS) -> list[AuditResult]:
    """Return the mechanism audit of every named method (default: all), ``AT_ONCE`` at a time, in the order of the
    names.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda n: audit_method(n, runs=runs), list(names or ALGORITHMS)))


def audit_bench(bench: Bench, runs: int, confidence: float, canaries: Iterable[Canary] | None = None) -> Finding:
    """Return the best bound over canaries; the failure probability 1 − confidence is split evenly over them."""
    pairs = {c.name: c.neighbours(bench) for c in (canaries_for(bench) if canaries is None else canaries)}
    failure, (first, *_) = (1 - confidence) / len(pairs), pairs.values()
    looped = any(room.must_loop(pair, law=pair is first) for pair in pairs.values())
    if looped and room.on_a_grid(first.world(True, room.run_key(0, "grid", 0))):
        pairs = dict(islice(pairs.items(), GRID_CANARIES))
    count = min(runs, LOOPED_RUNS) if looped else runs
    findings = [audit_canary(name, pair, count, failure, looped) for name, pair in pairs.items()]
    return max(findings, key=lambda finding: finding.bound)


def audit_votes(bench: Bench, runs: int, confidence: float) -> Finding:
    """Return the bound of one cohort draw of noisy votes; what the server makes of them is post-processing.

    The canary votes for what nobody else votes for; world 0 lacks its votes.
    """
    runs = min(runs, VOTE_RUNS)
    zero, one = (room.vote_releases(bench, present, runs) for present in (False, True))
    change = one[: runs // 2].mean(0) - zero[: runs // 2].mean(0)
    statistic, bound = _bounded({LEARNED: zero @ change}, {LEARNED: one @ change}, 1 - confidence)
    way = "One cohort draw; every run is a call of the real sum and its noise."
    return Finding(bound, "a vote that nobody else casts", statistic, runs, way)


def audit_canary(name: str, neighbours: Neighbours, runs: int, failure: float, looped: bool) -> Finding:
    """Return the bound from one pair of neighbours."""
    absent, present = (room.releases(neighbours, world, runs, name, looped) for world in (False, True))
    learned = present[: runs // 2].mean(0) - absent[: runs // 2].mean(0)
    change = room.coupled_difference(neighbours)
    zero, one = (statistics(states, change, learned, neighbours.bench) for states in (absent, present))
    statistic, bound = _bounded(zero, one, failure)
    return Finding(bound, name, statistic, runs, ALONE if looped else TOGETHER)


def _bounded(absent: Mapping[str, Floats], present: Mapping[str, Floats], failure: float) -> tuple[str, float]:
    """Return the statistic that tells the first halves of the runs apart best, and what the second halves show."""
    # Counts on the runs that chose the statistic would give too high a bound.
    half = len(next(iter(absent.values()))) // 2
    tried = {name: choose_event(absent[name][:half], present[name][:half], DELTA, failure) for name in absent}
    chosen = max(tried, key=lambda name: tried[name][1])
    return chosen, event_bound(tried[chosen][0], absent[chosen][half:], present[chosen][half:], DELTA, failure)


def statistics(states: Tensor, difference: Tensor, learned: Tensor, bench: Bench) -> dict[str, Floats]:
    """Return the statistics ``(runs,)`` of released states ``(runs, width)``; a value that is not finite counts as
    huge.
    """
    width = bench.state.shared.numel()
    safe = torch.nan_to_num(states, nan=1e12, posinf=1e12, neginf=-1e12)
    moved = safe[:, :width]
    found = {
        "projection on the change": safe @ torch.nan_to_num(difference),
        LEARNED: safe @ torch.nan_to_num(learned),
        "energy": moved.square().sum(1, dtype=torch.float64),
        "support": (moved != 0).sum(1),
    }
    if safe.shape[1] % width:
        found["next clip"] = safe[:, -1]
    return {name: values.double().numpy() for name, values in found.items()}
