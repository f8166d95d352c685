"""The reference itself: hand-derived gradients against finite differences, closed forms where they exist."""

import numpy as np
import pytest
import reference as ref

NETS = [ref.Net((4, 3)), ref.Net((4, 5, 3), "tanh"), ref.Net((4, 5, 3), "relu")]


def _point(net: ref.Net) -> tuple[np.ndarray, ref.Batch]:
    rng = np.random.default_rng(5)
    return rng.normal(size=net.length), (rng.normal(size=(6, 4)), rng.integers(0, 3, 6))


@pytest.mark.parametrize("net", NETS, ids=["linear", "tanh", "relu"])
def test_gradients_by_hand_equal_finite_differences(net: ref.Net) -> None:
    w, batch = _point(net)
    slopes = [(net.loss(w + e, batch) - net.loss(w - e, batch)) / 2e-6 for e in (np.eye(net.length) * 1e-6)]
    np.testing.assert_allclose(net.gradient(w, batch), slopes, atol=1e-8)


def test_blur_is_the_gradient_of_its_penalty() -> None:
    net = NETS[1]
    w, batch = _point(net)
    start = np.zeros_like(w)

    def objective(at: np.ndarray) -> float:
        return net.loss(at, batch) + 0.2 * max(0.0, float(np.sum((at - start) ** 2)) - 0.5**2)

    slopes = [(objective(w + e) - objective(w - e)) / 2e-6 for e in (np.eye(net.length) * 1e-6)]
    found = ref.penalised(ref.loss_gradient(net), start, lam=0.4, threshold=0.5)(w, batch)
    np.testing.assert_allclose(found, slopes, atol=1e-8)


def test_shares_are_exact_decimals() -> None:
    assert ref.ceil_share(0.3, 10) == 3  # 0.3·10 is 3.0000000000000004 after 1 − 0.7 in floating point
    assert ref.ceil_share(0.4, 7) == 3
    assert ref.keep_largest(np.array([1.0, 2, 2, 2]), np.arange(4.0) + 1, 2).tolist() == [0, 2, 3, 0]


def test_smoothing_keeps_the_mean_and_shrinks_the_rest() -> None:
    v = np.array([1.0, -1, 1, -1])
    np.testing.assert_allclose(ref.smooth(v, 0.25, [slice(0, 4)]), v / 2)  # the highest frequency: 1 + 4σ = 2
    np.testing.assert_allclose(ref.smooth(np.ones(4), 0.25, [slice(0, 4)]), np.ones(4))
