"""What a finished run should make its reader look twice at: one sentence each, from its records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fedflat.report import tables
from fedflat.report.metrics import Record, number

PRIVATE = "(private to the simulation, not covered by the guarantee)"
CLIPPED = 0.99
"""Mean share of clipped updates from which everything counts as clipped."""
SIGNAL = 0.1
"""Median signal-to-noise ratio under which the noise is ten times the signal."""
CHANCE = 1.1
"""Accuracy over that of guessing, up to which nothing was learnt."""


def cautions(privacy: Mapping[str, Any], released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    """The statement's warnings, then what the rounds show: losses that are not finite, accuracy at chance, everything
    clipped, noise ten times the signal. privacy: the statement; released, private: the rounds' records."""
    listed = privacy.get("warnings")
    found = [str(text) for text in listed] if isinstance(listed, list) else []
    return [*found, *_loss(released, private), *_chance(released), *_noise(private)]


def _loss(released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    for record in released:
        if number(record.get("test_accuracy")) is not None and number(record.get("test_loss")) is None:
            return [f"The test loss is not finite from round {record.get('round')} on: training diverged."]
    for record in private:
        if "train_loss" in record and number(record["train_loss"]) is None and record.get("cohort"):
            return [f"A training loss is not finite in round {record.get('round')}: lower local.lr. {PRIVATE}"]
    return []


def _chance(released: Sequence[Record]) -> list[str]:
    last = next((r for r in reversed(released) if number(r.get("test_accuracy")) is not None), None)
    by_class = [] if last is None else [number(value) for value in last.get("class_accuracy") or []]
    known = [value for value in by_class if value is not None]
    if last is None or len(known) < 2:
        return []
    accuracy = float(last["test_accuracy"])
    if sorted(known) == [0.0] * (len(known) - 1) + [1.0]:
        return [f"The model gives every test example the same class (accuracy {tables.percent(accuracy)} %)."]
    if accuracy > CHANCE / len(known):
        return []
    return [f"Test accuracy {tables.percent(accuracy)} % is what guessing among {len(known)} classes gives."]


def _noise(private: Sequence[Record]) -> list[str]:
    found = []
    taken = [record for record in private if record.get("cohort")]
    clipped = [value for r in taken if (value := number(r.get("clipped_fraction"))) is not None]
    if clipped and sum(clipped) / len(clipped) >= CLIPPED:
        lengths = [value for r in taken if (value := number(r.get("update_norm_mean"))) is not None]
        mean = f" (their mean length was {sum(lengths) / len(lengths):.3g})" if lengths else ""
        found.append(f"Nearly every update was clipped{mean}: privacy.clip or local.lr may be far off. {PRIVATE}")
    ratios = [value for r in private if (value := number(r.get("signal_to_noise"))) is not None]
    if ratios and median(ratios) < SIGNAL:
        times = 1 / median(ratios) if median(ratios) else float("inf")
        found.append(
            f"The noise is {times:.0f} times the signal in the median round: more clients in a cohort, fewer "
            f"parameters or a larger ε would help. {PRIVATE}"
        )
    return found
