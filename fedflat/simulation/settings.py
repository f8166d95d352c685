"""The settings that an experiment compares, and those that a selection draws from.

An experiment has recipes × values given with commas × seeds, each run with a folder of its own. A selection draws each
key by itself, uniformly from a list or from a range; what is public of it and its charge are here too. Nothing of it
may depend on anybody's data, and the charge is written before the first trial starts.
"""

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedflat.config.method import algorithm_of
from fedflat.config.reading import dumped, parse_value
from fedflat.config.recipe import Recipe, RecipeLike
from fedflat.core import InputError, durable, making, nearest, require, turning, wrong
from fedflat.privacy.ledger import read
from fedflat.privacy.plan import Plan
from fedflat.records.folder import RECIPE, check_name
from fedflat.simulation.recomputed import differences

REQUESTED = "setting.yaml"
"""The recipe as asked for, before defaults that depend on data are resolved."""


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
    """Return ``text`` cut at the commas that are outside brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        depth += 0 if quote else (mark in "[{(") - (mark in "]})")
        if mark == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += mark
    return [part.strip() for part in parts]


def axis(override: str) -> list[str]:
    """Return the overrides that ``key=a,b`` stands for; one for a plain value, a quoted text or a list in brackets."""
    key, _, value = override.partition("=")
    values = split_top(value)
    if len(values) == 1:
        return [override]
    require("" not in values, f"-o {key}", value, "values between all commas")
    require(len(set(values)) == len(values), f"-o {key}", value, "each value once")
    require(key.strip() != "seed", "-o seed", value, "one number to start from; --seeds N gives the number of runs")
    return [f"{key}={part}" for part in values]


def expand(recipes: Sequence[RecipeLike], overrides: Sequence[str], seeds: int) -> list[Setting]:
    """Return every setting of the experiment, its recipe and its method's options checked.

    Raises InputError for anything wrong in any of them, or for the same setting twice.
    """
    require(bool(recipes), "compare", "no recipe", "one or more recipes")
    choices = [axis(text) for text in overrides]
    settings: list[Setting] = []
    for source, chosen in itertools.product(recipes, itertools.product(*choices)):
        recipe = Recipe.of(source, chosen)
        if isinstance(source, (str, Path)):
            check_name(recipe.name)
        algorithm_of(recipe)
        marks = [*_marks(text for text, options in zip(chosen, choices) if len(options) > 1)]
        numbers = tuple(range(recipe.seed, recipe.seed + seeds))
        settings.append(Setting(_slug(recipe, marks), _label(recipe, marks), recipe, numbers))
    return _distinct(settings)


Mark = tuple[str, str]
"""The last part of a key that varies, and its value."""


def _marks(overrides: Iterable[str]) -> Iterator[Mark]:
    """Yield the values that vary, the algorithm's name apart (it is always shown)."""
    for text in overrides:
        key, _, value = text.partition("=")
        path = key.strip().removesuffix(".name")
        if path != "algorithm":
            yield path.rsplit(".", 1)[-1], value.strip()


def _slug(recipe: Recipe, marks: Sequence[Mark]) -> str:
    """Return recipe, algorithm and values as a folder's name: the same whatever else is in the experiment."""
    parts = [recipe.name, recipe.algorithm.name, *(f"{key}-{value}" for key, value in marks)]
    return "_".join(re.sub(r"[^\w.+-]+", "-", part).strip("-.") or "x" for part in parts)[:120]


def _label(recipe: Recipe, marks: Sequence[Mark]) -> str:
    listed = ", ".join(f"{key}={value}" for key, value in marks)
    return f"{recipe.algorithm.name} ({listed})" if listed else recipe.algorithm.name


def _distinct(settings: list[Setting]) -> list[Setting]:
    """Return the settings, with labels that also name the recipe where they would be the same."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        if seen.setdefault(setting.slug, setting) is not setting:
            allowed = "settings that differ, recipes with names of their own"
            raise wrong("compare", f"two settings named {setting.slug}", allowed)
    times = Counter(setting.label for setting in settings)
    return [replace(s, label=f"{s.label}, {s.recipe.name}") if times[s.label] > 1 else s for s in settings]


def _asked(setting: Setting) -> dict[str, Any]:
    """Return what defines a setting: its recipe without the seed and without where it runs."""
    return setting.recipe.model_dump(mode="json", exclude={"seed", "engine"})


def unused_folder(settings: Sequence[Setting]) -> Path:
    """Return ``runs/compare``, or the next of ``runs/compare-2`` … that holds no setting of another comparison."""
    slugs = {setting.slug for setting in settings}
    folders = (Path(f"runs/compare-{number}" if number > 1 else "runs/compare") for number in itertools.count(1))
    return next(folder for folder in folders if not {p.parent.name for p in folder.glob(f"*/{REQUESTED}")} - slugs)


def check_folders(folder: Path, settings: Sequence[Setting]) -> None:
    """Raise InputError if a setting's place in ``folder`` holds runs of another recipe; nothing is written."""
    for setting in settings:
        place = folder / setting.slug
        if (place / REQUESTED).is_file():
            here = json.loads(json.dumps(_asked(setting)))
            for key, old, new in differences(read_noted(place / REQUESTED), here, close=0.0, missing=None):
                other = f"{place}, whose runs have {key} = {old} where this one has {new}"
                raise wrong("--out", other, "the same recipe, or a new folder")
        elif any(place.glob(f"seed-*/{RECIPE}")):
            raise wrong("--out", f"{place}, which holds runs of something else", "a new folder")


