"""Rounds to a target, the generalisation gap, and runs that came to nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedflat.report import metrics, summary

HIDDEN = [{"round": turn, "cohort": 5, "train_loss": 1.0, "train_accuracy": 0.5 + turn / 10} for turn in range(4)]


def run_of(accuracies: list[float | None], hidden: list[Any] | None = None, **last: Any) -> metrics.Run:
    records = [
        {"round": t, "test_loss": None if a is None else 1.0, "test_accuracy": a} for t, a in enumerate(accuracies)
    ]
    records[-1] |= last
    secret = HIDDEN[: len(records)] if hidden is None else hidden
    return metrics.Run(Path("a"), "a", {}, records, secret, {})


def test_rounds_to_a_target() -> None:
    run = run_of([0.1, None, 0.3, 0.25])
    assert metrics.rounds_to(run, 0.3) == 3 and metrics.rounds_to(run, 0.31) == float("inf")
    assert metrics.rounds_to(run, 0.05) == 1


def test_the_gap_is_taken_in_the_round_that_is_shown() -> None:
    run = run_of([0.1, 0.4, 0.3])
    assert metrics.shown_round(run, "best") == (1, 0.4) and metrics.shown_round(run) == (2, 0.3)
    assert metrics.generalisation_gap(run, "best") == pytest.approx(0.2)
    assert metrics.generalisation_gap(run) == pytest.approx(0.4)
    assert metrics.train_accuracy(run, 9) == pytest.approx(0.7) and metrics.train_accuracy(run, 0) == 0.5
    empty = run_of([None], hidden=[])
    assert metrics.shown_round(empty, "best") is None and metrics.generalisation_gap(empty) is None
    assert metrics.train_accuracy(empty, 0) is None


@pytest.mark.parametrize(
    ("last", "hidden", "found"),
    [
        ({}, None, ""),
        ({"test_loss": None}, None, "diverged"),
        ({}, [{"round": 0, "cohort": 3, "train_loss": None}], "diverged"),
        ({}, [{"round": 0, "cohort": 0, "train_loss": None}], ""),
        ({"class_accuracy": [0.1, 0.2, None], "test_accuracy": 0.15}, None, "chance"),
        ({"class_accuracy": [0.0, 1.0, 0.0], "test_accuracy": 0.6}, None, "chance"),
        ({"class_accuracy": [0.5, 0.9, 0.1], "test_accuracy": 0.5}, None, ""),
        ({"class_accuracy": [0.98, 0.05], "test_accuracy": 0.85}, None, "chance"),
        ({"class_accuracy": [None, 0.5], "test_accuracy": 0.5}, None, ""),
        ({"class_accuracy": [0.0, 1.0], "test_accuracy": 0.5}, [{"round": 0, "personal_accuracy": 0.9}], ""),
    ],
)
def test_how_runs_come_to_nothing(last: dict[str, Any], hidden: list[Any] | None, found: str) -> None:
    run = run_of([0.8, 0.5], hidden, **last)
    assert metrics.fate(run) == found
    said = str(summary.cautions({}, run.metrics, []))
    assert ("of one class alone" in said) == (last.get("class_accuracy") == [None, 0.5])
    assert metrics.summary(run)["best_accuracy"] == (metrics.final_accuracy(run) if found else 0.8)


def accuracy_row(run: metrics.Run) -> str:
    recipe = SimpleNamespace(name="x", rounds=2, seed=0, algorithm=run, evaluation=SimpleNamespace(keep="last"))
    result = SimpleNamespace(recipe=recipe, privacy={}, history=run.metrics, private_history=run.private)
    return dict(summary.summary_rows(result))["test accuracy"]


def test_the_summary_of_such_a_run_names_no_best_round() -> None:
    run = run_of([0.8, 0.1], test_loss=None)
    assert accuracy_row(run) == "10.00 % final: the run left finite numbers"
    run = run_of([0.8, 0.5])
    assert "best 80.00 % after round 1" in accuracy_row(run)
