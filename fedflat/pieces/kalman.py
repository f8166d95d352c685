"""DiSK (Zhang et al. 2024b, arXiv 2410.03883) at client level: a Kalman filter of constant gain over the noisy means.

It predicts a round's mean from its estimate and from how the gradient changes along the model's last move d, and
corrects that: g̃ ← (1−κ)·(g̃ + [g(w + γd) − g(w)]/γ) + κ·g(w). The change is private data, so it is part of what each
client sends, a·g(w + γd) + (1−a)·g(w) with a = (1−κ)/(κγ): one message, clipped whole to C whatever a is. d is what two
released models differ by, and the filter post-processes. A client's K steps are in place of an example's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.checks import in_range
from fedflat.core.types import GradientFn, LocalView, MeanView, Optimizer


@dataclass(frozen=True)
class Mixture:
    """a·g(w + γd) + (1−a)·g(w) on the same minibatch; one gradient where a = 1. d is zero before the model moved."""

    gamma: float
    weight: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        moved = view.broadcast.get("moved")
        if moved is None:
            return gradient
        ahead, rest = self.gamma * moved, 1 - self.weight
        return lambda w: self.weight * gradient(w + ahead) + (rest * gradient(w) if rest else 0.0)


@dataclass(frozen=True)
class Filter:
    """The server: g̃ ← (1−κ)·g̃ + κ·mean, from the first mean on, then w ← w + lr·g̃, a move that is broadcast."""

    kappa: float
    broadcast: ClassVar[tuple[str, ...]] = ("moved",)

    def __call__(self, lr: float, view: MeanView) -> Optimizer:
        def step(w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            estimate = torch.lerp(slots.get("estimate", mean), mean, self.kappa)
            return w + lr * estimate, {"estimate": estimate, "moved": lr * estimate}

        return step


def disk(kappa: float = 0.7, ahead: float | None = None) -> tuple[Mixture, Filter]:
    """Both sides for a gain ``kappa`` in (0, 1] and γ = ``ahead`` > 0; None: (1−κ)/κ, at which a = 1.

    >>> rule, server = disk(kappa=0.5, ahead=2.0)
    >>> rule.weight, server.kappa
    (0.5, 0.5)
    """
    in_range("algorithm.kappa", kappa, 0, 1, open_low=True)
    if ahead is None:
        return Mixture((1 - kappa) / kappa, 1.0), Filter(kappa)
    in_range("algorithm.ahead", ahead, 0, open_low=True)
    return Mixture(ahead, (1 - kappa) / (kappa * ahead)), Filter(kappa)
