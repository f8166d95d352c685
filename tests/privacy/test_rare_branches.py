"""Corners of the accounts that ordinary settings do not reach."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedflat.methods.ae_dpfl.plan import VotesPlan
from fedflat.privacy.accounting.budget import needed_table
from fedflat.privacy.accounting.discrete import DDGaussAccount
from fedflat.privacy.accounting.epsilon import epsilon
from fedflat.privacy.plan import build_plan


def test_what_no_number_of_rounds_can_reach_has_a_reason() -> None:
    rows = needed_table(target=0.01, find="rounds", clients=100, cohort=50, rounds=10, noise_multiplier=0.5, delta=1e-5)
    assert rows and all(row["epsilon"] is None and row["reason"] for row in rows)


@pytest.mark.parametrize(("find", "step", "names"), [("rounds", 1, None), ("cohort", 1, "pld"), ("clients", -1, "pld")])
def test_what_is_found_is_the_last_within_the_target(find: str, step: int, names: str | None) -> None:
    setting: dict[str, Any] = {"clients": 40, "cohort": 4, "rounds": 30, "noise_multiplier": 1.5, "delta": 1e-4}
    for row in needed_table(target=2.0, find=find, accountant=names, **setting):
        at = {**setting, "accountant": row["accountant"], find: row[find]}
        assert row["reason"] == "" and row["epsilon"] == epsilon(**at) <= 2.0
        assert epsilon(**{**at, find: row[find] + step}) > 2.0


def test_a_setting_that_does_not_apply_has_its_reason() -> None:
    rows = needed_table(target=8, find="rounds", clients=100, cohort=200, noise_multiplier=1.0, delta=1e-5)
    assert rows and all(row["rounds"] is None and row["reason"] for row in rows)


def test_too_little_noise_per_share_amplifies_nothing() -> None:
    plan = build_plan(clients=100, cohort=50, sampling="poisson", rounds=5, noise_multiplier=1.0, trust="distributed")
    account = DDGaussAccount(
        clients=plan.sampler.clients,
        cohort=plan.sampler.size,
        noise_multiplier=1e-6,
        clip=1.0,
        granularity=1.0,
        dimension=8,
        min_cohort=10,
        delta=1e-3,
    )
    assert np.isinf(account.amplified(20)).all()


def test_votes_beyond_the_plan_and_without_noise() -> None:
    votes = VotesPlan(labels=1, total=10)
    plan = build_plan(clients=100, cohort=50, sampling="poisson", rounds=5, noise_multiplier=0.0, mechanism=votes)
    assert votes.spent(plan, 5) == 10
    assert votes.spent(plan, 6) == 12
    assert type(votes.event(plan)).__name__ == "NonPrivateDpEvent"
    assert math.isinf(plan.epsilon())
