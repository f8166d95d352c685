"""What the figures of a run's report show: values only; ``svg`` draws them.

Each shows its series by round (and, where an ε is proven, by ε spent). The axis counts rounds that are finished: 0 is
before training, and what round r of the records released stands at r + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedflat.report import metrics
from fedflat.report.groups import Group, spread
from fedflat.report.metrics import Run, column, number
from fedflat.report.styles import dashed, style_of

MAX_POINTS = 600  # beyond that a line shows every second, third … round
DOTS_FROM = 3  # series of bars up to which each is a bar from zero: more are dots, on an axis of their range
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


@dataclass(frozen=True)
class Figure:
    """One figure: its series share a unit and an axis. ``private`` marks what no guarantee covers; with ``zoom`` the
    axis may leave out how the first rounds rose.

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
    zoom: bool = field(default=False, kw_only=True)

    @property
    def axes(self) -> tuple[str, ...]:
        """The abscissae that this figure can be drawn over."""
        return tuple(axis for axis in ("round", "epsilon") if self.over(axis))

    def over(self, axis: str) -> tuple[Series, ...]:
        """The series that have this abscissa."""
        return tuple(each for each in self.series if axis in each.x)


def thin(count: int, most: int = MAX_POINTS) -> list[int]:
    """Places of about ``most`` of ``count`` points: evenly spaced, the last one always among them."""
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
    """Every figure the run has records for; an absent key leaves its figure out."""
    found = [
        _accuracy(run),
        _simple(
            run.metrics, "test_loss", Figure("loss", "Test loss", (), note="Public test data."), metrics.spent(run)
        ),
        *[_measured(run, key) for key in metrics.own_metrics(run.metrics)],
        _privacy(run),
        _clip(run),
        class_bars([(metrics.section(run.recipe, "algorithm").get("name", "") or run.name, run)], overlay=False),
        _norms(run),
        _simple(run.private, "clipped_fraction", CLIPPED),
        _simple(run.private, "signal_to_noise", SIGNAL),
        _alphas(run),
        _errors(run),
        _simple(run.private, "train_accuracy", TRAIN),
        _simple(run.private, "train_loss", Figure("train-loss", "Training loss", (), note=TRAIN.note, private=True)),
        _simple(run.private, "personal_accuracy", PERSONAL),
        _bands(run, "client_accuracy_quantiles", SPREAD),
        _simple(run.private, "cohort", COHORT),
    ]
    own = style_of(run.algorithm)
    return [_styled(figure, own) for figure in found if figure is not None]


def _styled(figure: Figure, own: int) -> Figure:
    """The figure in the method's colour; a second line has its next dash."""
    series = [each if each.style < 0 else replace(each, style=dashed(own, each.style)) for each in figure.series]
    return replace(figure, series=tuple(series))


CLIPPED = Figure(
    "clipped", "Clipped share", (), "%", "Share of updates with a norm above the clip.", True, percent=True, zero=True
)
SIGNAL = Figure(
    "signal", "Signal to noise", (), "", "Norm of the clipped mean over the norm of its noise.", True, zero=True
)
TRAIN = Figure(
    "train-accuracy", "Training accuracy", (), "%", "Mean over the round's cohort.", True, percent=True, zoom=True
)
PERSONAL = Figure(
    "personal",
    "Personal accuracy",
    (),
    "%",
    "Mean over clients, each its own model and held-back data.",
    True,
    percent=True,
    zoom=True,
)
ACCURACY = Figure("accuracy", "Test accuracy", (), "%", "Shared model, public test data.", percent=True, zoom=True)
SPREAD = Figure("spread", "Accuracy by client", (), "%", "Quantiles over clients.", True, percent=True)
COHORT = Figure("cohort", "Cohort size", (), "clients", "Clients that took part; the draw is secret.", True, zero=True)
NORMS = Figure("norms", "Update norm before the clip", (), "L2", "Quantiles over the cohort, with the clip.", True)


