"""Measure the loss around a point: random directions (Li et al. 2018), Hessian eigenvalues and trace, sharpness."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedflat.core import Layout, in_range, stream, whole
from fedflat.landscape.objective import Objective


def normalised(direction: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """Return ``direction`` ``(D,)`` with each filter (output channel, row) scaled to that of ``weights`` in norm.

    Biases and norm layers' parameters (tensors of one axis) are zero, as in Li et al. 2018, Sec. 4. A filter of zeros
    stays where it is.
    """
    result = torch.zeros_like(weights)
    for shape, span in zip(layout.shapes, layout.tensors(), strict=True):
        if len(shape) < 2:
            continue
        raw, base = (vector[span].to(weights.dtype).reshape(shape[0], -1) for vector in (direction, weights))
        length = torch.linalg.vector_norm(raw, dim=1, keepdim=True)
        scale = torch.linalg.vector_norm(base, dim=1, keepdim=True) / length.clamp_min(torch.finfo(weights.dtype).tiny)
        result[span] = (raw * scale).reshape(-1)
    return result


def directions(weights: Tensor, layout: Layout, seed: int, count: int) -> Tensor:
    """Return ``count`` filter-normalised directions ``(count, D)``; before that the same for every run that is
    compared."""
    streams = (stream(seed, "landscape direction", index) for index in range(count))
    drawn = (torch.from_numpy(draws.standard_normal(layout.size, dtype=np.float32)) for draws in streams)
    return torch.stack([normalised(direction, weights, layout) for direction in drawn])


def steps_of(points: int, span: float) -> np.ndarray:
    """Return ``points`` evenly spaced coefficients in [−span, span]; an odd number has the weights in the middle."""
    whole("--points", points, 3)
    in_range("--span", span, 0, open_low=True)
    return np.linspace(-span, span, points)


def surface(
    objective: Objective, weights: Tensor, along: Tensor, steps: np.ndarray,
    on_points: Callable[[int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the loss and accuracy over ``steps`` ``(P,)`` along one direction, ``(P,)``, or two, ``(P, P)``.

    Row i, column j of a surface is the point ``w + steps[i]·along[0] + steps[j]·along[1]``.
    """
    axes = np.meshgrid(*[steps] * len(along), indexing="ij")
    coefficients = torch.from_numpy(np.stack(axes, axis=-1).reshape(-1, len(along)))
    values = objective.values(weights, along, coefficients, on_points).reshape(*axes[0].shape, 2)
    return {"steps": steps.tolist(), "loss": values[..., 0].tolist(), "accuracy": values[..., 1].tolist()}


Product = Callable[[Tensor], Tensor]


def lanczos(
    product: Product, size: int, seed: int, *, count: int = 5, steps: int = 60, tolerance: float = 1e-3
) -> dict[str, Any]:
    """Return the ends of the spectrum of a symmetric operator on R^size.

    top: the ``count`` largest eigenvalues, largest first, each counted once if it is repeated. errors: for each of them
    a bound on the distance to an eigenvalue (the Ritz residual). lowest: the smallest one. products: operator-vector
    products spent.

    Lanczos with full reorthogonalisation in float64 (Golub & Van Loan, Sec. 10.3). It stops when every wanted value has
    a residual below ``tolerance`` times the largest one, after ``steps`` products, or when the space is exhausted.
    """
    # A seeded start gives the same eigenvalues for every run that is compared.
    start = torch.from_numpy(stream(seed, "lanczos start").standard_normal(size))
    basis = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1]).double()
        diagonal.append(float(image @ basis[-1]))
        # Orthogonalising twice is enough (Parlett).
        for _ in range(2):
            stacked = torch.stack(basis)
            image = image - stacked.T @ (stacked @ image)
        beta = float(torch.linalg.vector_norm(image))
        spectrum = _ritz(diagonal, beside, beta, count)
        scale = max(abs(spectrum["top"][0]), abs(spectrum["lowest"]), 1e-30)
        ended = beta <= 1e-9 * scale or len(diagonal) >= min(steps, size)
        if ended or (len(spectrum["top"]) == count and max(spectrum["errors"]) <= tolerance * scale):
            return spectrum
        beside.append(beta)
        basis.append(image / beta)


