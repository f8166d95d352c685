"""Commands that measure: ``audit`` (how far a client moves a release), ``landscape`` (how flat a minimum is); and
``bounds``, the papers' theorems, evaluated."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedflat import cli
from fedflat.core import plain, require, turning, wrong

if TYPE_CHECKING:
    from fedflat.audit import AuditResult
    from fedflat.config.recipe import Recipe
    from fedflat.landscape.statements import Setting, Statement
    from fedflat.report.progress import Bars


def audit(
    target: Annotated[str, Argument(metavar="RUN_OR_RECIPE")],
    *,
    kind: str = "quick",
    override: cli.Overrides = None,
    runs: int = 20_000,
    as_json: cli.Json = False,
) -> None:
    """How far one client's data moves a release, and how much leaks at least, measured, beside what is proven.

    quick: pairs of worlds on hostile data (a minute), the noise of real rounds, and the mechanism; all: every
    pair of worlds. Exit status 1 if a release moves by more than C, the noise is not as planned, or more leaks than
    is proven.

    Example: fedflat audit quick-start --kind worlds

    Args:
        target: A run's folder, a packaged recipe's name or a YAML file.
        kind: quick, worlds, noise, mechanism or all.
        runs: Runs per world of the mechanism audit.
    """
    from fedflat.config.recipe import Recipe

    parsed = Recipe.load(target, override or [])  # before torch takes seconds to load
    from fedflat.audit import audit_run, write_audit
    from fedflat.records.folder import SEALED
    from fedflat.report.html import write_report

    folder = Path(target) if Path(target).is_dir() else None
    # A run's own folder, as it was run, keeps the result.
    page = None if folder is None or override or (folder / SEALED).exists() else folder / "report.html"
    results = audit_run(parsed, kind=kind, runs=runs, folder=folder)
    if page is not None:
        write_audit(page.parent, results)
        write_report([page.parent], page)
    below = "" if page is None else f"\n\nReport: {page}"
    print(cli.json_text([result.as_dict() for result in results]) if as_json else table(results) + below)
    if any(result.exceeds_proven for result in results):
        raise typer.Exit(1)


def table(results: Iterable[AuditResult]) -> str:
    """Return the page's table of audits in 80 columns, a failure's verdict in capitals; then what each rests on."""
    from fedflat.report import statement

    audits = [result.as_dict() for result in results]
    rows = [statement.cells(audit) for audit in audits]
    for row, audit in zip(rows, audits):
        if statement.exceeded(audit):
            row[-1] = row[-1].upper().replace("Ε", "ε").replace("2B", "2b")
    lines = cli.columns([statement.HEADS, *rows])
    for note in statement.notes(audits):
        lines += ["", *cli.wrapped(note["head"])]
        lines += [line for text in (note["about"], *note["lines"]) for line in cli.wrapped(text, "  ", "    ")]
    return "\n".join(lines)


def landscape(
    runs: list[Path],
    *,
    points: int = 41,
    span: float = 1.0,
    directions: int = 2,
    examples: int | None = None,
    curvature_examples: int = 500,
    on: str = "test",
    clients: Annotated[str | None, Option(metavar="NUMBERS")] = None,
    rho: float = 0.05,
    noise: Annotated[str, Option(metavar="SIZES")] = "0.05,0.1,0.2,0.3,0.5",
    draws: int = 10,
    seed: int = 0,
    threads: int | None = None,
    out: Path | None = None,
    plates: cli.Plates = None,
    as_json: cli.Json = False,
) -> None:
    """How flat the loss is around finished runs' models: surfaces, curvature, sharpness, weight noise.

    Example: fedflat landscape runs/dp-fedavg runs/dp-fedsam --points 21

    Example: fedflat landscape comparison --clients 3,7 --on train

    Args:
        runs: Run folders, or folders that hold some (a comparison).
        points: Points along each direction.
        span: Farthest distance, in norms of the filters.
        directions: 2: surface and curve. 1: the curve only.
        examples: Examples evaluated. Default: all.
        curvature_examples: Examples for eigenvalues, trace and sharpness.
        on: test (public) or train (private to the simulation).
        clients: Local models of these clients as well, for example 3,7.
        rho: Radius of the sharpness.
        noise: Weight noise, relative to the weights.
        draws: Draws of weight noise.
        seed: Seed of directions, noise and examples.
        threads: Threads. Default: one for each core.
        out: Folder for landscape.html and landscape.json. Default: the (first) run's.
    """
    from fedflat.landscape import flatness
    from fedflat.report import pages
    from fedflat.report.flatness import figures, render
    from fedflat.report.progress import Bars

    settings = flatness.Settings(
        points=points, span=span, directions=directions, examples=examples, curvature_examples=curvature_examples,
        on=on, clients=tuple(_numbers("--clients", clients or "", int)), rho=rho,
        noise=tuple(_numbers("--noise", noise, float)), draws=draws, seed=seed, threads=threads,
    )  # fmt: skip
    if out is not None:
        cli.write_files(out, {})  # before minutes of work
    with Bars(quiet=as_json, stderr=True) as bars:
        record = plain(flatness.measure(runs, settings, *_shown(bars)))
    folder, text = out or runs[0], json.dumps(record, ensure_ascii=False, allow_nan=False)
    cli.write_files(folder, {"landscape.json": text + "\n"})
    page = pages.write(render(record), folder / "landscape.html")
    print(text if as_json else f"{landscape_table(record)}\n\n{page}")
    if plates is not None:
        cli.print_plates(figures(record), plates, [record], quiet=as_json)


def _numbers(where: str, text: str, kind: type) -> list[Any]:
    """Return the numbers of a list such as ``3,7``."""
    example = "3,7" if kind is int else "0.1,0.2"
    with turning(ValueError, wrong(where, text, f"numbers with commas between them, for example {example}")):
        return [kind(number) for number in text.split(",") if number.strip()]


def _shown(bars: Bars) -> tuple[Callable[[str, int], None], Callable[[int], None]]:
    """Return what tells of each model whose surface is measured, and of the surface's points."""
    task = bars.add_task("", says="")

    def stage(name: str, total: int) -> None:
        bars.reset(task, description=name, total=total or None)
        bars.line(name + (f": {total} points" if total else ""))

    def points(count: int) -> None:
        bars.advance(task, count)
        bars.update(task, says=bars.left())

    return stage, points


