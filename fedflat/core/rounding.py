"""Add long vectors in float64, and bound in one place what rounding may add to a clip.

The principle: the array whose norm was taken is the array that is added, or a proven bound on their difference is part
of the factor. So one client moves a computed sum by at most C·(1 + ``ROUNDING``), and that is the plan's sensitivity.

Every sum before the noise is in float64 (unit roundoff u = 2⁻⁵³) over at most n = ``MOST`` messages, and
γ_k = k·u/(1 − k·u) bounds the relative error of k roundings in any order (Higham 2002, section 3.1). s = ``ROUNDING``:

| what rounds | at most | of s |
|---|---|---|
| additions, with and without the client: each sum by γ_{n+8}·Σ_j C ≤ 2⁻³³·2²⁰·C | 2·2⁻¹³·C | 1/4 |
| products of factors (engine/measured.py), of each client at most ``SHARE``·C | 2·n·s/(4n)·C | 1/2 |
| norm, factor and product of one message: γ_{d+4}·C for d < 2³⁹, and a cast to float32 | 2⁻¹³·C | 1/8 |

Whole-number sums (secure noise, ddgauss) round each message by itself, keep its norm within C, and add exactly.

On a GPU, and for short vectors, there is one piece.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ROUNDING = 2.0**-10
"""s: what rounding may add to the clip C, as a share of it. A power of two, so that 1 + s is exact."""
MOST = 1 << 20
"""n: messages in one sum for which s is proven."""
SHARE = ROUNDING / (4 * MOST)
"""What one client's own products may be off by in the sum, as a share of C."""
_UNIT = 2.0**-53


def gamma(terms: int) -> float:
    """γ_k of float64 for k = ``terms`` < 2⁵² roundings."""
    return terms * _UNIT / (1 - terms * _UNIT)


CACHED = 1 << 16
"""Entries of a piece (512 kB in float64)."""


def norm(vector: Tensor) -> Tensor:
    """L2 norm ``()`` of a vector ``(d,)``; squares are summed in float64, so that a huge entry is no infinity."""
    if not _long(vector):
        return torch.linalg.vector_norm(vector, dtype=torch.float64)  # type: ignore[no-any-return]
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
    # A GPU has room for the copy, and reading the factor would wait for it.
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
    """Return the pieces of a vector, each with the same room for its float64 copy."""
    room = torch.empty(CACHED, dtype=torch.float64)
    return ((piece, room[: len(piece)]) for piece in vector.split(CACHED))


def _wide(piece: Tensor, room: Tensor) -> Tensor:
    """Return the piece in float64, in the room that the next one takes again."""
    return room.copy_(piece)
