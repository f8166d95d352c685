"""What is released of the server's iterates: an average of them takes noise off for nothing (post-processing).

Training goes on from the last iterate; only what is released, and evaluated, is the average. Which one is fixed before
the run: by the planned rounds or a stated decay, never by how the rounds went.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.checks import in_range, whole


@dataclass(frozen=True)
class TailAverage:
    """The mean of the iterates after the first ⌊T/2⌋ of T planned rounds; the last iterate until then.

    Under SGD without momentum the mean of k iterates whose steps have independent noise keeps about a third of the
    noise that those k steps add to the last one.

    >>> tail, first = TailAverage(rounds=4), torch.tensor([1.0])
    >>> tail(2, first, None) is None, tail(4, torch.tensor([3.0]), tail(3, first, None))
    (True, tensor([2.]))
    """

    rounds: int

    def __post_init__(self) -> None:
        whole("server.average: rounds", self.rounds, 1)

    def __call__(self, round: int, shared: Tensor, average: Tensor | None) -> Tensor | None:
        """After ``round`` ≥ 1 rounds: w^t ``(d,)`` and the average so far -> the average now, None before it begins."""
        counted = round - self.rounds // 2
        if counted < 1:
            return None
        return shared.clone() if average is None else torch.lerp(average, shared, 1 / counted)


@dataclass(frozen=True)
class MovingAverage:
    """a ← decay·a + (1 − decay)·w^t; the plain mean while fewer than 1/(1 − decay) rounds are done.

    >>> MovingAverage(decay=0.9)(2, torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """

    decay: float

    def __post_init__(self) -> None:
        in_range("server.decay", self.decay, 0, 1, open_high=True)

    def __call__(self, round: int, shared: Tensor, average: Tensor | None) -> Tensor | None:
        """As ``TailAverage``."""
        return shared.clone() if average is None else torch.lerp(average, shared, max(1 - self.decay, 1 / round))
