"""``fedflat budget`` and ``fedflat calibrate``: figures, errors, 80 columns."""

import json
from typing import Any

import pytest
from rich.cells import cell_len

import fedflat

NUMBERS = ("--clients", "500", "--cohort", "50", "--rounds", "300", "--delta", "0.002")
CHEAP = ("--trust", "central", "--sampling", "poisson")


def test_budget_has_the_pinned_figures_and_marks_the_approximation(command: Any) -> None:
    said = command("budget", *NUMBERS, "--noise-multiplier", "0.95", *CHEAP, "--json")
    assert said.status == 0
    found = {row["accountant"]: row for row in json.loads(said.out)["rows"]}
    assert found["pld"]["epsilon"] == pytest.approx(9.37, abs=0.005)
    assert found["rdp"]["epsilon"] == pytest.approx(10.83, abs=0.005)
    assert found["pld"]["proven"] and not found["gdp"]["proven"]
    shown = command("budget", *NUMBERS, "--noise-multiplier", "0.95", *CHEAP).out
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert "≈ 9.49" in shown and "approximation, not proven" in shown and "μ = 2.467" in shown


def test_calibrate_answers_within_the_target(command: Any) -> None:
    said = command("calibrate", "--epsilon", "8", *NUMBERS, *CHEAP, "--accountant", "pld", "--json")
    (row,) = json.loads(said.out)["rows"]
    assert row["noise_multiplier"] == pytest.approx(
        fedflat.noise_multiplier(epsilon=8, clients=500, cohort=50, rounds=300, delta=0.002)
    )
    assert 7.99 < row["epsilon"] <= 8


@pytest.mark.parametrize(
    "words, says",
    [
        (("budget", "--clients", "500"), "Missing option '--cohort'"),
        (("budget", "--rounds", "x"), "--rounds: found x; allowed: a whole number"),
        (("budget", *NUMBERS, "--noise-multiplier", "-1"), "privacy.noise_multiplier"),
        (("budget", *NUMBERS, "--noise-multiplier", "1", "--sampling", "poison"), "Did you mean poisson"),
        (("budget", *NUMBERS, "--noise-multiplier", "1", "--sampling", "truncated"), "largest cohort"),
        (("calibrate", "--epsilon", "0", *NUMBERS), "--epsilon"),
        (("calibrate", "--epsilon", "8", *NUMBERS, "--accountant", "gdp"), "found gdp; allowed: pld, rdp, fft"),
        (("calibrate", "--epsilon", "1", "--clients", "500", "--cohort", "50"), "Missing option '--rounds'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command: Any, words: tuple[str, ...], says: str) -> None:
    said = command(*words)
    assert said.status == 2
    assert says in said.err
    assert len(said.err.strip().splitlines()) == 1 and not said.out
