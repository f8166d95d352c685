"""Group runs of one setting over several seeds, and compare settings at equal ε, in one sentence.

Only the shared model's accuracy on public test data is compared; clients' own models have no part in it.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.report import metrics
from fedflat.report.metrics import Run, fate

# What makes a setting; the seed, the versions that ran it and whatever else a run notes down do not. Nor does the
# engine, of which a recipe holds what ``auto`` chose: two seeds may have met different back ends.
SETTING = (
    "name", "rounds", "start", "data", "model", "task", "loss", "algorithm", "local", "cohort", "privacy", "server",
)  # fmt: skip


BySeed = Mapping[Any, float]
NOISE, BUDGET = "privacy.noise_multiplier", "privacy.budget"


@dataclass(frozen=True)
class Group:
    """The runs of one setting, one per seed, under a label that tells it from the other groups.

    style: number of its lines on a page, which gives their colour and dash.
    """

    label: str
    runs: tuple[Run, ...]
    style: int = 0


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of ``count`` values; none of a single one, or where one is not finite."""

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
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``; keys called ``seed`` are left out."""
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
    # Seeds of one setting may have met different back ends, as ``auto`` chose.
    return flatten({key: run.recipe[key] for key in ((*SETTING, "engine") if engine else SETTING) if key in run.recipe})


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Return the runs whose recipes differ in nothing but the seed, in the order given.

    Engines count only where one seed ran on several: then they are what is compared. A group is labelled with its
    method, and where two groups share a method also with the keys in which they differ.
    """
    members = _parts(runs)
    # A seed that is among a setting's runs more than once ran on several engines.
    parts = [part for group in members for part in _parts(group, engine=len({run.seed for run in group}) < len(group))]
    firsts = [group[0] for group in parts]
    labels = metrics.distinct([_label(first, firsts, engine=len(parts) > len(members)) for first in firsts])
    return [Group(label, tuple(group), style) for style, (label, group) in enumerate(zip(labels, parts, strict=True))]


def _parts(runs: Iterable[Run], engine: bool = False) -> list[list[Run]]:
    """Return the runs by their setting; without a recipe there is nothing to compare by, so such a run stays alone."""
    parts: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(setting(run, engine), sort_keys=True) if run.recipe else str(run.path)
        parts.setdefault(key, []).append(run)
    return list(parts.values())


def _label(run: Run, others: Sequence[Run], engine: bool = False) -> str:
    same = [setting(other, engine) for other in others if other.algorithm == run.algorithm]
    if len(same) == 1:
        return run.algorithm
    values = setting(run, engine)
    keys = [key for key in differing(same) if key != "name"]
    # σ was calibrated for ε, so ε alone says what differs.
    if {NOISE, BUDGET} <= set(keys):
        keys.remove(NOISE)
    if not keys or len(keys) > 3:
        return str(run.recipe.get("name") or run.name)
    names = [{BUDGET: "epsilon"}.get(key) or key.removesuffix(".name").rsplit(".", 1)[-1] for key in keys]
    return f"{run.algorithm} ({', '.join(f'{name}={_short(values.get(key))}' for name, key in zip(names, keys))})"


def without_epsilon(label: str) -> str:
    """Return a group's label without the ε in it."""
    return re.sub(r" \(\)$", "", re.sub(r"(, |(?<=\())epsilon=[^,)]*(, (?=[^)]))?", "", label))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the flat keys whose values are not the same in every setting, in the order of first appearance."""
    keys = dict.fromkeys(key for flat in settings for key in flat)
    return [key for key in keys if len({json.dumps(flat.get(key), sort_keys=True) for flat in settings}) > 1]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the mean and sample standard deviation of the values that are there; ``None`` if there are none."""
    sample = [value for value in values if value is not None]
    if not sample:
        return None
    if len(sample) == 1 or not all(map(math.isfinite, sample)):
        return Spread(sum(sample) / len(sample), None, len(sample))
    # Equal values have no spread; the formula would give a rounding error.
    if min(sample) == max(sample):
        return Spread(sample[0], 0.0, len(sample))
    mean = math.fsum(sample) / len(sample)
    return Spread(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in sample) / (len(sample) - 1)), len(sample))


