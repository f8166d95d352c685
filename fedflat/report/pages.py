"""Fill pages from templates, and draw their figures as inline SVG with a description in words.

Templates escape whatever is put into them; no page refers to a network.
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from fedflat.core import becoming, durable, wrong
from fedflat.report.figures import DOTS_FROM, Figure, Series, thin
from fedflat.report.wording import asset, environment, filled, measured, shortened

PRIVATE = "Private to the simulation, not covered by the guarantee"


class Section(NamedTuple):
    """A section of a page. part: the macro of ``parts.html`` that shows ``content``; one without is left out."""

    key: str
    heading: str
    part: str
    content: Any


@dataclass(frozen=True)
class Table:
    """A table; the first column heads its rows. left: columns with their text on the left, from the first."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


Facts = dict[str, Any]
"""Names and their values, in order. A value is a text, a list of values, or Facts."""


def page(
    title: str, lead: str, sections: Sequence[Section], version: str, extra: str = "", data: Sequence[Any] = (),
    mark: str = "",
) -> str:  # fmt: skip
    """Return a page as text. extra: name of a style sheet and a script that it has besides ``page.css`` and
    ``page.js``. data: what it shows of each run's guarantee, embedded as JSON for programs. mark: words across it."""
    style, script = ("".join(asset(f"{name}.{kind}") for name in ("page", extra) if name) for kind in ("css", "js"))
    return filled(
        "page.html", title=title, lead=lead, sections=[section for section in sections if section.content],
        style=Markup(style), script=Markup(script), script_hash=digest(script), version=version, data=list(data),
        mark=mark,
    )  # fmt: skip


def cards(figures: Sequence[Figure], note: str = "", chips: Sequence[Series] = ()) -> dict[str, Any] | None:
    """Return the figures of a section for the macro ``cards``; None without any.

    note: what is said of them all, as private. chips: the series that a reader may hide in every figure.
    """
    return {"figures": figures, "note": note, "chips": chips} if figures else None


def digest(script: str) -> str:
    """Return what a page's policy calls a script by."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write(text: str, target: Path, mode: int = 0o644) -> Path:
    """Write a page to the file ``target``, replaced in one step."""
    denied = f"{target}, which cannot be written"
    with becoming(lambda error: wrong("--out", f"{denied} ({error.strerror})", "another file"), PermissionError):
        durable.replace(target, text, mode)
    return target


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
RANGE = 60
"""The same for the values of a figure."""
EDGE = 12
"""Room beside the first and the last point."""


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
    """Return the largest of 1, 2, 2.5, 5 × 10^k that cuts ``span`` into about ``count`` parts."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999)


def linear(low: float, high: float, start: float, end: float, count: int, *, snap: bool, whole: bool = False) -> Scale:
    """Return a linear scale; ``snap`` extends it to ticks, ``whole`` keeps its ticks whole numbers."""
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
    """Return a logarithmic scale over whole decades (or 1-2-5 where it spans few)."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 2 else (1, 3) if last - first == 2 else (1, 2, 5)
    low, high = low / 1.08, high * 1.08
    every = max(1, math.ceil((last - first) / 6))
    ticks = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
    return Scale(low, high, start, end, True, tuple(tick for tick in ticks if low <= tick <= high))


def tick_text(value: float, percent: bool) -> str:
    """Return a short tick label: ``0``, ``0.25``, ``10000``, ``1e-05``."""
    return f"{100 * value if percent else value:g}"


def y_scale(figure: Figure) -> Scale:
    """Return the axis of a figure's values, logarithmic where they are no shares and span much."""
    values = [value for line in figure.series for part in (line.y, line.low, line.high) for value in part]
    values += [value for _, value in figure.lines]
    low, high = min(values), max(values)
    if low > 0 and high / low > RANGE and not figure.percent:
        return logarithmic(low, high, BOTTOM, TOP)
    # An axis that began elsewhere would make a small step look like a climb.
    if figure.zero or (figure.percent and low >= 0):
        low, high = min(0.0, low), max(0.0, high)
    scale = linear(low, high, BOTTOM, TOP, 5, snap=True)
    if figure.percent and scale.high > 1.0 >= high:
        return linear(scale.low, 1.0, BOTTOM, TOP, 5, snap=False)
    return scale


