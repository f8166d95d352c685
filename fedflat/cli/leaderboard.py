"""``fedflat leaderboard``: the best accuracies that a proof allows, and a method of one's own among them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedflat import __version__
from fedflat.core.checks import one_of, wrong

if TYPE_CHECKING:
    from fedflat.reproduce.board import Task


def leaderboard(
    own: Annotated[
        str | None,
        typer.Option("--with", metavar="FILE.py:METHOD", help="Measure this method too, by the same rule and budget."),
    ] = None,
    data: Annotated[str, typer.Option(help="Where --with is measured: a data set of the table.")] = "fashion-mnist",
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration of --with, where there are two.")] = None,
    epsilon: Annotated[float, typer.Option(help="ε of --with.")] = 8.0,
    encoder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The text encoder that sst2 and mrpc need (save_pretrained).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write leaderboard.md, .html and images/ there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Accuracies under a proven ε, as measured for this release: mean ± sd, ceiling, the command of each row.

    With --with, a method in a file of your own is tuned on training data and
    tested as the others were (minutes, and more where the data set's features
    are not in the cache yet), and joins the tables that are written.

    Example: fedflat leaderboard --out docs

    Example: fedflat leaderboard --with my_method.py:my_method --out mine
    """
    from fedflat.reproduce import board

    asked = {"--data": (data, "fashion-mnist"), "--epsilon": (epsilon, 8.0), "--alpha": (alpha, None)}
    asked |= {"--encoder": (encoder, None)}
    for option, (given, default) in asked.items():
        if own is None and given != default:
            raise wrong(option, given, "only with --with, whose method is measured there")
    found = board.load()
    if out is not None:
        _written(found, out)  # now, so that a folder that cannot be written is told before anything is measured
    if own is not None:
        found["rows"].append(_measured(own, _task(data, alpha, encoder), epsilon, encoder))
        if out is not None:
            _written(found, out)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    heads = ["", *(f"ε = {value}" for value in board.EPSILONS), "ceiling"]
    _print(heads, board.summary(found, short=True))
    if own is not None:
        print()
        _print(("", ""), zip(board.HEADS, board.cells(found["rows"][-1])))
    print("Test accuracy in %, mean±sd over seeds, by Dirichlet α; –: not measured.")
    print("All rows: --out DIR, or --json.")


def _task(data: str, alpha: float | None, encoder: str | None) -> Task:
    from fedflat.reproduce.board import TASKS

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


def _measured(own: str, task: Task, epsilon: float, encoder: str | None) -> dict[str, Any]:
    from fedflat.assembly.plans import algorithm_of
    from fedflat.reproduce.board_runs import TUNING, Cell, examples, measure

    if ":" not in own:
        raise wrong("--with", own, "FILE.py:METHOD, as in a recipe's algorithm.name")
    cell = Cell(task, epsilon, {"name": own}, encoder)
    algorithm_of(cell.recipe(TUNING, {}))  # a mistake is told before minutes are spent on features
    return measure(cell, examples(task, encoder), _aloud)


def _aloud(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _written(found: dict[str, Any], out: Path) -> None:
    from fedflat.reproduce import board

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "leaderboard.md").write_text(board.markdown(found), encoding="utf-8")
        (out / "leaderboard.html").write_text(board.html(found, f"fedflat {__version__}"), encoding="utf-8")
        board.picture(found, out / "images" / "leaderboard.svg")
    except OSError as error:
        raise wrong("--out", f"{out}, which cannot be written ({error.strerror})", "a folder to write") from error


def _print(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    every = [row for row in (heads, *rows) if any(row)]
    widths = [max(map(len, column)) for column in zip(*every)]
    for row in every:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip())
