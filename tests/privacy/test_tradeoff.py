"""The best attacker: bounds on true positives and μ, against closed forms, other accountants and simulation."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy.optimize import brentq
from scipy.stats import norm

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.methods.plans import DDGaussPlan
from fedflat.privacy import attacker as tradeoff
from fedflat.privacy.accounting.curves import by_delta, compose_epsilon
from fedflat.privacy.accounting.gaussian import gaussian_epsilon
from fedflat.privacy.accounting.independent import epsilon_bounds
from fedflat.privacy.attacker import (
    GAUSSIAN,
    PROVEN,
    STATED,
    attacker,
    attacker_of,
    gaussian_mu,
    gaussian_positives,
    positives_at,
    true_positives,
)
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.together import Published, curve

DELTA = 2e-3


def gaussian(mu: float) -> Any:
    return lambda delta: gaussian_epsilon(mu, delta)


def plan_of(**change: Any) -> Plan:
    return build_plan(**{"clients": 500, "cohort": 50, "rounds": 20, "epsilon": 8, "delta": DELTA, **change})


def lines(plan: Plan, key: str = "a") -> list[dict[str, Any]]:
    return [{**plan.record(0, 1.0), "round": turn, "key_id": key} for turn in range(plan.rounds)]


def run_of(plan: Plan, name: str = "a") -> Published:
    return Published(name, plan.epsilon(), plan.delta, lines(plan, name))


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.175, 4.0, 8.0])
@pytest.mark.parametrize("alpha", [1e-3, 0.01, 0.1, 0.5, 0.9])
def test_the_gaussians_own_curve(mu: float, alpha: float) -> None:
    exact = norm.cdf(norm.ppf(alpha) + mu)
    found = true_positives(gaussian(mu), alpha)
    assert exact <= found + 1e-12
    assert found == pytest.approx(exact, abs=2e-4)


def test_one_pair() -> None:
    assert positives_at(0.0, 0.0, 0.3) == pytest.approx(0.3)
    assert positives_at(1.0, 0.001, 0.01) == pytest.approx(math.e * 0.01 + 0.001)
    assert positives_at(1.0, 0.001, 0.9) == pytest.approx(1 - (0.1 - 0.001) / math.e)
    assert positives_at(8.0, DELTA, 0.01) == pytest.approx(0.99967, abs=1e-5)
    assert positives_at(math.inf, DELTA, 0.01) == positives_at(1e4, DELTA, 0.01) == 1.0


def test_what_epsilon_8_means() -> None:
    """A Gaussian mechanism with ε = 8 at δ = 1/500 lets the best attacker find 44 %, at 1 % false positives."""
    mu = float(brentq(lambda found: gaussian_epsilon(found, DELTA) - 8, 0.1, 10))
    assert gaussian_positives(mu, 0.01) == pytest.approx(0.4403, abs=1e-4)


def test_a_hidden_cohort_against_the_test_that_is_best() -> None:
    """One Poisson-sampled round: the likelihood ratio is monotone, so the best test is a threshold on the output."""
    q, sigma, alpha = 0.3, 0.8, 0.01
    threshold = norm.isf(alpha) * sigma
    exact = (1 - q) * alpha + q * norm.sf((threshold - 1) / sigma)
    found = true_positives(by_delta(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), 1), alpha)
    assert exact <= found <= exact * 1.01


def test_many_rounds_against_a_simulated_attacker() -> None:
    q, sigma, rounds, alpha, count = 0.2, 1.0, 10, 0.05, 20_000
    generator = stream(0, "attacker")

    def losses(member: bool) -> Any:
        x = generator.standard_normal((count, rounds)) * sigma
        x += (generator.random((count, rounds)) < q) if member else 0
        return np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))).sum(1)

    threshold = np.quantile(losses(False), 1 - alpha)
    measured = float((losses(True) > threshold).mean())
    found = true_positives(by_delta(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), rounds), alpha)
    assert measured <= found + 3 * math.sqrt(0.25 / count) + 0.01
    assert found <= measured * 1.15  # both directions of neighbours count


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_a_share_is_a_share(alpha: float) -> None:
    with pytest.raises(InputError, match="false positives"):
        true_positives(gaussian(1.0), alpha)


@pytest.mark.parametrize("mu", [0.1, 1.0, 2.175, 5.0])
def test_mu_of_a_gaussian(mu: float) -> None:
    assert gaussian_mu(gaussian(mu), 1e-5) == pytest.approx(mu, rel=0.02)
    assert gaussian_mu(gaussian(mu), 1e-8) > mu
    assert gaussian_mu(gaussian(mu), DELTA) < mu * 1.01  # some of it is in the slack


def test_mu_bounds_every_attacker() -> None:
    epsilon_of = by_delta(PoissonSampledDpEvent(0.1, GaussianDpEvent(0.95)), 300)
    mu = gaussian_mu(epsilon_of, DELTA)
    for alpha in np.geomspace(1e-4, 0.999, 7):
        assert true_positives(epsilon_of, float(alpha)) <= norm.cdf(norm.ppf(alpha) + mu) + DELTA + 1e-4
    for delta in (3e-3, 0.01, 0.1, 0.4):  # δ(ε) ≤ δ(ε; μ) + slack
        assert epsilon_of(delta) <= gaussian_epsilon(mu, delta - DELTA) + 1e-9


def test_mu_at_the_ends() -> None:
    assert gaussian_mu(gaussian(1e-4), DELTA) == 0.0
    assert gaussian_mu(lambda delta: math.inf, DELTA) == math.inf
    assert gaussian_mu(lambda delta: 1e13 if delta < 0.5 else 0.0, DELTA) == math.inf
    with pytest.raises(InputError, match="slack"):
        gaussian_mu(gaussian(1.0), 0.0)


def test_a_twin_that_leaves_out_the_chords_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing at the points alone is no bound: between them the curve may lie above the Gaussian's."""

    def points_alone(epsilons: Any, deltas: Any, mu: float) -> bool:
        return all(gaussian_epsilon(mu, float(d)) >= e for e, d in zip(epsilons, deltas) if d > 0)

    epsilon_of, slack = by_delta(PoissonSampledDpEvent(0.01, GaussianDpEvent(0.5)), 300), 1e-4

    def excess(mu: float) -> float:
        return max(epsilon_of(float(d)) - gaussian_epsilon(mu, float(d) - slack) for d in np.geomspace(2e-4, 0.3, 60))

    monkeypatch.setattr(tradeoff, "_POINTS", 4)
    assert excess(gaussian_mu(epsilon_of, slack)) <= 0
    monkeypatch.setattr(tradeoff, "_covers", points_alone)
    assert excess(gaussian_mu(epsilon_of, slack)) > 0.01


