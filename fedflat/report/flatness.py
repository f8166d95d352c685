"""Write the page of ``fedflat landscape``: numbers, curves, surfaces to turn, contours, in one file."""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.core import counted
from fedflat.report import pages, plates
from fedflat.report.figures import Figure, Series
from fedflat.report.metrics import epsilon_text

Record = Mapping[str, Any]


def render(record: Record) -> str:
    """Return the page of what ``landscape.flatness.measure`` found, as HTML text."""
    groups = [{**group, "name": plates.surface_name(group)} for group in record["groups"]]
    curvature = max(model["curvature_examples"] for model in record["models"])
    reading = {"rho": record["settings"]["rho"], "curvature_examples": curvature}
    drawn = [group for group in groups if group["surface"]]
    sections = [
        pages.Section("summary", "", "noted_table", _numbers(record)),
        pages.Section("reading", "How to read this", "reading", reading),
        pages.Section("surface", "Surfaces", "surfaces", _surfaces(drawn) if drawn else None),
    ]
    for place, (model, members) in enumerate(_by_model(record)):
        title = "Global model" if model == "global" else f"Local model of {model}"
        cards = pages.cards(_curves(members, place), pages.PRIVATE if members[0]["private"] else "")
        sections.append(pages.Section(f"model-{place}", title, "cards", cards))
    labels = list(dict.fromkeys(group["label"] for group in groups))
    title = "Flatness: " + (" · ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods compared")
    return pages.page(title, _lead(record), sections, "fedflat", "flatness")


def _by_model(record: Record) -> list[tuple[str, list[Record]]]:
    models = dict.fromkeys(group["model"] for group in record["groups"])
    return [(model, [group for group in record["groups"] if group["model"] == model]) for model in models]


def _lead(record: Record) -> str:
    models, settings = record["models"], record["settings"]
    runs = len({model["run"] for model in models})
    data = "public test data" if settings["on"] == "test" else "training data"
    examples = max(model["examples"] for model in models)
    return f"{counted(runs, 'run')} · {examples:,} examples of {data} · direction seed {settings['seed']}"


# -------------------------------------------------------------------------------------------------------- numbers


def pair_text(value: Record, percent: bool = False) -> tuple[str, str | None]:
    """Return the mean and sd (None for one seed) with the same decimals: three significant digits of the mean."""
    factor = 100 if percent else 1
    mean, sd = factor * value["mean"], value["sd"]
    size = abs(mean) if mean else 1.0
    places = 2 if percent else min(6, max(0, 2 - math.floor(math.log10(size))))
    return f"{mean:.{places}f}", None if sd is None else f"{factor * sd:.{places}f}"


def _numbers(record: Record) -> dict[str, Any]:
    noise = record["settings"]["noise"]
    headings = {
        "loss": "loss", "accuracy": "accuracy %", "eigenvalue": "top eigenvalue", "trace": "trace",
        "ascent": "sharpness", "noise_accuracy": f"% at {100 * noise[len(noise) // 2]:g} % noise",
    }  # fmt: skip
    spent = "ε of the mechanism" if any(group.get("seeded") for group in record["groups"]) else "ε proven"
    heads = ["Method", "Model", "seeds", spent, *headings.values()]
    rows = []
    for group in record["groups"]:
        epsilon = epsilon_text((group["epsilon"] or {}).get("mean"), "∞")
        cells = [group["label"], group["model"], str(len(group["seeds"])), epsilon]
        pairs = (pair_text(group["numbers"][key], "%" in heading) for key, heading in headings.items())
        rows.append(cells + [" ± ".join(filter(None, pair)) for pair in pairs])
    table = pages.Table("Flatness", heads, rows, left=2)
    return {"table": table, "notes": [*difference_notes(record), *record["notes"]], "headline": ""}


DIFFERENCES = {
    "eigenvalue": "top eigenvalue", "trace": "trace", "ascent": "sharpness", "noise_loss": "loss added by noise",
}  # fmt: skip


def difference_notes(record: Record) -> list[str]:
    """Return in words how the global model's numbers differ from the first method's; those with an interval only."""
    first, *others = [group for group in record["groups"] if group["model"] == "global"]
    listed = []
    for group in others:
        gaps = ((name, group["differences"].get(key)) for key, name in DIFFERENCES.items())
        parts = [f"{name} {_interval(gap)}" for name, gap in gaps if gap is not None and gap["low"] is not None]
        listed += [f"{group['label']} − {first['label']}: {'; '.join(parts)}."] if parts else []
    if listed:
        listed.append("Differences are paired over seeds, with 95 % t intervals; several are shown, none is corrected.")
    return listed


def _interval(gap: Record) -> str:
    mean, low, high = (_signed(gap[key]) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + f"{abs(value):.3g}".replace("e-0", "e-").replace("e+0", "e")


# --------------------------------------------------------------------------------------------------------- curves


def figures(record: Record) -> list[Figure]:
    """Return the page's curves, model by model."""
    return [figure for place, (_, groups) in enumerate(_by_model(record)) for figure in _curves(groups, place)]


def _curves(groups: Sequence[Record], place: int) -> list[Figure]:
    return [
        _figure(groups, kind, key, f"{kind}-{key}-{place}", f"{key.capitalize()} {where}")
        for kind, where in {"line": "along a direction", "noise": "under weight noise"}.items()
        for key in ("loss", "accuracy")
    ]


def _figure(groups: Sequence[Record], kind: str, key: str, name: str, title: str) -> Figure:
    several = any(len(group["seeds"]) > 1 for group in groups)
    series = []
    for group in groups:
        curve = group[kind]
        y, sd = curve[key], curve[f"{key}_sd"] or [0.0] * len(curve[key])
        # A loss is not below zero, and a logarithmic axis could not show it.
        least, most = (0.0, 1.0) if key == "accuracy" else (min(y) / 2, math.inf)
        low, high = [max(least, a - b) for a, b in zip(y, sd)], [min(most, a + b) for a, b in zip(y, sd)]
        x = {"round": tuple(100 * value for value in curve["steps" if kind == "line" else "levels"])}
        bands = (tuple(low), tuple(high)) if several else ((), ())
        series.append(Series(group["label"], x, tuple(y), *bands, style=group["style"]))
    title_x = "distance, % of the filters' norm" if kind == "line" else "noise, % of the weights"
    note = "First direction, through the model." if kind == "line" else "Mean over draws."
    note += " Bands: one sd over seeds." if several else ""
    percent, private = key == "accuracy", bool(groups[0]["private"])
    return Figure(name, title, tuple(series), "%" if percent else "", note, private, percent=percent, x_title=title_x)


# ------------------------------------------------------------------------------------------------------- surfaces


def _surfaces(groups: Sequence[Record]) -> dict[str, Any]:
    every = [value for group in groups for row in group["surface"]["loss"] for value in row]
    surfaces = [
        {"side": len(surface["steps"]), "loss": [float(f"{value:.5g}") for row in surface["loss"] for value in row]}
        for surface in (group["surface"] for group in groups)
    ]
    return {
        "groups": groups,
        "contours": base64.b64encode(plates.drawn_as(plates.contours(groups), "svg")).decode(),
        "data": {"low": max(min(every), 1e-9), "high": max(every), "surfaces": surfaces},
    }
