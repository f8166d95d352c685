"""Collect the values that a report's figures show; ``svg`` draws them.

Each shows its series by round (and, where an ε is proven, by ε spent). The axis counts rounds that are finished: 0 is
before training, and what round r of the records released stands at r + 1.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

from fedflat.report import metrics
from fedflat.report.groups import COLOURS, DASHES, Group, Spread, final_epsilon, spread, without_epsilon
from fedflat.report.metrics import Run, column, number
from fedflat.report.wording import asset

MAX_POINTS = 600
"""Beyond that a line shows every second, third … round."""
DOTS_FROM = 3
"""Series of bars up to which each is a bar from zero: more are dots, on an axis of their range."""
DECLARED: dict[str, dict[str, Any]] = yaml.safe_load(asset("figures.yaml"))
Values = tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """One line or band.

    Attributes:
        label: what the legend and the table call it.
        x: abscissae by axis name, ``round`` always and ``epsilon`` where it is known; same length as ``y``.
        y: the values (for a band that has no middle line, empty).
        low, high: the band's edges, or empty.
        style: index of colour and dash; −1 draws dashed in the text colour.
    """

    label: str
    x: Mapping[str, Values]
    y: Values = ()
    low: Values = ()
    high: Values = ()
    style: int = 0

    @property
    def classes(self) -> str:
        """The classes of the style sheet that colour and dash the series, and the one that a page's chips hide."""
        kind = "ink" if self.style < 0 else f"c{self.style % COLOURS} d{self.style % DASHES}"
        return f"{kind} g{self.style}"

    @property
    def band(self) -> str:
        """The style sheet's class of the band: around a line, or between quantiles."""
        return "sd" if self.y else "q5" if self.label.startswith("5") else "q25"


@dataclass(frozen=True)
class Figure:
    """One figure: its series share a unit and an axis. ``private`` marks what no guarantee covers; with
    ``zero`` the axis begins at 0, as every share's does.

    kind: ``points`` draws each value with its interval on a real axis. names: of a bar's places, instead of numbers.
    y_title: what is measured, where the title does not say it.
    """

    key: str
    title: str
    series: tuple[Series, ...]
    unit: str = ""
    note: str = ""
    private: bool = False
    percent: bool = False
    lines: tuple[tuple[str, float], ...] = ()
    kind: Literal["line", "bars", "points"] = "line"
    x_title: str = "round"
    zero: bool = False
    overlay: bool = field(default=False, kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)
    y_title: str = field(default="", kw_only=True)

    @property
    def axes(self) -> tuple[str, ...]:
        """The abscissae that this figure can be drawn over."""
        return tuple(axis for axis in ("round", "epsilon") if self.over(axis))

    def over(self, axis: str) -> tuple[Series, ...]:
        """Return the series that have this abscissa."""
        return tuple(series for series in self.series if axis in series.x)


def thin(count: int, most: int = MAX_POINTS) -> list[int]:
    """Return the places of about ``most`` of ``count`` points: evenly spaced, the last one always among them."""
    places = list(range(0, count, max(1, math.ceil(count / most))))
    if places and places[-1] != count - 1:
        places.append(count - 1)
    return places


