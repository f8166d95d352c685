"""Control variates under client-level privacy (SCAFFOLD, Karimireddy et al. 2020; DP-SCAFFOLD, Noble et al. 2022).

Local steps w ← w − η(g − c_i + c) leave Δw = w_K − w^t. With c_i⁺ = c_i − c − Δw/(Kη), a client sends (Δw, Δc/b) for
Δc = c_i⁺ − c_i, clipped as one vector to C: the noise on the sum is σC on the first part and, in units of c, σCb on
the second. It keeps c_i + b·(the second part of what it *sent*), and the server c + (m/M)·b·(the noisy mean's second
part): so c is the mean of all c_i, and the noise of the rounds, a random walk of std σCb√T/M, which nothing pulls back.

All four pieces are those of ``fedflat.algorithms.dp_scaffold``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.types import ClientState, GradientFn, LocalView, ServerView, StateView, UpdateView

CONTROL = "control"


@dataclass(frozen=True)
class ScaffoldGradient:
    """The gradient rule g − c_i + c: c_i the client's state, c the broadcast vector, both named ``control``.

    >>> variates = {"state": {CONTROL: torch.tensor([1.0])}, "broadcast": {CONTROL: torch.tensor([0.25])}}
    >>> ScaffoldGradient()(lambda w: 2 * w, LocalView(torch.zeros(1), 1.0, 1, 0.1, **variates))(torch.tensor([3.0]))
    tensor([5.2500])
    """

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        return lambda w: gradient(w) - view.state[CONTROL] + view.broadcast[CONTROL]


@dataclass(frozen=True)
class ScaffoldMessage:
    """The transform that makes the message (Δw, Δc/b), ``(…, d)`` -> ``(…, 2d)``. scale: b > 0.

    >>> view = UpdateView((slice(0, 1),), lambda: torch.ones(1), 10, 0.1, broadcast={CONTROL: torch.tensor([0.25])})
    >>> ScaffoldMessage(scale=2.0)(torch.tensor([-0.5]), view)  # Δc = −c − Δw/(Kη) = 0.25
    tensor([-0.5000,  0.1250])
    """

    scale: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        change = -view.broadcast[CONTROL] - update / (view.steps * view.lr)
        return torch.cat([update, change / self.scale], -1)


@dataclass(frozen=True)
class ClientControl:
    """The client's new control variate: c_i + b·(the second part of what was sent). scale: b > 0.

    >>> view = StateView(broadcast={}, state={CONTROL: torch.tensor([1.0])}, steps=10, lr=0.1)
    >>> ClientControl(scale=2.0)(torch.tensor([-0.5, 0.125]), view)
    tensor([1.2500])
    """

    scale: float

    def __call__(self, sent: Tensor, view: StateView) -> Tensor:
        return view.state[CONTROL] + self.scale * sent.chunk(2)[1]


@dataclass(frozen=True)
class ServerControl:
    """The server step c ← c + (m/M)·b·(the mean's second part); hands on the first part. scale: b > 0.

    >>> view = ServerView(0, 10, 0.1, (slice(0, 1),), {CONTROL: torch.zeros(1)}, cohort=5.0, clients=50)
    >>> ServerControl(scale=2.0)(torch.tensor([-0.5, 0.125]), view)
    (tensor([-0.5000]), {'control': tensor([0.0250])})
    """

    scale: float
    broadcast: ClassVar[tuple[str, ...]] = (CONTROL,)

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        update, change = mean.chunk(2)
        return update, {CONTROL: view.slots[CONTROL] + view.cohort / view.clients * self.scale * change}


def client_control(scale: float) -> ClientState:
    """The client state of DP-SCAFFOLD: the control variate c_i ``(d,)``, zero at first. scale: b > 0.

    >>> client_control(2.0).name
    'control'
    """
    return ClientState(CONTROL, ClientControl(scale))
