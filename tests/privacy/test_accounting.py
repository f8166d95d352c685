"""ε: pinned values, independent accounts, high-precision oracles, and what is refused."""

import logging
import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import stats

import fedflat.privacy.accounting.epsilon as accounting
from fedflat.core.checks import InputError
from fedflat.core.cohorts import Fixed, Poisson, Truncated
from fedflat.privacy.accounting import curves
from fedflat.privacy.accounting.composition import LossDistribution, deltas, sampled_gaussian, truncated_gaussian
from fedflat.privacy.accounting.curves import (
    ACCOUNTANTS,
    PROVEN,
    RDP_ORDERS,
    compose_epsilon,
    gaussian_epsilon,
    gdp_mu,
    grid_step,
    schedule_epsilon,
)
from fedflat.privacy.accounting.epsilon import (
    accounting_params,
    approximate_epsilon,
    calibrate,
    epsilon,
    noise_multiplier,
    split_noise,
)
from fedflat.privacy.accounting.independent import epsilon_bounds
from fedflat.privacy.trust import AccountingParams, default_min_cohort, guarantees, headline

PAPER = {"clients": 500, "cohort": 50, "delta": 1 / 500}
GRID_000 = [*(1 + x / 10 for x in range(1, 100)), *range(11, 256)]


def poisson(q: float, sigma: float) -> dp.DpEvent:
    return dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))


def naive(event: dp.DpEvent, rounds: int, delta: float, step: float = 5e-4) -> float:
    """By the library alone. step: five times its own is as close where ε is not small, in a tenth of the time."""
    return float(pld.PLDAccountant(value_discretization_interval=step).compose(event, rounds).get_epsilon(delta))


# Pinned values of the specification, at the precision it prints.


@pytest.mark.parametrize(
    ("setting", "rounds", "sigma", "tight", "renyi"),
    [
        (PAPER, 300, 0.95, "9.37", "10.83"),
        (PAPER, 200, 0.95, "7.30", "8.58"),
        (PAPER, 300, 0.8, "13.46", "15.90"),
        ({"clients": 100, "cohort": 10, "delta": 1 / 100}, 300, 0.8, "11.28", "14.07"),
    ],
)
def test_table_of_the_papers_settings(setting, rounds: int, sigma: float, tight: str, renyi: str) -> None:
    assert f"{epsilon(rounds=rounds, noise_multiplier=sigma, **setting):.2f}" == tight
    assert f"{epsilon(rounds=rounds, noise_multiplier=sigma, accountant='rdp', **setting):.2f}" == renyi


def test_plain_participations() -> None:
    event = dp.GaussianDpEvent
    assert f"{compose_epsilon(event(0.95), 30, 1 / 500):.1f}" == "32.4"
    assert f"{compose_epsilon(event(0.95 / 2), 30, 1 / 500):.1f}" == "98.8"
    assert f"{compose_epsilon(event(0.95), 50, 1 / 500):.1f}" == "48.3"
    assert f"{compose_epsilon(event(0.95 / 2), 50, 1 / 500):.1f}" == "152.7"
    shares = 0.95 / math.sqrt(50)
    assert f"{compose_epsilon(event(shares), 30, 1 / 500):.0f}" == "947"
    assert f"{compose_epsilon(event(shares / 2), 30, 1 / 500):.0f}" == "3558"


def test_per_tensor_clips_of_released_code() -> None:
    assert f"{epsilon(rounds=200, noise_multiplier=0.95 / math.sqrt(8), **PAPER):.0f}" == "92"
    deep = epsilon(rounds=300, noise_multiplier=0.95 / math.sqrt(62), **PAPER)
    # The library says 1,465.8, because its e^-loss underflows past 745; both accounts here say 1,464.8.
    assert deep == pytest.approx(1466, abs=1.5)
    low, high = epsilon_bounds(0.1, 0.95 / math.sqrt(62), 300, 1 / 500)
    assert low <= deep <= high


