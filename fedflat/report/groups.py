"""Runs of one setting over several seeds, and the statistics over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.report.metrics import Run
from fedflat.report.styles import styles

# What makes a setting; the seed, the versions that ran it and whatever else a run notes down do not. Nor does the
# engine, of which a recipe holds what ``auto`` chose: two seeds may have met different back ends.
SETTING = (
    "name",
    "rounds",
    "start",
    "data",
    "model",
    "task",
    "loss",
    "algorithm",
    "local",
    "cohort",
    "privacy",
    "server",
)


@dataclass(frozen=True)
class Group:
    """The runs of one setting, one per seed, under a label that tells it from the other groups.

    style: colour and dash of its lines (``styles``): those of its method on every page.
    """

    label: str
    runs: tuple[Run, ...]
    style: int = 0


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (``None`` for a single value) of ``count`` values."""

    mean: float
    sd: float | None
    count: int

    @property
    def half(self) -> float | None:
        """Half the width of the mean's 95 % t interval; None for a single value."""
        if self.sd is None:
            return None
        from scipy import stats

        return float(stats.t.ppf(0.975, self.count - 1)) * self.sd / math.sqrt(self.count)


@dataclass(frozen=True)
class Difference:
    """A paired difference over the seeds both methods ran: mean and 95 % t interval (``None`` below 2 pairs)."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; keys called ``seed`` are left out."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "seed":
            continue
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def setting(run: Run, engine: bool = False) -> dict[str, Any]:
    """The flat recipe without seeds and without what only describes the machine, unless ``engine`` is asked for."""
    keys = (*SETTING, "engine") if engine else SETTING
    return flatten({key: run.recipe[key] for key in keys if key in run.recipe})


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs whose recipes differ in nothing but the seed, in the order given.

    Engines count only where one seed ran on several: then they are what is compared. A group is labelled with its
    method, and where two groups share a method also with the keys in which they differ.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(_key(run), []).append(run)
    kept = [part for group in members.values() for part in _by_engine(group)]
    firsts = [group[0] for group in kept]
    engines = len(kept) > len(members)
    labels = _distinct([_label(first, firsts, engines) for first in firsts])
    drawn = styles([first.algorithm for first in firsts])
    return [Group(label, tuple(group), style) for label, group, style in zip(labels, kept, drawn, strict=True)]


def _key(run: Run, engine: bool = False) -> str:
    """What runs of one group share; without a recipe there is nothing to compare by, so such a run stays alone."""
    return json.dumps(setting(run, engine), sort_keys=True) if run.recipe else str(run.path)


def _by_engine(group: list[Run]) -> list[list[Run]]:
    """The runs as they are, or by engine where a seed is among them more than once."""
    if len({run.seed for run in group}) == len(group):
        return [group]
    parts: dict[str, list[Run]] = {}
    for run in group:
        parts.setdefault(_key(run, engine=True), []).append(run)
    return list(parts.values())


def _label(run: Run, others: Sequence[Run], engine: bool = False) -> str:
    same = [setting(other, engine) for other in others if other.algorithm == run.algorithm]
    if len(same) == 1:
        return run.algorithm
    own = setting(run, engine)
    keys = [key for key in differing(same) if key != "name"]
    if not keys or len(keys) > 3:
        return str(run.recipe.get("name") or run.name)
    parts = ", ".join(key.rsplit(".", 1)[-1] + "=" + _short(own.get(key)) for key in keys)
    return f"{run.algorithm} ({parts})"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _distinct(labels: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    result = []
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
        result.append(label if labels.count(label) == 1 else f"{label} #{counts[label]}")
    return result


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The flat keys whose values are not the same in every setting, in the order of first appearance."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if len({json.dumps(each.get(key), sort_keys=True) for each in settings}) > 1]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that are there; ``None`` if there are none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return Spread(mean, None, 1)
    if min(found) == max(found):  # equal values: no rounding error posing as a spread
        return Spread(found[0], 0.0, len(found))
    return Spread(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)), len(found))


def paired_difference(first: Group, other: Group, measure: Callable[[Run], float | None]) -> Difference | None:
    """``other − first`` of ``measure`` over the seeds that both ran; ``None`` where they share no measured seed."""
    theirs = _by_seed(other, measure)
    gaps = [theirs[seed] - value for seed, value in _by_seed(first, measure).items() if seed in theirs]
    found = spread(gaps)
    if found is None:
        return None
    half = found.half
    if half is None:
        return Difference(found.mean, None, None, 1)
    return Difference(found.mean, found.mean - half, found.mean + half, found.count)


def _by_seed(group: Group, measure: Callable[[Run], float | None]) -> dict[int | None, float]:
    measured = {run.seed: measure(run) for run in group.runs}
    return {seed: value for seed, value in measured.items() if value is not None}
