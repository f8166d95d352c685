"""Write the page of ``fedflat landscape``: numbers, curves, surfaces to turn, contours, in one file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fedflat.report import pages, plates
from fedflat.report.figures import Figure, Series
from fedflat.report.groups import COLOURS
from fedflat.report.pages import Section, Table

Record = Mapping[str, Any]


def write_page(found: Record, target: Path) -> Path:
    """Write the page of what ``landscape.flatness.measure`` found to the file ``target``, replaced in one step."""
    return pages.write(render(found), target)


def render(found: Record) -> str:
    """Return the page on flatness as HTML text."""
    groups = found["groups"]
    models = list(dict.fromkeys(group["model"] for group in groups))
    sections = [
        Section("summary", "", "noted_table", _numbers(found)),
        Section("gaps", "Differences", "table", _differences(found)),
        Section("reading", "How to read this", "prose", _reading(found)),
    ]
    for place, model in enumerate(models):
        own = [group for group in groups if group["model"] == model]
        title = "Global model" if model == "global" else f"Local model of {model}"
        sections.append(Section(f"model-{place}", title, "cards", _model(own, place)))
    drawn = [group for group in groups if group["surface"]]
    if drawn:
        sections.insert(3, Section("surface", "Surfaces", "surfaces", _surfaces(drawn)))
    labels = list(dict.fromkeys(group["label"] for group in groups))
    title = "Flatness: " + (" · ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods compared")
    version = f"fedflat {metadata.version('fedflat')}" if _installed() else "fedflat"
    return pages.page(title, _lead(found), sections, version, "flatness")


def _installed() -> bool:
    try:
        metadata.version("fedflat")
    except metadata.PackageNotFoundError:
        return False
    return True


def _lead(found: Record) -> str:
    models, settings = found["models"], found["settings"]
    runs = len({each["run"] for each in models})
    data = "public test data" if settings["on"] == "test" else "training data"
    examples = max(each["examples"] for each in models)
    return f"{runs} run{'s' if runs > 1 else ''} · {examples:,} examples of {data} · direction seed {settings['seed']}"


# -------------------------------------------------------------------------------------------------------- numbers


def columns(settings: Record) -> list[tuple[str, str, bool]]:
    """Return the key, heading and whether in per cent, of the numbers shown."""
    size = 100 * settings["noise"][len(settings["noise"]) // 2]
    return [
        ("loss", "loss", False), ("accuracy", "accuracy %", True), ("eigenvalue", "top eigenvalue", False),
        ("trace", "trace", False), ("ascent", "sharpness", False), ("noise_accuracy", f"% at {size:g} % noise", True),
    ]  # fmt: skip


def spread_text(value: Record | None, percent: bool = False) -> str:
    """Return ``mean ± sd``, the mean alone for one seed, a dash for nothing."""
    if value is None:
        return "–"
    mean, sd = pair_text(value, percent)
    return mean if sd is None else f"{mean} ± {sd}"


def pair_text(value: Record, percent: bool = False) -> tuple[str, str | None]:
    """Return the mean and sd (None for one seed) with the same decimals: three significant digits of the mean."""
    factor = 100 if percent else 1
    mean, sd = factor * value["mean"], value["sd"]
    size = abs(mean) if mean else 1.0
    places = 2 if percent else min(6, max(0, 2 - math.floor(math.log10(size))))
    return f"{mean:.{places}f}", None if sd is None else f"{factor * sd:.{places}f}"


def number_text(value: float) -> str:
    """Return three significant digits."""
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _numbers(found: Record) -> dict[str, Any]:
    shown = columns(found["settings"])
    several = len({group["model"] for group in found["groups"]}) > 1
    heads = ["Method", *(["Model"] if several else []), "seeds", "ε proven", *(heading for _, heading, _ in shown)]
    rows = []
    for group in found["groups"]:
        epsilon = "∞" if group["epsilon"] is None else f"{group['epsilon']['mean']:.2f}"
        cells = [group["label"], *([group["model"]] if several else []), str(len(group["seeds"])), epsilon]
        rows.append(cells + [spread_text(group["numbers"][key], percent) for key, _, percent in shown])
    notes = [*found["notes"], cost_text(found["cost"])]
    return {"table": Table("Flatness", heads, rows, left=2 if several else 1), "notes": notes, "headline": ""}


DIFFERENCES = (
    ("eigenvalue", "top eigenvalue"), ("trace", "trace"), ("ascent", "sharpness"),
    ("noise_loss", "loss added by noise"),
)  # fmt: skip


def gaps(found: Record) -> list[tuple[str, list[str]]]:
    """Return the label, and how the global model's numbers differ from the first method's; those with an interval
    only."""
    groups = [group for group in found["groups"] if group["model"] == "global"]
    rows = [(group["label"], [_gap(group["differences"].get(key)) for key, _ in DIFFERENCES]) for group in groups[1:]]
    return [(label, cells) for label, cells in rows if any(cells)]


def _gap(gap: Record | None) -> str:
    if gap is None or gap["low"] is None:
        return ""
    return f"{_signed(gap['mean'])} [{_signed(gap['low'])}, {_signed(gap['high'])}]"


def difference_notes(found: Record) -> list[str]:
    """Return the differences in words, for a terminal."""
    first, listed = found["groups"][0]["label"], []
    for label, cells in gaps(found):
        parts = [f"{name} {cell}" for (_, name), cell in zip(DIFFERENCES, cells) if cell]
        listed.append(f"{label} − {first}: {'; '.join(parts)}.")
    if listed:
        listed.append("Differences are paired over seeds, with 95 % t intervals; several are shown, none is corrected.")
    return listed


def _differences(found: Record) -> Table | None:
    rows = [[label, *(cell or "–" for cell in cells)] for label, cells in gaps(found)]
    first = found["groups"][0]["label"]
    caption = f"Minus {first}: paired over seeds, with 95 % t intervals, not corrected for their number"
    return Table(caption, ["Method", *(name for _, name in DIFFERENCES)], rows) if rows else None


def _signed(value: float) -> str:
    text = number_text(abs(value))
    return ("−" if value < 0 else "+") + text


def cost_text(cost: Record) -> str:
    """Return time and memory in a sentence."""
    threads = "1 thread" if cost["threads"] == 1 else f"{cost['threads']} threads"
    return (
        f"Took {cost['seconds']:.0f} s ({cost['cpu_seconds']:.0f} s of processor time, {threads});"
        f" the process held at most {cost['peak_memory_mib']:,.0f} MiB."
    )


def _reading(found: Record) -> list[str]:
    settings, curved = found["settings"], max(each["curvature_examples"] for each in found["models"])
    return [
        "Directions are random and filter-normalised: each filter (output channel or row) of the direction has the norm"
        " of the same filter of the weights; biases and norm layers do not move. At a distance of 1 every filter has"
        " moved by its own norm. All methods share the same random draw.",
        f"Eigenvalues, trace and sharpness are those of the loss on {curved:,} examples; sharpness is how much the loss"
        f" rises within distance ρ = {settings['rho']:g} (a lower bound).",
        "Weight noise is Gaussian, its standard deviation a share of each tensor's root mean square.",
        "One direction out of thousands is drawn: a bowl that looks round can still be steep where nobody looked."
        " A model with a high loss everywhere is flat too: compare at similar loss and accuracy.",
        "Absolute numbers (eigenvalues, trace, ρ) change when a ReLU network's layers are rescaled although the"
        " function does not; the curves along normalised directions mostly do not.",
    ]


# --------------------------------------------------------------------------------------------------------- curves


def figures(found: Record) -> list[Figure]:
    """Return the page's curves, model by model."""
    models = list(dict.fromkeys(group["model"] for group in found["groups"]))
    owns = ([group for group in found["groups"] if group["model"] == model] for model in models)
    return [figure for place, own in enumerate(owns) for figure in _curves(own, place)]