def test_fixed_cohorts() -> None:
    by_renyi = epsilon(rounds=300, noise_multiplier=0.95, sampling="fixed", accountant="rdp", **PAPER)
    revealed = schedule_epsilon(300, 0.1, 0.95 / 2, 1 / 500)
    assert f"{by_renyi:.1f}" == "300.8"
    assert epsilon(rounds=300, noise_multiplier=0.95, sampling="fixed", **PAPER) == min(by_renyi, revealed)
    gentle = {"rounds": 300, "noise_multiplier": 20.0, "sampling": "fixed", **PAPER}
    assert epsilon(**gentle) == epsilon(accountant="rdp", **gentle) < schedule_epsilon(300, 0.1, 10.0, 1 / 500)


# dp-accounting as it is, and as it is used.


def test_the_library_is_as_uneven_as_it_was() -> None:
    """If this fails, the library changed: read ``curves`` again before trusting any figure under REPLACE_ONE."""
    plain = dp.GaussianDpEvent(0.95)
    double = pld.PLDAccountant(Relation.REPLACE_ONE).compose(plain, 2).get_epsilon(1 / 500)
    single = rdp.RdpAccountant(GRID_000, Relation.REPLACE_ONE).compose(plain, 2).get_epsilon(1 / 500)
    added = rdp.RdpAccountant(GRID_000).compose(plain, 2).get_epsilon(1 / 500)
    assert double == pytest.approx(gaussian_epsilon(2 * math.sqrt(2) / 0.95, 1 / 500))  # PLD doubles the sensitivity
    assert single == added  # RDP does not
    with pytest.raises(dp.UnsupportedEventError):
        rdp.RdpAccountant(GRID_000, Relation.REPLACE_ONE).compose(poisson(0.1, 0.95))
    with pytest.raises(dp.UnsupportedEventError):
        pld.PLDAccountant(Relation.REPLACE_ONE).compose(Fixed(500, 50).event(0.475))


def test_replace_one_is_never_asked_of_the_library_but_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = rdp.RdpAccountant.__init__

    def spy(self, orders=None, neighboring_relation=Relation.ADD_OR_REMOVE_ONE):
        asked.append(neighboring_relation)
        original(self, orders, neighboring_relation)

    monkeypatch.setattr(rdp.RdpAccountant, "__init__", spy)
    for event in (poisson(0.2, 1.234), dp.GaussianDpEvent(1.234)):
        compose_epsilon(event, 3, 0.01, "rdp")
    assert asked == [Relation.ADD_OR_REMOVE_ONE] * 2
    compose_epsilon(Fixed(20, 4).event(1.234), 3, 0.01, "rdp")
    assert asked[2:] == [Relation.REPLACE_ONE]


def test_private_names_of_the_library_are_still_there() -> None:
    found = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.1, value_discretization_interval=0.01
    )
    assert found._symmetric is False
    for mass in (found._pmf_remove.to_dense_pmf(), found._pmf_add.to_dense_pmf()):
        assert (float(np.sum(mass._probs)) + mass._infinity_mass) == pytest.approx(1, abs=1e-9)
        assert isinstance(mass._lower_loss, int | np.integer)


