"""Common masks: exact size, uniform law, and nothing private in them."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.core.types import MaskView
from fedflat.pieces.transforms import random_mask, top_mask


def view(round: int, moved: Tensor | None = None, size: int = 20, public: Tensor | None = None) -> MaskView:
    initial = torch.linspace(-1, 1, size)
    shared = initial if moved is None else initial + moved
    return MaskView(shared, initial, stream(7, "common mask", round), None if public is None else lambda: public)


@pytest.mark.parametrize(("keep", "count"), [(0.4, 8), (0.41, 9), (1e-9, 1), (1.0, 20)])
def test_a_random_mask_has_exactly_its_share(keep: float, count: int) -> None:
    for round in range(5):
        mask = random_mask(keep)(view(round))
        assert mask.dtype == torch.bool
        assert int(mask.sum()) == count
    assert torch.equal(random_mask(keep)(view(3)), random_mask(keep)(view(3)))


def test_a_random_mask_is_uniform() -> None:
    """Every coordinate equally often, and pairs as a uniform subset has them."""
    masks = np.stack([random_mask(0.4)(view(round)).numpy() for round in range(1500)])
    assert stats.chisquare(masks.sum(0)).pvalue > 1e-6  # conservative: a subset's counts vary less
    assert (masks[:, 0] & masks[:, 7]).mean() == pytest.approx(8 / 20 * 7 / 19, abs=0.04)
    assert abs(np.corrcoef(masks[:-1, 0], masks[1:, 0])[0, 1]) < 0.08  # rounds are independent


def test_the_top_of_a_public_update() -> None:
    public = torch.zeros(20)
    public[[2, 5, 11]] = torch.tensor([-3.0, 2.0, 1.0])
    mask = top_mask(0.15, 0.5)(view(0, public=public))
    assert mask.nonzero().squeeze().tolist() == [2, 5, 11]
    mask = top_mask(0.25, 0.5)(view(0, public=public))  # ties among zeros go to the lowest index
    assert mask.nonzero().squeeze().tolist() == [0, 1, 2, 5, 11]


def test_without_public_data_a_share_explores() -> None:
    moved = torch.zeros(20)
    moved[[3, 9, 14, 18]] = torch.tensor([5.0, -6.0, 7.0, 8.0])
    explored = np.zeros(20)
    for round in range(800):
        mask = top_mask(0.4, 0.5)(view(round, moved))
        assert int(mask.sum()) == 8
        assert bool(mask[[3, 9, 14, 18]].all())
        explored += mask.numpy()
    rest = np.delete(explored, [3, 9, 14, 18])
    assert stats.chisquare(rest).pvalue > 1e-6
    assert rest.min() > 0


def test_extreme_exploring() -> None:
    moved = torch.arange(20.0)
    assert top_mask(0.4, 0.0)(view(0, moved)).nonzero().squeeze().tolist() == list(range(12, 20))
    everywhere = np.sum([top_mask(0.4, 1.0)(view(round, moved)).numpy() for round in range(800)], axis=0)
    assert stats.chisquare(everywhere).pvalue > 1e-6


@pytest.mark.parametrize("make", [lambda: random_mask(0), lambda: random_mask(1.5), lambda: top_mask(0.4, -0.1)])
def test_impossible_values_are_refused(make: object) -> None:
    with pytest.raises(InputError, match=r"algorithm\.(keep|explore)"):
        make()  # type: ignore[operator]
