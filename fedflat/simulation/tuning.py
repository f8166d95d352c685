"""Settings chosen by private selection: a secret number of trials, each a whole private run, of which one is released.

In the folder: ``selection.yaml`` (what is public: recipe, distribution of settings, law of the number, ε) and
``charge.jsonl`` (the whole selection, charged before the first trial starts), then ``winner/``, the winning trial's run
folder. ``private/`` holds the draw (number of trials, settings, scores) and the trials while they run; the losers'
folders and keys are deleted at the end. The files outside ``private/`` get the time at which the selection was charged.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.assembly.inputs import data_of, on_proxy
from fedflat.assembly.plans import plan_of
from fedflat.assembly.tasks import objective_of
from fedflat.config.method import algorithm_of
from fedflat.config.reading import dumped
from fedflat.config.recipe import Recipe
from fedflat.core import InputError, RunError, digest, durable, fresh_key, noise_key, reading, require, stream, wrong
from fedflat.data.sources import load_validation
from fedflat.privacy import tuning
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Plan
from fedflat.privacy.tuning import Selection
from fedflat.records import keys
from fedflat.records.folder import METRICS, read_lines
from fedflat.records.opening import Opening
from fedflat.simulation import settings as space
from fedflat.simulation.experiment import Update, compare
from fedflat.simulation.settings import CHARGE, PUBLIC, WINNER, Axis, Settings, Task, expand, tasks

DRAW, TRIALS = "private/draw.json", "private/trials"
APART = 0.5
"""``data.validation_fraction`` where a recipe says nothing."""
SCORE = (
    "mean accuracy (or minus the loss) on the public examples that data.validation_fraction sets apart from the test "
    "data"
)
RANKED = ("selection.yaml", "charge.jsonl", "winner", "private", ".")


@dataclass(frozen=True)
class Asked:
    """A selection before anything is drawn: all of it is public.

    recipe: what all trials share. axes: what varies. selection: the law of their number. plan: of every trial; its ε is
    that of the selection.
    """

    recipe: Recipe
    axes: tuple[Axis, ...]
    selection: Selection
    plan: Plan

    def public(self) -> dict[str, Any]:
        """Return everything that may be known of it: the content of ``selection.yaml``."""
        return {
            "settings": [axis.text for axis in self.axes],
            "trials": {"law": "geometric", **self.selection.record()},
            "score": SCORE, "epsilon": self.plan.epsilon(), "delta": self.plan.delta, "relation": self.plan.relation,
            "rounds": self.plan.rounds, "noise_multiplier": self.plan.noise_multiplier,
            "recipe": {name: keys for name, keys in self.recipe.dump().items() if name not in ("engine", "evaluation")},
        }  # fmt: skip


@dataclass(frozen=True)
class Selected:
    """What came of a selection. winner: the run's folder, of which settings and score are."""

    folder: Path
    asked: Asked
    winner: Path
    settings: Settings
    score: float


def ask(recipe: Recipe, varied: Sequence[str], selection: Selection, clients: int | None = None) -> Asked:
    """Check a selection and work out its noise, or its ε; nothing is drawn and no data are read.

    clients: M, where the recipe leaves it to its data.
    Raises InputError for whatever is wrong in any setting that could be drawn, or has no proof.
    """
    every = space.axes(varied, private=True)
    budget, sampling = recipe.privacy.budget, recipe.cohort.sampling
    require(budget is None, "privacy.budget", budget, "nothing: the selection's ε is the budget")
    require(recipe.privacy.selection is None, "privacy.selection", "one", "a recipe that is not a trial's")
    allowed = f"{', '.join(tuning.SAMPLINGS)}, whose Rényi divergence has a bound"
    require(sampling in tuning.SAMPLINGS, "cohort.sampling", sampling, allowed)
    clients = recipe.data.clients if clients is None else clients
    if clients is None:
        raise wrong("data.clients", "nothing", "a number of clients")
    share = recipe.data.validation_fraction or APART
    privacy: dict[str, Any] = {"accountant": "rdp", "selection": {"mean": selection.mean}}
    shared = space.applied(recipe, {}, data={"validation_fraction": share}, privacy=privacy)
    others = space.checked(shared, every)
    plan = plan_of(shared, algorithm_of(shared), clients)
    sigma, proven = plan.noise_multiplier, math.isfinite(plan.epsilon())
    require(proven, "privacy.noise_multiplier", sigma, "noise: without it nothing is proven")
    for other in others:  # with the noise given, so that none is calibrated
        fixed = space.applied(other, {}, privacy={"epsilon": None, "noise_multiplier": sigma})
        plan_of(fixed, algorithm_of(fixed), clients)
    return Asked(shared, every, selection, plan)


