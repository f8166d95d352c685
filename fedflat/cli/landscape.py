"""``fedflat landscape``: loss surfaces and flatness numbers of finished runs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedflat.cli.plates import Plates, print_plates
from fedflat.core.checks import wrong

WIDTH = 80


def landscape(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some (a comparison).")],
    points: Annotated[int, typer.Option(help="Points along each direction.")] = 41,
    span: Annotated[float, typer.Option(help="Farthest distance, in norms of the filters.")] = 1.0,
    directions: Annotated[int, typer.Option(help="2: surface and curve. 1: the curve only.")] = 2,
    examples: Annotated[int | None, typer.Option(help="Examples evaluated. Default: all.")] = None,
    curvature_examples: Annotated[int, typer.Option(help="Examples for eigenvalues, trace and sharpness.")] = 500,
    on: Annotated[str, typer.Option(help="test (public) or train (private to the simulation).")] = "test",
    clients: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Local models of these clients as well, for example 3,7.")
    ] = None,
    rho: Annotated[float, typer.Option(help="Radius of the sharpness.")] = 0.05,
    noise: Annotated[
        str, typer.Option(metavar="SIZES", help="Weight noise, relative to the weights.")
    ] = "0.05,0.1,0.2,0.3,0.5",
    draws: Annotated[int, typer.Option(help="Draws of weight noise.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of directions, noise and examples.")] = 0,
    precision: Annotated[
        str, typer.Option(help="Of the surface's forward passes: auto, float32 or bfloat16.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads. Default: one for each core.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for landscape.html and landscape.json. Default: the (first) run's.")
    ] = None,
    plates: Plates = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """How flat the loss is around finished runs' models: surfaces, curvature, sharpness, weight noise.

    Example: fedflat landscape runs/dp-fedavg runs/dp-fedsam --points 21

    Example: fedflat landscape comparison --clients 3,7 --on train
    """
    from fedflat.analysis import flatness
    from fedflat.report.flatness import figures, write_page
    from fedflat.report.metrics import plain

    settings = flatness.Settings(
        points=points, span=span, directions=directions, examples=examples, curvature_examples=curvature_examples,
        on=on, clients=tuple(_numbers("--clients", clients or "", int)), rho=rho,
        noise=tuple(_numbers("--noise", noise, float)), draws=draws, seed=seed, precision=precision, threads=threads,
    )  # fmt: skip
    settings.check()
    with _progress(quiet=as_json) as (on_stage, on_points):
        found = plain(flatness.measure(runs, settings, on_stage, on_points))
    folder = out or runs[0]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    (folder / "landscape.json").write_text(text + "\n", encoding="utf-8")
    page = write_page(found, folder / "landscape.html")
    print(text if as_json else f"{table(found)}\n\n{page}")
    if plates is not None:
        print_plates(figures(found), plates, [found], quiet=as_json)


def _numbers(where: str, text: str, kind: type) -> list[Any]:
    """The numbers of a list such as ``3,7``."""
    try:
        return [kind(each) for each in text.split(",") if each.strip()]
    except ValueError:
        raise wrong(
            where, text, "numbers with commas between them, for example " + ("3,7" if kind is int else "0.1,0.2")
        ) from None


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Any, Any]]:
    """A bar on the terminal for each model's surface; plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_interactive, transient=True) as bar:
        task = bar.add_task("", total=None)

        def stage(name: str, total: int) -> None:
            bar.reset(task, description=name, total=total or None)
            if not console.is_interactive:
                console.print(f"{name}" + (f": {total} points" if total else ""), highlight=False)

        yield stage, lambda count: bar.advance(task, count)


COLUMNS = (
    ("loss", "loss", False),
    ("accuracy", "acc. %", True),
    ("eigenvalue", "top eig.", False),
    ("trace", "trace", False),
    ("ascent", "sharpness", False),
    ("noise_accuracy", "noisy %", True),
)


def table(found: Mapping[str, Any]) -> str:
    """Means, below them the standard deviations over seeds, in 80 columns; then differences, notes and cost."""
    from fedflat.report.flatness import cost_text, difference_notes, pair_text

    settings, groups = found["settings"], found["groups"]
    several = len({group["model"] for group in groups}) > 1
    lines = [f"{'':20}" + "".join(f"{heading:>10}" for _, heading, _ in COLUMNS).rstrip()]
    for group in groups:
        name = group["label"] if not several else f"{group['label']}, {group['model']}"
        pairs = [pair_text(group["numbers"][key], percent) for key, _, percent in COLUMNS]
        lines.append(f"{name:20.20}" + "".join(f"{mean:>10}" for mean, _ in pairs))
        if len(group["seeds"]) > 1:
            lines.append(f"  ± sd of {len(group['seeds'])} seeds".ljust(20) + "".join(f"{sd:>10}" for _, sd in pairs))
    size = settings["noise"][len(settings["noise"]) // 2]
    said = [
        f"sharpness: rise of the loss within ρ = {settings['rho']:g}; noisy %: accuracy under weight noise of "
        f"{100 * size:g} % of the weights. Loss on {settings['on']} data.",
        *difference_notes(found),
        *found["notes"],
        cost_text(found["cost"]),
    ]
    if any(group["private"] for group in groups):
        said.insert(1, "Local models and training data are private to the simulation, not covered by the guarantee.")
    return "\n".join(
        [*lines, "", *(row for each in said for row in textwrap.wrap(each, WIDTH, subsequent_indent="  "))]
    )
