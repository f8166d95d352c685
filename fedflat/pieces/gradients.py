"""Change the gradient that local SGD follows: rules from a gradient function to a gradient function.

A rule is called as ``rule(gradient, view)`` and returns the gradient function that local SGD follows. Rules compose:
``compose(sam(0.5), blur(0.4))`` is SAM over BLUR, both passes seeing the penalty at the point evaluated. The equations
are in docs/specification.md, "Local steps".

>>> view = ClientView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
>>> compose(sam(0.5), blur(0.4))(lambda w: 2 * w, view)(torch.tensor([3.0, 4.0]))
tensor([ 7.9200, 10.5600])

Under label skew most of a client's update says which labels it has. Over all clients that cancels; in each client's
clip it takes the place of the rest. With τ·log π_i added to the logits, π_i the shares of the classes in the client's
own data, a client's optimum no longer follows π_i (Menon et al. 2021; between clients, Zhang et al. 2022).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core import ClientView, GradientFn, GradientRule, ServerStep, ServerView, in_range, l2


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

    def step(self, w: Tensor, slope: Tensor) -> Tensor:
        """Return the perturbation at ``w`` ``(…, n)``, where the gradient is ``slope``."""
        return _direction(slope, self.rho)

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        def at_the_worst_nearby(w: Tensor) -> Tensor:
            return gradient(w + self.step(w, gradient(w)))

        return at_the_worst_nearby if self.rho > 0 else gradient


class AdaptiveSam(Sam):
    """Adaptive SAM: the gradient at w + ρ·w²⊙g/‖|w|⊙g‖ (Kwon et al. 2021), as in the code of Shi et al. 2023a and b.

    rho: ≥ 0, a share of each weight's own size: the perturbation is ‖|w|⊙ρu‖ long for a unit vector u, at most
    ρ·max|w|. Otherwise as ``Sam``.
    """

    def step(self, w: Tensor, slope: Tensor) -> Tensor:
        """Return the perturbation at ``w``, each weight's share in units of its size."""
        size = w.abs()
        return size * _direction(size * slope, self.rho)


@dataclass(frozen=True)
class Pgn:
    """Penalised gradient norm along the global direction g̃: β·g(w + ρ·g̃/‖g̃‖) + (1−β)·g̃ (Liu et al. 2025, Alg. 1).

    rho: radius of the perturbation along g̃, ≥ 0. beta: weight of the fresh gradient, in (0, 1]. While g̃ is zero
    there is no perturbation.
    """

    rho: float
    beta: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        if (direction := view.broadcast.get("direction")) is None:
            return lambda w: self.beta * gradient(w)
        offset = _direction(direction, self.rho)
        pull = (1 - self.beta) * direction
        return lambda w: self.beta * gradient(w + offset) + pull


@dataclass(frozen=True)
class Blur:
    """Bounded local update regularisation (Cheng et al. 2022, Eq. 5): adds λ(w − w^t)·1[‖w − w^t‖² > S²].

    S is the clip of the round. It is the gradient of (λ/2)·max(0, ‖w−w^t‖² − S²). lam: λ ≥ 0.
    """

    lam: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        def penalised(w: Tensor) -> Tensor:
            moved = w - view.start
            return gradient(w) + self.lam * moved * (l2(moved) > view.clip)

        return penalised


@dataclass(frozen=True)
class Proximal:
    """FedProx (Li et al. 2020): adds μ(w − w^t), the gradient of (μ/2)·‖w − w^t‖². mu: μ ≥ 0.

    It is ``Blur`` with S = 0.
    """

    mu: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        return lambda w: gradient(w) + self.mu * (w - view.start)


@dataclass(frozen=True)
class LookAhead:
    """The gradient at w + γ·v, v the broadcast server momentum ``(d,)``: Nesterov's extrapolation. gamma: γ ≥ 0."""

    gamma: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        if (momentum := view.broadcast.get("nesterov")) is None:
            return gradient
        offset = self.gamma * momentum
        return lambda w: gradient(w + offset)


@dataclass(frozen=True)
class Composed:
    """The rule ``outer`` applied to the gradient function that ``inner`` makes."""

    outer: GradientRule
    inner: GradientRule

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        return self.outer(self.inner(gradient, view), view)


def sam(rho: float = 0.5, adaptive: bool = False) -> Sam:
    """SAM with radius ``rho`` ≥ 0 in units of weights (Shi et al. 2023a, Eq. 6–7); raises InputError.

    adaptive: ``rho`` is a share of each weight's own size instead (Kwon et al. 2021).

    >>> view = ClientView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
    >>> sam(0.5)(lambda w: 2 * w, view)(torch.tensor([3.0, 4.0]))  # 2·(w + 0.5·w/‖w‖)
    tensor([6.6000, 8.8000])
    """
    return (AdaptiveSam if adaptive else Sam)(in_range("algorithm.rho", rho, 0))


