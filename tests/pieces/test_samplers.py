"""Cohort laws: the draw follows the law whose event is accounted."""

import tracemalloc

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from fedflat.core.checks import InputError
from fedflat.core.cohorts import Fixed, Poisson, Sampler, Truncated, make_sampler
from fedflat.core.rng import stream

DRAWS = 4000


def draws(sampler: Sampler, count: int = DRAWS) -> list[np.ndarray]:
    return [sampler.select_at(0, stream(7, "cohort", round)) for round in range(count)]


def dispersion(sampler: Sampler) -> float:
    """Variance of the cohort's size over that of Binomial(M, q)."""
    sizes = np.array([len(ids) for ids in draws(sampler)])
    return float(sizes.var() / (sampler.clients * sampler.q * (1 - sampler.q)))


@pytest.mark.parametrize("sampler", [Poisson(40, 8), Truncated(40, 8, 10), Fixed(40, 8), Poisson(40, 40)])
def test_ids_are_sorted_distinct_int64_and_repeatable(sampler: Sampler) -> None:
    for ids in draws(sampler, 50):
        assert ids.dtype == np.int64
        assert np.all(np.diff(ids) > 0)
        assert not len(ids) or (ids[0] >= 0 and ids[-1] < sampler.clients)
    assert np.array_equal(sampler.select_at(0, stream(1, "c")), sampler.select_at(0, stream(1, "c")))
    assert isinstance(sampler, Sampler)


def test_poisson_sizes_are_binomial() -> None:
    sizes = np.array([len(ids) for ids in draws(Poisson(40, 8))])
    law = stats.binom(40, 0.2)
    expected = np.array([law.cdf(4), *(law.pmf(k) for k in range(5, 12)), law.sf(11)]) * len(sizes)
    seen = np.array([np.sum(sizes <= 4), *(np.sum(sizes == k) for k in range(5, 12)), np.sum(sizes > 11)])
    assert stats.chisquare(seen, expected).pvalue > 1e-4


def test_poisson_members_are_independent_coins() -> None:
    member = np.zeros((DRAWS, 12))
    for row, ids in zip(member, draws(Poisson(12, 3))):
        row[ids] = 1
    assert np.allclose(member.mean(axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / DRAWS))
    assert np.abs(np.corrcoef(member.T)[np.triu_indices(12, 1)]).max() < 5.5 / np.sqrt(DRAWS)


def test_dispersion_tells_poisson_from_its_broken_twin() -> None:
    class Rounded(Poisson):
        """Draws the expected size each time: the schedule of released code, under Poisson's name."""

        def select_at(self, round: int, generator: np.random.Generator) -> np.ndarray:
            return Fixed(self.clients, self.size).select_at(0, generator)

    assert dispersion(Poisson(40, 8)) == pytest.approx(1, abs=0.12)
    assert dispersion(Rounded(40, 8)) == 0


def test_truncated_is_poisson_up_to_the_maximum_then_a_uniform_subset() -> None:
    cohorts = draws(Truncated(40, 8, 9))
    sizes = np.array([len(ids) for ids in cohorts])
    assert sizes.max() == 9
    assert np.mean(sizes == 9) == pytest.approx(stats.binom(40, 0.2).sf(8), abs=0.035)
    assert np.mean(sizes == 5) == pytest.approx(stats.binom(40, 0.2).pmf(5), abs=0.025)
    full = np.bincount(np.concatenate([ids for ids in cohorts if len(ids) == 9]), minlength=40)
    assert stats.chisquare(full).pvalue > 1e-4


def test_fixed_has_its_size_and_uniform_members() -> None:
    cohorts = draws(Fixed(20, 5))
    assert {len(ids) for ids in cohorts} == {5}
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    # Members of one cohort are negatively correlated: the statistic is (1 − q) times a χ².
    assert stats.chi2(19).sf(stats.chisquare(counts).statistic / (1 - 0.25) * (19 / 20)) > 1e-4


def test_everyone_takes_part_at_q_one() -> None:
    for sampler in (Poisson(9, 9), Fixed(9, 9), Truncated(9, 9, 9)):
        assert sampler.q == 1
        assert np.array_equal(sampler.select_at(0, stream(0, "c")), np.arange(9))


def test_a_million_clients_cost_what_the_cohort_costs() -> None:
    """Counted in random numbers, and in memory: a pass over 10^6 coins would take as many of either."""
    sampler = Poisson(10**6, 100)
    generator = stream(0, "c")
    first = generator.bit_generator.state["state"]["counter"].astype(object)
    tracemalloc.start()
    cohort = sampler.select_at(0, generator)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    last = generator.bit_generator.state["state"]["counter"].astype(object)
    assert 4 * sum((b - a) << 64 * place for place, (a, b) in enumerate(zip(first, last))) < 10 * len(cohort)
    assert most < 100_000


def test_empty_cohorts_happen() -> None:
    assert any(len(ids) == 0 for ids in draws(Poisson(10, 0.5), 50))


def test_events_are_those_of_the_law() -> None:
    plain = dp.GaussianDpEvent(0.9)
    assert Poisson(500, 50).event(0.9) == dp.PoissonSampledDpEvent(0.1, plain)
    assert Poisson(50, 50).event(0.9) == plain
    assert Truncated(500, 50, 70).event(0.9) == dp.TruncatedSubsampledGaussianDpEvent(500, 0.1, 70, 0.9)
    assert Truncated(500, 50, 500).event(0.9) == dp.PoissonSampledDpEvent(0.1, plain)
    assert Fixed(500, 50).event(0.9) == dp.SampledWithoutReplacementDpEvent(500, 50, plain)
    assert Fixed(50, 50).event(0.9) == plain


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Poisson(10, 11), "cohort.size: found 11; allowed: a number > 0 and ≤ 10"),
        (lambda: Poisson(10, 0), "cohort.size: found 0"),
        (lambda: Poisson(0, 1), "clients: found 0; allowed: a whole number ≥ 1"),
        (lambda: Truncated(10, 5, 4), "cohort.max: found 4; allowed: at least cohort.size = 5"),
        (lambda: Truncated(10, 5, 4.5), "cohort.max: found 4.5; allowed: a whole number"),
        (lambda: Fixed(10, 2.5), "cohort.size: found 2.5; allowed: a whole number with sampling: fixed"),
        (lambda: Fixed(10, float("nan")), "cohort.size: found nan"),
        (lambda: Fixed(10, 11), "cohort.size: found 11"),
        (lambda: make_sampler("poison", 10, 2), "Did you mean poisson?"),
        (lambda: make_sampler("truncated", 10, 2), "cohort.max: found nothing; allowed: a whole number"),
        (lambda: make_sampler("poisson", 10, 2, 5), "Use sampling: truncated."),
    ],
)
def test_impossible_laws_are_refused_in_one_line(make, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
