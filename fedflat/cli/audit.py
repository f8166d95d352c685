"""Commands that measure: ``audit`` (how far a client moves a release) and ``landscape`` (how flat a minimum is)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedflat import report
from fedflat.cli import Json, Overrides, Plates, filled, print_json, print_plates, wrapped
from fedflat.core.checks import wrong

if TYPE_CHECKING:
    from fedflat.audit import AuditResult


def audit(
    target: Annotated[str | None, Argument(metavar="RUN_OR_RECIPE")] = None,
    *,
    kind: str = "quick",
    override: Overrides = None,
    canaries: int = 500,
    methods: Annotated[str | None, Option(metavar="NAMES")] = None,
    runs: int = 20_000,
    as_json: Json = False,
) -> None:
    """How far one client's data moves a release, and how much leaks at least, measured, beside what is proven.

    quick: pairs of worlds on hostile data (a minute), the noise of real rounds, and the mechanism; all: everything,
    training included. Exit status 1 if a release moves by more than C, the noise is not as planned, or more leaks than
    is proven.

    Example: fedflat audit quick-start --kind worlds

    Example: fedflat audit --methods dp-fedsam,dp-fedpgn

    Args:
        target: A run's folder, a packaged recipe's name or a YAML file.
        kind: quick, worlds, noise, mechanism, canaries, one-run or all.
        canaries: Canary clients added by canaries and one-run.
        methods: Audit named methods instead: a,b,c, or all.
        runs: Runs per world of the mechanism audit.
    """
    from fedflat.audit import audit_all, audit_run, write_audit
    from fedflat.config.recipe import Recipe
    from fedflat.records.folder import SEALED

    if target is None and methods is None:
        raise wrong("audit", "nothing to audit", "a recipe or a run's folder, or --methods all")
    if target is None and override:
        raise wrong("-o", override[0], "only with a recipe or a run's folder")
    results: list[AuditResult] = []
    folder = Path(target) if target is not None and Path(target).is_dir() else None
    # A run's own folder, as it was run, keeps the result.
    page = None if folder is None or override or (folder / SEALED).exists() else folder / "report.html"
    if target is not None:
        recipe = Recipe.load(target, override or [])
        results += audit_run(recipe, kind=kind, canaries=canaries, runs=runs, folder=folder)
    if page is not None:
        write_audit(page.parent, results)
        report.write_report([page.parent], page)
    if methods is not None:
        results += audit_all(None if methods == "all" else [n.strip() for n in methods.split(",")], runs=runs)
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        print(table(results) + ("" if page is None else f"\n\nReport: {page}"))
    if any(result.exceeds_proven for result in results):
        raise typer.Exit(1)


def table(results: Iterable[AuditResult]) -> str:
    """Return the claimed, proven and audited ε, or the greatest movement over C, in 80 columns; then what each kind
    assumes.
    """
    from fedflat.report import statement

    assumptions: dict[str, tuple[str, ...]] = {}
    lines = [f"{'':22} {'claimed':>8} {'proven':>8} {'audited':>9}  verdict"]
    for result in results:
        facts = result.as_dict()
        verdict = statement.verdict(facts)
        if result.exceeds_proven:
            verdict = verdict.upper().replace("Ε", "ε").replace("2B", "2b")
        numbers = f"{_epsilon(result.claimed)} {_epsilon(result.proven)} {statement.audited_text(facts):>9}"
        lines.append(f"{result.method:22.22} {numbers}  {verdict}")
        level = "no confidence level" if result.confidence is None else f"confidence {100 * result.confidence:.10g} %"
        suffix = "" if result.kind == "worlds" else f"; {level}"
        lines += wrapped(f"{result.kind}: {result.canary}; {result.statistic}{suffix}", "    ", "      ")
        if result.violations:
            more = f" (and {len(result.violations) - 1} more)" if len(result.violations) > 1 else ""
            broken = "" if result.kind in ("worlds", "noise") else "contract 2b broken: "
            lines += wrapped(f"{broken}{result.violations[0]}{more}", "    ", "      ")
        lines += statement.matrix_text(facts)
        assumptions.setdefault(result.kind, result.assumptions)
    for kind, texts in assumptions.items():
        lines += ["", f"What {kind} rests on:"]
        lines += [line for text in texts for line in wrapped(text, "  ", "    ")]
    return "\n".join(lines)


def _epsilon(value: float) -> str:
    return f"{'none' if value == float('inf') else f'{value:.2f}':>8}"


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
    precision: str = "auto",
    threads: int | None = None,
    out: Path | None = None,
    plates: Plates = None,
    as_json: Json = False,
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
        precision: Of the surface's forward passes: auto, float32 or bfloat16.
        threads: Threads. Default: one for each core.
        out: Folder for landscape.html and landscape.json. Default: the (first) run's.
    """
    from fedflat.landscape import flatness
    from fedflat.report.flatness import figures, write_page

    settings = flatness.Settings(
        points=points, span=span, directions=directions, examples=examples, curvature_examples=curvature_examples,
        on=on, clients=tuple(_numbers("--clients", clients or "", int)), rho=rho,
        noise=tuple(_numbers("--noise", noise, float)), draws=draws, seed=seed, precision=precision, threads=threads,
    )  # fmt: skip
    settings.check()
    with _progress(quiet=as_json) as (on_stage, on_points):
        record = report.plain(flatness.measure(runs, settings, on_stage, on_points))
    folder = out or runs[0]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    (folder / "landscape.json").write_text(text + "\n", encoding="utf-8")
    page = write_page(record, folder / "landscape.html")
    print(text if as_json else f"{landscape_table(record)}\n\n{page}")
    if plates is not None:
        print_plates(figures(record), plates, [record], quiet=as_json)


def _numbers(where: str, text: str, kind: type) -> list[Any]:
    """Return the numbers of a list such as ``3,7``."""
    try:
        return [kind(each) for each in text.split(",") if each.strip()]
    except ValueError:
        raise wrong(
            where, text, "numbers with commas between them, for example " + ("3,7" if kind is int else "0.1,0.2")
        ) from None


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Any, Any]]:
    """Show a bar on the terminal for each model's surface, and plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_interactive, transient=True) as bar:
        task = bar.add_task("", total=None)

        def stage(name: str, total: int) -> None:
            bar.reset(task, description=name, total=total or None)
            if not console.is_interactive:
                console.print(f"{name}" + (f": {total} points" if total else ""), highlight=False)

        yield stage, lambda count: bar.advance(task, count)


COLUMNS = {
    "loss": "loss", "accuracy": "acc. %", "eigenvalue": "top eig.", "trace": "trace", "ascent": "sharpness",
    "noise_accuracy": "noisy %",
}  # fmt: skip


def landscape_table(record: Mapping[str, Any]) -> str:
    """Return the means, below them the standard deviations over seeds, in 80 columns; then differences, notes and
    cost."""
    from fedflat.report.flatness import cost_text, difference_notes, pair_text

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
    notes = [*difference_notes(record), *record["notes"], cost_text(record["cost"])]
    size = settings["noise"][len(settings["noise"]) // 2]
    below = filled("landscape.txt", settings=settings, size=size, private=private, notes=notes)
    return "\n".join([*lines, "", *below])
