"""Which runs an experiment has: recipes × values given with commas × seeds, each with a folder of its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.config.recipe import Recipe, RecipeLike
from fedflat.core import durable
from fedflat.core.checks import InputError, wrong
from fedflat.records.folder import RECIPE, check_name

REQUESTED = "setting.yaml"  # the recipe as asked for, before defaults that depend on data are resolved


@dataclass(frozen=True)
class Setting:
    """One row of the comparison. ``slug`` names its folder; the seeds count up from the recipe's."""

    slug: str
    label: str
    recipe: Recipe
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One run: a setting with one seed, in its folder."""

    name: str
    recipe: Recipe
    folder: Path


def split_top(text: str) -> list[str]:
    """``text`` cut at the commas that are outside brackets, braces and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark in "[{(":
            depth += 1
        elif mark in "]})":
            depth -= 1
        elif mark == "," and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]]]


def axis(override: str) -> list[str]:
    """Return the overrides that ``key=a,b`` stands for; one for a plain value, a quoted text or a list in brackets."""
    key, equals, value = override.partition("=")
    if not equals:
        return [override]
    values = split_top(value)
    if len(values) == 1:
        return [override]
    if "" in values:
        raise wrong(f"-o {key}", value, "values between all commas")
    if len(set(values)) < len(values):
        raise wrong(f"-o {key}", value, "each value once")
    if key.strip() == "seed":
        raise wrong("-o seed", value, "one number to start from; --seeds N gives the number of runs")
    return [f"{key}={part}" for part in values]


def expand(recipes: Sequence[RecipeLike], overrides: Sequence[str], seeds: int) -> list[Setting]:
    """Return every setting of the experiment, its recipe and its method's options checked.

    Raises InputError for anything wrong in any of them, or for the same setting twice.
    """
    from fedflat.assembly.plans import algorithm_of

    if not recipes:
        raise wrong("compare", "no recipe", "one or more recipes")
    choices = [axis(text) for text in overrides]
    found: list[Setting] = []
    for source in recipes:
        for chosen in itertools.product(*choices):
            recipe = _parsed(source, chosen)
            algorithm_of(recipe)
            marks = [text for text, options in zip(chosen, choices) if len(options) > 1]
            numbers = tuple(range(recipe.seed, recipe.seed + seeds))
            found.append(Setting(_slug(recipe, marks), _label(recipe, marks), recipe, numbers))
    return _distinct(found)


def _parsed(source: RecipeLike, overrides: Sequence[str]) -> Recipe:
    if isinstance(source, (str, Path)):
        recipe = Recipe.load(source, overrides)
        check_name(recipe.name)
        return recipe
    return Recipe.of(source, overrides)


def _marks(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and value of the values that vary, the algorithm's name apart (it is always shown)."""
    for text in overrides:
        key, _, value = text.partition("=")
        path = key.strip().removesuffix(".name")
        if path != "algorithm":
            yield path.rsplit(".", 1)[-1], value.strip()


def _slug(recipe: Recipe, varied: Sequence[str]) -> str:
    """Return recipe, algorithm and values as a folder's name: the same whatever else is in the experiment."""
    parts = [recipe.name, recipe.algorithm.name, *(f"{key}-{value}" for key, value in _marks(varied))]
    return "_".join(re.sub(r"[^\w.+-]+", "-", part).strip("-.") or "x" for part in parts)[:120]


def _label(recipe: Recipe, varied: Sequence[str]) -> str:
    marks = ", ".join(f"{key}={value}" for key, value in _marks(varied))
    return f"{recipe.algorithm.name} ({marks})" if marks else recipe.algorithm.name


def _distinct(settings: list[Setting]) -> list[Setting]:
    """Return the settings, with labels that also name the recipe where they would be the same."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        other = seen.setdefault(setting.slug, setting)
        if other is not setting:
            twice = _asked(other) == _asked(setting)
            same = "the same setting twice" if twice else f"two settings named {setting.slug}"
            raise wrong("compare", same, "settings that differ, recipes with names of their own")
    labels = [setting.label for setting in settings]
    return [
        Setting(s.slug, f"{s.label}, {s.recipe.name}" if labels.count(s.label) > 1 else s.label, s.recipe, s.seeds)
        for s in settings
    ]


def _asked(setting: Setting) -> dict[str, Any]:
    """Return what defines a setting: its recipe without the seed and without where it runs."""
    dump = setting.recipe.dump()
    del dump["seed"], dump["engine"]
    return dump


def unused_folder(settings: Sequence[Setting], first: Path = Path("runs/compare")) -> Path:
    """Return ``first``, or the next of ``first-2``, ``first-3`` … that holds no setting of another comparison."""
    own = {setting.slug for setting in settings}
    folder, number = first, 1
    while {place.parent.name for place in folder.glob(f"*/{REQUESTED}")} - own:
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def check_folders(folder: Path, settings: Sequence[Setting]) -> None:
    """Raise InputError if a setting's place in ``folder`` holds runs of another recipe; nothing is written."""
    for setting in settings:
        _check_folder(folder / setting.slug, setting)


def claim(folder: Path, settings: Sequence[Setting]) -> None:
    """Note in each setting's folder what it is for. Raises InputError if it cannot be written."""
    for setting in settings:
        place = folder / setting.slug
        if (place / REQUESTED).is_file():
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            durable.replace(place / REQUESTED, _text(setting), mode=0o644)
        except OSError as error:
            found = f"{folder}, which cannot be written ({error.strerror})"
            raise wrong("--out", found, "a folder to write") from error


def _text(setting: Setting) -> str:
    import yaml

    return yaml.safe_dump(_asked(setting), sort_keys=False, allow_unicode=True)


def _check_folder(place: Path, setting: Setting) -> None:
    import yaml

    noted = place / REQUESTED
    if not noted.is_file():
        if any(place.glob(f"seed-*/{RECIPE}")):
            raise wrong("--out", f"{place}, which holds runs of something else", "a new folder")
        return
    try:
        there = yaml.safe_load(noted.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise wrong("--out", f"{noted}, which cannot be read", "the file as it was written, or a new folder") from error
    differs = _difference(there if isinstance(there, dict) else {}, json.loads(json.dumps(_asked(setting))))
    if differs:
        raise InputError(f"--out: found {place}, whose runs have {differs}; allowed: the same recipe, or a new folder.")


def _difference(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> str:
    """Return the first key in which two recipes differ, in words; empty if there is none."""
    for key in dict.fromkeys([*there, *here]):
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = _difference(old, new, f"{path}{key}.")
            if inner:
                return inner
        elif old != new:
            return f"{path}{key} = {old} where this one has {new}"
    return ""


def tasks(folder: Path, settings: Sequence[Setting]) -> list[Task]:
    """Return every run: all settings of the first seed, then of the second, so that a seed's data are loaded once."""
    return [
        Task(f"{setting.slug}/seed-{setting.seeds[turn]}", recipe, folder / setting.slug / f"seed-{recipe.seed}")
        for turn in range(len(settings[0].seeds))
        for setting in settings
        for recipe in [setting.recipe.model_copy(update={"seed": setting.seeds[turn]})]
    ]
