"""Who takes part when a public rule, and not a secret draw, keeps a client's rounds apart.

``full``: everybody, every round. ``min-separation``: a public round-robin in which two rounds of one client are at
least ``separation`` apart. ``cyclic-poisson``: each client belongs to one of ``separation`` groups, and joins each
round of its group by its own secret coin. What such a rule is worth is in ``core.factors`` and docs/participation.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range, whole, wrong
from fedflat.core.offered import Offered
from fedflat.core.rng import digest, stream

Ids = NDArray[np.int64]
PUBLIC = 0
"""Key of what anybody may recompute: orders and groups. They hide nothing, and never follow a run's noise key."""
NEVER = -(1 << 40)
"""The last round of a client that has taken part in none."""


@runtime_checkable
class Scheduled(Protocol, metaclass=Offered):
    """A cohort law that follows the round's number."""

    @property
    def separation(self) -> int:
        """Two rounds of one client are at least so many apart."""

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """The cohort of a round: int64 ids, ascending. generator: the secret stream of the round."""


@dataclass(frozen=True)
class Full:
    """Everybody takes part in every round.

    Raises:
        InputError: unless size = clients.
    """

    clients: int
    size: float

    name, maximum = "full", None
    relation = "add-remove"

    def __post_init__(self) -> None:
        if self.size != whole("clients", self.clients, 1):
            raise wrong("cohort.size", self.size, f"{self.clients}, all clients, with sampling: full")

    @property
    def separation(self) -> int:
        """1: a client takes part again in the next round."""
        return 1

    @property
    def q(self) -> float:
        """Everybody."""
        return 1.0

    def select(self, generator: np.random.Generator) -> Ids:
        """All ids."""
        return np.arange(self.clients, dtype=np.int64)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """All ids."""
        return self.select(generator)

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round by itself."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(multiplier)


@dataclass(frozen=True)
class MinSeparation:
    """A public round-robin: m clients a round, whose rounds are at least ``separation`` apart.

    The clients stand in ``separation`` groups in a public random order. Round t takes the next m of group
    t mod separation, so a client's rounds differ by multiples of ``separation``.

    Raises:
        InputError: unless size is whole and size·separation ≤ clients.
    """

    clients: int
    size: float
    separation: int

    name, maximum = "min-separation", None
    relation = "zero-out"

    def __post_init__(self) -> None:
        _separable(self.clients, self.size, self.separation)
        if self.size != int(self.size):
            raise wrong("cohort.size", self.size, "a whole number with sampling: min-separation")

    @property
    def q(self) -> float:
        """Share of the population in each cohort; it amplifies nothing."""
        return self.size / self.clients

    @cached_property
    def _order(self) -> Ids:
        return stream(PUBLIC, "round-robin").permutation(self.clients).astype(np.int64)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """The round's cohort, int64 ``(m,)`` ascending; the generator is not used."""
        group = self._order[round % self.separation :: self.separation]
        turn, m = round // self.separation, int(self.size)
        return np.sort(group[np.arange(turn * m, turn * m + m) % len(group)])

    def select(self, generator: np.random.Generator) -> Ids:
        """The cohort of round 0."""
        return self.select_at(0, generator)

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round for a client that is in it."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(multiplier)

    def next_of(self, present: Ids, last: Ids, round: int) -> Ids:
        """The m of the clients ``present`` whose turn it is: those who have waited longest, in the public order.

        last: int64 ``(M,)``, the round in which each last took part, ``NEVER`` at first. Nobody comes too early.
        """
        spots, m = np.arange(self.clients), int(self.size)
        turns = np.lexsort((spots // self.separation, spots % self.separation, spots // self.separation // m))
        place = np.empty(self.clients, dtype=np.int64)
        place[self._order[turns]] = spots  # the order of the first turns when everybody is there
        able = present[round - last[present] >= self.separation]
        able = able[np.lexsort((place[able], last[able]))]
        return np.sort(able[: int(self.size)])


@dataclass(frozen=True)
class CyclicPoisson:
    """Each client is in one of ``separation`` groups; in round t those of group t mod separation join by coin.

    A client's group is a hash of its own id, whoever else there is; its coin, of chance p = m·separation/M, is secret.

    Raises:
        InputError: unless 0 < size·separation ≤ clients.
    """

    clients: int
    size: float
    separation: int

    name, maximum = "cyclic-poisson", None
    relation = "add-remove"

    def __post_init__(self) -> None:
        _separable(self.clients, self.size, self.separation)

    @property
    def q(self) -> float:
        """Share of the population in a cohort on average."""
        return self.size / self.clients

    @property
    def chance(self) -> float:
        """p, with which a client joins a round of its group."""
        return min(1.0, self.size * self.separation / self.clients)

    @cached_property
    def groups(self) -> Ids:
        """The group of each client, int64 ``(M,)``."""
        drawn = (int.from_bytes(digest(PUBLIC, "cyclic group", client)[:8], "big") for client in range(self.clients))
        return np.fromiter((number % self.separation for number in drawn), dtype=np.int64, count=self.clients)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """The round's cohort, int64 ascending, possibly nobody."""
        group = np.flatnonzero(self.groups == round % self.separation).astype(np.int64)
        return group[generator.random(len(group)) < self.chance]

    def select(self, generator: np.random.Generator) -> Ids:
        """A cohort of round 0."""
        return self.select_at(0, generator)

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round of a client's group."""
        import dp_accounting

        plain = dp_accounting.GaussianDpEvent(multiplier)
        return plain if self.chance >= 1 else dp_accounting.PoissonSampledDpEvent(self.chance, plain)


def _separable(clients: int, size: float, separation: int) -> None:
    whole("clients", clients, 1)
    in_range("cohort.size", size, 0, clients, open_low=True)
    most = int(clients / size)
    whole("cohort.separation", separation, 1)
    if separation > most:
        raise wrong("cohort.separation", separation, f"at most clients / cohort.size = {most}")


def separated(last: Ids, cohort: Ids, round: int, separation: int) -> Ids:
    """Those of a cohort who do not come too early; ``last`` as in :meth:`MinSeparation.next_of`."""
    kept: Ids = cohort[round - last[cohort] >= separation]
    return kept
