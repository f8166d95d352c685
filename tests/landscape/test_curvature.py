"""Eigenvalues, trace and sharpness against a loss whose Hessian is known in closed form, and against dense algebra."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quadratics import drawn, logistic, small
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.landscape.flatness import Settings
from fedflat.landscape.surfaces import lanczos, noise_scale, robustness, sharpness, trace


def symmetric(values: np.ndarray, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues in a random basis."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))
    return torch.from_numpy(basis @ np.diag(values) @ basis.T)


def test_hessian_products_equal_the_closed_form() -> None:
    objective, weights, hessian = logistic()
    times = objective.product(weights)
    found = torch.stack([times(column) for column in torch.eye(len(hessian), dtype=torch.float64)])
    assert np.allclose(found.numpy(), hessian, atol=1e-12)


def test_lanczos_and_trace_of_a_known_hessian() -> None:
    objective, weights, hessian = logistic()
    exact = np.linalg.eigvalsh(hessian)[::-1]
    spectrum = lanczos(objective.product(weights), len(hessian), 0, count=4, tolerance=1e-8)
    assert np.allclose(spectrum["top"], exact[:4], atol=1e-7)
    assert spectrum["lowest"] == pytest.approx(exact[-1], abs=1e-6)
    found = trace(objective.product(weights), len(hessian), 0, draws=400)
    assert abs(found["mean"] - hessian.trace()) < 4 * found["error"] and found["error"] < 0.05 * hessian.trace()


def test_trace_of_a_diagonal_matrix_is_exact() -> None:
    diagonal = drawn(30)
    found = trace(lambda v: diagonal * v, 30, 0, draws=5)
    assert found["mean"] == pytest.approx(float(diagonal.sum()), abs=1e-12) and found["error"] < 1e-12
    assert math.isnan(trace(lambda v: diagonal * v, 30, 0, draws=1)["error"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_residuals_bound_the_error_and_stop_early(seed: int) -> None:
    matrix = symmetric(np.concatenate([[100.0, 40.0, -60.0], np.random.default_rng(seed).uniform(-1, 1, 197)]), seed)
    found = lanczos(lambda v: matrix @ v, 200, seed, count=2, steps=100)
    assert found["products"] < 60
    for value, bound, exact in zip(found["top"], found["errors"], (100.0, 40.0), strict=True):
        assert abs(value - exact) <= bound + 1e-9
    assert found["lowest"] == pytest.approx(-60.0, abs=0.1)


def test_a_repeated_eigenvalue_an_exhausted_space_and_zero() -> None:
    identity = lanczos(lambda v: 3 * v, 20, 0)
    assert identity["top"] == pytest.approx([3.0]) and identity["products"] == 1
    nothing = lanczos(lambda v: 0 * v, 20, 0)
    assert nothing["top"] == [0.0] and nothing["lowest"] == 0.0
    matrix = symmetric(np.arange(4.0))
    assert lanczos(lambda v: matrix @ v, 4, 0, count=5, tolerance=0.0)["top"] == pytest.approx([3, 2, 1, 0], abs=1e-8)


def test_hessian_of_a_convolutional_model_is_the_gradients_derivative() -> None:
    objective, weights, _, _ = small(smooth=True)  # differences of a ReLU network's gradient also see its kinks
    direction = drawn(len(weights), seed=9).float()
    step = 1e-3
    ahead, behind = (objective.gradient(weights + sign * step * direction)[1] for sign in (1, -1))
    difference = (ahead - behind) / (2 * step)
    assert float((objective.product(weights)(direction) - difference).norm() / difference.norm()) < 0.02


def test_sharpness_of_a_nearly_quadratic_loss() -> None:
    """For small ρ the rise is ρ‖g‖ + ρ²/2·uᵀHu along the gradient, and ascent finds no less."""
    objective, weights, hessian = logistic()
    _, gradient = objective.gradient(weights)
    unit = (gradient / gradient.norm()).numpy()
    rho = 0.01
    found = sharpness(objective, weights, rho)
    expected = rho * float(gradient.norm()) + 0.5 * rho**2 * unit @ hessian @ unit
    assert found["one_step"] == pytest.approx(expected, rel=1e-4)
    # No point of the ball is worse than ρ‖g‖ + ρ²λ/2 (third derivatives aside).
    limit = rho * float(gradient.norm()) + 0.5 * rho**2 * np.linalg.eigvalsh(hessian)[-1]
    assert found["one_step"] <= found["ascent"] <= limit * 1.001


def test_ascent_beats_the_gradient_step_where_the_gradient_misleads() -> None:
    objective, weights, _ = logistic()
    for _ in range(400):  # near the minimum the gradient says little about the sharpest direction
        weights = weights - 0.5 * objective.gradient(weights)[1]
    found = sharpness(objective, weights, 0.5, steps=20)
    assert found["ascent"] > found["one_step"] > 0


def test_a_vanishing_gradient_leads_nowhere() -> None:
    """Of a model that is sure of every example: its norm in float32 is 0 though its entries are not."""
    sure: Any = SimpleNamespace(gradient=lambda weights: (float(weights.abs().max()), torch.full((1000,), 1e-24)))
    assert sharpness(sure, torch.zeros(1000), 0.05)["ascent"] < 1e-5


def test_weight_noise_is_relative_and_the_same_for_every_run() -> None:
    objective, weights, layout, _ = small()
    scale = noise_scale(weights, layout)
    for span in layout.tensors():
        assert torch.allclose(scale[span], weights[span].pow(2).mean().sqrt())
    _, loss, accuracy = robustness(objective, weights, layout, 0, (0.0, 0.1, 0.5), draws=4).values()
    assert np.shape(loss) == np.shape(accuracy) == (3, 4)
    assert np.allclose(loss[0], objective.value(weights)[0]) and np.ptp(loss[2]) > np.ptp(loss[1]) > 0
    assert robustness(objective, weights, layout, 0, (0.1,), draws=2)["loss"][0] == loss[1][:2]


@pytest.mark.parametrize(
    "given", [{"rho": 0.0}, {"eigenvalues": 0}, {"trace_draws": 0}, {"noise": (-0.1,)}, {"draws": 0}]
)
def test_impossible_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="allowed"):
        Settings(**given)
