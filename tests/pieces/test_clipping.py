"""Clips: the bound they report is kept for any message, and reached."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.core.rounding import CACHED
from fedflat.pieces import clipping
from fedflat.pieces.clipping import Adaptive, MethodScale, SmoothedNormalisation, norms_of, per_tensor, whole_vector

TENSORS = (slice(0, 3), slice(3, 5))
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def clipped(clip: object, messages: Tensor, threshold: float) -> Tensor:
    """Messages after the clip, in float64, as the accumulator adds them."""
    norms, factors = clip.factors(messages, threshold, TENSORS)  # type: ignore[attr-defined]
    safe = torch.where(torch.isfinite(norms)[:, None], messages.double(), 0.0)
    if factors.dim() == 1:
        return safe * factors[:, None]
    return torch.cat([safe[:, t] * f[:, None] for t, f in zip(TENSORS, factors.T)], dim=1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=3), st.floats(1e-6, 1e6))
def test_no_message_is_longer_than_the_bound(rows: list[list[float]], threshold: float) -> None:
    messages = torch.tensor(rows, dtype=torch.float32)
    clips = {
        "whole": (whole_vector(threshold), threshold), "adaptive": (Adaptive(threshold), threshold),
        "per tensor": (per_tensor([threshold, 2 * threshold], 2), math.sqrt(5) * threshold),
        "published": (clipping.PublishedPerTensor(2), threshold),
    }  # fmt: skip
    for name, (clip, used) in clips.items():
        lengths = torch.linalg.vector_norm(clipped(clip, messages, used), dim=1)
        assert bool((lengths <= clip.bound(used) * (1 + 1e-12)).all()), name  # type: ignore[attr-defined]


@pytest.mark.parametrize("clip", [whole_vector(1.0), Adaptive(1.0)])
def test_the_table_of_the_whole_vector_clip(clip: object) -> None:
    rows = torch.tensor(
        [[0.3, 0.4, 0, 0, 0], [3, 4, 0, 0, 0], [0, 0, 0, 0, 0], [1, math.nan, 0, 0, 0], [math.inf, 0, 0, 0, 0]]
    )
    norms, factors = clip.factors(rows, 1.0, TENSORS)  # type: ignore[attr-defined]
    np.testing.assert_allclose(norms.numpy(), [0.5, 5, 0, math.inf, math.inf], rtol=1e-6)
    np.testing.assert_allclose(factors.numpy(), [1, 0.2, 1, 0, 0], rtol=1e-6)
    assert norms.dtype == factors.dtype == torch.float64
    _, unclipped = clip.factors(rows, math.inf, TENSORS)  # type: ignore[attr-defined]
    assert unclipped.tolist() == [1, 1, 1, 0, 0]


def test_norms_do_not_overflow() -> None:
    rows = torch.full((2, 4), 3e38)
    rows[1] = 1e-30
    np.testing.assert_allclose(norms_of(rows).numpy(), [6e38, 2e-30], rtol=1e-6)


@pytest.mark.parametrize("size", [CACHED - 1, CACHED + 1, 3 * CACHED])
def test_norms_of_long_messages_are_taken_in_float64(size: int) -> None:
    """Longer than a cache: row by row, in pieces. An entry in the last piece counts as one in the first does."""
    rows = stream(3, "test norms").standard_normal((5, size)).astype(np.float32)
    rows[1] = 3e38
    rows[2, -1], rows[3, 0] = math.inf, math.nan
    rows[4] = 0
    rows[4, -1] = 2.5
    expected = [float(np.linalg.norm(row.astype(np.float64))) for row in rows[:2]]
    found = norms_of(torch.from_numpy(rows))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), [*expected, math.inf, math.inf, 2.5], rtol=1e-12)
    assert norms_of(torch.zeros(0, size)).shape == (0,) and norms_of(torch.zeros(0, size)).dtype == torch.float64
    _, factors = whole_vector(1.0).factors(torch.from_numpy(rows), 1.0, (slice(0, size),))
    np.testing.assert_allclose(factors.numpy(), [*(1 / e for e in expected), 0.0, 0.0, 0.4], rtol=1e-12)


def test_each_tensor_has_its_own_limit() -> None:
    clip = per_tensor([1.0, 2.0], 2)
    assert clip.threshold == clip.bound(clip.threshold) == pytest.approx(math.sqrt(5))
    rows = torch.tensor([[3.0, 0, 4, 0, 1], [0.1, 0, 0, 30, 40], [math.nan, 0, 0, 1, 1]])
    norms, factors = clip.factors(rows, clip.threshold, TENSORS)
    np.testing.assert_allclose(factors.numpy(), [[0.2, 1], [1, 0.04], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(norms.numpy(), [math.sqrt(26), math.sqrt(2500.01), math.inf], rtol=1e-6)
    assert per_tensor(0.5, 3).values == (0.5, 0.5, 0.5)


def test_the_adaptive_clip_follows_the_quantile() -> None:
    """C_{t+1} = C_t·exp(−0.2(b̃ − γ)): at rest when the share below C_t is γ."""
    clip = Adaptive(1.0, 0.7)
    assert clip.next(2.0, 10 * 0.2, 10) == pytest.approx(2.0)  # b̃ = 0.7
    assert clip.next(2.0, 10 * 0.5, 10) == pytest.approx(2.0 * math.exp(-0.2 * 0.3))
    assert clip.next(2.0, -10 * 0.5, 10) == pytest.approx(2.0 * math.exp(0.2 * 0.7))
    threshold, norms = 1.0, np.random.default_rng(0).lognormal(sigma=0.5, size=1000)
    for _ in range(200):
        threshold = clip.next(threshold, float((norms <= threshold).sum() - 500), 1000)
    assert threshold == pytest.approx(np.quantile(norms, 0.7), rel=0.02)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: whole_vector(0), "privacy.clip"),
        (lambda: whole_vector(-1), "privacy.clip"),
        (lambda: whole_vector(math.nan), "privacy.clip"),
        (lambda: whole_vector("0.2"), "privacy.clip"),  # type: ignore[arg-type]
        (lambda: per_tensor([1.0], 2), "privacy.clip.values"),
        (lambda: per_tensor([1.0, 0.0], 2), "privacy.clip.values"),
    ],
)
def test_impossible_clips_are_refused(make: object, key: str) -> None:
    with pytest.raises(InputError, match=rf"^{key}: found .*; allowed: "):
        make()  # type: ignore[operator]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=6), st.floats(1e-6, 1e6), st.floats(allow_nan=True))
def test_a_methods_own_factor_never_lets_a_message_be_longer(norms: list[float], c: float, factor: float) -> None:
    """Whatever it says; the twin, what it says as it is, lets messages of any length through."""

    def rule(norms: Tensor, threshold: float) -> Tensor:
        return torch.full_like(norms, factor)

    found = torch.tensor(norms, dtype=torch.float64).abs()
    factors = MethodScale(rule).scale(found, c)
    assert bool((factors >= 0).all()) and bool(torch.isfinite(factors).all())
    finite = torch.isfinite(found)
    assert bool((found[finite] * factors[finite] <= c * (1 + 1e-15)).all())
    assert not bool(factors[~finite].any())


def test_the_twin_of_a_methods_own_factor_is_caught() -> None:
    norms = torch.tensor([3.0], dtype=torch.float64)
    assert float(norms * MethodScale(lambda n, c: torch.ones_like(n)).scale(norms, 1.0)) <= 1.0
    assert float(norms * torch.ones_like(norms)) > 1.0


def test_normalising() -> None:
    messages = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 1.0], [3e-3, 4e-3]])
    clip = MethodScale(SmoothedNormalisation(0.5))
    norms, factors = clip.factors(messages, 2.0, ())
    torch.testing.assert_close(factors[[0, 1, 3]], 2.0 / (0.5 + torch.tensor([5.0, 0.0, 5e-3], dtype=torch.float64)))
    assert float(factors[2]) == 0 and clip.bound(2.0) == 2.0 and math.isinf(float(norms[2]))