def pgn(rho: float = 0.2, beta: float = 0.3) -> Pgn:
    """DP-FedPGN's rule with radius ``rho`` ≥ 0 and weight ``beta`` in (0, 1] of the fresh gradient; raises InputError.

    The global direction g̃ is the broadcast vector ``direction`` (Liu et al. 2025, Alg. 1).

    >>> direction = {"direction": torch.tensor([0.0, 1.0])}
    >>> view = ClientView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1, broadcast=direction)
    >>> pgn(rho=0.5, beta=0.5)(lambda w: 2 * w, view)(torch.tensor([1.0, 1.0]))
    tensor([1., 2.])
    """
    return Pgn(in_range("algorithm.rho", rho, 0), in_range("algorithm.beta", beta, 0, 1, open_low=True))


def blur(lam: float = 0.4) -> Blur:
    """BLUR with weight ``lam`` ≥ 0 (Cheng et al. 2022, Eq. 5); raises InputError. Its threshold is the round's clip.

    >>> view = ClientView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1)
    >>> blur(0.5)(lambda w: 2 * w, view)(torch.tensor([[0.6, 0.0], [3.0, 4.0]]))  # two clients
    tensor([[ 1.2000,  0.0000],
            [ 7.5000, 10.0000]])
    """
    return Blur(in_range("algorithm.lam", lam, 0))


def proximal(mu: float = 0.1) -> Proximal:
    """FedProx's term with weight ``mu`` ≥ 0 (Li et al. 2020); raises InputError.

    >>> view = ClientView(start=torch.ones(2), clip=1.0, steps=1, lr=0.1)
    >>> proximal(0.5)(lambda w: 2 * w, view)(torch.tensor([3.0, 1.0]))
    tensor([7., 2.])
    """
    return Proximal(in_range("algorithm.mu", mu, 0))


def look_ahead(gamma: float = 0.5) -> LookAhead:
    """Return the gradient at w + γ·v with ``gamma`` in [0, 1), v the broadcast vector ``nesterov``; raises InputError.

    >>> v = {"nesterov": torch.tensor([1.0, 0.0])}
    >>> view = ClientView(start=torch.zeros(2), clip=1.0, steps=1, lr=0.1, broadcast=v)
    >>> look_ahead(0.5)(lambda w: 2 * w, view)(torch.tensor([1.0, 1.0]))
    tensor([3., 2.])
    """
    return LookAhead(in_range("algorithm.gamma", gamma, 0, 1, open_high=True))


def compose(outer: GradientRule, inner: GradientRule) -> Composed:
    """Return the rule ``outer`` over the rule ``inner``: ``outer`` sees the gradients that ``inner`` makes.

    >>> compose(sam(0.5), proximal(0.1))
    Composed(outer=Sam(rho=0.5), inner=Proximal(mu=0.1))
    """
    return Composed(outer, inner)


@dataclass(frozen=True)
class LabelPrior:
    """The gradient with the last layer's bias moved by τ·log((π_i + s)/(1 + K·s)), and none along that bias.

    strength: τ ≥ 0; 0 only leaves the bias alone. absent: s > 0, what a class counts that a client does not have.
    The last of the shared tensors is taken to be the bias, of length K.

    >>> tensors, halves = (slice(0, 1), slice(1, 3)), lambda classes: torch.full((classes,), 1 / classes)
    >>> view = ClientView(start=torch.zeros(3), steps=1, lr=0.1, tensors=tensors, shares=halves)
    >>> LabelPrior(strength=1.0, absent=0.01)(lambda w: 2 * w, view)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 0., 0.])
    """

    strength: float
    absent: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        # ``methods.rounds.check_logits`` has made sure that the last shared tensor is the bias of the outputs.
        bias = view.tensors[-1]
        classes = bias.stop - bias.start
        shares = (view.shares(classes) + self.absent) / (1 + classes * self.absent)
        around = (bias.start, view.start.shape[-1] - bias.stop)
        shift = torch.nn.functional.pad(self.strength * torch.log(shares), around)
        mask = 1 - torch.nn.functional.pad(torch.ones_like(shares), around)
        return lambda w: gradient(w + shift) * mask


@dataclass(frozen=True)
class HoldBias(ServerStep):
    """The server step that drops what the noisy mean has for the last layer's bias: noise alone, if clients leave it.

    >>> view = ServerView(0, 1, 0.1, (slice(0, 1), slice(1, 3)), {}, cohort=5.0, clients=50)
    >>> HoldBias()(torch.tensor([1.0, 2.0, 3.0]), view)
    (tensor([1., 0., 0.]), {})
    """

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        held = mean.clone()
        held[view.tensors[-1]] = 0
        return held, {}


def label_prior(strength: float = 1.0, absent: float = 0.01) -> LabelPrior:
    """Logit adjustment with ``strength`` τ ≥ 0 and ``absent`` s in (0, 1] (Menon et al. 2021); raises InputError.

    >>> label_prior(0.5)
    LabelPrior(strength=0.5, absent=0.01)
    """
    in_range("algorithm.strength", strength, 0)
    return LabelPrior(strength, in_range("algorithm.absent", absent, 0, 1, open_low=True))
