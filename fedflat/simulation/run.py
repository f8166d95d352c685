"""Run a recipe on this machine: train, write the files, hand back the result."""

import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.assembly.inputs import Clients, as_given
from fedflat.assembly.jobs import prepare
from fedflat.assembly.records import frozen_of, is_seeded, resolved
from fedflat.assembly.stating import Terms, state_privacy
from fedflat.config.reading import names
from fedflat.config.recipe import Recipe, RecipeLike, refuse_beside
from fedflat.core import Algorithm, CustomLoss, Factory, fresh_key, require, using_threads, wrong
from fedflat.data.clients import FederatedData
from fedflat.engine.device import PROCESSES
from fedflat.engine.job import Job, Metric, OnRound, Outcome, Record, RoundResult
from fedflat.engine.resume import software_of
from fedflat.engine.train import final_module, train, write_beginning, write_ending
from fedflat.records import keys
from fedflat.records.folder import OPENING, RECIPE, RunFolder, check_kinds, check_new, claimed
from fedflat.records.opening import Opening, refuse_older
from fedflat.records.signing import Operator
from fedflat.report.progress import Progress
from fedflat.simulation.result import Result


def run(
    recipe: RecipeLike, model: nn.Module | None = None, clients: Clients | None = None, test: Any = None,
    out: str | Path | None = None, *, task: str | None = None, loss: CustomLoss | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None, algorithm: Algorithm | Factory | None = None,
    data: FederatedData | None = None, resume: bool = False, key: str | Path | None = None,
    on_round: OnRound | None = None, on_start: Callable[[Job], None] | None = None,
    should_stop: Callable[[], bool] | None = None, progress: bool | None = None,
) -> Result:  # fmt: skip
    """Simulate a recipe on this machine: train, write the run's files, return what came of it.

    recipe: a Recipe, a dict, a packaged name or a path. model: any module; its weights are w^0 (it is not changed).
    clients: one ``(inputs, targets)`` pair per client, a dict user -> pair, or what ``fedflat.clients`` gave, instead
    of the recipe's data; inputs ``(n_i, …)``, targets ``(n_i,)``. test: a public pair.
    task: classification, multilabel, regression or next-token, instead of the recipe's. loss: (outputs, targets) -> the
    loss of each example ``(b,)``, instead of the task's. metrics: name -> a function (outputs, targets) -> number, or a
    torchmetrics object, on the whole public test set: ``test_NAME`` in the history; or names of ``evaluation.metrics``.
    data: the recipe's federation where it is loaded already.
    out: folder for the run's files; nothing is written without it. resume: go on with the run in ``out``.
    key: the private key that signs the run's records (``fedflat keys new``); default: the one in the usual place, if
    somebody made one, else the run is not signed.
    on_round: called after each round with its released record and the state it left (``state.model()`` is the released
    module, ``state.private`` the private record); True ends the run, which then costs what its whole plan costs.
    on_start: called with the job before the first round. should_stop: asked before each round; for interruptions, which
    no release decides: the ε stated is that of the rounds taken. One that follows private values has no ε at all.
    progress: whether stderr shows how far the run is; None: where stderr is a terminal.
    Raises InputError for anything wrong in what was given, before any work is done, and RunError for what fails later.

    >>> import torch
    >>> pairs = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(20)]
    >>> recipe = {"rounds": 2, "algorithm": "dp-fedavg", "local": {"steps": 1, "lr": 0.1}, "cohort": {"size": 10}}
    >>> recipe["privacy"] = {"clip": 0.5, "noise_multiplier": 1.0}
    >>> result = run(recipe, model=nn.Linear(4, 2), clients=pairs)
    >>> len(result.history), result.privacy["adversaries"][0]["adversary"]
    (2, 'recipients')
    """
    _check_call(out, resume, progress, on_round=on_round, on_start=on_start, should_stop=should_stop)
    asked = _asked(recipe, algorithm, task, out if resume else None)
    if not isinstance(recipe, Recipe) and recipe not in names():  # keys that the caller wrote, for this run
        arguments = {"model": model is not None, "clients": clients is not None, "loss": loss is not None}
        refuse_beside(asked, arguments, recipe.get("data") or () if isinstance(recipe, Mapping) else ())
    parsed = as_given(asked, model, clients, data, algorithm, loss)
    speaks = sys.stderr.isatty() if progress is None else progress
    with Progress(parsed, quiet=not speaks, stderr=True) as display:
        job = prepare(parsed, model, clients, test, algorithm=algorithm, data=data, loss=loss, metrics=metrics)
        job.stored = not is_seeded(parsed) and job.identity.method is not None
        if out is not None:
            keys.check_outside(Path(out), None if key is None else Path(key))
            job.operator = Operator.of_account() if key is None else Operator.load(Path(key))
            (_reopen if resume else _open)(Path(out), parsed, job)
        display.start(job)  # after the folder is claimed: a refused run must not look as if it had begun
        if on_start is not None:
            on_start(job)

        def after(released: Record, state: RoundResult) -> object:
            display.round(released, {})  # private values are not read: no early end follows from them
            return None if on_round is None else on_round(released, state)

        with using_threads(1):
            outcome = train(job, on_round=after if speaks else on_round, should_stop=should_stop)
    return _result(parsed, job, outcome)


