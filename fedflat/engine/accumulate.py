"""Running sums of a round's messages: clip, then add. The plain sum, and the sum on whole numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.core import wide
from fedflat.core.types import Aggregate, Clip
from fedflat.engine.factored import Factored
from fedflat.engine.parts import Encoder

MERGED = 64
"""Blocks of norms after which they become one."""


class Accumulator:
    """Adds messages as they come: clip, then running float64 sum. Memory is O(d), not O(cohort)."""

    def __init__(
        self, clip: Clip, threshold: float, tensors: tuple[slice, ...], dimension: int, weighted: bool = False
    ) -> None:
        self.clip, self.threshold, self.tensors, self.dimension = clip, threshold, tensors, dimension
        self.weighted = weighted
        self.total = torch.zeros(dimension, dtype=torch.float64)
        self._norms: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._stats: dict[str, list[Tensor]] = {}
        self.weight = 0.0

    @property
    def divisor(self) -> float | None:
        """Σ n_i of the sample-weighted mean; None where the plan's public constant m divides."""
        return max(self.weight, 1.0) if self.weighted else None

    def add(self, messages: Tensor, sizes: Sequence[int], stats: Mapping[str, Tensor] | None = None) -> None:
        """Clip messages ``(n, d)`` and add them. A message that is not finite, or of the wrong length, counts as zero.

        stats: named facts ``(n,)`` of the clients, private to the simulation.
        sizes: the clients' numbers of examples ``(n,)``, used only by the sample-weighted mean of the non-private
        twins and of published procedures.
        """
        messages = torch.atleast_2d(messages.detach())
        if messages.shape[-1] != self.dimension or not messages.is_floating_point():
            messages = torch.full((messages.shape[0], self.dimension), math.nan)
        norms, factors = self.clip.factors(messages, self.threshold, self.tensors)
        finite = torch.isfinite(norms)
        self._norms.append(norms.cpu())
        self._factors.append((factors if factors.dim() == 1 else factors.amin(1)).cpu())
        self._merge()
        self._note(stats)
        if self.weighted:
            weights = torch.as_tensor(sizes, dtype=factors.dtype, device=factors.device)
            self.weight += float(weights.sum())
            factors = factors * (weights if factors.dim() == 1 else weights[:, None])
        if isinstance(messages, Factored):
            if type(self)._sum is Accumulator._sum and factors.dim() == 1:
                self.total += messages.weighted_sum(factors)
                return
            messages = messages.dense()
        if not bool(finite.all()):
            messages = torch.where(finite[:, None], messages, torch.zeros_like(messages))
        self._sum(messages, factors)

    def _merge(self) -> None:
        """One tensor of norms instead of many: small blocks left between freed messages keep a heap from shrinking."""
        if len(self._norms) >= MERGED:
            self._norms, self._factors = [torch.cat(self._norms)], [torch.cat(self._factors)]

    def _note(self, stats: Mapping[str, Tensor] | None) -> None:
        for name, values in (stats or {}).items():
            self._stats.setdefault(name, []).append(torch.atleast_1d(values).double().cpu())

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        """total += Σ factor·message, each product and sum in float64."""
        if factors.dim() == 1:
            width = max(1, wide.CACHED // max(len(messages), 1))
            if len(messages) == 1:
                wide.add_scaled(self.total, messages[0].to(self.total.device), float(factors[0]))
            else:
                for start in range(0, self.dimension, width):  # a float64 copy of the whole block would not fit a cache
                    piece = messages[:, start : start + width].double()
                    self.total[start : start + width] += (factors @ piece).to(self.total.device)
            return
        for where, part in zip(self.tensors, factors.T):
            self.total[where] += (part @ messages[:, where].double()).to(self.total.device)

    def part(self) -> Accumulator | None:
        """An empty accumulator for some of the messages, filled elsewhere and then merged; None where messages must be
        added here, one after the other: in every subclass that adds in a way of its own."""
        if type(self).add is not Accumulator.add or type(self)._sum is not Accumulator._sum:
            return None
        return Accumulator(self.clip, self.threshold, self.tensors, self.dimension, self.weighted)

    def merge(self, part: Accumulator) -> None:
        """Add what another accumulator of the same round holds."""
        self.total += part.total
        self._norms += part._norms
        self._factors += part._factors
        self._merge()
        for name, values in part._stats.items():
            self._stats.setdefault(name, []).extend(values)
        self.weight += part.weight

    def result(self) -> Aggregate:
        """The aggregate so far."""
        norms = torch.cat(self._norms) if self._norms else torch.zeros(0, dtype=torch.float64)
        factors = torch.cat(self._factors) if self._factors else torch.zeros(0, dtype=torch.float64)
        bits = float((norms <= self.threshold).double().sum() - 0.5 * norms.numel())
        means = {name: float(torch.cat(values).mean()) for name, values in self._stats.items()}
        return Aggregate(self.total.clone(), norms.numel(), bits, norms, factors, means)


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
        """The aggregate so far, with its whole-number sum."""
        found, value = super().result(), self.encoder.value()
        return replace(found, total=found.total if value is None else value, exact=self.encoder.total.copy())
