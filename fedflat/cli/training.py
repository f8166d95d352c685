"""Commands that train: ``run``, ``compare``, and ``deploy`` for a Flower federation."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fedflat.cli import Count, File, Folder, Json, Overrides, Processes, RecipeName, filled, json_text, recipe_of
from fedflat.core import RunError, process, require
from fedflat.records.folder import check_name, check_new

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.report.progress import Progress

Live = Annotated[bool, Option("--watch", help="Serve a live page on 127.0.0.1 while it goes on.")]


def run(
    recipe: RecipeName = None,
    *,
    override: Overrides = None,
    out: Path | None = None,
    resume: Folder = None,
    key: File = None,
    watch: Live = False,
    as_json: Json = False,
) -> None:
    """Train one recipe: live progress, a summary, the privacy statement in one line, and the report's path.

    Example: fedflat run quick-start -o privacy.epsilon=4 -o seed=1

    Args:
        out: Folder for the run's files. Default: runs/NAME, with a number if it exists.
        resume: Go on with the run in this folder.
        key: Private key that signs the records. Default: fedflat keys' own, if any.
    """
    if resume is not None:
        _check_resumed(resume, beside=recipe is not None or bool(override) or out is not None)
    elif out is not None:
        check_new(out)  # here too, before torch takes seconds to load
    parsed = recipe_of(resume or recipe, override)
    from fedflat.report.progress import Progress

    folder = resume or out or free_folder(Path("runs"), parsed.name)
    progress = Progress(parsed, quiet=as_json)
    with _watched(folder, watch), process.on_request("this round, or now if none has begun"), progress:
        # Torch and all the rest take seconds to import: they are spent under the first line of progress.
        from fedflat.report.html import write_report
        from fedflat.report.summary import print_summary
        from fedflat.simulation.run import run as simulate

        result = simulate(
            parsed, out=folder, resume=resume is not None, key=key, progress=False,
            should_stop=lambda: bool(process.stop_signal()), **_callbacks(parsed, progress),
        )  # fmt: skip
    page = write_report([folder], folder / "report.html")
    if as_json:
        facts = {"folder": folder, "report": page, "last": (result.history or [{}])[-1], "privacy": result.privacy}
        print(json_text({**facts, "warnings": result.warnings}))
    else:
        if resume and not (result.stages or result.stopped):
            print(f"{folder}: this run had ended already; nothing was trained.")
        print_summary(result, folder, page)
    if process.stop_signal() and result.stopped:
        raise typer.Exit(1)
    _refuse_noise_alone(result.private_history)


def _refuse_noise_alone(private: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError for a run in which no client's update was ever finite: all of them counted as zero."""
    trained = [record for record in private if record.get("cohort")]
    if trained and all(record.get("malformed") == record["cohort"] for record in trained):
        remedy = "Lower local.lr, or scale the inputs to about 1 (data.scale)."
        raise RunError(f"no update of any client was finite in any round: the model is noise alone. {remedy}")


def _check_resumed(folder: Path, beside: bool) -> None:
    """Raise InputError for a folder that holds no run, or for anything given beside it: a run goes on as it was."""
    require(not beside, "--resume", "a recipe, -o or --out as well", "--resume DIR alone: it goes on as it was started")
    state = f"{folder}, {'which has no recipe.yaml' if folder.is_dir() else 'which is no folder'}"
    require((folder / "recipe.yaml").is_file(), "--resume", state, "the folder of a run that fedflat run wrote")


def _callbacks(recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Return what is called before the first round, and after each one."""
    from fedflat.assembly.planning import drowned
    from fedflat.report.summary import DivergenceWatch

    divergence = DivergenceWatch()

    def begin(job: Any) -> None:
        progress.start(job)
        for note in [*job.notes, *drowned(recipe, job)]:
            _note(note)
        job.tell = _note

    def after_round(released: dict[str, Any], state: Any) -> None:
        progress.round(released, state.private)
        if warning := divergence.round(released, state.private):
            _note(warning)

    return {"on_start": begin, "on_round": after_round}


@contextlib.contextmanager
def _watched(folder: Path, wanted: bool) -> Iterator[None]:
    """Serve a live page of the folder inside the block, if it is wanted; its address goes to stderr."""
    if not wanted:
        yield
        return
    from fedflat.report.live import Live as Page
    from fedflat.report.live import served

    with served(Page(folder)) as address:
        print(f"watch: {address}", file=sys.stderr, flush=True)
        yield


def _note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def free_folder(parent: Path, name: str) -> Path:
    """Return ``parent/name``, or the first ``parent/name-2``, ``-3``, … that does not exist.

    Raises InputError for a name that would lead out of ``parent``.
    """
    check_name(name)
    folders = (parent / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def compare(
    recipes: list[str] | None = None,
    *,
    override: Overrides = None,
    seeds: Annotated[int, Option(min=1)] = 3,
    out: Path | None = None,
    processes: Processes = None,
    watch: Live = False,
    as_json: Json = False,
) -> None:
    """Compare recipes, or one recipe over values: -o algorithm.name=dp-fedavg,dp-fedsam. Runs that are done are kept.

    A value with commas makes a setting of each part, several such values make
    every combination; a list in square brackets is one value.
    After Ctrl-C or a failure the same command goes on.

    Example: fedflat compare quick-start -o algorithm.name=dp-fedavg,dp-fedsam --seeds 3

    Args:
        recipes: Packaged names or YAML files. Default: the quick start.
        seeds: Runs of each setting: the recipe's seed and the numbers after it.
        out: Folder of the experiment. Default: a new one under runs/.
    """
    from fedflat.config.reading import QUICK_START
    from fedflat.report.progress import ExperimentProgress
    from fedflat.report.summary import print_comparison
    from fedflat.simulation.experiment import compare as compare_settings

    began = time.perf_counter()
    folder = out if out is not None or not watch else Path("runs") / "compare"
    with _watched(folder or Path(), watch), ExperimentProgress(quiet=as_json) as progress:
        outcome = compare_settings(recipes or [QUICK_START], override or [], seeds, folder, processes, progress.update)
    if as_json:
        print(json_text(outcome.as_dict()))
    else:
        print_comparison(outcome, time.perf_counter() - began)
    if not outcome.complete:
        raise typer.Exit(1)


def deploy(
    recipe: str,
    *,
    out: Path,
    nodes: Count = None,
    override: Overrides = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65534)] = 8443,
    watch: bool = False,
) -> None:
    """Make a Flower project of a recipe: app, test certificates, one folder for each client, README with every command.

    Example: fedflat deploy quick-start --out federation --nodes 3 -o cohort.size=2

    Args:
        recipe: A packaged recipe's name or a YAML file.
        out: New folder for the Flower project.
        nodes: Number of clients M. Default: the recipe's data.clients.
        host: Name or address under which clients reach the SuperLink.
        port: The SuperLink's port; orders come through the next one, on 127.0.0.1.
        watch: Then serve a live page on 127.0.0.1 that follows it, until Ctrl-C.
    """
    parsed = recipe_of(recipe, override)  # before torch takes seconds to load
    from fedflat.federation import check_flower, write_project

    check_flower()
    project = write_project(parsed, out, nodes, port, host)
    print("\n".join(filled("deploy.txt", project=project)))
    if watch:
        from fedflat.cli.catalogue import watch as follow

        follow(project.folder)
