"""The papers' formulas against pinned numbers, an independent accountant and high-precision arithmetic."""

import inspect
import math

import mpmath
import numpy as np
import pytest

from fedflat.core.checks import InputError
from fedflat.landscape import bounds


def rdp(q: float, sigma: float, orders: list[float]) -> np.ndarray:
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders)
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)))
    return np.array(accountant._rdp)


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.1, 0.95), (0.1, 0.8), (0.5, 3.0), (1.0, 2.0), (0.01, 0.6), (0.9, 0.4), (0.0, 0.95)]
)
def test_one_round_divergence_equals_the_accountant_library_at_whole_orders(q: float, sigma: float) -> None:
    orders = [2.0, 3.0, 8.0, 32.0, 255.0]
    ours = [bounds.renyi_divergence(q, sigma, order) for order in orders]
    assert ours == pytest.approx(rdp(q, sigma, orders), rel=1e-12)


@pytest.mark.parametrize("order", [1.1, 1.5, 2.5, 3.7])
def test_one_round_divergence_equals_the_integral_at_fractional_orders(order: float) -> None:
    def integrand(z: mpmath.mpf) -> mpmath.mpf:
        return mpmath.npdf(z, 0, 0.8) * (0.9 + 0.1 * mpmath.exp((2 * z - 1) / 1.28)) ** order

    exact = mpmath.log(mpmath.quad(integrand, [-12, -1, 0, 1, order, 12 + order])) / (order - 1)
    assert bounds.renyi_divergence(0.1, 0.8, order) == pytest.approx(float(exact), rel=1e-9)
    # The library's series is only an upper bound there, and it gives up below order 2.
    assert rdp(0.1, 0.8, [order])[0] > float(exact) * 1.0001


@pytest.mark.parametrize(
    ("sigma", "rounds", "exact", "library"),
    [(0.95, 300, 10.795, 10.83), (0.95, 200, 8.515, 8.58), (0.8, 300, 15.494, 15.90)],
)
def test_epsilon_of_eq_13_at_the_papers_settings(sigma: float, rounds: int, exact: float, library: float) -> None:
    value, order = bounds.renyi_epsilon(q=0.1, rounds=rounds, noise_multiplier=sigma, delta=1 / 500)
    assert value == pytest.approx(exact, abs=5e-4)
    assert library - 0.5 < value < library  # the library's fractional orders are upper bounds of the same formula
    at = bounds.epsilon_at(order, q=0.1, rounds=rounds, noise_multiplier=sigma, delta=1 / 500)
    assert at == value and order in bounds.ORDERS


def test_orders_are_those_of_the_specification() -> None:
    assert bounds.ORDERS[:3] == (1.1, 1.2, 1.3) and bounds.ORDERS[98:100] == (10.9, 11.0)
    assert bounds.ORDERS[-1] == 255 and len(bounds.ORDERS) == 99 + 245


def facts(**change: float) -> bounds.Facts:
    known = {
        "lr": 0.1, "steps": 2, "rounds": 300, "clients": 500, "cohort": 50, "clip": 0.2, "noise_multiplier": 0.95,
        "dimension": 10,
    }  # fmt: skip
    return bounds.Facts(**{**known, **change})  # type: ignore[arg-type]


def test_sensitivity_bounds_of_000() -> None:
    # By hand: η = 0.1, K = 2, L = 1, ρ = 0.5: 6·0.01·0.25·2·(12·4·0.01 + 10)/(1 − 0.04)
    small = facts(lr=0.1, steps=2, local_std=3.0)
    assert bounds.squared_sensitivity_sam(small, rho=0.5) == pytest.approx(0.03 * 10.48 / 0.96)
    assert bounds.squared_sensitivity_sgd(small) == pytest.approx(6 * 0.01 * 9 * 2 / (1 - 0.06))
    # At ρ = 0 SAM is SGD, but the bounds do not meet.
    assert bounds.squared_sensitivity_sam(small, rho=0.0) == 0.0
    with pytest.raises(InputError, match="1 − 2η²L²K"):
        bounds.squared_sensitivity_sam(facts(lr=1.0, steps=2), rho=0.5)
    with pytest.raises(InputError, match="1 − 3η²KL²"):
        bounds.squared_sensitivity_sgd(facts(lr=1.0, steps=1))


def test_theorem_2_of_001_solves_its_own_inequality() -> None:
    q, rounds, epsilon, delta = 0.1, 100, 2.0, 1e-3
    sigma = bounds.noise_condition_001(q=q, rounds=rounds, epsilon=epsilon, delta=delta).noise_multiplier
    order = 1 + math.log(1 / delta)  # 1 + 2ln(1/δ)/ε
    spent = rounds * 3.5 * q**2 * order / sigma**2 + math.log(1 / delta) / (order - 1)  # Lemmas 2-4
    assert spent == pytest.approx(epsilon, rel=1e-12)
    least = bounds.noise_condition_001(q=1e-3, rounds=1, epsilon=epsilon, delta=delta)
    assert least.noise_multiplier == math.sqrt(0.7) and least.order == pytest.approx(order)
    # Lemma 4's condition on the order decides whether they apply.
    assert least.limit == pytest.approx(1 + 2 / 3 * 0.7 * math.log(1 / (1e-3 * order * 1.7))) and order > least.limit
    small = bounds.noise_condition_001(q=0.0005, rounds=10, epsilon=6.0, delta=delta)
    assert small.order == pytest.approx(1 + math.log(1e3) / 3) and small.order < small.limit
    with pytest.raises(InputError, match="epsilon: found 20"):
        bounds.noise_condition_001(q=q, rounds=rounds, epsilon=20, delta=delta)


