"""``python -m benchmarks.leaderboard DATA METHOD…``: measure rows of the leaderboard that are not there yet.

Each row is written to ``leaderboard.json`` as it comes, so that an end at any minute loses one row at most; a row that
was tuned by the rule already is not measured again: take it out of the file first. ``METHOD`` is a name,
``NAME,key=value`` or ``ceiling``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import yaml

from fedflat.papers.board import FILE, TASKS, load, task_of
from fedflat.papers.board_runs import Cell, ceiling, examples, measure
from fedflat.report.pages import write


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


if __name__ == "__main__":
    main()
