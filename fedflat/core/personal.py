"""Personal parts: each client's head stays with the client, and outside the guarantee for the shared part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import NO_GENERATOR


@dataclass(frozen=True)
class ClientContext:
    """What a client, or each client of a block, brings to its training besides its data and weights.

    state: its named vectors ``(…, d)``. generator: its own randomness of the round; a block has none.
    """

    state: Mapping[str, Tensor] = field(default_factory=dict)
    generator: np.random.Generator = NO_GENERATOR


NOTHING = ClientContext()


@dataclass
class PersonalState:
    """What clients keep: their personal parameters and their named states. A client never sampled has w^0's head and
    states of zeros.

    first: ``(D − d,)``. kept: client id -> head, only for clients that have trained. states: name -> client id -> (d,).
    """

    first: Tensor
    kept: dict[int, Tensor] = field(default_factory=dict)
    states: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def of(self, client: int) -> Tensor:
        """The head of a client ``(D − d,)``."""
        return self.kept.get(int(client), self.first)

    def keep(self, client: int, head: Tensor) -> None:
        """Store a client's head after local training; a head that is not finite is not kept."""
        if head.numel() and bool(torch.isfinite(head).all()):
            self.kept[int(client)] = head.detach().cpu().clone()

    def state(self, name: str, client: int, like: Tensor) -> Tensor:
        """A client's named state, shaped and placed as ``like`` ``(d,)``: a copy, which only ``remember`` moves."""
        found = self.states.get(name, {}).get(int(client))
        return torch.zeros_like(like) if found is None else found.to(like.device, copy=True)

    def remember(self, name: str, client: int, value: Tensor) -> None:
        """Store a client's new state; one that is not finite is not kept."""
        if bool(torch.isfinite(value).all()):
            self.states.setdefault(name, {})[int(client)] = value.detach().cpu().clone()

    def copy(self) -> PersonalState:
        """The same vectors; what is stored later is not in it."""
        return PersonalState(self.first, dict(self.kept), {name: dict(found) for name, found in self.states.items()})

    def whole(self, shared: Tensor, client: int) -> Tensor:
        """A fresh vector ``(D,)``: the shared part with the client's own head behind it."""
        return torch.cat([shared, self.of(client).to(shared.device)])

    def pack(self) -> dict[str, Tensor]:
        """Heads and states as named tensors, for the private half of a checkpoint."""
        found = _packed("heads", self.kept, self.first.numel()) if self.first.numel() else {}
        for name, kept in self.states.items():
            found |= _packed(STATE + name, kept, 0)
        return found

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what clients keep from a checkpoint."""
        self.kept = _unpacked("heads", tensors) if "heads.ids" in tensors else {}
        names = [name.removesuffix(".ids") for name in tensors if name.startswith(STATE) and name.endswith(".ids")]
        self.states = {name.removeprefix(STATE): _unpacked(name, tensors) for name in names}


STATE = "state."
"""Before the name of a client state in a checkpoint's private half."""


def _packed(name: str, kept: Mapping[int, Tensor], width: int) -> dict[str, Tensor]:
    ids = sorted(kept)
    stacked = torch.stack([kept[i] for i in ids]) if ids else torch.zeros(0, width)
    return {f"{name}.ids": torch.tensor(ids, dtype=torch.int64), f"{name}.values": stacked}


def _unpacked(name: str, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {int(i): v.clone() for i, v in zip(tensors[f"{name}.ids"], tensors[f"{name}.values"])}
