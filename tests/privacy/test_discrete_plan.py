"""The distributed discrete Gaussian and votes inside a plan: the numbers they derive, calibration through them."""

import math

import pytest
from scipy import stats

from fedflat.core.checks import InputError
from fedflat.methods.plans import DDGaussPlan, VotesPlan, most_messages
from fedflat.privacy.accounting.discrete import DDGaussAccount
from fedflat.privacy.plan import build_plan


def plan_of(mechanism: DDGaussPlan, **changes):
    numbers = {"clients": 500, "cohort": 50, "rounds": 100, "delta": 1e-4, "trust": "distributed"}
    noise = {} if "epsilon" in changes else {"noise_multiplier": 1.0}
    return build_plan(mechanism=mechanism, **{**numbers, **noise, **changes})


def test_guarantees_are_those_of_the_account():
    plan = plan_of(DDGaussPlan(1000, 0.5))
    record = plan.record(0, 0.5)
    assert record["cohort_min"] == plan.min_cohort < 50 < record["n_max"]
    both = plan.guarantees(60)
    account = DDGaussAccount(
        **plan.mechanism.record(plan), clients=500, cohort=50, noise_multiplier=1.0, min_cohort=record["cohort_min"],
        delta=1e-4,
    )  # fmt: skip
    for found, who in zip(both, ("recipients", "server"), strict=True):
        again = account.epsilon(60, who)
        assert found.epsilon == again and math.isfinite(again)
    assert both[0].epsilon < both[1].epsilon == plan.epsilon(60)


def test_a_target_epsilon_is_reached_through_the_plan():
    assert 19.5 < plan_of(DDGaussPlan(1000, 0.5), epsilon=20.0).epsilon() <= 20.0


def test_most_messages_is_the_smallest_with_that_chance():
    most = most_messages(500, 0.1, 100, 1e-6)
    assert stats.binom(500, 0.1).sf(most) * 100 <= 1e-6 < stats.binom(500, 0.1).sf(most - 2) * 100
    assert most_messages(10, 1.0, 5, 1e-6) >= 10


def test_refusals():
    with pytest.raises(InputError, match=r"privacy.trust: found central; allowed: distributed"):
        plan_of(DDGaussPlan(10, 1.0), trust="central").guarantees(1)
    with pytest.raises(InputError, match=r"cohort.sampling: found truncated"):
        plan_of(DDGaussPlan(10, 1.0), sampling="truncated", max_cohort=70).guarantees(1)


def test_settling_twice_changes_nothing():
    plan = plan_of(DDGaussPlan(1000, 0.5))
    once = plan.mechanism.settled(plan)
    assert once.settled(plan) == once and once.most == plan.mechanism.n_max(plan)


def test_votes_beyond_the_plan_and_without_noise():
    votes = VotesPlan(labels=1, total=10)
    plan = build_plan(clients=100, cohort=50, rounds=5, noise_multiplier=0.0, mechanism=votes)
    assert votes.spent(plan, 5) == votes.queries == 10 and votes.facts["clip"] == "of one vote 1, of a draw's votes 1"
    assert votes.spent(plan, 6) == 12
    assert math.isinf(plan.epsilon())
