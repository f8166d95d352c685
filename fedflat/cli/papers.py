"""``fedflat bounds``: the papers' theorems, evaluated. ``fedflat leaderboard``: the best private accuracies."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedflat import __version__
from fedflat.cli import WIDTH, Json, Overrides, print_columns, print_json, recipe_of, wrapped
from fedflat.core.checks import one_of, wrong

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.landscape.statements import Setting, Statement
    from fedflat.papers.board import Task


def bounds(
    recipe: Annotated[str | None, Argument(help="A packaged recipe's name or a YAML file.")] = None,
    override: Overrides = None,
    run: Annotated[
        Path | None,
        Option(metavar="DIR", help="A finished run: its recipe, its ᾱ and α̃, its first recorded test loss."),
    ] = None,
    smoothness: Annotated[float, Option(help="L of the gradients.")] = 1.0,
    gap: Annotated[float | None, Option(help="f(w¹) − f*. Default: a run's first recorded test loss, or 1.")] = None,
    local_std: Annotated[float, Option(help="σ_l, standard deviation of a minibatch gradient.")] = 1.0,
    global_std: Annotated[float, Option(help="σ_g, how far clients' gradients are from the mean's.")] = 1.0,
    steps: Annotated[int | None, Option(min=1, help="K. Default: the recipe's.")] = None,
    dimension: Annotated[
        int | None, Option(min=1, help="d, shared parameters. Default: the recipe's model on its data.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What the papers prove and state, evaluated: sensitivity, noise, generalisation, convergence.

    None of it enters a privacy statement. A convergence theorem gives an order: its terms are shown as they stand in
    its 𝒪(·), so they compare with each other and with another setting's, not with a gradient.

    Example: fedflat bounds cifar10-dp-fedsam --dimension 11173962 --smoothness 10

    Example: fedflat bounds --run runs/quick-start
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
    given = {"smoothness": smoothness, "local_std": local_std, "global_std": global_std}
    first = measured.pop("gap", None)
    given["gap"] = gap if gap is not None else 1.0 if first is None else first[1]
    setting = _setting(parsed, steps, dimension, {**measured, **given})
    found = statements(setting)
    if as_json:
        from fedflat.report.metrics import plain

        print(json.dumps(plain({"setting": asdict(setting), "statements": [asdict(each) for each in found]})))
    else:
        after = first[0] if first is not None and gap is None else None
        print("\n".join(lines(setting, found, measured, after)))


def _measured(folder: Path) -> dict[str, Any]:
    """Return ᾱ, α̃ of every round and, as ``gap``, the first test loss with its round, where the run has them.

    A loss is recorded after a round: it stands for f(w¹) − f* and bounds it from neither side.
    """
    from fedflat.report import metrics

    run = metrics.read_run(folder)
    found: dict[str, Any] = {}
    for key in ("alpha_mean", "alpha_spread"):
        values = [value for _, value in metrics.column(run.private, key)]
        found |= {key: tuple(values)} if values else {}
    losses = metrics.column(run.metrics, "test_loss")
    return found | ({"gap": losses[0]} if losses else {})


def _setting(recipe: Recipe, steps: int | None, dimension: int | None, constants: dict[str, Any]) -> Setting:
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
    options = recipe.algorithm.options
    numbers = {key: options.get(key, _default(recipe.algorithm.name, key)) for key in ("rho", "lam", "beta", "keep")}
    return Setting(
        facts, q=plan.sampler.q, delta=plan.delta, epsilon=plan.epsilon(), relation=plan.relation, samples=samples,
        cost=cost_of(method, size, count, batches), **numbers,
    )  # fmt: skip


def _default(name: str, key: str) -> Any:
    """Return a named method's default for one of its keys; None where it has no such key."""
    import inspect

    from fedflat.algorithms import ALGORITHMS

    found = inspect.signature(ALGORITHMS[name]).parameters.get(key) if name in ALGORITHMS else None
    return None if found is None else found.default


def _clip(recipe: Recipe) -> float:
    clip = recipe.privacy.clipping
    found = clip.value or clip.initial
    if found is None:
        raise wrong("privacy.clip", clip.kind, "one number C")
    return found


