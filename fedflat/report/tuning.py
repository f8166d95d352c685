"""What settings did on a proxy: as a file of rows, and as a picture with one panel for each key that varied."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[tuple[Mapping[str, str], float]]


def write_csv(path: Path, rows: Rows) -> None:
    """The settings and their accuracy, the best first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*rows[0][0], "accuracy"])
    writer.writerows([*settings.values(), f"{found:.6g}"] for settings, found in rows)
    path.write_text(text.getvalue(), encoding="utf-8")


def write_picture(path: Path, rows: Rows) -> bool:
    """Accuracy against each key: on a logarithmic axis where numbers span much, side by side where they are names; a
    star is the best. False, and nothing is written, without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    keys = list(rows[0][0])
    figure = Figure(figsize=(3.2 * len(keys), 3.0), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False, sharey=True)[0], keys):
        texts = [settings[key] for settings, _ in rows]
        numbers = [_number(text) for text in texts]
        found = [value if math.isfinite(value) else math.nan for _, value in rows]
        known: Any = [number for number in numbers if number is not None]
        if len(known) == len(texts):
            axes.plot(known, found, "o", alpha=0.6)
            axes.plot(known[:1], found[:1], "*", markersize=14)
            if min(known) > 0 and max(known) >= 10 * min(known):
                axes.set_xscale("log")
        else:
            names = sorted(set(texts))
            axes.plot([names.index(text) for text in texts], found, "o", alpha=0.6)
            axes.plot([names.index(texts[0])], found[:1], "*", markersize=14)
            axes.set_xticks(range(len(names)), names, rotation=20)
        axes.set_xlabel(key)
    figure.axes[0].set_ylabel("accuracy on the random process")
    with matplotlib.rc_context({"svg.hashsalt": "fedflat"}):  # otherwise names in the file are drawn at random
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
