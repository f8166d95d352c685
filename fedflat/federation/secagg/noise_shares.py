"""The server's part of a noisy sum to which each client has added its share of the noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.types import Aggregate, Broadcast, Clip
from fedflat.methods.ddgauss.mechanism import SharedDiscreteNoise


@dataclass
class ClientsSum:
    """The round's whole-number sum, with the clients' noise in it; no vector of a client is ever here."""

    dimension: int
    total: np.ndarray
    count: int = 0
    divisor: None = None

    def take(self, total: np.ndarray, count: int) -> None:
        """The unmasked sum of ``count`` clients."""
        self.total, self.count = total, count

    def result(self) -> Aggregate:
        """The aggregate; norms and the plain sum are nobody's to know."""
        nothing = torch.zeros(0, dtype=torch.float64)
        unknown = torch.zeros(self.dimension, dtype=torch.float64)
        return Aggregate(unknown, self.count, 0.0, nothing, nothing, {}, self.total)


@dataclass(frozen=True)
class ClientShares:
    """The distributed discrete Gaussian where each client has added its share: the server tops up to n_max, and
    decodes.
    """

    inner: SharedDiscreteNoise

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> ClientsSum:
        """Where the round's sum goes."""
        return ClientsSum(self.inner.mechanism.dimension, np.zeros(self.inner.mechanism.padded, dtype=np.int64))

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float, size: int) -> Any:
        """Refused: in a deployment clients encode their own messages."""
        raise NotImplementedError("clients encode their own updates")

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The decoded noisy sum, float32 ``(d,)``, with n_max shares in it."""
        total = (
            aggregate.exact if aggregate.exact is not None else np.zeros(self.inner.mechanism.padded, dtype=np.int64)
        )
        lacking = (self.inner.shares or aggregate.count) - aggregate.count
        if lacking > 0:
            rest = replace(self.inner, shares=lacking)
            return rest.release(key, broadcast, replace(aggregate, exact=total), bound)
        return self.inner.mechanism.decode(total, self.inner._signs(broadcast))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """None of its own: it is in the sum."""
        return torch.zeros_like(aggregate.total)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Refused: the grid is made for one clip."""
        return self.inner.noisy_count(key, round, aggregate)
