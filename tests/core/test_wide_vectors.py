"""Float64 arithmetic in pieces equals float64 arithmetic at once, for any length and any value."""

import math

import pytest
import torch

from fedflat.core import rounding

LENGTHS = (1, 7, rounding.CACHED, rounding.CACHED + 1, 3 * rounding.CACHED + 5)


def vector(length: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(length)) * scale


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_and_distances(length: int, scale: float) -> None:
    v, w = vector(length, scale), vector(length + 1, scale)[:length]
    assert float(rounding.norm(v)) == pytest.approx(math.sqrt(math.fsum(x * x for x in v.double().tolist())), rel=1e-13)
    assert rounding.norm(v).dtype == torch.float64
    assert rounding.distance(v, w.double()) == pytest.approx(float((v.double() - w.double()).norm()), rel=1e-12)
    assert rounding.distance(v, v.double()) == 0.0
    # the twin: float32 squares are lost or infinite
    if scale != 1.0:
        assert float((v * v).sum().sqrt()) in (0.0, math.inf)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_those_at_once_to_the_bit(length: int) -> None:
    total, v = vector(length).double() / 3, vector(length + 1)[:length]
    before = total.clone()
    assert torch.equal(rounding.plus(total, v), before + v.double())
    assert torch.equal(total, before)
    rounding.add_scaled(total, v, 0.3)
    assert torch.equal(total, before.add_(v.double(), alpha=0.3))
