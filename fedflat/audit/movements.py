"""Audit a recipe in pairs of worlds: how far one client's data moves its release, and whether noise is shared.

Noise of a run is read off it: the released mean with noise, less the one without, through ``simulation.run``.
"""

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedflat.assembly.inputs import data_of, module_of
from fedflat.assembly.plans import plan_of
from fedflat.audit import worlds as room
from fedflat.audit.bounds import AuditResult, Floats, assumptions, not_run
from fedflat.audit.noise import cosine
from fedflat.audit.worlds import SLACK, Case, Engine, Maker, Movement, Scenario, Worlds, recorded_run, world_recipe
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import layout_of

SECONDS = 40.0
"""Of a quick audit, about; what it leaves out is counted and said."""
FEW = 4
"""Cases of back ends that start processes for each world."""
ASSUMPTIONS = assumptions("worlds", clients=room.CLIENTS, steps=room.STEPS, batch=room.BATCH)


def engines_for(recipe: Recipe, *, thorough: bool) -> tuple[Engine, ...]:
    """Return the back ends to try, the fast ones first; those that do not apply to a model are refused when they are
    tried.
    """
    bf16 = recipe.engine.precision == "bf16"
    names = ["sequential", "vectorized", *(["vectorized-fp32"] if bf16 or thorough else []), "lowrank"]
    engines = [Engine(name) for name in names]
    if thorough:
        engines.append(Engine("vectorized", {"block": 2}))
    if torch.cuda.is_available():
        engines += [Engine(name, {"device": "cuda"}) for name in ("sequential", "vectorized", "lowrank")]
    engines.append(Engine("workers", {"processes": 1}, most=FEW if thorough else 1))
    if thorough and importlib.util.find_spec("ray") is not None:
        engines.append(Engine("ray", {"processes": 1}, most=FEW))
    return tuple(engines)


def audit_worlds(
    recipe: Recipe, *, thorough: bool = False, model: nn.Module | None = None, clients: Sequence[Any] | None = None,
    test: Any = None,
) -> AuditResult:  # fmt: skip
    """Compare pairs of worlds of a recipe on every back end that applies; more than C, and rounding, is a violation.

    thorough: every back end and all data, however long it takes; otherwise about ``SECONDS``. model, clients, test: as
    for ``fedflat.run``.
    """
    began, method = time.perf_counter(), algorithm_of(recipe)
    if not method.private or recipe.privacy.protocol == "published":
        subject = f"{method.name}, which is not private" if not method.private else "a published protocol"
        return not_run("worlds", method.name, f"{subject}: no bound is claimed that a message keeps.")
    data = data_of(recipe, clients, test)
    module, _, _ = module_of(recipe, model, data)
    stage = Scenario(recipe, module, data)
    movements, left = measured(stage, engines_for(recipe, thorough=thorough), None if thorough else SECONDS)
    shared = shared_noise(stage) if method.kind == "update" else ()
    plan = plan_of(recipe, method, data.clients, layout_of(module, method.head).dimension)
    proven = plan.epsilon(plan.rounds)
    worst = max((m for m in movements if not m.refused), key=lambda m: m.value, default=None)
    if worst is None:
        return not_run("worlds", method.name, movements[0].stopped)
    return AuditResult(
        "worlds", method.name, claimed=proven, proven=proven, canary=worst.case,
        statistic=f"movement of the release over C, {worst.engine}", runs=sum(not m.stopped for m in movements),
        seconds=time.perf_counter() - began, violations=faults(movements, shared),
        details=_details(movements, worst, left), assumptions=ASSUMPTIONS,
    )  # fmt: skip


def measured(stage: Scenario, engines: Sequence[Engine], seconds: float | None = None) -> tuple[list[Movement], int]:
    """Return the movements of a stage case by case, and how many were left out for want of time."""
    worlds, began, movements, left = Worlds(stage), time.perf_counter(), list[Movement](), 0
    refused: set[tuple[str, str]] = set()
    # Back ends that start processes for each world come last, with few cases.
    slow = [(case, engine) for engine in engines if engine.most for case in stage.cases[: engine.most]]
    for case, engine in [*((case, e) for case in stage.cases for e in engines if not e.most), *slow]:
        key = (engine.name, str(engine.settings))
        if key in refused:
            continue
        if seconds is not None and movements and time.perf_counter() - began > seconds:
            left += 1
            continue
        movements.append(worlds.movement(engine, case))
        if movements[-1].refused or movements[-1].neither:
            refused.add(key)
    return movements, left


def faults(movements: Sequence[Movement], shared: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a sentence for every pair of worlds further apart than C allows, the worst first, and for shared noise."""
    over = sorted((m for m in movements if m.over), key=lambda m: -m.value)
    sentences = [
        f"{m.engine}, {m.case}: {'neither world' if m.neither else 'only one of both worlds'} ends ({m.stopped})"
        if m.stopped
        else f"{m.engine}, {m.case}: the release moves by {m.value:.4g}·C, more than {1 + SLACK:g}·C"
        for m in over
    ]
    return (*sentences, *(f"two runs that differ in {name} share their noise" for name in shared))


def _details(movements: Sequence[Movement], worst: Movement, left: int) -> dict[str, Any]:
    table: dict[str, dict[str, float]] = {}
    for m in movements:
        if not m.refused:
            row = table.setdefault(m.case, {})
            row[m.engine] = max(row.get(m.engine, 0.0), m.value)
    return {
        "movement": worst.value, "limit": 1 + SLACK, "back_end": worst.engine, "data": worst.case,
        "weights_floor": worst.floor, "table": table, "refused": {m.engine: m.stopped for m in movements if m.refused},
        "left_out": left,
    }  # fmt: skip


ALIKE = 0.99
"""Cosine from which two noises are one; independent ones of a few entries stay below it."""
OTHER = ("local.lr=0.0123", "privacy.clip=0.0321", "server.lr=0.5", "seed=987654")
"""What the second run has otherwise."""


def shared_noise(stage: Scenario) -> tuple[str, ...]:
    """Return the settings in which a second run may differ from the first and still has its noise.

    Raises InputError where the recipe cannot run, RunError where it stops.
    """

    def noise(*changes: str, data: str = "ordinary") -> Floats:
        return _mean(stage, changes, data, True) - _mean(stage, changes, data, False)

    first = noise()
    if cosine(first, noise()) < ALIKE:
        return ("nothing at all (the same run twice has other noise)",)
    # Votes have no server rate.
    changes = [text for text in OTHER if stage.method.kind != "votes" or not text.startswith("server.lr")]
    noises = {text.partition("=")[0]: noise(text) for text in changes} | {"data": noise(data="duplicated")}
    return tuple(name for name, other in noises.items() if cosine(first, other) >= ALIKE)


def _mean(stage: Scenario, changes: tuple[str, ...], kind: str, noise: bool) -> Floats:
    case, everybody = Case(kind, noise=noise), Maker(stage.template).everybody(kind, room.CLIENTS)
    recipe = Recipe.of(world_recipe(stage.recipe, room.CLIENTS, Engine("sequential"), 1, case), changes)
    mean = recorded_run(recipe, stage.module, stage, algorithm=stage.algorithm, data=everybody).mean
    return np.zeros(1) if mean is None else mean.double().numpy()
