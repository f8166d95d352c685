"""Draw by matplotlib what is written as a file: a page's figures and the contours of surfaces."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.core import writing
from fedflat.report.figures import Figure, Series
from fedflat.report.groups import COLOURS, DASHES
from fedflat.report.pages import tick_text, x_scale, y_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet


KINDS = ("svg", "png", "pdf")
PALETTE = ("#0072b2", "#d55e00", "#00896a", "#a8488f", "#a97d00", "#4aa3dc", "#6b5b4d")
"""The style sheet's colours on white paper."""
STYLES = ("-", (0, (7, 4)), (0, (1.5, 3)), (0, (9, 4, 1.5, 4)))
MARKED = 10
"""Points of a line that are marked each; a line of one would not be seen."""
SIZE = (5.2, 3.4)
"""Inches."""
WRAP = 48
"""Characters of a title's line, which fit over the axes."""
LEVELS = 9
"""Lines of a surface's contours, in geometric steps."""


def write_plates(figures: Sequence[Figure], folder: Path, landscapes: Sequence[Mapping[str, Any]] = ()) -> list[Path]:
    """Return each figure, and the overlaid contours of each landscape record, as ``KEY.svg``, ``.png`` and ``.pdf``.

    Raises RunError where the folder cannot be written.
    """
    paths = [path for figure in figures for path in write_figure(figure, folder)]
    for place, record in enumerate(landscapes):
        if drawn := [group for group in record["groups"] if group["surface"]]:
            paths += _save(contours(drawn), folder, f"contours-{place}")
    return paths


def write_figure(figure: Figure, folder: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Write one figure as ``KEY.KIND`` in ``folder``, its legend below where it has several series.

    Raises RunError where the folder cannot be written.
    """
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=SIZE, layout="constrained")
    draw_on(sheet.subplots(), figure)
    if len(labels := sheet.axes[0].get_legend_handles_labels()[1]) > 1:
        _legend(sheet, labels)
    return _save(sheet, folder, figure.key, kinds)


def _legend(sheet: Sheet, labels: Sequence[str], **given: Any) -> None:
    """Write the names below the figure, as many beside each other as fit."""
    fitting = max(1, min(4, 84 // (8 + max(map(len, labels)))))
    sheet.legend(fontsize="x-small", frameon=False, loc="outside lower center", ncols=fitting, **given)


def _save(sheet: Sheet, folder: Path, stem: str, kinds: Sequence[str] = KINDS) -> list[Path]:
    # Drawn before the folder is made, so that a failure leaves no empty folder.
    contents = {folder / f"{stem}.{kind}": drawn_as(sheet, kind) for kind in kinds}
    for target, content in contents.items():
        with writing(target):
            folder.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return list(contents)


def drawn_as(sheet: Sheet, kind: str) -> bytes:
    """Return the content of a file of a kind; the same values give the same bytes."""
    import matplotlib

    content, dated = io.BytesIO(), {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    # Without a salt matplotlib draws the names in the file at random.
    with matplotlib.rc_context({"svg.hashsalt": "fedflat"}):
        sheet.savefig(content, format=kind, dpi=150, metadata=dated)
    return content.getvalue()


def draw_on(axes: Axes, figure: Figure) -> None:
    """Draw a figure's lines, bars or points with their titles on a page's axes; whoever calls adds the legend."""
    scale = 100 if figure.percent else 1
    drawn = [series for series in figure.series if series.y or series.low]
    for place, series in enumerate(drawn):
        _series(axes, figure.kind, series, scale, place, len(drawn))
    for label, value in figure.lines:
        axes.axhline(scale * value, color="black", lw=1, ls="--", label=label)
    across, up = x_scale(figure, "round"), y_scale(figure)
    axes.set(xscale="log" if across.log else "linear", yscale="log" if up.log else "linear")
    axes.minorticks_off()
    axes.set_xticks(across.ticks, [figure.names[int(x)] if figure.names else f"{x:g}" for x in across.ticks])
    axes.set_yticks([scale * value for value in up.ticks], [tick_text(value, figure.percent) for value in up.ticks])
    named = (figure.y_title or figure.title) + (f", {figure.unit}" if figure.unit else "")
    axes.set(title=textwrap.fill(figure.title, WRAP), xlabel=figure.x_title, ylabel=named)
    axes.set_ylim(scale * up.low, scale * up.high)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _series(axes: Axes, kind: str, series: Series, scale: float, place: int, count: int) -> None:
    """Draw one of ``count`` series."""
    x, style = np.array(series.x["round"]), max(series.style, 0)
    y, low, high = (scale * np.array(values) for values in (series.y, series.low, series.high))
    look: dict[str, Any] = {"color": PALETTE[style % COLOURS], "label": series.label}
    error = [y - low, high - y] if series.low and series.y else None
    if kind == "points":
        axes.errorbar(x, y, error, fmt="o", ms=4, capsize=2, **look)
    elif kind == "bars":
        width = 0.8 / count
        axes.bar(x - 0.4 + width * (place + 0.5), y, width * 0.94, yerr=error, capsize=2, **look)
    else:
        if series.low:
            axes.fill_between(x, low, high, alpha=0.15, lw=0, **look | ({"label": None} if series.y else {}))
        if series.y:
            axes.plot(x, y, ls=STYLES[style % DASHES], marker="o" if len(y) <= MARKED else None, ms=3, **look)


def contours(groups: Sequence[Mapping[str, Any]]) -> Sheet:
    """Return the level lines of surfaces over the same directions in one square, each with its loss written on it."""
    from matplotlib.figure import Figure as Sheet
    from matplotlib.lines import Line2D

    sheet = Sheet(figsize=(5.2, 5.2), layout="constrained")
    axes = sheet.subplots()
    every, steps, handles = np.array([group["surface"]["loss"] for group in groups]), groups[0]["surface"]["steps"], []
    low, high = max(every.min(), 1e-9), every.max()
    for group in groups:
        number = group["style"]
        colour, style = PALETTE[number % COLOURS], ("solid", "dashed", "dotted", "dashdot")[number % DASHES]
        # A row of the surface is the first direction, which is drawn to the right.
        surface = np.array(group["surface"]["loss"]).T
        if high > 1.0005 * low:
            levels = np.geomspace(low, high, LEVELS + 2)[1:-1]
            drawn = axes.contour(steps, steps, surface, levels=levels, colors=colour, linestyles=style, linewidths=1.1)
            axes.clabel(drawn, fontsize=7, fmt="%.3g")
        handles.append(Line2D([], [], color=colour, ls=style, label=surface_name(group)))
    axes.plot(0, 0, "+", color="black")
    limits = (1.12 * min(steps), 1.12 * max(steps))  # room for the numbers on lines that end at the edge
    axes.set(title="Loss contours", xlabel="direction 1", ylabel="direction 2", aspect="equal")
    axes.axis((*limits, *limits))
    _legend(sheet, [str(handle.get_label()) for handle in handles], handles=handles)
    return sheet


def surface_name(group: Mapping[str, Any]) -> str:
    """Return the name of a group's surface: its label, with the model where that is a client's."""
    return str(group["label"]) + ("" if group["model"] == "global" else f", {group['model']}")
