"""What selecting the best of several private runs costs: against exact enumeration, each bound with broken twins."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy.special import logsumexp, ndtr

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.privacy import tuning
from fedflat.privacy.accounting.curves import RDP_ORDERS, renyi
from fedflat.privacy.ledger import seal
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.statement import TEXTS, statement
from fedflat.privacy.tuning import Trials, law, negative_binomial_mean
from fedflat.privacy.verify import recompute, verify

ORDERS = np.array(RDP_ORDERS)
LAWS = [Trials(2, 1.0), Trials(30, 1.0), Trials(1000, 1.0), Trials(10, 0.0), Trials(500, 0.0), Trials(10, 3.0)]
LAWS += [Trials(100, -0.5), Trials(5, -0.9), Trials(0.2, None), Trials(1, None), Trials(8, None), Trials(60, None)]
Bound = Callable[[Trials, np.ndarray, np.ndarray], np.ndarray]


def generating(trials: Trials, x: float) -> float:
    """E[x^K], from the law's definition."""
    if trials.eta is None:
        return math.exp(trials.mean * (x - 1))
    gamma = trials.gamma
    if trials.eta == 0:
        return math.log(1 - (1 - gamma) * x) / math.log(gamma)
    return float(((1 - (1 - gamma) * x) ** -trials.eta - 1) / (gamma**-trials.eta - 1))


def divergences(first: list[float], second: list[float]) -> np.ndarray:
    """Rényi divergences at all orders, the larger direction."""
    p, q = (np.log(np.array(values)) for values in (first, second))
    each = [logsumexp(np.outer(ORDERS, a) + np.outer(1 - ORDERS, b), axis=1) for a, b in ((p, q), (q, p))]
    return np.asarray(np.max(each, axis=0) / (ORDERS - 1))


def outcomes(trials: Trials, good: float) -> list[float]:
    """Exact chances that the best of K trials is the good outcome, is the bad one, or that there is none."""
    none = generating(trials, 0.0)
    bad = generating(trials, 1 - good) - none
    return [chance for chance in (1 - none - bad, bad, none) if chance > 0]


PAIRS = [
    (p * ratio, p)
    for p, ratio in itertools.product((1e-9, 1e-6, 1e-3, 0.05, 0.3), (1.2, 3.0, 50.0, 1e5, 3e8))
    if p * ratio < 1
]
"""Chances of the good outcome under two neighbours; 0.3 and 0.9 is randomised response of a kind."""


def worst(bound: Bound) -> float:
    """By how much at most the exact divergence of a selection exceeds a bound."""
    excess = []
    for trials, (high, low) in itertools.product(LAWS, PAIRS):
        exact = divergences(outcomes(trials, high), outcomes(trials, low))
        excess.append(np.max(exact - bound(trials, ORDERS, divergences([high, 1 - high], [low, 1 - low]))))
    return float(np.max(excess))


def test_no_selection_of_two_outcomes_costs_more_than_the_bound() -> None:
    assert worst(lambda trials, at, one: trials.selected(at, one)) <= 1e-9


