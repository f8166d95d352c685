"""Error feedback behind smoothed normalisation (α-NormEC and Fed-α-NormEC, Shulgin et al. 2025a, 2025b).

A client sends C·e/(α + ‖e‖) for e = Δ_i − g_i, what its memory g_i lacks of its update, and adds what it *sent* to g_i.
The server adds (m/M)·(the noisy mean) to its direction g, which is the mean of all g_i and the noise of the rounds,
and steps along g. A memory of what the clip cut off, added to a message *behind* the clip, would be bounded by nothing.

All three pieces are those of ``fedflat.algorithms.fed_normec``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.types import ClientState, ServerView, StateView, UpdateView

MEMORY = "memory"


@dataclass(frozen=True)
class Residual:
    """The transform Δ_i − g_i, ``(…, d)`` -> ``(…, d)``: what the client's memory lacks of its update.

    >>> view = UpdateView((slice(0, 1),), lambda: torch.ones(1), 10, 0.1, state={MEMORY: torch.tensor([2.0])})
    >>> Residual()(torch.tensor([3.0]), view)
    tensor([1.])
    """

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update - view.state[MEMORY]


@dataclass(frozen=True)
class ClientMemory:
    """The client's new error memory: g_i + what was sent, ``(d,)``.

    >>> ClientMemory()(torch.tensor([0.5]), StateView({}, {MEMORY: torch.tensor([2.0])}, 10, 0.1))
    tensor([2.5000])
    """

    def __call__(self, sent: Tensor, view: StateView) -> Tensor:
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


def client_memory() -> ClientState:
    """The client state of Fed-α-NormEC: the error memory g_i ``(d,)``, zero at first.

    >>> client_memory().name
    'memory'
    """
    return ClientState(MEMORY, ClientMemory())