def step(rho: float = 0.5, **change: float) -> bounds.RoundPrivacy:
    return bounds.sample_round_privacy(facts(**change), samples=500, cohort=50, rho=rho, delta_tilde=1e-3)


def test_theorem_4_of_003() -> None:
    ratio = 0.5 / (0.95 * 0.2 * 10)
    inner = ratio * math.sqrt(2 * math.log(1e3)) + 2 * ratio**2
    assert step().epsilon == pytest.approx(math.log(0.9 + 0.1 * math.exp(inner)), rel=1e-12)
    assert step(dimension=1, rho=400).epsilon > 700  # no overflow: exp of the exponent is not representable
    for change in ({}, {"dimension": 1000}, {"dimension": 10**6}):
        spread = 2 * 0.5 / 50 * 0.95 * 0.2 * {"dimension": 10, **change}["dimension"] / 50
        grid = np.linspace(1, 300, 200_001)
        exponent = -math.sqrt(2 * math.log(1e3)) * grid * spread + (grid * spread) ** 2 / 2
        assert math.log(step(**change).delta) == pytest.approx(min(0.0, exponent.min()), abs=1e-4)
    assert step(rho=0.0) == bounds.RoundPrivacy(pytest.approx(0.0, abs=1e-15), 1.0)
    with pytest.raises(InputError, match="σCd"):
        step(clip=0.0)


def test_theorem_5_of_003_against_high_precision() -> None:
    one = bounds.RoundPrivacy(0.01, 1e-4)
    gap, probability = bounds.generalization_bound(one, samples=500, cohort=50, rounds=300, delta_tilde=0.1)
    mpmath.mp.dps = 40
    e, t = mpmath.mpf(one.epsilon), 300
    tanh = (mpmath.exp(e) - 1) / (mpmath.exp(e) + 1)
    prime = mpmath.sqrt(2 * t * mpmath.log(1 / mpmath.mpf(0.1)) * e**2) + t * e * tanh
    miss = mpmath.mpf(50) * mpmath.mpf(one.delta) / 500
    first = mpmath.exp(-(prime + t * e) / 2) * (2 * t * e / (t * e - prime) / (1 + mpmath.exp(e))) ** t
    first *= ((t * e + prime) / (t * e - prime)) ** (-(prime + t * e) / (2 * e))
    jumps = int(mpmath.ceil(prime / e))
    high, low = 1 - mpmath.exp(e) * miss / (1 + mpmath.exp(e)), 1 - miss / (1 + mpmath.exp(e))
    last = first + 2 - high**jumps * low ** (t - jumps) - low**t
    assert gap == pytest.approx(4 * float(prime), rel=1e-12)
    failure = 2 * mpmath.exp(-1.7 * prime) * last / prime * mpmath.log(2 / prime)
    assert probability == pytest.approx(float(1 - failure), rel=1e-9)


def test_theorem_5_of_003_at_its_edges() -> None:
    one = bounds.RoundPrivacy(0.01, 1e-4)
    with pytest.raises(InputError, match="rounds: found 3; allowed: more rounds"):
        bounds.generalization_bound(one, samples=500, cohort=50, rounds=3, delta_tilde=0.1)
    never = bounds.generalization_bound(
        bounds.RoundPrivacy(3.0, 0.0), samples=500, cohort=50, rounds=10_000, delta_tilde=0.9
    )
    assert never[1] == 1.0  # δ' = 0


def test_every_bound_says_that_it_enters_no_privacy_statement() -> None:
    public = [f for name, f in inspect.getmembers(bounds, inspect.isfunction) if f.__module__ == bounds.__name__]
    named = [f for f in public if not f.__name__.startswith("_")]
    assert len(named) == 10
    for function in named:
        assert "no privacy statement" in " ".join((function.__doc__ or "").lower().split()), function.__name__


def without_replacement(q: float, sigma: float, order: int) -> float:
    """One round's RDP at a whole order by the general theorem on sampling without replacement (Wang et al. 2019b)."""

    def base(j: int) -> float:
        return j / (2 * sigma**2)

    terms = [2 * math.log(q) + math.log(math.comb(order, 2) * min(4 * math.expm1(base(2)), 2 * math.exp(base(2))))]
    terms += [j * math.log(q) + math.log(2 * math.comb(order, j)) + (j - 1) * base(j) for j in range(3, order + 1)]
    return float(np.logaddexp.reduce([0.0, *terms])) / (order - 1)


def rdp_001(q: float, sigma: float, order: int) -> float:
    """One round's RDP at order α by Zhang et al. 2024, Lemma 4, where ``order_limit_001`` allows it."""
    return 3.5 * q**2 * order / sigma**2


def lemma_4_ratios(limit: float) -> list[float]:
    """The general bound over 3.5q²α/σ², wherever α is at most ``limit`` times what the condition allows."""
    found = []
    for squared in (0.7, 1.0, 2.0, 4.0, 16.0, 50.0, 200.0):
        for q in (0.3, 0.1, 0.05, 0.01, 0.001, 1e-4):
            sigma = math.sqrt(squared)
            allowed = [a for a in range(2, 200) if a <= limit * bounds.order_limit_001(q, sigma, a)]
            found += [without_replacement(q, sigma, a) / rdp_001(q, sigma, a) for a in allowed]
    return found


def test_lemma_4_holds_where_its_condition_does() -> None:
    ratios = lemma_4_ratios(1.0)
    assert len(ratios) > 100 and max(ratios) < 0.85


def test_without_the_condition_lemma_4_fails() -> None:
    """The broken twin: orders up to eight times the limit."""
    assert max(lemma_4_ratios(8.0)) > 1
