"""A run's number for each measure, and rows without one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedflat.cli.reproduce import _ours
from fedflat.papers.outcome import Outcome, Row
from fedflat.papers.rows import _measured, measured
from fedflat.papers.tables import Cell, find
from fedflat.report.metrics import Run


def run_of(accuracies: list[float], train: list[float] = (), **hidden: Any) -> Run:  # type: ignore[assignment]
    records = [{"round": t, "test_loss": 1.0, "test_accuracy": value} for t, value in enumerate(accuracies)]
    secret = [{"round": t, "cohort": 5, "train_accuracy": value} for t, value in enumerate(train)]
    secret += [{"round": 9, key: value} for key, value in hidden.items()]
    return Run(Path("here"), "one", {}, records, secret, {"proven_epsilon": 5.0, "delta": 0.002}, 0)


def cell(measure: str, base: str = "final", personal: bool = False) -> Cell:
    recipe = find("000", "1").cells[0].recipe
    return Cell("A", "one", "40", recipe, measure=measure, base=base, target=30.0, of="A", personal=personal)


@pytest.mark.parametrize(
    ("measure", "base", "value"),
    [
        ("best", "best", 40.0), ("final", "final", 35.0), ("train", "best", 60.0), ("train", "final", 90.0),
        ("gap", "best", 20.0), ("gap", "final", 55.0), ("rounds", "final", 2.0), ("speedup", "final", 1.5),
        ("gain", "final", 4.0), ("gain", "best", 9.0),
    ],
)  # fmt: skip
def test_numbers_of_a_run(measure: str, base: str, value: float) -> None:
    mine, first = run_of([0.1, 0.4, 0.35], [0.5, 0.6, 0.9]), run_of([0.1, 0.2, 0.31])
    assert measured(cell(measure, base), mine, first) == pytest.approx(value)


def test_a_target_that_is_never_reached() -> None:
    low, high = run_of([0.1, 0.2]), run_of([0.1, 0.5])
    assert measured(cell("rounds"), low) == math.inf
    assert measured(cell("speedup"), low, high) == 0.0 and measured(cell("speedup"), high, low) is None
    assert measured(cell("speedup"), high) is None and measured(cell("gain"), high) is None
    row = _measured(
        Row(cell("speedup"), cell("speedup").recipe, 9.0, 5.0), {("A", "one"): {0: high}, ("A", "first"): {0: low}},
        "first",
    )  # fmt: skip
    assert row.void and row.missing == "first never reached 30 %" and row.proven == 5.0
    alone = _measured(Row(cell("speedup"), cell("speedup").recipe, 9.0, 5.0), {("A", "one"): {0: high}}, "first")
    assert not alone.void and "first, of which no run ended" in alone.missing
    table = find("000", "1")
    assert Outcome(table, (row,), "small", "sound", {}).complete
    assert not Outcome(table, (alone,), "small", "sound", {}).complete


def test_what_some_seeds_reached_is_not_called_never() -> None:
    row = Row(cell("rounds"), None, 9.0, 5.0)
    late = math.inf
    said = [_ours(replace(row, ours=dict(enumerate(ours)))) for ours in ([late] * 3, [138.0, late, late], [12.0, 14.0])]
    assert said == ["never", "never in 2 of 3", "13.0 ± 1.4"]


def test_personal_accuracy_and_runs_without_one() -> None:
    assert measured(cell("final", personal=True), run_of([0.1], personal_accuracy=0.7)) == pytest.approx(70.0)
    assert measured(cell("best", personal=True), run_of([0.1], personal_accuracy=0.7)) == pytest.approx(70.0)
    assert measured(cell("final", personal=True), run_of([0.1])) is None
    assert measured(cell("final"), run_of([])) is None and measured(cell("rounds"), run_of([])) is None
    assert measured(cell("train"), run_of([])) is None and measured(cell("gap"), run_of([0.1])) is None
