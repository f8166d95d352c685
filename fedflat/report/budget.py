"""``fedflat budget --plot``: ε against rounds and against the noise multiplier, as SVG, PNG or one HTML page."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError, one_of
from fedflat.privacy.accounting.budget import Row, approximation_against, epsilon_against
from fedflat.privacy.accounting.curves import APPROXIMATIONS

SUFFIXES = (".html", ".svg", ".png")
POINTS = 24
TITLES = {"rounds": "rounds", "noise_multiplier": "noise multiplier σ"}


def check_plot(path: Path) -> None:
    """Raise InputError unless the file can be drawn: .html, .svg or .png."""
    one_of("--plot", path.suffix or path.name, SUFFIXES)


def write_plot(path: Path, systems: Mapping[str, Mapping[str, Any]], accountants: Sequence[str]) -> None:
    """Draw ε of each system by each accountant, to ``path``.

    systems: name -> arguments of ``epsilon`` (noise_multiplier and rounds among them). An accountant that does not
    apply is left out.

    Raises:
        InputError: an unknown kind of file, or no accountant applies.
        RunError: matplotlib is missing, or the file cannot be written.
    """
    check_plot(path)
    lines = {axis: series(axis, systems, accountants) for axis in TITLES}
    image = _draw(lines, "png" if path.suffix == ".png" else "svg")
    try:
        path.write_bytes(image if path.suffix != ".html" else page(image.decode(), lines).encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def series(axis: str, systems: Mapping[str, Mapping[str, Any]], accountants: Sequence[str]) -> dict[str, list[Row]]:
    """Label -> ``[{axis: value, "epsilon": ε}, …]`` around each system's own value; ε beyond 10⁴ are left out."""
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
            kept = [row for row in rows if math.isfinite(row["epsilon"]) and row["epsilon"] < 1e4]
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
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError("--plot needs matplotlib, which is not installed: pip install matplotlib.") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
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
    figure.savefig(target, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return target.getvalue()


def page(svg: str, lines: Mapping[str, Mapping[str, list[Row]]]) -> str:
    """One self-contained page: the picture, and the numbers behind it."""
    tables = "".join(
        f"<h2>{escape(label)}, by {escape(TITLES[axis])}</h2><table><tr><th>{escape(TITLES[axis])}</th><th>ε</th></tr>"
        + "".join(f"<tr><td>{row[axis]:.5g}</td><td>{row['epsilon']:.4g}</td></tr>" for row in rows)
        + "</table>"
        for axis, curves in lines.items()
        for label, rows in curves.items()
    )
    style = "body{font:15px system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}svg{max-width:100%;height:auto}"
    style += "td,th{text-align:right;padding:.1rem 1rem}details{margin-top:1rem}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Privacy budget</title>'
        f"<style>{style}</style><h1>Privacy budget</h1>{svg[svg.index('<svg') :]}"
        f"<details><summary>Numbers</summary>{tables}</details></html>\n"
    )
