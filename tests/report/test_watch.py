"""A run that diverges says so while it goes on, once."""

from typing import Any

import pytest

from fedflat.report.summary import DivergenceWatch


def said(losses: list[float | None]) -> list[tuple[int, str]]:
    watch = DivergenceWatch()
    told = [(turn, watch.round({"round": turn, "test_loss": loss}, {})) for turn, loss in enumerate(losses)]
    return [(turn, text) for turn, text in told if text]


def test_a_loss_that_left_for_good() -> None:
    ((turn, text),) = said([2.3, 2.0, 2.5, 7.0, 8.0, 9.0, 30.0, 50.0])
    assert turn == 5
    assert "4.5 times the least so far" in text and "diverges" in text


@pytest.mark.parametrize("losses", [[2.3, 9.0, 2.2, 9.0, 9.0, 2.0], [2.3, None, None], [0.5, 1.4, 1.4, 1.4, 1.4]])
def test_what_comes_back_or_was_not_measured_is_no_divergence(losses: list[float | None]) -> None:
    assert said(losses) == []


def test_losses_that_are_not_finite() -> None:
    watch, nothing = DivergenceWatch(), {"round": 0, "test_accuracy": 0.1, "test_loss": None}
    found: Any = watch.round(nothing, {})
    assert "not finite from round 0" in found and watch.round(nothing, {}) == ""
    private = DivergenceWatch().round({"round": 3}, {"round": 3, "train_loss": None, "cohort": 5})
    assert "private to the simulation" in private
