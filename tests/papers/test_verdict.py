"""Rank agreement, and the verdict's sentences."""

import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from fedflat.papers.outcome import Row, judge, sentences
from fedflat.papers.tables import Cell


def ranked(method: str, published: str, ours: list[float], measure: str = "final") -> Row:
    return Row(Cell("A", method, published, None, measure=measure), None, None, None, ours=dict(enumerate(ours)))


ROWS = [
    ranked("one", "50.0 ± 0.1", [40.0, 40.2, 40.1]), ranked("two", "51.0 ± 0.1", [45.0, 45.1, 45.2]),
    ranked("three", "53.0 ± 0.1", [44.0, 44.2, 44.1]),
]  # fmt: skip


def test_tau_is_scipys_and_one_seed_tells_nothing() -> None:
    found = judge(ROWS)
    assert found is not None and found.tau == pytest.approx(kendalltau([50, 51, 53], [40.1, 45.1, 44.1]).statistic)
    far = math.inf  # a seed that never got there tells nothing either
    for one, other in (([5.0], [6.0]), ([far, 5.0], [6.0, far]), ([far, 5.0], [far, 6.0]), ([5.0, 5.1], [6.0, far])):
        assert (alone := judge([ranked("a", "1.0", one), ranked("b", "2.0", other)])) and not alone.orderings[0].told


def test_either_of_two_equal_methods_is_told_better_in_one_pair_of_twenty() -> None:
    draw = np.random.default_rng(1)
    pairs = [[ranked("a", "1", list(draw.normal(size=3))), ranked("b", "2", list(draw.normal(size=3)))]
             for _ in range(600)]  # fmt: skip
    told = sum(verdict.orderings[0].told for pair in pairs if (verdict := judge(pair)) is not None)
    assert 10 <= told <= 55  # 30 expected; one-sided in either direction it would be 60


def test_the_sentences_name_what_holds_and_what_does_not() -> None:
    text = " ".join(sentences(judge(ROWS)))
    assert text.startswith("Rank agreement: Kendall τ = 0.33.")
    assert "Of the paper's 3 orderings 2 hold here, 2 of them at 95 % (two over one; three over one)." in text
    assert "Not here, at 95 %: three over two." in text and "within" not in text
    loose = [ranked("one", "50", [40.0, 42.0]), ranked("two", "51", [39.0, 42.5]), ranked("three", "51", [30.0, 41.9])]
    text = " ".join(sentences(judge(loose)))
    assert "Of the paper's 2 orderings 0 hold here, 0 of them at 95 %." in text  # equal in print is no ordering
    assert "Not here, within the seeds' spread: two over one; three over one." in text


def test_fewer_rounds_are_better_and_never_is_last() -> None:
    rows = [
        ranked("slow", "118", [math.inf, 90.0], "rounds"), ranked("fast", "12", [20.0, 30.0], "rounds"),
        ranked("middle", "40", [math.inf, math.inf], "rounds"),
    ]  # fmt: skip
    found = judge(rows)
    assert found is not None
    ways = {(each.better, each.worse): each.here for each in found.orderings}
    assert ways == {("fast", "slow"): 1, ("middle", "slow"): 0, ("fast", "middle"): 1}
    assert "Equal here: middle over slow." in " ".join(sentences(found))


def test_one_ordering_holds() -> None:
    rows = [ranked("a", "1", [1.0]), ranked("b", "2", [2.0])]
    assert sentences(judge(rows))[1] == "Of the paper's 1 orderings 1 holds here, 0 of them at 95 %."


def test_nothing_to_compare() -> None:
    assert judge(ROWS[:1]) is None and judge([ranked("a", "–", [1.0]), ranked("b", "2.0", [])]) is None
    assert sentences(None) == []
    assert (same := judge([ranked("a", "1.0", [5.0]), ranked("b", "2.0", [5.0])])) and same.tau is None
    assert sentences(same)[0] == "Rank agreement: Kendall τ cannot be given: all are equal."


def test_more_orderings_than_are_named() -> None:
    rows = [ranked(str(place), str(10 + place), [float(place)] * 2) for place in range(6)]
    assert "; 11 more)" in " ".join(sentences(judge(rows)))
