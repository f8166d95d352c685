"""What selecting the best of several private runs costs: against exact enumeration, each bound with broken twins."""

import itertools
import math
from collections.abc import Callable

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
from fedflat.privacy.tuning import Selection
from fedflat.privacy.verify import recompute, verify

ORDERS = np.array(RDP_ORDERS)
SELECTIONS = [Selection(mean) for mean in (1.01, 2, 30, 1000)]
Bound = Callable[[Selection, np.ndarray, np.ndarray], np.ndarray]


def generating(selection: Selection, x: float) -> float:
    """E[x^K], from the law's definition: P(K = k) = γ(1 − γ)^(k − 1), γ = 1/E[K]."""
    return x / (selection.mean - (selection.mean - 1) * x)


def divergences(first: list[float], second: list[float]) -> np.ndarray:
    """Rényi divergences at all orders, the larger direction."""
    p, q = (np.log(np.array(values)) for values in (first, second))
    each = [logsumexp(np.outer(ORDERS, a) + np.outer(1 - ORDERS, b), axis=1) for a, b in ((p, q), (q, p))]
    return np.asarray(np.max(each, axis=0) / (ORDERS - 1))


def outcomes(selection: Selection, good: float) -> list[float]:
    """Exact chances that the best of K trials is the good outcome, or the bad one."""
    bad = generating(selection, 1 - good)
    return [chance for chance in (1 - bad, bad) if chance > 0]


PAIRS = [
    (p * ratio, p)
    for p, ratio in itertools.product((1e-9, 1e-6, 1e-3, 0.05, 0.3), (1.2, 3.0, 50.0, 1e5, 3e8))
    if p * ratio < 1
]
"""Chances of the good outcome under two neighbours; 0.3 and 0.9 is randomised response of a kind."""


def worst(bound: Bound) -> float:
    """By how much at most the exact divergence of a selection exceeds a bound."""
    excess = []
    for selection, (high, low) in itertools.product(SELECTIONS, PAIRS):
        exact = divergences(outcomes(selection, high), outcomes(selection, low))
        excess.append(np.max(exact - bound(selection, ORDERS, divergences([high, 1 - high], [low, 1 - low]))))
    return float(np.max(excess))


def test_no_selection_of_two_outcomes_costs_more_than_the_bound() -> None:
    assert worst(Selection.selected) <= 1e-9


def without_mean(selection: Selection, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: forgets ln E[K]."""
    return selection.selected(at, one) - math.log(selection.mean) / (at - 1)


def of_the_trial(selection: Selection, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: the winner's own figure."""
    return one


def as_drawn(selection: Selection, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: composes as many trials as happened to be drawn."""
    return selection.draw(stream(1, "a run")) * one


def of_another_law(selection: Selection, at: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Broken: as if K had a cheaper law, η = −0.9 in place of 1, with the same mean."""
    return one + 0.1 / 2 * (selection.selected(at, one) - one)


@pytest.mark.parametrize("broken", [without_mean, of_the_trial, as_drawn, of_another_law])
def test_a_broken_bound_is_exceeded(broken: Bound) -> None:
    assert worst(broken) > 1e-3


@pytest.mark.parametrize("selection", SELECTIONS[1:3])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 5.0])
def test_the_best_of_gaussian_numbers_costs_less(selection: Selection, sigma: float) -> None:
    """The largest of K numbers N(0, σ²) against N(1, σ²), of density E[K·F^(K−1)]·f, by a sum over a fine grid."""
    x = np.linspace(-9 * sigma, 9 * sigma + 1, 4_001)

    def chances(shift: float) -> list[float]:
        z = (x - shift) / sigma
        mass = slope(selection, ndtr(z)) * np.exp(-(z**2) / 2) * (x[1] - x[0]) / (sigma * math.sqrt(2 * math.pi))
        assert mass.sum() == pytest.approx(1, rel=1e-6)
        return list(mass)

    exact, one = divergences(chances(0.0), chances(1.0))[:40], ORDERS / (2 * sigma**2)
    assert (exact <= selection.selected(ORDERS, one)[:40] + 1e-9).all()
    assert (exact > one[:40]).any()  # the winner's own figure does not cover it


def slope(selection: Selection, x: np.ndarray) -> np.ndarray:
    """E[K·x^(K−1)]."""
    return np.asarray(selection.mean / (selection.mean - (selection.mean - 1) * x) ** 2)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_library_agrees(selection: Selection) -> None:
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(3.0), 60)
    orders, one = renyi(event.event, 60)
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, selection.mean, 1.0))
    assert selection.epsilon(orders, one, 1e-4) == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-6)


def test_the_number_drawn_follows_the_law() -> None:
    generator = stream(3, "many draws")
    drawn = np.bincount([Selection(4).draw(generator) for _ in range(4000)], minlength=8)
    assert drawn[0] == 0
    for number in range(1, 7):
        chance = 0.25 * 0.75 ** (number - 1)
        assert drawn[number] / 4000 == pytest.approx(chance, abs=4 * math.sqrt(chance / 4000))


def test_a_law_that_has_no_proof_here_is_refused() -> None:
    for mean in (1.0, 0.0, 1e9):
        with pytest.raises(InputError, match="allowed: a number"):
            Selection(mean)
    assert Selection.of(Selection(3.0).record()) == Selection(3.0)
    for more in ({"eta": None}, {"eta": 0.0}, {"beside": [{"rounds": 60, "cohort": 500, "noise_multiplier": 3.0}]}):
        with pytest.raises(InputError, match="the geometric law"):
            Selection.of(Selection(3.0).record() | more)


SETTING = {"clients": 500, "cohort": 500, "rounds": 30, "sampling": "full", "accountant": "rdp"}
TEN = Selection(10)


def lines(plan: Plan, rounds: int | None = None) -> list[dict]:
    found: list[dict] = []
    for round in range(plan.rounds if rounds is None else rounds):
        found.append(seal(plan.record(round, 0.3), round, "0" * 64))
    return found


@pytest.mark.parametrize("sampling", ["full", "fixed"])
def test_noise_is_calibrated_to_the_total_and_the_ledger_proves_it(sampling: str) -> None:
    plan = build_plan(**SETTING | {"sampling": sampling, "epsilon": 6.0, "selection": Selection(4)})
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
        [{**entry, "selection": {"mean": 10, "eta": 0.0}} for entry in entries],
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


def test_the_statement_counts_the_selection() -> None:
    plan = build_plan(**SETTING | {"epsilon": 6.0, "selection": TEN})
    said = statement(plan, rounds_run=30, algorithm="dp-fedavg", facts={"clip": 0.3}, seeded=True,
                     entries=lines(plan))  # fmt: skip
    assert said["epsilon"] == said["proven_epsilon"] == plan.epsilon() and said["selection"] == {"mean": 10, "eta": 1}
    assert said["checklist"]["tuning"].startswith("Counted") and "of all trials" in said["checklist"]["data_accesses"]
    assert TEXTS["not_covered"]["selected"] in said["not_covered"] and "secret number of trials" in said["reasons"][0]
    assert all(adversary["epsilon"] == plan.epsilon() for adversary in said["adversaries"])
    assert "nothing of the other trials" in said["adversaries"][0]["description"]
    one = statement(tuning.alone(plan), rounds_run=30, algorithm="dp-fedavg", facts={}, seeded=True)
    assert one["checklist"]["tuning"].startswith("Not counted") and one["epsilon"] < said["epsilon"]
