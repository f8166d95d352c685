"""Turn a table's cells into rows: planned only, or trained through the same experiment as ``fedflat compare``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from pathlib import Path

from fedflat.assembly.inputs import lacking, layout_for
from fedflat.assembly.plans import plan_of
from fedflat.config.method import algorithm_of
from fedflat.config.reading import override
from fedflat.config.recipe import Recipe
from fedflat.core import Poisson, wrong
from fedflat.methods.published import CITED, PAPERS, formula, with_tensors
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.scales import SCALES, bare, differences, scaled
from fedflat.papers.tables import COUNTED, RELATIVE, Cell, Table, find
from fedflat.report import metrics
from fedflat.report.metrics import Run, fate
from fedflat.simulation.experiment import Update, compare
from fedflat.simulation.settings import expand


def dry(table: Table, scale: str = "full", protocol: str = "sound", overrides: Sequence[str] = ()) -> Outcome:
    """Return the published values with claimed and proven ε; nothing is trained and no data is read.

    protocol: sound, or published for the procedure that the paper released. Raises InputError for a name or override
    that is wrong, and for a protocol that the paper does not have.
    """
    rows = tuple(planned(table, cell, scale, protocol, overrides) for cell in table.cells)
    changed: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.cell.recipe is not None and row.recipe is not None:
            changed.setdefault(row.cell.of, {}).update(dict.fromkeys(differences(row.cell.recipe, row.recipe)))
    texts = {name: tuple(lines) for name, lines in changed.items()}
    return Outcome(table, rows, scale, protocol, texts, overrides=tuple(overrides))


def planned(table: Table, cell: Cell, scale: str, protocol: str, overrides: Sequence[str]) -> Row:
    """Return one cell as ``dry`` has it."""
    if cell.recipe is None:
        return Row(cell, None, None, None, missing="the paper's setting is not known")
    recipe = scaled(_procedure(table, cell.recipe, cell.released, protocol), scale)
    # Anybody can have these data, and seeded noise gives the same table again.
    texts = ["privacy.randomness=seeded"]
    # The run must not depend on which of its numbers are shown, so the whole table decides.
    if cell.of in {other.of for other in find(table.paper, table.table).cells if other.measure in COUNTED}:
        # Rounds to a target can only be counted where every round is evaluated.
        texts.append("evaluation.every=1")
    return accounted(cell, Recipe.of(recipe, [*texts, *overrides], where=recipe.name))


def accounted(cell: Cell, recipe: Recipe) -> Row:
    """Return a cell that runs as ``recipe`` says, with what is claimed of the paper's setting and proven of this
    one: ε (inf where nothing finite is) at δ, and ε of the larger system that it simulates."""
    method = algorithm_of(recipe)
    # The account of a sound update depends on neither method nor data, so all share one.
    if method.kind == "update" and recipe.privacy.protocol == "sound":
        blank = bare(recipe, {"name": "dp-fedavg" if method.private else "fedavg"})
    else:
        default = Recipe.model_fields["evaluation"].default
        blank = recipe.model_copy(update={"name": "", "seed": 0, "evaluation": default})
    return Row(cell, recipe, claimed_epsilon(cell), *_account(blank.model_dump_json(), cell.input, cell.classes))


def _procedure(table: Table, recipe: Recipe, released: Sequence[str], protocol: str) -> Recipe:
    """Return the recipe, or the paper's released procedure with its numbers; votes and ddgauss have only their own."""
    if protocol == "sound":
        return recipe
    if protocol != "published" or table.paper not in PAPERS:
        allowed = "sound, published" if table.paper in PAPERS else f"sound: {CITED[table.paper]} released no procedure"
        raise wrong("--protocol", protocol, allowed)
    if algorithm_of(recipe).kind != "update":
        return recipe
    sampling = "poisson" if table.paper == "004" else "fixed"
    size = recipe.cohort.size if sampling == "poisson" else round(recipe.cohort.size)
    procedure = reduce(override, released, recipe.dump())
    procedure["privacy"].update(protocol="published", published=table.paper)
    # That paper's released code clips to the median of the norms.
    if table.paper == "002":
        procedure["privacy"]["clip"] = {"kind": "median"}
    procedure["cohort"].update(size=size, sampling=sampling)
    return Recipe.of({**procedure, "name": f"{recipe.name}_published"}, where=recipe.name)


def claimed_epsilon(cell: Cell) -> float | None:
    """Return ε as the paper has it: the budget its table names, or its formula for its σ; inf without noise."""
    if cell.recipe is None:
        return None
    privacy, sampler = cell.recipe.privacy, Poisson(cell.recipe.data.clients or 1, cell.recipe.cohort.size)
    # A paper that names no δ names ε.
    if privacy.epsilon is not None or privacy.delta is None:
        return privacy.epsilon
    return formula(sampler, privacy.noise_multiplier or 0.0, privacy.delta, cell.recipe.rounds)


# Hundreds of cells share a few dozen plans, and an account takes seconds.
@lru_cache(maxsize=512)
def _account(text: str, shape: tuple[int, ...], classes: int) -> tuple[float, float, float | None]:
    recipe = Recipe.model_validate_json(text)
    method, clients = algorithm_of(recipe), recipe.data.clients or 1
    released, layout = recipe.privacy.protocol == "published", None
    # The account asks for d, or for the number of tensors that are clipped one by one; but a median of the clients'
    # norms proves nothing, whatever the model.
    if method.kind == "ddgauss" or (released and recipe.privacy.clipping.kind != "median"):
        layout = layout_for(recipe, method, shape, classes)
    plan = plan_of(recipe, method, clients, None if layout is None else layout.dimension)
    if layout is not None:
        plan = with_tensors(plan, layout.shared)
    return plan.epsilon() if plan.private else math.inf, plan.delta, plan.simulated_epsilon()


