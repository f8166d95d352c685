"""Clip bias and noise of a round are norms of the same thing: the round's sum."""

import pytest
import torch

from fedflat.core.types import Aggregate
from fedflat.engine.round import _private_facts


def facts(messages: torch.Tensor, clip: float) -> tuple[float, float]:
    """The figure, and the norm of what the clip took from the sum."""
    norms = messages.norm(dim=1)
    factors = (clip / norms).clamp(max=1)
    total = (messages * factors[:, None]).sum(0)
    found = _private_facts(Aggregate(total, len(messages), 0.0, norms, factors), 1.0)
    return found["clip_bias"], float((messages.sum(0) - total).norm())


def test_clip_bias_is_at_least_what_the_clip_took_from_the_sum() -> None:
    messages = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias, taken = facts(messages, 1.0)
    assert bias > taken > 0
    same = torch.outer(
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([0.6, 0.8], dtype=torch.float64)
    )
    bias, taken = facts(same, 1.0)
    assert bias == pytest.approx(taken) == pytest.approx(3.0)  # all in one direction: the bound is met
    assert facts(messages, 100.0) == (0.0, 0.0)