@pytest.mark.parametrize(
    ("event", "rounds", "delta"),
    [
        (poisson(0.1, 0.95), 300, 2e-3),
        (poisson(0.1, 0.95), 1, 1e-5),
        (poisson(0.5, 5.0), 40, 1e-6),
        (poisson(0.01, 0.7), 100, 1e-5),
        (Truncated(500, 50, 60).event(1.5), 20, 2e-4),
    ],
)
def test_pld_agrees_with_the_library_composing_from_scratch(event, rounds: int, delta: float) -> None:
    assert compose_epsilon(event, rounds, delta) == pytest.approx(naive(event, rounds, delta), rel=2e-5)


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.1, 0.95), (0.5, 2.0), (0.01, 0.7), (1e-4, 0.5), (0.999, 5.0), (0.2, 0.05), (0.1, 30.0)]
)
def test_all_points_of_a_grid_at_once_are_the_librarys(q: float, sigma: float) -> None:
    """Each δ to the last bits, and with them the distribution; cuts half a sensitivity away would be noticed."""
    step = grid_step(q, sigma) * 20
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=step
    )
    kinds = (AdjacencyType.REMOVE, AdjacencyType.ADD)
    for kind, ours, one in zip(kinds, sampled_gaussian(q, sigma, step), (theirs._pmf_remove, theirs._pmf_add)):
        loss = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=kind)
        far = 1 / sigma**2 + 10 / sigma
        epsilons = np.unique([*np.linspace(-far, far, 1001), 0.0, math.log1p(-q), -math.log1p(-q)])
        found, exact = deltas(loss, epsilons), loss.get_delta_for_epsilon(epsilons)
        assert np.abs(found - exact).max() <= 1e-15
        mine, given = ours.to_dense_pmf(), one.to_dense_pmf()
        assert mine._lower_loss == given._lower_loss
        assert mine._infinity_mass == pytest.approx(given._infinity_mass, rel=1e-9)
        assert np.abs(mine._probs - given._probs).max() <= 1e-15 / step
        middle = ((1 if kind == AdjacencyType.REMOVE else -1) * epsilons > math.log1p(-q) + 1e-6) & (exact > 1e-6)
        moved = np.array([loss.inverse_privacy_loss(e) for e in epsilons[middle]]) + 0.5
        less = loss.mu_upper_cdf(moved) - np.exp(epsilons[middle] + loss.mu_lower_log_cdf(moved))
        assert not middle.any() or np.abs(less - exact[middle]).max() > 1e-15


@pytest.mark.parametrize(
    ("clients", "q", "most", "sigma"),
    [
        (60, 0.1, 12, 0.95), (500, 0.1, 60, 1.5), (50, 0.1, 50, 1.0), (20, 0.9, 18, 0.1), (1000, 1e-3, 2, 30.0),
    ],
)  # fmt: skip
def test_truncated_cohorts_are_the_librarys(clients: int, q: float, most: int, sigma: float) -> None:
    """At all points at once: where a client takes another's place (REPLACE), and mixed as the library mixes."""
    loss = GaussianPrivacyLoss(sigma, sampling_prob=min(q, 0.99), adjacency_type=AdjacencyType.REPLACE)
    epsilons = np.linspace(-1, 1, 401) * (2 / sigma**2 + 10 / sigma)
    exact = loss.get_delta_for_epsilon(epsilons)
    assert np.abs(deltas(loss, epsilons) - exact).max() <= 1e-15
    moved = np.array([loss.inverse_privacy_loss(e) for e in epsilons]) + 0.5 * sigma
    less = loss.mu_upper_cdf(moved) - np.exp(epsilons + loss.mu_lower_log_cdf(moved))
    assert np.abs(less - exact).max() > 1e-12  # cuts half a deviation away would be noticed
    step = grid_step(q, sigma) * 50
    theirs = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        clients, q, most, sigma, value_discretization_interval=step
    )
    for ours, one in zip(truncated_gaussian(clients, q, most, sigma, step), (theirs._pmf_remove, theirs._pmf_add)):
        mine, given = ours.to_dense_pmf(), one.to_dense_pmf()
        assert mine._lower_loss == given._lower_loss
        assert mine._infinity_mass == pytest.approx(given._infinity_mass, rel=1e-9)
        assert np.abs(mine._probs - given._probs).max() <= 1e-15 * max(1.0, 1 / step)


def test_composition_is_the_librarys_to_nine_digits() -> None:
    found = privacy_loss_distribution.from_gaussian_mechanism(
        0.95, sampling_prob=0.1, value_discretization_interval=1e-3
    )
    dense = [m.to_dense_pmf() for m in (found._pmf_remove, found._pmf_add)]
    ours = [LossDistribution(m._probs, m._lower_loss, 1e-3, m._infinity_mass) for m in dense]
    for rounds in (1, 2, 7, 50, 333):
        theirs = found.self_compose(rounds).get_epsilon_for_delta(2e-3)
        assert max(part.epsilon(rounds, 2e-3) for part in ours) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(
    ("q", "sigma", "rounds", "delta"),
    [(0.1, 0.95, 300, 2e-3), (0.1, 0.3, 10, 1e-4), (0.03, 1.0, 100, 1e-6), (0.9, 4.0, 30, 1e-5), (0.2, 2.0, 1, 1e-5)],
)
def test_the_independent_accountant_brackets_pld(q: float, sigma: float, rounds: int, delta: float) -> None:
    low, high = epsilon_bounds(q, sigma, rounds, delta)
    event = poisson(q, sigma)
    tight = compose_epsilon(event, rounds, delta)
    assert low <= tight <= high * (1 + 1e-4)
    assert high - low < 5e-3 * high + 1e-3
    assert tight <= compose_epsilon(event, rounds, delta, "rdp")


