"""Update transforms: exact counts, ties, one client and a block."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.types import ClientView
from fedflat.pieces.transforms import AddBackDirection, Rescale, largest, lus, top_k

TENSORS = (slice(0, 6), slice(6, 9), slice(9, 10))


def view(gradient: Tensor | None = None, direction: Tensor | None = None) -> ClientView:
    return ClientView(
        tensors=TENSORS, gradient=lambda: torch.ones(10) if gradient is None else gradient, steps=4, lr=0.5,
        broadcast={} if direction is None else {"direction": direction},
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_exactly_the_largest_with_ties_to_the_lowest_index(values: list[int], count: int) -> None:
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))[:count]
    expected = [j in order for j in range(len(values))]
    if count:
        assert largest(torch.tensor(values, dtype=torch.float32), count).tolist() == expected


def test_broken_scores_are_the_smallest() -> None:
    scores = torch.tensor([math.nan, 1.0, math.inf, -math.inf, 0.0])
    assert largest(scores, 2).tolist() == [False, True, True, False, False]
    assert int(largest(torch.full((5,), math.nan), 2).sum()) == 2
    assert largest(scores, 9).all()


def test_top_k_keeps_a_share_of_each_tensor() -> None:
    update = torch.tensor([5.0, -4, 3, 2, 1, 0.5, -0.1, 0.3, 0.2, 1e-9])
    found = top_k(0.4)(update, view())  # ⌈2.4⌉, ⌈1.2⌉, ⌈0.4⌉
    assert found.tolist() == torch.tensor([5.0, -4, 3, 0, 0, 0, 0, 0.3, 0.2, 1e-9]).tolist()
    assert torch.equal(top_k(1.0)(update, view()), update)
    assert torch.equal(top_k(0.4)(torch.stack([update, -update]), view()), torch.stack([found, -found]))


def test_lus_ranks_by_gradient_times_update() -> None:
    update = torch.tensor([5.0, -4, 3, 2, 1, 0.5, -0.1, 0.3, 0.2, 1e-9])
    gradient = torch.tensor([0.0, 0.1, -1.0, 0.2, 0.3, 4.0, 9.0, -1.0, 0.0, 0.0])
    found = lus(0.7)(update, view(gradient))  # keeps ⌈1.8⌉, ⌈0.9⌉, ⌈0.3⌉
    assert found.nonzero().squeeze().tolist() == [2, 5, 6, 9]
    assert torch.equal(found[[2, 5, 6, 9]], update[[2, 5, 6, 9]])
    assert torch.equal(lus(0.0)(update, view(gradient)), update)


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.6, 0.7, 0.9])
def test_lus_keeps_the_exact_count_of_a_decimal_share(sparsity: float) -> None:
    """(1 − 0.7)·10 is 3.0000000000000004 in floating point; three entries are kept, not four."""
    whole = ClientView(tensors=(slice(0, 10),), gradient=lambda: torch.ones(10), steps=1, lr=1.0)
    assert int(lus(sparsity)(torch.arange(1.0, 11.0), whole).count_nonzero()) == round((1 - sparsity) * 10)


def test_pgn_adds_the_direction_back() -> None:
    direction = torch.arange(10.0)
    update = torch.ones(10)
    torch.testing.assert_close(
        AddBackDirection(0.3)(update, view(direction=direction)), update + 0.7 * 4 * 0.5 * direction
    )
    assert AddBackDirection(0.3)(update, view()) is update


def test_rescaling_multiplies() -> None:
    assert torch.equal(Rescale(2.5)(torch.ones(10), view()), torch.full((10,), 2.5))


@pytest.mark.parametrize("make", [lambda: top_k(0.0), lambda: top_k(1.1), lambda: lus(1.0), lambda: lus(-0.1)])
def test_impossible_values_are_refused(make: object) -> None:
    with pytest.raises(InputError, match="allowed: a number"):
        make()  # type: ignore[operator]
