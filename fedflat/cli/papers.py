"""``fedflat bounds``: the papers' theorems, evaluated. ``fedflat leaderboard``: the best private accuracies."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fedflat import __version__
from fedflat.cli import (
    Count,
    Folder,
    Json,
    Overrides,
    filled,
    print_columns,
    print_json,
    recipe_of,
    wrapped,
    write_files,
)
from fedflat.core.checks import one_of, wrong

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.landscape.statements import Setting, Statement
    from fedflat.papers.board import Task


def bounds(
    recipe: str | None = None,
    *,
    override: Overrides = None,
    run: Folder = None,
    smoothness: float = 1.0,
    gap: float | None = None,
    local_std: float = 1.0,
    global_std: float = 1.0,
    steps: Count = None,
    dimension: Count = None,
    as_json: Json = False,
) -> None:
    """What the papers prove and state, evaluated: sensitivity, noise, generalisation, convergence.

    None of it enters a privacy statement. A convergence theorem gives an order: its terms are shown as they stand in
    its 𝒪(·), so they compare with each other and with another setting's, not with a gradient.

    Example: fedflat bounds cifar10-dp-fedsam --dimension 11173962 --smoothness 10

    Example: fedflat bounds --run runs/quick-start

    Args:
        recipe: A packaged recipe's name or a YAML file.
        run: A finished run: its recipe, its ᾱ and α̃, its first recorded test loss.
        smoothness: L of the gradients.
        gap: f(w¹) − f*. Default: a run's first recorded test loss, or 1.
        local_std: σ_l, standard deviation of a minibatch gradient.
        global_std: σ_g, how far clients' gradients are from the mean's.
        steps: K. Default: the recipe's.
        dimension: d, shared parameters. Default: the recipe's model on its data.
    """
    from fedflat.landscape.statements import statements

    if run is not None and recipe is not None:
        raise wrong("--run", "a recipe as well", "one of both: a run has its recipe")
    if run is not None and (override or steps):
        raise wrong("--run", "-o" if override else "--steps", "a run alone: its recipe is what was measured")
    if run is not None and not (run / "recipe.yaml").is_file():
        raise wrong("--run", str(run), "the folder of a run that fedflat run wrote")
    parsed = recipe_of(run or recipe, override)
    measured = {} if run is None else _measured(run)
    turn, loss = measured.pop("gap", (None, 1.0))
    given = {"smoothness": smoothness, "local_std": local_std, "global_std": global_std}
    given["gap"] = loss if gap is None else gap
    setting = _setting(parsed, steps, dimension, {**measured, **given})
    found = statements(setting)
    if as_json:
        from fedflat.report import plain

        print_json(plain({"setting": asdict(setting), "statements": [asdict(each) for each in found]}))
    else:
        print("\n".join(lines(setting, found, measured, turn if gap is None else None)))


def _measured(folder: Path) -> dict[str, Any]:
    """Return ᾱ, α̃ of every round and, as ``gap``, the round and value of the first test loss, where the run has them.

    A loss is recorded after a round: it stands for f(w¹) − f* and bounds it from neither side.
    """
    from fedflat.report import metrics

    run = metrics.read_run(folder)
    values = {key: metrics.column(run.private, key) for key in ("alpha_mean", "alpha_spread")}
    found: dict[str, Any] = {key: tuple(value for _, value in points) for key, points in values.items() if points}
    losses = metrics.column(run.metrics, "test_loss")
    return found | ({"gap": losses[0]} if losses else {})


def _setting(recipe: Recipe, steps: int | None, dimension: int | None, constants: dict[str, Any]) -> Setting:
    from fedflat.algorithms import ALGORITHMS
    from fedflat.assembly.jobs import prepare
    from fedflat.assembly.plans import algorithm_of, plan_of, server_of
    from fedflat.landscape.bounds import Facts
    from fedflat.landscape.statements import Setting, cost_of

    method = algorithm_of(recipe)
    if method.kind != "update" or not method.private:
        raise wrong("algorithm.name", recipe.algorithm.name, "a method whose clients send private updates")
    if recipe.privacy.protocol != "sound":
        raise wrong(
            "privacy.protocol", recipe.privacy.protocol, "sound",
            hint="What a released procedure proves: fedflat plan, fedflat reproduce --protocol published.",
        )  # fmt: skip
    size, count = dimension, steps or recipe.local.steps
    samples = recipe.data.max_examples
    clients = recipe.data.clients
    if size is None or count is None or clients is None:
        job = prepare(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "sequential"})}))
        size, count = size or job.parts.layout.dimension, count or job.parts.local.steps
        clients, samples = job.data.clients, sum(map(len, job.data.parts))
    if recipe.start is not None:
        raise wrong("start", recipe.start.kind, "nothing", hint="The theorems take all rounds to be the method's.")
    plan = plan_of(recipe, method, clients, size)
    local = recipe.local
    facts = Facts(
        lr=local.lr, steps=count, rounds=recipe.rounds, clients=clients, cohort=plan.divisor, clip=_clip(recipe),
        noise_multiplier=plan.event_multiplier, dimension=size, server_lr=server_of(recipe, method).lr or 1.0,
        **constants,
    )  # fmt: skip
    # Without a number of examples each client is taken to have one batch.
    batches = math.ceil((samples or local.batch_size * clients) / clients / local.batch_size)
    factory = ALGORITHMS.get(recipe.algorithm.name)
    known = {} if factory is None else inspect.signature(factory).parameters
    defaults = {key: known[key].default for key in ("rho", "lam", "beta", "keep") if key in known}
    numbers: Any = {key: recipe.algorithm.options.get(key, defaults.get(key)) for key in ("rho", "lam", "beta", "keep")}
    return Setting(
        facts, q=plan.sampler.q, delta=plan.delta, epsilon=plan.epsilon(), relation=plan.relation, samples=samples,
        cost=cost_of(method, size, count, batches), **numbers,
    )  # fmt: skip


def _clip(recipe: Recipe) -> float:
    clip = recipe.privacy.clipping
    number = clip.value or clip.initial
    if number is None:
        raise wrong("privacy.clip", clip.kind, "one number C")
    return number


def lines(setting: Setting, found: list[Statement], measured: dict[str, Any], after: int | None = None) -> list[str]:
    """Return the statements as text of at most 80 columns, by section and reference.

    after: the round whose test loss stands for f(w¹) − f*.
    """
    facts = setting.facts
    shown = filled(
        "bounds.txt", setting=setting, facts=facts, after=after, measured="alpha_mean" in measured,
        epsilon="∞" if math.isinf(setting.epsilon) else f"{setting.epsilon:.4g}",
        alpha_mean=fmean(facts.alpha_mean), alpha_spread=fmean(facts.alpha_spread),
    )  # fmt: skip
    before = None
    for each in found:
        if before is None or each.section != before.section:
            shown += ["", each.section]
        if before is None or each.reference != before.reference:
            shown.append(f"  {each.reference}")
        before = each
        value = "–" if each.value is None else f"{each.value:,}" if isinstance(each.value, int) else f"{each.value:.4g}"
        shown.append(f"    {each.what:<58} {value:>13}".rstrip())
        shown += wrapped(each.said, "      ", "      ")
    return [*shown, "", "None of this enters a privacy statement; equations: docs/bounds.md."]


def leaderboard(
    *,
    own: Annotated[str | None, Option("--with", metavar="FILE.py:METHOD")] = None,
    data: str = "fashion-mnist",
    alpha: float | None = None,
    epsilon: float = 8.0,
    encoder: Annotated[str | None, Option(metavar="FOLDER")] = None,
    out: Folder = None,
    as_json: Annotated[bool, Option("--json", help="Print a list of all rows as JSON.")] = False,
) -> None:
    """Accuracies under a proven ε, as measured for this release: mean ± sd, ceiling, the command of each row.

    With --with, a method in a file of your own is tuned on training data and
    tested as the others were (minutes, and more where the data set's features
    are not in the cache yet), and joins the tables that are written.

    Example: fedflat leaderboard --out docs

    Example: fedflat leaderboard --with my_method.py:my_method --out mine

    Args:
        own: Measure this method too, by the same rule and budget.
        data: Where --with is measured: a data set of the table.
        alpha: Dirichlet concentration of --with, where there are two.
        epsilon: ε of --with.
        encoder: The text encoder that sst2 and mrpc need (save_pretrained).
        out: Write md, .html and images/ there.
    """
    from fedflat.papers import board

    defaults = {"--data": (data, "fashion-mnist"), "--epsilon": (epsilon, 8.0), "--alpha": (alpha, None)}
    for option, (given, default) in (defaults | {"--encoder": (encoder, None)}).items():
        if own is None and given != default:
            raise wrong(option, given, "only with --with, whose method is measured there")
    found = board.load()
    if out is not None:
        # Written before measuring too, so that a folder that cannot be written is reported early.
        _write(found, out)
    if own is not None:
        found["rows"].append(_row_of(own, _task(data, alpha, encoder), epsilon, encoder))
        if out is not None:
            _write(found, out)
    if as_json:
        print_json([board.record(row) for row in found["rows"]])
        return
    heads = ["", *(f"ε = {value}" for value in board.EPSILONS), "ceiling"]
    print_columns([heads, *board.summary(found, short=True)])
    if own is not None:
        print()
        print_columns(zip(board.HEADS, board.cells(found["rows"][-1])))
    print("Test accuracy in %, mean±sd over seeds, by Dirichlet α; –: not measured.")
    print("All rows: --out DIR, or --json.")


def _task(data: str, alpha: float | None, encoder: str | None) -> Task:
    from fedflat.papers.board import TASKS

    one_of("--data", data, tuple(dict.fromkeys(task.data for task in TASKS)))
    own = [task for task in TASKS if task.data == data]
    found = next((task for task in own if alpha in (None, task.alpha)), None)
    if found is None:
        raise wrong("--alpha", alpha, " or ".join(f"{task.alpha:g}" for task in own if task.alpha) or "nothing")
    if found.public and encoder is None:
        raise wrong("--data", data, "with --encoder FOLDER, whose features its rows are of")
    if encoder is not None and not found.public:
        raise wrong("--encoder", encoder, f"nothing: {data} has a body of its own")
    return found


def _row_of(own: str, task: Task, epsilon: float, encoder: str | None) -> dict[str, Any]:
    from fedflat.assembly.plans import algorithm_of
    from fedflat.papers.board_runs import TUNING, Cell, examples, measure
    from fedflat.report import Progress

    if ":" not in own:
        raise wrong("--with", own, "FILE.py:METHOD, as in a recipe's algorithm.name")
    cell = Cell(task, epsilon, {"name": own}, encoder)
    recipe = cell.recipe(TUNING, {})
    # A mistake in the method is reported before minutes are spent on features.
    algorithm_of(recipe)
    _note(f"preparing {task.data}")
    with Progress(recipe, what=f"preparing {task.data}", stderr=True):
        known = examples(task, encoder)
    return measure(cell, known, _note)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(found: dict[str, Any], out: Path) -> None:
    from fedflat.papers import board

    page = board.html(found, f"fedflat {__version__}")
    write_files(out, {"leaderboard.md": board.markdown(found), "leaderboard.html": page})
    board.picture(found, out / "images" / "leaderboard.svg")
