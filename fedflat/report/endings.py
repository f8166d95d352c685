"""What the terminal shows when a run or an experiment has ended: tables of at most 80 columns, paths and next steps."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.report import tables
from fedflat.report.cautions import cautions
from fedflat.report.fates import FATES, fate_of
from fedflat.report.metrics import number, own_metrics
from fedflat.report.progress import ASKED, console_now

PRIVATE = "private to the simulation, not covered by the guarantee"


def print_summary(result: Any, folder: Path, page: Path) -> None:
    """The final table of a run, the path of its report and, if it stopped early, why and how to go on."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in summary_rows(result):
        table.add_row(Text(label), Text(text))
    console = console_now()
    with console.capture() as capture:
        console.print(table, width=min(console.width, 100))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
    for text in cautions(result.privacy, result.history, result.private_history):
        print(textwrap.fill(f"Warning: {text}", console.width, subsequent_indent="  "))
    _whole_line(f"Report: {page}")
    if result.stopped:
        _whole_line(f"{result.stopped[:1].upper()}{result.stopped[1:]}.")
    if ASKED in result.stopped:
        _whole_line(f"Go on with: fedflat run --resume {shlex.quote(str(folder))}")


def summary_rows(result: Any) -> list[tuple[str, str]]:
    """Label and text of each line of the final table; accuracy and personal accuracy in rows of their own."""
    recipe, privacy = result.recipe, result.privacy
    rows = [
        ("algorithm", f"{recipe.algorithm.name} ({recipe.name}, seed {recipe.seed})"),
        ("rounds", f"{len(result.history)} of {recipe.rounds}"),
        _tested(result.history, result.private_history),
        *[(key.replace("_", " "), _final(result.history, key)) for key in own_metrics(result.history)],
    ]
    personal = [
        value for value in (number(r.get("personal_accuracy")) for r in result.private_history) if value is not None
    ]
    if personal:
        rows.append(("personal accuracy", f"{tables.percent(personal[-1])} % ({PRIVATE})"))
    proven, claimed = number(privacy.get("proven_epsilon")), number(privacy.get("claimed_epsilon"))
    rows.append(("proven ε", _proven(proven, privacy)))
    differs = claimed is not None and (proven is None or not math.isclose(claimed, proven, rel_tol=1e-3))
    if differs:
        rows.append(
            ("claimed ε", f"{tables.epsilon_text(claimed)} by the paper's formula, which does not cover what ran")
        )
    simulated = number(privacy.get("simulated_epsilon"))
    if simulated is not None:
        rows.append(("simulated ε", f"{tables.epsilon_text(simulated)} for the larger population that was simulated"))
    broken = [found for record in result.private_history if (found := number(record.get("malformed")))]
    if broken:
        rows.append(("malformed", f"{sum(broken):g} messages in {len(broken)} rounds, counted as zero ({PRIVATE})"))
    rows.append(("trust", str(privacy.get("trust", "–"))))
    rows.append(("time", tables.duration(sum(number(r.get("seconds")) or 0.0 for r in result.history))))
    return rows


def _tested(history: list[dict[str, Any]], private: list[dict[str, Any]]) -> tuple[str, str]:
    """Test accuracy, or the loss of a task without one."""
    losses = any(number(record.get("test_loss")) is not None for record in history)
    if losses and all(record.get("test_accuracy") is None for record in history):
        return "test loss", _final(history, "test_loss")
    return "test accuracy", _accuracy(history, private)


def _final(history: list[dict[str, Any]], key: str) -> str:
    found = [value for record in history if (value := number(record.get(key))) is not None]
    return f"{found[-1]:.4g} final" if found else "never a finite number"


def _accuracy(history: list[dict[str, Any]], private: list[dict[str, Any]]) -> str:
    found = [
        (value, record["round"]) for record in history if (value := number(record.get("test_accuracy"))) is not None
    ]
    if not found:
        return "never evaluated on test data"
    came_to = fate_of(history, private)
    if came_to:
        return f"{tables.percent(found[-1][0])} % final: the run {FATES[came_to]}"
    best = max(found, key=lambda pair: pair[0])
    final, top = tables.percent(found[-1][0]), tables.percent(best[0])
    return f"{final} % final; best {top} % after round {best[1] + 1} (chosen on test data)"


def _proven(proven: float | None, privacy: Mapping[str, Any]) -> str:
    if proven is None:
        why = [*privacy.get("reasons", ()), ""][0]
        return f"none: {why}" if why else "none"
    return f"{tables.epsilon_text(proven)} at δ = {privacy.get('delta', math.nan):.3g}"


def print_stages(stages: Mapping[str, float]) -> None:
    """Where the time of a run went (``--profile``), the slowest stage first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    total = math.fsum(stages.values()) or 1.0
    for name, seconds in sorted(stages.items(), key=lambda item: -item[1]):
        table.add_row(name, tables.duration(seconds), f"{100 * seconds / total:.0f} %")
    console_now().print(table)


def print_comparison(found: Any, seconds: float) -> None:
    """The tables of an ``experiment.Comparison`` with their notes, what failed or stopped, and the paths."""
    from rich.text import Text

    console = console_now()
    if found.table is not None:
        print(tables.to_terminal(found.table, min(console.width, 100)), end="")
    for note in found.notes:
        console.print(Text(note), width=min(console.width, 100))
    for name, why in found.failed.items():
        _whole_line(f"Failed: {name}: {why}")
    if found.page is not None:
        _whole_line(f"Report: {found.page}")
        _whole_line(f"Tables: {found.folder}/table.{{md,csv,json,tex}}")
    if found.left:
        _whole_line(f"Stopped with {found.left} of {found.total} runs unfinished; the same command goes on with them.")
    done = found.total - found.left - len(found.failed)
    print(f"{done} run{'' if done == 1 else 's'} done, {tables.duration(seconds)}")


def _whole_line(text: str) -> None:
    """Print without wrapping, so that a path or a command can be copied."""
    print(text)