def test_the_independent_accountant_notices_a_wrong_sampling_rate() -> None:
    low, high = epsilon_bounds(0.1, 0.95, 30, 2e-3)
    assert low <= compose_epsilon(poisson(0.1, 0.95), 30, 2e-3) <= high
    assert not low <= compose_epsilon(poisson(0.101, 0.95), 30, 2e-3) <= high
    assert compose_epsilon(poisson(0.1, 0.95), 30, 2e-3, "fft") == high


def test_the_independent_accountant_at_certainty_is_the_plain_gaussian() -> None:
    low, high = epsilon_bounds(1.0, 2.0, 20, 1e-5)
    assert low <= gaussian_epsilon(math.sqrt(20) / 2, 1e-5) <= high
    assert epsilon_bounds(0.1, 5.0, 1, 0.9) == (0.0, pytest.approx(0.0, abs=1e-2))
    assert epsilon_bounds(0.1, 1.0, 10**6, 1e-9) == (0.0, math.inf)  # rounding alone exceeds δ


# Exact Gaussians against 50 digits.


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(50):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.77, 81.5, 500.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 2e-3, 0.3])
def test_gaussian_epsilon_is_exact_and_rounded_up(mu: float, delta: float) -> None:
    found = gaussian_epsilon(mu, delta)
    assert exact_delta(found, mu) <= mpmath.mpf(delta)
    if found > 0:
        assert exact_delta(found * (1 - 1e-9) - 1e-12, mu) > mpmath.mpf(delta)


def test_gaussian_epsilon_at_the_ends() -> None:
    assert gaussian_epsilon(0, 0.1) == 0
    assert gaussian_epsilon(math.inf, 0.1) == math.inf


@pytest.mark.parametrize(
    ("rounds", "q", "sigma", "delta"), [(30, 0.1, 0.95, 2e-3), (300, 0.02, 2.0, 1e-6), (3, 1, 1, 1e-3)]
)
def test_known_schedules_average_delta_over_participations(rounds: int, q: float, sigma: float, delta: float) -> None:
    found = schedule_epsilon(rounds, q, sigma, delta)
    total = sum(
        mpmath.binomial(rounds, n) * mpmath.mpf(q) ** n * mpmath.mpf(1 - q) ** (rounds - n)
        * exact_delta(found, math.sqrt(n) / sigma) for n in range(1, rounds + 1)
    )  # fmt: skip
    assert total <= delta
    assert total > delta * (1 - 2e-4)


def test_known_schedules_at_the_ends() -> None:
    assert schedule_epsilon(10, 0.1, 0.0, 1e-3) == math.inf
    assert schedule_epsilon(1, 1e-9, 0.1, 1e-2) == schedule_epsilon(0, 0.5, 0.1, 1e-2) == 0.0
    assert schedule_epsilon(5, 1.0, 2.0, 1e-4) == pytest.approx(gaussian_epsilon(math.sqrt(5) / 2, 1e-4), rel=1e-4)


@pytest.mark.parametrize(("rounds", "delta"), [(1, 1e-10), (50, 1e-10), (3000, 1e-9)])
def test_the_transforms_rounding_stays_below_its_bound(rounds: int, delta: float) -> None:
    """A plain Gaussian through the discretised path: never below the exact ε, and close above it."""
    sigma = 10.0
    found = privacy_loss_distribution.from_gaussian_mechanism(sigma, value_discretization_interval=5e-4)
    mass = found._pmf_remove.to_dense_pmf()
    ours = LossDistribution(mass._probs, mass._lower_loss, 5e-4, mass._infinity_mass)
    exact = gaussian_epsilon(math.sqrt(rounds) / sigma, delta)
    assert exact <= ours.epsilon(rounds, delta) <= exact * (1 + 2e-3)


