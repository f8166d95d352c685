"""Masks common to all clients of a round (Fed-SMP, Hu et al. 2022). They never depend on the round's private data.

A mask is called as ``mask(view)`` and returns a boolean tensor ``(d,)``; update, clip and noise live where it is true.

>>> view = MaskView(torch.zeros(8), torch.zeros(8), np.random.default_rng(0))
>>> int(random_mask(0.25)(view).sum())
2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import in_range
from fedflat.core.share import count_of
from fedflat.core.types import MaskView


def _random_mask(size: int, count: int, generator: np.random.Generator) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.from_numpy(generator.choice(size, count, replace=False, shuffle=False))] = True
    return mask


@dataclass(frozen=True)
class RandomMask:
    """rand_k: one mask with exactly ⌈p·d⌉ ones, uniform, from public randomness. keep: p in (0, 1]."""

    keep: float

    def __call__(self, view: MaskView) -> Tensor:
        size = view.shared.numel()
        return _random_mask(size, count_of(self.keep, size), view.generator)


@dataclass(frozen=True)
class TopMask:
    """top_k: the ⌈p·d⌉ largest coordinates of an update trained on public data. keep: p in (0, 1].

    Without public data a share ``explore`` of the kept coordinates is uniform at random and the rest are the largest of
    |w^t − w^0|, which is already private and therefore free; without exploring, the first mask would stay for ever.
    """

    keep: float
    explore: float

    def __call__(self, view: MaskView) -> Tensor:
        size = view.shared.numel()
        count = count_of(self.keep, size)
        if view.public_update is not None:
            return _top(view.public_update().abs(), count)
        scores = (view.shared - view.initial).abs()
        top = _top(scores, count - count_of(self.explore, count))
        free = torch.nonzero(~top).squeeze(-1)
        chosen = view.generator.choice(free.numel(), count - int(top.sum()), replace=False, shuffle=False)
        mask = top.clone()
        mask[free[torch.from_numpy(chosen)]] = True
        return mask


def _top(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest scores, ties to the lowest index."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[torch.sort(scores, descending=True, stable=True).indices[:count]] = True
    return mask


def random_mask(keep: float = 0.4) -> RandomMask:
    """Common random mask keeping the share ``keep`` in (0, 1] of the whole vector; raises InputError.

    >>> view = MaskView(torch.zeros(8), torch.zeros(8), np.random.default_rng(0))
    >>> random_mask(0.5)(view).shape, int(random_mask(0.5)(view).sum())
    (torch.Size([8]), 4)
    """
    return RandomMask(in_range("algorithm.keep", keep, 0, 1, open_low=True))


def top_mask(keep: float = 0.4, explore: float = 0.5) -> TopMask:
    """Common top mask of the share ``keep`` in (0, 1]; ``explore`` in [0, 1] of it random without public data.

    Raises InputError.

    >>> moved = torch.tensor([0.0, 5.0, 0.0, -7.0])  # w^t − w^0
    >>> top_mask(0.5, explore=0.0)(MaskView(moved, torch.zeros(4), np.random.default_rng(0)))
    tensor([False,  True, False,  True])
    """
    return TopMask(in_range("algorithm.keep", keep, 0, 1, open_low=True), in_range("algorithm.explore", explore, 0, 1))
