"""``fedflat budget --plot``: ε against rounds and against the noise multiplier, as SVG, PNG or one HTML page."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError, one_of
from fedflat.core.extras import missing
from fedflat.privacy.accounting.budget import Row, approximation_against, epsilon_against
from fedflat.privacy.accounting.curves import APPROXIMATIONS
from fedflat.report.figures import Figure, Series
from fedflat.report.html import cards
from fedflat.report.pages import Section, page

SUFFIXES = (".html", ".svg", ".png")
POINTS = 24
"""Places a curve is read at: each costs one accounting, and it is smooth."""
MOST = 1e4
"""ε beyond which a curve ends: it says nothing there, and would flatten the rest."""
TITLES = {"rounds": "rounds", "noise_multiplier": "noise multiplier σ"}


def check_plot(path: Path) -> None:
    """Raise InputError unless the file can be drawn: .html, .svg or .png."""
    one_of("--plot", path.suffix or path.name, SUFFIXES)


def write_plot(path: Path, systems: Mapping[str, Mapping[str, Any]], accountants: Sequence[str]) -> None:
    """Draw ε of each system by each accountant, to ``path``.

    systems: name -> arguments of ``epsilon`` (noise_multiplier and rounds among them). An accountant that does not
    apply is left out.

    Raises:
        InputError: an unknown kind of file, no accountant applies, or matplotlib is missing.
        RunError: the file cannot be written.
    """
    check_plot(path)
    lines = {axis: series(axis, systems, accountants) for axis in TITLES}
    content = _page(lines) if path.suffix == ".html" else _draw(lines, path.suffix[1:])
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def series(axis: str, systems: Mapping[str, Mapping[str, Any]], accountants: Sequence[str]) -> dict[str, list[Row]]:
    """Label -> ``[{axis: value, "epsilon": ε}, …]`` around each system's own value; ε beyond ``MOST`` are left out."""
    found: dict[str, list[Row]] = {}
    refused: InputError | None = None
    for name, setting in systems.items():
        rest = {key: value for key, value in setting.items() if key != axis}
        for accountant in accountants:
            approximation = accountant in APPROXIMATIONS
            try:
                if approximation:
                    rows = approximation_against(axis, values(axis, setting[axis]), **rest)
                else:
                    rows = epsilon_against(axis, values(axis, setting[axis]), **rest, accountant=accountant)
            except InputError as error:
                refused = error
                continue
            label = f"{name}, {accountant}" if name else accountant
            kept = [row for row in rows if math.isfinite(row["epsilon"]) and row["epsilon"] < MOST]
            found[label + (" (approximation, not proven)" if approximation else "")] = kept
    if not found and refused is not None:
        raise refused
    return found


def values(axis: str, own: float) -> list[float]:
    """Where the curve is read: 1 to 1.5 times the planned rounds, or a third to three times σ; own value in it."""
    if axis == "rounds":
        most = max(2, math.ceil(1.5 * own))
        return sorted({max(1, round(most * place / POINTS)) for place in range(1, POINTS + 1)} | {1, max(1, int(own))})
    centre = own if own > 0 else 1.0
    return sorted({*(centre * 3 ** (place / (POINTS / 2) - 1) for place in range(POINTS + 1)), centre})


def _draw(lines: Mapping[str, Mapping[str, list[Row]]], kind: str) -> bytes:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise missing("--plot", "matplotlib") from error
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    for place, (axis, curves) in zip(figure.subplots(1, 2), lines.items()):
        for label, rows in curves.items():
            style = "--" if "approximation" in label else "-"
            place.plot([row[axis] for row in rows], [row["epsilon"] for row in rows], style, label=label)
        spread = [row["epsilon"] for rows in curves.values() for row in rows if row["epsilon"] > 0]
        steep = axis == "noise_multiplier" or (bool(spread) and max(spread) > 1000 * min(spread))
        place.set(xlabel=TITLES[axis], ylabel="ε", yscale="log" if steep else "linear")
        place.grid(alpha=0.3)
        place.legend(fontsize="small")
    target = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedflat"}):  # otherwise names in the file are drawn at random
        figure.savefig(target, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return target.getvalue()


def _page(lines: Mapping[str, Mapping[str, list[Row]]]) -> bytes:
    """One self-contained page: the curves, and the numbers behind them."""
    figures = [
        Figure(
            axis.replace("_", "-"),
            f"ε by {TITLES[axis]}",
            tuple(
                Series(
                    label,
                    {"round": tuple(float(row[axis]) for row in rows)},
                    tuple(row["epsilon"] for row in rows),
                    style=style,
                )
                for style, (label, rows) in enumerate(curves.items())
                if rows
            ),
            x_title=TITLES[axis],
        )
        for axis, curves in lines.items()
    ]
    sections = [Section("curves", "", "cards", cards([figure for figure in figures if figure.series]))]
    return page("Privacy budget", "What is planned, and what more or less of it costs", sections, "fedflat").encode()
