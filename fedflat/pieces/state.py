"""Keep state between rounds: control variates, error feedback, and the server's Kalman filter.

Local steps w ← w − η(g − c_i + c) leave Δw = w_K − w^t. With c_i⁺ = c_i − c − Δw/(Kη), a client sends (Δw, Δc/b) for
Δc = c_i⁺ − c_i, clipped as one vector to C: the noise on the sum is σC on the first part and, in units of c, σCb on
the second. It keeps c_i + b·(the second part of what it *sent*), and the server c + (m/M)·b·(the noisy mean's second
part): so c is the mean of all c_i, and the noise of the rounds, a random walk of std σCb√T/M, which nothing pulls back.

All four pieces are those of ``fedflat.algorithms.dp_scaffold``.

A client sends C·e/(α + ‖e‖) for e = Δ_i − g_i, what its memory g_i lacks of its update, and adds what it *sent* to g_i.
The server adds (m/M)·(the noisy mean) to its direction g, which is the mean of all g_i and the noise of the rounds,
and steps along g. A memory of what the clip cut off, added to a message *behind* the clip, would be bounded by nothing.

All three pieces are those of ``fedflat.algorithms.fed_normec``.

It predicts a round's mean from its estimate and from how the gradient changes along the model's last move d, and
corrects that: g̃ ← (1−κ)·(g̃ + [g(w + γd) − g(w)]/γ) + κ·g(w). The change is private data, so it is part of what each
client sends, a·g(w + γd) + (1−a)·g(w) with a = (1−κ)/(κγ): one message, clipped whole to C whatever a is. d is what two
released models differ by, and the filter post-processes. A client's K steps are in place of an example's gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core import ClientView, GradientFn, MeanView, Optimizer, ServerStep, ServerView, in_range

CONTROL = "control"


@dataclass(frozen=True)
class ScaffoldGradient:
    """The gradient rule g − c_i + c: c_i the client's state, c the broadcast vector, both named ``control``.

    >>> variates = {"state": {CONTROL: torch.tensor([1.0])}, "broadcast": {CONTROL: torch.tensor([0.25])}}
    >>> ScaffoldGradient()(lambda w: 2 * w, ClientView(steps=1, lr=0.1, **variates))(torch.tensor([3.0]))
    tensor([5.2500])
    """

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        return lambda w: gradient(w) - view.state[CONTROL] + view.broadcast[CONTROL]


@dataclass(frozen=True)
class ScaffoldMessage:
    """The transform that makes the message (Δw, Δc/b), ``(…, d)`` -> ``(…, 2d)``. scale: b > 0.

    >>> view = ClientView(steps=10, lr=0.1, broadcast={CONTROL: torch.tensor([0.25])})
    >>> ScaffoldMessage(scale=2.0)(torch.tensor([-0.5]), view)  # Δc = −c − Δw/(Kη) = 0.25
    tensor([-0.5000,  0.1250])
    """

    scale: float

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        change = -view.broadcast[CONTROL] - update / (view.steps * view.lr)
        return torch.cat([update, change / self.scale], -1)


@dataclass(frozen=True)
class ClientControl:
    """The client's new control variate: c_i + b·(the second part of what was sent). scale: b > 0.

    >>> view = ClientView(broadcast={}, state={CONTROL: torch.tensor([1.0])}, steps=10, lr=0.1)
    >>> ClientControl(scale=2.0)(torch.tensor([-0.5, 0.125]), view)
    tensor([1.2500])
    """

    scale: float

    def __call__(self, sent: Tensor, view: ClientView) -> Tensor:
        return view.state[CONTROL] + self.scale * sent.chunk(2)[1]


@dataclass(frozen=True)
class ServerControl(ServerStep):
    """The server step c ← c + (m/M)·b·(the mean's second part); hands on the first part. scale: b > 0.

    >>> view = ServerView(0, 10, 0.1, (slice(0, 1),), {CONTROL: torch.zeros(1)}, cohort=5.0, clients=50)
    >>> ServerControl(scale=2.0)(torch.tensor([-0.5, 0.125]), view)
    (tensor([-0.5000]), {'control': tensor([0.0250])})
    """

    scale: float
    broadcast: ClassVar[tuple[str, ...]] = (CONTROL,)

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        update, change = mean.chunk(2)
        return update, {CONTROL: view.slots[CONTROL] + view.cohort / view.clients * self.scale * change}


MEMORY = "memory"


@dataclass(frozen=True)
class Residual:
    """The transform Δ_i − g_i, ``(…, d)`` -> ``(…, d)``: what the client's memory lacks of its update.

    >>> view = ClientView(steps=10, lr=0.1, state={MEMORY: torch.tensor([2.0])})
    >>> Residual()(torch.tensor([3.0]), view)
    tensor([1.])
    """

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        return update - view.state[MEMORY]


@dataclass(frozen=True)
class ClientMemory:
    """The client's new error memory: g_i + what was sent, ``(d,)``.

    >>> ClientMemory()(torch.tensor([0.5]), ClientView(steps=10, lr=0.1, state={MEMORY: torch.tensor([2.0])}))
    tensor([2.5000])
    """

    def __call__(self, sent: Tensor, view: ClientView) -> Tensor:
        return view.state[MEMORY] + sent


@dataclass(frozen=True)
class FeedbackDirection:
    """The server step g ← g + (m/M)·mean; hands on g ``(d,)``.

    >>> view = ServerView(0, 10, 0.1, (slice(0, 1),), {MEMORY: torch.tensor([1.0])}, cohort=5.0, clients=50)
    >>> FeedbackDirection()(torch.tensor([2.5]), view)
    (tensor([1.2500]), {'memory': tensor([1.2500])})
    """

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {MEMORY: torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        memory = view.slots[MEMORY] + view.cohort / view.clients * mean
        return memory, {MEMORY: memory}


@dataclass(frozen=True)
class Mixture:
    """a·g(w + γd) + (1−a)·g(w) on the same minibatch; one gradient where a = 1. d is zero before the model moved."""

    gamma: float
    weight: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        if (moved := view.broadcast.get("moved")) is None:
            return gradient
        offset, rest = self.gamma * moved, 1 - self.weight
        return lambda w: self.weight * gradient(w + offset) + (rest * gradient(w) if rest else 0.0)


@dataclass(frozen=True)
class Filter:
    """The server: g̃ ← (1−κ)·g̃ + κ·mean, from the first mean on, then w ← w + lr·g̃, a move that is broadcast."""

    kappa: float
    broadcast: ClassVar[tuple[str, ...]] = ("moved",)

    def __call__(self, lr: float, view: MeanView) -> Optimizer:
        def step(w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            # The first mean is its own estimate: there is no move yet to predict from.
            estimate = torch.lerp(slots.get("estimate", mean), mean, self.kappa)
            return w + lr * estimate, {"estimate": estimate, "moved": lr * estimate}

        return step


def disk(kappa: float = 0.7, ahead: float | None = None) -> tuple[Mixture, Filter]:
    """Return both sides for a gain ``kappa`` in (0, 1] and γ = ``ahead`` > 0; None: (1−κ)/κ, at which a = 1.

    >>> rule, server = disk(kappa=0.5, ahead=2.0)
    >>> rule.weight, server.kappa
    (0.5, 0.5)
    """
    in_range("algorithm.kappa", kappa, 0, 1, open_low=True)
    if ahead is None:
        return Mixture((1 - kappa) / kappa, 1.0), Filter(kappa)
    in_range("algorithm.ahead", ahead, 0, open_low=True)
    return Mixture(ahead, (1 - kappa) / (kappa * ahead)), Filter(kappa)
