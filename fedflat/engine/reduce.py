"""Reduce a round: clip what a back end's clients send, add it up, and keep what stays with each of them.

A back end maps: ``train(cohort, broadcast, kept, clipped)`` yields parts of the round, in client order. Each part adds
itself to the round's sum, plain or on whole numbers; a block's part may have been clipped and summed where it was
computed.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.core import MOST, PersonalState, RunError, rounding
from fedflat.core.types import Aggregate, Algorithm, Broadcast, ClientView, Clip, Encode, Local
from fedflat.engine.client import LocalResult, rate_of, steps_of
from fedflat.engine.device import sent
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
        self, clip: Clip, threshold: float, tensors: tuple[slice, ...], dimension: int, weighted: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.clip, self.threshold, self.tensors, self.dimension = clip, threshold, tensors, dimension
        self.weighted, self.weight = weighted, 0.0
        self.total = torch.zeros(dimension, dtype=torch.float64, device=device)
        self._figures: dict[str, list[Tensor]] = {}
        self._present: list[bool] = []

    def of(self, draw: int) -> "Accumulator":
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
            # A place without a client may hold anything; with the weight 0 it adds nothing.
            counted = [max(0, size) if self.weighted else int(size != EMPTY) for size in sizes]
            weights = torch.tensor(counted, dtype=torch.float64, device=self.total.device)
            norms, factors = (values[rows] for values in add_clipped(self.total, messages, scale, bound, weights))
        else:
            dense = messages.dense() if isinstance(messages, Factored) else messages
            norms, factors = (values[rows] for values in self.clip.factors(dense, self.threshold, self.tensors))
            self._add(dense[rows], norms, factors, there)
        # Figures are those of the clip alone, without weights.
        least = factors if factors.dim() == 1 else factors.amin(1)
        facts = {name: torch.atleast_1d(values)[rows].double() for name, values in (stats or {}).items()}
        self._note({NORM: norms, FACTOR: least, **facts})
        return factors

    def _add(self, messages: Tensor, norms: Tensor, factors: Tensor, sizes: Sequence[int]) -> None:
        if self.weighted:
            weights = torch.tensor(sizes, dtype=torch.float64, device=self.total.device)
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
            recorded = self._figures.setdefault(name, [])
            recorded.append(values.to(self.total.device))
            if len(recorded) >= MERGED:
                recorded[:] = [torch.cat(recorded)]

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
        # Σ n_i of the sample-weighted mean.
        divisor = max(self.weight, 1.0) if self.weighted else None
        return Aggregate(self.total.clone(), norms.numel(), bits, norms, factors, means, divisor=divisor)


class PlainSum(Accumulator):
    """The clipped sum and nothing else: messages may be added in factors, and in parts that are merged."""

    in_factors = True

    def part(self, device: torch.device | str = "cpu") -> "PlainSum":
        """Return an empty sum for some of the messages, filled elsewhere and then merged."""
        return PlainSum(self.clip, self.threshold, self.tensors, self.dimension, self.weighted, device)

    def merge(self, part: "PlainSum") -> None:
        """Add what another sum of the same round holds."""
        self.total += part.total.to(self.total.device)
        self._note({name: torch.cat(values) for name, values in part._figures.items()})
        self.weight += part.weight
        self._present += part._present


class GridAccumulator(Accumulator):
    """Clips as the plain sum does; the whole numbers that the mechanism makes of clipped messages are added up exactly.

    encoder: as of ``Mechanism.encoder``.
    """

    def __init__(
        self, encoder: tuple[Encode, float | None], clip: Clip, threshold: float, tensors: tuple[slice, ...],
        dimension: int,
    ) -> None:  # fmt: skip
        super().__init__(clip, threshold, tensors, dimension)
        self.encode, self.pitch = encoder
        self.exact = self.encode(torch.zeros(0, dimension))

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        super()._sum(messages, factors)
        there = messages.any(1)  # zero is zero on every grid: all clients without data would be written out at once
        messages, factors = messages[there], factors[there]
        parts = zip(self.tensors, factors.T) if factors.dim() > 1 else [(slice(None), factors)]
        clipped = [messages[:, where].double() * part[:, None] for where, part in parts]
        self.exact = self.exact + self.encode(torch.cat(clipped, 1))

    def result(self) -> Aggregate:
        """Return the aggregate so far, with its whole-number sum."""
        plain = super().result()
        total = plain.total if self.pitch is None else torch.from_numpy(self.exact * self.pitch)
        return replace(plain, total=total, exact=self.exact)


def states_of(algorithm: Algorithm, heads: PersonalState, client: int, shared: Tensor) -> dict[str, Tensor]:
    """Return a client's named states ``(d,)``, where ``shared`` lies."""
    return {state.name: heads.state(state.name, client, shared) for state in algorithm.client_state}