def test_loss_distributions_of_few_points() -> None:
    """Randomised response by hand: losses ±1."""
    up = math.e / (1 + math.e)
    simple = LossDistribution(np.array([1 - up, 0.0, up]), -1, 1.0, 0.0)
    # δ(ε) = up·(1 − e^(ε − 1)): zero from ε = 1 on.
    assert simple.epsilon(1, 1e-9) == pytest.approx(1, abs=1e-6)
    assert simple.epsilon(1, up * (1 - math.exp(-0.5))) == pytest.approx(0.5, abs=1e-6)
    assert simple.epsilon(1, 0.9) == 0.0
    assert simple.epsilon(2, 1e-9) == pytest.approx(2, abs=1e-6)
    assert LossDistribution(np.array([1.0]), -3, 1.0, 0.0).epsilon(2, 1e-3) == 0.0
    assert LossDistribution(np.array([0.99]), 0, 1.0, 0.01).epsilon(1, 0.009) == math.inf
    assert LossDistribution(np.array([0.999]), 0, 1.0, 0.001).epsilon(1, 0.009) == 0.0


def test_a_curve_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    real = curves.sampled_gaussian
    monkeypatch.setattr(curves, "sampled_gaussian", lambda *words: made.append(words[1]) or real(*words))
    event = poisson(0.1, 0.9517)
    values = [compose_epsilon(event, rounds, 2e-3) for rounds in range(1, 101)]
    assert len(made) == 1
    assert np.all(np.diff(values) > 0)
    assert compose_epsilon(event, 0, 2e-3) == 0
    assert compose_epsilon(event, 7, 1e-4) > values[6]
    for rounds, delta, where in ((7, 0.0, "delta"), (-1, 2e-3, "rounds")):
        with pytest.raises(InputError, match=where):
            compose_epsilon(event, rounds, delta)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "fft"])
def test_no_noise_means_no_bound(accountant: str) -> None:
    assert compose_epsilon(poisson(0.1, 0.0), 3, 0.1, accountant) == math.inf
    assert epsilon(rounds=3, noise_multiplier=0, accountant=accountant, **PAPER) == math.inf
    assert epsilon(rounds=0, noise_multiplier=0, accountant=accountant, **PAPER) == 0


@pytest.mark.parametrize(
    ("event", "accountant", "reason"),
    [
        (Truncated(10, 4, 5).event(1.0), "fft", "fft has no bound for truncated"),
        (dp.LaplaceDpEvent(2.0), "pld", "event: found LaplaceDpEvent; allowed: a round of Gaussian noise"),
        (dp.GaussianDpEvent(1.0), "plds", "Did you mean pld?"),
    ],
)
def test_unsupported_pairs_are_refused_with_the_reason(event, accountant: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason.replace("?", r"\?")):
        compose_epsilon(event, 3, 1e-3, accountant)


def test_notes_of_orders_that_do_not_converge_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="absl"):
        compose_epsilon(poisson(0.1, 0.9501), 3, 1e-3, "rdp")
    assert "failed to converge" not in caplog.text


def test_the_wider_grid_of_orders_never_hurts() -> None:
    assert set(GRID_000) <= set(RDP_ORDERS)
    small = rdp.RdpAccountant(GRID_000).compose(poisson(0.1, 30.0), 10).get_epsilon(1e-4)
    assert compose_epsilon(poisson(0.1, 30.0), 10, 1e-4, "rdp") <= small + 1e-12


