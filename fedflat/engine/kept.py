"""What stays with a client: its head, and its states, moved by what was added of its message and by nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.core.personal import PersonalState
from fedflat.core.types import Algorithm, Broadcast, Local, StateView
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.client import LocalResult, rate_of, steps_of
from fedflat.engine.device import sent


def states_of(algorithm: Algorithm, heads: PersonalState, client: int, shared: Tensor) -> dict[str, Tensor]:
    """A client's named states ``(d,)``, where ``shared`` lies."""
    return {state.name: heads.state(state.name, client, shared) for state in algorithm.client_state}


def add_trained(
    accumulator: Accumulator,
    heads: PersonalState,
    algorithm: Algorithm,
    local: Local,
    broadcast: Broadcast,
    client: int,
    size: int,
    result: LocalResult,
) -> None:
    """Add a trained client's message ``(k·d,)``, and keep its head and its states. size: its number of examples."""
    heads.keep(client, result.personal)
    facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
    factors = accumulator.add(result.message[None], [size], facts)
    if not algorithm.client_state:
        return
    added = as_added(result.message.to(factors.device), factors[0], accumulator.tensors)
    told, phase = sent(broadcast, added.device).own(), algorithm.shared_phase
    before = states_of(algorithm, heads, client, told.shared)
    view = StateView(told.vectors, before, steps_of(phase, local.of(size)), rate_of(phase, local, told))
    for state in algorithm.client_state:
        heads.remember(state.name, client, state.next(added, view).reshape(told.shared.shape))


def as_added(message: Tensor, factors: Tensor, tensors: tuple[slice, ...]) -> Tensor:
    """A message ``(k·d,)`` as it is in the sum: times its factor ``()``, or one for each tensor ``(L,)``; float32."""
    whole = torch.nan_to_num(message.double(), nan=0.0, posinf=0.0, neginf=0.0)
    if factors.dim() == 0:
        return (whole * factors).to(torch.float32)
    return torch.cat([whole[where] * factor for where, factor in zip(tensors, factors)]).to(torch.float32)
