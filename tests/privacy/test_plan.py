"""The plan: one place for every privacy number, checked against the events it stands for."""

import dataclasses
import json
import math

import dp_accounting as dp
import numpy as np
import pytest

from fedflat.core.checks import InputError
from fedflat.core.cohorts import Fixed, Poisson, Truncated
from fedflat.core.rounding import MOST, ROUNDING
from fedflat.privacy.accounting import budget
from fedflat.privacy.accounting.curves import compose_epsilon
from fedflat.privacy.accounting.epsilon import epsilon, split_noise
from fedflat.privacy.plan import Guarantee, Plan, build_plan
from fedflat.privacy.trust import Accounted, round_event

SMALL = {"clients": 100, "cohort": 10, "rounds": 20, "delta": 1e-3}


def plan_of(**changes) -> Plan:
    return build_plan(**{**SMALL, "noise_multiplier": 1.5, **changes})


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({}, 1), ({"sampling": "fixed"}, 2), ({"sampling": "truncated", "max_cohort": 15}, 1), ({"trust": "local"}, 2)],
)
def test_event_times_sensitivity_is_the_std_drawn(changes, factor: int) -> None:
    plan = plan_of(**changes)
    bound = 0.2
    assert plan.sensitivity(bound) == factor * bound * (1 + ROUNDING)
    assert plan.relation == ("replace-one" if factor == 2 else "add-remove")
    event = round_event(plan.params)
    inner = getattr(event, "event", event)
    assert inner.noise_multiplier * plan.sensitivity(bound) == pytest.approx(plan.std(bound))
    assert plan.std(bound) == pytest.approx(1.5 * bound * (1 + ROUNDING))
    assert plan.divisor == 10
    assert plan.epsilon() == compose_epsilon(event, 20, 1e-3)
    # A broken twin that halves the noise does not pass.
    assert inner.noise_multiplier * plan.sensitivity(bound) != pytest.approx(plan.std(bound) / 2)


def test_epsilon_grows_from_zero_and_is_the_public_function() -> None:
    plan = plan_of()
    values = [plan.epsilon(rounds) for rounds in range(21)]
    assert values[0] == 0 and np.all(np.diff(values) > 0)
    assert plan.epsilon() == values[-1] == epsilon(clients=100, cohort=10, rounds=20, noise_multiplier=1.5, delta=1e-3)
    (found,) = plan.guarantees(7)
    assert found == Guarantee("recipients", found.description, "add-remove", values[7], 1e-3, "pld")
    with pytest.raises(InputError, match="rounds: found -1"):
        plan.epsilon(-1)


def test_calibration_and_the_hard_stop() -> None:
    plan = plan_of(noise_multiplier=None, epsilon=2.0)
    assert 2.0 * (1 - 1e-3) <= plan.epsilon() <= 2.0 == plan.budget
    assert plan.rounds_within_budget() == 20
    tight = dataclasses.replace(plan, budget=1.0)
    stop = tight.rounds_within_budget()
    assert tight.epsilon(stop) <= 1.0 < tight.epsilon(stop + 1)
    assert dataclasses.replace(plan, budget=1e-6).rounds_within_budget() == 0
    assert plan_of().rounds_within_budget() == 20
    with pytest.raises(InputError, match=r"rounds: found 0; allowed: at least 1"):
        plan_of(noise_multiplier=None, epsilon=2.0, rounds=0)


@pytest.mark.parametrize("target", [0.3, 1.0, 2.0, 4.0, 8.0, 10.0])
@pytest.mark.parametrize("rounds", [1, 24, 25, 40])
def test_a_calibrated_run_has_all_its_rounds(target: float, rounds: int) -> None:
    """ε of the σ that is returned was compared: one unit in the last place more, and the last round is lost."""
    plan = build_plan(clients=500, cohort=500, rounds=rounds, epsilon=target, delta=0.002)
    assert target * (1 - 1e-3) < plan.epsilon() <= target and plan.rounds_within_budget() == rounds


def test_the_adaptive_clip_takes_its_share() -> None:
    plan = plan_of(adaptive=True, noise_multiplier=0.9)
    assert plan.count_noise == 0.5
    assert plan.effective_multiplier == split_noise(0.9, 0.5) == pytest.approx((0.9**-2 - 1) ** -0.5)
    assert plan.std(2.0) == 2 * plan.effective_multiplier * (1 + ROUNDING)
    assert plan.epsilon() == plan_of(noise_multiplier=0.9).epsilon()
    record = plan.record(0, 1.0)
    assert (record["count_std"], record["update_multiplier"]) == (0.5, plan.effective_multiplier)
    assert plan_of(adaptive=True, noise_multiplier=0).std(1.0) == 0
    assert plan_of(adaptive=True, count_noise=3.0).count_noise == 3.0
    with pytest.raises(InputError, match=r"more than noise_multiplier / 2"):
        plan_of(adaptive=True, noise_multiplier=1.0)
    with pytest.raises(InputError, match=r"nothing unless the clip is adaptive"):
        plan_of(count_noise=1.0)
    with pytest.raises(InputError, match=r"a constant clip with privacy.trust: local"):
        plan_of(adaptive=True, trust="local")


