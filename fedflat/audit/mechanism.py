"""Audit one round at σ = 3 through the real server path, and run every kind of audit of a recipe."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.assembly.tasks import refuse_other_tasks
from fedflat.audit.bench import (
    CLIENTS,
    CLIP,
    DELTA,
    ENTRIES,
    SIGMA,
    TENSORS,
    Bench,
    Neighbours,
    bench_of,
    coupled_difference,
    must_loop,
    on_a_grid,
    releases,
    run_key,
    vote_releases,
)
from fedflat.audit.bounds import AuditResult, choose_event, event_bound
from fedflat.audit.canaries import Canary, canaries_for, contract_violations
from fedflat.audit.injection import one_run, one_shot
from fedflat.audit.movements import audit_worlds, given
from fedflat.audit.noise import audit_noise
from fedflat.config.recipe import Recipe
from fedflat.core import durable
from fedflat.core.checks import in_range, one_of, whole, wrong
from fedflat.engine.job import Job
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


@dataclass(frozen=True)
class Finding:
    """The bound that one canary gave, with the statistic that gave it."""

    bound: float
    canary: str
    statistic: str
    runs: int
    looped: bool = False


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
    bench = bench_of(name, options, sections)
    if bench.parts.algorithm.kind == "votes":
        return audit_votes(bench, name, runs, confidence, began)
    best = audit_bench(bench, runs, confidence)
    plan = bench.parts.plan
    claimed, proven = epsilons(plan)
    return AuditResult(
        kind="mechanism", method=name, claimed=claimed, proven=proven, lower_bound=best.bound, confidence=confidence,
        canary=best.canary, statistic=best.statistic, runs=best.runs, seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS + _way(best),
        violations=contract_violations(bench, name, options, sections) if plan.private and claimed == proven else (),
    )  # fmt: skip


def epsilons(plan: Plan) -> tuple[float, float]:
    """(claimed, proven) ε of one round in which the client takes part; they differ for published procedures only."""
    proven, claimed = plan.epsilon(1), plan.account.claimed(plan, 1)
    if math.isinf(proven) and (seen := plan.account.unsampled(plan, 1)) is not None:
        # Amplification by sampling says nothing at q = 1; this account needs none.
        proven = seen.epsilon
    return proven if claimed is None else claimed, proven


def _way(best: Finding) -> tuple[str, ...]:
    alone = "Every run is a call of the real path of its own."
    together = "Runs are copies side by side in one call of the real path; single calls agree, exactly and in law."
    return (alone if best.looped else together,)


def audit_all(names: Iterable[str] | None = None, *, runs: int = RUNS) -> list[AuditResult]:
    """Return the mechanism audit of every named method (default: all), ``AT_ONCE`` at a time, in the order of the
    names.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda n: audit_method(n, runs=runs), list(names or ALGORITHMS)))


def audit_recipe(recipe: Recipe, *, runs: int = RUNS) -> AuditResult:
    """Return the mechanism audit of a recipe's method, with its options, clip kind and server optimiser."""
    privacy = recipe.privacy.model_dump(mode="json")
    kept = {name: privacy[name] for name in ("clip", "trust", "protocol", "published", "secure_rng")}
    sections = {"privacy": kept, "server": recipe.server.model_dump(mode="json")}
    return audit_method(recipe.algorithm.name, options=recipe.algorithm.options, sections=sections, runs=runs)


def audit_bench(bench: Bench, runs: int, confidence: float, canaries: Iterable[Canary] | None = None) -> Finding:
    """Return the best bound over canaries; the failure probability 1 − confidence is split evenly over them."""
    chosen = tuple(canaries_for(bench) if canaries is None else canaries)
    failure = (1 - confidence) / len(chosen)
    looped = any(must_loop(_neighbours(bench, canary), law=canary is chosen[0]) for canary in chosen)
    count = min(runs, LOOPED_RUNS) if looped else runs
    if looped and on_a_grid(_neighbours(bench, chosen[0]).world(True, run_key(0, "grid", 0))):
        chosen = chosen[:GRID_CANARIES]
    findings = [audit_canary(bench, canary, count, failure, looped) for canary in chosen]
    return max(findings, key=lambda finding: finding.bound)


def audit_votes(bench: Bench, name: str, runs: int, confidence: float, began: float) -> AuditResult:
    """Return one cohort draw of noisy votes; what the server makes of them is post-processing.

    The canary votes for what nobody else votes for; world 0 lacks its votes.
    """
    runs = min(runs, VOTE_RUNS)
    zero, one = (vote_releases(bench, present, runs) for present in (False, True))
    failure, half = 1 - confidence, runs // 2
    projection = [x @ (one[:half].mean(0) - zero[:half].mean(0)) for x in (zero, one)]
    event, _ = choose_event(projection[0][:half], projection[1][:half], DELTA, failure)
    claimed, proven = epsilons(bench.parts.plan)
    return AuditResult(
        kind="mechanism", method=name, claimed=claimed, proven=proven,
        lower_bound=event_bound(event, projection[0][half:], projection[1][half:], DELTA, failure),
        confidence=confidence, canary="a vote that nobody else casts", statistic="projection on the learned change",
        runs=runs, seconds=time.perf_counter() - began,
        assumptions=(*ASSUMPTIONS, "One cohort draw; every run is a call of the real sum and its noise."),
    )  # fmt: skip