def _entries(page: str, run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of ``figures.yaml`` by their keys, page ``run`` or ``groups``; and metrics that the recipe of a
    run asks for, said to be what the loss is."""
    for key, entry in DECLARED[page].items():
        yield key, entry
        if (page, key) == ("run", "loss"):
            for name in metrics.own_metrics(run.metrics):
                title = name.replace("_", " ").capitalize()
                yield name, {**entry, "title": title, "of": {"": name}, **DECLARED["own"].get(name, {})}


Points = Callable[[Run], Sequence[tuple[int, float]]]


def points_of(name: str) -> Points:
    """Return what reads (round, value) from a run: a key of its records, ``spent`` or ``worst``."""
    special = {"spent": spent_from_start, "worst": _worst}.get(name)
    # No key is in both of a run's records.
    return special or (lambda run: column(run.metrics, name) or column(run.private, name))


def _worst(run: Run) -> list[tuple[int, float]]:
    return column([{**r, "worst": quantiles(r, "client_accuracy_quantiles").get("0.05")} for r in run.private], "worst")


def spent_from_start(run: Run) -> list[tuple[int, float]]:
    """Return (round, proven ε so far), with nothing spent before round 0; empty where no ε is proven."""
    points = metrics.spent(run)
    return [(-1, 0.0), *points] if points else []


def _series(group: Group, points: Points, *, spent: bool = False, share: bool = False) -> Series:
    """Return the mean over a group's runs with a band of one standard deviation; one run has no band.

    spent: by ε too, where it is known at every point. share: the values are shares, and so are the band's edges.
    """
    values = by_round(map(points, group.runs))
    stats = {turn: one for turn, sample in values.items() if (one := spread(sample)) is not None}
    turns = [[*stats][place] for place in thin(len(stats))]
    sds = [stats[turn].sd or 0.0 for turn in turns]
    x: dict[str, Values] = {"round": tuple(float(turn + 1) for turn in turns)}
    # Seeds of one setting spend the same; where they do not, the largest is the one that holds for all.
    epsilons = {turn: max(sample) for turn, sample in by_round(map(metrics.spent, group.runs)).items()} if spent else {}
    if epsilons and turns and all(turn in epsilons for turn in turns):
        x["epsilon"] = tuple(epsilons[turn] for turn in turns)
    y = tuple(stats[turn].mean for turn in turns)
    if not any(sds):
        return Series(group.label, x, y, style=group.style)
    # A share cannot be below 0 or above 100 %.
    least, greatest = (0.0, 1.0) if share else (-math.inf, math.inf)
    low = tuple(max(least, a - sd) for a, sd in zip(y, sds))
    return Series(group.label, x, y, low, tuple(min(greatest, a + sd) for a, sd in zip(y, sds)), group.style)


def by_round(runs: Iterable[Sequence[tuple[int, float]]]) -> dict[int, list[float]]:
    """Return the values of several runs' points at each round, the rounds in order."""
    values: dict[int, list[float]] = {}
    for points in runs:
        for turn, value in points:
            values.setdefault(turn, []).append(value)
    return dict(sorted(values.items()))


def with_series(figure: Figure, series: Sequence[Series], **changes: Any) -> Figure | None:
    """Return the figure with those of the series that have values; None where none has."""
    drawn = tuple(line for line in series if line.y or line.low)
    return replace(figure, series=drawn, **changes) if drawn else None


def figures_of_run(run: Run) -> list[Figure]:
    """Return every figure the run has records for; an absent key leaves its figure out."""
    return _figures("run", [Group(run.algorithm, (run,))])


def figures_of_groups(groups: Sequence[Group]) -> list[Figure]:
    """Return overlays of several groups: means over seeds with bands of one standard deviation."""
    return _figures("groups", groups)


def _figures(page: str, groups: Sequence[Group]) -> list[Figure]:
    """Return the figures of a page: of one run with a line for each of its records, or with a line for each group."""
    overlay = page == "groups"
    special = SPECIAL if overlay else SPECIAL | OF_ONE_RUN
    figures: list[Figure | None] = []
    for key, entry in _entries(page, groups[0].runs[0]):
        figure = Figure(key, series=(), overlay=overlay, **{k: v for k, v in entry.items() if k != "of"})
        lines: list[Series] = []
        for place, (label, name) in enumerate(entry.get("of", {}).items()):
            single = [replace(groups[0], label=label or figure.title, style=place)]
            lines += _lines(groups if overlay else single, name, figure.percent)
        figures.append(special.get(key, _plain)(groups, figure, lines))
    return [figure for figure in figures if figure is not None]


def _lines(groups: Sequence[Group], name: str, share: bool) -> list[Series]:
    """Return each group's line, by ε too where what it shows was released with it."""
    spent = name.startswith(("test_", "private_"))
    return [_series(group, points_of(name), spent=spent, share=share) for group in groups]


def _plain(groups: object, figure: Figure, lines: Sequence[Series]) -> Figure | None:
    absent = [line.label for line in lines if line.y and "epsilon" not in line.x]
    # By ε only what has a proven ε can be drawn; the caption says who is missing.
    known = any("epsilon" in line.x for line in lines)
    missing = f" Without a proven ε, so by round only: {', '.join(absent)}." if known and absent else ""
    return with_series(figure, lines, note=figure.note + missing)


def _chance(groups: Iterable[Group]) -> tuple[tuple[str, float], ...]:
    """Return the mark of guessing among the classes; nothing where the runs differ in their classes or have none."""
    counts = {len(last_classes(run)) for group in groups for run in group.runs}
    count = counts.pop() if len(counts) == 1 else 0
    return (("guessing", 1 / count),) if count > 1 else ()


def _accuracy(groups: Sequence[Group], figure: Figure, lines: Sequence[Series]) -> Figure | None:
    return _plain(groups, replace(figure, lines=_chance(groups)), lines)


def _privacy(groups: Sequence[Group], figure: Figure, lines: Sequence[Series]) -> Figure | None:
    run = groups[0].runs[0]
    privacy = metrics.section(run.recipe, "privacy")
    budget = number(privacy.get("epsilon") or privacy.get("budget"))
    note = f"{metrics.epsilon_name(run)} of everything released so far."
    return with_series(figure, lines, note=note, lines=(("budget", budget),) if budget is not None else ())


def quantiles(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return a record's quantiles by name (``0.05`` … ``0.95``, ``min``, ``max``); empty where it has none."""
    numbers = ((name, number(value)) for name, value in metrics.section(record, key).items())
    return {name: value for name, value in numbers if value is not None}


def _bands(run: Run, key: str) -> list[Series]:
    """Return the 5 to 95 % and the 25 to 75 % bands of a round's quantiles, and their median."""
    rows = [(record["round"], levels) for record in run.private if (levels := quantiles(record, key))]
    rows = [rows[place] for place in thin(len(rows))]

    def band(label: str, low: str, high: str) -> Series:
        points = [(turn, levels[low], levels[high]) for turn, levels in rows if low in levels and high in levels]
        x = {"round": tuple(float(turn + 1) for turn, _, _ in points)}
        return Series(label, x, (), tuple(item[1] for item in points), tuple(item[2] for item in points))

    middle = [(turn, levels["0.5"]) for turn, levels in rows if "0.5" in levels]
    series = [band("5–95 %", "0.05", "0.95"), band("25–75 %", "0.25", "0.75")]
    return [*series, _series(Group("Median", (run,)), lambda _: middle)] if rows else []


def _norms(groups: Sequence[Group], figure: Figure, lines: Sequence[Series]) -> Figure | None:
    """Return the quantiles of the norms, or their mean where no quantiles are recorded, with the clip."""
    [clip] = _lines([replace(groups[0], label="Clip", style=-1)], "clip", share=False)
    if bands := _bands(groups[0].runs[0], "update_norm_quantiles"):
        return with_series(figure, [*bands, clip])
    return with_series(figure, [*lines, clip], note="Mean over the cohort, with the clip.") if lines[0].y else None


def last_classes(run: Run) -> list[float | None]:
    """Return the accuracy by class at the last evaluation that recorded it; empty if none did."""
    recorded = (record["class_accuracy"] for record in reversed(run.metrics) if record.get("class_accuracy"))
    return [number(value) for value in next(recorded, ())]


def class_names(run: Run) -> list[str]:
    """Return the classes' names by the recipe or the run's preparation; empty where neither has names."""
    data = metrics.section(run.recipe, "data")
    names = metrics.section(data, "categories").get(str(data.get("target")))
    names = names or metrics.preparation(run.path).get("names")
    return [{False: "no", True: "yes"}.get(name, str(name)) for name in names] if isinstance(names, list) else []


def _class_bars(groups: Sequence[Group], figure: Figure, lines: object) -> Figure | None:
    """Return the accuracy by class at the last evaluation: one series per group, the mean over its seeds."""
    series = []
    for group in groups:
        spreads = [spread(values) for values in zip(*[row for row in map(last_classes, group.runs) if row])]
        points = [(float(index), stats.mean) for index, stats in enumerate(spreads) if stats is not None]
        x = {"round": tuple(index for index, _ in points)}
        series.append(Series(group.label, x, tuple(value for _, value in points), style=group.style))
    every = {tuple(class_names(run)) for group in groups for run in group.runs}
    names = every.pop() if len(every) == 1 else ()
    most = max((index for line in series for index in line.x["round"]), default=-1)
    return with_series(figure, series, names=names if len(names) > most else ())


def _by_epsilon(groups: Sequence[Group], figure: Figure, lines: object) -> Figure | None:
    """Return the final accuracy against the proven ε, a series for each method; None with fewer than two ε."""
    finals = [(group, final_epsilon(group), spread(map(metrics.final_accuracy, group.runs))) for group in groups]
    points = [(without_epsilon(g.label), epsilon, final, g.style) for g, epsilon, final in finals if epsilon and final]
    if len({f"{epsilon:.3g}" for _, epsilon, _, _ in points}) < 2:
        return None
    return replace(at_places(figure, points), lines=_chance(groups), overlay=False)


def at_places(figure: Figure, points: Iterable[tuple[str, float, Spread, int]]) -> Figure:
    """Return a figure of shares on a real axis, a series for each label: means with 95 % t intervals.

    points: of each its label, its place on the axis, its values, and the number of its line, which is hidden with the
    first of its settings.
    """
    by_label: dict[str, list[tuple[float, ...]]] = {}
    for label, at, values, style in points:
        half = values.half or 0.0
        point = (at, values.mean, max(0.0, values.mean - half), min(1.0, values.mean + half), style)
        by_label.setdefault(label, []).append(point)
    series = []
    for label, rows in by_label.items():
        x, y, low, high, styles = zip(*sorted(rows))
        interval = (low, high) if low != high else ((), ())
        series.append(Series(label, {"round": x}, y, *interval, int(min(styles))))
    return replace(figure, series=tuple(series))


Special = Callable[[Sequence[Group], Figure, Sequence[Series]], Figure | None]
SPECIAL: dict[str, Special] = {"accuracy": _accuracy, "classes": _class_bars, "by-epsilon": _by_epsilon}
"""The figures that show more than the records that they declare."""
OF_ONE_RUN: dict[str, Special] = {
    "epsilon": _privacy,
    "clip": lambda groups, figure, lines: with_series(figure, [line for line in lines if len(set(line.y)) > 1]),
    "norms": _norms,
    "spread": lambda groups, figure, lines: with_series(figure, _bands(groups[0].runs[0], "client_accuracy_quantiles")),
}
"""The same of a page of one run."""
