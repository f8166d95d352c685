"""Curvature of a loss at one point: Hessian eigenvalues and trace, SAM's sharpness, Gaussian weight noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.analysis.objective import Objective, Points
from fedflat.core.checks import in_range, whole
from fedflat.core.params import Layout
from fedflat.core.rng import stream

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """Ends of a Hessian's spectrum. top: the largest eigenvalues, largest first, each counted once if it is repeated.

    errors: for each of them a bound on the distance to an eigenvalue (the Ritz residual). lowest: the smallest one.
    products: Hessian-vector products spent.
    """

    top: tuple[float, ...]
    errors: tuple[float, ...]
    lowest: float
    products: int


@dataclass(frozen=True)
class Trace:
    """Hutchinson's estimate of a trace, and its standard error (NaN for a single draw)."""

    mean: float
    error: float
    draws: int


@dataclass(frozen=True)
class Sharpness:
    """max_{‖ε‖ ≤ ρ} L(w + ε) − L(w), from below: at SAM's own ε, and at the best of a few projected ascent steps."""

    rho: float
    one_step: float
    ascent: float


@dataclass(frozen=True)
class Robustness:
    """Loss and accuracy under Gaussian weight noise: ``(levels, draws)`` each. levels: std relative to the weights."""

    levels: tuple[float, ...]
    loss: np.ndarray
    accuracy: np.ndarray


def lanczos(
    product: Product, size: int, seed: int, *, count: int = 5, steps: int = 60, tolerance: float = 1e-3
) -> Spectrum:
    """The ``count`` largest eigenvalues of a symmetric operator on R^size.

    Lanczos with full reorthogonalisation in float64 (Golub & Van Loan, Sec. 10.3). It stops when every wanted value has
    a residual below ``tolerance`` times the largest one, after ``steps`` products, or when the space is exhausted.
    """
    whole("eigenvalues", count, 1)
    start = torch.from_numpy(stream(seed, "lanczos start").standard_normal(size))
    basis = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1]).double()
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):  # twice is enough (Parlett)
            stacked = torch.stack(basis)
            image = image - stacked.T @ (stacked @ image)
        beta = float(torch.linalg.vector_norm(image))
        found = _ritz(diagonal, beside, beta, count)
        scale = max(abs(found.top[0]), abs(found.lowest), 1e-30)
        ended = beta <= 1e-9 * scale or len(diagonal) >= min(steps, size)
        if ended or (len(found.top) == count and max(found.errors) <= tolerance * scale):
            return found
        beside.append(beta)
        basis.append(image / beta)


def _ritz(diagonal: Sequence[float], beside: Sequence[float], beta: float, count: int) -> Spectrum:
    """Eigenvalues of the tridiagonal matrix, with the residuals |β·(last entry of the eigenvector)|."""
    matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    values, vectors = np.linalg.eigh(matrix)
    top = values[::-1][:count]
    errors = np.abs(beta * vectors[-1])[::-1][:count]
    return Spectrum(tuple(map(float, top)), tuple(map(float, errors)), float(values[0]), len(diagonal))


def trace(product: Product, size: int, seed: int, draws: int = 30) -> Trace:
    """E[zᵀHz] over Rademacher z (Hutchinson 1990)."""
    whole("trace draws", draws, 1)
    found = []
    for draw in range(draws):
        signs = stream(seed, "hutchinson", draw).integers(0, 2, size).astype(np.float32) * 2 - 1
        z = torch.from_numpy(signs)
        found.append(float(z.double() @ product(z).double()))
    error = float(np.std(found, ddof=1)) / math.sqrt(draws) if draws > 1 else math.nan
    return Trace(float(np.mean(found)), error, draws)


def sharpness(objective: Objective, weights: Tensor, rho: float, steps: int = 10) -> Sharpness:
    """How much the loss can rise within distance ρ (Foret et al. 2021; ε = ρ·g/‖g‖ is SAM's, Shi et al. 2023a, Eq. 6).

    ``steps`` further steps ε ← Π(ε + ρ/2·g(w + ε)/‖g(w + ε)‖), Π the projection on the ball, then look for a worse
    point: a lower bound on the maximum that is at least the one-step value.
    """
    in_range("--rho", rho, 0, open_low=True)
    base, gradient = objective.gradient(weights)
    moved = _unit(gradient) * rho
    one_step, gradient = objective.gradient(weights + moved)
    worst = one_step
    for _ in range(steps):
        moved = moved + 0.5 * rho * _unit(gradient)
        moved = moved * min(1.0, rho / max(float(torch.linalg.vector_norm(moved)), 1e-30))
        value, gradient = objective.gradient(weights + moved)
        worst = max(worst, value)
    return Sharpness(rho, one_step - base, worst - base)


def _unit(vector: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(vector)
    return vector / length if float(length) > 0 else torch.zeros_like(vector)


def noise_scale(weights: Tensor, layout: Layout) -> Tensor:
    """Standard deviation ``(D,)`` of noise of relative size 1: each tensor's own root mean square."""
    scale = torch.zeros_like(weights)
    for span in layout.tensors():
        scale[span] = torch.sqrt(torch.mean(weights[span] ** 2))
    return scale


def robustness(
    objective: Objective, weights: Tensor, layout: Layout, seed: int, levels: Sequence[float], draws: int = 10
) -> Robustness:
    """Loss and accuracy at ``w + r·s∘z``, z standard normal, s :func:`noise_scale`, for every relative size r.

    A draw is the same z at every size and for every run that is compared.
    """
    whole("--draws", draws, 1)
    sizes = [in_range("--noise", level, 0) for level in levels]
    scale = noise_scale(weights, layout)
    found = np.empty((len(sizes), draws, 2))
    for draw in range(draws):
        z = torch.from_numpy(stream(seed, "weight noise", draw).standard_normal(layout.size, dtype=np.float32))
        points = Points(weights, (scale * z)[None], torch.tensor(sizes, dtype=torch.float64)[:, None])
        found[:, draw] = objective.values(points)
    return Robustness(tuple(sizes), found[..., 0], found[..., 1])
