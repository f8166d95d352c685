"""Personal parts: each client's head stays with the client, and outside the guarantee for the shared part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Heads:
    """The clients' personal parameters; a client never sampled has w^0's head.

    first: ``(D − d,)``. kept: client id -> head, only for clients that have trained.
    """

    first: Tensor
    kept: dict[int, Tensor] = field(default_factory=dict)

    def of(self, client: int) -> Tensor:
        """The head of a client ``(D − d,)``."""
        return self.kept.get(int(client), self.first)

    def keep(self, client: int, head: Tensor) -> None:
        """Store a client's head after local training; a head that is not finite is not kept."""
        if head.numel() and bool(torch.isfinite(head).all()):
            self.kept[int(client)] = head.detach().cpu().clone()

    def whole(self, shared: Tensor, client: int) -> Tensor:
        """A fresh vector ``(D,)``: the shared part with the client's own head behind it."""
        return torch.cat([shared, self.of(client).to(shared.device)])

    def pack(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        ids = sorted(self.kept)
        stacked = torch.stack([self.kept[i] for i in ids]) if ids else torch.zeros(0, self.first.numel())
        return {"heads.ids": torch.tensor(ids, dtype=torch.int64), "heads.values": stacked}

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the heads of a checkpoint."""
        self.kept = {int(i): v.clone() for i, v in zip(tensors["heads.ids"], tensors["heads.values"])}