@pytest.mark.parametrize("delta", [1e-9, 1e-5, DELTA, 0.1, 0.5])
def test_the_curve_is_the_accountants(delta: float) -> None:
    event = PoissonSampledDpEvent(0.1, GaussianDpEvent(0.95))
    found = by_delta(event, 300)(delta)
    assert found == pytest.approx(compose_epsilon(event, 300, delta), rel=1e-6)
    if delta <= DELTA:
        low, _ = epsilon_bounds(0.1, 0.95, 300, delta)
        assert low <= found
    assert by_delta(event, 300)(1e-20) == math.inf
    assert by_delta(GaussianDpEvent(2.0), 4)(delta) == gaussian_epsilon(1.0, delta)


def test_full_participation_is_one_gaussian() -> None:
    plan = plan_of(cohort=500)
    found = attacker(lines(plan), plan.epsilon(), plan.delta)
    assert found is not None
    assert found.how == GAUSSIAN
    assert found.slack == 0
    assert found.mu == pytest.approx(math.sqrt(20) / plan.noise_multiplier)
    assert found.true_positives == pytest.approx(0.4403, abs=1e-3)


LAWS: list[dict[str, Any]] = [
    {},
    {"sampling": "truncated", "max_cohort": 70},
    {"sampling": "fixed"},
    {"trust": "distributed"},
    {"trust": "distributed", "min_cohort": 20},
    {"adaptive": True},
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: "-".join(map(str, law)) or "poisson")
def test_every_law_has_a_curve_that_meets_its_epsilon(law: dict[str, Any]) -> None:
    plan = plan_of(**law)
    made = curve([run_of(plan)])
    assert made is not None
    assert made.epsilon_of(DELTA) == pytest.approx(plan.epsilon(), rel=0.02)
    assert made.epsilon_of(DELTA / 10) > made.epsilon_of(DELTA) > made.epsilon_of(10 * DELTA)
    found = attacker(lines(plan), plan.epsilon(), plan.delta)
    assert found is not None
    assert found.how == PROVEN
    assert 0.01 < found.true_positives < positives_at(plan.epsilon(), DELTA, 0.01)


