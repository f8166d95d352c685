"""Error feedback behind smoothed normalisation (α-NormEC and Fed-α-NormEC, Shulgin et al. 2025).

A client sends C·e/(α + ‖e‖) for e = Δ_i − g_i, what its memory g_i lacks of its update, and adds what it *sent* to g_i.
The server adds (m/M)·(the noisy mean) to its own memory g, which is the mean of all g_i and the noise of the rounds,
and steps along g. A memory of what the clip cut off, added to a message *behind* the clip, would be bounded by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.types import ClientState, ServerView, StateView, UpdateView

MEMORY = "memory"


@dataclass(frozen=True)
class Lacking:
    """The message before it is scaled: Δ_i − g_i."""

    def __call__(self, update: Tensor, view: UpdateView) -> Tensor:
        return update - view.state[MEMORY]


@dataclass(frozen=True)
class OwnMemory:
    """g_i + what was sent."""

    def __call__(self, sent: Tensor, view: StateView) -> Tensor:
        return view.state[MEMORY] + sent


@dataclass(frozen=True)
class MeanMemory:
    """The server's g + (m/M)·mean, which it hands on."""

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {MEMORY: torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        memory = view.slots[MEMORY] + view.cohort / view.clients * mean
        return memory, {MEMORY: memory}


def own_memory() -> ClientState:
    """The client's error memory g_i."""
    return ClientState(MEMORY, OwnMemory())