def _model(groups: Sequence[Record], place: int) -> dict[str, Any] | None:
    return pages.cards(_curves(groups, place), pages.PRIVATE if groups[0]["private"] else "")


def _curves(groups: Sequence[Record], place: int) -> list[Figure]:
    return [
        _figure(groups, "line", "loss", f"line-loss-{place}", "Loss along a direction"),
        _figure(groups, "line", "accuracy", f"line-accuracy-{place}", "Accuracy along a direction"),
        _figure(groups, "noise", "loss", f"noise-loss-{place}", "Loss under weight noise"),
        _figure(groups, "noise", "accuracy", f"noise-accuracy-{place}", "Accuracy under weight noise"),
    ]


def _figure(groups: Sequence[Record], kind: str, key: str, name: str, title: str) -> Figure:
    several = any(len(group["seeds"]) > 1 for group in groups)
    over = "steps" if kind == "line" else "levels"
    series = []
    for group in groups:
        curve = group[kind]
        y, sd = curve[key], curve[f"{key}_sd"] or [0.0] * len(curve[key])
        low, high = ([a + sign * b for a, b in zip(y, sd, strict=True)] for sign in (-1, 1))
        if key == "accuracy":
            low, high = [max(0.0, each) for each in low], [min(1.0, each) for each in high]
        else:
            # A loss is not below zero, and a logarithmic axis could not show it.
            low = [max(each, min(y) / 2) for each in low]
        x = {"round": tuple(100 * each for each in curve[over])}
        bands = (tuple(low), tuple(high)) if several else ((), ())
        series.append(Series(group["label"], x, tuple(y), *bands, style=group["style"]))
    title_x = "distance, % of the filters' norm" if kind == "line" else "noise, % of the weights"
    note = "First direction, through the model." if kind == "line" else "Mean over draws."
    note += " Bands: one sd over seeds." if several else ""
    unit = "%" if key == "accuracy" else ""
    percent = key == "accuracy"
    private = bool(groups[0]["private"])
    return Figure(name, title, tuple(series), unit, note, private, percent=percent, x_title=title_x)