def without_mean(trials: Trials, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: forgets ln E[K]."""
    return trials.selected(at, one) - max(math.log(trials.mean), 0.0) / (at - 1)


def of_the_trial(trials: Trials, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: the winner's own figure."""
    return one


def as_drawn(trials: Trials, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: composes as many trials as happened to be drawn."""
    return trials.draw(stream(1, "a run")) * one


def half_of_the_trials(trials: Trials, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: the η of one law, the trials of another."""
    return replace(trials, eta=-0.9 if trials.eta is not None and trials.mean > 1 else trials.eta).selected(at, one)


def without_delta(trials: Trials, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: Poisson's bound without μδ̂; the others as they are."""
    if trials.eta is not None:
        return trials.selected(at, one)
    return np.logaddexp(-trials.mean, math.log(trials.mean) + (at - 1) * one) / (at - 1)


@pytest.mark.parametrize("broken", [without_mean, of_the_trial, as_drawn, half_of_the_trials, without_delta])
def test_a_broken_bound_is_exceeded(broken: Bound) -> None:
    assert worst(broken) > 1e-3


@pytest.mark.parametrize(
    "trials", [Trials(2, 1.0), Trials(50, 1.0), Trials(20, 0.0), Trials(20, -0.5), Trials(4, None)]
)
@pytest.mark.parametrize("sigma", [0.4, 1.0, 5.0])
def test_the_best_of_gaussian_numbers_costs_less(trials: Trials, sigma: float) -> None:
    """The largest of K numbers N(0, σ²) against N(1, σ²), of density E[K·F^(K−1)]·f, by a sum over a fine grid."""
    x = np.linspace(-9 * sigma, 9 * sigma + 1, 4_001)

    def chances(shift: float) -> list[float]:
        z = (x - shift) / sigma
        mass = slope(trials, ndtr(z)) * np.exp(-(z**2) / 2) * (x[1] - x[0]) / (sigma * math.sqrt(2 * math.pi))
        none = generating(trials, 0.0)
        assert mass.sum() == pytest.approx(1 - none, rel=1e-6)
        return [*mass, none] if none > 0 else list(mass)

    exact, one = divergences(chances(0.0), chances(1.0))[:40], ORDERS / (2 * sigma**2)
    assert (exact <= trials.selected(ORDERS, one)[:40] + 1e-9).all()
    assert trials.eta == -0.5 or (exact > one[:40]).any()  # the winner's own figure does not cover it


def slope(trials: Trials, x: np.ndarray) -> np.ndarray:
    """E[K·x^(K−1)]."""
    if trials.eta is None:
        return trials.mean * np.exp(trials.mean * (x - 1))
    gamma, eta = trials.gamma, trials.eta
    scale = 1 / -math.log(gamma) if eta == 0 else eta / (gamma**-eta - 1)
    return np.asarray(scale * (1 - gamma) * (1 - (1 - gamma) * x) ** (-eta - 1))


@pytest.mark.parametrize("trials", [Trials(2, 1.0), Trials(30, 0.0), Trials(9, 2.5), Trials(1, None), Trials(25, None)])
def test_the_library_agrees(trials: Trials) -> None:
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(3.0), 60)
    orders, one = renyi(event.event, 60)
    accountant = rdp.RdpAccountant(orders)
    shape = math.inf if trials.eta is None else trials.eta
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, trials.mean, shape))
    ours, theirs = trials.epsilon(orders, one, 1e-4), accountant.get_epsilon(1e-4)
    assert ours <= theirs * (1 + 1e-6)  # for few Poisson trials its form of the theorem is the larger one
    assert ours == pytest.approx(theirs, rel=1e-6 if trials.mean > 1 else 0.2)


@pytest.mark.parametrize("trials", LAWS)
def test_the_law_has_its_mean_and_sums_to_one(trials: Trials) -> None:
    known = list(itertools.takewhile(lambda kp: kp[0] < 60 * trials.mean + 60, trials.chances()))
    if trials.eta is None or trials.eta >= 0:  # the others' means lie far out
        assert sum(p for _, p in known) == pytest.approx(1, abs=1e-4)
        assert sum(k * p for k, p in known) == pytest.approx(trials.mean, rel=1e-3)
    for x in (0.0, 0.3, 0.9):
        assert sum(p * x**k for k, p in known) == pytest.approx(generating(trials, x), abs=1e-6)


@pytest.mark.parametrize("trials", [Trials(4, 1.0), Trials(4, 0.0), Trials(4, -0.5), Trials(3, None)])
def test_the_number_drawn_follows_the_law(trials: Trials) -> None:
    generator = stream(3, "many draws")
    drawn = np.bincount([trials.draw(generator) for _ in range(4000)], minlength=8)
    for number, chance in itertools.islice(trials.chances(), 6):
        assert drawn[number] / 4000 == pytest.approx(chance, abs=4 * math.sqrt(chance / 4000))


