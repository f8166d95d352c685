"""Show the leaderboard of ``leaderboard.json`` as Markdown, as a page and as curves; nothing is trained here."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fedflat.core.imports import install
from fedflat.report.figures import Figure, Series
from fedflat.report.groups import spread, styles
from fedflat.report.pages import Section, Table, cards, page
from fedflat.report.plates import draw_on
from fedflat.report.tables import PLAINLY
from fedflat.report.wording import text

FILE = Path(__file__).with_name("leaderboard.json")
EPSILONS = (1, 2, 4, 8, 10)
AT_EPSILON = [f"ε = {epsilon}" for epsilon in EPSILONS]
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
        """What the ceiling is of: the data, with the prior where they have two."""
        return f"{self.data}, {self.prior}" if self.second else self.data

    def changes(self, public: str | None = None) -> dict[str, Any]:
        """Return what the task changes in its recipe, by dotted key. public: the folder with public weights."""
        split = {} if self.alpha is None else {"data.partition.alpha": self.alpha}
        folder = {"model.path": public or FOLDER, "data.tokenizer": public or FOLDER} if self.public else {}
        return {**folder, **split, **self.base}


_DATA = yaml.safe_load(Path(__file__).with_name("board.yaml").read_text(encoding="utf-8"))
TASKS = tuple(Task(**entry) for entry in _DATA["tasks"])
PARTNERS: list[list[str]] = _DATA["partners"]
"""Methods that add one idea to another, and that other."""
MEASURED_AT = 8
"""The ε at which all methods are tuned."""
PAIRED = "Points of accuracy over the plain method that it is added to, paired over seeds, with 95 % t intervals."
HEADS = (
    "data", "Dirichlet", "ε", "method", "accuracy %", "seeds", "ε of the mechanism", "audited ε", "seconds", "prior"
)  # fmt: skip
Row = Mapping[str, Any]
Grid = tuple[list[str], list[list[str]]]


def recipe_for(source: str) -> tuple[str, str] | None:
    """Return the best measured recipe for a data set's name, of those whose packages are installed, and a line that
    says what it gives and what the others would; None where ``source`` names no data set of the leaderboard.
    """
    tasks = [t for t in TASKS if t.data == source.replace("_", "-") and t.alpha in (0.6, None) and not t.public]
    top = best(load()["rows"])
    known = [(task, top[task, MEASURED_AT]) for task in tasks if (task, MEASURED_AT) in top]
    known.sort(key=lambda pair: -_mean(pair[1]))
    missing = {task: install(task.needs[1]) for task, _ in known if task.needs and not find_spec(task.needs[0])}
    there = [task for task, _ in known if task not in missing]
    if not there:
        return None
    said = [
        f"{task.recipe} {spread_of(row, 1)} %" + (f" ({missing[task]})" if task in missing else "")
        for task, row in known
    ]
    return there[0].recipe, f"{source}: takes {there[0].recipe}; measured at ε = {MEASURED_AT}: {', '.join(said)}"


def load() -> dict[str, Any]:
    """Return ``rows``, ``ceilings`` (per cent, by data set) and ``about``."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


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
    """Return the task that a row is of."""
    found = (task for task in TASKS if (task.data, task.alpha) == (row["data"], row["alpha"]))
    return next(task for task in found if task.prior == row.get("prior", task.prior))


def cells(row: Row) -> list[str]:
    """Return a row's texts under ``HEADS``."""
    task, audited = task_of(row), row.get("audited")
    return [
        task.name, "–" if task.alpha is None else f"{task.alpha:g}", f"{row['epsilon']:g}", method_name(row),
        spread_of(row), str(len(row["accuracy"])), f"{row['proven']:.2f}",
        "–" if audited is None else f"≥ {audited:.2f}", f"{row['seconds']:.0f}", task.prior,
    ]  # fmt: skip


def method_name(row: Row) -> str:
    """Return the method, with the options that are not its defaults."""
    options = [f"{key} {value}" for key, value in row["method"].items() if key != "name"]
    name = str(row["method"]["name"]).rpartition(":")[2]
    return f"{name} ({', '.join(options)})" if options else name


def best(rows: Iterable[Row]) -> dict[tuple[Task, float], Row]:
    """Return the best row of each task and ε."""
    return {(task_of(row), row["epsilon"]): row for row in reversed(ordered(rows))}


def summary(found: Mapping[str, Any], short: bool = False) -> list[list[str]]:
    """Return each task's best accuracy at every ε, and its ceiling; what nobody measured says so. short: for 80
    columns.
    """
    top, table = best(found["rows"]), []
    digits, unknown = (1, "–") if short else (2, "not measured")
    for task in TASKS:
        rows = [top.get((task, epsilon)) for epsilon in EPSILONS]
        ceiling = found["ceilings"].get(task.features)
        shown = [unknown if row is None else spread_of(row, digits) for row in rows]
        brief = task.title.replace("Dirichlet ", "").replace(" clients", "").replace("-MNIST public", " public")
        name = brief if short else task.title
        table.append([name, *shown, unknown if ceiling is None else f"{ceiling:.{digits}f}"])
    return table