def lines(setting: Setting, found: list[Statement], measured: dict[str, Any], after: int | None = None) -> list[str]:
    """Return the statements as text of at most 80 columns, by section and reference.

    after: the round whose test loss stands for f(w¹) − f*.
    """
    facts = setting.facts
    epsilon = "∞" if math.isinf(setting.epsilon) else f"{setting.epsilon:.4g}"
    known = (
        f"M = {facts.clients:,}, m = {facts.cohort:g} (q = {setting.q:.4g}), T = {facts.rounds}, K = {facts.steps}, "
        f"η = {facts.lr:g}, C = {facts.clip:g}, σ = {facts.noise_multiplier:.4g}, d = {facts.dimension:,}; "
        f"ε = {epsilon} is proven at δ = {setting.delta:.2g}"
    )
    loss = "" if after is None else f" (the test loss after round {after}, no bound)"
    of = "measured" if "alpha_mean" in measured else "nothing clipped"
    given = (
        f"Constants: L = {facts.smoothness:g}, f(w¹) − f* = {facts.gap:.4g}{loss}, σ_l = {facts.local_std:g}, "
        f"σ_g = {facts.global_std:g}; ᾱ = {_mean(facts.alpha_mean):.3g}, α̃ = {_mean(facts.alpha_spread):.3g} ({of})."
    )
    shown = [*wrapped(known), *wrapped(given)]
    section = reference = ""
    for each in found:
        if each.section != section:
            section = each.section
            shown += ["", section]
        if each.reference != reference:
            reference = each.reference
            shown.append(f"  {reference}")
        value = "–" if each.value is None else f"{each.value:,}" if isinstance(each.value, int) else f"{each.value:.4g}"
        shown.append(f"    {each.what:<58} {value:>13}".rstrip())
        shown += [f"      {text}" for text in textwrap.wrap(each.said, WIDTH - 6)]
    return [*shown, "", "None of this enters a privacy statement; equations: docs/bounds.md."]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def leaderboard(
    own: Annotated[
        str | None,
        Option("--with", metavar="FILE.py:METHOD", help="Measure this method too, by the same rule and budget."),
    ] = None,
    data: Annotated[str, Option(help="Where --with is measured: a data set of the table.")] = "fashion-mnist",
    alpha: Annotated[float | None, Option(help="Dirichlet concentration of --with, where there are two.")] = None,
    epsilon: Annotated[float, Option(help="ε of --with.")] = 8.0,
    encoder: Annotated[
        str | None, Option(metavar="FOLDER", help="The text encoder that sst2 and mrpc need (save_pretrained).")
    ] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Write md, .html and images/ there.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print a list of all rows as JSON.")] = False,
) -> None:
    """Accuracies under a proven ε, as measured for this release: mean ± sd, ceiling, the command of each row.

    With --with, a method in a file of your own is tuned on training data and
    tested as the others were (minutes, and more where the data set's features
    are not in the cache yet), and joins the tables that are written.

    Example: fedflat leaderboard --out docs

    Example: fedflat leaderboard --with my_method.py:my_method --out mine
    """
    from fedflat.papers import board

    asked = {"--data": (data, "fashion-mnist"), "--epsilon": (epsilon, 8.0), "--alpha": (alpha, None)}
    asked |= {"--encoder": (encoder, None)}
    for option, (given, default) in asked.items():
        if own is None and given != default:
            raise wrong(option, given, "only with --with, whose method is measured there")
    found = board.load()
    if out is not None:
        # Written once before measuring, so that a folder that cannot be written is reported early.
        _written(found, out)
    if own is not None:
        found["rows"].append(_row_of(own, _task(data, alpha, encoder), epsilon, encoder))
        if out is not None:
            _written(found, out)
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


def _written(found: dict[str, Any], out: Path) -> None:
    from fedflat.papers import board

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "leaderboard.md").write_text(board.markdown(found), encoding="utf-8")
        (out / "leaderboard.html").write_text(board.html(found, f"fedflat {__version__}"), encoding="utf-8")
        board.picture(found, out / "images" / "leaderboard.svg")
    except OSError as error:
        raise wrong("--out", f"{out}, which cannot be written ({error.strerror})", "a folder to write") from error
