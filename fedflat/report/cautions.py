"""What a finished run should make its reader look twice at: one sentence each, from its records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fedflat.report import tables
from fedflat.report.fates import first_lost, guess
from fedflat.report.metrics import Record, number

PRIVATE = "(private to the simulation, not covered by the guarantee)"
CLIPPED = 0.99
"""Mean share of clipped updates from which everything counts as clipped."""
SIGNAL = 0.1
"""Median signal-to-noise ratio under which the noise is ten times the signal."""
RISEN, TURNS = 3.0, 3
"""A test loss so many times the least so far, in so many evaluations one after the other, has left for good."""


def cautions(privacy: Mapping[str, Any], released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    """The statement's warnings, then what the rounds show: losses that are not finite, accuracy at chance, everything
    clipped, noise ten times the signal. privacy: the statement; released, private: the rounds' records."""
    listed = privacy.get("warnings")
    found = [str(text) for text in listed] if isinstance(listed, list) else []
    return [*found, *_loss(released, private), *_chance(released), *_noise(private)]


class Watch:
    """Looks at a run while it goes on: ``round`` says once, in a sentence, that training diverges."""

    def __init__(self) -> None:
        self._least, self._high, self._said = math.inf, 0, False

    def round(self, released: Record, private: Record) -> str:
        """What a round's two records give reason to say; empty otherwise, and after it was said."""
        if self._said:
            return ""
        found = [text.rstrip() for text in _loss([released], [private])] or self._risen(released)
        self._said = bool(found)
        return found[0] if found else ""

    def _risen(self, released: Record) -> list[str]:
        loss = number(released.get("test_loss"))
        if loss is None:
            return []
        self._least = min(self._least, loss)
        self._high = self._high + 1 if loss > RISEN * self._least else 0
        if self._high < TURNS:
            return []
        return [
            f"The test loss is {loss:.3g} after round {released.get('round')}, {loss / self._least:.3g} times the "
            f"least so far: training diverges. A lower local.lr or server.lr, or less noise, may help."
        ]


def _loss(released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    lost = first_lost(released)
    if lost is not None:
        return [f"The test loss is not finite from round {lost.get('round')} on: training diverged."]
    for record in private:
        if "train_loss" in record and number(record["train_loss"]) is None and record.get("cohort"):
            return [f"A training loss is not finite in round {record.get('round')}: lower local.lr. {PRIVATE}"]
    return []


def _chance(released: Sequence[Record]) -> list[str]:
    found = guess(released)
    if found is None:
        return []
    accuracy = tables.percent(found.accuracy)
    if found.one_class:
        return [f"The model gives every test example the same class (accuracy {accuracy} %)."]
    return [f"Test accuracy {accuracy} % is what guessing among {found.classes} classes gives."]


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
