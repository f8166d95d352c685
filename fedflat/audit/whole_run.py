"""``audit_run``: the audits of one recipe, by kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.assembly.jobs import prepare
from fedflat.assembly.tasks import refuse_other_tasks
from fedflat.audit.mechanism import RUNS, audit_recipe
from fedflat.audit.movements import audit_worlds
from fedflat.audit.one_run import one_run
from fedflat.audit.one_shot import one_shot
from fedflat.audit.result import AuditResult
from fedflat.config.recipe import Recipe
from fedflat.core import durable
from fedflat.core.checks import one_of, whole, wrong
from fedflat.engine.train import Job

KINDS = ("quick", "worlds", "mechanism", "canaries", "one-run", "all")
CANARIES = 500
AUDIT = "audit.json"


def audit_run(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    kind: str = "quick",
    canaries: int = CANARIES,
    runs: int = RUNS,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    test: Any = None,
    folder: Path | None = None,
) -> list[AuditResult]:
    """Audit a recipe (a Recipe, a dict, a packaged name, a path, a run folder).

    kind: ``quick`` (worlds for about 40 s, and mechanism), ``worlds`` (pairs of worlds on every back end, on all data),
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
    """``audit.json`` in a run folder: {"audits": […]}, one entry per kind and method, newest; returns the path."""
    path = folder / AUDIT
    durable.replace(
        path,
        json.dumps({"audits": [result.as_dict() for result in results]}, indent=2, ensure_ascii=False) + "\n",
        mode=0o644,
    )
    return path