@dataclass(frozen=True)
class Trained:
    """Messages ``(n, k·d)`` of n trained clients, not yet clipped, and what stays with each.

    sizes: numbers of examples, ``EMPTY`` in a row without a client. clients: the rows' ids; none where nothing stays.
    personal: heads ``(n, D − d)``. facts: named figures ``(n,)``, private to the simulation.
    """

    messages: Tensor
    sizes: Sequence[int]
    clients: Sequence[int] = ()
    personal: Tensor | None = None
    facts: Mapping[str, Tensor] | None = None

    @classmethod
    def of(cls, clients: Sequence[int], sizes: Sequence[int], result: LocalResult) -> "Trained":
        """Return the results of a block of clients, or of one."""
        facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
        return cls(torch.atleast_2d(result.message), sizes, clients, torch.atleast_2d(result.personal), facts)

    def row(self, row: int) -> "Trained":
        """Return one client's part of a block, as a copy."""
        personal, at = self.personal, slice(row, row + 1)
        head = None if personal is None else personal[at].clone()
        facts = {name: value[at].clone() for name, value in (self.facts or {}).items()}
        return Trained(self.messages[at].clone(), self.sizes[at], self.clients[at], head, facts)

    @classmethod
    def nothing(cls, clients: int, length: int) -> "Trained":
        """Return what so many clients without data send: zeros ``(n, length)``."""
        return cls(torch.zeros(1, length).expand(clients, -1), [0] * clients)

    def add_to(self, total: Accumulator) -> Tensor | None:
        """Clip the messages and add them; return what multiplied each of them."""
        return total.add(self.messages, self.sizes, self.facts)


@dataclass(frozen=True)
class Summed:
    """A block's messages, clipped and added up where they were computed. Fields: as of ``Trained``."""

    part: PlainSum
    clients: Sequence[int]
    personal: Tensor | None

    def add_to(self, total: PlainSum) -> None:
        """Add the block's sum to the round's."""
        total.merge(self.part)


@dataclass(frozen=True)
class RoundSum:
    """The reducing half of a round: adds what a back end's clients send, and keeps what stays with them.

    ``for part in backend.train(cohort, broadcast, kept, reduced.clipped): reduced.add(part)``
    """

    algorithm: Algorithm
    local: Local
    broadcast: Broadcast
    total: Any
    kept: PersonalState

    def add_cohort(self, backend: "Backend", cohort: np.ndarray) -> None:
        """Let a back end train a cohort and add all that it gives."""
        for part in backend.train(cohort, self.broadcast, self.kept, self.clipped):
            self.add(part)

    def clipped(self, block: Trained) -> "Part":
        """Return a block's clipped sum, where the round's sum may be made in parts; else the block as it is.

        A back end calls it where it computes. A block that comes back unsummed is given to the round one client after
        the other: its sum draws noise for each, or clients' states wait for the factor that they were added with.
        """
        messages = block.messages
        # Any other sum asks for its messages one by one, in client order.
        if not isinstance(self.total, PlainSum) or self.algorithm.client_state:
            return replace(block, messages=messages.dense()) if isinstance(messages, Factored) else block
        part = self.total.part(messages.device)
        part.add(messages, block.sizes, block.facts)
        return Summed(part, block.clients, block.personal)

    def add(self, part: "Part") -> None:
        """Add to the round's sum; keep each client's head and states. Parts of one round come in client order."""
        factors = part.add_to(self.total)
        if part.personal is None:
            return
        for row, client in enumerate(part.clients):
            if client != EMPTY:
                self.kept.keep(client, part.personal[row])
        # A state moves by the message as it was added, so it waits for the clip's factor.
        if self.algorithm.client_state and isinstance(part, Trained) and factors is not None:
            for row, client in enumerate(part.clients):
                self._keep_state(client, part.sizes[row], part.messages[row], factors[row])

    def _keep_state(self, client: int, size: int, message: Tensor, factors: Tensor) -> None:
        added = as_added(message.to(factors.device), factors, self.total.tensors)
        # Vectors of its own: what a state's function writes reaches nobody else.
        broadcast, phase = sent(self.broadcast, added.device).for_one_client(), self.algorithm.shared_phase
        before = states_of(self.algorithm, self.kept, client, broadcast.shared)
        steps, rate = steps_of(phase, self.local.of(size)), rate_of(phase, self.local, broadcast)
        view = ClientView(broadcast=broadcast.vectors, state=before, steps=steps, lr=rate)
        for state in self.algorithm.client_state:
            self.kept.remember(state.name, client, state.next(added, view).reshape(broadcast.shared.shape))


class Part(Protocol):
    """Some of a round's messages, or their sum, which adds itself to the round's."""

    @property
    def clients(self) -> Sequence[int]: ...
    @property
    def personal(self) -> Tensor | None: ...
    def add_to(self, total: Any) -> Tensor | None: ...


Clipped = Callable[[Trained], Part]


class Backend(Protocol):
    """Maps local training over a cohort; the round adds up what it yields.

    kept: what clients keep between rounds, to be read only. clipped: ``RoundSum.clipped``.
    """

    name: str

    def train(
        self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[Part]: ...


def as_added(message: Tensor, factors: Tensor, tensors: tuple[slice, ...]) -> Tensor:
    """Return a message ``(k·d,)`` as it is in the sum: times its factor ``()``, or one for each tensor ``(L,)``;
    float32.
    """
    finite = torch.nan_to_num(message.double(), nan=0.0, posinf=0.0, neginf=0.0)
    if factors.dim() == 0:
        return (finite * factors).to(torch.float32)
    return torch.cat([finite[where] * factor for where, factor in zip(tensors, factors)]).to(torch.float32)
