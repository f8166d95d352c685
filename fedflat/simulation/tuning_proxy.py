"""Settings tried on a random process of the same form: no client's data are met, so nothing is charged or hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.assembly.inputs import data_of
from fedflat.assembly.proxy import on_proxy
from fedflat.config.recipe import Recipe
from fedflat.core import durable
from fedflat.core.rng import stream
from fedflat.records.folder import METRICS, read_lines
from fedflat.report.progress import RunEvent
from fedflat.report.tuning import write_csv, write_picture
from fedflat.simulation.experiment import compare
from fedflat.simulation.experiment_settings import expand, tasks
from fedflat.simulation.tuning_settings import Axis, Settings, applied, axes, checked, draw, grid

CHOSEN, TABLE, PICTURE = "chosen.yaml", "settings.csv", "settings.svg"


@dataclass(frozen=True)
class OnProxy:
    """What a search on a random process found.

    rows: settings and accuracy on the process's own test examples, the best first. chosen: the recipe with the best
    ones, as a file that ``fedflat run`` takes; None while trials are left. dataset: the process's name.
    """

    folder: Path
    dataset: str
    rows: tuple[tuple[Settings, float], ...] = ()
    chosen: Path | None = None
    left: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


def settings_to_try(every: Sequence[Axis], count: int, seed: int) -> list[Settings]:
    """Every combination of listed values, if there are at most ``count``; else so many different draws."""
    all_of_them = grid(every)
    if all_of_them is not None and len(all_of_them) <= count:
        return all_of_them
    found: dict[tuple[str, ...], Settings] = {}
    for number in range(20 * count):
        one = draw(every, stream(seed, "settings on a proxy", number))
        found.setdefault(tuple(one.values()), one)
        if len(found) == count:
            break
    return list(found.values())


def tune_on_proxy(
    recipe: Recipe,
    varied: Sequence[str],
    count: int,
    folder: str | Path,
    processes: int | None = None,
    update: Callable[[RunEvent], None] | None = None,
) -> OnProxy:
    """Run ``count`` settings on a random process and write the recipe with the best; what is done already is kept.

    Of the recipe's data only public numbers are taken: the form of examples, classes, clients, and examples per client.
    Raises InputError: a setting that no recipe can have, data that are no images, or another search in ``folder``.
    """
    every, place = axes(varied), Path(folder)
    checked(recipe, every)
    there = on_proxy(recipe, data_of(recipe, None, None))
    tried = settings_to_try(every, count, recipe.seed)
    recipes = [
        applied(there, one).model_copy(update={"name": f"{number:03d} {_short(one)}"})
        for number, one in enumerate(tried, start=1)
    ]
    done = compare(recipes, (), 1, place, processes, update)
    if not done.complete:
        return OnProxy(place, there.data.dataset, left=done.left, failed=done.failed)
    runs = tasks(place, expand(recipes, (), 1))
    rows = sorted(zip(tried, (_accuracy(run.folder) for run in runs)), key=lambda row: -row[1])
    chosen = applied(recipe, rows[0][0])
    durable.replace(place / CHOSEN, _yaml(chosen), mode=0o644)
    write_csv(place / TABLE, rows)
    write_picture(place / PICTURE, rows)
    return OnProxy(place, there.data.dataset, tuple(rows), place / CHOSEN)


def _short(settings: Settings) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


def _accuracy(run: Path) -> float:
    """The last accuracy; of a task without one, minus the last loss."""
    last = read_lines(run / METRICS)[-1]
    accuracy, loss = last.get("test_accuracy"), last.get("test_loss")
    return float(accuracy) if accuracy is not None else -float(loss) if loss is not None else -math.inf


def _yaml(recipe: Recipe) -> str:
    import yaml

    return yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
