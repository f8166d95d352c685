"""The clips of published procedures, and that the true bound is the one they report."""

import math

import torch

from fedflat.pieces.clipping import PublishedMedian, PublishedPerTensor, tensor_norms

TENSORS = (slice(0, 3), slice(3, 4), slice(4, 9), slice(9, 12))


def messages(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, count)[:, None]


def clipped(factors: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return torch.cat([given[:, where].double() * part[:, None] for where, part in zip(TENSORS, factors.T)], 1)


def test_each_tensor_is_clipped_alone_and_the_bound_is_reached() -> None:
    given, clip = messages(), PublishedPerTensor(4)
    norms, factors = clip.factors(given, 0.3, TENSORS)
    assert torch.allclose(norms, given.double().norm(dim=1))
    for row, original in zip(clipped(factors, given), given.double()):
        for where in TENSORS:
            before = original[where].norm()
            assert torch.allclose(row[where].norm(), before.clamp(max=0.3))
            assert torch.allclose(row[where] * before, original[where] * row[where].norm())
    assert clip.bound(0.3) == 0.3 * math.sqrt(4)
    huge = clipped(clip.factors(torch.ones(1, 12) * 1e6, 0.3, TENSORS)[1], torch.ones(1, 12) * 1e6)
    assert torch.allclose(huge.norm(), torch.tensor(clip.bound(0.3), dtype=torch.float64))
    assert clip.limits(given, 0.3, TENSORS)[:, 0].tolist() == [0.3] * 5


def test_the_median_is_each_clients_own_and_bounds_nothing() -> None:
    given, clip = messages(), PublishedMedian()
    own = clip.limits(given, math.inf, TENSORS)[:, 0]
    for row, threshold in zip(tensor_norms(given, TENSORS), own):
        low, high = sorted(row.tolist())[1:3]
        assert math.isclose(float(threshold), (low + high) / 2)
    _, factors = clip.factors(given, math.inf, TENSORS)
    after = tensor_norms(clipped(factors, given), TENSORS)
    assert torch.allclose(after, torch.minimum(tensor_norms(given, TENSORS), own[:, None]))
    assert clip.bound(0.3) == math.inf
    assert clipped(clip.factors(given * 1e4, math.inf, TENSORS)[1], given * 1e4).norm(dim=1).max() > 1e4


def test_broken_and_empty_messages_are_zero() -> None:
    given = messages(3)
    given[0, 0], given[1, 5] = math.nan, math.inf
    given[2] = 0
    for clip, threshold in ((PublishedPerTensor(4), 0.3), (PublishedMedian(), math.inf)):
        norms, factors = clip.factors(given, threshold, TENSORS)
        assert not torch.isfinite(norms[:2]).any() and bool((factors[:2] == 0).all())
        assert bool(torch.isfinite(factors).all())
    assert PublishedMedian().limits(given, math.inf, TENSORS)[:, 0].tolist() == [0.0, 0.0, 0.0]
