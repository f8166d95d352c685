"""Collect the values that a report's figures show; ``svg`` draws them.

Each shows its series by round (and, where an ε is proven, by ε spent). The axis counts rounds that are finished: 0 is
before training, and what round r of the records released stands at r + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedflat.report import metrics
from fedflat.report.groups import (
    COLOURS,
    DASHES,
    SAME,
    Group,
    Spread,
    dashed,
    final_epsilon,
    spread,
    style_of,
    styles,
    without_epsilon,
)
from fedflat.report.metrics import Run, column, number

MAX_POINTS = 600
"""Beyond that a line shows every second, third … round."""
DOTS_FROM = 3
"""Series of bars up to which each is a bar from zero: more are dots, on an axis of their range."""
Values = tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """One line or band.

    Attributes:
        label: what the legend and the table call it.
        x: abscissae by axis name, ``round`` always and ``epsilon`` where it is known; same length as ``y``.
        y: the values (for a band that has no middle line, empty).
        low, high: the band's edges, or empty.
        style: index of colour and dash; −1 draws dashed in the text colour, −2 without dashes.
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
        return tuple(each for each in self.series if axis in each.x)


def thin(count: int, most: int = MAX_POINTS) -> list[int]:
    """Return the places of about ``most`` of ``count`` points: evenly spaced, the last one always among them."""
    step = max(1, math.ceil(count / most))
    places = list(range(0, count, step))
    if places and places[-1] != count - 1:
        places.append(count - 1)
    return places


def _series(label: str, points: Sequence[tuple[int, float]], spent: Mapping[int, float], style: int = 0) -> Series:
    places = thin(len(points))
    turns = [points[place][0] for place in places]
    x: dict[str, Values] = {"round": tuple(float(turn + 1) for turn in turns)}
    if spent and all(turn in spent for turn in turns):
        x["epsilon"] = tuple(spent[turn] for turn in turns)
    return Series(label, x, tuple(points[place][1] for place in places), style=style)


# ------------------------------------------------------------------------------------------------------ one run


def figures_of_run(run: Run) -> list[Figure]:
    """Return every figure the run has records for; an absent key leaves its figure out."""
    spent = metrics.spent(run)

    def public(figure: Figure, key: str, **changes: Any) -> Figure | None:
        return _of_records(figure, run.metrics, [("", key)], spent, **changes)

    def private(figure: Figure, *keys: tuple[str, str]) -> Figure | None:
        return _of_records(figure, run.private, keys)

    found = [
        public(ACCURACY, "test_accuracy", lines=chance_line([run])), public(LOSS, "test_loss"),
        *(public(replace(LOSS, key=key, title=_title(key)), key) for key in metrics.own_metrics(run.metrics)),
        _privacy(run), _clip(run),
        class_bars([(metrics.section(run.recipe, "algorithm").get("name", "") or run.name, run)], overlay=False),
        _norms(run), private(CLIPPED, ("", "clipped_fraction")), private(SIGNAL, ("", "signal_to_noise")),
        private(FACTORS, ("ᾱ mean", "alpha_mean"), ("α̃ spread", "alpha_spread")),
        private(ERRORS, ("Clip bias, at most", "clip_bias"), ("Noise", "noise_norm")),
        private(TRAIN, ("", "train_accuracy")), private(TRAIN_LOSS, ("", "train_loss")),
        private(PERSONAL, ("", "personal_accuracy")), _bands(run, "client_accuracy_quantiles", SPREAD),
        private(COHORT, ("", "cohort")),
    ]  # fmt: skip
    style = style_of(run.algorithm)
    return [_styled(figure, style) for figure in found if figure is not None]


def _styled(figure: Figure, style: int) -> Figure:
    """Return the figure in the method's colour; a second line has its next dash."""
    series = [each if each.style < 0 else replace(each, style=dashed(style, each.style)) for each in figure.series]
    return replace(figure, series=tuple(series))


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _private(key: str, title: str, unit: str, note: str, **more: Any) -> Figure:
    return Figure(key, title, (), unit, note, private=True, **more)