def read_noted(path: Path) -> dict[str, Any]:
    """Return what ``setting.yaml`` or ``selection.yaml`` says.

    Raises:
        InputError: it cannot be read.
    """
    fault = wrong(str(path), "a file that cannot be read", "the file as it was written")
    with turning((OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError), fault):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return dict(values) if isinstance(values, dict) else {}


def claim(folder: Path, settings: Sequence[Setting]) -> None:
    """Note in each setting's folder what it is for. Raises InputError if it cannot be written."""
    for setting in settings:
        note(folder / setting.slug / REQUESTED, _asked(setting))


def note(path: Path, values: Mapping[str, Any]) -> None:
    """Write what ``read_noted`` reads, unless it is there. Raises InputError if the folder cannot be written."""
    with making("--out", f"{path.parent}, which cannot be written", "a folder to write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            durable.replace(path, dumped(values), mode=0o644)


def tasks(folder: Path, settings: Sequence[Setting]) -> list[Task]:
    """Return every run: all settings of the first seed, then of the second, so that a seed's data are loaded once."""
    return [
        Task(f"{setting.slug}/seed-{setting.seeds[turn]}", recipe, folder / setting.slug / f"seed-{recipe.seed}")
        for turn in range(len(settings[0].seeds))
        for setting in settings
        for recipe in [setting.recipe.model_copy(update={"seed": setting.seeds[turn]})]
    ]


RANGES = ("log", "uniform", "whole")
"""log: uniform in the logarithm. uniform: in the value. whole: whole numbers. Numbers keep three digits."""
VARIES = ("local", "server", "algorithm", "model")
"""Sections whose keys may vary; and ``SINGLE`` keys of others."""
SINGLE = ("privacy.clip",)
PRICED = ("rounds", "cohort.size")
"""Keys that change what a trial's rounds cost: they vary on a proxy only."""
HOW = "KEY=a,b,c or KEY=log:LOW:HIGH, uniform:LOW:HIGH, whole:LOW:HIGH"
Settings = dict[str, str]


@dataclass(frozen=True)
class Axis:
    """One key that varies. values: texts as ``-o`` takes them, equally likely; or a range of a kind of ``RANGES``."""

    key: str
    values: tuple[str, ...] = ()
    kind: str = ""
    low: float = 0.0
    high: float = 0.0

    def draw(self, generator: np.random.Generator) -> str:
        """Draw one value, as text."""
        if self.values:
            return self.values[int(generator.integers(len(self.values)))]
        if self.kind == "whole":
            return str(int(generator.integers(int(self.low), int(self.high) + 1)))
        share = float(generator.random())
        if self.kind == "log":
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return f"{float(f'{min(max(value, self.low), self.high):.3g}'):g}"

    def ends(self) -> tuple[str, ...]:
        """Return every listed value, or the ends of the range: what is tried before anything is drawn."""
        return self.values or (f"{self.low:g}", f"{self.high:g}")

    @property
    def text(self) -> str:
        """As ``--vary`` takes it."""
        return f"{self.key}={','.join(self.values) or f'{self.kind}:{self.low:g}:{self.high:g}'}"


def axes(varied: Sequence[str], *, private: bool) -> tuple[Axis, ...]:
    """Return what ``--vary`` options say. private: of a private selection, all of whose trials cost the same.

    Raises:
        InputError: nothing varies, a key that may not, a key twice, or values that make no list and no range.
    """
    if not varied:
        raise wrong("--vary", "nothing", f"{HOW}, once for each key", hint="For example --vary local.lr=log:0.01:1.")
    parsed = tuple(_axis(text, SINGLE if private else (*SINGLE, *PRICED)) for text in varied)
    for one, other in itertools.combinations(parsed, 2):
        if one.key == other.key or one.key.startswith(other.key + ".") or other.key.startswith(one.key + "."):
            raise wrong("--vary", f"{one.key} and {other.key}", "each key once")
    return parsed


def _axis(text: str, single: Sequence[str]) -> Axis:
    key, equals, value = (part.strip() for part in text.partition("="))
    require(bool(equals and key and value), "--vary", text, HOW)
    section, dot, _ = key.partition(".")
    varies = key in ("algorithm", "model") or (dot and section in VARIES)
    if key not in single and not key.startswith("privacy.clip.") and not varies:
        allowed = ", ".join([*(f"{name}.…" for name in VARIES), *single])
        fixed = section in ("data", "privacy", "seed", "cohort", "rounds")
        hint = "It is public and fixed for all trials." if fixed else nearest(key, [*VARIES, *single])
        raise wrong("--vary", key, f"keys of {allowed}", hint=hint)
    kind, colon, rest = value.partition(":")
    if colon and kind in RANGES:
        return _range(text, key, kind, rest)
    values = tuple(split_top(value))
    if len(values) < 2 or "" in values or len(set(values)) < len(values):
        raise wrong(f"--vary {key}", value, f"two values or more, each once, or {', '.join(RANGES)}:LOW:HIGH")
    return Axis(key, values)


def _range(text: str, key: str, kind: str, rest: str) -> Axis:
    ends = [parse_value(part) for part in rest.split(":")]
    numbers = [end for end in ends if type(end) in (int, float) and math.isfinite(end)]
    good = len(ends) == len(numbers) == 2 and numbers[0] < numbers[1] and (kind != "log" or numbers[0] > 0)
    if not good or (kind == "whole" and any(end != int(end) for end in numbers)):
        allowed = {"log": "two numbers, 0 < LOW < HIGH", "uniform": "two numbers, LOW < HIGH"}
        raise wrong(f"--vary {key}", f"{kind}:{rest}", allowed.get(kind, "two whole numbers, LOW < HIGH"))
    return Axis(key, (), kind, float(numbers[0]), float(numbers[1]))


def draw(every: Sequence[Axis], generator: np.random.Generator) -> Settings:
    """Draw one trial's settings, each key by itself."""
    return {axis.key: axis.draw(generator) for axis in every}


def grid(every: Sequence[Axis]) -> list[Settings] | None:
    """Return every combination of listed values; None where a key has a range."""
    if any(not axis.values for axis in every):
        return None
    keys = [axis.key for axis in every]
    return [dict(zip(keys, values)) for values in itertools.product(*(axis.values for axis in every))]


def applied(recipe: Recipe, settings: Mapping[str, str], **sections: Mapping[str, Any]) -> Recipe:
    """Return the recipe with settings, and then with keys of sections."""
    # Names first, since another name drops the options of the one before.
    items = sorted(settings.items(), key=lambda item: not item[0].endswith("name"))
    changed = Recipe.of(recipe, [f"{key}={value}" for key, value in items]).dump()
    for name, keys in sections.items():
        changed[name] = {**changed[name], **keys}
    return Recipe.of(changed)


def checked(recipe: Recipe, every: Sequence[Axis]) -> list[Recipe]:
    """Return the recipe with each listed value, and each end of a range, by itself.

    Raises:
        InputError: one that no recipe can have.
    """
    recipes = []
    for axis in every:
        for value in axis.ends():
            try:
                recipes.append(applied(recipe, {axis.key: value}))
                algorithm_of(recipes[-1])
            except InputError as error:
                raise InputError(f"--vary {axis.key}={value}: {str(error).removeprefix('recipe: ')}") from None
    return recipes


PUBLIC, CHARGE, WINNER = "selection.yaml", "charge.jsonl", "winner"
KIND = {"round": 0, "mechanism": "selection"}
CHARGED = ("sampling", "relation", "trust", "clients", "cohort", "noise_multiplier", "delta", "accountant", "epsilon",
           "selection")  # fmt: skip
"""What the charge of a selection says as each round of its winner does."""


def charge(plan: Plan, public: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one line of ``charge.jsonl``: the whole selection, and the digest of what is public of it."""
    line = plan.record(0, 1.0)
    charged = {name: line[name] for name in CHARGED}
    return KIND | charged | {"rounds": plan.rounds, "public": durable.digest_of_json(public)}


def faults(folder: Path) -> list[str]:
    """Return what is wrong with a selection's public records and, where there is a winner, with what it states.

    Raises:
        InputError: ``charge.jsonl`` or ``selection.yaml`` cannot be read.
    """
    entries = read(folder / CHARGE)
    if len(entries) != 1:
        return [f"{CHARGE}: {len(entries)} lines where one charge belongs"]
    line, problems = entries[0], []
    public = read_noted(folder / PUBLIC)
    if line.get("public") != durable.digest_of_json(public):
        problems.append(f"{PUBLIC} is not what was charged")
    expected = KIND | {name: public[name] for name in (*CHARGED, "rounds") if name in public}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stated = json.loads((folder / WINNER / "privacy.json").read_bytes())["proven_epsilon"]
        first = read(folder / WINNER / "ledger.jsonl")[0]
        if stated is None or stated > line["epsilon"]:
            problems.append(f"the winner states ε = {stated}, but {line['epsilon']:.6g} was charged")
        expected = {name: first.get(name) for name in CHARGED} | expected
        if not line["selection"].items() <= public["trials"].items():
            problems.append(f"{PUBLIC} has other trials than were charged")
    return [*problems, *(f"{CHARGE} has another {name}" for name, value in expected.items() if line.get(name) != value)]
