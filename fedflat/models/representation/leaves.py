"""Images of a random process, for whatever may be learnt from no data at all: dead leaves.

Opaque ellipses and rectangles of power-law sizes fall on one another until nothing is seen between them (Matheron
1968; Lee, Mumford and Huang 2001: many statistics of natural images follow); with shading inside them and 1/f texture
over them. Nothing here has seen a photograph: the only prior is the process and its seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import stream

LEAVES = 60
CHUNK = 250
"""Images made at once, each chunk from a stream of its own: the first images do not depend on how many follow."""
SMALLEST, LARGEST = 0.06, 0.7
"""Radii, as shares of the longer side."""


def dead_leaves(count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """``count`` images ``(count, c, h, w)`` float32, standardised as images of a data set are.

    shape: channels (1 or 3; others get independent colours), height, width. seed: the process's own.
    """
    images = torch.cat(list(_chunks(count, shape, seed)))
    return (images - images.mean()) / images.std()


def _chunks(count: int, shape: tuple[int, int, int], seed: int) -> Iterator[Tensor]:
    for number, start in enumerate(range(0, count, CHUNK)):
        yield _chunk(shape, stream(seed, "dead leaves", number))[: count - start]


def _chunk(shape: tuple[int, int, int], draw: np.random.Generator) -> Tensor:
    """``(CHUNK, c, h, w)`` in [0, 1]."""
    channels, height, width = shape
    side = max(height, width)
    rows = torch.arange(height, dtype=torch.float32)[None, :, None]
    columns = torch.arange(width, dtype=torch.float32)[None, None, :]
    base = _of(draw.uniform(0, 1, (CHUNK, 1)) + draw.normal(0, 0.15, (CHUNK, channels)))
    images = base[:, :, None, None].expand(-1, -1, height, width).clone()
    for _ in range(LEAVES):
        across, along, inside = _leaf(draw, rows, columns, side)
        # luminance varies more than colour does, and a third of the leaves are shaded
        colour = base + _of(draw.normal(0, 0.25, (CHUNK, 1)) + draw.normal(0, 0.08, (CHUNK, channels)))
        slope = _of(draw.normal(0, 0.3, (CHUNK, 2)) * (draw.random((CHUNK, 1)) < 1 / 3)) / side
        shading = slope[:, 0, None, None] * across + slope[:, 1, None, None] * along
        images = torch.where(inside[:, None], colour[:, :, None, None] + shading[:, None], images)
    strength = _of(draw.random((CHUNK, 1, 1)) ** 2 * 0.15)
    return (images + (strength * _texture(draw, height, width))[:, None]).clamp(0, 1)


def _leaf(draw: np.random.Generator, rows: Tensor, columns: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """One leaf of every image: coordinates along its two axes ``(CHUNK, h, w)``, and where it is."""
    ratio = (SMALLEST / LARGEST) ** 2
    radius = SMALLEST * side / np.sqrt(ratio + (1 - ratio) * draw.random(CHUNK))  # density ∝ r⁻³
    flat, angle = draw.uniform(0.2, 1.0, CHUNK), draw.uniform(0, math.pi, CHUNK)
    y, x = draw.uniform(-0.2 * side, 1.2 * side, (2, CHUNK))
    cos, sin, up, right, long, thin = (
        _of(v)[:, None, None] for v in (np.cos(angle), np.sin(angle), y, x, radius, flat)
    )
    across = (columns - right) * cos + (rows - up) * sin
    along = (rows - up) * cos - (columns - right) * sin
    u, v = across.abs() / long, along.abs() / (long * thin)
    round_ones = torch.from_numpy(draw.random(CHUNK) < 0.5)[:, None, None]
    return across, along, torch.where(round_ones, u * u + v * v, torch.maximum(u, v)) < 1


def _texture(draw: np.random.Generator, height: int, width: int) -> Tensor:
    """Gaussian noise with spectrum 1/f^γ, γ in [0.5, 1.5], of variance 1: ``(CHUNK, h, w)``."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1 / max(height, width)
    waves = np.fft.rfft2(draw.standard_normal((CHUNK, height, width)))
    found = np.fft.irfft2(waves / frequency ** draw.uniform(0.5, 1.5, (CHUNK, 1, 1)), s=(height, width))
    return _of(found / found.std(axis=(1, 2), keepdims=True))


def _of(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
