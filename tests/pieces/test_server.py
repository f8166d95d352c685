"""Server post-processing against dense linear algebra, and optimisers against their recurrences."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.types import MeanView, ServerView
from fedflat.pieces.server import (
    TINY,
    Adaptive,
    KeepInitial,
    PgnDirection,
    Sgd,
    Velocity,
    corrected_adam,
    laplacian_smoothing,
)
from fedflat.pieces.state import disk

TENSORS = (slice(0, 5), slice(5, 6), slice(6, 8), slice(8, 15))


def vector(seed: int = 0, size: int = 15) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size))


def view(slots: dict[str, Tensor] | None = None) -> ServerView:
    return ServerView(0, 4, 0.25, TENSORS, slots or {}, 5.0, 20)


def dense(n: int, sigma: float) -> np.ndarray:
    """A = I − σ·Lap on a ring of n points; on rings of one and two, a point is its own (double) neighbour."""
    lap = np.zeros((n, n))
    for j in range(n):
        lap[j, j] -= 2
        lap[j, (j + 1) % n] += 1
        lap[j, (j - 1) % n] += 1
    return np.eye(n) - sigma * lap


@pytest.mark.parametrize("sigma", [0.0, 0.01, 1.0, 50.0])
def test_smoothing_solves_the_linear_system(sigma: float) -> None:
    v = vector()
    found, slots = laplacian_smoothing(sigma)(v, view())
    expected = np.concatenate([np.linalg.solve(dense(t.stop - t.start, sigma), v[t].numpy()) for t in TENSORS])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    assert slots == {}
    whole, _ = laplacian_smoothing(sigma, "vector")(v, view())
    np.testing.assert_allclose(whole.numpy(), np.linalg.solve(dense(15, sigma), v.numpy()), atol=1e-12)


def test_smoothing_shortens_and_keeps_the_sum() -> None:
    v = vector(3, 15).float()
    smooth, _ = laplacian_smoothing(2.0, "vector")(v, view())
    assert smooth.dtype == torch.float32
    assert float(smooth.norm()) < float(v.norm())
    assert float(smooth.sum()) == pytest.approx(float(v.sum()), abs=1e-5)


def test_at_the_papers_strength_98_percent_of_the_noise_stays() -> None:
    noise = vector(1, 100_000)
    smooth, _ = laplacian_smoothing(0.01, "vector")(noise, view())
    assert float(smooth.norm() / noise.norm()) == pytest.approx(0.981, abs=0.002)


@pytest.mark.parametrize("smoothing", [None, 0.5])
def test_pgn_takes_the_direction_out_again(smoothing: float | None) -> None:
    """Without noise and clip, g̃ is minus the clients' mean movement per unit of learning rate."""
    step = PgnDirection(0.3, None if smoothing is None else laplacian_smoothing(smoothing))
    slots = step.initial(torch.zeros(15, dtype=torch.float64))
    assert torch.equal(slots["direction"], torch.zeros(15, dtype=torch.float64))
    direction, update, reach = vector(1), vector(2), 4 * 0.25
    found, changed = step((update + 0.7 * reach * direction), view({"direction": direction}))
    expected = -update / reach
    if smoothing is not None:
        expected, _ = laplacian_smoothing(smoothing)(expected, view())
    torch.testing.assert_close(changed["direction"], expected)
    torch.testing.assert_close(found, -reach * expected)


def test_the_first_weights_are_remembered() -> None:
    first = vector()
    slots = KeepInitial().initial(first)
    assert torch.equal(slots["initial"], first) and slots["initial"] is not first
    assert list(PgnDirection(0.3).initial(first)) == ["direction"] and not laplacian_smoothing().initial(first)
    mean = vector(1)
    assert KeepInitial()(mean, view()) == (mean, {})


def test_sgd_with_and_without_momentum() -> None:
    w, mean = vector(0), vector(1)
    plain, slots = Sgd(0.5)(w, mean, {})
    torch.testing.assert_close(plain, w + 0.5 * mean)
    assert slots == {}
    heavy, slots = Sgd(0.5, 0.9)(w, mean, {"velocity": mean})
    torch.testing.assert_close(heavy, w + 0.5 * 1.9 * mean)
    torch.testing.assert_close(slots["velocity"], 1.9 * mean)


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_adaptive_optimisers_follow_reddi(kind: str) -> None:
    """m ← β₁m + (1−β₁)Δ; Adam v ← β₂v + (1−β₂)Δ²; Yogi v ← v − (1−β₂)Δ² sign(v − Δ²); w ← w + η·m/(√v + τ)."""
    w, m, v, tau = vector(0).numpy(), np.zeros(15), np.full(15, 0.01**2), 0.01
    found, slots = torch.from_numpy(w.copy()), {}
    step = Adaptive(kind, 0.1, beta1=0.8, beta2=0.9, tau=tau)
    for round in range(4):
        mean = vector(10 + round).numpy()
        m = 0.8 * m + 0.2 * mean
        v = 0.9 * v + 0.1 * mean**2 if kind == "adam" else v - 0.1 * mean**2 * np.sign(v - mean**2)
        w = w + 0.1 * m / (np.sqrt(v) + tau)
        found, changed = step(found, torch.from_numpy(mean), slots)
        slots |= changed
    np.testing.assert_allclose(found.numpy(), w, rtol=1e-12)
    assert sorted(slots) == ["first", "second"]


