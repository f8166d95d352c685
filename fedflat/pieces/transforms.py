"""Transforms of a client's update before the clip: own sparsification, rescaling, PGN's direction added back.

A transform is called as ``transform(update, view)``: update ``(…, d)`` -> message ``(…, d)``.

>>> view = UpdateView(tensors=(slice(0, 2), slice(2, 5)), gradient=lambda: torch.ones(5), steps=10, lr=0.1)
>>> top_k(0.5)(torch.tensor([1.0, -3.0, 0.5, 2.0, -4.0]), view)  # one of two entries, then two of three
tensor([ 0., -3.,  0.,  2., -4.])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.checks import in_range
from fedflat.core.share import count_of
from fedflat.core.types import UpdateView


def largest(scores: Tensor, count: int) -> Tensor:
    """Boolean mask ``(…, n)`` of exactly ``count`` largest entries per row; ties go to the lowest index.

    >>> largest(torch.tensor([[3.0, 1.0, 3.0, 3.0]]), 2)
    tensor([[ True, False,  True, False]])
    """
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
    """Own mask (Shi et al. 2023b, Def. 5): per tensor keep exactly ⌈p·d_j⌉ entries of largest |Δw|, zero the rest.

    keep: p in (0, 1]. Noise still goes on all d coordinates, so the factor p of Theorem 3 there does not apply.
    """

    keep: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update * _keep_per_tensor(update.abs(), self.keep, view.tensors)


@dataclass(frozen=True)
class Lus:
    """Local update sparsification (Cheng et al. 2022, Eq. 11–13): per tensor keep exactly ⌈(1−c)·d_j⌉ entries.

    Those with the largest |∂f_i(w_i^K)/∂w · Δw|: gradient of the client's whole loss without any penalty, in evaluation
    mode, at its final weights. sparsity: c in [0, 1), the share set to zero.
    """

    sparsity: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        scores = (view.gradient() * update).abs()
        return update * _keep_per_tensor(scores, 1 - self.sparsity, view.tensors)


@dataclass(frozen=True)
class Rescale:
    """Multiply the update by a public constant before the clip (Fed-SMP's 1/p, Hu et al. 2022)."""

    factor: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update * self.factor


@dataclass(frozen=True)
class AddBackDirection:
    """PGN's message Δ̄_i = Δ_i + (1−β)·K·η_t·g̃ (Liu et al. 2025, Alg. 1).

    What every client added of the common direction is taken out again, so that the clip meets the client's own part
    only. beta: β in (0, 1]. K and η_t are the view's ``steps`` and ``lr``.
    """

    beta: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        direction = view.broadcast.get("direction")
        return update if direction is None else update + (1 - self.beta) * view.steps * view.lr * direction


def top_k(keep: float = 0.4) -> TopK:
    """Own top-k sparsification with share ``keep`` in (0, 1] (Shi et al. 2023b, Def. 5); raises InputError.

    >>> view = UpdateView(tensors=(slice(0, 4),), gradient=lambda: torch.ones(4), steps=10, lr=0.1)
    >>> top_k(0.25)(torch.tensor([1.0, -3.0, 0.5, 2.0]), view)
    tensor([ 0., -3.,  0.,  0.])
    """
    return TopK(in_range("algorithm.keep", keep, 0, 1, open_low=True))


def lus(sparsity: float = 0.7) -> Lus:
    """LUS zeroing the share ``sparsity`` in [0, 1) of each tensor (Cheng et al. 2022, Eq. 11–13); raises InputError.

    >>> view = UpdateView(tensors=(slice(0, 2),), gradient=lambda: torch.tensor([0.1, 5.0]), steps=10, lr=0.1)
    >>> lus(0.5)(torch.tensor([3.0, 1.0]), view)  # the smaller entry matters more to the loss
    tensor([0., 1.])
    """
    return Lus(in_range("algorithm.sparsity", sparsity, 0, 1, open_high=True))


def rescale(factor: float) -> Rescale:
    """Multiply by the positive public constant ``factor``; raises InputError.

    >>> view = UpdateView(tensors=(slice(0, 2),), gradient=lambda: torch.ones(2), steps=10, lr=0.1)
    >>> rescale(2.5)(torch.tensor([2.0, 4.0]), view)
    tensor([ 5., 10.])
    """
    return Rescale(in_range("rescale factor", factor, 0, open_low=True))


def add_back_direction(beta: float = 0.3) -> AddBackDirection:
    """DP-FedPGN's added-back direction for the weight ``beta`` in (0, 1] of fresh gradients; raises InputError.

    >>> direction = {"direction": torch.tensor([1.0, 0.0])}
    >>> view = UpdateView((slice(0, 2),), lambda: torch.ones(2), steps=10, lr=0.1, broadcast=direction)
    >>> add_back_direction(0.5)(torch.tensor([-0.5, 2.0]), view)  # adds 0.5·10·0.1 along the direction
    tensor([0., 2.])
    """
    return AddBackDirection(in_range("algorithm.beta", beta, 0, 1, open_low=True))