ACCURACY = Figure("accuracy", "Test accuracy", (), "%", "Shared model, public test data.", percent=True)
LOSS = Figure("loss", "Test loss", (), note="Public test data.")
CLIPPED = _private(
    "clipped", "Clipped share", "%", "Share of updates with a norm above the clip.", percent=True, zero=True
)
SIGNAL = _private("signal", "Signal to noise", "", "Norm of the clipped mean over the norm of its noise.", zero=True)
TRAIN = _private("train-accuracy", "Training accuracy", "%", "Mean over the round's cohort.", percent=True)
TRAIN_LOSS = _private("train-loss", "Training loss", "", TRAIN.note)
PERSONAL = _private(
    "personal", "Personal accuracy", "%", "Mean over clients, each its own model and held-back data.", percent=True
)
SPREAD = _private("spread", "Accuracy by client", "%", "Quantiles over clients.", percent=True)
COHORT = _private("cohort", "Cohort size", "clients", "Clients that took part; the draw is secret.", zero=True)
NORMS = _private("norms", "Update norm before the clip", "L2", "Quantiles over the cohort, with the clip.")
FACTORS = _private(
    "alpha", "Clipping factors ᾱ and α̃", "", "α = min(1, clip/norm): mean, and mean distance from it.", zero=True
)
ERRORS = _private(
    "errors", "Clip bias and noise", "L2",
    "Norms of what the clip took from the round's sum (at most) and of what the noise added to it.",
)  # fmt: skip


def with_series(figure: Figure, series: Sequence[Series], **changes: Any) -> Figure | None:
    kept = tuple(each for each in series if each.y or each.low)
    return replace(figure, series=kept, **changes) if kept else None


def _of_records(
    figure: Figure, records: Sequence[Mapping[str, Any]], keys: Sequence[tuple[str, str]],
    spent: Sequence[tuple[int, float]] = (), **changes: Any,
) -> Figure | None:  # fmt: skip
    """Return the figure with a line for each label and key of the records; None where they have none of them."""
    lines = [
        _series(label or figure.title, sizes(records, key), dict(spent), place)
        for place, (label, key) in enumerate(keys)
    ]
    return with_series(figure, lines, **changes)


