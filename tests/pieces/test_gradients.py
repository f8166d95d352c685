"""Gradient rules against their definitions, for one client and for a block, and what they refuse."""

import math

import pytest
import torch
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.types import ClientView
from fedflat.pieces.gradients import Blur, blur, compose, look_ahead, pgn, proximal, sam
from fedflat.pieces.state import disk

A = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
W = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
START = torch.zeros(3, dtype=torch.float64)


def slope(w: Tensor) -> Tensor:
    """Gradient of w·A·w/2, row by row."""
    return w @ A


def view(start: Tensor = START, clip: float = 1.0, **broadcast: Tensor) -> ClientView:
    return ClientView(start=start, clip=clip, steps=4, lr=0.5, broadcast=broadcast)


def test_sam_is_the_gradient_at_the_worst_nearby_point() -> None:
    g = slope(W)
    torch.testing.assert_close(sam(0.25)(slope, view())(W), slope(W + 0.25 * g / g.norm()))
    assert sam(0.0)(slope, view()) is slope


def test_adaptive_sam_perturbs_each_weight_by_a_share_of_its_size() -> None:
    g = slope(W)
    expected = slope(W + 0.25 * W**2 * g / (W.abs() * g).norm())
    torch.testing.assert_close(sam(0.25, adaptive=True)(slope, view())(W), expected)
    torch.testing.assert_close(sam(0.25, adaptive=True)(slope, view())(8 * W), 8 * expected)  # scale does not matter
    assert sam(0.0, adaptive=True)(slope, view()) is slope


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_zero_gradient_is_not_perturbed(adaptive: bool) -> None:
    def flat(w: Tensor) -> Tensor:
        return torch.zeros_like(w) + 0 * w

    assert torch.equal(sam(0.5, adaptive)(flat, view())(W), torch.zeros(3, dtype=torch.float64))


def test_sam_perturbs_a_denormal_gradient_by_its_full_radius_or_not_at_all() -> None:
    for size in (1e-44, 1e-30, 1e-18, 1.0, 1e18):
        seen: list[Tensor] = []

        def gradient(w: Tensor, size: float = size, seen: list[Tensor] = seen) -> Tensor:
            seen.append(w)
            return torch.full((2,), size)

        sam(0.5)(gradient, view())(torch.zeros(2))
        length = float(seen[1].norm())
        assert length == 0 or length == pytest.approx(0.5, rel=1e-5)


def test_blur_acts_only_outside_the_ball() -> None:
    g, start = slope(W), W - torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(blur(2.0)(slope, view(start, clip=1.0))(W), g)  # on the sphere: strictly outside is needed
    torch.testing.assert_close(blur(2.0)(slope, view(start, clip=0.9))(W), g + 2.0 * (W - start))
    assert torch.equal(blur(0.0)(slope, view(start, clip=0.1))(W), g)
    assert torch.equal(blur(2.0)(slope, view(start, clip=math.inf))(W), g)


def test_sam_over_blur_sees_the_penalty_in_both_passes() -> None:
    lam, rho, clip = 1.5, 0.3, 2.2  # ‖W‖ = 2.256: outside at W, and outside or inside at the second point

    def penalised(w: Tensor) -> Tensor:
        return slope(w) + lam * w * (w.norm() > clip)

    g = penalised(W)
    expected = penalised(W + rho * g / g.norm())
    torch.testing.assert_close(compose(sam(rho), blur(lam))(slope, view(clip=clip))(W), expected)
    other = compose(blur(lam), sam(rho))(slope, view(clip=clip))(W)
    assert float((other - expected).abs().max()) > 1e-2  # the order of composition matters


def test_pgn_mixes_the_fresh_gradient_with_the_direction() -> None:
    direction = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    expected = 0.3 * slope(W + 0.2 * direction / 3.0) + 0.7 * direction
    torch.testing.assert_close(pgn(0.2, 0.3)(slope, view(direction=direction))(W), expected)
    for nothing in (None, torch.zeros(3, dtype=torch.float64)):
        torch.testing.assert_close(pgn(0.2, 0.3)(slope, view(direction=nothing))(W), 0.3 * slope(W))


