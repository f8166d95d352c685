"""The Gaussian mechanism: its law, its streams, its shares under each trust model, and where it may not go."""

import pytest
import torch
from scipy import stats

from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Broadcast
from fedflat.pieces.mechanisms import GaussianNoise, gaussian

KEY, SIZE = bytes(32), 20_000


def broadcast(mask: torch.Tensor | None = None) -> Broadcast:
    return Broadcast(0, torch.zeros(SIZE), 1.0, 1.0, None, mask)


def aggregate(count: int) -> Aggregate:
    return Aggregate(torch.zeros(SIZE), count, 1.5, torch.zeros(count), torch.ones(count))


def twice(bound: float) -> float:
    return 2 * bound


def test_gaussian_is_gaussian_and_named() -> None:
    drawn = gaussian(SIZE, 0.7, stream(KEY, "x", 1))
    assert drawn.dtype == torch.float32
    assert stats.kstest(drawn.numpy(), "norm", args=(0, 0.7)).pvalue > 1e-6
    assert torch.equal(drawn, gaussian(SIZE, 0.7, stream(KEY, "x", 1)))
    assert not torch.equal(drawn, gaussian(SIZE, 0.7, stream(KEY, "x", 2)))
    assert torch.equal(gaussian(3, 0.0, stream(KEY, "x")), torch.zeros(3))


def test_nobody_to_add_noise_adds_none() -> None:
    """Under distributed and local trust the clients are the source of the noise."""
    for trust in ("distributed", "local"):
        assert not bool(GaussianNoise(twice, trust).noise(KEY, 0, broadcast(), aggregate(0), 1.0).any())


def test_noise_stays_on_the_common_mask_and_is_the_same_there() -> None:
    mask = torch.arange(SIZE) % 3 == 0
    free = GaussianNoise(twice).noise(KEY, 1, broadcast(), aggregate(2), 1.0)
    masked = GaussianNoise(twice).noise(KEY, 1, broadcast(mask), aggregate(2), 1.0)
    assert torch.equal(masked[mask], free[mask])
    assert not bool(masked[~mask].any())
    drawn = GaussianNoise(twice).drawn_ahead(KEY, 1, SIZE)
    assert torch.equal(drawn.noise(KEY, 1, broadcast(), aggregate(2), 1.0), free)


def test_the_noisy_count() -> None:
    central, distributed = GaussianNoise(twice, count_std=3.0), GaussianNoise(twice, "distributed", 4, 3.0)
    noise = float(stream(KEY, "count noise", 5).standard_normal() * 3.0)
    assert central.noisy_count(KEY, 5, aggregate(9)) == pytest.approx(1.5 + noise)
    assert distributed.noisy_count(KEY, 5, aggregate(9)) == pytest.approx(1.5 + noise * 1.5)
    assert GaussianNoise(twice).noisy_count(KEY, 5, aggregate(9)) == 1.5
