"""Commands that measure: ``audit`` (how far a client moves a release) and ``landscape`` (how flat a minimum is)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedflat import report
from fedflat.cli import WIDTH, Json, Overrides
from fedflat.cli.catalogue import Plates, print_plates
from fedflat.core.checks import wrong

if TYPE_CHECKING:
    from fedflat.audit import AuditResult


def audit(
    target: Annotated[
        str | None,
        Argument(metavar="RUN_OR_RECIPE", help="A run's folder, a packaged recipe's name or a YAML file."),
    ] = None,
    kind: Annotated[str, Option(help="quick, worlds, noise, mechanism, canaries, one-run or all.")] = "quick",
    override: Overrides = None,
    canaries: Annotated[int, Option(help="Canary clients added by canaries and one-run.")] = 500,
    methods: Annotated[str | None, Option(metavar="NAMES", help="Audit named methods instead: a,b,c, or all.")] = None,
    runs: Annotated[int, Option(help="Runs per world of the mechanism audit.")] = 20_000,
    as_json: Json = False,
) -> None:
    """How far one client's data moves a release, and how much leaks at least, measured, beside what is proven.

    quick: pairs of worlds on hostile data (a minute), the noise of real rounds, and the mechanism; all: everything,
    training included. Exit status 1 if a release moves by more than C, the noise is not as planned, or more leaks than
    is proven.

    Example: fedflat audit quick-start --kind worlds

    Example: fedflat audit --methods dp-fedsam,dp-fedpgn
    """
    from fedflat import audit as room

    if target is None and methods is None:
        raise wrong("audit", "nothing to audit", "a recipe or a run's folder, or --methods all")
    if target is None and override:
        raise wrong("-o", override[0], "only with a recipe or a run's folder")
    results: list[AuditResult] = []
    if target is not None:
        results += _of_target(target, override or [], kind, canaries, runs)
    if methods is not None:
        results += room.audit_all(None if methods == "all" else [n.strip() for n in methods.split(",")], runs=runs)
    print(json.dumps([r.as_dict() for r in results], ensure_ascii=False, indent=2) if as_json else table(results))
    if target is not None and _is_run(target, override) and not as_json:
        print(f"\nReport: {Path(target) / 'report.html'}")
    if any(result.exceeds_proven for result in results):
        raise typer.Exit(1)


def _of_target(target: str, override: list[str], kind: str, canaries: int, runs: int) -> list[AuditResult]:
    """Audit a recipe or a run's folder; in a run's own folder, ``audit.json`` and the report keep the result."""
    from fedflat.audit import audit_run, write_audit
    from fedflat.config.recipe import Recipe

    folder = Path(target) if Path(target).is_dir() else None
    results = audit_run(Recipe.load(target, override), kind=kind, canaries=canaries, runs=runs, folder=folder)
    if _is_run(target, override):
        write_audit(Path(target), results)
        report.write_report([target], Path(target) / "report.html")
    return results


def _is_run(target: str, override: list[str] | None) -> bool:
    """Return whether the folder keeps the result: a run's own, as it was run."""
    from fedflat.records.folder import SEALED

    return Path(target).is_dir() and not override and not (Path(target) / SEALED).exists()


def table(results: Iterable[AuditResult]) -> str:
    """Return the claimed, proven and audited ε, or the greatest movement over C, in 80 columns; then what each kind
    assumes.
    """
    from fedflat.report import statement

    found = list(results)
    lines = [f"{'':22} {'claimed':>8} {'proven':>8} {'audited':>9}  verdict"]
    for result in found:
        shown = statement.audited_text(result.as_dict())
        numbers = f"{_short(result.claimed):>8} {_short(result.proven):>8} {shown:>9}"
        lines.append(f"{result.method:22.22} {numbers}  {_verdict(result)}")
        at = "no confidence level" if result.confidence is None else f"confidence {_percent(result.confidence)}"
        said = "" if result.kind == "worlds" else f"; {at}"
        lines += _wrapped(f"{result.kind}: {result.canary}; {result.statistic}{said}", "    ")
        lines += _contract(result)
        lines += statement.matrix_text(result.as_dict())
    for kind in dict.fromkeys(result.kind for result in found):
        chosen = next(result for result in found if result.kind == kind)
        lines += ["", f"What {kind} rests on:"]
        lines += [line for text in chosen.assumptions for line in _wrapped(text, "  ")]
    return "\n".join(lines)


def _contract(result: AuditResult) -> list[str]:
    """Return the exact contract 2b beside the bound: the first fault, and how many more."""
    if not result.violations:
        return []
    more = f" (and {len(result.violations) - 1} more)" if len(result.violations) > 1 else ""
    broken = "" if result.kind in ("worlds", "noise") else "contract 2b broken: "
    return _wrapped(f"{broken}{result.violations[0]}{more}", "    ")


def _verdict(result: AuditResult) -> str:
    from fedflat.report import statement

    words = statement.verdict(result.as_dict())
    return words.upper().replace("Ε", "ε").replace("2B", "2b") if result.exceeds_proven else words