# ------------------------------------------------------------------------------------------------------- surfaces


def _surfaces(groups: Sequence[Record]) -> dict[str, Any]:
    every = [value for group in groups for row in group["surface"]["loss"] for value in row]
    low, high = min(every), max(every)
    low = max(low, 1e-9)
    lines = plates.levels(low, high)
    surfaces = [{"side": len(each["surface"]["steps"]), "loss": _short(each["surface"]["loss"])} for each in groups]
    return {
        "hint": "Drag, or use the arrow keys, to turn; Home puts them back. All share one scale, and turn together.",
        "reliefs": [_relief(group, lines, low, high) for group in groups],
        "overlay": _overlaid(groups, lines),
        "levels": [(f"{level:g}", *plates.colours(level, low, high)) for level in lines],
        "data": {"low": low, "high": high, "ramps": plates.RAMPS, "surfaces": surfaces},
    }


def _overlaid(groups: Sequence[Record], lines: Sequence[float]) -> dict[str, Any] | None:
    """Return the contours of two surfaces or more in one square, with their legend; None for one surface or none."""
    names = [each["label"] + ("" if each["model"] == "global" else f", {each['model']}") for each in groups]
    if len(groups) < 2 or not lines:
        return None
    surfaces = [(name, each["style"], each["surface"]["loss"]) for name, each in zip(names, groups)]
    legend = [Series(name, {}, style=style) for name, style, _ in surfaces]
    return {"drawing": plates.overlay(surfaces, groups[0]["surface"]["steps"], lines), "series": legend}


def _short(rows: Sequence[Sequence[float]]) -> list[float]:
    return [float(f"{value:.5g}") for row in rows for value in row]


def _relief(group: Record, lines: Sequence[float], low: float, high: float) -> dict[str, Any]:
    surface = group["surface"]
    values, middle = surface["loss"], len(surface["steps"]) // 2
    edge = max(max(row) for row in values)
    name = group["label"] + ("" if group["model"] == "global" else f", {group['model']}")
    how = surface["precision"]
    if surface["deviation"] is not None:
        how += f", within {surface['deviation']:.2g} of float32 at nine points"
    return {
        "name": name, "colour": f"c{group['style'] % COLOURS}", "private": group["private"],
        "words": f"Loss {values[middle][middle]:.3g} in the middle, at most {edge:.3g} on the square.",
        "seed": group["seeds"][0], "how": how,
        "contours": plates.draw(values, surface["steps"], lines, low, high, f"{name}: contours of the loss"),
    }  # fmt: skip