def with_series(figure: Figure, series: Sequence[Series], **changes: Any) -> Figure | None:
    kept = tuple(each for each in series if each.y or each.low)
    return replace(figure, series=kept, **changes) if kept else None


def _simple(
    records: Sequence[Mapping[str, Any]], key: str, figure: Figure, spent: Sequence[tuple[int, float]] = ()
) -> Figure | None:
    return with_series(figure, [_series(figure.title, sizes(records, key), dict(spent))])


def sizes(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """``column``, with a list (a cohort given by its members) counted."""
    counted = [{**record, key: len(record[key])} if isinstance(record.get(key), list) else record for record in records]
    return column(counted, key)


def _accuracy(run: Run) -> Figure | None:
    return with_series(
        ACCURACY, [_series("Test accuracy", column(run.metrics, "test_accuracy"), dict(metrics.spent(run)))]
    )


def _measured(run: Run, key: str) -> Figure | None:
    title = key.replace("_", " ").capitalize()
    return _simple(run.metrics, key, Figure(key, title, (), note="Public test data."), metrics.spent(run))


def _privacy(run: Run) -> Figure | None:
    privacy = metrics.section(run.recipe, "privacy")
    budget = number(privacy.get("epsilon") or privacy.get("budget"))
    lines = (("budget", budget),) if budget is not None else ()
    figure = Figure(
        "epsilon", "Privacy spent", (), "ε", "Proven ε of everything released so far.", lines=lines, zero=True
    )
    return with_series(figure, [_series("ε spent", spent_from_start(run), {})])


def spent_from_start(run: Run) -> list[tuple[int, float]]:
    """(round, proven ε so far), with nothing spent before round 0; empty where no ε is proven."""
    found = metrics.spent(run)
    return [(-1, 0.0), *found] if found else []


def _clip(run: Run) -> Figure | None:
    points = column(run.metrics, "clip")
    if len({value for _, value in points}) < 2:
        return None
    figure = Figure("clip", "Clipping threshold", (), "L2", "Adapted privately; part of what is released.")
    return with_series(figure, [_series("Clip", points, {})])


def quantiles(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """A record's quantiles by name (``0.05`` … ``0.95``, ``min``, ``max``); empty where it has none."""
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


def _alphas(run: Run) -> Figure | None:
    figure = Figure(
        "alpha", "Clipping factors ᾱ and α̃", (), "", "α = min(1, clip/norm): mean, and mean distance from it.", True
    )
    pairs = [("ᾱ mean", "alpha_mean"), ("α̃ spread", "alpha_spread")]
    return with_series(
        figure,
        [_series(label, column(run.private, key), {}, place) for place, (label, key) in enumerate(pairs)],
        zero=True,
    )


def _errors(run: Run) -> Figure | None:
    note = "Norms of what the clip took from the round's sum (at most) and of what the noise added to it."
    figure = Figure("errors", "Clip bias and noise", (), "L2", note, True)
    pairs = [("Clip bias, at most", "clip_bias"), ("Noise", "noise_norm")]
    return with_series(
        figure, [_series(label, column(run.private, key), {}, place) for place, (label, key) in enumerate(pairs)]
    )


def last_classes(run: Run) -> list[float | None]:
    """Accuracy by class at the last evaluation that recorded it; empty if none did."""
    for record in reversed(run.metrics):
        found = record.get("class_accuracy")
        if isinstance(found, Mapping):
            found = list(found.values())
        if isinstance(found, list) and found:
            return [number(value) for value in found]
    return []


def class_bars(named: Sequence[tuple[str, Run | Group]], *, overlay: bool) -> Figure | None:
    """Accuracy by class at the last evaluation: one series per run, or per group (mean over its seeds)."""
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
    return with_series(figure, series, kind="bars", x_title="class", zero=len(series) <= DOTS_FROM, overlay=overlay)
