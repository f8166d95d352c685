"""Measure what a run gives away: how far one client moves a release, the noise itself, and lower bounds on ε.

Example: every audit that takes a minute, of a packaged recipe::

    from fedflat.audit import audit_run

    for result in audit_run("quick-start"):
        print(result.kind, result.lower_bound, result.proven, result.violations)

``audit_run`` audits a recipe or a run. ``audit_worlds`` runs a recipe's own model, data shapes and back ends with and
without a hostile client. ``audit_noise`` compares the noise of real rounds with the plan. ``audit_method`` runs one
round through the real server path many times and bounds ε from below.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.assembly.tasks import refuse_other_tasks
from fedflat.audit.bounds import AuditResult, not_run
from fedflat.audit.mechanism import RUNS, audit_method
from fedflat.audit.movements import audit_worlds
from fedflat.audit.noise import audit_noise
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core import durable, insist, one_of, wrong

__all__ = ["AuditResult", "audit_method", "audit_noise", "audit_run", "audit_worlds", "write_audit"]

KINDS = ("quick", "worlds", "noise", "mechanism", "all")
AUDITED = {"clip", "trust", "protocol", "published", "secure_rng"}
"""What of a recipe's ``privacy`` the mechanism's audit keeps."""


def audit_run(
    recipe: Recipe | Mapping[str, Any] | str | Path, *, kind: str = "quick", runs: int = RUNS,
    model: nn.Module | None = None, clients: Sequence[Any] | None = None, test: Any = None,
    folder: Path | None = None,
) -> list[AuditResult]:  # fmt: skip
    """Audit a recipe (a Recipe, a dict, a packaged name, a path, a run folder).

    kind: ``quick`` (worlds for about 40 s, noise and mechanism), ``worlds`` (pairs of worlds on every back end, on all
    data), ``noise`` (the noise of real rounds, measured against the plan),
    ``mechanism`` (its method, one round, the fixed configuration), ``all``. runs: of the mechanism audit. model,
    clients, test: as for ``fedflat.run``.
    folder: of the run whose recipe it is (a path of a run says so itself).
    Raises InputError for an unknown kind, or one that needs a model or data that were given in Python and are not now.
    """
    one_of("--kind", kind, KINDS)
    parsed = Recipe.of(recipe)
    refuse_other_tasks("audit", parsed)
    folder = Path(recipe) if isinstance(recipe, (str, Path)) and Path(recipe).is_dir() and clients is None else folder
    privacy = parsed.privacy.model_dump(mode="json", include=AUDITED)
    sections = {"privacy": privacy, "server": parsed.server.model_dump(mode="json")}
    inputs: dict[str, Any] = {"model": model, "clients": clients, "test": test}
    method = parsed.algorithm
    audits: dict[str, Callable[[], AuditResult]] = {
        "worlds": lambda: audit_worlds(parsed, thorough=kind != "quick", **inputs),
        "noise": lambda: audit_noise(parsed, **inputs),
        "mechanism": lambda: audit_method(method.name, options=method.options, sections=sections, runs=runs),
    }
    asked = (parsed.model.name, model), (parsed.data.dataset, clients)
    if folder is not None and any(name == GIVEN and value is None for name, value in asked):
        given = f"{folder}, a run whose model or data were given in Python and are not in its folder"
        missing = wrong("audit", given, "fedflat.audit.audit_run(folder, model=…, clients=…) in Python")
        insist(kind in ("quick", "mechanism"), missing)
        audits |= {"worlds": lambda: not_run("worlds", method.name, str(missing))}
        del audits["noise"]
    return [audit() for name, audit in audits.items() if kind in (name, "quick", "all")]


def write_audit(folder: Path, results: Sequence[AuditResult]) -> Path:
    """Write ``audit.json`` in a run folder, {"audits": […]} with the newest of each kind and method; return it."""
    path = folder / "audit.json"
    text = json.dumps({"audits": [result.as_dict() for result in results]}, indent=2, ensure_ascii=False)
    durable.replace(path, text + "\n", mode=0o644)
    return path
