"""Bounds against exact binomial tails, closed forms and simulation."""

import math

import numpy as np
import pytest
from defects import largest_bound
from scipy.optimize import brentq
from scipy.stats import binom

from fedflat.audit.bounds import Event, bound_of, choose_event
from fedflat.core.rng import stream
from fedflat.privacy.accounting.curves import gaussian_epsilon


@pytest.mark.parametrize(("likely", "unlikely", "trials"), [(7, 1, 10), (9_990, 3, 10_000), (900, 400, 1000)])
@pytest.mark.parametrize("failure", [0.1, 2e-6])
def test_limits_are_where_the_binomial_tail_is_half_the_failure(likely, unlikely, trials, failure):
    low = brentq(lambda p: binom.sf(likely - 1, trials, p) - failure / 2, 1e-9, 1 - 1e-9)
    high = brentq(lambda p: binom.cdf(unlikely, trials, p) - failure / 2, 1e-9, 1 - 1e-9)
    expected = max(0.0, math.log(max(low - 0.01, 1e-300) / high))
    assert float(bound_of(likely, unlikely, trials, 0.01, failure)) == pytest.approx(expected, rel=1e-6)


def test_a_bound_is_never_negative():
    bounds = bound_of(np.array([50, 0, 10, 50]), np.array([0, 50, 40, 50]), 50, 0.0, 0.1)
    assert bounds.tolist() == [pytest.approx(math.log(0.05 ** (1 / 50) / (1 - 0.05 ** (1 / 50)))), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_chosen_event_separates_either_way_round(shift):
    generator = stream(0, "test")
    absent, present = generator.standard_normal(4000), generator.standard_normal(4000) + shift
    event, promised = choose_event(absent[:2000], present[:2000], 1e-5, 0.05)
    assert 2.0 < event.bound(absent[2000:], present[2000:], 1e-5, 0.05) < gaussian_epsilon(3.0, 1e-5)
    assert promised > 2.0


def test_constant_statistics_are_separated_at_the_cap_or_not_at_all():
    zeros, ones = np.zeros(1000), np.ones(1000)
    for absent, present in ((zeros, ones), (ones, zeros)):
        event, _ = choose_event(absent, present, 1e-5, 0.05)
        assert event.bound(absent, present, 1e-5, 0.05) == pytest.approx(largest_bound(2000, 1e-5, 0.05))
    event, promised = choose_event(zeros, zeros, 1e-5, 0.05)
    assert promised == 0.0
    assert event.bound(zeros, zeros, 1e-5, 0.05) == 0.0


def test_event_counts_name_the_likely_world_first():
    absent, present = np.array([0.0, 0.0, 5.0]), np.array([5.0, 5.0, 0.0])
    assert Event(1.0, above=True, first=True).counts(absent, present) == (2, 1)
    assert Event(1.0, above=False, first=False).counts(absent, present) == (2, 1)


def test_bound_from_fresh_runs_is_wrong_no_more_often_than_it_says():
    """The mechanism's true ε at δ = 0 does not exist; at δ the exact one must be exceeded in at most 5 % of audits."""
    generator, exact, exceeded = stream(1, "test"), gaussian_epsilon(0.5, 1e-2), 0
    for _ in range(200):
        absent, present = generator.standard_normal((2, 400))
        present = present + 0.5
        event, _ = choose_event(absent[:200], present[:200], 1e-2, 0.05)
        exceeded += event.bound(absent[200:], present[200:], 1e-2, 0.05) > exact
    assert exceeded <= 10
