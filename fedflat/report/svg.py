"""Draw a figure as inline SVG with the data behind it: no network, and readable without a script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from fedflat.report.figures import DOTS_FROM, Figure, Series, thin
from fedflat.report.finding import describe
from fedflat.report.pages import filled
from fedflat.report.styles import COLOURS, DASHES

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 46.0, 468.0, 14.0, 218.0
MOST_LABELS = 12
"""Lines whose ends are labelled at most: more would not stand below each other."""
LETTER, LINE_GAP = 6.9, 13.0
"""Room for a letter and between two labels, in the drawing's units."""
BAND_POINTS = 150
"""Points of a band's edge at most: about one for every three pixels."""
FEW_POINTS = 25
"""Points up to which each has a dot: with more, dots would touch."""
DECADES = 30
"""Ratio of the ends of an axis of points beyond which it is logarithmic."""
EDGE = 12
"""Room beside the first and the last point."""
AXIS_TITLES = {"round": "round", "epsilon": "ε spent"}


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels, linear or logarithmic, with its ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def nice_step(span: float, count: int) -> float:
    """The largest of 1, 2, 2.5, 5 × 10^k that cuts ``span`` into about ``count`` parts."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999)


def linear(low: float, high: float, start: float, end: float, count: int, *, snap: bool, whole: bool = False) -> Scale:
    """A linear scale; ``snap`` extends it to ticks, ``whole`` keeps its ticks whole numbers."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-9):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low - pad if low else 0.0), high + pad
    step = nice_step(high - low, count)
    if whole:
        step = max(1.0, math.ceil(step))
    if snap:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, start, end, False, tuple(place * step for place in range(first, last + 1)))


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """A logarithmic scale over whole decades (or 1-2-5 where it spans few)."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 2 else (1, 3) if last - first == 2 else (1, 2, 5)
    low, high = low / 1.08, high * 1.08
    every = max(1, math.ceil((last - first) / 6))
    ticks = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
    return Scale(low, high, start, end, True, tuple(tick for tick in ticks if low <= tick <= high))


def tick_text(value: float, percent: bool) -> str:
    """A short tick label: ``0``, ``0.25``, ``10k``, ``1e-5``."""
    value = 100 * value if percent else value
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}"


def _extent(figure: Figure) -> tuple[float, float]:
    values = [value for each in figure.series for part in (each.y, each.low, each.high) for value in part]
    values += [value for _, value in figure.lines]
    return min(values), max(values)


def _settled(figure: Figure, low: float, high: float) -> float:
    """The lowest value after a quarter of each line, where leaving out what is below makes room; otherwise ``low``."""
    if not figure.zoom:
        return low
    late = [value for each in figure.series for part in (each.y, each.low) for value in part[len(part) // 4 :]]
    return min(late) if high - min(late) < 0.6 * (high - low) else low


def cut(figure: Figure) -> str:
    """A sentence where the axis starts above a line's first values; empty where it shows them all."""
    start = _y_scale(figure).low
    if not figure.zoom or start <= _extent(figure)[0] + 1e-12:
        return ""
    return f"The axis starts at {tick_text(start, figure.percent)} %."


def _y_scale(figure: Figure) -> Scale:
    low, high = _extent(figure)
    low = max(low, _settled(figure, low, high))
    if low > 0 and high / low > 60 and not figure.percent:
        return logarithmic(low, high, BOTTOM, TOP)
    if figure.zero:
        low, high = min(0.0, low), max(0.0, high)
    scale = linear(low, high, BOTTOM, TOP, 5, snap=True)
    if figure.percent and scale.high > 1.0 >= high:
        return linear(scale.low, 1.0, BOTTOM, TOP, 5, snap=False)
    return scale