def _ritz(diagonal: Sequence[float], beside: Sequence[float], beta: float, count: int) -> dict[str, Any]:
    """Return the eigenvalues of the tridiagonal matrix, with the residuals |β·(last entry of the eigenvector)|."""
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    top = values[::-1][:count]
    errors = np.abs(beta * vectors[-1])[::-1][:count]
    return {"top": top.tolist(), "errors": errors.tolist(), "lowest": float(values[0]), "products": len(diagonal)}


def trace(product: Product, size: int, seed: int, draws: int = 30) -> dict[str, float]:
    """Return the mean of zᵀHz over Rademacher z, its standard error (NaN for a single draw) and the draws.

    The mean estimates the trace (Hutchinson 1990).
    """
    estimates = []
    for draw in range(draws):
        z = torch.from_numpy(stream(seed, "hutchinson", draw).integers(0, 2, size).astype(np.float32) * 2 - 1)
        estimates.append(float(z.double() @ product(z).double()))
    error = float(np.std(estimates, ddof=1)) / math.sqrt(draws) if draws > 1 else math.nan
    return {"mean": float(np.mean(estimates)), "error": error, "draws": draws}


VANISHING = 1e-18
"""Norm below which a gradient moves nothing: a float32 norm of entries under 1e-23 is 0, whatever their direction."""


def sharpness(objective: Objective, weights: Tensor, rho: float, steps: int = 10) -> dict[str, float]:
    """Return max_{‖ε‖ ≤ ρ} L(w + ε) − L(w) from below (Foret et al. 2021): ``one_step`` at SAM's ε = ρ·g/‖g‖ (Shi et
    al. 2023a, Eq. 6), ``ascent`` at the best of a few projected steps.

    ``steps`` further steps ε ← Π(ε + ρ/2·g(w + ε)/‖g(w + ε)‖), Π the projection on the ball, then look for a worse
    point: a lower bound on the maximum that is at least the one-step value.
    """
    base, gradient = objective.gradient(weights)
    moved = normalize(gradient, dim=0, eps=VANISHING) * rho
    one_step, gradient = objective.gradient(weights + moved)
    worst = one_step
    for _ in range(steps):
        moved = moved + 0.5 * rho * normalize(gradient, dim=0, eps=VANISHING)
        moved = moved * min(1.0, rho / max(float(torch.linalg.vector_norm(moved)), 1e-30))
        value, gradient = objective.gradient(weights + moved)
        worst = max(worst, value)
    return {"rho": rho, "one_step": one_step - base, "ascent": worst - base}


def noise_scale(weights: Tensor, layout: Layout) -> Tensor:
    """Return the standard deviation ``(D,)`` of noise of relative size 1: each tensor's own root mean square."""
    scale = torch.zeros_like(weights)
    for span in layout.tensors():
        scale[span] = torch.sqrt(torch.mean(weights[span] ** 2))
    return scale


def robustness(
    objective: Objective, weights: Tensor, layout: Layout, seed: int, levels: Sequence[float], draws: int = 10
) -> dict[str, Any]:
    """Return the loss and accuracy at ``w + r·s∘z``, z standard normal, s :func:`noise_scale`: a row for every relative
    size r of ``levels``, a column for each draw.

    A draw is the same z at every size and for every run that is compared.
    """
    sizes = np.asarray(levels, dtype=np.float64)
    scale = noise_scale(weights, layout)
    values = np.empty((len(sizes), draws, 2))
    for draw in range(draws):
        z = torch.from_numpy(stream(seed, "weight noise", draw).standard_normal(layout.size, dtype=np.float32))
        values[:, draw] = objective.values(weights, (scale * z)[None], torch.from_numpy(sizes)[:, None])
    return {"levels": sizes.tolist(), "loss": values[..., 0].tolist(), "accuracy": values[..., 1].tolist()}
