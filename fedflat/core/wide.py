"""Float64 arithmetic on long float32 vectors, in pieces whose float64 copy stays in a core's cache.

On a GPU, and for short vectors, there is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CACHED = 1 << 16
"""Entries of a piece (512 kB in float64)."""


def norm(vector: Tensor) -> Tensor:
    """L2 norm ``()`` of a vector ``(d,)``; squares are summed in float64, so that a huge entry is no infinity."""
    if not _long(vector):
        found: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
        return found
    return torch.stack([_wide(p, room).square_().sum() for p, room in _pieces(vector)]).sum().sqrt()


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖₂ of vectors ``(d,)``, in float64."""
    if not _long(a):
        return float(torch.linalg.vector_norm(a.double() - b))
    parts = [_wide(p, room).sub_(q).square_().sum() for (p, room), q in zip(_pieces(a), b.split(CACHED))]
    return float(torch.stack(parts).sum().sqrt())


def plus(total: Tensor, vector: Tensor) -> Tensor:
    """``total + vector`` in float64, ``total`` being float64 already."""
    if not _long(vector):
        return total + vector
    out = torch.empty_like(total)
    for (p, room), q, r in zip(_pieces(vector), total.split(CACHED), out.split(CACHED)):
        torch.add(q, _wide(p, room), out=r)
    return out


def add_scaled(total: Tensor, vector: Tensor, factor: Tensor) -> None:
    """``total += factor·vector`` in float64, in place; factor: float64 ``()``, never read by a GPU's host."""
    if vector.device.type != "cpu":
        total.addcmul_(vector.double(), factor)
        return
    number = float(factor)
    if not _long(vector):
        total.add_(vector, alpha=number)
        return
    for (p, room), q in zip(_pieces(vector), total.split(CACHED)):
        q.add_(_wide(p, room), alpha=number)


def _long(vector: Tensor) -> bool:
    return vector.numel() > CACHED and vector.device.type == "cpu"


def _pieces(vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a vector, each with the same room for its float64 copy."""
    room = torch.empty(CACHED, dtype=torch.float64)
    return ((piece, room[: len(piece)]) for piece in vector.split(CACHED))


def _wide(piece: Tensor, room: Tensor) -> Tensor:
    """The piece in float64, in the room that the next one takes again."""
    return room.copy_(piece)