def test_central_limit_approximation() -> None:
    assert gdp_mu(0.1, 0.95, 300) == pytest.approx(0.1 * math.sqrt(300 * (math.exp(0.95**-2) - 1)))
    assert gdp_mu(1.0, 2.0, 16) == 2.0
    assert gdp_mu(0.1, 0.01, 1) == math.inf
    tight = compose_epsilon(poisson(0.1, 0.95), 200, 2e-3)
    setting = {**PAPER, "rounds": 200, "noise_multiplier": 0.95}
    assert gdp_mu(0.1, 0.0, 1) == math.inf == approximate_epsilon(**{**setting, "noise_multiplier": 0})
    assert approximate_epsilon(**{**setting, "rounds": 0}) == 0.0
    assert approximate_epsilon(**setting) < tight  # below the truth: never a bound


def test_what_is_called_epsilon_is_proven() -> None:
    """An approximation has a name of its own: asked for as an accountant it once lay 2.1 under what is proven."""
    small: dict[str, Any] = {"clients": 10_000, "cohort": 100, "rounds": 10}
    assert approximate_epsilon(noise_multiplier=0.6, **small) < 0.5 < 2.5 < epsilon(noise_multiplier=0.6, **small)
    for name in PROVEN:
        assert epsilon(noise_multiplier=0.6, accountant=name, **small) > 2.5
    assert set(ACCOUNTANTS) - set(PROVEN) == {"gdp"}
    for ask in (
        lambda: epsilon(noise_multiplier=0.6, accountant="gdp", **small),
        lambda: noise_multiplier(epsilon=2.0, accountant="gdp", **small),
        lambda: compose_epsilon(poisson(0.01, 0.6), 10, 1e-5, "gdp"),
    ):
        with pytest.raises(InputError, match="found gdp; allowed: pld, rdp, fft"):
            ask()


def test_the_server_of_distributed_knows_the_cohort() -> None:
    made = accounting_params(rounds=300, noise_multiplier=0.95, trust="distributed", min_cohort=15, **PAPER)
    recipients, server = guarantees(made)
    assert server.epsilon == schedule_epsilon(300, 0.1, 0.95, (1 / 500 - made.abort_probability()))
    assert recipients.epsilon == server.epsilon  # they see less, and the noise's size shows the cohort's
    assert recipients.adversary == "recipients" and server.adversary == "server"
    assert server.relation == "add-remove"
    assert epsilon(rounds=300, noise_multiplier=0.95, trust="distributed", min_cohort=15, **PAPER) == server.epsilon
    assert headline(replace(made, rounds=0)) == 0


def test_distributed_with_cohorts_of_fixed_size_never_aborts() -> None:
    made = accounting_params(
        rounds=300, noise_multiplier=20, sampling="fixed", trust="distributed", min_cohort=50, **PAPER
    )
    recipients, server = guarantees(made)
    assert made.abort_probability() == 0
    assert recipients.epsilon < server.epsilon
    assert server.relation == "replace-one"
    with pytest.raises(InputError, match=r"cohort.min: found 50; allowed: a whole number ≥ 1 and ≤ 49"):
        AccountingParams(Fixed(500, 50), 300, 1.0, 0.01, trust="distributed", min_cohort=50, colluders=1)


@pytest.mark.parametrize(("minimum", "colluders"), [(30, 0), (35, 0), (30, 20)])
def test_aborts_follow_the_binomial_tail(minimum: int, colluders: int) -> None:
    made = AccountingParams(
        Poisson(500, 50), 20, 0.95, 0.9, trust="distributed", min_cohort=minimum, colluders=colluders
    )
    one = stats.binom(500 - colluders, 0.1).cdf(minimum - 1)
    assert made.abort_probability() == pytest.approx(1 - (1 - one) ** 20, rel=1e-9)
    assert made.remaining_delta() == pytest.approx(0.9 - made.abort_probability())


def test_a_cohort_min_that_eats_delta_is_refused_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"cohort.min: found 40; allowed: at most 1\d .*Choose a smaller cohort.min"):
        epsilon(rounds=300, noise_multiplier=1, trust="distributed", min_cohort=40, **PAPER)
    certain = AccountingParams(Poisson(50, 5), 10, 1.0, 0.01, trust="distributed", min_cohort=50, colluders=0)
    assert certain.abort_probability() == pytest.approx(1)


