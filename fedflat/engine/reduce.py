"""Reduce a round: add up what a back end's clients send, and keep what stays with each of them.

A back end maps: ``train(cohort, broadcast, kept, clipped)`` yields parts of the round, in client order. Each part adds
itself to the round's sum; a block's part may have been clipped and summed where it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.core.params import PersonalState
from fedflat.core.types import Algorithm, Broadcast, ClientView, Local
from fedflat.engine.accumulate import EMPTY, Accumulator, PlainSum
from fedflat.engine.client import LocalResult, rate_of, steps_of
from fedflat.engine.device import sent
from fedflat.engine.factored import Factored


def states_of(algorithm: Algorithm, heads: PersonalState, client: int, shared: Tensor) -> dict[str, Tensor]:
    """Return a client's named states ``(d,)``, where ``shared`` lies."""
    return {state.name: heads.state(state.name, client, shared) for state in algorithm.client_state}


@dataclass(frozen=True)
class Trained:
    """Messages ``(n, k·d)`` of n trained clients, not yet clipped, and what stays with each.

    sizes: numbers of examples, ``EMPTY`` in a row without a client. clients: the rows' ids; none where nothing stays.
    personal: heads ``(n, D − d)``. facts: named figures ``(n,)``, private to the simulation.
    """

    messages: Tensor
    sizes: Sequence[int]
    clients: Sequence[int] = ()
    personal: Tensor | None = None
    facts: Mapping[str, Tensor] | None = None

    @classmethod
    def of(cls, clients: Sequence[int], sizes: Sequence[int], result: LocalResult) -> Trained:
        """Return the results of a block of clients, or of one."""
        one = result.loss.dim() == 0
        message, personal = (result.message[None], result.personal[None]) if one else (result.message, result.personal)
        return cls(message, sizes, clients, personal, {"train_loss": result.loss, "train_accuracy": result.accuracy})

    def row(self, row: int) -> Trained:
        """Return one client's part of a block, as a copy."""
        personal, at = self.personal, slice(row, row + 1)
        head = None if personal is None else personal[at].clone()
        facts = {name: value[at].clone() for name, value in (self.facts or {}).items()}
        return Trained(self.messages[at].clone(), self.sizes[at], self.clients[at], head, facts)

    @classmethod
    def nothing(cls, clients: int, length: int) -> Trained:
        """Return what so many clients without data send: zeros ``(n, length)``."""
        return cls(torch.zeros(1, length).expand(clients, -1), [0] * clients)

    def add_to(self, total: Accumulator) -> Tensor | None:
        """Clip the messages and add them; return what multiplied each of them."""
        return total.add(self.messages, self.sizes, self.facts)


@dataclass(frozen=True)
class Summed:
    """A block's messages, clipped and added up where they were computed. Fields: as of ``Trained``."""

    part: PlainSum
    clients: Sequence[int]
    personal: Tensor | None

    def add_to(self, total: PlainSum) -> None:
        """Add the block's sum to the round's."""
        total.merge(self.part)


@dataclass(frozen=True)
class RoundSum:
    """The reducing half of a round: adds what a back end's clients send, and keeps what stays with them.

    ``for part in backend.train(cohort, broadcast, kept, reduced.clipped): reduced.add(part)``
    """

    algorithm: Algorithm
    local: Local
    broadcast: Broadcast
    total: Any
    kept: PersonalState

    def add_cohort(self, backend: Backend, cohort: np.ndarray) -> None:
        """Let a back end train a cohort and add all that it gives."""
        for part in backend.train(cohort, self.broadcast, self.kept, self.clipped):
            self.add(part)

    def clipped(self, block: Trained) -> Part:
        """Return a block's clipped sum, where the round's sum may be made in parts; else the block as it is.

        A back end calls it where it computes. A block that comes back unsummed is given to the round one client after
        the other: its sum draws noise for each, or clients' states wait for the factor that they were added with.
        """
        # Any other sum asks for its messages one by one, in client order.
        if not isinstance(self.total, PlainSum) or self.algorithm.client_state:
            return block
        messages = block.messages
        if isinstance(messages, Factored):
            # Places without a client are computed on zeros; as factors they may still hold w^t.
            messages = messages.without(torch.tensor([size == EMPTY for size in block.sizes], device=messages.device))
        part = self.total.part(messages.device)
        part.add(messages, block.sizes, block.facts)
        return Summed(part, block.clients, block.personal)

    def add(self, part: Part) -> None:
        """Add to the round's sum; keep each client's head and states. Parts of one round come in client order."""
        factors = part.add_to(self.total)
        if part.personal is None:
            return
        for row, client in enumerate(part.clients):
            if client != EMPTY:
                self.kept.keep(client, part.personal[row])
        # A state moves by the message as it was added, so it waits for the clip's factor.
        if self.algorithm.client_state and isinstance(part, Trained) and factors is not None:
            for row, client in enumerate(part.clients):
                self._keep_state(client, part.sizes[row], part.messages[row], factors[row])

    def _keep_state(self, client: int, size: int, message: Tensor, factors: Tensor) -> None:
        added = as_added(message.to(factors.device), factors, self.total.tensors)
        # Vectors of its own: what a state's function writes reaches nobody else.
        broadcast, phase = sent(self.broadcast, added.device).for_one_client(), self.algorithm.shared_phase
        before = states_of(self.algorithm, self.kept, client, broadcast.shared)
        steps, rate = steps_of(phase, self.local.of(size)), rate_of(phase, self.local, broadcast)
        view = ClientView(broadcast=broadcast.vectors, state=before, steps=steps, lr=rate)
        for state in self.algorithm.client_state:
            self.kept.remember(state.name, client, state.next(added, view).reshape(broadcast.shared.shape))


class Part(Protocol):
    """Some of a round's messages, or their sum, which adds itself to the round's."""

    @property
    def clients(self) -> Sequence[int]: ...
    @property
    def personal(self) -> Tensor | None: ...
    def add_to(self, total: Any) -> Tensor | None: ...


Clipped = Callable[[Trained], Part]


class Backend(Protocol):
    """Maps local training over a cohort; the round adds up what it yields.

    kept: what clients keep between rounds, to be read only. clipped: ``RoundSum.clipped``.
    """

    name: str

    def train(
        self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[Part]: ...


def as_added(message: Tensor, factors: Tensor, tensors: tuple[slice, ...]) -> Tensor:
    """Return a message ``(k·d,)`` as it is in the sum: times its factor ``()``, or one for each tensor ``(L,)``;
    float32.
    """
    whole = torch.nan_to_num(message.double(), nan=0.0, posinf=0.0, neginf=0.0)
    if factors.dim() == 0:
        return (whole * factors).to(torch.float32)
    return torch.cat([whole[where] * factor for where, factor in zip(tensors, factors)]).to(torch.float32)
