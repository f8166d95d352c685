"""Runs that came to nothing: those that left finite numbers, and those that end at the accuracy of guessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedflat.report.metrics import Record, Run, number

FATES = {"diverged": "left finite numbers", "chance": "ended at the accuracy of guessing"}
"""How a run can come to nothing, in words."""
MARKS = {"diverged": "!", "chance": "?"}
"""How its numbers are marked in tables."""
CHANCE = 1.1
"""Accuracy over that of guessing, up to which nothing was learnt."""


@dataclass(frozen=True)
class Guess:
    """The last evaluated model, where it guesses: its accuracy (0 to 1), among how many classes, all as one or not."""

    accuracy: float
    classes: int
    one_class: bool


def fate(run: Run) -> str:
    """A key of FATES for a run whose best round must not stand for it; the empty string for any other."""
    return fate_of(run.metrics, run.private)


def fate_of(released: Sequence[Record], private: Sequence[Record]) -> str:
    """``fate`` by a run's records, released and private.

    The shared model of a method with personal models is not held against guessing: its own head may never be trained.
    """
    if diverged(released, private):
        return "diverged"
    personal = any(number(record.get("personal_accuracy")) is not None for record in private)
    return "" if personal or guess(released) is None else "chance"


def diverged(released: Sequence[Record], private: Sequence[Record]) -> bool:
    """Whether a run left finite numbers: the test loss of an evaluated round, or the last cohort's training loss."""
    last = next((record for record in reversed(private) if record.get("cohort") and "train_loss" in record), None)
    lost = last is not None and number(last["train_loss"]) is None
    return lost or first_lost(released) is not None


def first_lost(released: Sequence[Record]) -> Record | None:
    """The first record in which an evaluated model's test loss is not finite."""
    return next((record for record in released if _lost(record)), None)


def _lost(record: Record) -> bool:
    measured = "test_loss" in record and number(record.get("test_accuracy")) is not None
    return measured and number(record["test_loss"]) is None


def guess(released: Sequence[Record]) -> Guess | None:
    """The last evaluated model, if it gives one class to everything or is no better than a class at random."""
    last = next((r for r in reversed(released) if number(r.get("test_accuracy")) is not None), None)
    by_class = [] if last is None else [number(value) for value in last.get("class_accuracy") or []]
    known = [value for value in by_class if value is not None]
    if last is None or len(known) < 2:
        return None
    found = Guess(float(last["test_accuracy"]), len(known), sorted(known) == [0.0] * (len(known) - 1) + [1.0])
    return found if found.one_class or found.accuracy <= CHANCE / found.classes else None