def test_a_large_poisson_number_is_still_drawn() -> None:
    """Where e^−μ is 0 in float64 K came out as μ, always."""
    trials, generator = Trials(1500, None), stream(4, "large draws")
    drawn = [trials.draw(generator) for _ in range(60)]
    assert len(set(drawn)) > 30 and np.mean(drawn) == pytest.approx(1500, abs=25) and 20 < np.std(drawn) < 60


def test_a_draw_at_the_very_end_of_the_law_ends() -> None:
    class Last:
        def random(self) -> float:
            return 1 - 2**-53

    assert Trials(3, 1.0).draw(Last()) > 30  # type: ignore[arg-type]
    assert Trials(3, None).draw(Last()) > 10  # type: ignore[arg-type]


def test_laws_have_names_or_numbers() -> None:
    assert [law(name) for name in ("geometric", "logarithmic", "poisson", "0.5", 2)] == [1.0, 0.0, None, 0.5, 2.0]
    assert Trials(3, 0.5).name == "truncated negative binomial with η = 0.5" and Trials(3, None).name == "poisson"
    assert negative_binomial_mean(0.0, math.log(4)) == pytest.approx(3 / math.log(4))
    with pytest.raises(InputError, match="Did you mean geometric"):
        law("geometrc")
    for wrong in ((1.0, 1.0), (5, -1.0), (5, 11.0), (0, None), (1e9, None)):
        with pytest.raises(InputError, match="allowed: a number"):
            Trials(*wrong)


SETTING = {"clients": 500, "cohort": 500, "rounds": 30, "sampling": "full", "accountant": "rdp"}
TEN = tuning.Selection(Trials(10, 1.0))


def lines(plan: Plan, rounds: int | None = None) -> list[dict]:
    found: list[dict] = []
    for round in range(plan.rounds if rounds is None else rounds):
        found.append(seal(plan.record(round, 0.3), round, "0" * 64))
    return found


@pytest.mark.parametrize(
    ("sampling", "cohort", "eta"), [("full", 500, 1.0), ("fixed", 500, 0.0), ("full", 500, None), ("full", 500, -0.5)]
)
def test_noise_is_calibrated_to_the_total_and_the_ledger_proves_it(
    sampling: str, cohort: int, eta: float | None
) -> None:
    selection = tuning.Selection(Trials(4, eta))
    plan = build_plan(**SETTING | {"sampling": sampling, "cohort": cohort, "epsilon": 6.0, "selection": selection})
    assert 5.99 < plan.epsilon() <= 6.0
    assert plan.epsilon(1) == plan.epsilon()  # whoever sees the first round of a winner sees what selected it
    assert tuning.alone(plan).epsilon() < 4.5 < plan.epsilon(plan.rounds + 5) - 1.5
    assert plan.rounds_within_budget() == plan.rounds and plan.rounds_within_budget(2) == plan.rounds - 2
    entries = lines(plan)
    assert verify(entries, plan.epsilon()).ok
    assert recompute(entries).epsilon == pytest.approx(plan.epsilon(), rel=1e-4)
    assert not verify(entries, tuning.alone(plan).epsilon()).ok  # broken: the statement of one trial
    assert not verify(entries, plan.epsilon() * 0.999).ok


def test_cohorts_of_fixed_size_are_accounted_under_replacement() -> None:
    few = {"clients": 20, "cohort": 2, "rounds": 3, "sampling": "fixed", "accountant": "rdp"}
    plan = build_plan(**few, noise_multiplier=2.0, selection=TEN)
    assert plan.relation == "replace-one" and recompute(lines(plan)).epsilon == pytest.approx(plan.epsilon())
    assert plan.epsilon() > build_plan(**few | {"sampling": "poisson"}, noise_multiplier=2.0, selection=TEN).epsilon()
    with pytest.raises(InputError, match="truncated Poisson"):
        renyi(dp_accounting.TruncatedSubsampledGaussianDpEvent(20, 0.1, 3, 1.0), 1)


