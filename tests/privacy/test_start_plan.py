"""A plan whose round 0 has noise of its own: two Gaussian laws composed, whichever way ε is asked for."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import pytest

from fedflat.core.checks import InputError
from fedflat.core.rounding import ROUNDING
from fedflat.privacy import tuning
from fedflat.privacy.accounting.gaussian import gaussian_epsilon
from fedflat.privacy.plan import Plan, begun, build_plan, ratio
from fedflat.privacy.statement import multipliers
from fedflat.privacy.verify import recompute

FULL = {"clients": 50, "cohort": 50, "rounds": 20, "delta": 1e-3}


def plan_of(**changes: Any) -> Plan:
    return build_plan(**{**FULL, "noise_multiplier": 3.0, "share": 0.3, **changes})


def exact(plan: Plan, rounds: int, starts: int = 1) -> float:
    """At full participation: one Gaussian with μ² = Σ 1/σ_t²."""
    sigma, first = plan.noise_multiplier, plan.noise_multiplier * plan.first
    return gaussian_epsilon(math.sqrt(starts / first**2 + (rounds - starts) / sigma**2), plan.delta)


def test_the_split_is_what_it_says() -> None:
    plan = plan_of()
    first, others = plan.at_round(0).noise_multiplier, plan.at_round(1).noise_multiplier
    assert others == plan.noise_multiplier == 3.0 and plan.at_round(1) is plan
    assert first**-2 / (first**-2 + 19 * others**-2) == pytest.approx(0.3, rel=1e-12)
    assert ratio(1 / 20, 20) == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_epsilon_is_that_of_both_laws(share: float) -> None:
    plan = plan_of(share=share)
    for rounds in (1, 2, 7, 20):
        assert plan.epsilon(rounds) == pytest.approx(exact(plan, rounds), rel=1e-4)
        assert plan.epsilon(rounds) == plan.epsilon(rounds)  # the second is remembered
    assert plan.epsilon(0) == 0
    # the broken twin counts every round like the later ones, and states another ε
    assert abs(replace(plan, first=1.0).epsilon() - exact(plan, 20)) > 0.01 or share == 1 / 20


def test_sampled_rounds_compose_as_the_library_composes_them() -> None:
    plan = plan_of(cohort=10, noise_multiplier=1.2)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(plan.sampler.event(1.2 * plan.first), 1).compose(plan.sampler.event(1.2), 19)
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-2)
    assert replace(plan, first=1.0).epsilon() < plan.epsilon() * 0.95  # the twin states too little


def test_calibration_reaches_the_target_and_the_budget_stops() -> None:
    plan = plan_of(noise_multiplier=None, epsilon=2.0)
    assert 2.0 * (1 - 1e-3) <= plan.epsilon() <= 2.0 == plan.budget
    assert plan.rounds_within_budget() == 20
    tight = replace(plan, budget=1.5)
    stop = tight.rounds_within_budget()
    assert tight.epsilon(stop) <= 1.5 < tight.epsilon(stop + 1)


def test_the_ledger_s_lines_say_which_noise_and_give_the_same_epsilon() -> None:
    plan = plan_of()
    lines = [plan.record(round, 5.0 if round == 0 else 0.2) for round in range(20)]
    assert lines[0]["std"] == pytest.approx(3.0 * plan.first * 5.0 * (1 + ROUNDING))
    assert lines[1]["std"] == pytest.approx(3.0 * 0.2 * (1 + ROUNDING))
    assert [line["noise_multiplier"] for line in lines[:2]] == [3.0 * plan.first, 3.0]
    assert lines[-1]["epsilon"] == plan.epsilon() and lines[0]["epsilon"] == pytest.approx(plan.epsilon(1), rel=1e-4)
    assert recompute(lines, delta=1e-3).epsilon == pytest.approx(plan.epsilon(), rel=1e-3)
    assert max(g.epsilon for g in plan.guarantees_of(multipliers(plan, lines, 20))) == pytest.approx(plan.epsilon())
    # the twin that writes the later rounds' noise into line 0 is found out by the other accountant
    twin = [{**lines[0], "std": lines[1]["std"] * 25, "noise_multiplier": 3.0}, *lines[1:]]
    assert recompute(twin, delta=1e-3).epsilon < plan.epsilon() * 0.9


def test_round_0_charged_again_counts_with_its_own_noise() -> None:
    plan = plan_of()
    entries = [{"round": 0}, {"round": 0}, {"round": 1}]
    again = plan.standing(entries)
    assert begun([]) == begun(entries[1:]) == 1 and again.begun == 2
    assert again.epsilon(3) == pytest.approx(exact(plan, 3, starts=2), rel=1e-4)
    assert again.epsilon(3) > plan.epsilon(3)
    assert again.epsilon(1) == pytest.approx(plan.epsilon(1), rel=1e-4)
    assert again.rounds_within_budget(again.again(entries)) == 20


def test_without_noise_nothing_is_proven() -> None:
    plan = plan_of(noise_multiplier=0)
    assert plan.epsilon(0) == 0 and plan.epsilon(1) == plan.epsilon() == math.inf


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"share": 0.0}, r"start\.share: found 0\.0"),
        ({"share": 1.0}, r"start\.share: found 1\.0"),
        ({"rounds": 1}, "rounds: found 1; allowed: at least 2 with start"),
        ({"sampling": "min-separation", "cohort": 10, "noise": "banded"}, "start: found correlated noise"),
        ({"sampling": "min-separation", "cohort": 10}, "start: found gaussian noise; allowed: independent"),
        ({"trust": "local"}, r"privacy\.trust: found local; allowed: central with start"),
        ({"trust": "distributed", "cohort": 30}, r"privacy\.trust: found distributed"),
        ({"noise_cohort": 500}, r"privacy\.noise_cohort: found a value; allowed: nothing with start"),
        ({"adaptive": True, "noise_multiplier": 0.9}, r"privacy\.clip: found adaptive"),
        ({"private": False}, "start: found a method without privacy"),
    ],
)
def test_what_is_not_proven_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        plan_of(**changes)


def test_a_selection_takes_all_rounds_to_be_alike() -> None:
    from fedflat.privacy.tuning import Selection

    with pytest.raises(InputError, match=r"privacy\.selection: found a value; allowed: nothing with start"):
        plan_of(selection=Selection(10.0))


def test_no_selection_is_proven_among_runs_that_start_otherwise() -> None:
    with pytest.raises(InputError, match="start: found class-statistics"):
        tuning.check(plan_of(accountant="rdp"))
    tuning.check(build_plan(**FULL, noise_multiplier=3.0, accountant="rdp"))
