"""Gradient rules: functions from a gradient function to a gradient function, on the last axis of ``(…, n)``.

A rule is called as ``rule(gradient, view)`` and returns the gradient function that local SGD follows. Rules compose:
``compose(sam(0.5), blur(0.4))`` is SAM over BLUR, both passes seeing the penalty at the point evaluated. The equations
are in docs/specification.md, "Local steps".

>>> view = LocalView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
>>> compose(sam(0.5), blur(0.4))(lambda w: 2 * w, view)(torch.tensor([3.0, 4.0]))
tensor([ 7.9200, 10.5600])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.checks import in_range
from fedflat.core.types import GradientFn, GradientRule, LocalView, l2


def _direction(vector: Tensor, radius: float) -> Tensor:
    """``radius`` times the unit vector of each row; zero where the row is zero."""
    norm = l2(vector)
    scale = torch.where(norm > 0, radius / norm.clamp_min(torch.finfo(vector.dtype).tiny), torch.zeros_like(norm))
    return vector * scale


@dataclass(frozen=True)
class Sam:
    """Sharpness-aware minimisation: the gradient at w + ρ·g/‖g‖ (Foret et al. 2021; Shi et al. 2023a, Eq. 6–7).

    rho: perturbation radius, L2, in weight units, ≥ 0. The norm runs over all parameters the step updates; both
    passes use the same minibatch; a zero gradient gives no perturbation.
    """

    rho: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        def at_the_worst_nearby(w: Tensor) -> Tensor:
            return gradient(w + _direction(gradient(w), self.rho))

        return at_the_worst_nearby if self.rho > 0 else gradient


@dataclass(frozen=True)
class AdaptiveSam:
    """Adaptive SAM: the gradient at w + ρ·w²⊙g/‖|w|⊙g‖ (Kwon et al. 2021), as in the code of Shi et al. 2023a and b.

    rho: ≥ 0, a share of each weight's own size: the perturbation is ‖|w|⊙ρu‖ long for a unit vector u, at most
    ρ·max|w|. Otherwise as ``Sam``.
    """

    rho: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        def at_the_worst_nearby(w: Tensor) -> Tensor:
            size = w.abs()
            return gradient(w + size * _direction(size * gradient(w), self.rho))

        return at_the_worst_nearby if self.rho > 0 else gradient


@dataclass(frozen=True)
class Pgn:
    """Penalised gradient norm along the global direction g̃: β·g(w + ρ·g̃/‖g̃‖) + (1−β)·g̃ (Liu et al. 2025, Alg. 1).

    rho: radius of the perturbation along g̃, ≥ 0. beta: weight of the fresh gradient, in (0, 1]. While g̃ is zero
    there is no perturbation.
    """

    rho: float
    beta: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        direction = view.broadcast.get("direction")
        if direction is None:
            return lambda w: self.beta * gradient(w)
        offset = _direction(direction, self.rho)
        pull = (1 - self.beta) * direction

        def mixed(w: Tensor) -> Tensor:
            return self.beta * gradient(w + offset) + pull

        return mixed


@dataclass(frozen=True)
class Blur:
    """Bounded local update regularisation (Cheng et al. 2022, Eq. 5): adds λ(w − w^t)·1[‖w − w^t‖² > S²].

    S is the clip of the round. It is the gradient of (λ/2)·max(0, ‖w−w^t‖² − S²). lam: λ ≥ 0.
    """

    lam: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        def penalised(w: Tensor) -> Tensor:
            moved = w - view.start
            outside = l2(moved) > view.clip
            return gradient(w) + self.lam * moved * outside

        return penalised


@dataclass(frozen=True)
class Proximal:
    """FedProx (Li et al. 2020): adds μ(w − w^t), the gradient of (μ/2)·‖w − w^t‖². mu: μ ≥ 0.

    It is ``Blur`` with S = 0.
    """

    mu: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        return lambda w: gradient(w) + self.mu * (w - view.start)


@dataclass(frozen=True)
class LookAhead:
    """The gradient at w + γ·v, v the broadcast server momentum ``(d,)``: Nesterov's extrapolation. gamma: γ ≥ 0."""

    gamma: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        momentum = view.broadcast.get("nesterov")
        if momentum is None:
            return gradient
        ahead = self.gamma * momentum
        return lambda w: gradient(w + ahead)


