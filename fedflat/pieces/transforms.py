"""Change a client's update before the clip: common and own masks, rescaling, smoothing, PGN's direction.

A transform is called as ``transform(update, view)``: update ``(…, d)`` -> message ``(…, d)``.

>>> view = ClientView(tensors=(slice(0, 2), slice(2, 5)), gradient=lambda: torch.ones(5), steps=10, lr=0.1)
>>> top_k(0.5)(torch.tensor([1.0, -3.0, 0.5, 2.0, -4.0]), view)  # one of two entries, then two of three
tensor([ 0., -3.,  0.,  2., -4.])

A mask is called as ``mask(view)`` and returns a boolean tensor ``(d,)``; update, clip and noise live where it is true.

>>> view = MaskView(torch.zeros(8), torch.zeros(8), np.random.default_rng(0))
>>> int(random_mask(0.25)(view).sum())
2
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np  # noqa: F401  # for the examples
import torch
from torch import Tensor

from fedflat.core import ClientView, MaskView, in_range


def largest(scores: Tensor, count: int) -> Tensor:
    """Boolean mask ``(…, n)`` of exactly ``count`` largest entries per row; ties go to the lowest index.

    >>> largest(torch.tensor([[3.0, 1.0, 3.0, 3.0]]), 2)
    tensor([[ True, False,  True, False]])
    """
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = torch.nan_to_num(scores, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    threshold = scores.topk(max(count, 1), dim=-1).values[..., -1:]
    above, ties = scores > threshold, scores == threshold
    return above | (ties & (ties.cumsum(-1) <= (count - above.sum(-1, keepdim=True))))


@dataclass(frozen=True)
class ClassSums:
    """−n_i·∇L_i in the update's place: Σ_j φ_j(y_j − p_j)ᵀ on the last layer's weights, Σ_j (y_j − p_j) on its bias.

    φ are the layer's inputs and p the model's probabilities. Where the layer is zero, p = 1/K: class sums.
    """

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        return view.gradient() * -view.examples()


def _keep_per_tensor(scores: Tensor, share: float, tensors: tuple[slice, ...]) -> Tensor:
    """Return the mask of exactly ⌈share·d_j⌉ largest scores in each tensor j."""
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

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        return update * _keep_per_tensor(update.abs(), self.keep, view.tensors)


@dataclass(frozen=True)
class Lus:
    """Local update sparsification (Cheng et al. 2022, Eq. 11–13): per tensor keep exactly ⌈(1−c)·d_j⌉ entries.

    Those with the largest |∂f_i(w_i^K)/∂w · Δw|: gradient of the client's whole loss without any penalty, in evaluation
    mode, at its final weights. sparsity: c in [0, 1), the share set to zero.
    """

    sparsity: float

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        return update * _keep_per_tensor((view.gradient() * update).abs(), 1 - self.sparsity, view.tensors)


@dataclass(frozen=True)
class Rescale:
    """Multiply the update by a public constant before the clip (Fed-SMP's 1/p, Hu et al. 2022).

    >>> Rescale(2.5)(torch.tensor([2.0, 4.0]), ClientView(steps=10, lr=0.1))
    tensor([ 5., 10.])
    """

    factor: float

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        return update * self.factor


@dataclass(frozen=True)
class AddBackDirection:
    """PGN's message Δ̄_i = Δ_i + (1−β)·K·η_t·g̃ (Liu et al. 2025, Alg. 1).

    What every client added of the common direction is taken out again, so that the clip meets the client's own part
    only. beta: β in (0, 1]. K and η_t are the view's ``steps`` and ``lr``.

    >>> view = ClientView(steps=10, lr=0.1, broadcast={"direction": torch.tensor([1.0, 0.0])})
    >>> AddBackDirection(0.5)(torch.tensor([-0.5, 2.0]), view)  # adds 0.5·10·0.1 along the direction
    tensor([0., 2.])
    """

    beta: float

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        direction = view.broadcast.get("direction")
        return update if direction is None else update + (1 - self.beta) * view.steps * view.lr * direction


def top_k(keep: float = 0.4) -> TopK:
    """Return the own top-k sparsification with share ``keep`` in (0, 1] (Shi et al. 2023b, Def. 5); raises InputError.

    >>> view = ClientView(tensors=(slice(0, 4),), gradient=lambda: torch.ones(4), steps=10, lr=0.1)
    >>> top_k(0.25)(torch.tensor([1.0, -3.0, 0.5, 2.0]), view)
    tensor([ 0., -3.,  0.,  0.])
    """
    return TopK(in_range("algorithm.keep", keep, 0, 1, open_low=True))


def lus(sparsity: float = 0.7) -> Lus:
    """LUS zeroing the share ``sparsity`` in [0, 1) of each tensor (Cheng et al. 2022, Eq. 11–13); raises InputError.

    >>> view = ClientView(tensors=(slice(0, 2),), gradient=lambda: torch.tensor([0.1, 5.0]), steps=10, lr=0.1)
    >>> lus(0.5)(torch.tensor([3.0, 1.0]), view)  # the smaller entry matters more to the loss
    tensor([0., 1.])
    """
    return Lus(in_range("algorithm.sparsity", sparsity, 0, 1, open_high=True))


@dataclass(frozen=True)
class RandomMask:
    """rand_k: one mask with exactly ⌈p·d⌉ ones, uniform, from public randomness. keep: p in (0, 1]."""

    keep: float

    def __call__(self, view: MaskView) -> Tensor:
        size = view.shared.numel()
        mask = torch.zeros(size, dtype=torch.bool)
        chosen = view.generator.choice(size, count_of(self.keep, size), replace=False, shuffle=False)
        mask[torch.from_numpy(chosen)] = True
        return mask


@dataclass(frozen=True)
class TopMask:
    """top_k: the ⌈p·d⌉ largest coordinates of an update trained on public data. keep: p in (0, 1].

    Without public data a share ``explore`` of the kept coordinates is uniform at random and the rest are the largest of
    |w^t − w^0|, which is already private and therefore free; without exploring, the first mask would stay for ever.
    """

    keep: float
    explore: float

    def __call__(self, view: MaskView) -> Tensor:
        count = count_of(self.keep, view.shared.numel())
        if view.public_update is not None:
            return largest(view.public_update().abs(), count)
        mask = largest((view.shared - view.initial).abs(), count - count_of(self.explore, count))
        # Exploring only among the others, so the mask has exactly ``count`` ones.
        free = torch.nonzero(~mask).squeeze(-1)
        chosen = view.generator.choice(free.numel(), count - int(mask.sum()), replace=False, shuffle=False)
        mask[free[torch.from_numpy(chosen)]] = True
        return mask


def random_mask(keep: float = 0.4) -> RandomMask:
    """Return the common random mask keeping the share ``keep`` in (0, 1] of the whole vector; raises InputError.

    >>> view = MaskView(torch.zeros(8), torch.zeros(8), np.random.default_rng(0))
    >>> random_mask(0.5)(view).shape, int(random_mask(0.5)(view).sum())
    (torch.Size([8]), 4)
    """
    return RandomMask(in_range("algorithm.keep", keep, 0, 1, open_low=True))


def top_mask(keep: float = 0.4, explore: float = 0.5) -> TopMask:
    """Return the common top mask of the share ``keep`` in (0, 1]; ``explore`` in [0, 1] of it random without public
    data.

    Raises InputError.

    >>> moved = torch.tensor([0.0, 5.0, 0.0, -7.0])  # w^t − w^0
    >>> top_mask(0.5, explore=0.0)(MaskView(moved, torch.zeros(4), np.random.default_rng(0)))
    tensor([False,  True, False,  True])
    """
    return TopMask(in_range("algorithm.keep", keep, 0, 1, open_low=True), in_range("algorithm.explore", explore, 0, 1))


def count_of(share: float, size: int) -> int:
    """Return how many of ``size`` entries a share is, rounded up; a positive share keeps at least one entry.

    share: in [0, 1], read as the nearest fraction with a denominator up to 10⁹, because 1 − 0.7 is not 0.3.

    >>> count_of(1 - 0.7, 10)
    3
    """
    if share <= 0 or size <= 0:
        return 0
    return min(size, max(1, math.ceil(Fraction(share).limit_denominator(10**9) * size)))