def tune(asked: Asked, folder: str | Path, processes: int | None = None, update: Update | None = None) -> Selected:
    """Draw the trials, run them, and leave the best one's release in ``folder``; what was begun there is gone on with.

    The whole selection is charged before the first trial starts. Nothing is drawn twice: the same command after a kill
    goes on with the same trials. Ctrl-C lets running rounds finish. processes: trials at a time, as ``compare``.
    Raises InputError: ``folder`` holds something else, or its draw is gone. RunError: a trial failed or was stopped, or
    its records are damaged.
    """
    place = Path(folder)
    _claim(place, asked)
    with Ledger.open(place / CHARGE) as ledger:
        drawn = _drawn(place, asked, bool(ledger.entries))
        if "winner" not in drawn:
            public = load_validation(asked.recipe.data, asked.recipe.seed)  # without data nothing is charged
            if not ledger.entries:
                ledger.append(space.charge(asked.plan, asked.public()))
            _work(place, asked, drawn, public, processes, update)
        _release(place, drawn)
    _hide_times(place)
    best = next(trial for trial in drawn["trials"] if trial["name"] == drawn["winner"])
    return Selected(place, asked, place / WINNER, best["settings"], best["score"])


def _claim(place: Path, asked: Asked) -> None:
    """Write what is public, or check that it is what lies there."""
    public = json.loads(json.dumps(asked.public()))
    if (place / PUBLIC).is_file():
        same, allowed = space.read_noted(place / PUBLIC) == public, "the same recipe and options, or a new folder"
        require(same, "--out", f"{place}, which holds another selection", allowed)
    elif place.is_dir() and any(place.iterdir()):
        raise wrong("--out", f"{place}, which holds something else", "a new folder")
    keys.check_outside(place)
    space.note(place / PUBLIC, public)


def _drawn(place: Path, asked: Asked, charged: bool) -> dict[str, Any]:
    """Return the number of trials and their settings: as they were drawn before, or drawn now and written down."""
    path, public = place / DRAW, durable.digest_of_json(asked.public())
    if path.is_file():
        with reading(path, "a damaged draw, or another selection's", "the file that was written at the start"):
            record = json.loads(path.read_bytes())
            if not (isinstance(record, dict) and record.get("of") == public and isinstance(record.get("trials"), list)):
                raise ValueError("not of this recipe and these settings")
            return record
    if charged:
        hint = "Drawing again is another selection with a charge of its own: choose a new folder."
        raise wrong(str(path), "no such file", "the draw of the selection that was charged", hint=hint)
    key = noise_key(fresh_key(), "private selection", public)  # that nobody knows how many there are is in the proof
    count = asked.selection.draw(stream(key, "number of trials"))
    drawn = (space.draw(asked.axes, stream(key, "settings", i)) for i in range(count))
    names = (digest(key, "name of a trial", i).hex()[:16] for i in range(count))
    return _keep(place, {"of": public, "trials": [{"name": name, "settings": s} for name, s in zip(names, drawn)]})


def _keep(place: Path, drawn: dict[str, Any]) -> dict[str, Any]:
    (place / "private").mkdir(mode=0o700, exist_ok=True)
    durable.replace(place / DRAW, json.dumps(drawn, indent=1) + "\n", mode=0o600)
    return drawn


def trial_recipe(asked: Asked, trial: Mapping[str, Any]) -> Recipe:
    """Return the whole recipe of one trial, its noise and its place in the selection included."""
    recipe = space.applied(asked.recipe, trial["settings"])
    privacy = {
        "epsilon": None, "noise_multiplier": asked.plan.noise_multiplier,
        "selection": {"mean": asked.selection.mean, "trial": trial["name"]},
        "budget": max(asked.plan.budget or 0.0, asked.plan.epsilon()),
    }  # fmt: skip
    named = recipe.model_copy(update={"name": f"{asked.recipe.name}-{trial['name'][:8]}"})
    return space.applied(named, {}, privacy=privacy)


def _work(
    place: Path, asked: Asked, drawn: dict[str, Any], public: tuple[Tensor, Tensor], processes: int | None,
    update: Update | None,
) -> None:  # fmt: skip
    """Run every trial, score it and note the winner."""
    recipes = [trial_recipe(asked, trial) for trial in drawn["trials"]]
    (place / TRIALS).mkdir(mode=0o700, exist_ok=True)
    for trial, run in zip(drawn["trials"], _trained(recipes, place / TRIALS, processes, update)):
        trial["score"] = score(run.folder, run.recipe, *public)
    drawn["winner"] = max(drawn["trials"], key=lambda trial: (trial["score"], trial["name"]))["name"]
    _keep(place, drawn)


def _trained(recipes: Sequence[Recipe], place: Path, processes: int | None, update: Update | None) -> list[Task]:
    """Run what is left of each recipe's run and return all of them. Raises RunError where some are left still."""
    trials = compare(recipes, (), 1, place, processes, update)
    if not trials.complete:
        why = next(iter(trials.failed.values()), "stopped as asked")
        raise RunError(f"{len(trials.failed)} trials failed, {trials.left} are left ({why}); the same command goes on")
    return tasks(place, expand(recipes, (), 1))


