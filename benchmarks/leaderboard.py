"""``python -m benchmarks.leaderboard DATA METHOD…``: measure rows of the leaderboard that are not there yet.

Each row is written to ``leaderboard.json`` as it comes, so that an end at any minute loses one row at most; a row that
was tuned by the rule already is not measured again: take it out of the file first. ``METHOD`` is a name,
``NAME,key=value`` or ``ceiling``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from fedflat.core.loss import CROSS_ENTROPY
from fedflat.data.clients import FederatedData
from fedflat.papers.board import FILE, TASKS, load, task_of
from fedflat.papers.board_runs import TUNING, Cell, Examples, examples, measure
from fedflat.report.pages import write

FITTED = 100
"""Steps of L-BFGS for a ceiling without features."""
PENALTIES = tuple(10.0**power for power in range(-5, 4))
"""Of ridge regression, per example."""


def main() -> None:
    """Measure what is asked for."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("data", choices=sorted({task.data for task in TASKS}))
    asked.add_argument("methods", nargs="+")
    asked.add_argument("--alpha", type=float)
    asked.add_argument("--epsilon", type=float, nargs="+", default=[8])
    asked.add_argument("--prior", help="Of the body, where the data have two: public natural data.")
    asked.add_argument("--encoder", help="The folder with a text encoder's weights and tokenizer.")
    given = asked.parse_args()
    named = (task for task in TASKS if task.data == given.data and given.alpha in (None, task.alpha))
    task = next(task for task in named if given.prior in (None, task.prior))
    known = examples(task, given.encoder)
    for epsilon, text in itertools.product(given.epsilon, given.methods):
        if text == "ceiling":
            _keep(load()["rows"], {task.features: ceiling(known)})
            continue
        name, *options = text.split(",")
        method = {"name": name} | {k: yaml.safe_load(v) for k, v in (o.split("=") for o in options)}
        cell = Cell(task, int(epsilon) if epsilon == int(epsilon) else epsilon, method, given.encoder)
        if not any(_same(row, cell) and "tried" in row for row in load()["rows"]):
            row = measure(cell, known, lambda text: print(text, flush=True))
            _keep([*(other for other in load()["rows"] if not _same(other, cell)), row], {})


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