def _check_call(out: str | Path | None, resume: bool, progress: bool | None, **callbacks: object) -> None:
    """Raise InputError for what is wrong in a call of ``run``, before anything is loaded."""
    for name, callback in callbacks.items():
        require(callback is None or callable(callback), name, callback, "a function, or None")
    require(out != "", "out", "nothing", "a folder, or None")
    require(not (out is None and resume), "resume", "no folder", "out=FOLDER of the run to go on with")
    if out is not None and not resume:
        check_new(Path(out))
    if progress is not None and not isinstance(progress, bool):
        raise wrong("progress", progress, "True, False, or None: on where stderr is a terminal")


def _asked(
    recipe: RecipeLike, algorithm: Algorithm | Factory | None, task: str | None, resumed: str | Path | None
) -> Recipe:
    """Return the recipe as it is asked for; one that is resumed keeps the engine it was started on."""
    if algorithm is not None and isinstance(recipe, Mapping):
        recipe = {"algorithm": getattr(algorithm, "name", "dp-fedavg"), **recipe}
    parsed = Recipe.of(recipe)
    if isinstance(algorithm, Algorithm) and isinstance(recipe, Mapping) and algorithm.name != parsed.algorithm.name:
        message = f"algorithm.name: {parsed.algorithm.name} has no effect beside algorithm=, which is {algorithm.name}"
        warnings.warn(message, stacklevel=3)
    if task is not None:
        parsed = Recipe.of({**parsed.dump(), "task": task}, where="run")
    return parsed if resumed is None else _on_the_same_engine(parsed, Path(resumed))


def _result(recipe: Recipe, job: Job, outcome: Outcome) -> Result:
    """Return what a run gives back, once all that it leaves on disk is written."""
    facts, module = write_ending(job, outcome, state_privacy(recipe, job, outcome)), final_module(job, outcome)
    return Result(
        history=outcome.history, private_history=outcome.private, privacy=facts, recipe=recipe,
        folder=None if job.folder is None else job.folder.path, stopped=outcome.stopped,
        heads=dict(outcome.heads.kept), stages=dict(job.stages), notes=outcome.notes, make_module=lambda: module,
        made_for=job.made_for,
    )  # fmt: skip


def _on_the_same_engine(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe with the engine that the run in ``path`` was started on; what is asked for otherwise stays."""
    if not (path / RECIPE).is_file():
        return recipe
    if (path / OPENING).is_file():
        refuse_older("--resume", path, Opening.read(path).terms)
    started, asked = Recipe.load(path).engine, recipe.engine
    if asked.device == "auto" and asked.backend not in PROCESSES:
        asked = asked.model_copy(update={"device": started.device})
    if asked.backend != "auto" or asked.device.partition(":")[0] != started.device.partition(":")[0]:
        return recipe.model_copy(update={"engine": asked})
    return recipe.model_copy(update={"engine": started.model_copy(update=asked.model_dump(exclude_defaults=True))})


def _open(path: Path, recipe: Recipe, job: Job) -> None:
    """Give the job a new run folder, with what the run is and its recipe in it, and the key file it needs."""
    with claimed(path):
        name = secrets.token_hex(16) if job.stored else None
        text = resolved(recipe, job, name)
        root = fresh_key() if job.stored or job.identity.method is None else job.key
        job.opening = Opening.of(job.identity, root, text, software_of(job), name, Terms.of(recipe, job).record())
        if name is not None:
            keys.create(name)
        write_beginning(path, text, job, frozen_of(job))
    job.folder = RunFolder(path, run=job.opening.run)


def _reopen(path: Path, recipe: Recipe, job: Job) -> None:
    """Give the job the folder of the run that is resumed.

    Raises:
        InputError: it is no run's, or that of another run; what differs is named.
    """
    require((path / RECIPE).is_file(), "--resume", str(path), "the folder of a run (it has a recipe.yaml)")
    check_kinds(path)
    job.opening = Opening.read(path)
    differing = job.opening.differing(job.identity)
    mismatch = f"{path}, but another {' and another '.join(differing)} than it was started with"
    require(not differing, "--resume", mismatch, "the run as it was started")
    if not job.opening.is_recipe((path / RECIPE).read_bytes()):
        job.say("recipe.yaml is not as it was written; nothing in it that changes what is released differs")
    job.folder = RunFolder(path, run=job.opening.run)
