"""Measure rows of the leaderboard, put a method of one's own beside them, and write its page.

``python -m benchmarks.leaderboard cifar10 dp-fedsam "dp-fedavg-la,strength=0.5" ceiling`` measures what is not there
yet. Each row is written to ``fedflat/papers/leaderboard.json`` as it comes, so that an end at any minute loses one row
at most; a row that was tuned by the rule already is not measured again: take it out of the file first.

``python -m benchmarks.leaderboard fashion-mnist --with my_method.py:my_method --out mine`` measures a method of one's
own by the same rule and budget (minutes, and more where the data set's features are not in the cache yet) and writes
the tables with it to ``mine``; the file stays as it is.

``python -m benchmarks.leaderboard --out docs`` writes ``leaderboard.md`` and ``images/leaderboard.svg``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.leaderboard_cell import TUNING, Cell, Examples, examples, measure
from benchmarks.leaderboard_page import markdown, picture
from fedflat.config.method import algorithm_of
from fedflat.core.checks import InputError
from fedflat.core.loss import CROSS_ENTROPY
from fedflat.data.clients import FederatedData
from fedflat.papers.board import FILE, TASKS, Task, load, task_of
from fedflat.report.pages import write

FITTED = 100
"""Steps of L-BFGS for a ceiling without features."""
PENALTIES = tuple(10.0**power for power in range(-5, 4))
"""Of ridge regression, per example."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", choices=sorted({task.data for task in TASKS}))
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="NAME, NAME,key=value or ceiling")
    parser.add_argument("--with", dest="own", metavar="FILE.py:METHOD", help="measured, and not kept in the file")
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8])
    parser.add_argument("--prior", help="of the body, where the data have two: public natural data")
    parser.add_argument("--encoder", help="the folder with a text encoder's weights and tokenizer")
    parser.add_argument("--out", type=Path, help="the folder for leaderboard.md and images/leaderboard.svg")
    given = parser.parse_args(words)
    own: list[dict[str, Any]] = []
    try:
        if given.out is not None:
            # Written before measuring too, so that a folder that cannot be written is reported early.
            _write(given.out, [])
        if given.data is not None:
            own = _measured(_task(parser, given), given)
        elif given.own or given.out is None:
            parser.error("name a data set, or --out DIR")
        if given.out is not None:
            _write(given.out, own)
    except InputError as error:
        parser.error(str(error))


def _task(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Task:
    """Return the task that is asked for."""
    found = [task for task in TASKS if task.data == given.data]
    found = [task for task in found if given.alpha in (None, task.alpha) and given.prior in (None, task.prior)]
    if not found:
        parser.error(f"{given.data}: no task with --alpha {given.alpha} and --prior {given.prior}")
    if found[0].public != (given.encoder is not None):
        parser.error(f"{given.data} takes {'an' if found[0].public else 'no'} --encoder FOLDER")
    return found[0]


def _measured(task: Task, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the methods that are named and keep their rows; return the rows of the method of one's own."""
    rows = []
    for epsilon, text in itertools.product(given.epsilon, [*given.methods, *([given.own] if given.own else [])]):
        if text == "ceiling":
            _keep(load()["rows"], {task.features: ceiling(examples(task, given.encoder))})
            continue
        name, *options = text.split(",")
        method = {"name": name} | {k: yaml.safe_load(v) for k, v in (o.split("=") for o in options)}
        cell = Cell(task, int(epsilon) if epsilon == int(epsilon) else epsilon, method, given.encoder)
        if text != given.own and any(_same(row, cell) and "tried" in row for row in load()["rows"]):
            continue
        # A mistake in the method is reported before minutes are spent on features.
        algorithm_of(cell.recipe(TUNING, {}))
        row = measure(cell, examples(task, given.encoder), _note)
        if text == given.own:
            rows.append(row)
        else:
            _keep([*(other for other in load()["rows"] if not _same(other, cell)), row], {})
    return rows


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(out: Path, own: Sequence[dict[str, Any]]) -> None:
    """Write the page and its picture. own: rows that are not in the file."""
    found = load()
    found["rows"] += own
    (out / "images").mkdir(parents=True, exist_ok=True)
    (out / "leaderboard.md").write_text(markdown(found), encoding="utf-8")
    picture(found, out / "images" / "leaderboard.svg")


def _same(row: dict[str, Any], cell: Cell) -> bool:
    return task_of(row) is cell.task and (row["epsilon"], row["method"]) == (cell.epsilon, dict(cell.method))


def _keep(rows: list[dict[str, Any]], ceilings: dict[str, float]) -> None:
    found = load()
    rest = {**found, "ceilings": found["ceilings"] | ceilings, "rows": []}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps(rest, ensure_ascii=False, indent=1).replace('"rows": []', f'"rows": [\n{lines}\n]')
    write(text + "\n", FILE)


def ceiling(known: Examples) -> float:
    """Test accuracy in per cent of ridge regression on the features, without privacy; its penalty by held-back data.

    Where there are no features, of the model itself, fitted to all training examples at once.
    """
    data = known.data
    if not data.inputs.is_floating_point():
        return _fitted(data, known.head)
    rows, held = (torch.from_numpy(part) for part in known.apart(TUNING))
    inputs, test, targets = data.inputs.double(), data.test_inputs.double(), data.targets
    tried = _ridge(inputs[rows], targets[rows], inputs[held], targets[held], data.classes, PENALTIES)
    chosen = max(sorted(tried), key=tried.__getitem__)
    return _ridge(inputs, targets, test, data.test_targets, data.classes, (chosen,))[chosen]


def _fitted(data: FederatedData, head: torch.nn.Module) -> float:
    """Test accuracy in per cent of a model with a convex loss, after ``FITTED`` steps of L-BFGS on its mean loss."""
    model = copy.deepcopy(head)
    search = torch.optim.LBFGS(model.parameters(), max_iter=FITTED, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> float:
        search.zero_grad()
        total = 0.0
        for x, y in zip(data.inputs.split(1000), data.targets.split(1000)):
            part = CROSS_ENTROPY(model(x), y)[0].sum() / len(data.targets)
            part.backward()
            total += part.item()
        return total

    search.step(loss)
    with torch.no_grad():
        right = (model(data.test_inputs).argmax(-1) == data.test_targets).double().mean()
    return round(100 * float(right), 2)


def _ridge(
    x: Tensor, y: Tensor, test: Tensor, test_y: Tensor, classes: int, penalties: Sequence[float]
) -> dict[float, float]:
    """Return the accuracy in per cent of ridge regression for each penalty."""
    mean, wanted = x.mean(0), torch.nn.functional.one_hot(y, classes).double()
    centred = x - mean
    gram, moment = centred.T @ centred / len(x), centred.T @ (wanted - wanted.mean(0)) / len(x)
    found = {}
    for penalty in penalties:
        weights = torch.linalg.solve(gram + penalty * torch.eye(x.shape[1], dtype=x.dtype), moment)
        guess = ((test - mean) @ weights + wanted.mean(0)).argmax(1)
        found[penalty] = round(100 * float((guess == test_y).double().mean()), 2)
    return found


if __name__ == "__main__":
    main()
