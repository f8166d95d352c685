"""Everything a round is made of, bundled once: algorithm, plan, clip, mechanism, server optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedflat.core.params import Layout
from fedflat.core.types import Aggregate, Algorithm, Broadcast, Clip, Local, MeanView, Optimizer, RoundState
from fedflat.privacy.plan import Plan


class Mechanism(Protocol):
    """The source of a round's noise."""

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Noise ``(d,)`` on the sum, for the L2 bound the clip reports."""

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """The adaptive clip's centred count with its noise."""


@runtime_checkable
class ScaledMechanism(Mechanism, Protocol):
    """A mechanism whose noise can be drawn before the cohort is known: ``noise`` is ``scaled`` of ``unit``."""

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """N(0, I) ``(size,)`` of a round."""

    def scaled(self, unit: Tensor, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The round's noise from its ``unit``, which is overwritten."""


class Encoder(Protocol):
    """The whole-number sum of a round's clipped messages."""

    total: np.ndarray

    def add(self, clipped: Tensor) -> None:
        """Add clipped messages ``(n, d)``."""

    def value(self) -> Tensor | None:
        """The exact sum in the update's units, float64 ``(d,)``; None where only the plain clipped sum is readable."""


@runtime_checkable
class GridMechanism(Mechanism, Protocol):
    """A mechanism on whole numbers (secure grid noise, ddgauss): it encodes messages and releases their sum itself."""

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float) -> Encoder:
        """A fresh sum for one round."""

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """``aggregate.exact`` with noise, float32 ``(d,)`` in the update's units."""


@dataclass(frozen=True)
class Parts:
    """What the server and the clients of a run agree on; frozen, and the same in a simulation and a federation.

    optimizer: what is public of a round's noise -> the server optimiser of that round.
    weighted: mean weighted by sample counts; only for the non-private twins and published procedures.
    """

    algorithm: Algorithm
    plan: Plan
    clip: Clip
    mechanism: Mechanism
    optimizer: Callable[[MeanView], Optimizer]
    local: Local
    layout: Layout
    weighted: bool = False

    def first_state(self, shared: Tensor, threshold: float) -> RoundState:
        """The server before round 0."""
        slots: dict[str, Tensor] = {}
        for step in self.algorithm.server:
            slots.update(step.initial(shared))
        return RoundState(0, shared.clone(), threshold, slots)