def test_the_default_min_cohort_costs_at_most_a_hundredth_of_delta() -> None:
    found = default_min_cohort(Poisson(500, 50), 300, 2e-4)
    chance = [
        AccountingParams(Poisson(500, 50), 300, 1, 0.5, trust="distributed", min_cohort=n).abort_probability()
        for n in (found, found + 1)
    ]
    assert chance[0] <= 2e-6 < chance[1]
    assert default_min_cohort(Fixed(500, 50), 300, 2e-4, colluders=4) == 46
    assert default_min_cohort(Truncated(500, 50, 50), 300, 2e-4) == found
    # With a cap of 50 and 40 colluders, a truncated cohort may hold as few as 10 honest clients.
    assert default_min_cohort(Truncated(500, 50, 50), 300, 2e-4, colluders=40) == 10
    with pytest.raises(InputError, match=r"cohort.size: found 1"):
        default_min_cohort(Poisson(500, 1), 300, 2e-4)


def test_local_composes_doubled_sensitivity_over_participations() -> None:
    setting = {"rounds": 300, "noise_multiplier": 0.95, "trust": "local", **PAPER}
    assert f"{epsilon(max_participations=30, **setting):.1f}" == "98.8"
    assert epsilon(**setting) == gaussian_epsilon(2 * math.sqrt(300) / 0.95, 1 / 500)
    assert epsilon(max_participations=10**6, **setting) == epsilon(**setting)
    (only,) = guarantees(accounting_params(**{**setting, "rounds": 3}))
    assert (only.relation, only.adversary) == ("replace-one", "server")
    assert epsilon(sampling="truncated", max_cohort=60, accountant="rdp", **setting) > epsilon(**setting)


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 50.0])
def test_calibrated_noise_meets_its_target_from_below(target: float) -> None:
    sigma = noise_multiplier(epsilon=target, rounds=300, **PAPER)
    assert target * (1 - 1e-3) <= epsilon(rounds=300, noise_multiplier=sigma, **PAPER) <= target
    assert naive(poisson(0.1, sigma), 300, 1 / 500, 1e-4 if target < 1 else 5e-4) <= target * (1 + 1e-4)


@pytest.mark.parametrize(
    "setting",
    [{"trust": "distributed", "min_cohort": 10, "colluders": 5}, {"trust": "local", "max_participations": 12}],
)
def test_calibration_counts_colluders_and_participations(setting) -> None:
    """Every accountant, cohort law and trust model is in the table of ``test_plan``."""
    sigma = noise_multiplier(epsilon=3.0, rounds=40, **PAPER, **setting)
    assert 3.0 * (1 - 1e-3) <= epsilon(rounds=40, noise_multiplier=sigma, **PAPER, **setting) <= 3.0


def test_calibration_is_quick() -> None:
    calls = []

    def counted(sigma: float) -> float:
        calls.append(sigma)
        return compose_epsilon(poisson(0.1, sigma), 300, 2e-3)

    calibrate(counted, 8.0, 1.0)
    assert len(calls) <= 10


def test_calibration_of_awkward_functions() -> None:
    assert calibrate(lambda s: 1 / s, 1e-3, 1e5) == pytest.approx(1e3, rel=1e-3)
    assert calibrate(lambda s: math.inf if s < 2 else 1 / s, 10.0) == pytest.approx(
        2, rel=1e-6
    )  # a jump: stay above it
    assert calibrate(lambda s: 5.0 if s < 3 else 0.0, 1.0) == pytest.approx(3, rel=1e-6)
    assert calibrate(lambda s: 0.1, 1.0) < 1e-5  # anything will do
    with pytest.raises(InputError, match="up to 1e7"):
        calibrate(lambda s: 2.0, 1.0)
    with pytest.raises(InputError, match=r"privacy.epsilon: found -1"):
        calibrate(lambda s: 1 / s, -1)