def test_a_simulated_larger_cohort_proves_only_what_ran() -> None:
    plan = plan_of(noise_cohort=1000)
    assert plan.std(1.0) == pytest.approx(1.5 * 10 / 1000 * (1 + ROUNDING))
    assert plan.effective_multiplier == pytest.approx(0.015)
    assert plan.epsilon() == compose_epsilon(Poisson(100, 10).event(0.015), 20, 1e-3) > 1000
    assert plan.simulated_epsilon() == plan_of().epsilon()  # the same q, σ and δ
    assert plan.simulated().sampler == Poisson(10_000, 1000)
    assert plan.record(0, 1.0)["noise_cohort"] == 1000
    assert any("projection" in warning for warning in plan.warnings)
    assert plan_of().simulated_epsilon() is None
    with pytest.raises(InputError, match=r"privacy.noise_cohort: found 5"):
        plan_of(noise_cohort=5)


def test_a_target_with_noise_cohort_is_that_of_the_simulated_system() -> None:
    plan = plan_of(noise_multiplier=None, epsilon=2.0, noise_cohort=100)
    assert 2.0 * (1 - 1e-3) <= plan.simulated_epsilon() <= 2.0 < plan.epsilon()
    assert plan.rounds_within_budget() == 20


@pytest.mark.parametrize(
    ("changes", "sampler"),
    [
        ({"sampling": "truncated", "max_cohort": 15}, Truncated(1000, 100, 150)),
        ({"sampling": "fixed"}, Fixed(1000, 100)),
        ({"trust": "distributed", "min_cohort": 1, "cohort": 10}, Poisson(1000, 100)),
        ({"adaptive": True, "noise_multiplier": 0.9}, Poisson(1000, 100)),
    ],
)
def test_the_simulated_system_is_the_same_law_scaled(changes, sampler) -> None:
    larger = plan_of(noise_cohort=100, **changes).simulated()
    assert larger.sampler == sampler
    assert larger.min_cohort == (10 if "min_cohort" in changes else None)
    assert larger.count_noise == (5.0 if "adaptive" in changes else None)


def test_distributed_gets_a_public_minimum_and_two_adversaries() -> None:
    plan = plan_of(trust="distributed", cohort=30)
    assert 1 <= plan.min_cohort < 30
    assert {found.adversary for found in plan.guarantees()} == {"recipients", "server"}
    assert plan.epsilon() == max(found.epsilon for found in plan.guarantees())
    assert plan.record(0, 1.0)["cohort_min"] == plan.min_cohort
    assert plan_of(trust="distributed", cohort=30, colluders=2).record(0, 1.0)["colluders"] == 2
    with pytest.raises(InputError, match=r"Choose a smaller cohort.min"):
        plan_of(trust="distributed", cohort=30, min_cohort=29)


def test_local_is_capped_by_participations() -> None:
    plan = plan_of(trust="local", max_participations=4)
    assert plan.epsilon(4) == plan.epsilon(20) > plan.epsilon(3)
    assert isinstance(round_event(plan.params), dp.GaussianDpEvent)
    assert plan.record(0, 1.0)["max_participations"] == 4


def test_methods_without_privacy() -> None:
    plan = build_plan(**SMALL, private=False)
    assert plan.epsilon() == math.inf and plan.epsilon(0) == 0
    assert plan.std(math.inf) == 0 and plan.effective_multiplier == 0
    assert plan.simulated_epsilon() is None
    assert plan.rounds_within_budget() == 20
    assert plan.record(0, math.inf)["epsilon"] is None
    assert len(plan.warnings) == 1
    assert len(build_plan(**SMALL, private=False, epsilon=3.0).warnings) == 2


def test_the_ledger_line_is_json_and_enough_to_recompute() -> None:
    line = json.loads(json.dumps(plan_of(sampling="truncated", max_cohort=14).record(4, 0.25), allow_nan=False))
    assert (line["round"], line["mechanism"], line["sampling"], line["cohort_max"]) == (4, "gaussian", "truncated", 14)
    assert line["std"] == pytest.approx(line["noise_multiplier"] * line["clip"] * (1 + line["rounding"]))
    assert line["rounding"] == ROUNDING
    poisson = json.loads(json.dumps(plan_of().record(4, 0.25)))
    event = dp.PoissonSampledDpEvent(poisson["q"], dp.GaussianDpEvent(poisson["std"] / poisson["sensitivity"]))
    library = dp.pld.PLDAccountant(value_discretization_interval=5e-4)
    again = library.compose(event, poisson["round"] + 1).get_epsilon(poisson["delta"])
    assert poisson["epsilon"] == pytest.approx(again, rel=1e-4)
    assert plan_of(noise_multiplier=0).record(0, 1.0)["epsilon"] is None