def test_the_discrete_gaussian_has_a_curve() -> None:
    plan = plan_of(trust="distributed", mechanism=DDGaussPlan(64, 1.0), rounds=4)
    plan = replace(plan, mechanism=plan.mechanism.settled(plan))  # type: ignore[union-attr]
    made = curve([run_of(plan)])
    assert made is not None
    assert made.epsilon_of(DELTA) == pytest.approx(plan.epsilon(), rel=0.02)
    assert made.epsilon_of(DELTA / 10) > made.epsilon_of(DELTA)


def test_local_trust_is_one_gaussian_towards_the_server() -> None:
    plan = plan_of(trust="local", max_participations=5)
    found = attacker(lines(plan), plan.epsilon(), plan.delta)
    assert found is not None
    assert found.mu == pytest.approx(2 * math.sqrt(5) / plan.noise_multiplier)


def test_two_runs_tell_more_than_one() -> None:
    one, other = run_of(plan_of(), "a"), run_of(plan_of(cohort=100), "b")
    alone = attacker_of([one], one.epsilon, DELTA)
    both = attacker_of([one, other], 12.0, DELTA)
    assert alone is not None
    assert both is not None
    assert both.how == PROVEN
    assert alone.true_positives < both.true_positives < 1
    assert attacker_of([one, run_of(plan_of(), "b")], 12.0, DELTA) is not None


def test_what_is_not_composed_has_its_stated_pair_only() -> None:
    strange = [{**line, "mechanism": "other"} for line in lines(plan_of())]
    short = [{key: value for key, value in line.items() if key != "q"} for line in lines(plan_of())]
    for entries in (strange, short, []):
        found = attacker(entries, 2.0, DELTA)
        assert found is not None
        assert (found.how, found.mu) == (STATED, None)
        assert found.true_positives == positives_at(2.0, DELTA, 0.01)
    shared = [run_of(plan_of(), "a"), Published("b", 8.0, DELTA, lines(plan_of(rounds=3), "a"))]
    assert curve(shared) is None
    assert curve([]) is None
    assert curve([Published("c", None, DELTA, lines(plan_of()))]) is None


def test_no_guarantee_no_bound() -> None:
    assert attacker(lines(plan_of()), None, DELTA) is None
    assert attacker(lines(plan_of()), math.inf, DELTA) is None


def test_no_mu_is_no_number() -> None:
    """A law whose curve never falls below its δ has true positives, and no μ."""
    plan = plan_of(noise_multiplier=0.004, epsilon=None)
    found = attacker(lines(plan), plan.epsilon(), plan.delta)
    assert found is not None
    assert found.true_positives == pytest.approx(1, abs=0.2)
    assert json.dumps(found.mu) is not None