def x_scale(figure: Figure, axis: str, end: float = RIGHT) -> Scale:
    """Return the axis of a figure's rounds, ε or places."""
    values = [value for line in figure.over(axis) for value in line.x[axis]]
    if figure.kind == "bars":
        count = max(values) + 1
        step = max(1, math.ceil(count / 12))
        return Scale(-0.6, count - 0.4, LEFT, RIGHT, False, tuple(float(x) for x in range(0, int(count), step)))
    low, high = min(values), max(values)
    if figure.kind == "points":
        if low > 0 and high / low > DECADES:
            return logarithmic(low, high, LEFT + EDGE, end - EDGE)
        return linear(low, high, LEFT + EDGE, end - EDGE, 6, snap=False)
    if axis == "epsilon" or figure.x_title == "round":
        low = 0.0
    whole = axis == "round" and all(value == int(value) for value in values)
    return linear(low, high, LEFT, end, 6, snap=False, whole=whole)


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Return the relative steps in tenths of a pixel, taken between rounded points so that no error adds up."""
    # Steps are taken between rounded points, so that their rounding errors do not add up.
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    steps = (f"{(b[0] - a[0]) / 10:g},{(b[1] - a[1]) / 10:g}" for a, b in pairwise(tenths))
    return f"M{tenths[0][0] / 10:g},{tenths[0][1] / 10:g}l" + " ".join(steps)


class Label(NamedTuple):
    """A line's name beside its end: its text, its classes, and where."""

    text: str
    kind: str
    y: float


def end_labels(figure: Figure, axis: str, y: Scale) -> list[Label]:
    """Return the names of an overlay's lines at the heights where they end, moved apart; none where they are too
    many."""
    lines = [series for series in figure.over(axis) if series.y]
    if not figure.overlay or figure.kind == "bars" or not 1 <= len(lines) <= MOST_LABELS:
        return []
    at, labels = TOP - LINE_GAP, list[Label]()
    for place, line in enumerate(sorted(lines, key=lambda line: y(line.y[-1])), start=1):
        at = max(y(line.y[-1]) + 4, at + LINE_GAP)
        # Labels pushed below the axis are moved up again.
        lowest = BOTTOM - LINE_GAP * (len(lines) - place)
        labels.append(Label(shortened(line.label), line.classes, min(at, lowest)))
    return labels


def draw(figure: Figure, axis: str) -> Markup:
    """Return the figure over one of its axes as an ``<svg>`` element, titled and described for screen readers."""
    y = y_scale(figure)
    labels = end_labels(figure, axis, y)
    x = x_scale(figure, axis, RIGHT - LETTER * max((len(label.text) for label in labels), default=0))

    def corners_of(series: Series) -> list[tuple[float, float]]:
        return [(x(across), y(value)) for across, value in zip(series.x[axis], series.y)]

    def edge_of(series: Series) -> list[tuple[float, float]]:
        """Return a band's outline: its lower edge, and its upper one on the way back."""
        across, places = series.x[axis], thin(len(series.low), BAND_POINTS)
        low = [(x(across[place]), y(series.low[place])) for place in places]
        return low + [(x(across[place]), y(series.high[place])) for place in reversed(places)]

    return filled(
        "drawing.svg", figure=figure, axis=axis, words=describe(figure), x=x, y=y, labels=labels, left=LEFT,
        right=RIGHT, width=WIDTH, height=HEIGHT, few=FEW_POINTS, dots_from=DOTS_FROM, path=_path,
        corners_of=corners_of, edge_of=edge_of, tick_text=tick_text,
    )  # fmt: skip


def _numbers(values: Sequence[float], digits: int = 8) -> list[float]:
    """Return few significant digits, whole numbers without a point: short, and still rounded only once when shown."""
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in rounded]


def numbers(figure: Figure) -> dict[str, Any]:
    """Return the figure's numbers for the page's script; an abscissa equal to the first series' is left out."""
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
        "title": figure.title, "unit": figure.unit, "percent": figure.percent, "names": list(figure.names),
        "axes": {"round": figure.x_title, "epsilon": "ε spent"},
        "lines": [[label, value] for label, value in figure.lines], "series": listed,
    }  # fmt: skip


def describe(figure: Figure) -> str:
    """Return where each line ends, or the mean of its bars, the highest first; then the lines drawn across."""
    bars = figure.kind == "bars"
    ends = [(sum(line.y) / len(line.y) if bars else line.y[-1], line.label) for line in figure.series if line.y]
    listed = ", ".join(f"{label} {value_text(figure, at)}" for at, label in sorted(ends, key=lambda end: -end[0]))
    head = ("Mean over all" if bars else "In the end") + (", highest first" if len(ends) > 1 else "")
    sentences = [f"{head}: {listed}."] if ends else []
    sentences += [f"{label[:1].upper()}{label[1:]}: drawn at {value_text(figure, at)}." for label, at in figure.lines]
    return " ".join(sentences)


def value_text(figure: Figure, value: float) -> str:
    """Return a value as this figure's readers know it."""
    return f"{100 * value:.2f} %" if figure.percent else measured(value)


environment().globals |= {"draw": draw, "numbers": numbers, "PRIVATE": PRIVATE}