class Doubled(Accounted):
    """A mechanism with an account of its own: twice the Gaussian's ε."""

    name = "doubled"
    relation = "replace-one"

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        found = 2 * math.sqrt(rounds) / plan.event_multiplier if plan.event_multiplier else math.inf
        return (Guarantee("server", "sees all", self.relation, found, plan.delta, "by hand"),)

    def record(self, plan: Plan):
        return {"bits": 16}


def test_another_mechanism_plugs_in_without_changing_a_caller() -> None:
    plan = plan_of(mechanism=Doubled())
    assert plan.epsilon(9) == pytest.approx(2 * 3 / 1.5)
    assert plan.sensitivity(1.0) == 2 * (1 + ROUNDING)
    assert plan.record(0, 1.0)["mechanism"] == "doubled" and plan.record(0, 1.0)["bits"] == 16
    target = plan_of(mechanism=Doubled(), noise_multiplier=None, epsilon=0.5)
    assert target.noise_multiplier == pytest.approx(2 * math.sqrt(20) / 0.5, rel=1e-3)


def test_defaults_and_warnings() -> None:
    plan = build_plan(clients=100, cohort=10, rounds=3, noise_multiplier=1.0)
    assert plan.delta == 1e-3 and plan.warnings == ()
    assert any("larger than 0.1/M" in text for text in plan_of(delta=0.01).warnings)
    assert any("noise_multiplier is 0" in text for text in plan_of(noise_multiplier=0).warnings)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epsilon": 1.0}, "privacy: found both noise_multiplier and epsilon; allowed: exactly one of the two"),
        ({"noise_multiplier": None}, "privacy: found neither"),
        ({"noise_multiplier": None, "epsilon": 0}, "privacy.epsilon: found 0"),
        ({"sampling": "fixed", "accountant": "fft"}, "fft covers Poisson sampling"),
        ({"clients": 4 * MOST, "cohort": 2 * MOST, "delta": 1e-9}, f"at most {MOST} clients"),
    ],
)
def test_what_cannot_be_accounted_is_refused_before_any_work(changes, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(**changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_budget_table_has_a_figure_or_a_reason_in_every_row() -> None:
    rows = budget.budget_table(only={}, clients=100, cohort=10, rounds=20, noise_multiplier=1.5, delta=1e-3)
    assert len(rows) == 17
    found = {(row["trust"], row["sampling"], row["accountant"]): row for row in rows}
    assert found["central", "poisson", "pld"]["epsilon"] == plan_of().epsilon()
    assert "needs the largest cohort" in found["central", "truncated", "pld"]["reason"]
    assert found["central", "poisson", "gdp"]["proven"] is False and "μ" in found["central", "poisson", "gdp"]["reason"]
    assert found["local", "any", "pld"]["epsilon"] == plan_of(trust="local").epsilon()
    for row in rows:
        assert (row["epsilon"] is None) <= bool(row["reason"])
        assert not row["proven"] or math.isfinite(row["epsilon"])
    silent = budget.budget_table(only={}, clients=100, cohort=10, rounds=20, noise_multiplier=0)
    assert silent[0]["epsilon"] == math.inf and not silent[0]["proven"]
    with pytest.raises(InputError, match="clients: found 0"):
        budget.budget_table(only={}, clients=0, cohort=10, rounds=20, noise_multiplier=1.0)


def test_calibrate_table_meets_the_target_or_says_why_not() -> None:
    rows = budget.calibrate_table(target=3.0, only={}, clients=30, cohort=3, rounds=3, delta=1e-3, max_cohort=6)
    for row in rows:
        assert bool(row["reason"]) == (row["noise_multiplier"] is None)
        assert row["reason"] or 3.0 * (1 - 1e-3) <= row["epsilon"] <= 3.0
    assert sum(row["noise_multiplier"] is not None for row in rows) == 8


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_private_evaluation_takes_its_share_of_the_noise(share: float) -> None:
    """σ stays the round's; the update has σ/√(1 − s) and the evaluation, per ½, σ/(2√s)."""
    plan = build_plan(clients=100, cohort=20, rounds=10, noise_multiplier=1.5, delta=1e-3, evaluation=share)
    assert plan.effective_multiplier == pytest.approx(1.5 / math.sqrt(1 - share))
    assert plan.count_std == pytest.approx(1.5 / (2 * math.sqrt(share)))
    assert plan.record(0, 1.0)["evaluation"] == share and plan.at(3.0).count_std == pytest.approx(2 * plan.count_std)
    alone = build_plan(clients=100, cohort=20, rounds=10, noise_multiplier=1.5, delta=1e-3)
    assert plan.epsilon() == alone.epsilon() and alone.count_std is None
    assert alone.account.claimed(alone, 1) is None
