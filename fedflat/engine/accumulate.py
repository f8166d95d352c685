"""Clip a round's messages and add them up: the plain sum, and the sum on whole numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.core import rounding
from fedflat.core.checks import RunError
from fedflat.core.rounding import MOST
from fedflat.core.types import Aggregate, Clip, Encoder
from fedflat.engine.factored import Factored
from fedflat.engine.measured import add_clipped

AT_ONCE = 1 << 26
"""Entries of a block of messages that a GPU takes in float64 at once (512 MB)."""
MERGED = 64
"""Blocks of norms after which they become one."""
EMPTY = -1
"""The size of a row of a block in which there is no client."""
NORM, FACTOR = "norm", "factor"
"""Names of the figures that every message has."""


class Accumulator:
    """Adds messages as they come, one after the other: clip, then running float64 sum. Memory is O(d), not O(cohort).

    A sum that adds in a way of its own is a subclass of this one, never of :class:`PlainSum`.

    device: where the sum is. On a GPU, adding messages that lie there never waits for it.
    """

    in_factors = False
    """Whether messages that are not written out are added as they are."""

    def __init__(
        self,
        clip: Clip,
        threshold: float,
        tensors: tuple[slice, ...],
        dimension: int,
        weighted: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.clip, self.threshold, self.tensors, self.dimension = clip, threshold, tensors, dimension
        self.weighted, self.weight = weighted, 0.0
        self.total = torch.zeros(dimension, dtype=torch.float64, device=device)
        self._figures: dict[str, list[Tensor]] = {}
        self._present: list[bool] = []

    @property
    def divisor(self) -> float | None:
        """Σ n_i of the sample-weighted mean; None where the plan's public constant m divides."""
        return max(self.weight, 1.0) if self.weighted else None

    def of(self, draw: int) -> Accumulator:
        """Return the sum of one cohort draw: of all of them, here."""
        return self

    def add(self, messages: Tensor, sizes: Sequence[int], stats: Mapping[str, Tensor] | None = None) -> Tensor:
        """Clip messages ``(n, d)`` and add them. A message that is not finite, or of the wrong length, counts as zero.

        Returns what multiplied each message, ``(n,)`` or one for each tensor ``(n, L)``; 0 where a message counts as
        zero. Weights are not in it.

        stats: named facts ``(n,)`` of the clients, private to the simulation.
        sizes: the clients' numbers of examples ``(n,)``, used only by the sample-weighted mean of the non-private
        twins and of published procedures, and to leave those without any out of the adaptive clip's count. ``EMPTY``
        marks a row without a client: it is measured with the others, so that no shape follows from who is there, and
        then left out.
        """
        there = [size for size in sizes if size != EMPTY]
        self._present += [size > 0 for size in there]
        self.weight += float(sum(there)) if self.weighted else 0.0
        rows = [row for row, size in enumerate(sizes) if size != EMPTY] if len(there) < len(sizes) else slice(None)
        messages = torch.atleast_2d(messages.detach())
        if messages.shape != (len(sizes), self.dimension) or not messages.is_floating_point():
            # NaN goes through the clip as any message that is not finite: it counts as zero.
            messages = torch.full((len(sizes), self.dimension), math.nan)
        messages = messages.to(self.total.device)
        if isinstance(messages, Factored) and self.in_factors and self.clip.by_norm:
            scale, bound = functools.partial(self.clip.scale, threshold=self.threshold), self.clip.bound(self.threshold)
            found = add_clipped(self.total, messages, scale, bound, self._weights(sizes))
            norms, factors = (each[rows] for each in found)
        else:
            dense = messages.dense() if isinstance(messages, Factored) else messages
            norms, factors = (each[rows] for each in self.clip.factors(dense, self.threshold, self.tensors))
            self._add(dense[rows], norms, factors, self._weights(there))
        # Figures are those of the clip alone, without weights.
        alone = factors if factors.dim() == 1 else factors.amin(1)
        given = {name: torch.atleast_1d(values)[rows].double() for name, values in (stats or {}).items()}
        self._note({NORM: norms, FACTOR: alone, **given})
        return factors

    def _weights(self, sizes: Sequence[int]) -> Tensor | None:
        """n_i ``(n,)`` where the mean is weighted."""
        return torch.as_tensor(sizes, dtype=torch.float64, device=self.total.device) if self.weighted else None

    def _add(self, messages: Tensor, norms: Tensor, factors: Tensor, weights: Tensor | None) -> None:
        if weights is not None:
            factors = factors * (weights if factors.dim() == 1 else weights[:, None])
        finite = torch.isfinite(norms)
        # Zero times NaN is NaN. On a GPU it is always done: asking would wait for it.
        if messages.device.type != "cpu" or not bool(finite.all()):
            messages = torch.where(finite[:, None], messages, torch.zeros_like(messages))
        self._sum(messages, factors)

    def _note(self, figures: Mapping[str, Tensor]) -> None:
        """Keep figures ``(n,)`` of the messages: one tensor of many instead of many, for small blocks left between
        freed messages keep a heap from shrinking.
        """
        for name, values in figures.items():
            known = self._figures.setdefault(name, [])
            known.append(values.to(self.total.device))
            if len(known) >= MERGED:
                known[:] = [torch.cat(known)]

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        """total += Σ factor·message, each product and sum in float64."""
        if factors.dim() == 1 and len(messages) == 1:
            rounding.add_scaled(self.total, messages[0], factors[0])
            return
        if factors.dim() == 1:
            room = rounding.CACHED if messages.device.type == "cpu" else AT_ONCE  # float64 copies that fit a cache
            # By columns, so that the float64 copy of a block stays in a cache.
            width = max(1, room // max(len(messages), 1))
            for start in range(0, self.dimension, width):
                self.total[start : start + width] += factors @ messages[:, start : start + width].double()
            return
        for where, part in zip(self.tensors, factors.T):
            self.total[where] += part @ messages[:, where].double()

    def result(self) -> Aggregate:
        """Return the sum of the messages added so far, with their norms and factors."""
        figures = {name: torch.cat(values) for name, values in self._figures.items()}
        empty = torch.zeros(0, dtype=torch.float64)
        norms, factors = figures.pop(NORM, empty), figures.pop(FACTOR, empty)
        if norms.numel() > MOST and math.isfinite(self.threshold):
            raise RunError(f"cohort: {norms.numel()} messages in one sum; rounding is accounted for {MOST} at most.")
        # A client without data adds nothing, whatever its message: with ½ for it, presence would move the count by 1.
        present = norms[torch.tensor(self._present, dtype=torch.bool, device=norms.device)]
        bits = float((present <= self.threshold).double().sum() - 0.5 * present.numel())
        means = {name: float(values.mean()) for name, values in figures.items()}
        return Aggregate(self.total.clone(), norms.numel(), bits, norms, factors, means)


class PlainSum(Accumulator):
    """The clipped sum and nothing else: messages may be added in factors, and in parts that are merged."""

    in_factors = True

    def part(self, device: torch.device | str = "cpu") -> PlainSum:
        """Return an empty sum for some of the messages, filled elsewhere and then merged."""
        return PlainSum(self.clip, self.threshold, self.tensors, self.dimension, self.weighted, device)

    def merge(self, part: PlainSum) -> None:
        """Add what another sum of the same round holds."""
        self.total += part.total.to(self.total.device)
        self._note({name: torch.cat(values) for name, values in part._figures.items()})
        self.weight += part.weight
        self._present += part._present


class GridAccumulator(Accumulator):
    """Clips as the plain sum does; the mechanism's encoder adds the clipped messages up exactly."""

    def __init__(
        self, encoder: Encoder, clip: Clip, threshold: float, tensors: tuple[slice, ...], dimension: int
    ) -> None:
        super().__init__(clip, threshold, tensors, dimension)
        self.encoder = encoder

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        super()._sum(messages, factors)
        if factors.dim() == 1:
            self.encoder.add(messages.double() * factors[:, None])
            return
        clipped = [messages[:, where].double() * part[:, None] for where, part in zip(self.tensors, factors.T)]
        self.encoder.add(torch.cat(clipped, 1))

    def result(self) -> Aggregate:
        """Return the aggregate so far, with its whole-number sum."""
        found, value = super().result(), self.encoder.value()
        return replace(found, total=found.total if value is None else value, exact=self.encoder.total.copy())