def _neighbours(bench: Bench, canary: Canary) -> Neighbours:
    clip = bench.state.clip
    return Neighbours(bench, *canary.make(bench, clip if math.isfinite(clip) else 1.0))


def audit_canary(bench: Bench, canary: Canary, runs: int, failure: float, looped: bool) -> Finding:
    """Return the bound from one pair of neighbours: statistic and threshold from the first half, counts from the
    second.
    """
    neighbours = _neighbours(bench, canary)
    absent = releases(neighbours, False, runs, canary.name, looped)
    present = releases(neighbours, True, runs, canary.name, looped)
    # Counts on the runs that chose the statistic would give too high a bound.
    half = runs // 2
    learned = present[:half].mean(0) - absent[:half].mean(0)
    change = coupled_difference(neighbours)
    zero, one = (statistics(states, change, learned, bench) for states in (absent, present))
    tried = {name: choose_event(zero[name][:half], one[name][:half], DELTA, failure) for name in zero}
    chosen = max(tried, key=lambda name: tried[name][1])
    bound = event_bound(tried[chosen][0], zero[chosen][half:], one[chosen][half:], DELTA, failure)
    return Finding(bound, canary.name, chosen, runs, looped)


def statistics(states: Tensor, difference: Tensor, learned: Tensor, bench: Bench) -> dict[str, Floats]:
    """Return the statistics ``(runs,)`` of released states ``(runs, width)``; a value that is not finite counts as
    huge.
    """
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


KINDS = ("quick", "worlds", "noise", "mechanism", "canaries", "one-run", "all")
CANARIES = 500
AUDIT = "audit.json"


def audit_run(
    recipe: Recipe | Mapping[str, Any] | str | Path, *, kind: str = "quick", canaries: int = CANARIES,
    runs: int = RUNS, model: nn.Module | None = None, clients: Sequence[Any] | None = None, test: Any = None,
    folder: Path | None = None,
) -> list[AuditResult]:  # fmt: skip
    """Audit a recipe (a Recipe, a dict, a packaged name, a path, a run folder).

    kind: ``quick`` (worlds for about 40 s, noise and mechanism), ``worlds`` (pairs of worlds on every back end, on all
    data), ``noise`` (the noise and the cohorts of real rounds, measured against the plan),
    ``mechanism`` (its method, one round, the fixed configuration), ``canaries`` (estimate for the whole run),
    ``one-run`` (lower bound for the whole run), ``all``. The two before train the recipe once each, with ``canaries``
    additional clients. runs: of the mechanism audit. model, clients, test: as for ``fedflat.run``.
    folder: of the run whose recipe it is (a path of a run says so itself).
    Raises InputError for an unknown kind, fewer than 20 canaries, or a method that is not private.
    """
    one_of("--kind", kind, KINDS)
    whole("--canaries", canaries, 20)
    parsed = Recipe.of(recipe)
    refuse_other_tasks("audit", parsed)
    folder = Path(recipe) if isinstance(recipe, (str, Path)) and Path(recipe).is_dir() and clients is None else folder
    found = []
    if kind in ("quick", "worlds", "all"):
        found.append(
            audit_worlds(parsed, thorough=kind != "quick", model=model, clients=clients, test=test, folder=folder)
        )
    if kind in ("quick", "noise", "all") and not (folder is not None and given(parsed, model, clients)):
        found.append(audit_noise(parsed, model=model, clients=clients, test=test))
    if kind in ("quick", "mechanism", "all"):
        found.append(audit_recipe(parsed, runs=runs))
    if kind in ("canaries", "all"):
        found.append(one_shot(_job(parsed, model, clients, test), canaries))
    if kind in ("one-run", "all"):
        found.append(one_run(_job(parsed, model, clients, test), canaries))
    return found


def _job(recipe: Recipe, model: nn.Module | None, clients: Sequence[Any] | None, test: Any) -> Job:
    job = prepare(recipe, model, clients, test)
    if not job.parts.plan.private:
        raise wrong("audit", f"{job.parts.algorithm.name}, which is not private", "a private method for canary audits")
    return job


def write_audit(folder: Path, results: Sequence[AuditResult]) -> Path:
    """Write ``audit.json`` in a run folder, {"audits": […]} with the newest of each kind and method; return it."""
    path = folder / AUDIT
    durable.replace(
        path,
        json.dumps({"audits": [result.as_dict() for result in results]}, indent=2, ensure_ascii=False) + "\n",
        mode=0o644,
    )
    return path
