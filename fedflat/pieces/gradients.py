"""Gradient rules: functions from a gradient function to a gradient function, on the last axis of ``(…, n)``.

They compose: ``compose(sam(0.5), blur(0.4))`` is SAM over BLUR, both passes seeing the penalty at the point evaluated.
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
    """Sharpness-aware minimisation: the gradient at w + ρ·g/‖g‖ (000 Eq. 6–7).

    rho: perturbation radius, L2, in weight units, ≥ 0. The norm runs over all parameters the step updates; both
    passes use the same minibatch; a zero gradient gives no perturbation.
    """

    rho: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        def at_the_worst_nearby(w: Tensor) -> Tensor:
            return gradient(w + _direction(gradient(w), self.rho))

        return at_the_worst_nearby if self.rho > 0 else gradient


@dataclass(frozen=True)
class Pgn:
    """Penalised gradient norm with the global direction g̃ (002 Alg. 1): β·g(w + ρ·g̃/‖g̃‖) + (1−β)·g̃.

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
    """Bounded local update regularisation (004 Eq. 5): adds λ(w − w^t)·1[‖w − w^t‖² > S²], S the clip of the round.

    It is the gradient of (λ/2)·max(0, ‖w−w^t‖² − S²). lam: λ ≥ 0.
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
    """The gradient at w + γ·v, v the broadcast server momentum: Nesterov's extrapolation. gamma: γ ≥ 0."""

    gamma: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        momentum = view.broadcast.get("nesterov")
        if momentum is None:
            return gradient
        ahead = self.gamma * momentum
        return lambda w: gradient(w + ahead)


@dataclass(frozen=True)
class Composed:
    """``outer`` applied to the gradient function that ``inner`` makes."""

    outer: GradientRule
    inner: GradientRule

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        return self.outer(self.inner(gradient, view), view)


def sam(rho: float = 0.5) -> Sam:
    """SAM with radius ``rho`` ≥ 0 (000 Eq. 6–7)."""
    return Sam(in_range("algorithm.rho", rho, 0))


def pgn(rho: float = 0.2, beta: float = 0.3) -> Pgn:
    """DP-FedPGN's rule with radius ``rho`` ≥ 0 and fresh-gradient weight ``beta`` in (0, 1] (002 Alg. 1)."""
    return Pgn(in_range("algorithm.rho", rho, 0), in_range("algorithm.beta", beta, 0, 1, open_low=True))


def blur(lam: float = 0.4) -> Blur:
    """BLUR with weight ``lam`` ≥ 0 (004 Eq. 5); its threshold is the clip of the round."""
    return Blur(in_range("algorithm.lam", lam, 0))


def proximal(mu: float = 0.1) -> Proximal:
    """FedProx's term with weight ``mu`` ≥ 0 (Li et al. 2020)."""
    return Proximal(in_range("algorithm.mu", mu, 0))


def look_ahead(gamma: float = 0.5) -> LookAhead:
    """The gradient at w + γ·v with ``gamma`` in [0, 1)."""
    return LookAhead(in_range("algorithm.gamma", gamma, 0, 1, open_high=True))


def compose(outer: GradientRule, inner: GradientRule) -> Composed:
    """The rule ``outer`` over the rule ``inner``."""
    return Composed(outer, inner)
