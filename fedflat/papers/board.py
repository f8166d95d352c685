"""Read the leaderboard of ``leaderboard.json``; nothing is trained here (``benchmarks/leaderboard.py`` does that)."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml

from fedflat.config.reading import read
from fedflat.config.sections import as_named
from fedflat.core import install

FILE = Path(__file__).with_name("leaderboard.json")
EPSILONS = (1, 2, 4, 8, 10)
PATCHES, NATURAL = "random process", "public natural data"
FOLDER = "FOLDER"
"""What commands call the folder with public weights."""


@dataclass(frozen=True, eq=False)
class Task:
    """A data set of the leaderboard and how its clients differ, as in ``board.yaml``.

    alpha: Dirichlet's, or None where the data say whose they are. base: what all of its rows change in the recipe.
    public: whether the recipe takes public weights from a folder. second: whether its data have another task with
    another prior before it. needs: a module that must be installed, and the extra that
    brings it.
    """

    data: str
    alpha: float | None
    name: str
    recipe: str
    prior: str = PATCHES
    base: Mapping[str, Any] = field(default_factory=dict)
    public: bool = False
    second: bool = False
    needs: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Name and partition."""
        return f"{self.name}, " + ("natural clients" if self.alpha is None else f"Dirichlet {self.alpha:g}")

    @property
    def features(self) -> str:
        """The name of its ceiling: the data, with the prior where they have two."""
        return f"{self.data}, {self.prior}" if self.second else self.data

    def changes(self, public: str | None = None) -> dict[str, Any]:
        """Return what the task changes in its recipe, by dotted key. public: the folder with public weights."""
        split = {} if self.alpha is None else {"data.partition.alpha": self.alpha}
        folder = {"model.path": public or FOLDER, "data.tokenizer": public or FOLDER} if self.public else {}
        return {**folder, **split, **self.base}


_DATA = yaml.safe_load(Path(__file__).with_name("board.yaml").read_text(encoding="utf-8"))
TASKS = tuple(Task(**entry) for entry in _DATA["tasks"])
MEASURED_AT = 8
"""The ε at which all methods are tuned."""
Row = Mapping[str, Any]


def recipe_for(source: str) -> tuple[str, str] | None:
    """Return the best measured recipe for a data set's name, of those whose packages are installed, and a line that
    says what it gives and what the others would; None where ``source`` names no data set of the leaderboard.
    """
    tasks = [t for t in TASKS if t.data == source.replace("_", "-") and t.alpha in (0.6, None) and not t.public]
    methods = {task: as_named(read(task.recipe)["algorithm"])["name"] for task in tasks}
    top = best(row for row in load()["rows"] if row["method"]["name"] == methods.get(task_of(row)))
    measured = [(task, top[task, MEASURED_AT]) for task in tasks if (task, MEASURED_AT) in top]
    measured.sort(key=lambda pair: -_mean(pair[1]))
    missing = {task: install(task.needs[1]) for task, _ in measured if task.needs and not find_spec(task.needs[0])}
    usable = [task for task, _ in measured if task not in missing]
    if not usable:
        return None
    texts = [
        f"{task.recipe} {spread_of(row, 1)} %" + (f" ({missing[task]})" if task in missing else "")
        for task, row in measured
    ]
    return usable[0].recipe, f"{source}: takes {usable[0].recipe}; measured at ε = {MEASURED_AT}: {', '.join(texts)}"


def load() -> dict[str, Any]:
    """Return ``rows``, ``ceilings`` (per cent, by data set) and ``about``."""
    return cast(dict[str, Any], json.loads(FILE.read_text(encoding="utf-8")))


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Return the rows by task, ε, and from the best mean down."""
    return sorted(rows, key=lambda row: (TASKS.index(task_of(row)), row["epsilon"], -_mean(row)))


def spread_of(row: Row, digits: int = 2) -> str:
    """Return the mean ± standard deviation over the seeds; without spaces in one digit."""
    between = " ± " if digits > 1 else "±"
    sd = f"{between}{statistics.stdev(row['accuracy']):.{digits}f}" if len(row["accuracy"]) > 1 else ""
    return f"{_mean(row):.{digits}f}{sd}"


def command(row: Row) -> str:
    """Return the command whose run is one of the row's, for its first seed."""
    task = task_of(row)
    seed = {"seed": row["seeds"][0]} if row["seeds"][0] else {}  # 0 is the default
    keys = {
        **task.changes(), **seed, "privacy.epsilon": row["epsilon"],
        **{f"algorithm.{key}": value for key, value in row["method"].items()}, **row["setting"],
    }  # fmt: skip
    return " ".join([f"fedflat run {task.recipe}", *(f"-o {key}={value}" for key, value in keys.items())])


def record(row: Row) -> dict[str, Any]:
    """Return what ``--json`` prints of a row: the method by its name, and the test accuracy of each seed in %."""
    rest = {key: value for key, value in row.items() if key not in ("method", "accuracy", "proven")}
    named = {"method": row["method"]["name"], "options": {k: v for k, v in row["method"].items() if k != "name"}}
    return rest | named | {"accuracies": row["accuracy"], "proven_epsilon": row["proven"], "command": command(row)}


def task_of(row: Row) -> Task:
    """Return the task of a row."""
    tasks = (task for task in TASKS if (task.data, task.alpha) == (row["data"], row["alpha"]))
    return next(task for task in tasks if task.prior == row.get("prior", task.prior))


def best(rows: Iterable[Row]) -> dict[tuple[Task, float], Row]:
    """Return the best row of each task and ε."""
    return {(task_of(row), row["epsilon"]): row for row in reversed(ordered(rows))}


def summary(board: Mapping[str, Any]) -> list[list[str]]:
    """Return each task's best accuracy at every ε, and its ceiling, for 80 columns; – where nobody measured."""
    top, table = best(board["rows"]), []
    for task in TASKS:
        rows = [top.get((task, epsilon)) for epsilon in EPSILONS]
        ceiling = board["ceilings"].get(task.features)
        name = task.title.replace("Dirichlet ", "").replace(" clients", "").replace("-MNIST public", " public")
        accuracies = ["–" if row is None else spread_of(row, 1) for row in rows]
        table.append([name, *accuracies, "–" if ceiling is None else f"{ceiling:.1f}"])
    return table


def _mean(row: Row) -> float:
    return statistics.fmean(row["accuracy"])