def _x_scale(figure: Figure, axis: str, end: float = RIGHT) -> Scale:
    values = [value for each in figure.over(axis) for value in each.x[axis]]
    if figure.kind == "bars":
        count = max(values) + 1
        step = max(1, math.ceil(count / 12))
        return Scale(-0.6, count - 0.4, LEFT, RIGHT, False, tuple(float(x) for x in range(0, int(count), step)))
    low, high = min(values), max(values)
    if figure.kind == "points":
        if low > 0 and high / low > DECADES:
            return logarithmic(low, high, LEFT + EDGE, end - EDGE)
        return linear(low, high, LEFT + EDGE, end - EDGE, 6, snap=False)
    rounds = axis == "round" and figure.x_title == "round"
    if axis == "epsilon" or rounds:
        low = 0.0
    whole = axis == "round" and all(value == int(value) for value in values)
    return linear(low, high, LEFT, end, 6, snap=False, whole=whole)


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Relative steps in tenths of a pixel, taken between rounded points so that no error adds up."""
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    steps = (f"{(b[0] - a[0]) / 10:g},{(b[1] - a[1]) / 10:g}" for a, b in pairwise(tenths))
    return f"M{tenths[0][0] / 10:g},{tenths[0][1] / 10:g}l" + " ".join(steps)


def _classes(series: Series) -> str:
    if series.style < 0:
        return f"ink g{series.style}"
    return f"c{series.style % COLOURS} d{series.style % DASHES} g{series.style}"


class Mark(NamedTuple):
    """An element of the drawing: its name, its classes, its other attributes."""

    tag: str
    kind: str
    places: dict[str, str]


def _line(series: Series, axis: str, x: Scale, y: Scale) -> Iterable[Mark]:
    across, classes = [x(value) for value in series.x[axis]], _classes(series)
    if series.low:
        places = thin(len(across), BAND_POINTS)
        edge = [(across[place], min(y(series.low[place]), BOTTOM)) for place in places]
        back = [(across[place], min(y(series.high[place]), BOTTOM)) for place in reversed(places)]
        band = "sd" if series.y else _band(series)
        yield Mark("path", f"band {band} {classes}", {"d": f"{_path(edge + back)}Z"})
    points = list(zip(across, map(y, series.y))) if series.y else []
    if len(points) > 1:
        yield Mark("path", f"line {classes}", {"d": "".join(map(_path, _above(points)))})
    if len(points) <= FEW_POINTS:
        yield from (_dot(classes, a, b) for a, b in points if b <= BOTTOM)


def _above(points: Sequence[tuple[float, float]]) -> Iterable[list[tuple[float, float]]]:
    """The parts of a line that are not below the axis, each to where it crosses it."""
    part: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= BOTTOM:
            part.append((x0, y0))
        if (y0 <= BOTTOM) != (y1 <= BOTTOM):
            part.append((x0 + (BOTTOM - y0) / (y1 - y0) * (x1 - x0), BOTTOM))
            if y1 > BOTTOM:
                yield part
                part = []
    if points[-1][1] <= BOTTOM:
        part.append(points[-1])
    if part:
        yield part


def _band(series: Series) -> str:
    return "q5" if series.label.startswith("5") else "q25"


def _dot(classes: str, x: float, y: float) -> Mark:
    return Mark("circle", f"dot {classes}", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "2.6"})


def _bars(figure: Figure, x: Scale, y: Scale) -> Iterable[Mark]:
    count, slot = len(figure.series), (x(1) - x(0)) * 0.8
    for place, series in enumerate(figure.series):
        classes = _classes(series)
        for index, value in zip(series.x["round"], series.y, strict=True):
            if count > DOTS_FROM:
                yield _dot(classes, x(index) + slot * 0.8 * ((place + 0.5) / count - 0.5), y(value))
                continue
            sides = {
                "x": x(index) - slot / 2 + place * slot / count,
                "y": y(value),
                "width": max(1.0, slot / count - 0.8),
                "height": max(0.0, BOTTOM - y(value)),
            }
            yield Mark("rect", f"bar {classes}", {name: f"{side:.1f}" for name, side in sides.items()})
            if series.low:
                middle = sides["x"] + sides["width"] / 2
                at = series.x["round"].index(index)
                yield _whisker("ink", middle, y(series.low[at]), y(series.high[at]))


def _points(figure: Figure, x: Scale, y: Scale) -> Iterable[Mark]:
    """Points with whiskers, methods side by side where they share a place."""
    for place, series in enumerate(figure.series):
        aside = 4 * (place - (len(figure.series) - 1) / 2)
        classes = _classes(series)
        for index, value in enumerate(series.y):
            across = x(series.x["round"][index]) + aside
            if series.low:
                yield _whisker(classes, across, y(series.low[index]), y(series.high[index]))
            yield _dot(classes, across, y(value))


def _whisker(classes: str, across: float, low: float, high: float) -> Mark:
    return Mark("path", f"whisker {classes}", {"d": f"M{across:.1f},{low:.1f}V{high:.1f}"})


class Label(NamedTuple):
    """A line's name beside its end: its text, its classes, and where."""

    text: str
    kind: str
    y: float


