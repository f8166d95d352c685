"""``fedflat run`` and ``fedflat compare``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedflat.core import stopping
from fedflat.core.checks import wrong

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="Change one key of the recipe, for example -o privacy.epsilon=4."
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the run's files. Default: runs/NAME, with a number if it exists.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A packaged recipe's name or a YAML file. Default: the quick start.")
    ] = None,
    override: Overrides = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write what is released to TensorBoard event files.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Also write what is released to an MLflow store or server.")
    ] = None,
    track_private: Annotated[
        bool, typer.Option("--track-private", help="Send trackers what is private to the simulation too, marked so.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Print the time spent by stage.")] = False,
    as_json: Json = False,
) -> None:
    """Train one recipe: live progress, a summary, the privacy statement in one line, and the report's path.

    Example: fedflat run quick-start -o privacy.epsilon=4 -o seed=1
    """
    from fedflat.config.reading import QUICK_START
    from fedflat.config.recipe import Recipe
    from fedflat.records.folder import check_new
    from fedflat.report.cautions import Watch
    from fedflat.report.progress import Progress
    from fedflat.report.trackers import Trackers

    if resume is not None and (recipe is not None or override or out is not None):
        raise wrong("--resume", "a recipe, -o or --out as well", "--resume DIR alone: it goes on as it was started")
    if resume is not None and not (resume / "recipe.yaml").is_file():
        found = f"{resume}, {'which has no recipe.yaml' if resume.is_dir() else 'which is no folder'}"
        raise wrong("--resume", found, "the folder of a run that fedflat run wrote")
    if out is not None and resume is None:
        check_new(out)  # torch alone takes seconds to load
    parsed = Recipe.load(resume if resume is not None else (recipe or QUICK_START), override or [])
    folder = resume or out or free_folder(Path("runs"), parsed.name)
    trackers = Trackers(parsed, tensorboard=tensorboard, mlflow=mlflow, private=track_private)
    with stopping.on_request("this round"), trackers, Progress(parsed, quiet=as_json) as progress:
        from fedflat.simulation import (
            run as simulation,  # torch and all the rest: seconds, spent under the first line of progress
        )
        from fedflat.simulation.planning import drowned

        watch = Watch()

        def after(released: dict[str, Any], state: Any) -> None:
            private = state.private
            progress.round(released, private)
            trackers.round(released, private)
            if said := watch.round(released, private):
                _aloud(said)

        def begin(job: Any) -> None:
            progress.start(job)
            for note in [*job.notes, *drowned(parsed, job)]:
                _aloud(note)
            job.tell = _aloud

        result = simulation.run(
            parsed,
            out=folder,
            resume=resume is not None,
            on_start=begin,
            on_round=after,
            should_stop=lambda: bool(stopping.asked()),
        )
    _finish(result, folder, as_json, profile)
    if stopping.asked() and result.stopped:
        raise typer.Exit(1)


def _aloud(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def _finish(result: Any, folder: Path, as_json: bool, profile: bool) -> None:
    from fedflat.report.endings import print_stages, print_summary
    from fedflat.report.html import write_report

    page = write_report([folder], folder / "report.html")
    if as_json:
        last = result.history[-1] if result.history else {}
        facts = {"folder": str(folder), "report": str(page), "last": last, "privacy": result.privacy}
        print(json.dumps({**facts, "warnings": result.warnings}, default=str))
    else:
        print_summary(result, folder, page)
        if profile:
            print_stages(result.stages)


def free_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or the first ``parent/name-2``, ``-3``, … that does not exist."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def compare(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Packaged names or YAML files. Default: the quick start.")
    ] = None,
    override: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each setting: the recipe's seed and the numbers after it.")
    ] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder of the experiment. Default: runs/compare.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: the number of cores.")] = None,
    as_json: Json = False,
) -> None:
    """Compare recipes, or one recipe over values: -o algorithm.name=dp-fedavg,dp-fedsam. Runs that are done are kept.

    A value with commas makes a setting of each part, several such values make
    every combination; a list in square brackets is one value.
    After Ctrl-C or a failure the same command goes on.

    Example: fedflat compare quick-start -o algorithm.name=dp-fedavg,dp-fedsam --seeds 3
    """
    from fedflat.config.reading import QUICK_START
    from fedflat.report.endings import print_comparison
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.experiment import compare as compare_settings

    began = time.perf_counter()
    folder = out or Path("runs") / "compare"
    with ExperimentProgress(quiet=as_json) as progress:
        found = compare_settings(recipes or [QUICK_START], override or [], seeds, folder, processes, progress.update)
    if as_json:
        print(json.dumps(found.as_dict(), default=str))
    else:
        print_comparison(found, time.perf_counter() - began)
    if not found.complete:
        raise typer.Exit(1)
