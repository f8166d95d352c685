"""The proven ε of the distributed discrete Gaussian against exact laws, a second library and an attack."""

import math

import numpy as np
import pytest
from scipy import special, stats

from fedflat.core.checks import InputError
from fedflat.core.discrete import discrete_gaussian
from fedflat.core.rng import stream
from fedflat.privacy.accounting.discrete import (
    ORDERS,
    WHOLE_ORDERS,
    DDGaussAccount,
    curve_delta,
    curve_epsilon,
    participation_epsilon,
    poisson_curve,
    sum_curve,
    sum_gap,
)

BASE = {
    "clients": 500, "cohort": 50, "noise_multiplier": 0.95, "clip": 1.0,
    "granularity": 1e-4, "dimension": 1000, "min_cohort": 20, "n_max": 500, "delta": 1 / 500,
}  # fmt: skip


def account(**changes) -> DDGaussAccount:
    return DDGaussAccount(**{**BASE, **changes})


def pmf(variance: float, reach: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


def sum_law(shares: int, variance: float, reach: int = 60) -> np.ndarray:
    """Exact law of the sum of shares on [−reach, reach] (the tails beyond are below double precision there)."""
    law = np.array([1.0])
    for _ in range(shares):
        law = np.convolve(law, pmf(variance, reach))
    middle = law.size // 2
    return law[middle - reach : middle + reach + 1]


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    keep = (p > 1e-290) & (q > 1e-290)
    return float(special.logsumexp(order * np.log(p[keep]) + (1 - order) * np.log(q[keep])) / (order - 1))


@pytest.mark.parametrize("shares, variance", [(2, 0.25), (3, 0.25), (5, 0.3), (10, 0.5), (4, 1.0)])
def test_the_gap_bounds_the_distance_to_one_discrete_gaussian(shares, variance):
    law, ideal = sum_law(shares, variance), pmf(shares * variance, 60)
    seen = np.abs(np.log(law[law > 1e-14] / ideal[law > 1e-14])).max()
    assert seen <= sum_gap(shares, variance) / 2
    if variance <= 0.5:
        assert seen > 1e-6  # the sum is another law: the τ term is needed


def test_gap_by_hand():
    assert sum_gap(1, 0.5) == 0
    assert sum_gap(3, 0.5) == pytest.approx(10 * (math.exp(-(math.pi**2) / 2) + math.exp(-2 * math.pi**2 / 3)))
    assert sum_gap(50, 9.0) < 1e-36


@pytest.mark.parametrize("shares, variance", [(2, 0.25), (3, 0.4), (6, 0.25), (8, 2.0)])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_curve_bounds_the_exact_divergence(shares, variance, shift):
    law = sum_law(shares, variance, 80)
    moved = np.concatenate([np.zeros(shift), law[:-shift]])
    for order in (1.1, 2, 3.5, 8):
        bound = float(sum_curve(shift, shares, variance, 1)(np.array([float(order)]))[0])
        exact = renyi(moved, law, order)
        assert exact <= bound * (1 + 1e-9)
        if variance >= 2 and order == 2:
            assert exact > 0.95 * bound


def test_a_share_below_half_a_step_proves_nothing():
    assert np.isinf(sum_curve(1, 4, 0.2499, 10)(ORDERS)).all()
    assert np.isfinite(sum_curve(1, 4, 0.25, 10)(ORDERS)).all()
    assert account(granularity=1.0).epsilon(1) == math.inf


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("shares, variance, shift", [(1, 4.0, 2), (3, 0.5, 1), (2, 0.25, 1)])
def test_poisson_curve_bounds_both_exact_directions(rate, shares, variance, shift):
    law = sum_law(shares, variance, 80)
    mixture = (1 - rate) * law + rate * np.concatenate([np.zeros(shift), law[:-shift]])
    orders = np.array([2.0, 3.0, 6.0, 10.0])
    plain = sum_curve(shift, shares, variance, 1)
    bound = poisson_curve(plain, rate)(orders)
    for order, tight in zip(orders, bound, strict=True):
        assert renyi(mixture, law, order) <= tight * (1 + 1e-9) + 1e-15
        assert renyi(law, mixture, order) <= tight
    assert bound[0] < plain(orders[:1])[0]


@pytest.mark.parametrize("variance", [0.25, 0.4, 1.0])
def test_topped_up_sums_whose_laws_differ_a_little_are_covered(variance):
    """Without the client: 2 shares and one draw worth 2; with it: 3 shares and one draw worth 1. Both directions."""
    without = np.convolve(sum_law(2, variance, 80), pmf(2 * variance, 80))
    present = np.convolve(sum_law(3, variance, 80), pmf(variance, 80))
    assert np.abs(np.log(present[150:171] / without[150:171])).max() <= sum_gap(4, variance)
    moved = np.concatenate([[0.0], present[:-1]])
    rate, orders = 0.2, np.array([2.0, 3.0, 6.0])
    bound = poisson_curve(sum_curve(1, 1, 4 * variance, 1), rate)(orders) + 1.5 * sum_gap(4, variance)
    mixture = (1 - rate) * without + rate * moved
    for base in (without, (1 - rate) * without + rate * present):  # removed, or sending a noised zero
        for order, limit in zip(orders, bound, strict=True):
            assert renyi(mixture, base, order) <= limit
            assert renyi(base, mixture, order) <= limit


def test_the_reflection_inequality_behind_the_symmetric_form():
    """Mironov et al. 2019, theorem 5, point by point: with w(r) = 1 − q + qr and f(w) = w^α − w^(1−α),
    f(w(r)) + r·f(w(1/r)) ≥ 0 for every likelihood ratio r; a reflection pairs r with 1/r."""
    r, q, order = np.meshgrid(np.geomspace(1, 1e4, 200), np.linspace(1e-4, 1, 200), [1.01, 1.5, 2, 3, 10, 30])
    up, down = 1 - q + q * r, 1 - q + q / r
    forward, backward = up**order + r * down**order, up ** (1 - order) + r * down ** (1 - order)
    assert np.all(forward - backward >= -1e-9 * forward)


def test_one_fine_share_is_the_sampled_gaussian_of_a_second_library():
    accountant = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    event = pytest.importorskip("dp_accounting").dp_event
    ours = poisson_curve(sum_curve(1e4, 1, 9500.0**2, 1), 0.1)(WHOLE_ORDERS)
    other = accountant.RdpAccountant(orders=list(WHOLE_ORDERS.astype(int)))
    other.compose(event.PoissonSampledDpEvent(0.1, event.GaussianDpEvent(0.95)), 300)
    assert np.allclose(300 * ours, other.rdp, rtol=1e-9)
    epsilon = curve_epsilon(WHOLE_ORDERS, 300 * ours, 1 / 500)
    assert epsilon == pytest.approx(other.get_epsilon(1 / 500), rel=1e-9)
    assert epsilon == pytest.approx(10.85, abs=0.01)  # 10.83 with the fractional orders that have no such formula


def test_epsilon_and_delta_invert_each_other():
    values = ORDERS * 0.3
    for delta in (1e-2, 1e-5, 1e-9):
        assert curve_delta(ORDERS, values, curve_epsilon(ORDERS, values, delta)) == pytest.approx(delta)
    assert curve_epsilon(ORDERS, values, 0.0) == math.inf
    assert curve_delta(ORDERS, values, 0.0) <= 1


def test_participation_counts():
    curve = sum_curve(1.0, 1, 0.95**2, 1)
    every_round = curve_epsilon(ORDERS, 30 * curve(ORDERS), 1e-3)
    assert participation_epsilon(curve, 30, 1.0, 1e-3) == pytest.approx(every_round, rel=1e-9)
    assert participation_epsilon(curve, 30, 0.1, 1e-3) < every_round
    # By hand at one round: δ(ε) = q·δ_1(ε).
    epsilon = participation_epsilon(curve, 1, 0.25, 1e-3)
    assert 0.25 * curve_delta(ORDERS, curve(ORDERS), epsilon) == pytest.approx(1e-3, rel=1e-6)
    assert participation_epsilon(curve, 10, 1e-7, 1e-3) < 1e-9


def concentrated_epsilon(bound: float, shares: int, share_variance: float, dimension: int) -> float:
    """ε such that the sum is ½ε²-concentrated private (KLS): min{√(Δ₂²/(ns²) + 2τd), Δ₂/√(ns²) + τ√d}."""
    gap, ratio = sum_gap(shares, share_variance), bound / math.sqrt(shares * share_variance)
    return min(math.sqrt(ratio**2 + 2 * gap * dimension), ratio + gap * math.sqrt(dimension))


def test_concentrated_epsilon_is_the_curve_at_every_order():
    for variance in (0.25, 0.5, 3.0):
        rho = concentrated_epsilon(2.0, 10, variance, 16) ** 2 / 2
        assert np.all(sum_curve(2.0, 10, variance, 16)(ORDERS) <= rho * ORDERS * (1 + 1e-12))
    assert concentrated_epsilon(2.0, 10, 9.0, 16) == pytest.approx(2 / math.sqrt(90))


def test_recipients_are_granted_amplification_and_the_server_is_not():
    completed = account(n_max=90)
    assert completed.epsilon(300) < 0.2 * completed.epsilon(300, "server")
    assert completed.epsilon(300) < account(n_max=85).epsilon(300)  # more shares, more noise
    assert completed.epsilon(300, "server") < completed.epsilon(300, "server", amplification=False)


def test_why_the_noise_of_unfilled_cohorts_hides_nobody():
    """The broken twin of n_max: with 50 or 51 shares, the energy of the released noise tells which, at d = 2^16."""
    d, share = 1 << 16, 4.0
    energies = {n: [] for n in (50, 51)}
    for n, seen in energies.items():
        for trial in range(4):
            # A sum of n shares is, to within τ, one discrete Gaussian of n times the variance.
            seen.append(np.square(discrete_gaussian(n * share, d, stream(1, "energy", n, trial)).astype(float)).mean())
    threshold = 50.5 * share
    assert (sum(e < threshold for e in energies[50]) + sum(e > threshold for e in energies[51])) >= 7


def test_aborted_rounds_are_taken_out_of_delta():
    assert account(min_cohort=50).epsilon(300) == math.inf
    strict = account(min_cohort=25)
    assert 0 < strict.abort_probability(1) < strict.abort_probability(300)
    others = stats.binom(499, 0.1)
    assert strict.abort_probability(10) == pytest.approx(10 * others.cdf(24))
    assert account(n_max=80).abort_probability(1) == pytest.approx(others.cdf(19) + others.sf(79))
    assert account(colluders=3).abort_probability(1) > account().abort_probability(1)
    assert account(cohort=500, min_cohort=500, clients=501, delta=1e-5).epsilon(1) == math.inf


def test_epsilon_is_monotone_and_grows_with_the_grid():
    values = [account(noise_multiplier=s, n_max=90).epsilon(300) for s in (0.5, 0.7, 1.0, 2.0)]
    assert values == sorted(values, reverse=True)
    coarse = [account(granularity=g, n_max=90).epsilon(300) for g in (1e-5, 1e-2, 3e-2)]
    assert coarse == sorted(coarse)
    assert account(n_max=90).epsilon(0) == 0.0
    assert account(noise_multiplier=0.0).epsilon(3) == math.inf


def test_guarantees_name_adversary_relation_and_theorem():
    rows = account(n_max=90).guarantees(300)
    assert [row.adversary for row in rows] == ["recipients", "server"]
    assert [row.epsilon for row in rows] == sorted(row.epsilon for row in rows)
    assert all(row.relation == "add-remove" and row.delta == 1 / 500 and "Kairouz" in row.accountant for row in rows)
    assert "Mironov" in rows[0].accountant and "Mironov" not in rows[1].accountant


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"cohort": 501}, "cohort.size: found 501"),
        ({"min_cohort": 501}, "cohort.min: found 501"),
        ({"n_max": 19}, "cohort.max: found 19; allowed: a whole number ≥ 20"),
        ({"delta": 0.0}, "delta: found 0;"),
        ({"granularity": -1.0}, "granularity: found -1;"),
    ],
)
def test_error_sentences(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        account(**changes)