def fill(
    plan: Outcome, folder: Path, seeds: int | None = None, processes: int | None = None, update: Update | None = None
) -> Outcome:
    """Train every cell of a plan whose data can be had, as ``fedflat compare`` does; return the plan with its numbers.

    What is done in ``folder`` is kept. Cells that are numbers of the same runs share them. seeds: default the scale's,
    at full scale the paper's.
    """
    recipes = {row.cell.run: row.recipe for row in plan.rows if row.recipe is not None}
    ended, missing = trained(plan.table, plan.scale, list(recipes.values()), folder, seeds, processes, update)
    runs = dict(zip(recipes, ended))
    rows = tuple(_measured(row, runs, plan.table.first) for row in plan.rows)
    spent = sum(metrics.summary(run)["seconds"] for by_seed in runs.values() for run in by_seed.values())
    return replace(plan, rows=rows, missing=tuple(missing), folder=folder, seconds=spent)


def trained(
    table: Table, scale: str, recipes: Sequence[Recipe], folder: Path, seeds: int | None, processes: int | None,
    update: Update | None,
) -> tuple[list[dict[int, Run]], list[str]]:  # fmt: skip
    """Train what is not done yet in ``folder``, where the data can be had; return each recipe's runs that ended, by
    seed, and why others did not."""
    if not recipes:
        return [], []
    absent, count = lacking(recipes), seeds or SCALES[scale].seeds or table.seeds
    there = [recipe for recipe in recipes if recipe.data.dataset not in absent]
    failed = compare(there, (), count, folder, processes, update).failed if there else {}
    runs: list[dict[int, Run]] = []
    for setting in expand(recipes, (), count):
        places = {seed: folder / setting.slug / f"seed-{seed}" for seed in setting.seeds}
        runs.append({s: metrics.read_run(place) for s, place in places.items() if (place / "privacy.json").is_file()})
    return runs, [*absent.values(), *(f"{name}: {why}" for name, why in failed.items())]


def _measured(row: Row, runs: Mapping[tuple[str, str], Mapping[int, Run]], first: str) -> Row:
    """Return the row with its number and the proven ε of the runs that are there; where nothing ran, nothing is
    proven."""
    mine = runs.get(row.cell.run)
    if not mine:
        return replace(row, proven=None, delta=None, simulated=None, missing=row.missing or "no run ended")
    projected = [metrics.number(run.privacy.get("simulated_epsilon")) for run in mine.values()]
    row = replace(
        row,
        proven=max(map(metrics.bound, mine.values())),
        delta=metrics.number(next(iter(mine.values())).privacy.get("delta")) or row.delta,
        simulated=max((value for value in projected if value is not None), default=row.simulated),
        fates={seed: ending for seed, run in mine.items() if (ending := fate(run))},
    )
    against = runs.get((row.cell.of, first), {})
    values = {seed: measured(row.cell, run, against.get(seed)) for seed, run in mine.items()}
    ours = {seed: value for seed, value in values.items() if value is not None}
    if ours:
        return replace(row, ours=ours)
    if row.cell.measure == "speedup" and against:
        return replace(row, missing=f"{first} never reached {row.cell.target:g} %", void=True)
    if row.cell.measure in RELATIVE and not against:
        return replace(row, missing=f"it is against {first}, of which no run ended")
    kind = "personal" if row.cell.personal else "test"
    return replace(row, missing=f"the runs have no {kind} accuracy")


def measured(cell: Cell, run: Run, first: Run | None = None) -> float | None:
    """Return the run's number in the cell's unit; inf where the target is never reached, None where the run has none.

    first: the run of the table's first method with the same seed, for what is relative to it.
    """
    if cell.measure in COUNTED:
        return _counted(cell, run, first)
    share = _share(cell, run, first)
    return None if share is None else 100 * share


def _share(cell: Cell, run: Run, first: Run | None) -> float | None:
    """Return an accuracy, or a difference of two, from 0 to 1."""
    if cell.measure == "gap":
        return metrics.generalisation_gap(run, cell.base)
    if cell.measure in ("best", "final"):
        point = metrics.shown_round(run, cell.measure, cell.personal)
        return None if point is None else point[1]
    if (tested := metrics.shown_round(run, cell.base)) is None:
        return None
    if cell.measure == "train":
        return metrics.train_accuracy(run, tested[0])
    theirs = None if first is None else metrics.shown_round(first, cell.base)
    return None if theirs is None else tested[1] - theirs[1]


def _counted(cell: Cell, run: Run, first: Run | None) -> float | None:
    """Return the rounds to the target, or how many times as many the first method takes."""
    rounds, baseline = (
        None if one is None or cell.target is None else metrics.rounds_to(one, cell.target / 100)
        for one in (run, first)
    )
    if rounds is None or cell.measure == "rounds":
        return rounds
    if baseline is None or math.isinf(baseline):
        return None
    return 0.0 if math.isinf(rounds) else baseline / rounds