def end_labels(figure: Figure, axis: str, y: Scale) -> list[Label]:
    """The names of an overlay's lines at the heights where they end, moved apart; none where they are too many."""
    lines = [series for series in figure.over(axis) if series.y and y(series.y[-1]) <= BOTTOM]
    if not figure.overlay or figure.kind == "bars" or not 1 <= len(lines) <= MOST_LABELS:
        return []
    ends = sorted((y(series.y[-1]) + 4, place) for place, series in enumerate(lines))
    heights: list[float] = []
    for wanted, _ in ends:
        heights.append(max(wanted, heights[-1] + LINE_GAP) if heights else max(wanted, TOP))
    most = BOTTOM
    for place in reversed(range(len(heights))):  # back up from the axis
        heights[place] = min(heights[place], most)
        most = heights[place] - LINE_GAP
    named = [lines[place] for _, place in ends]
    return [Label(_short(each.label), _classes(each), at) for each, at in zip(named, heights, strict=True)]


def _short(label: str, most: int = 20) -> str:
    return label if len(label) <= most else label[: most // 2] + "…" + label[-(most - most // 2 - 1) :]


def draw(figure: Figure, axis: str) -> Markup:
    """The figure over one of its axes as an ``<svg>`` element, titled and described for screen readers."""
    y = _y_scale(figure)
    labels = end_labels(figure, axis, y)
    end = RIGHT - LETTER * max((len(label.text) for label in labels), default=0)
    x = _x_scale(figure, axis, end)
    if figure.kind == "line":
        marks: Iterable[Mark] = (mark for series in figure.over(axis) for mark in _line(series, axis, x, y))
    else:
        marks = (_bars if figure.kind == "bars" else _points)(figure, x, y)
    limits = {
        "data-x0": x.low,
        "data-x1": x.high,
        "data-y0": y.low,
        "data-y1": y.high,
        "data-left": x.start,
        "data-right": x.end,
    }
    return filled(
        "drawing.svg",
        axis=axis,
        x=x,
        y=y,
        left=LEFT,
        right=RIGHT,
        width=WIDTH,
        height=HEIGHT,
        name=f"{figure.key}-{axis}",
        title=figure.title + (f", {figure.unit}" if figure.unit else ""),
        by=figure.x_title if axis == "round" else AXIS_TITLES[axis],
        words=describe(figure),
        percent=figure.percent,
        limits={name: f"{value:.7g}" for name, value in limits.items()},
        tick_text=tick_text,
        names=figure.names,
        marks=marks,
        lines=figure.lines,
        labels=labels,
    )


def _numbers(values: Sequence[float], digits: int = 8) -> list[float]:
    """Few significant digits, whole numbers without a point: short, and still rounded only once when shown."""
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in rounded]


def data(figure: Figure) -> dict[str, Any]:
    """The figure's numbers for the page's script; an abscissa equal to the first series' is left out."""
    first = figure.series[0].x
    listed = []
    for series in figure.series:
        item: dict[str, object] = {"label": series.label, "style": series.style}
        if series is figure.series[0] or series.x != first:
            item["x"] = {axis: _numbers(values) for axis, values in series.x.items()}
        if series.y:
            item["y"] = _numbers(series.y)
        if series.low and series.y and figure.kind == "line":
            item["sd"] = _numbers([high - value for high, value in zip(series.high, series.y, strict=True)], 3)
        elif series.low:
            item |= {"low": _numbers(series.low, 5), "high": _numbers(series.high, 5)}
        listed.append(item)
    return {
        "title": figure.title,
        "unit": figure.unit,
        "percent": figure.percent,
        "names": list(figure.names),
        "axes": {"round": figure.x_title, "epsilon": AXIS_TITLES["epsilon"]},
        "lines": [[label, value] for label, value in figure.lines],
        "series": listed,
    }


SWATCH = Markup('<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><{} class="{} {}" {}/></svg>')


def swatch(series: Series) -> Markup:
    """A small sample of the series' line or band for a legend."""
    if series.low and not series.y:
        band = Markup('y="1" width="26" height="8"')
        return SWATCH.format("rect", f"band {_band(series)}", _classes(series), band)
    return SWATCH.format("path", "line", _classes(series), Markup('d="M0,5H26"'))