def score(run: Path, recipe: Recipe, inputs: Tensor, targets: Tensor) -> float:
    """Return how good a run's release is on public examples: accuracy, or minus the loss of a task without one; -1e300
    for a release that is not finite."""
    from fedflat.simulation.result import load

    objective, model = objective_of(recipe, None), load(run).model
    with torch.no_grad():
        pairs = [objective(model(some).float(), right) for some, right in zip(inputs.split(500), targets.split(500))]
    loss, accuracy = (float(torch.cat(values).mean()) for values in zip(*pairs))
    value = accuracy if objective.scored else -loss
    return value if math.isfinite(value) else -1e300


def _release(place: Path, drawn: Mapping[str, Any]) -> None:
    """Move the winner's folder out of ``private/``, and delete the losers', their noise keys and marks."""
    from fedflat.report.html import write_report

    trials, target = place / TRIALS, place / WINNER
    for run in sorted(trials.glob("*/*/recipe.yaml")):
        selection = Recipe.load(run.parent).privacy.selection
        if selection is not None and selection.trial == drawn["winner"]:
            os.rename(run.parent, target)
        else:
            _forget(run.parent)
    if not target.is_dir():
        raise RunError(f"{target}: the winning trial's folder is gone")
    write_report([target], target / "report.html")
    (target / "ledger.lock").unlink(missing_ok=True)
    shutil.rmtree(trials, ignore_errors=True)


def _forget(run: Path) -> None:
    """Delete a loser's key and mark, which lie outside its folder and whose number would tell how many there were."""
    with contextlib.suppress(InputError):  # half of it was deleted before a kill
        name = Opening.read(run).run
        keys.forget(name)
        keys.Mark(name).forget()
    shutil.rmtree(run)


def _hide_times(place: Path) -> None:
    """Give everything outside ``private/`` the time of the charge, so that no file tells how long the trials took."""
    # The number of trials is part of the proof's secret, and times would tell how long all of them took.
    when = (place / CHARGE).stat().st_mtime_ns
    inside = sorted((place / WINNER).rglob("*"), key=lambda path: -len(path.parts)) if (place / WINNER).is_dir() else []
    for path in (*inside, *(place / name for name in RANKED), (place / CHARGE).with_suffix(".lock")):
        if path.exists():
            os.utime(path, ns=(when, when))


CHOSEN, TABLE = "chosen.yaml", "settings.csv"


@dataclass(frozen=True)
class OnProxy:
    """What a search on a random process found.

    rows: settings and accuracy on the process's own test examples, the best first. chosen: the recipe with the best
    ones, as a file that ``fedflat run`` takes. dataset: the process's name.
    """

    dataset: str
    rows: tuple[tuple[Settings, float], ...]
    chosen: Path


def settings_to_try(every: Sequence[Axis], count: int, seed: int) -> list[Settings]:
    """Return every combination of listed values, if there are at most ``count``; else so many different draws."""
    listed = space.grid(every)
    if listed is not None and len(listed) <= count:
        return listed
    draws = (space.draw(every, stream(seed, "settings on a proxy", number)) for number in range(20 * count))
    return [*{tuple(settings.values()): settings for settings in draws}.values()][:count]


def tune_on_proxy(
    recipe: Recipe, varied: Sequence[str], count: int, folder: str | Path, processes: int | None = None,
    update: Update | None = None,
) -> OnProxy:  # fmt: skip
    """Run ``count`` settings on a random process and write the recipe with the best; what is done already is kept.

    Of the recipe's data only public numbers are taken: the form of examples, classes, clients, and examples per client.
    Raises InputError: a setting that no recipe can have, data that are no images, or another search in ``folder``.
    RunError: a run failed or was stopped.
    """
    every, place = space.axes(varied, private=False), Path(folder)
    import pandas

    space.checked(recipe, every)
    there = on_proxy(recipe, data_of(recipe, None, None))
    tried = settings_to_try(every, count, recipe.seed)
    recipes = [
        space.applied(there, settings).model_copy(update={"name": f"{number:03d} {_short(settings)}"})
        for number, settings in enumerate(tried, start=1)
    ]
    accuracies = [_accuracy(run.folder) for run in _trained(recipes, place, processes, update)]
    rows = sorted(zip(tried, accuracies), key=lambda row: -row[1])
    text = dumped(space.applied(recipe, rows[0][0]).model_dump(mode="json", exclude_defaults=True))
    durable.replace(place / CHOSEN, text, mode=0o644)
    table = pandas.DataFrame([{**settings, "accuracy": f"{accuracy:.6g}"} for settings, accuracy in rows])
    table.to_csv(place / TABLE, index=False, lineterminator="\n")
    return OnProxy(there.data.dataset, tuple(rows), place / CHOSEN)


def _short(settings: Settings) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


def _accuracy(run: Path) -> float:
    """Return the last accuracy; of a task without one, minus the last loss."""
    last = read_lines(run / METRICS)[-1]
    accuracy, loss = last.get("test_accuracy"), last.get("test_loss")
    return float(accuracy) if accuracy is not None else -float(loss) if loss is not None else -math.inf