def freed(
    means: list[Tensor], stds: list[float], lr: float = 0.1, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and slots after rounds of the corrected Adam from zero."""
    made = corrected_adam(**options)
    w, slots = torch.zeros_like(means[0]), dict[str, Tensor]()
    for mean, std in zip(means, stds):
        w, changed = made(lr, MeanView(std, 1.0, 10.0))(w, mean, slots)
        slots |= changed
    return w, slots


def test_without_noise_it_is_adam_with_bias_correction() -> None:
    means = [vector(10 + round) for round in range(4)]
    adam = torch.optim.Adam([weights := torch.zeros(15, dtype=torch.float64, requires_grad=True)], 0.1, (0.8, 0.9))
    adam.param_groups[0]["eps"] = 0.0
    for mean in means:
        weights.grad = -mean
        adam.step()
    found, slots = freed(means, [0.0] * 4, beta1=0.8, beta2=0.9, floor=1e-30)
    torch.testing.assert_close(found, weights.detach())
    assert int(slots["updates"]) == 4


def test_what_is_taken_off_is_each_rounds_own_variance() -> None:
    """An adaptive clip: φ_t differs by round, and is forgotten as the round it belongs to is."""
    means, stds = [vector(1), vector(2)], [0.3, 0.05]
    w, _ = freed(means, stds, beta1=0.0, beta2=0.9, floor=0.01)
    second = (0.9 * (means[0] ** 2 - 0.3**2) + (means[1] ** 2 - 0.05**2)) / (0.9 + 1)
    first = freed(means[:1], stds[:1], beta1=0.0, beta2=0.9, floor=0.01)[0]
    torch.testing.assert_close(w, first + 0.1 * means[1] / second.clamp_min(0.01).sqrt())
    constant = freed(means, [0.3, 0.3], beta2=0.9)[1]["second"] / (1 - 0.9**2)
    torch.testing.assert_close(constant, freed(means, [0.0, 0.0], beta2=0.9)[1]["second"] / (1 - 0.9**2) - 0.3**2)


def test_the_floor_is_the_noise_unless_it_is_given() -> None:
    for std, floor, expected in ((0.3, None, 0.3), (0.0, None, TINY**0.5), (0.3, 0.04, 0.2)):
        w, _ = freed([torch.full((3,), 1e-5)], [std], **({} if floor is None else {"floor": floor}))
        torch.testing.assert_close(w, torch.full((3,), 0.1 * 1e-5 / expected))


@pytest.mark.parametrize("wrong", [0.0, 2 / 3, 3 / 2])
def test_of_noise_alone_nothing_is_left(wrong: float) -> None:
    """The second moment of nothing but noise is zero on average, and only if the std is the noise's own."""
    std, many = 0.02, 200_000
    means = [vector(20 + round, many).float() * std for round in range(3)]

    def left(known: float) -> float:
        return float(freed(means, [known] * 3)[1]["second"].double().mean()) / (1 - 0.99**3)

    error = 6 * std**2 * (2 / many) ** 0.5
    assert abs(left(std)) < error
    assert abs(left(wrong * std)) > error


def test_velocity_keeps_the_scale_of_the_mean() -> None:
    mean, step = vector(1), Velocity(0.6)
    slots = step.initial(mean)
    for _ in range(60):
        found, changed = step(mean, view(slots))
        slots |= changed
    torch.testing.assert_close(found, mean)
    assert torch.equal(slots["nesterov"], found)
    assert torch.equal(Velocity(0.0)(mean, view({"nesterov": vector(2)}))[0], mean)


def test_disks_filter_takes_noise_off_and_broadcasts_the_models_move() -> None:
    """The first estimate is the first mean; in the long run its variance is κ/(2−κ) of a mean's."""
    filtered, slots, w = disk(0.4)[1](0.5, MeanView(0.1, 1.0, 4.0)), {}, vector(0, 20_000)
    for round in range(30):
        before = w
        w, slots = filtered(w, vector(round + 1, 20_000), slots)
        torch.testing.assert_close(slots["moved"], w - before)
        assert round or torch.equal(slots["estimate"], vector(1, 20_000))
    assert float(slots["estimate"].var()) == pytest.approx(0.4 / 1.6, rel=0.05)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: laplacian_smoothing(-0.1), r"algorithm\.smoothing"),
        (lambda: corrected_adam(1.0), r"algorithm\.beta1"),
        (lambda: corrected_adam(0.9, 1.0), r"algorithm\.beta2"),
        (lambda: corrected_adam(0.9, 0.99, 0.0), r"algorithm\.floor"),
        (lambda: laplacian_smoothing(0.1, "tensors"), r"algorithm\.scope.*Did you mean tensor\?"),
    ],
)
def test_impossible_values_are_refused(make: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()  # type: ignore[operator]
