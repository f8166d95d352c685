"""From a table's cells to rows: planned only, or trained through the same experiment as ``fedflat compare``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fedflat.assembly.plans import algorithm_of, plan_of
from fedflat.config.recipe import Recipe, override
from fedflat.core.checks import InputError, RunError, wrong
from fedflat.core.cohorts import Poisson
from fedflat.core.papers import CITED
from fedflat.core.params import Layout, layout_of
from fedflat.methods.published.accounting import PAPERS, Published, formula, with_tensors
from fedflat.privacy.accounting.epsilon import default_delta
from fedflat.report import metrics
from fedflat.report.progress import RunEvent
from fedflat.reproduce.scales import SCALES, differences, scaled
from fedflat.reproduce.tables import Cell, Table
from fedflat.simulation.experiment import compare
from fedflat.simulation.experiment_settings import expand


@dataclass(frozen=True)
class Row:
    """One published number beside ours.

    ours: accuracy in percent for each seed. claimed: ε as the paper has it for its own setting. proven: ε of what runs
    here, inf where nothing finite is proven, None where nothing is known. missing: why there is no value of ours.
    """

    cell: Cell
    recipe: Recipe | None
    claimed: float | None
    proven: float | None
    ours: tuple[float, ...] = ()
    missing: str = ""

    @property
    def spread(self) -> tuple[float, float | None] | None:
        """Mean and standard deviation (n − 1; None for one seed) of ours, or None."""
        if not self.ours:
            return None
        return statistics.fmean(self.ours), statistics.stdev(self.ours) if len(self.ours) > 1 else None


@dataclass(frozen=True)
class Outcome:
    """The rows of a table, what each column changes against the paper's setting, and why data or runs are missing."""

    table: Table
    rows: tuple[Row, ...]
    scale: str
    protocol: str
    changed: dict[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether every cell whose setting is known has a value of ours."""
        return all(row.ours or row.recipe is None for row in self.rows)


def dry(table: Table, scale: str = "full", protocol: str = "sound", overrides: Sequence[str] = ()) -> Outcome:
    """The published values with claimed and proven ε; nothing is trained and no data is read.

    protocol: sound, or published for the procedure that the paper released. Raises InputError for a name or override
    that is wrong, and for a protocol that the paper does not have.
    """
    rows = [_planned(table, cell, scale, protocol, overrides) for cell in table.cells]
    changed: dict[str, list[str]] = {}
    for row in rows:
        if row.cell.recipe is not None and row.recipe is not None:
            known = changed.setdefault(row.cell.column, [])
            known += [text for text in differences(row.cell.recipe, row.recipe) if text not in known]
    return Outcome(table, tuple(rows), scale, protocol, {name: tuple(texts) for name, texts in changed.items()})


def _planned(table: Table, cell: Cell, scale: str, protocol: str, overrides: Sequence[str]) -> Row:
    if cell.recipe is None:
        return Row(cell, None, None, None, missing="the paper's setting is not known")
    recipe = _procedure(table, scaled(cell.recipe, scale), protocol)
    mapping = recipe.dump()
    for text in overrides:
        mapping = override(mapping, text)
    recipe = Recipe.of(mapping, where=recipe.name)
    return Row(cell, recipe, claimed_epsilon(table, cell), _proven(recipe, cell.input, cell.classes))


def _procedure(table: Table, recipe: Recipe, protocol: str) -> Recipe:
    """The recipe, or the paper's released procedure with its numbers; votes and ddgauss have only their own."""
    if protocol == "sound":
        return recipe
    if protocol != "published" or table.paper not in PAPERS:
        allowed = "sound, published" if table.paper in PAPERS else f"sound: {CITED[table.paper]} released no procedure"
        raise wrong("--protocol", protocol, allowed)
    if algorithm_of(recipe).kind != "update":
        return recipe
    sampling = "poisson" if table.paper == "004" else "fixed"
    size = recipe.cohort.size if sampling == "poisson" else round(recipe.cohort.size)
    found = recipe.dump()
    found["privacy"].update(protocol="published", published=table.paper)
    if table.paper == "002":
        found["privacy"]["clip"] = {"kind": "median"}
    found["cohort"].update(size=size, sampling=sampling)
    return Recipe.of({**found, "name": f"{recipe.name}_published"}, where=recipe.name)


def claimed_epsilon(table: Table, cell: Cell) -> float | None:
    """ε as the paper has it: the budget its table names, or its formula for its σ; inf without noise."""
    if cell.recipe is None:
        return None
    privacy, cohort = cell.recipe.privacy, cell.recipe.cohort
    if privacy.epsilon is not None:
        return privacy.epsilon
    clients = cell.recipe.data.clients or 1
    delta = privacy.delta or default_delta(clients)
    return formula(Poisson(clients, cohort.size), privacy.noise_multiplier or 0.0, delta, cell.recipe.rounds)


def _proven(recipe: Recipe, shape: tuple[int, ...], classes: int) -> float:
    """ε of the recipe's plan; the many cells that share a plan share its account."""
    blank = recipe.model_copy(update={"name": "", "seed": 0, "evaluation": Recipe.model_fields["evaluation"].default})
    method = algorithm_of(recipe)
    if method.kind == "update" and recipe.privacy.protocol == "sound":  # the account knows no method and no data
        plain = {"name": "dp-fedavg"} if method.private else {"name": "fedavg"}
        data = {"clients": recipe.data.clients}
        blank = Recipe.of({**blank.dump(), "algorithm": plain, "model": "mlp", "data": data, "local": {}})
    return _account(blank.model_dump_json(), shape, classes)


@lru_cache(maxsize=512)
def _account(text: str, shape: tuple[int, ...], classes: int) -> float:
    recipe = Recipe.model_validate_json(text)
    method, clients = algorithm_of(recipe), recipe.data.clients or 1
    layout = _layout(recipe, shape, classes) if _needs_model(recipe, method.kind) else None
    plan = plan_of(recipe, method, clients, None if layout is None else layout.dimension)
    if isinstance(plan.mechanism, Published) and layout is not None:
        plan = with_tensors(plan, layout.shared)
    return plan.epsilon() if plan.private else math.inf


def _needs_model(recipe: Recipe, kind: str) -> bool:
    return kind == "ddgauss" or recipe.privacy.protocol == "published"


def _layout(recipe: Recipe, shape: tuple[int, ...], classes: int) -> Layout:
    from fedflat.models import build

    module = build(recipe.model.name, shape, classes, 0, **recipe.model.options)
    return layout_of(module, algorithm_of(recipe).head)


def train(
    table: Table,
    folder: Path,
    scale: str = "small",
    protocol: str = "sound",
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    processes: int | None = None,
    update: Callable[[RunEvent], None] | None = None,
) -> Outcome:
    """Train every cell whose data can be had, as ``fedflat compare`` does (what is done in ``folder`` is kept).

    seeds: default the scale's, at full scale the paper's. Raises InputError as ``dry`` does, before any training.
    """
    plan = dry(table, scale, protocol, overrides)
    lacking = _lacking([row.recipe for row in plan.rows if row.recipe is not None])
    chosen = [row for row in plan.rows if row.recipe is not None and row.recipe.data.dataset not in lacking]
    count = seeds or SCALES[scale].seeds or table.seeds
    missing = list(lacking.values())
    values: dict[int, Row] = {}
    if chosen:
        recipes = [row.recipe for row in chosen if row.recipe is not None]
        found = compare(recipes, (), count, folder, processes, update)
        missing += [f"{name}: {why}" for name, why in found.failed.items()]
        for row, setting in zip(chosen, expand(recipes, (), count)):
            values[id(row)] = _measured(row, folder / setting.slug, setting.seeds, table.measure)
    rows = tuple(values.get(id(row)) or _not_run(row) for row in plan.rows)
    return replace(plan, rows=rows, missing=tuple(missing), folder=folder)


def _lacking(recipes: Sequence[Recipe]) -> dict[str, str]:
    """Data sets that cannot be had, each with the reader's one line."""
    from fedflat.data.locate import locate

    found: dict[str, str] = {}
    for name in dict.fromkeys(recipe.data.dataset for recipe in recipes):
        try:
            if name != "digits":  # bundled
                locate(name)
        except (InputError, RunError) as error:
            found[name] = str(error)
    return found


def _not_run(row: Row) -> Row:
    """Nothing ran, so nothing is proven of it."""
    return replace(row, proven=None, missing=row.missing or "the data set cannot be had")


def _measured(row: Row, folder: Path, seeds: Sequence[int], measure: str) -> Row:
    """The row with the accuracy and the proven ε of the runs that are there."""
    runs = [
        metrics.read_run(place)
        for place in (folder / f"seed-{seed}" for seed in seeds)
        if (place / "privacy.json").is_file()
    ]
    if not runs:
        return replace(row, proven=None, missing="no run ended")
    key = "personal_accuracy" if row.cell.personal else "test_accuracy"
    series = [metrics.column(run.private if row.cell.personal else run.metrics, key) for run in runs]
    points = [[value for _, value in one] for one in series if one]
    ours = tuple(100 * (max(one) if measure == "best" else one[-1]) for one in points)
    proven = [metrics.proven_epsilon(run) for run in runs]
    worst = max((math.inf if value is None else value for value in proven), default=row.proven)
    return replace(row, ours=ours, proven=worst, missing="" if ours else f"no {key} in the runs")
