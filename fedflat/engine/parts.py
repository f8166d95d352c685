"""Everything a round is made of, bundled once: algorithm, plan, clip, mechanism, server optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, Average, Clip, Local, MeanView, Mechanism, Optimizer, RoundState, broadcast_by
from fedflat.privacy.plan import Plan


@dataclass(frozen=True)
class Parts:
    """What the server and the clients of a run agree on; frozen, and the same in a simulation and a federation.

    optimizer: what is public of a round's noise -> the server optimiser of that round.
    weighted: mean weighted by sample counts; only for the non-private twins and published procedures.
    average: what is released of the iterates; None: the last one.
    first: what round 0 is made of instead, if of something else. threshold: of such a round, its own C.
    """

    algorithm: Algorithm
    plan: Plan
    clip: Clip
    mechanism: Mechanism
    optimizer: Callable[[MeanView], Optimizer]
    local: Local
    layout: Layout
    weighted: bool = False
    average: Average | None = None
    first: Parts | None = None
    threshold: float | None = None

    def of(self, round: int) -> Parts:
        """What a round is made of."""
        return self.first if self.first is not None and round == 0 else self

    def first_state(self, shared: Tensor, threshold: float) -> RoundState:
        """The server before round 0."""
        slots: dict[str, Tensor] = {}
        for step in self.algorithm.server:
            slots.update(step.initial(shared))
        return RoundState(0, shared.clone(), threshold, slots)

    @property
    def message_length(self) -> int:
        """Entries of a client's message: k·d."""
        return self.algorithm.vectors * self.layout.dimension

    @property
    def message_tensors(self) -> tuple[slice, ...]:
        """The slice of each shared tensor in a message, for each of its k vectors."""
        starts = range(0, self.message_length, self.layout.dimension)
        return tuple(slice(at + s.start, at + s.stop) for at in starts for s in self.layout.tensors("shared"))

    @property
    def broadcast(self) -> tuple[str, ...]:
        """The slots that every client receives, as the server steps and the server optimiser say."""
        return broadcast_by((*self.algorithm.server, self.algorithm.optimizer))