def test_lines_drawn_again_count_in_the_total() -> None:
    plan = build_plan(**SETTING | {"noise_multiplier": 3.0, "selection": TEN})
    entries = lines(plan)
    entries.append(seal({**plan.record(29, 0.3), "attempt": 2, "reason": "drawn again"}, 30, "0" * 64))
    more = plan.epsilon(31)
    assert more > plan.epsilon() and not verify(entries, plan.epsilon()).ok and verify(entries, more).ok


def test_trials_with_other_rounds_are_bounded_together() -> None:
    own = build_plan(**SETTING | {"noise_multiplier": 3.0, "selection": TEN})
    longer = tuning.Selection(TEN.trials, (tuning.Law(60, 500, 3.0), tuning.Law(30, 500, 9.0)))
    beside = replace(own, selection=longer)
    alone = build_plan(**SETTING | {"rounds": 60, "noise_multiplier": 3.0, "selection": TEN})
    assert beside.epsilon() == alone.epsilon() > own.epsilon()
    assert tuning.Selection.of(longer.record()) == longer
    entries = lines(beside)
    assert verify(entries, beside.epsilon()).ok and not verify(entries, own.epsilon()).ok


def test_no_noise_proves_nothing() -> None:
    plan = build_plan(**SETTING | {"noise_multiplier": 0.0, "selection": TEN})
    assert math.isinf(plan.epsilon()) and math.isinf(recompute(lines(plan, 2)).epsilon)


def test_lines_that_do_not_fit_prove_nothing() -> None:
    entries = lines(build_plan(**SETTING | {"noise_multiplier": 3.0, "selection": TEN}))
    plain = [{key: value for key, value in entry.items() if key != "selection"} for entry in entries]
    for broken in (
        [*entries[:-1], plain[-1]],
        [plain[0], *entries[1:]],
        [{**entry, "selection": {"mean": 10}} for entry in entries],
    ):
        assert not verify(broken, 100.0).ok


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"trust": "local"}, "privacy.trust: central"),
        ({"accountant": "pld"}, "rdp with privacy.selection"),
        ({"sampling": "min-separation", "cohort": 50}, "cohort.sampling min-separation"),
        ({"noise": "banded"}, "found correlated"),
        ({"noise_cohort": 5000}, "noise_cohort"),
        ({"private": False}, "a private method"),
    ],
)
def test_what_has_no_proof_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_plan(**SETTING | {"noise_multiplier": 3.0, "selection": TEN} | asked)


@pytest.mark.parametrize("eta", [1.0, None])
def test_the_statement_counts_the_selection(eta: float | None) -> None:
    plan = build_plan(**SETTING | {"epsilon": 6.0, "selection": tuning.Selection(Trials(10, eta))})
    said = statement(plan, rounds_run=30, algorithm="dp-fedavg", facts={"clip": 0.3}, key_source="seed",
                     entries=lines(plan))  # fmt: skip
    assert said["epsilon"] == said["proven_epsilon"] == plan.epsilon() and said["selection"] == {"mean": 10, "eta": eta}
    assert said["checklist"]["tuning"].startswith("Counted") and "of all trials" in said["checklist"]["data_accesses"]
    assert TEXTS["not_covered"]["selected"] in said["not_covered"] and "secret number of trials" in said["reasons"][0]
    assert ("may be none" in said["reasons"][0]) == (eta is None)
    assert all(adversary["epsilon"] == plan.epsilon() for adversary in said["adversaries"])
    assert "nothing of the other trials" in said["adversaries"][0]["description"]
    one = statement(tuning.alone(plan), rounds_run=30, algorithm="dp-fedavg", facts={}, key_source="seed")
    assert one["checklist"]["tuning"].startswith("Not counted") and one["epsilon"] < said["epsilon"]
