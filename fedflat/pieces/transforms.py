"""Transforms of a client's update before the clip: own sparsification, rescaling, PGN's re-added direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.checks import in_range
from fedflat.core.share import count_of
from fedflat.core.types import UpdateView


def largest(scores: Tensor, count: int) -> Tensor:
    """Boolean mask ``(…, n)`` of exactly ``count`` largest entries per row; ties go to the lowest index."""
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = torch.nan_to_num(scores, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    threshold = scores.topk(count, dim=-1).values[..., -1:]
    above, ties = scores > threshold, scores == threshold
    room = count - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


@dataclass(frozen=True)
class ClassSums:
    """−n_i·∇L_i in the update's place: Σ_j φ_j(y_j − p_j)ᵀ on the last layer's weights, Σ_j (y_j − p_j) on its bias.

    φ are the layer's inputs and p the model's probabilities. Where the layer is zero, p = 1/K: class sums.
    """

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return view.gradient() * -view.examples()


def _keep_per_tensor(scores: Tensor, share: float, tensors: tuple[slice, ...]) -> Tensor:
    """Mask of exactly ⌈share·d_j⌉ largest scores in each tensor j."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for where in tensors:
        mask[..., where] = largest(scores[..., where], count_of(share, where.stop - where.start))
    return mask


@dataclass(frozen=True)
class TopK:
    """Own mask (003 Def. 5): per tensor keep exactly ⌈p·d_j⌉ entries of largest |Δw|, zero the rest.

    keep: p in (0, 1]. Noise still goes on all d coordinates, so 003 Theorem 3's factor p does not apply.
    """

    keep: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update * _keep_per_tensor(update.abs(), self.keep, view.tensors)


@dataclass(frozen=True)
class Lus:
    """Local update sparsification (004 Eq. 11–13): per tensor keep exactly ⌈(1−c)·d_j⌉ entries with the largest
    |∂f_i(w_i^K)/∂w · Δw|, gradient of the full local loss without any penalty, eval mode, at the final local weights.

    sparsity: c in [0, 1), the share set to zero.
    """

    sparsity: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        scores = (view.gradient() * update).abs()
        return update * _keep_per_tensor(scores, 1 - self.sparsity, view.tensors)


@dataclass(frozen=True)
class Rescale:
    """Multiply the update by a public constant before the clip (Fed-SMP's 1/p)."""

    factor: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update * self.factor


@dataclass(frozen=True)
class AddBackDirection:
    """PGN's message Δ̄_i = Δ_i + (1−β)·K·η_t·g̃ (002 Alg. 1): what is clipped is the client's own part only."""

    beta: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        direction = view.broadcast.get("direction")
        return update if direction is None else update + (1 - self.beta) * view.steps * view.lr * direction


def top_k(keep: float = 0.4) -> TopK:
    """Own top-k sparsification with share ``keep`` in (0, 1] (003 Def. 5)."""
    return TopK(in_range("algorithm.keep", keep, 0, 1, open_low=True))


def lus(sparsity: float = 0.7) -> Lus:
    """LUS zeroing the share ``sparsity`` in [0, 1) of each tensor (004 Eq. 11–13)."""
    return Lus(in_range("algorithm.sparsity", sparsity, 0, 1, open_high=True))


def rescale(factor: float) -> Rescale:
    """Multiply by a positive public constant."""
    return Rescale(in_range("rescale factor", factor, 0, open_low=True))


def add_back_direction(beta: float = 0.3) -> AddBackDirection:
    """DP-FedPGN's re-added direction for fresh-gradient weight ``beta`` (002 Alg. 1)."""
    return AddBackDirection(in_range("algorithm.beta", beta, 0, 1, open_low=True))