def paired_difference(first: BySeed, other: BySeed) -> Difference | None:
    """``other − first`` over the seeds that both ran; ``None`` where they share no measured seed."""
    gap = spread(other[seed] - value for seed, value in first.items() if seed in other)
    if gap is None:
        return None
    low, high = (None, None) if gap.half is None else (gap.mean - gap.half, gap.mean + gap.half)
    return Difference(gap.mean, low, high, gap.count)


def finals(group: Group) -> BySeed:
    """Return the final accuracies of a group's runs by their seeds, where they were measured."""
    return {run.seed: final for run in group.runs if (final := metrics.final_accuracy(run)) is not None}


COLOURS, DASHES = 7, 4
"""Kinds of lines that the style sheet has; coprime, so that line n of a page has colour n % 7 and dash n % 4."""
SAME = 1e-3
"""Relative: two ε closer than this are one ε (calibration stops at about 1e-4)."""


def strata(groups: Sequence[Group]) -> list[list[Group]]:
    """Return the groups by data set and final proven ε: only within one part may accuracies be compared.

    The parts and the groups in them keep the order given. What has no finite proven ε is a part of its own.
    """
    parts: list[tuple[str, float | None, list[Group]]] = []
    for group in groups:
        data, epsilon = str(metrics.section(group.runs[0].recipe, "data").get("dataset")), final_epsilon(group)
        like = next((part for name, other, part in parts if name == data and _same(epsilon, other)), None)
        if like is None:
            parts.append((data, epsilon, [group]))
        else:
            like.append(group)
    return [part for _, _, part in parts]


def final_epsilon(group: Group) -> float | None:
    """Return the largest proven ε of the group's runs; None where a run has none."""
    return metrics.proven_epsilon(max(group.runs, key=metrics.bound))


def _same(one: float | None, other: float | None) -> bool:
    return one is other if None in (one, other) else math.isclose(one or 0.0, other or 0.0, rel_tol=SAME)


def headline(groups: Sequence[Group]) -> str:
    """Return the best private setting at each ε that two or more settings share, with the interval of its accuracy and
    whether the next one is told apart; empty where none is shared."""
    name = "ε of the mechanism" if any(metrics.seeded(run) for group in groups for run in group.runs) else "ε"
    sentences = []
    for ranked in map(_ranked, strata(groups)):
        if len(ranked) > 1:
            (best, final), (other, _) = ranked[:2]
            at = f"{name} = {metrics.epsilon_text(final_epsilon(best))}: {without_epsilon(best.label)}"
            accuracy = f"{100 * final.mean:.2f} %{_interval(final)}"
            sentences.append(f"Best at {at}, {accuracy}, {_apart(best, other)}.")
    return " ".join(sentences)


def _ranked(part: Sequence[Group]) -> list[tuple[Group, Spread]]:
    """Return the groups with a proven ε and an accuracy, the best mean first; none whose runs all came to nothing."""
    private = [group for group in part if final_epsilon(group) is not None and not all(map(fate, group.runs))]
    accuracies = [(group, spread(map(metrics.final_accuracy, group.runs))) for group in private]
    return sorted([(group, final) for group, final in accuracies if final], key=lambda pair: -pair[1].mean)


def _interval(final: Spread) -> str:
    """Return the 95 % t interval of the mean over seeds, in per cent."""
    if final.half is None:
        return " (one seed, so without an interval)"
    low, high = max(0.0, final.mean - final.half), min(1.0, final.mean + final.half)
    return f" (95 % interval {100 * low:.2f} to {100 * high:.2f})"


def _apart(best: Group, other: Group) -> str:
    gap = paired_difference(finals(other), finals(best))
    name = without_epsilon(other.label)
    if gap is None or gap.low is None:
        return f"which {'no' if gap is None else 'one'} common seed cannot tell apart from {name}"
    return f"{'ahead of' if gap.low > 0 else 'not told apart from'} {name} by these {gap.pairs} seeds"