COLUMNS = {
    "loss": "loss", "accuracy": "acc. %", "eigenvalue": "top eig.", "trace": "trace", "ascent": "sharpness",
    "noise_accuracy": "noisy %",
}  # fmt: skip


def landscape_table(record: Mapping[str, Any]) -> str:
    """Return the means, below them the standard deviations over seeds, in 80 columns; then differences and
    notes."""
    from fedflat.report.flatness import difference_notes, pair_text

    settings, groups = record["settings"], record["groups"]
    several = len({group["model"] for group in groups}) > 1
    lines = [f"{'':20}" + "".join(f"{heading:>10}" for heading in COLUMNS.values())]
    for group in groups:
        name = group["label"] if not several else f"{group['label']}, {group['model']}"
        pairs = [pair_text(group["numbers"][key], heading.endswith("%")) for key, heading in COLUMNS.items()]
        lines.append(f"{name:20.20}" + "".join(f"{mean:>10}" for mean, _ in pairs))
        if len(group["seeds"]) > 1:
            lines.append(f"  ± sd of {len(group['seeds'])} seeds".ljust(20) + "".join(f"{sd:>10}" for _, sd in pairs))
    private = any(group["private"] for group in groups)
    notes = [*difference_notes(record), *record["notes"]]
    size = settings["noise"][len(settings["noise"]) // 2]
    below = cli.filled("landscape.txt", settings=settings, size=size, private=private, notes=notes)
    return "\n".join([*lines, "", *below])


def bounds(
    recipe: str | None = None,
    *,
    override: cli.Overrides = None,
    run: cli.Folder = None,
    smoothness: float = 1.0,
    gap: float | None = None,
    local_std: float = 1.0,
    global_std: float = 1.0,
    steps: cli.Count = None,
    dimension: cli.Count = None,
    as_json: cli.Json = False,
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

    if run is not None:
        require(recipe is None, "--run", "a recipe as well", "one of both: a run has its recipe")
        option, allowed = "-o" if override else "--steps", "a run alone: its recipe is what was measured"
        require(not (override or steps), "--run", option, allowed)
        require((run / "recipe.yaml").is_file(), "--run", str(run), "the folder of a run that fedflat run wrote")
    parsed = cli.recipe_of(run or recipe, override)
    measured = {} if run is None else _measured(run)
    turn, loss = measured.pop("gap", (None, 1.0)) if gap is None else (None, gap)
    constants = {"smoothness": smoothness, "local_std": local_std, "global_std": global_std, "gap": loss}
    setting = _setting(parsed, steps, dimension, {**measured, **constants})
    rows = statements(setting)
    facts = plain({"setting": asdict(setting), "statements": [*map(asdict, rows)]})
    print(cli.json_text(facts) if as_json else "\n".join(lines(setting, rows, measured, turn)))


def _measured(folder: Path) -> dict[str, Any]:
    """Return ᾱ, α̃ of every round and, as ``gap``, the round and value of the first test loss, where the run has them.

    A loss is recorded after a round: it stands for f(w¹) − f* and bounds it from neither side.
    """
    from fedflat.report import metrics

    run = metrics.read_run(folder)
    values = {key: metrics.column(run.private, key) for key in ("alpha_mean", "alpha_spread")}
    alphas: dict[str, Any] = {key: tuple(value for _, value in points) for key, points in values.items() if points}
    losses = metrics.column(run.metrics, "test_loss")
    return alphas | ({"gap": losses[0]} if losses else {})


def _setting(recipe: Recipe, steps: int | None, dimension: int | None, constants: dict[str, Any]) -> Setting:
    from fedflat.algorithms import ALGORITHMS
    from fedflat.assembly.jobs import prepare
    from fedflat.assembly.plans import plan_of
    from fedflat.config.method import algorithm_of
    from fedflat.landscape.bounds import Facts
    from fedflat.landscape.statements import Setting

    method = algorithm_of(recipe)
    if method.kind != "update" or not method.private:
        raise wrong("algorithm.name", recipe.algorithm.name, "a method whose clients send private updates")
    protocol = recipe.privacy.protocol
    hint = "What a released procedure proves: fedflat plan, fedflat reproduce --protocol published."
    require(protocol == "sound", "privacy.protocol", protocol, "sound", hint=hint)
    size, count = dimension, steps or recipe.local.steps
    clients, samples = recipe.data.clients, recipe.data.max_examples
    if size is None or count is None or clients is None:
        job = prepare(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "sequential"})}))
        size, count = size or job.parts.layout.dimension, count or job.parts.local.steps
        clients, samples = job.data.clients, sum(map(len, job.data.parts))
    plan = plan_of(recipe, method, clients, size)
    clipping = recipe.privacy.clipping
    clip = clipping.value or clipping.initial
    if clip is None:
        raise wrong("privacy.clip", clipping.kind, "one number C")
    facts = Facts(
        lr=recipe.local.lr, steps=count, rounds=recipe.rounds, clients=clients, cohort=plan.divisor, clip=clip,
        noise_multiplier=plan.event_multiplier, dimension=size, **constants,
    )  # fmt: skip
    factory = ALGORITHMS.get(recipe.algorithm.name)
    defaults = {} if factory is None else {k: p.default for k, p in inspect.signature(factory).parameters.items()}
    numbers: Any = {key: recipe.algorithm.options.get(key, defaults.get(key)) for key in ("rho", "keep")}
    return Setting(
        facts, q=plan.sampler.q, delta=plan.delta, epsilon=plan.epsilon(), relation=plan.relation, samples=samples,
        **numbers,
    )  # fmt: skip


def lines(setting: Setting, rows: list[Statement], measured: dict[str, Any], after: int | None = None) -> list[str]:
    """Return the statements as text of at most 80 columns, by section and reference.

    after: the round whose test loss stands for f(w¹) − f*.
    """
    facts = setting.facts
    texts = cli.filled(
        "bounds.txt", setting=setting, facts=facts, after=after, measured="alpha_mean" in measured,
        alpha_mean=fmean(facts.alpha_mean), alpha_spread=fmean(facts.alpha_spread),
    )  # fmt: skip
    for previous, row in zip([None, *rows], rows):
        if previous is None or row.section != previous.section:
            texts += ["", row.section]
        if previous is None or row.reference != previous.reference:
            texts.append(f"  {row.reference}")
        value = "–" if row.value is None else f"{row.value:,}" if isinstance(row.value, int) else f"{row.value:.4g}"
        texts.append(f"    {row.what:<58} {value:>13}".rstrip())
        texts += cli.wrapped(row.said, "      ", "      ")
    return [*texts, "", "None of this enters a privacy statement; equations: docs/bounds.md."]
