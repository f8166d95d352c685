"""Level lines of a surface on a square grid, and their drawing as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Values = Sequence[Sequence[float]]
Point = tuple[float, float]

SIDE, LEFT, TOP = 240.0, 34.0, 8.0
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis at five places: low to high in lightness too, so that it reads without colour."""


def levels(low: float, high: float, count: int = 9) -> list[float]:
    """``count`` levels in geometric steps strictly inside (low, high), to two or three digits; none if it is flat."""
    if not (0 < low < high) or high / low < 1.0005:
        return []
    ratio = (high / low) ** (1 / (count + 1))
    digits = 2 if ratio > 1.1 else 4
    found = {float(f"{low * ratio**place:.{digits}g}") for place in range(1, count + 1)}
    return sorted(level for level in found if low < level < high)


def segments(values: Values, level: float) -> list[tuple[Point, Point]]:
    """Marching squares: the pieces of one level line, in grid coordinates (row, column).

    A saddle is joined by the mean of its four corners.
    """
    found: list[tuple[Point, Point]] = []
    for i in range(len(values) - 1):
        for j in range(len(values[0]) - 1):
            corners = [(i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j)]
            heights = [values[a][b] for a, b in corners]
            crossed = [
                _between(corners[k], corners[(k + 1) % 4], heights[k], heights[(k + 1) % 4], level)
                for k in range(4)
                if (heights[k] > level) != (heights[(k + 1) % 4] > level)
            ]
            if len(crossed) == 2:
                found.append((crossed[0], crossed[1]))
            elif len(crossed) == 4:
                turned = (heights[0] > level) == (sum(heights) / 4 > level)
                a, b, c, d = crossed
                found += [(a, b), (c, d)] if turned else [(d, a), (b, c)]
    return found


def _between(first: Point, other: Point, low: float, high: float, level: float) -> Point:
    share = (level - low) / (high - low)
    return (first[0] + share * (other[0] - first[0]), first[1] + share * (other[1] - first[1]))


def colour(share: float) -> str:
    """The ramp at ``share`` in [0, 1]."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    start = min(int(place), len(RAMP) - 2)
    mixed = (round(a + (place - start) * (b - a)) for a, b in zip(RAMP[start], RAMP[start + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def draw(values: Values, steps: Sequence[float], lines: Sequence[float], low: float, high: float, title: str) -> str:
    """The level lines ``lines`` of a surface as an ``<svg>``; ``low`` and ``high`` are the ends of the colour scale."""
    count = len(values) - 1
    cell = SIDE / count
    paths = []
    for level in lines:
        pieces = segments(values, level)
        if not pieces:
            continue
        # Row (first direction) runs to the right, column (second direction) upwards.
        places = [(LEFT + row * cell, TOP + SIDE - column * cell) for piece in pieces for row, column in piece]
        drawn = "".join(f"{'ML'[k % 2]}{x:.1f},{y:.1f}" for k, (x, y) in enumerate(places))
        share = math.log(level / low) / math.log(high / low) if high > low > 0 else 0.0
        paths.append(f'<path class="iso" stroke="{colour(share)}" d="{drawn}"><title>loss {level:g}</title></path>')
    box = f"0 0 {LEFT + SIDE + 8:g} {TOP + SIDE + 34:g}"
    return (
        f'<svg class="contour" viewBox="{box}" role="img" aria-label="{escape(title)}">'
        f"{_frame(steps)}{''.join(paths)}"
        f'<path class="centre" d="M{LEFT + SIDE / 2 - 4:g},{TOP + SIDE / 2:g}h8m-4,-4v8"/></svg>'
    )


def _frame(steps: Sequence[float]) -> str:
    ends = (steps[0], 0.0, steps[-1])
    places = (0.0, SIDE / 2, SIDE)
    across = "".join(
        f'<text class="tx" x="{LEFT + at:g}" y="{TOP + SIDE + 15:g}">{end:g}</text>'
        for at, end in zip(places, ends, strict=True)
    )
    up = "".join(
        f'<text class="ty" x="{LEFT - 6:g}" y="{TOP + SIDE - at + 4:g}">{end:g}</text>'
        for at, end in zip(places, ends, strict=True)
    )
    name = f'<text class="tt" x="{LEFT + SIDE / 2:g}" y="{TOP + SIDE + 30:g}">direction 1; upwards direction 2</text>'
    return f'<rect class="frame" x="{LEFT:g}" y="{TOP:g}" width="{SIDE:g}" height="{SIDE:g}"/>{across}{up}{name}'


def scale(lines: Sequence[float], low: float, high: float) -> str:
    """The legend of the level lines, as SVG."""
    items = []
    for level in lines:
        share = math.log(level / low) / math.log(high / low)
        items.append(
            f'<span><svg viewBox="0 0 14 8"><path stroke="{colour(share)}" d="M0,4H14"/></svg>{level:g}</span>'
        )
    return f'<p class="levels">loss {"".join(items)}</p>' if items else ""
