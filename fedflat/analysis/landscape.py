"""Loss along filter-normalised random directions (Li et al. 2018), as in Shi et al. 2023a and Liu et al. 2025."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.analysis.objective import Objective, Points
from fedflat.core.checks import in_range, whole
from fedflat.core.params import Layout
from fedflat.core.rng import stream

TOLERANCE = 0.01
"""bfloat16 is used only if it agrees with float32 at nine points to 1 % of the loss's range over them …"""
LONG = 1_000_000
"""… and only for a surface of at least so many forward passes (points × examples)."""


@dataclass(frozen=True)
class Grid:
    """Loss and accuracy over ``steps`` ``(P,)`` along one direction ``(P,)``, or along two ``(P, P)``.

    Row i, column j of a surface is the point ``w + steps[i]·d_1 + steps[j]·d_2``. precision: of the forward passes;
    deviation: the largest difference in loss from float32 at the points where both were computed, None for float32.
    """

    steps: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray
    precision: str = "float32"
    deviation: float | None = None


def filters(layout: Layout) -> list[tuple[slice, int]]:
    """Span and number of filters (output channels, rows) of every tensor with at least two axes."""
    found = []
    for shape, span in zip(layout.shapes, layout.tensors(), strict=True):
        if len(shape) >= 2:
            found.append((span, int(shape[0])))
    return found


def raw_direction(layout: Layout, seed: int, index: int) -> Tensor:
    """A standard normal vector ``(D,)``: the same for every run that is compared, before it is normalised."""
    drawn = stream(seed, "landscape direction", index).standard_normal(layout.size, dtype=np.float32)
    return torch.from_numpy(drawn)


def normalised(direction: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """``direction`` ``(D,)`` with each filter scaled to the norm of the same filter of ``weights``.

    Biases and norm layers' parameters (tensors of one axis) are zero, as in Li et al. 2018, Sec. 4. A filter of zeros
    stays where it is.
    """
    result = torch.zeros_like(weights)
    for span, count in filters(layout):
        theirs, own = direction[span].to(weights.dtype).reshape(count, -1), weights[span].reshape(count, -1)
        length = torch.linalg.vector_norm(theirs, dim=1, keepdim=True)
        scale = torch.linalg.vector_norm(own, dim=1, keepdim=True) / length.clamp_min(torch.finfo(weights.dtype).tiny)
        result[span] = (theirs * scale).reshape(-1)
    return result


def directions(weights: Tensor, layout: Layout, seed: int, count: int) -> Tensor:
    """``count`` filter-normalised directions ``(count, D)`` from the seed's streams."""
    drawn = (raw_direction(layout, seed, index) for index in range(count))
    return torch.stack([normalised(each, weights, layout) for each in drawn])


def steps_of(points: int, span: float) -> np.ndarray:
    """``points`` evenly spaced coefficients in [−span, span]; an odd number has the weights in the middle."""
    whole("--points", points, 3)
    in_range("--span", span, 0, open_low=True)
    return np.linspace(-span, span, points)


def line(objective: Objective, weights: Tensor, direction: Tensor, steps: np.ndarray) -> Grid:
    """Loss and accuracy along one direction ``(D,)``, in float32."""
    points = Points(weights, direction[None], torch.from_numpy(steps)[:, None])
    found = objective.values(points)
    return Grid(steps, found[:, 0], found[:, 1])


def surface(
    objective: Objective,
    weights: Tensor,
    pair: Tensor,
    steps: np.ndarray,
    *,
    precision: str = "auto",
    on_points: Callable[[int], None] | None = None,
) -> Grid:
    """Loss and accuracy over the plane of two directions ``(2, D)``.

    precision: ``float32``; ``bfloat16`` for the forward passes (losses are always taken in float32); ``auto``:
    bfloat16 for long surfaces of images, where the processor multiplies it in hardware and nine points agree.
    """
    first, second = np.meshgrid(steps, steps, indexing="ij")
    coefficients = torch.from_numpy(np.stack([first.reshape(-1), second.reshape(-1)], axis=1))
    points = Points(weights, pair, coefficients)
    dtype, deviation = _precision(objective, points, precision)
    found = objective.values(points, dtype, on_points).reshape(len(steps), len(steps), 2)
    return Grid(steps, found[..., 0], found[..., 1], str(dtype).removeprefix("torch."), deviation)


def _precision(objective: Objective, points: Points, asked: str) -> tuple[torch.dtype, float | None]:
    """The precision to use, and how far it is from float32."""
    possible = asked == "bfloat16" or (asked == "auto" and _pays(objective, len(points)) and has_fast_bfloat16())
    if not possible:
        return torch.float32, None
    side = round(len(points) ** 0.5)
    ends = (0, (side - 1) // 2, side - 1)
    chosen = torch.tensor([row * side + column for row in ends for column in ends])
    few = Points(points.base, points.directions, points.coefficients[chosen])
    exact, fast = objective.values(few)[:, 0], objective.values(few, torch.bfloat16)[:, 0]
    deviation = float(np.abs(exact - fast).max())
    agrees = bool(np.isfinite(deviation)) and deviation <= TOLERANCE * float(exact.max() - exact.min())
    return (torch.bfloat16, deviation) if asked == "bfloat16" or agrees else (torch.float32, None)


def _pays(objective: Objective, points: int) -> bool:
    images = objective.inputs.dim() == 4 and objective.inputs.dtype == torch.float32
    return images and not objective.dense and points * len(objective.inputs) >= LONG


def has_fast_bfloat16() -> bool:
    """Whether this processor has bfloat16 matrix units (AMX)."""
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(known is not None and known())
