"""The worlds audit of a recipe: how far one client's data moves its release, on every back end that applies."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat.assembly.inputs import data_of, module_of
from fedflat.assembly.jobs import prepare
from fedflat.assembly.plans import algorithm_of, plan_of
from fedflat.audit.planted import PLANTED
from fedflat.audit.result import AuditResult
from fedflat.audit.shared_noise import shared_noise
from fedflat.audit.worlds import BATCH, CLIENTS, SLACK, STEPS, Engine, Movement, Scenario, Worlds
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, one_of
from fedflat.core.params import layout_of
from fedflat.core.rng import noise_key, seeded_torch
from fedflat.core.types import Algorithm
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.engine.train import Job
from fedflat.records import checkpoint
from fedflat.records.folder import OPENING
from fedflat.records.opening import Opening

SECONDS = 40.0
"""Of a quick audit, about; what it leaves out is counted and said."""
FEW = 4
"""Cases of back ends that start processes for each world."""
ASSUMPTIONS = (
    f"{CLIENTS} clients of at most a few made-up examples, all in the cohort, one round: the recipe's own model, "
    "method, clip, trust, server and data shapes. It moves by C at most, or accounting is about another mechanism.",
    f"Changed: no noise (or the same, σ = 1), Poisson cohorts of everybody, at most {STEPS} local steps and batches of "
    f"{BATCH} (1 and 64 in some cases), no epochs, budget, simulated cohort or held-back examples; public examples are "
    "test data, never clients'; in some cases the last layer starts at zero, or the round is the second.",
    "It shows that a bound is broken; that no data tried here breaks it is no proof.",
)

STARTED = "Of a recipe with start: the rounds after round 0, whose own movement is that of algorithm: class-statistics."


def engines_for(recipe: Recipe, *, thorough: bool) -> tuple[Engine, ...]:
    """Back ends to try, the fast ones first; those that do not apply to a model are refused when they are tried."""
    bf16 = recipe.engine.precision == "bf16"
    names = ["sequential", "vectorized", *(["vectorized-fp32"] if bf16 or thorough else []), "lowrank"]
    found = [Engine(name) for name in names]
    if thorough:
        found.append(Engine("vectorized", {"block": 2}))
    if torch.cuda.is_available():
        found += [Engine(name, {"device": "cuda"}) for name in ("sequential", "vectorized", "lowrank", "graphs")]
    found.append(Engine("workers", {"processes": 1}, most=FEW if thorough else 1))
    if thorough and importlib.util.find_spec("ray") is not None:
        found.append(Engine("ray", {"processes": 1}, most=FEW))
    return tuple(found)


def audit_worlds(
    recipe: Recipe,
    *,
    thorough: bool = False,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    folder: Path | None = None,
) -> AuditResult:
    """Pairs of worlds of a recipe on every back end that applies; over C by more than rounding is a violation.

    thorough: every back end and all data, however long it takes; otherwise about ``SECONDS``. model, clients, test: as
    for ``fedflat.run``. folder: of the run that is audited; its own data are not in it.
    """
    began, method = time.perf_counter(), algorithm_of(recipe)
    if not method.private or recipe.privacy.protocol == "published":
        what = f"{method.name}, which is not private" if not method.private else "a published protocol"
        return _nothing(recipe, method, f"{what}: no bound is claimed that a message keeps.")
    asked = (recipe.model.name, model), (recipe.data.dataset, clients)
    if folder is not None and any(name == GIVEN and value is None for name, value in asked):
        if thorough:
            raise InputError(_given(folder))
        return _nothing(recipe, method, _given(folder))
    data = data_of(recipe, clients, test)
    module, _ = module_of(recipe, model, data)
    note = "" if folder is None else _of_a_run(folder, recipe, method, module, data)
    if note.startswith("audit:"):
        return _nothing(recipe, method, note)
    stage = Scenario(recipe, module, data)
    found, left = measured(stage, engines_for(recipe, thorough=thorough), None if thorough else SECONDS)
    shared = shared_noise(stage) if method.kind == "update" else ()
    claimed, proven = _epsilons(recipe, method, data, module)
    worst = max((m for m in found if not m.refused), key=lambda m: m.value)
    return AuditResult(
        kind="worlds",
        method=method.name,
        claimed=claimed,
        proven=proven,
        lower_bound=None,
        confidence=None,
        canary=worst.case,
        statistic=f"movement of the release over C, {worst.engine}",
        runs=sum(not m.stopped for m in found),
        seconds=time.perf_counter() - began,
        assumptions=(*ASSUMPTIONS, *([STARTED] if recipe.start is not None else []), *([note] if note else [])),
        violations=faults(found, shared),
        details=_details(found, worst, left),
    )


def measured(stage: Scenario, engines: Sequence[Engine], seconds: float | None = None) -> tuple[list[Movement], int]:
    """Movements of a stage case by case, and how many were left out for want of time."""
    worlds, began, found, left = Worlds(stage), time.perf_counter(), list[Movement](), 0
    refused: set[tuple[str, str]] = set()
    slow = [(case, engine) for engine in engines if engine.most for case in stage.cases[: engine.most]]
    for case, engine in [*((case, e) for case in stage.cases for e in engines if not e.most), *slow]:
        known = (engine.name, str(engine.settings))
        if known in refused:
            continue
        if seconds is not None and found and time.perf_counter() - began > seconds:
            left += 1
            continue
        found.append(worlds.movement(engine, case))
        if found[-1].refused:
            refused.add(known)
    return found, left


def faults(found: Sequence[Movement], shared: Sequence[str] = ()) -> tuple[str, ...]:
    """A sentence for every pair of worlds further apart than C allows, the worst first, and for shared noise."""
    over = sorted((m for m in found if m.over), key=lambda m: -m.value)
    said = [
        f"{m.engine}, {m.case}: only one of both worlds ends ({m.stopped})"
        if m.stopped
        else f"{m.engine}, {m.case}: the release moves by {m.value:.4g}·C, more than {1 + SLACK:g}·C"
        for m in over
    ]
    return (*said, *(f"two runs that differ in {name} share their noise" for name in shared))


def _details(found: Sequence[Movement], worst: Movement, left: int) -> dict[str, Any]:
    table: dict[str, dict[str, float]] = {}
    for m in found:
        if not m.refused:
            row = table.setdefault(m.case, {})
            row[m.engine] = max(row.get(m.engine, 0.0), m.value)
    return {
        "movement": worst.value,
        "limit": 1 + SLACK,
        "back_end": worst.engine,
        "data": worst.case,
        "weights_floor": worst.floor,
        "table": table,
        "refused": {m.engine: m.stopped for m in found if m.refused},
        "left_out": left,
    }


def _epsilons(recipe: Recipe, method: Algorithm, data: FederatedData, module: nn.Module) -> tuple[float, float]:
    """(claimed, proven) ε of the whole run."""
    plan = plan_of(recipe, method, data.clients, layout_of(module, method.head).dimension)
    proven = plan.epsilon(plan.rounds)
    return proven, proven


def _nothing(recipe: Recipe, method: Algorithm, reason: str) -> AuditResult:
    return AuditResult(
        kind="worlds",
        method=method.name,
        claimed=math.inf,
        proven=math.inf,
        lower_bound=None,
        confidence=None,
        canary="none",
        statistic="not run",
        runs=0,
        seconds=0.0,
        assumptions=(reason,),
        details={"movement": None, "reason": reason},
    )


def _given(folder: Path) -> str:
    return (
        f"audit: found {folder}, a run whose model or data were given in Python and are not in its folder; allowed: "
        "fedflat.audit.audit_run(folder, model=…, clients=…) in Python."
    )


def _of_a_run(folder: Path, recipe: Recipe, method: Algorithm, module: nn.Module, data: FederatedData) -> str:
    """What must be said where the data at hand, or the model, are not those that the run in ``folder`` had."""
    kept = checkpoint.newest(folder / "checkpoints")
    if kept is None:
        return ""
    if kept[0].shared.numel() != layout_of(module, method.head).dimension:
        return _given(folder)
    if not (folder / OPENING).is_file():
        return "Nothing in the folder tells which data the run had: it is exported, or of fedflat 0.1."
    plain = recipe.model_copy(update={"engine": type(recipe.engine)(backend="sequential", device="cpu")})
    here = prepare(plain, module, data=data).identity
    return CHANGED if "data" in Opening.read(folder).differing(here) else ""


CHANGED = "The data at hand are not those that the run had: their shapes were used."


def audit_planted(names: Sequence[str] | None = None) -> list[AuditResult]:
    """One result per planted defect (default: all): each pair of worlds should be further apart than C."""
    chosen = list(names or [*PLANTED, SEED_ONLY])
    for name in chosen:
        one_of("audit defect", name, [*PLANTED, SEED_ONLY])
    return [_audit_planted(name) for name in chosen]


SEED_ONLY = "a noise key from the seed only"


def planted_scenario(name: str) -> Scenario:
    """The small federation that a planted defect is put into: 12 inputs, 2 classes, dp-fedavg at C = 0.05."""
    with seeded_torch(0, "audit: planted"):
        dropped = name in PLANTED and PLANTED[name].model == "dropout"
        body = [nn.Linear(INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, 2)] if dropped else [nn.Linear(INPUTS, 2)]
        module = nn.Sequential(nn.Flatten(), *body)
        pair = torch.randn(30, INPUTS), torch.arange(30) % 2
    recipe = Recipe.of(
        {
            "name": "planted",
            "rounds": 1,
            "algorithm": {"name": "dp-fedavg"},
            "cohort": {"size": CLIENTS},
            "local": {"steps": 2, "batch_size": 100, "lr": 0.3},
            "privacy": {"clip": 0.05, "noise_multiplier": 1.0, "delta": 1e-5},
        }
    )
    change = PLANTED[name].change if name in PLANTED else _seed_only if name == SEED_ONLY else None
    return Scenario(recipe, module, from_pairs([pair]), change=change)


INPUTS = 12


def _seed_only(job: Job) -> None:
    job.key = noise_key(job.seed)


def _audit_planted(name: str) -> AuditResult:
    began, stage = time.perf_counter(), planted_scenario(name)
    if name == SEED_ONLY:
        violations = faults((), shared_noise(stage))
        movement, data = math.inf if violations else 0.0, "two runs"
    else:
        worlds = Worlds(stage)
        found = [worlds.movement(Engine("sequential"), case) for case in PLANTED[name].cases]
        worst = max(found, key=lambda m: m.value)
        violations, movement, data = faults(found), worst.value, worst.case
    return AuditResult(
        kind="defect",
        method=name,
        claimed=math.inf,
        proven=math.inf,
        lower_bound=None,
        confidence=None,
        canary=data,
        statistic="movement of the release over C",
        runs=1,
        seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS,
        violations=violations,
        details={"movement": movement, "limit": 1 + SLACK},
    )
