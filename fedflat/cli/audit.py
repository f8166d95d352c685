"""``fedflat audit``: the greatest movement over C, and empirical lower bounds on ε beside the proven one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedflat.core.checks import wrong

if TYPE_CHECKING:
    from fedflat.audit import AuditResult

WIDTH = 80


def audit(
    target: Annotated[
        str | None,
        typer.Argument(metavar="RUN_OR_RECIPE", help="A run's folder, a packaged recipe's name or a YAML file."),
    ] = None,
    kind: Annotated[str, typer.Option(help="quick, worlds, mechanism, canaries, one-run or all.")] = "quick",
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change one key of the recipe.")
    ] = None,
    canaries: Annotated[int, typer.Option(help="Canary clients added by canaries and one-run.")] = 500,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Audit named methods instead: a,b,c, or all.")
    ] = None,
    defects: Annotated[
        bool, typer.Option("--defects", help="Audit the planted defects: each must be found out.")
    ] = False,
    runs: Annotated[int, typer.Option(help="Runs per world of the mechanism audit.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """How far one client's data moves a release, and how much leaks at least, measured, beside what is proven.

    quick: pairs of worlds on hostile data (a minute), and the mechanism; all: everything, training included. Exit
    status 1 if a release moves by more than C, or more leaks than is proven.

    Example: fedflat audit quick-start --kind worlds

    Example: fedflat audit --methods dp-fedsam,dp-fedpgn --defects
    """
    from fedflat import audit as room

    if target is None and methods is None and not defects:
        raise wrong("audit", "nothing to audit", "a recipe or a run's folder, --methods all, or --defects")
    if target is None and override:
        raise wrong("-o", override[0], "only with a recipe or a run's folder")
    results: list[AuditResult] = []
    if target is not None:
        results += _of_target(target, override or [], kind, canaries, runs)
    if methods is not None:
        results += room.audit_all(None if methods == "all" else [n.strip() for n in methods.split(",")], runs=runs)
    if defects:
        results += room.audit_planted() + room.audit_defects(runs=runs) + room.audit_correlated()
    print(json.dumps([r.as_dict() for r in results], ensure_ascii=False, indent=2) if as_json else table(results))
    if target is not None and _is_run(target, override) and not as_json:
        print(f"\nReport: {Path(target) / 'report.html'}")
    if any(_failed(result) for result in results):
        raise typer.Exit(1)


def _of_target(target: str, override: list[str], kind: str, canaries: int, runs: int) -> list[AuditResult]:
    """Audit a recipe or a run's folder; in a run's own folder, ``audit.json`` and the report keep the result."""
    from fedflat.audit import audit_run
    from fedflat.audit.whole_run import write_audit
    from fedflat.config.recipe import Recipe
    from fedflat.report.html import write_report

    folder = Path(target) if Path(target).is_dir() else None
    results = audit_run(Recipe.load(target, override), kind=kind, canaries=canaries, runs=runs, folder=folder)
    if _is_run(target, override):
        write_audit(Path(target), results)
        write_report([target], Path(target) / "report.html")
    return results


def _is_run(target: str, override: list[str] | None) -> bool:
    """Whether the folder keeps the result: a run's own, as it was run."""
    from fedflat.records.folder import SEALED

    return Path(target).is_dir() and not override and not (Path(target) / SEALED).exists()


def _failed(result: AuditResult) -> bool:
    """A bound over the proof, a broken contract, a movement over C, or a planted defect that went unseen."""
    from fedflat.report import audited

    return result.exceeds_proven or (result.kind == "defect" and not audited.seen(result.as_dict()))


def table(results: Iterable[AuditResult]) -> str:
    """Claimed, proven and audited ε, or the greatest movement over C, in 80 columns; then what each kind assumes."""
    from fedflat.report import audited

    found = list(results)
    lines = [f"{'':22} {'claimed':>8} {'proven':>8} {'audited':>9}  verdict"]
    for result in found:
        shown = audited.audited_text(result.as_dict())
        numbers = f"{_short(result.claimed):>8} {_short(result.proven):>8} {shown:>9}"
        if result.kind == "defect" and "movement" in result.details:
            lines.append(f"{result.method:40.40} {shown:>9}  {_verdict(result)}")
        else:
            lines.append(f"{result.method:22.22} {numbers}  {_verdict(result)}")
        at = "no confidence level" if result.confidence is None else f"confidence {_percent(result.confidence)}"
        said = "" if "movement" in result.details else f"; {at}"
        lines += _wrapped(f"{result.kind}: {result.canary}; {result.statistic}{said}", "    ")
        lines += _contract(result)
        lines += audited.matrix_text(result.as_dict())
    for kind in dict.fromkeys(result.kind for result in found):
        chosen = next(result for result in found if result.kind == kind)
        lines += ["", f"What {kind} rests on:"]
        lines += [line for text in chosen.assumptions for line in _wrapped(text, "  ")]
    return "\n".join(lines)


def _contract(result: AuditResult) -> list[str]:
    """The exact contract 2b beside the bound: the first fault, and how many more."""
    if not result.violations:
        return []
    more = f" (and {len(result.violations) - 1} more)" if len(result.violations) > 1 else ""
    broken = "" if "movement" in result.details else "contract 2b broken: "
    return _wrapped(f"{broken}{result.violations[0]}{more}", "    ")


def _verdict(result: AuditResult) -> str:
    from fedflat.report import audited

    words = audited.verdict(result.as_dict())
    return words.upper().replace("Ε", "ε").replace("2B", "2b") if _failed(result) else words


def _short(epsilon: float) -> str:
    return "none" if epsilon == float("inf") else f"{epsilon:.2f}"


def _percent(confidence: float) -> str:
    return f"{100 * confidence:.10g} %"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
