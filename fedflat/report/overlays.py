"""What the figures of a comparison show: each group's mean over its seeds, with a band of one standard deviation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fedflat.report import metrics
from fedflat.report.figures import (
    ACCURACY,
    CLIPPED,
    MAX_POINTS,
    PERSONAL,
    SIGNAL,
    TRAIN,
    Figure,
    Series,
    Values,
    class_bars,
    quantiles,
    sizes,
    spent_from_start,
    thin,
    with_series,
)
from fedflat.report.groups import Group, spread
from fedflat.report.metrics import Run, column

MAX_OVERLAID = 3000  # points of all lines of an overlay together
SAME = 1e-3  # relative: privacy curves closer than this are one curve (calibration stops at about 1e-4)
FOLDED = -2  # style of a line that stands for several methods: in the text colour
Points = Callable[[Run], Sequence[tuple[int, float]]]


def figures_of_groups(groups: Sequence[Group]) -> list[Figure]:
    """Overlays of several groups: means over seeds with bands of one standard deviation."""

    def public(key: str) -> Points:
        return lambda run: column(run.metrics, key)

    def private(key: str) -> Points:
        return lambda run: sizes(run.private, key)

    def quantile(key: str, name: str) -> Points:
        def points(run: Run) -> list[tuple[int, float]]:
            picked = [{"round": record.get("round"), "q": quantiles(record, key).get(name)} for record in run.private]
            return column(picked, "q")

        return points

    worst = Figure(
        "spread", "Accuracy of the worst-off clients", (), "%", "5 % quantile over clients.", True, percent=True
    )
    mean_norm = Figure("norms", "Update norm before the clip", (), "L2", "Mean over the cohort.", True)
    alpha = Figure("alpha", "Mean clipping factor ᾱ", (), "", "α = min(1, clip/norm).", True, zero=True)
    tilde = Figure("alpha-spread", "Spread of the clipping factor α̃", (), "", "Mean distance from ᾱ.", True, zero=True)
    wanted: list[tuple[Figure, Points, bool]] = [
        (ACCURACY, public("test_accuracy"), True),
        (Figure("loss", "Test loss", (), note="Public test data."), public("test_loss"), True),
        (Figure("epsilon", "Privacy spent", (), "ε", "Proven ε so far.", zero=True), spent_from_start, False),
        (mean_norm, private("update_norm_mean"), False),
        (CLIPPED, private("clipped_fraction"), False),
        (SIGNAL, private("signal_to_noise"), False),
        (alpha, private("alpha_mean"), False),
        (tilde, private("alpha_spread"), False),
        (TRAIN, private("train_accuracy"), False),
        (PERSONAL, private("personal_accuracy"), False),
        (worst, quantile("client_accuracy_quantiles", "0.05"), False),
    ]
    found = [_overlay(figure, groups, points, by_epsilon) for figure, points, by_epsilon in wanted]
    found = [_folded(figure) if figure is not None and figure.key == "epsilon" else figure for figure in found]
    classes = class_bars([(group.label, group) for group in groups], overlay=True)
    found.insert(3, classes)
    return [figure for figure in found if figure is not None]


def _overlay(figure: Figure, groups: Sequence[Group], points: Points, by_epsilon: bool) -> Figure | None:
    most = min(MAX_POINTS, max(100, MAX_OVERLAID // len(groups)))
    series = [_mean_series(group, points, by_epsilon, most, figure.percent) for group in groups]
    changes: dict[str, Any] = {"overlay": True}
    absent = [each.label for each in series if each.y and "epsilon" not in each.x]
    if by_epsilon and absent and len(absent) < len(series):
        # By ε only what has a proven ε can be drawn; the caption says who is missing.
        changes["note"] = f"{figure.note} Without a proven ε, so by round only: {', '.join(absent)}."
    return with_series(figure, series, **changes)


def _folded(figure: Figure) -> Figure:
    """Lines that are the same within calibration's error as one, which the note says."""
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


def _mean_series(group: Group, points: Points, by_epsilon: bool, most: int, percent: bool = False) -> Series:
    by_round: dict[int, list[float]] = {}
    for run in group.runs:
        for turn, value in points(run):
            by_round.setdefault(turn, []).append(value)
    rounds = sorted(by_round)
    rounds = [rounds[place] for place in thin(len(rounds), most)]
    found = [spread(by_round[turn]) for turn in rounds]
    spreads = [each for each in found if each is not None]
    sds = [each.sd or 0.0 for each in spreads]
    x: dict[str, Values] = {"round": tuple(float(turn + 1) for turn in rounds)}
    # Seeds of one setting spend the same; where they do not, the largest is the one that holds for all.
    spent: dict[int, float] = {}
    for run in group.runs:
        for turn, value in metrics.spent(run):
            spent[turn] = max(value, spent.get(turn, 0.0))
    if by_epsilon and rounds and all(turn in spent for turn in rounds):
        x["epsilon"] = tuple(spent[turn] for turn in rounds)
    banded = any(sds)
    least, highest = (0.0, 1.0) if percent else (-math.inf, math.inf)  # no share is below 0 or above 100 %
    return Series(
        label=group.label,
        x=x,
        y=tuple(each.mean for each in spreads),
        low=tuple(max(least, each.mean - sd) for each, sd in zip(spreads, sds, strict=True)) if banded else (),
        high=tuple(min(highest, each.mean + sd) for each, sd in zip(spreads, sds, strict=True)) if banded else (),
        style=group.style,
    )
