"""Corners of the accounts that ordinary settings do not reach."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedflat.core.checks import InputError
from fedflat.core.rounding import MOST
from fedflat.methods.ddgauss import DistributedDiscreteGaussian, SharedDiscreteNoise
from fedflat.methods.plans import DDGaussPlan, VotesPlan
from fedflat.privacy.plan import build_plan
from fedflat.privacy.statement import checksum, is_whole, not_covered, statement
from fedflat.simulation.recomputed import Records, second_account


def test_votes_beyond_the_plan_and_without_noise() -> None:
    votes = VotesPlan(labels=1, total=10)
    plan = build_plan(clients=100, cohort=50, sampling="poisson", rounds=5, noise_multiplier=0.0, mechanism=votes)
    assert votes.spent(plan, 5) == votes.queries == 10 and votes.facts["clip"] == "of one vote 1, of a draw's votes 1"
    assert votes.spent(plan, 6) == 12
    assert math.isinf(plan.epsilon())


def test_cohorts_beyond_the_rounding_bound_are_refused() -> None:
    with pytest.raises(InputError, match=f"at most {MOST} clients"):
        build_plan(clients=4 * MOST, cohort=2 * MOST, rounds=1, noise_multiplier=1.0, delta=1e-9)


def test_noise_sources_and_priors_are_named() -> None:
    plan = build_plan(clients=100, cohort=50, rounds=2, noise_multiplier=1.0, delta=1e-3)
    facts = {"unidentified": True, "prior": "public natural data", "client_state": True}
    found = statement(plan, rounds_run=2, algorithm="dp-fedavg", facts=facts, seeded=False)
    assert "never stored: the method or model given in Python" in found["noise_source"]
    assert any(
        line.startswith("The people in the data that the model was pretrained on") for line in found["not_covered"]
    )
    assert any(line.startswith("Clients' states") for line in found["not_covered"])


def test_a_broken_statement_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text("{")
    assert not is_whole(tmp_path / "privacy.json")
    (tmp_path / "privacy.json").write_text(json.dumps({"epsilon": 1, "checksum": checksum({"epsilon": 1})}))
    assert is_whole(tmp_path / "privacy.json")


def test_records_that_are_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text(json.dumps({"proven_epsilon": "eight"}))
    with pytest.raises(InputError, match=r"privacy\.json: found eight"):
        second_account(Records(tmp_path))


@pytest.mark.parametrize("target", [0.3, 1.0, 2.0, 4.0, 8.0, 10.0])
@pytest.mark.parametrize("rounds", [1, 24, 25, 40])
def test_a_calibrated_run_has_all_its_rounds(target: float, rounds: int) -> None:
    """ε of the σ that is returned was compared: one unit in the last place more, and the last round is lost."""
    plan = build_plan(clients=500, cohort=500, rounds=rounds, epsilon=target, delta=0.002)
    assert target * (1 - 1e-3) < plan.epsilon() <= target and plan.rounds_within_budget() == rounds


def test_what_sums_that_are_topped_up_do_not_cover() -> None:
    setting: dict[str, Any] = {"clients": 100, "cohort": 50, "sampling": "poisson", "rounds": 5, "delta": 1e-3}
    one = DDGaussPlan(clip=1.0, dimension=8)
    plan = build_plan(noise_multiplier=1.0, trust="distributed", min_cohort=10, mechanism=one, **setting)
    said = not_covered(plan, {}, seeded=True)
    assert any("breaks secure aggregation" in line for line in said)
    assert not any("Whether a client answers at all" in line for line in said)  # topped up


def test_a_rounded_message_is_hardly_longer_than_the_clip() -> None:
    mechanism = DistributedDiscreteGaussian(
        dimension=100, clip=1.0, noise_multiplier=1.0, min_cohort=8, granularity=0.001
    )
    assert 1.0 <= SharedDiscreteNoise(mechanism, seed=0, shares=1).longest(1.0) <= 1.5
