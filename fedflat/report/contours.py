"""Level lines of a surface on a square grid, and their drawing as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from contourpy import LineType, contour_generator
from markupsafe import Markup

from fedflat.report.pages import filled
from fedflat.report.styles import COLOURS, DASHES

Values = Sequence[Sequence[float]]

SIDE, LEFT, TOP = 240, 34, 8
LABELLED = 60
"""Length from which an overlaid line has its loss written on it: shorter ones crowd in the corners."""
RAMPS = (
    ((68, 1, 84), (62, 60, 140), (28, 105, 145), (15, 130, 100), (95, 140, 20)),
    ((150, 110, 215), (95, 150, 225), (50, 185, 175), (120, 215, 110), (253, 231, 37)),
)
"""Low to high on light and on dark paper: viridis' hues, their lightness rising so that they read without colour, each
at least 3 : 1 against the paper."""


def levels(low: float, high: float, count: int = 9) -> list[float]:
    """``count`` levels in geometric steps strictly inside (low, high), to two or three digits; none if it is flat."""
    if not (0 < low < high) or high / low < 1.0005:
        return []
    ratio = (high / low) ** (1 / (count + 1))
    digits = 2 if ratio > 1.1 else 4
    found = {float(f"{low * ratio**place:.{digits}g}") for place in range(1, count + 1)}
    return sorted(level for level in found if low < level < high)


def colours(level: float, low: float, high: float) -> tuple[str, str]:
    """Both ramps at a level of a surface between ``low`` and ``high``, by its logarithm."""
    share = math.log(level / low) / math.log(high / low) if high > low > 0 else 0.0
    light, dark = (_mixed(ramp, min(max(share, 0.0), 1.0) * (len(ramp) - 1)) for ramp in RAMPS)
    return light, dark


def _mixed(ramp: Sequence[tuple[int, int, int]], place: float) -> str:
    start = min(int(place), len(ramp) - 2)
    mixed = (round(a + (place - start) * (b - a)) for a, b in zip(ramp[start], ramp[start + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def draw(values: Values, steps: Sequence[float], lines: Sequence[float], low: float, high: float, title: str) -> Markup:
    """The level lines ``lines`` of a surface as an ``<svg>``; ``low`` and ``high`` are the ends of the colour scale."""
    paths = (("".join(map(_path, found)), level) for level, found in _traced(values, lines))
    return filled(
        "contours.svg",
        title=title,
        side=SIDE,
        left=LEFT,
        top=TOP,
        ends=(steps[0], 0.0, steps[-1]),
        lines=[(f"{level:g}", *colours(level, low, high), path) for path, level in paths if path],
    )


def overlay(surfaces: Sequence[tuple[str, int, Values]], steps: Sequence[float], lines: Sequence[float]) -> Markup:
    """The level lines of several surfaces, given name and style, in one square, each with its loss on it."""
    drawn = []
    for place, (name, number, values) in enumerate(surfaces):
        for level, found in _traced(values, lines):
            if found:
                longest = max(found, key=len)
                y, x = longest[(place + 1) * len(longest) // (len(surfaces) + 1)]  # labels of two surfaces stay apart
                style = f"c{number % COLOURS} d{number % DASHES}"
                long = float(np.hypot(*np.diff(longest, axis=0).T).sum()) > LABELLED
                drawn.append((style, name, f"{level:g}", "".join(map(_path, found)), float(x), float(y), long))
    title = "Contours of the loss: " + ", ".join(name for name, *_ in surfaces)
    ends = (steps[0], 0.0, steps[-1])
    return filled("overlaid.svg", title=title, side=SIDE, left=LEFT, top=TOP, ends=ends, lines=drawn)


def _traced(values: Values, lines: Sequence[float]) -> list[tuple[float, list[np.ndarray]]]:
    """Each level's lines as points (y, x) in the square."""
    cell = SIDE / (len(values) - 1)
    # Row (first direction) runs to the right, column (second direction) upwards.
    right, up = ([start + sign * cell * k for k in range(len(values))] for start, sign in ((LEFT, 1), (TOP + SIDE, -1)))
    traced = contour_generator(up, right, values, line_type=LineType.Separate)
    return [(level, cast("list[np.ndarray]", traced.lines(level))) for level in lines]


def _path(line: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for y, x in line)
