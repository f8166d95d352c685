"""Where the noise of a round comes from. std is always that of the noise on the *sum*; the plan computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Broadcast


def gaussian(size: int, std: float, generator: np.random.Generator) -> Tensor:
    """N(0, std² I) as a float32 vector ``(size,)``; exactly zero for std = 0.

    >>> gaussian(3, 2.0, np.random.default_rng(0)).dtype, gaussian(2, 0.0, np.random.default_rng(0))
    (torch.float32, tensor([0., 0.]))
    """
    if std == 0:
        return torch.zeros(size)
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32)).mul_(std)


@dataclass(frozen=True)
class GaussianNoise:
    """Gaussian noise on the sum, drawn once from the noise key's stream of the round.

    std: the plan's function from the clip's bound C to the std of the noise. trust: in law the same total as the
    parties of the trust model add together — central: the server adds N(0, std²); distributed: each of n
    participants adds N(0, std²/min_cohort), n/min_cohort·std² in total; local: each of n adds N(0, std²), n·std² in
    total. min_cohort: the minimum cohort. count_std: σ_b of the adaptive clip's count, 0 if there is none.
    """

    std: Callable[[float], float]
    trust: str = "central"
    min_cohort: float = 1.0
    count_std: float = 0.0

    def total_std(self, bound: float, participants: float) -> float:
        """Std of everything that is added to the sum when ``participants`` clients take part."""
        shares = {"central": 1.0, "distributed": participants / self.min_cohort, "local": participants}[self.trust]
        return self.std(bound) * math.sqrt(shares)

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """N(0, I) ``(size,)`` of a round: what ``noise`` multiplies with the std."""
        return gaussian(size, 1.0, stream(key, "noise", round))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Noise ``(d,)`` float32; confined to the common mask if the round has one."""
        size, std = aggregate.total.numel(), self.total_std(bound, aggregate.count)
        unit = torch.zeros(size) if std == 0 else self.unit(key, round, size)
        return self.scaled(unit, broadcast, aggregate, bound)

    def scaled(self, unit: Tensor, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The noise of a round from its ``unit``, which is overwritten: times the std, confined to the common mask."""
        drawn = unit.mul_(self.total_std(bound, aggregate.count))
        # Sound: a common mask is drawn before, and without, the round's private data.
        return drawn if broadcast.mask is None else torch.where(broadcast.mask, drawn, torch.zeros_like(drawn))

    def count_noise(self, key: bytes, round: int) -> float:
        """N(0, σ_b²), as the plan accounts it."""
        return float(stream(key, "count noise", round).standard_normal() * self.count_std)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """The adaptive clip's centred count with its noise; distributed: n/min_cohort·σ_b² of it, as for the sum."""
        shares = aggregate.count / self.min_cohort if self.trust == "distributed" else 1.0
        return aggregate.bits + self.count_noise(key, round) * math.sqrt(shares)