def test_split_noise_composes_back() -> None:
    rest = split_noise(0.95, 2.5)
    assert rest**-2 + (2 * 2.5) ** -2 == pytest.approx(0.95**-2)
    together = pld.PLDAccountant().compose(dp.GaussianDpEvent(rest)).compose(dp.GaussianDpEvent(2.5 / 0.5))
    assert together.get_epsilon(1e-5) == pytest.approx(gaussian_epsilon(1 / 0.95, 1e-5), rel=1e-3)
    assert split_noise(0, 1) == 0
    with pytest.raises(InputError, match=r"more than noise_multiplier / 2 = 0.5.*count alone"):
        split_noise(1.0, 0.5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clients": 0}, "clients: found 0"),
        ({"clients": 2.5}, "clients: found 2.5"),
        ({"cohort": 501}, "cohort.size: found 501"),
        ({"rounds": -1}, "rounds: found -1"),
        ({"rounds": 1.5}, "rounds: found 1.5"),
        ({"noise_multiplier": -1}, "privacy.noise_multiplier: found -1"),
        ({"noise_multiplier": float("nan")}, "privacy.noise_multiplier: found nan"),
        ({"delta": 0}, "privacy.delta: found 0; allowed: a number > 0 and < 1"),
        ({"delta": 1}, "privacy.delta: found 1"),
        ({"sampling": "Poisson"}, "Did you mean poisson?"),
        ({"trust": "centrl"}, "Did you mean central?"),
        ({"accountant": "pdl"}, "accountant: found pdl"),
        ({"max_cohort": 60}, "cohort.max: found 60"),
        ({"min_cohort": 10}, "cohort.min: found 10; allowed: nothing unless privacy.trust is distributed"),
        ({"colluders": 1}, "colluders: found 1; allowed: nothing unless"),
        ({"max_participations": 5}, "allowed: nothing unless privacy.trust is local"),
        ({"max_participations": 0, "trust": "local"}, "cohort.max_participations: found 0"),
        ({"sampling": "truncated", "max_cohort": 60, "accountant": "rdp"}, "rdp has no bound for truncated"),
    ],
)
def test_every_wrong_argument_is_one_line(change, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        epsilon(**{**PAPER, "rounds": 10, "noise_multiplier": 1.0, **change})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sigma", [1e-12, 1e-9, 1e-4, 0.0029999])
@pytest.mark.parametrize("accountant", ["pld", "fft"])
def test_next_to_no_noise_has_its_figure(sigma: float, accountant: str) -> None:
    """n participations with hardly any noise give n/(2σ²), n the most that δ does not cover; monotone in σ."""
    most = int(stats.binom(10, 0.1).isf(PAPER["delta"]))
    found = epsilon(**PAPER, rounds=10, noise_multiplier=sigma, accountant=accountant)
    assert found == pytest.approx(most / (2 * sigma**2), rel=0.02)
    assert found >= epsilon(**PAPER, rounds=10, noise_multiplier=sigma * 1.001, accountant=accountant)


def test_noise_beyond_what_floats_hold_is_refused_and_huge_targets_are_met() -> None:
    for wrong in (1e-13, 5e-324, 1e9, 1e308):
        with pytest.raises(InputError, match=r"privacy.noise_multiplier: found .*; allowed: 0, or a number from 1e-12"):
            epsilon(**PAPER, rounds=10, noise_multiplier=wrong)
    with pytest.raises(InputError, match=r"0, or at least 0.003 with truncated cohorts"):
        epsilon(**PAPER, rounds=10, noise_multiplier=1e-4, sampling="truncated", max_cohort=80)
    for target in (1e9, 1e20):
        sigma = noise_multiplier(**PAPER, rounds=10, epsilon=target)
        assert 0.999 * target < epsilon(**PAPER, rounds=10, noise_multiplier=sigma) <= target
    with pytest.raises(InputError, match=r"privacy.epsilon: found 1e"):
        noise_multiplier(**PAPER, rounds=10, epsilon=1e21)


def test_delta_defaults_to_a_tenth_of_one_over_m() -> None:
    setting = {"clients": 500, "cohort": 50, "rounds": 5, "noise_multiplier": 1.0}
    assert epsilon(**setting) == epsilon(delta=0.1 / 500, **setting)
    assert accounting.default_delta(500) == 0.1 / 500
    with pytest.raises(InputError, match="rounds: found 0"):
        noise_multiplier(epsilon=1.0, clients=500, cohort=50, rounds=0)