def methods(found: Mapping[str, Any], epsilon: float) -> Grid:
    """Return every method that was tuned by the rule at ε, on every task; those on most tasks first, then by mean
    place.
    """
    tasks, known = _tuned(found, epsilon)
    places: dict[str, list[int]] = {}
    for task in tasks:
        ranked = sorted((name for name, own in known if own is task), key=lambda name: -_mean(known[name, task]))
        for place, name in enumerate(ranked):
            places.setdefault(name, []).append(place)
    names = sorted(places, key=lambda name: (-len(places[name]), statistics.fmean(places[name])))
    rows = [[name, *(spread_of(known[name, t]) if (name, t) in known else "–" for t in tasks)] for name in names]
    return ["", *(task.title for task in tasks)], rows


def paired(found: Mapping[str, Any], epsilon: float) -> Grid:
    """Return what each idea adds to its plain partner: mean over seeds of the paired differences, with 95 % t
    intervals.
    """
    tasks, known = _tuned(found, epsilon)
    tasks = [task for task in tasks if sum(own is task for _, own in known) > 1]
    rows = []
    for name, plain in PARTNERS:
        shown = [_difference(known.get((name, task)), known.get((plain, task))) for task in tasks]
        if set(shown) != {"–"}:
            rows.append([f"{name} − {plain}", *shown])
    return ["", *(task.title for task in tasks)], rows


def _tuned(found: Mapping[str, Any], epsilon: float) -> tuple[list[Task], dict[tuple[str, Task], Row]]:
    known = {(method_name(r), task_of(r)): r for r in found["rows"] if r["epsilon"] == epsilon and "tried" in r}
    return [task for task in TASKS if any(own is task for _, own in known)], known


def _difference(row: Row | None, plain: Row | None) -> str:
    if row is None or plain is None:
        return "–"
    gaps = spread(mine - theirs for mine, theirs in zip(row["accuracy"], plain["accuracy"], strict=True))
    if gaps is None or gaps.half is None:
        return "–"
    return f"{gaps.mean:+.2f} [{gaps.mean - gaps.half:+.2f}, {gaps.mean + gaps.half:+.2f}]".replace("-", "−")


def markdown(found: Mapping[str, Any]) -> str:
    """Return the text of ``docs/leaderboard.md``."""
    rows, at = ordered(found["rows"]), MEASURED_AT
    # On the page of the docs a row has no seeds, ε of the mechanism, audits, seconds and prior.
    brief = [texts[:5] for texts in (HEADS, *map(cells, rows))]
    return text(
        "leaderboard.md", about=found["about"], plainly=PLAINLY, at=at, heads=AT_EPSILON, best=summary(found),
        methods=methods(found, at), note=PAIRED, paired=paired(found, at), rows=brief, commands=map(command, rows),
    ) + "\n"  # fmt: skip


def html(found: Mapping[str, Any], version: str) -> str:
    """Return the page: curves, then the tables."""
    caption, at = "Test accuracy in per cent, mean ± sd over seeds that tuning never saw.", MEASURED_AT
    tables = {
        "best": ("The best at each ε", Table(caption, ["", *AT_EPSILON, "ceiling"], summary(found))),
        "methods": (f"All methods at ε = {at}", Table(caption, *methods(found, at))),
        "paired": (f"What an idea adds, at ε = {at}", Table(PAIRED, *paired(found, at))),
        "rows": ("All rows", Table(caption, HEADS, [cells(row) for row in ordered(found["rows"])])),
    }
    curves = Section("curves", "Accuracy against ε", "cards", cards(figures(found)))
    sections = [curves, *(Section(key, heading, "table", shown) for key, (heading, shown) in tables.items())]
    return page("Leaderboard", " ".join(found["about"][:1]), sections, version)


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Return one figure a task: a line for each method, and the ceiling."""
    made = []
    for task in TASKS:
        lines: dict[str, list[Row]] = {}
        for row in ordered(row for row in found["rows"] if task_of(row) is task):
            lines.setdefault(method_name(row), []).append(row)
        drawn = styles([str(own[0]["method"]["name"]) for own in lines.values()])
        series = []
        for (name, own), style in zip(lines.items(), drawn):
            x = {"round": tuple(float(row["epsilon"]) for row in own)}
            series.append(Series(name, x, tuple(_mean(row) / 100 for row in own), style=style))
        ceiling = found["ceilings"].get(task.features)
        level = () if ceiling is None else (("ceiling, no privacy", ceiling / 100),)
        if series:
            key = f"{task.data}-{task.alpha}{'-public' if task.second else ''}"
            made.append(Figure(
                key, task.title, tuple(series), "%", percent=True, lines=level, x_title="ε", y_title="Test accuracy"
            ))  # fmt: skip
    return made


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Return the curves as one SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Sheet

    every = figures(found)
    # The same numbers must give the same file, bit for bit.
    with rc_context({"svg.hashsalt": "leaderboard", "svg.fonttype": "none"}):
        sheet = Sheet(figsize=(9, 2.6 * -(-len(every) // 2)), layout="constrained")
        places = sheet.subplots(-(-len(every) // 2), 2, squeeze=False).flat
        for axes, one in zip(places, every):
            draw_on(axes, one)
            axes.legend(fontsize="x-small", frameon=False)
        for axes in places:
            axes.axis("off")
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.savefig(path, metadata={"Date": None})
    return path


def _mean(row: Row) -> float:
    return statistics.fmean(row["accuracy"])