def sizes(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return ``column``, with a list (a cohort given by its members) counted."""
    counted = [{**record, key: len(record[key])} if isinstance(record.get(key), list) else record for record in records]
    return column(counted, key)


def chance_line(runs: Sequence[Run]) -> tuple[tuple[str, float], ...]:
    """Return the mark of guessing among the classes; nothing where the runs differ in their classes or have none."""
    counts = {len(last_classes(run)) for run in runs}
    count = counts.pop() if len(counts) == 1 else 0
    return (("guessing", 1 / count),) if count > 1 else ()


def _privacy(run: Run) -> Figure | None:
    privacy = metrics.section(run.recipe, "privacy")
    budget = number(privacy.get("epsilon") or privacy.get("budget"))
    lines = (("budget", budget),) if budget is not None else ()
    note = f"{metrics.epsilon_name(run)} of everything released so far."
    figure = Figure("epsilon", "Privacy spent", (), "ε", note, lines=lines, zero=True)
    return with_series(figure, [_series("ε spent", spent_from_start(run), {})])


def spent_from_start(run: Run) -> list[tuple[int, float]]:
    """Return (round, proven ε so far), with nothing spent before round 0; empty where no ε is proven."""
    found = metrics.spent(run)
    return [(-1, 0.0), *found] if found else []


def _clip(run: Run) -> Figure | None:
    points = column(run.metrics, "clip")
    if len({value for _, value in points}) < 2:
        return None
    figure = Figure("clip", "Clipping threshold", (), "L2", "Adapted privately; part of what is released.")
    return with_series(figure, [_series("Clip", points, {})])


def quantiles(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return a record's quantiles by name (``0.05`` … ``0.95``, ``min``, ``max``); empty where it has none."""
    found = record.get(key)
    if not isinstance(found, Mapping):
        return {}
    named = {_quantile_name(name): number(value) for name, value in found.items()}
    return {name: value for name, value in named.items() if value is not None}


def _quantile_name(name: Any) -> str:
    try:
        return f"{float(name):g}"
    except (TypeError, ValueError):
        return {"median": "0.5"}.get(str(name), str(name))


def _bands(run: Run, key: str, figure: Figure, extra: Sequence[Series] = (), **changes: Any) -> Figure | None:
    rows = [(metrics.turn(record, place), quantiles(record, key)) for place, record in enumerate(run.private)]
    rows = [row for row in rows if row[1]]
    rows = [rows[place] for place in thin(len(rows))]

    def band(label: str, low: str, high: str) -> Series:
        kept = [(turn, found[low], found[high]) for turn, found in rows if low in found and high in found]
        x = {"round": tuple(float(turn + 1) for turn, _, _ in kept)}
        return Series(label, x, (), tuple(item[1] for item in kept), tuple(item[2] for item in kept))

    middle = [(turn, found["0.5"]) for turn, found in rows if "0.5" in found]
    series = [band("5–95 %", "0.05", "0.95"), band("25–75 %", "0.25", "0.75"), _series("Median", middle, {})]
    return with_series(figure, [*series, *extra], **changes) if rows else None


def _norms(run: Run) -> Figure | None:
    clips = column(run.metrics, "clip")
    levels = {value for _, value in clips}
    constant = next(iter(levels)) if len(levels) == 1 else None
    if not clips:
        constant = number(metrics.section(run.recipe, "privacy").get("clip"))
    extra = [_series("Clip", clips, {}, style=-1)] if len(levels) > 1 else []
    lines = ((f"clip {constant:g}", constant),) if constant is not None else ()
    found = _bands(run, "update_norm_quantiles", NORMS, extra, lines=lines)
    mean = _series("Mean norm", column(run.private, "update_norm_mean"), {})
    return found or (
        with_series(NORMS, [mean, *extra], lines=lines, note="Mean over the cohort, with the clip.") if mean.y else None
    )


def last_classes(run: Run) -> list[float | None]:
    """Return the accuracy by class at the last evaluation that recorded it; empty if none did."""
    for record in reversed(run.metrics):
        found = record.get("class_accuracy")
        if isinstance(found, Mapping):
            found = list(found.values())
        if isinstance(found, list) and found:
            return [number(value) for value in found]
    return []


def class_names(run: Run) -> list[str]:
    """Return the classes' names by the recipe or the run's preparation; empty where neither has names."""
    data = metrics.section(run.recipe, "data")
    listed = metrics.section(data, "categories").get(str(data.get("target"))) or metrics.preparation(run.path).get(
        "names"
    )
    return [{False: "no", True: "yes"}.get(name, str(name)) for name in listed] if isinstance(listed, list) else []


def class_bars(named: Sequence[tuple[str, Run | Group]], *, overlay: bool) -> Figure | None:
    """Return the accuracy by class at the last evaluation: one series per run, or per group (mean over its seeds)."""
    series = []
    for place, (label, item) in enumerate(named):
        rows = [row for row in map(last_classes, item.runs if isinstance(item, Group) else (item,)) if row]
        width = min(map(len, rows)) if rows else 0
        means = [spread(row[index] for row in rows) for index in range(width)]
        kept = [(float(index), found.mean) for index, found in enumerate(means) if found is not None]
        x = {"round": tuple(index for index, _ in kept)}
        style = item.style if isinstance(item, Group) else place
        series.append(Series(label, x, tuple(value for _, value in kept), style=style))
    figure = Figure("classes", "Accuracy by class", (), "%", "Last evaluation, public test data.", percent=True)
    runs = [run for _, item in named for run in (item.runs if isinstance(item, Group) else (item,))]
    every = {tuple(class_names(run)) for run in runs}
    names = every.pop() if len(every) == 1 else ()
    used = names if series and len(names) > max(max(one.x["round"], default=-1) for one in series) else ()
    return with_series(figure, series, kind="bars", x_title="class", zero=True, overlay=overlay, names=used)


MAX_OVERLAID = 3000
"""Points of all lines of an overlay together."""
FOLDED = -2
"""Style of a line that stands for several methods: in the text colour."""
Points = Callable[[Run], Sequence[tuple[int, float]]]


def figures_of_groups(groups: Sequence[Group]) -> list[Figure]:
    """Return overlays of several groups: means over seeds with bands of one standard deviation."""

    def public(key: str) -> Points:
        return lambda run: column(run.metrics, key)

    def private(key: str) -> Points:
        return lambda run: sizes(run.private, key)

    def lowest(run: Run) -> list[tuple[int, float]]:
        known = [(r.get("round"), quantiles(r, "client_accuracy_quantiles").get("0.05")) for r in run.private]
        return column([{"round": turn, "q": value} for turn, value in known], "q")

    about = "5 % quantile over clients."
    worst = Figure("spread", "Accuracy of the worst-off clients", (), "%", about, True, percent=True)
    mean_norm = Figure("norms", "Update norm before the clip", (), "L2", "Mean over the cohort.", True)
    alpha = Figure("alpha", "Mean clipping factor ᾱ", (), "", "α = min(1, clip/norm).", True, zero=True)
    tilde = Figure("alpha-spread", "Spread of the clipping factor α̃", (), "", "Mean distance from ᾱ.", True, zero=True)
    wanted: list[tuple[Figure, Points, bool]] = [
        (ACCURACY, public("test_accuracy"), True),
        (Figure("loss", "Test loss", (), note="Public test data."), public("test_loss"), True),
        (Figure("epsilon", "Privacy spent", (), "ε", "Proven ε so far.", zero=True), spent_from_start, False),
        (mean_norm, private("update_norm_mean"), False), (CLIPPED, private("clipped_fraction"), False),
        (SIGNAL, private("signal_to_noise"), False), (alpha, private("alpha_mean"), False),
        (tilde, private("alpha_spread"), False), (TRAIN, private("train_accuracy"), False),
        (PERSONAL, private("personal_accuracy"), False),
        (worst, lowest, False),
    ]  # fmt: skip
    found = [_overlay(figure, groups, points, by_epsilon) for figure, points, by_epsilon in wanted]
    found = [_folded(figure) if figure is not None and figure.key == "epsilon" else figure for figure in found]
    found.insert(3, class_bars([(group.label, group) for group in groups], overlay=True))
    return [figure for figure in (by_epsilon(groups), *found) if figure is not None]


def by_epsilon(groups: Sequence[Group]) -> Figure | None:
    """Return the final accuracy against the proven ε, a series for each method; None with fewer than two ε."""
    found: dict[str, list[tuple[float, Spread, int]]] = {}
    for group in groups:
        epsilon, final = final_epsilon(group), spread(map(metrics.final_accuracy, group.runs))
        if epsilon is not None and final is not None:
            found.setdefault(without_epsilon(group.label), []).append((epsilon, final, group.style))
    if len({f"{epsilon:.3g}" for points in found.values() for epsilon, _, _ in points}) < 2:
        return None
    series = []
    for (label, points), style in zip(found.items(), styles([label.partition(" ")[0] for label in found])):
        points.sort(key=lambda point: point[0])
        y = tuple(final.mean for _, final, _ in points)
        sds = [final.sd or 0.0 for _, final, _ in points]
        low = tuple(max(0.0, value - sd) for value, sd in zip(y, sds)) if any(sds) else ()
        high = tuple(min(1.0, value + sd) for value, sd in zip(y, sds)) if any(sds) else ()
        series.append(Series(label, {"round": tuple(epsilon for epsilon, _, _ in points)}, y, low, high, style))
    note = "Shared model, public test data; mean and standard deviation over seeds."
    lines = chance_line([run for group in groups for run in group.runs])
    return Figure(
        "by-epsilon", "Final accuracy by ε", tuple(series), "%", note, percent=True, lines=lines, kind="points",
        x_title="proven ε", zero=True, y_title="Test accuracy",
    )  # fmt: skip


def _overlay(figure: Figure, groups: Sequence[Group], points: Points, by_epsilon: bool) -> Figure | None:
    most = min(MAX_POINTS, max(100, MAX_OVERLAID // len(groups)))
    series = [_mean_series(group, points, by_epsilon, most, figure.percent) for group in groups]
    changes: dict[str, Any] = {"overlay": True}
    if figure.key == ACCURACY.key:
        changes["lines"] = chance_line([run for group in groups for run in group.runs])
    absent = [each.label for each in series if each.y and "epsilon" not in each.x]
    if by_epsilon and absent and len(absent) < len(series):
        # By ε only what has a proven ε can be drawn; the caption says who is missing.
        changes["note"] = f"{figure.note} Without a proven ε, so by round only: {', '.join(absent)}."
    return with_series(figure, series, **changes)


def _folded(figure: Figure) -> Figure:
    """Return the lines that are the same within calibration's error as one, which the note says."""
    kept: list[list[Series]] = []
    for series in figure.series:
        like = next((alike for alike in kept if _alike(alike[0], series)), None)
        kept.append([series]) if like is None else like.append(series)
    drawn = tuple(_one_for(alike) for alike in kept)
    said = [f"One line for {_listed([each.label for each in alike])}." for alike in kept if len(alike) > 1]
    return replace(figure, series=drawn, note=" ".join([figure.note, *said]))


def _one_for(alike: Sequence[Series]) -> Series:
    first = alike[0]
    return first if len(alike) == 1 else replace(first, label=f"{len(alike)} settings alike", style=FOLDED)


def _alike(one: Series, other: Series) -> bool:
    close = (math.isclose(a, b, rel_tol=SAME) for a, b in zip(one.y, other.y))
    return one.x["round"] == other.x["round"] and not one.low and not other.low and all(close)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])


def by_round(runs: Iterable[Sequence[tuple[int, float]]]) -> dict[int, list[float]]:
    """Return the values of several runs' points at each round, the rounds in order."""
    found: dict[int, list[float]] = {}
    for points in runs:
        for turn, value in points:
            found.setdefault(turn, []).append(value)
    return dict(sorted(found.items()))


def _mean_series(group: Group, points: Points, by_epsilon: bool, most: int, percent: bool = False) -> Series:
    values = by_round(map(points, group.runs))
    rounds = [[*values][place] for place in thin(len(values), most)]
    spreads = [each for turn in rounds if (each := spread(values[turn])) is not None]
    sds = [each.sd or 0.0 for each in spreads]
    x: dict[str, Values] = {"round": tuple(float(turn + 1) for turn in rounds)}
    # Seeds of one setting spend the same; where they do not, the largest is the one that holds for all.
    spent = {turn: max(each) for turn, each in by_round(map(metrics.spent, group.runs)).items()}
    if by_epsilon and rounds and all(turn in spent for turn in rounds):
        x["epsilon"] = tuple(spent[turn] for turn in rounds)
    banded = any(sds)
    # A share cannot be below 0 or above 100 %.
    least, highest = (0.0, 1.0) if percent else (-math.inf, math.inf)
    return Series(
        label=group.label, x=x, y=tuple(each.mean for each in spreads),
        low=tuple(max(least, each.mean - sd) for each, sd in zip(spreads, sds, strict=True)) if banded else (),
        high=tuple(min(highest, each.mean + sd) for each, sd in zip(spreads, sds, strict=True)) if banded else (),
        style=group.style,
    )  # fmt: skip