def test_the_proximal_term_pulls_back_to_the_start() -> None:
    start = W - torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(proximal(2.0)(slope, view(start))(W), slope(W) + 2.0 * (W - start))
    torch.testing.assert_close(proximal(2.0)(slope, view(start))(W), blur(2.0)(slope, view(start, clip=0.0))(W))
    assert torch.equal(proximal(0.0)(slope, view(start))(W), slope(W))


def test_sam_at_the_look_ahead_point() -> None:
    """Perturbation and gradient both belong to w + γ·v, not to w."""
    velocity = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    ahead = W + 0.6 * velocity
    g = slope(ahead)
    rule = compose(look_ahead(0.6), sam(0.25))
    torch.testing.assert_close(rule(slope, view(nesterov=velocity))(W), slope(ahead + 0.25 * g / g.norm()))
    torch.testing.assert_close(rule(slope, view())(W), sam(0.25)(slope, view())(W))
    assert look_ahead(0.6)(slope, view()) is slope


def test_disk_mixes_the_gradient_along_the_last_move() -> None:
    """(1−κ)/κ times the change of the gradient along the move, and the gradient; one gradient where γ = (1−κ)/κ."""
    move = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    expected = slope(W) + 0.25 * (slope(W + 0.5 * move) - slope(W)) / 0.5
    torch.testing.assert_close(disk(0.8, 0.5)[0](slope, view(moved=move))(W), expected)
    torch.testing.assert_close(disk(0.8)[0](slope, view(moved=move))(W), slope(W + 0.25 * move))
    assert disk(0.8)[0](slope, view()) is slope
    torch.testing.assert_close(disk(1.0, 0.5)[0](slope, view(moved=move))(W), slope(W))


@pytest.mark.parametrize(
    "rule",
    [
        disk(0.6, 0.3)[0],
        disk(0.6)[0],
        sam(0.4),
        sam(0.4, adaptive=True),
        blur(1.0),
        pgn(0.2, 0.5),
        compose(sam(0.4), blur(1.0)),
        proximal(0.5),
        compose(look_ahead(0.6), sam(0.4)),
    ],
)
def test_a_block_is_its_rows(rule: object) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    starts = rows + torch.randn(4, 3, generator=generator, dtype=torch.float64)
    told = dict.fromkeys(("direction", "nesterov", "moved"), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    block = rule(slope, view(starts, 1.5, **told))(rows)  # type: ignore[operator]
    for row, start, found in zip(rows, starts, block):
        torch.testing.assert_close(found, rule(slope, view(start, 1.5, **told))(row))  # type: ignore[operator]


def test_a_broken_row_stays_in_its_row() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [math.nan, 1.0, 1.0]], dtype=torch.float64)
    for rule in (sam(0.4), sam(0.4, adaptive=True), blur(1.0)):
        found = rule(slope, view(torch.zeros_like(rows)))(rows)
        torch.testing.assert_close(found[0], rule(slope, view())(rows[0]))
        assert not bool(torch.isfinite(found[1]).any())


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: sam(-0.1), "rho"),
        (lambda: sam(math.nan), "rho"),
        (lambda: sam(True), "rho"),
        (lambda: pgn(-1), "rho"),
        (lambda: pgn(0.2, 0.0), "beta"),
        (lambda: pgn(0.2, 1.1), "beta"),
        (lambda: blur(-1), "lam"),
        (lambda: proximal(-0.1), "mu"),
        (lambda: disk(0.0), "kappa"),
        (lambda: disk(0.5, 0.0), "ahead"),
        (lambda: look_ahead(1.0), "gamma"),
        (lambda: look_ahead(-0.1), "gamma"),
        (lambda: blur("0.4"), "lam"),  # type: ignore[arg-type]
    ],
)
def test_impossible_values_are_refused(make: object, key: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{key}: found .*; allowed: a number"):
        make()  # type: ignore[operator]


def test_rules_are_values() -> None:
    assert blur(0.4) == Blur(0.4)
    assert compose(sam(0.1), blur()) == compose(sam(0.1), blur(0.4))