@dataclass(frozen=True)
class Composed:
    """The rule ``outer`` applied to the gradient function that ``inner`` makes."""

    outer: GradientRule
    inner: GradientRule

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        return self.outer(self.inner(gradient, view), view)


def sam(rho: float = 0.5, adaptive: bool = False) -> Sam | AdaptiveSam:
    """SAM with radius ``rho`` ≥ 0 in units of weights (Shi et al. 2023a, Eq. 6–7); raises InputError.

    adaptive: ``rho`` is a share of each weight's own size instead (Kwon et al. 2021).

    >>> view = LocalView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
    >>> sam(0.5)(lambda w: 2 * w, view)(torch.tensor([3.0, 4.0]))  # 2·(w + 0.5·w/‖w‖)
    tensor([6.6000, 8.8000])
    """
    return (AdaptiveSam if adaptive else Sam)(in_range("algorithm.rho", rho, 0))


def pgn(rho: float = 0.2, beta: float = 0.3) -> Pgn:
    """DP-FedPGN's rule with radius ``rho`` ≥ 0 and weight ``beta`` in (0, 1] of the fresh gradient; raises InputError.

    The global direction g̃ is the broadcast vector ``direction`` (Liu et al. 2025, Alg. 1).

    >>> direction = {"direction": torch.tensor([0.0, 1.0])}
    >>> view = LocalView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1, broadcast=direction)
    >>> pgn(rho=0.5, beta=0.5)(lambda w: 2 * w, view)(torch.tensor([1.0, 1.0]))
    tensor([1., 2.])
    """
    return Pgn(in_range("algorithm.rho", rho, 0), in_range("algorithm.beta", beta, 0, 1, open_low=True))


def blur(lam: float = 0.4) -> Blur:
    """BLUR with weight ``lam`` ≥ 0 (Cheng et al. 2022, Eq. 5); raises InputError. Its threshold is the round's clip.

    >>> view = LocalView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
    >>> blur(0.5)(lambda w: 2 * w, view)(torch.tensor([[0.6, 0.0], [3.0, 4.0]]))  # two clients
    tensor([[ 1.2000,  0.0000],
            [ 7.5000, 10.0000]])
    """
    return Blur(in_range("algorithm.lam", lam, 0))


def proximal(mu: float = 0.1) -> Proximal:
    """FedProx's term with weight ``mu`` ≥ 0 (Li et al. 2020); raises InputError.

    >>> view = LocalView(start=torch.ones(2), clip=1.0, steps=1, lr=0.1)
    >>> proximal(0.5)(lambda w: 2 * w, view)(torch.tensor([3.0, 1.0]))
    tensor([7., 2.])
    """
    return Proximal(in_range("algorithm.mu", mu, 0))


def look_ahead(gamma: float = 0.5) -> LookAhead:
    """The gradient at w + γ·v with ``gamma`` in [0, 1), v the broadcast vector ``nesterov``; raises InputError.

    >>> v = {"nesterov": torch.tensor([1.0, 0.0])}
    >>> view = LocalView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1, broadcast=v)
    >>> look_ahead(0.5)(lambda w: 2 * w, view)(torch.tensor([1.0, 1.0]))
    tensor([3., 2.])
    """
    return LookAhead(in_range("algorithm.gamma", gamma, 0, 1, open_high=True))


def compose(outer: GradientRule, inner: GradientRule) -> Composed:
    """The rule ``outer`` over the rule ``inner``: ``outer`` sees the gradients that ``inner`` makes.

    >>> compose(sam(0.5), proximal(0.1))
    Composed(outer=Sam(rho=0.5), inner=Proximal(mu=0.1))
    """
    return Composed(outer, inner)