def _short(epsilon: float) -> str:
    return "none" if epsilon == float("inf") else f"{epsilon:.2f}"


def _percent(confidence: float) -> str:
    return f"{100 * confidence:.10g} %"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def landscape(
    runs: Annotated[list[Path], Argument(help="Run folders, or folders that hold some (a comparison).")],
    points: Annotated[int, Option(help="Points along each direction.")] = 41,
    span: Annotated[float, Option(help="Farthest distance, in norms of the filters.")] = 1.0,
    directions: Annotated[int, Option(help="2: surface and curve. 1: the curve only.")] = 2,
    examples: Annotated[int | None, Option(help="Examples evaluated. Default: all.")] = None,
    curvature_examples: Annotated[int, Option(help="Examples for eigenvalues, trace and sharpness.")] = 500,
    on: Annotated[str, Option(help="test (public) or train (private to the simulation).")] = "test",
    clients: Annotated[
        str | None, Option(metavar="NUMBERS", help="Local models of these clients as well, for example 3,7.")
    ] = None,
    rho: Annotated[float, Option(help="Radius of the sharpness.")] = 0.05,
    noise: Annotated[
        str, Option(metavar="SIZES", help="Weight noise, relative to the weights.")
    ] = "0.05,0.1,0.2,0.3,0.5",
    draws: Annotated[int, Option(help="Draws of weight noise.")] = 10,
    seed: Annotated[int, Option(help="Seed of directions, noise and examples.")] = 0,
    precision: Annotated[str, Option(help="Of the surface's forward passes: auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, Option(help="Threads. Default: one for each core.")] = None,
    out: Annotated[
        Path | None, Option(help="Folder for landscape.html and landscape.json. Default: the (first) run's.")
    ] = None,
    plates: Plates = None,
    as_json: Json = False,
) -> None:
    """How flat the loss is around finished runs' models: surfaces, curvature, sharpness, weight noise.

    Example: fedflat landscape runs/dp-fedavg runs/dp-fedsam --points 21

    Example: fedflat landscape comparison --clients 3,7 --on train
    """
    from fedflat.landscape import flatness
    from fedflat.report.flatness import figures

    settings = flatness.Settings(
        points=points, span=span, directions=directions, examples=examples, curvature_examples=curvature_examples,
        on=on, clients=tuple(_numbers("--clients", clients or "", int)), rho=rho,
        noise=tuple(_numbers("--noise", noise, float)), draws=draws, seed=seed, precision=precision, threads=threads,
    )  # fmt: skip
    settings.check()
    with _progress(quiet=as_json) as (on_stage, on_points):
        found = report.plain(flatness.measure(runs, settings, on_stage, on_points))
    _write_landscape(found, out or runs[0], as_json)
    if plates is not None:
        print_plates(figures(found), plates, [found], quiet=as_json)


def _write_landscape(found: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    from fedflat.report.flatness import write_page

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    (folder / "landscape.json").write_text(text + "\n", encoding="utf-8")
    page = write_page(found, folder / "landscape.html")
    print(text if as_json else f"{landscape_table(found)}\n\n{page}")


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


COLUMNS = (
    ("loss", "loss", False), ("accuracy", "acc. %", True), ("eigenvalue", "top eig.", False),
    ("trace", "trace", False), ("ascent", "sharpness", False), ("noise_accuracy", "noisy %", True),
)  # fmt: skip


def landscape_table(found: Mapping[str, Any]) -> str:
    """Return the means, below them the standard deviations over seeds, in 80 columns; then differences, notes and
    cost."""
    from fedflat.report.flatness import cost_text, difference_notes, pair_text

    settings, groups = found["settings"], found["groups"]
    several = len({group["model"] for group in groups}) > 1
    lines = [f"{'':20}" + "".join(f"{heading:>10}" for _, heading, _ in COLUMNS).rstrip()]
    for group in groups:
        name = group["label"] if not several else f"{group['label']}, {group['model']}"
        pairs = [pair_text(group["numbers"][key], percent) for key, _, percent in COLUMNS]
        lines.append(f"{name:20.20}" + "".join(f"{mean:>10}" for mean, _ in pairs))
        if len(group["seeds"]) > 1:
            lines.append(f"  ± sd of {len(group['seeds'])} seeds".ljust(20) + "".join(f"{sd:>10}" for _, sd in pairs))
    size = settings["noise"][len(settings["noise"]) // 2]
    said = [
        f"sharpness: rise of the loss within ρ = {settings['rho']:g}; noisy %: accuracy under weight noise of "
        f"{100 * size:g} % of the weights. Loss on {settings['on']} data.",
        *difference_notes(found),
        *found["notes"],
        cost_text(found["cost"]),
    ]
    if any(group["private"] for group in groups):
        said.insert(1, "Local models and training data are private to the simulation, not covered by the guarantee.")
    return "\n".join(
        [*lines, "", *(row for each in said for row in textwrap.wrap(each, WIDTH, subsequent_indent="  "))]
    )
