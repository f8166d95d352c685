"""Control variates under client-level privacy (SCAFFOLD, Karimireddy et al. 2020; DP-SCAFFOLD, Noble et al. 2022).

Local steps w ← w − η(g − c_i + c) leave Δw = w_K − w^t. With c_i⁺ = c_i − c − Δw/(Kη), a client sends (Δw, Δc/b) for
Δc = c_i⁺ − c_i, clipped as one vector to C: the noise on the sum is σC on the first part and, in units of c, σCb on
the second. It keeps c_i + b·(the second part of what it *sent*), and the server c + (m/M)·b·(the noisy mean's second
part): so c is the mean of all c_i, and the noise of the rounds, a random walk of std σCb√T/M, which nothing pulls back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.types import ClientState, GradientFn, LocalView, ServerView, StateView, UpdateView

CONTROL = "control"


@dataclass(frozen=True)
class Corrected:
    """The gradient rule g − c_i + c."""

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        return lambda w: gradient(w) - view.state[CONTROL] + view.broadcast[CONTROL]


@dataclass(frozen=True)
class WithControl:
    """The message (Δw, Δc/b) ``(…, 2d)``. scale: b > 0."""

    scale: float

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        change = -view.broadcast[CONTROL] - update / (view.steps * view.lr)
        return torch.cat([update, change / self.scale], -1)


@dataclass(frozen=True)
class OwnControl:
    """c_i + b·(the second part of what was sent)."""

    scale: float

    def __call__(self, sent: Tensor, view: StateView) -> Tensor:
        return view.state[CONTROL] + self.scale * sent.chunk(2)[1]


@dataclass(frozen=True)
class MeanControl:
    """The server's c + (m/M)·b·(the mean's second part); hands the first part on."""

    scale: float
    broadcast: ClassVar[tuple[str, ...]] = (CONTROL,)

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        update, change = mean.chunk(2)
        return update, {CONTROL: view.slots[CONTROL] + view.cohort / view.clients * self.scale * change}


def own_control(scale: float) -> ClientState:
    """The client's control variate c_i."""
    return ClientState(CONTROL, OwnControl(scale))
