"""Clip a round's messages and add them up: the plain sum, and the sum on whole numbers."""

from __future__ import annotations

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


class Accumulator:
    """Adds messages as they come, one after the other: clip, then running float64 sum. Memory is O(d), not O(cohort).

    A sum that adds in a way of its own is a subclass of this one, never of :class:`PlainSum`.

    device: where the sum is. On a GPU, adding messages that lie there never waits for it.
    """

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
        self.weighted = weighted
        self.total = torch.zeros(dimension, dtype=torch.float64, device=device)
        self._norms: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._stats: dict[str, list[Tensor]] = {}
        self.weight = 0.0
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
        self._present += [size > 0 for size in sizes if size != EMPTY]
        messages = torch.atleast_2d(messages.detach())
        if messages.shape != (len(sizes), self.dimension) or not messages.is_floating_point():
            # NaN goes through the clip as any message that is not finite: it counts as zero.
            messages = torch.full((len(sizes), self.dimension), math.nan)
        messages = messages.to(self.total.device)
        if isinstance(messages, Factored):
            found = self._add_factored(messages, sizes, stats)
            if found is not None:
                return found
            messages = messages.dense()
        norms, clipped = self.clip.factors(messages, self.threshold, self.tensors)
        rows = _rows_of(sizes)
        if rows is not None:
            messages, norms, clipped = messages[rows], norms[rows], clipped[rows]
            sizes, stats = [sizes[row] for row in rows], _only(rows, stats)
        factors = clipped
        # Figures are those of the clip alone; weights come after.
        self._keep(norms, factors if factors.dim() == 1 else factors.amin(1), stats)
        weights = self._weights(sizes)
        if weights is not None:
            factors = factors * (weights if factors.dim() == 1 else weights[:, None])
        finite = torch.isfinite(norms)
        # Zero times NaN is NaN. On a GPU it is always done: asking would wait for it.
        if messages.device.type != "cpu" or not bool(finite.all()):
            messages = torch.where(finite[:, None], messages, torch.zeros_like(messages))
        self._sum(messages, factors)
        return clipped

    def _add_factored(
        self, messages: Factored, sizes: Sequence[int], stats: Mapping[str, Tensor] | None
    ) -> Tensor | None:
        """Return what multiplied each message, where they were added as they are; None: they must be written out."""
        return None

    def _weights(self, sizes: Sequence[int]) -> Tensor | None:
        """n_i ``(n,)`` where the mean is weighted, noted in ``weight``."""
        if not self.weighted:
            return None
        self.weight += float(sum(size for size in sizes if size != EMPTY))
        return torch.as_tensor(sizes, dtype=torch.float64, device=self.total.device)

    def _keep(self, norms: Tensor, factors: Tensor, stats: Mapping[str, Tensor] | None) -> None:
        """Note what each message was: norm, factor, facts."""
        self._norms.append(norms.to(self.total.device))
        self._factors.append(factors.to(self.total.device))
        self._merge()
        self._note(stats)

    def _merge(self) -> None:
        """One tensor of norms instead of many: small blocks left between freed messages keep a heap from shrinking."""
        if len(self._norms) >= MERGED:
            self._norms, self._factors = [torch.cat(self._norms)], [torch.cat(self._factors)]

    def _note(self, stats: Mapping[str, Tensor] | None) -> None:
        for name, values in (stats or {}).items():
            self._stats.setdefault(name, []).append(torch.atleast_1d(values).double().to(self.total.device))

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
        norms = torch.cat(self._norms) if self._norms else torch.zeros(0, dtype=torch.float64)
        if norms.numel() > MOST and math.isfinite(self.threshold):
            raise RunError(f"cohort: {norms.numel()} messages in one sum; rounding is accounted for {MOST} at most.")
        factors = torch.cat(self._factors) if self._factors else torch.zeros(0, dtype=torch.float64)
        # A client without data adds nothing, whatever its message: with ½ for it, presence would move the count by 1.
        present = norms[torch.tensor(self._present, dtype=torch.bool, device=norms.device)]
        bits = float((present <= self.threshold).double().sum() - 0.5 * present.numel())
        means = {name: float(torch.cat(values).mean()) for name, values in self._stats.items()}
        return Aggregate(self.total.clone(), norms.numel(), bits, norms, factors, means)


class PlainSum(Accumulator):
    """The clipped sum and nothing else: messages may be added in factors, and in parts that are merged."""

    def _add_factored(
        self, messages: Factored, sizes: Sequence[int], stats: Mapping[str, Tensor] | None
    ) -> Tensor | None:
        """Clip and add messages that are not written out, from their factors; return what multiplied each of them."""
        clip = self.clip
        if not clip.by_norm:
            return None

        def scale(norms: Tensor) -> Tensor:
            return clip.scale(norms, self.threshold)

        bound, weights = clip.bound(self.threshold), self._weights(sizes)
        norms, factors = add_clipped(self.total, messages, scale, bound, weights)
        rows = _rows_of(sizes)
        if rows is not None:
            norms, factors, stats = norms[rows], factors[rows], _only(rows, stats)
        self._keep(norms, factors, stats)
        return factors

    def part(self, device: torch.device | str = "cpu") -> PlainSum:
        """Return an empty sum for some of the messages, filled elsewhere and then merged."""
        return PlainSum(self.clip, self.threshold, self.tensors, self.dimension, self.weighted, device)

    def merge(self, part: PlainSum) -> None:
        """Add what another sum of the same round holds."""
        here = self.total.device
        self.total += part.total.to(here)
        self._norms += [values.to(here) for values in part._norms]
        self._factors += [values.to(here) for values in part._factors]
        self._merge()
        for name, values in part._stats.items():
            self._stats.setdefault(name, []).extend(found.to(here) for found in values)
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


def _rows_of(sizes: Sequence[int]) -> list[int] | None:
    """Return the rows that hold a client; None if all do."""
    rows = [row for row, size in enumerate(sizes) if size != EMPTY]
    return None if len(rows) == len(sizes) else rows


def _only(rows: list[int], stats: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in (stats or {}).items()}
