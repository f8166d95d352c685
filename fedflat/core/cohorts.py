"""Draw a round's cohort: the public law, the neighbouring relation it earns, and the draw itself.

>>> make_sampler("min-separation", clients=6, size=2).select_at(0, np.random.default_rng()).size
2

Public facts (number of clients, expected size, maximum) are fields; the secret is the generator given to ``select_at``.
The laws live here rather than in ``pieces`` because the privacy accounts need them too. Some keep a client's rounds
apart by a public rule: ``full`` is everybody in every round, ``min-separation`` a public round-robin, and under
``cyclic-poisson`` each client belongs to one of ``separation`` groups, and joins each round of its group by its own
secret coin. What such a rule is worth is in ``core.factors`` and docs/participation.md.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range, one_of, require, whole, wrong
from fedflat.core.rng import NO_GENERATOR, digest, stream
from fedflat.core.types import Sampler

Ids = NDArray[np.int64]
PUBLIC = 0
"""Key of what anybody may recompute: orders and groups. They hide nothing, and never follow a run's noise key."""
NEVER = -(1 << 40)
"""The last round of a client that has taken part in none."""


@dataclass(frozen=True)
class Full(Sampler):
    """Everybody takes part in every round.

    Raises:
        InputError: unless size = clients.
    """

    name = "full"

    def __post_init__(self) -> None:
        everybody = f"{self.clients}, all clients, with sampling: full"
        require(self.size == whole("clients", self.clients, 1), "cohort.size", self.size, everybody)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return all ids."""
        return np.arange(self.clients, dtype=np.int64)


@dataclass(frozen=True)
class Separated(Sampler):
    """A law that follows the round's number: clients stand in ``separation`` groups that take turns.

    Raises:
        InputError: unless 0 < size·separation ≤ clients.
    """

    separation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("cohort.separation", self.separation, 1, int(self.clients / self.size))


@dataclass(frozen=True)
class MinSeparation(Separated):
    """A public round-robin: m clients a round, whose rounds are at least ``separation`` apart.

    The clients stand in ``separation`` groups in a public random order. Round t takes the next m of group
    t mod separation, so a client's rounds differ by multiples of ``separation``.

    Raises:
        InputError: unless size is whole and size·separation ≤ clients.
    """

    name = "min-separation"
    relation = "zero-out"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size == int(self.size), "cohort.size", self.size, "a whole number with sampling: min-separation")

    @cached_property
    def _order(self) -> Ids:
        return stream(PUBLIC, "round-robin").permutation(self.clients).astype(np.int64)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return the round's cohort, int64 ``(m,)`` ascending; the generator is not used."""
        group = self._order[round % self.separation :: self.separation]
        turn, m = round // self.separation, int(self.size)
        return np.sort(group[np.arange(turn * m, turn * m + m) % len(group)])

    def next_of(self, present: Ids, last: Ids, round: int) -> Ids:
        """Return the m of the clients ``present`` whose turn it is: those who have waited longest, in the public order.

        last: int64 ``(M,)``, the round in which each last took part, ``NEVER`` at first. Nobody comes too early.
        """
        spots, m = np.arange(self.clients), int(self.size)
        # As ``select_at`` goes through the groups: by turn, then by group, then by place in the group.
        turns = np.lexsort((spots // self.separation, spots % self.separation, spots // self.separation // m))
        place = np.empty(self.clients, dtype=np.int64)
        place[self._order[turns]] = spots  # the order of the first turns when everybody is there
        # Too early is never allowed, even where too few are there.
        able = present[round - last[present] >= self.separation]
        able = able[np.lexsort((place[able], last[able]))]
        return np.sort(able[: int(self.size)])


@dataclass(frozen=True)
class CyclicPoisson(Separated):
    """Each client is in one of ``separation`` groups; in round t those of group t mod separation join by coin.

    A client's group is a hash of its own id, whoever else there is; its coin, of chance p = m·separation/M, is secret.
    """

    name = "cyclic-poisson"

    @property
    def chance(self) -> float:
        """p, with which a client joins a round of its group."""
        return min(1.0, self.size * self.separation / self.clients)

    @cached_property
    def groups(self) -> Ids:
        """The group of each client, int64 ``(M,)``."""
        # By the client's own id alone, so nobody's group follows from who else there is.
        drawn = (int.from_bytes(digest(PUBLIC, "cyclic group", client)[:8], "big") for client in range(self.clients))
        return np.fromiter((number % self.separation for number in drawn), dtype=np.int64, count=self.clients)

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return the round's cohort, int64 ascending, possibly nobody."""
        group = np.flatnonzero(self.groups == round % self.separation).astype(np.int64)
        return group[generator.random(len(group)) < self.chance]

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round of a client's group."""
        return _poisson_event(self.chance, multiplier)


def separated(last: Ids, cohort: Ids, round: int, separation: int) -> Ids:
    """Those of a cohort who do not come too early; ``last`` as in :meth:`MinSeparation.next_of`."""
    return cohort[round - last[cohort] >= separation]


def _subset(generator: np.random.Generator, clients: int, count: int) -> Ids:
    """Return a uniform subset of ``count`` ids, sorted. Unshuffled ``choice`` is exact and O(count) (Floyd's
    method)."""
    return np.sort(generator.choice(clients, size=count, replace=False, shuffle=False).astype(np.int64, copy=False))


def _poisson_event(q: float, multiplier: float) -> Any:
    import dp_accounting

    plain = dp_accounting.GaussianDpEvent(multiplier)
    return plain if q >= 1 else dp_accounting.PoissonSampledDpEvent(q, plain)


@dataclass(frozen=True)
class Poisson(Sampler):
    """Each client takes part independently with probability q = size / clients.

    size: expected cohort m = qM; the public constant every mean is divided by.
    """

    name = "poisson"

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return one cohort: int64 ids, ascending, possibly none. Cost grows with the cohort, not with the population.

        The number of participants of M independent coins is Binomial(M, q), and given their number they are
        a uniform subset; so drawing the two in turn is the same law.
        """
        return _subset(generator, self.clients, int(generator.binomial(self.clients, self.q)))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round with noise ``multiplier`` × the add-remove sensitivity."""
        return _poisson_event(self.q, multiplier)


@dataclass(frozen=True)
class Truncated(Sampler):
    """Poisson cohorts of which a uniformly random ``maximum`` stay when more were drawn (arXiv 2508.15089).

    size: expected Poisson draw m = qM before the truncation; the public divisor. maximum: no cohort is larger.

    Raises:
        InputError: unless 0 < size ≤ clients and size ≤ maximum.
    """

    maximum: int  # type: ignore[assignment]

    name = "truncated"

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole("cohort.max", self.maximum, 1) < self.size:
            raise wrong("cohort.max", self.maximum, f"at least cohort.size = {self.size:g}")

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return one cohort of at most ``maximum`` ids: a random subset of a random subset is a random subset."""
        return _subset(generator, self.clients, min(int(generator.binomial(self.clients, self.q)), self.maximum))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event; the plain Poisson one where the maximum can never bind."""
        import dp_accounting

        if self.maximum >= self.clients:
            return _poisson_event(self.q, multiplier)
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(self.clients, self.q, self.maximum, multiplier)


@dataclass(frozen=True)
class Fixed(Sampler):
    """Exactly ``size`` clients, uniformly without replacement. Neighbours replace one client by another.

    Raises:
        InputError: unless size is a whole number in [1, clients].
    """

    name = "fixed"
    relation = "replace-one"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size == int(self.size), "cohort.size", self.size, "a whole number with sampling: fixed")

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return one cohort of exactly ``size`` ids, int64, ascending."""
        return _subset(generator, self.clients, int(self.size))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event; ``multiplier`` is relative to the replace-one sensitivity 2C."""
        import dp_accounting

        plain = dp_accounting.GaussianDpEvent(multiplier)
        if self.size == self.clients:
            return plain
        return dp_accounting.SampledWithoutReplacementDpEvent(self.clients, int(self.size), plain)


@dataclass(frozen=True)
class FromRound(Fixed):
    """Exactly ``size`` clients, a function of the round number alone: a schedule that anyone can recompute.

    For published procedures only (docs/specification.md, item 5): nothing is secret, so nothing is amplified.

    Raises:
        InputError: unless size is a whole number in [1, clients].
    """

    name = "round-number"

    def select_at(self, round: int, generator: np.random.Generator) -> Ids:
        """Return the cohort of a round, of which nothing is secret: the generator is not used."""
        return super().select_at(round, stream(0, "published cohort", round))

    def busiest(self, rounds: int) -> int:
        """Return in how many of the first ``rounds`` rounds the busiest client takes part."""
        return 0 if rounds == 0 else _busiest(self, 1 << (rounds - 1).bit_length())[rounds - 1]

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of a round for a client that is in it."""
        return Sampler.event(self, multiplier)  # nothing is secret, so nothing is amplified


@lru_cache(maxsize=64)
def _busiest(sampler: FromRound, rounds: int) -> tuple[int, ...]:
    """Return the busiest client's count after each of ``rounds`` rounds; kept, as a run asks after every round."""
    counts, highest = np.zeros(sampler.clients, dtype=np.int64), []
    for round in range(rounds):
        counts[sampler.select_at(round, NO_GENERATOR)] += 1
        highest.append(int(counts.max()))
    return tuple(highest)


def make_sampler(
    name: str, clients: int, size: float, maximum: int | None = None, separation: int | None = None
) -> Sampler:
    """Return the law called ``name`` in a recipe's ``cohort.sampling``; ``separation`` defaults to ⌊clients/size⌋.

    Raises:
        InputError: unknown name, ``max`` missing for truncated or given for another law, impossible sizes, or a
            separation for a law that keeps none.
    """
    law = LAWS[one_of("cohort.sampling", name, LAWS)]
    for key, value, takes in (
        ("cohort.max", maximum, ["truncated"]),
        ("cohort.separation", separation, ["min-separation", "cyclic-poisson"]),
    ):
        hint = f"Use sampling: {' or '.join(takes)}."
        require(value is None or name in takes, key, value, f"nothing with sampling: {name}", hint=hint)
    more: dict[str, Any] = {}
    if law is Truncated:
        require(maximum is not None, "cohort.max", "nothing", "a whole number with sampling: truncated")
        more = {"maximum": maximum}
    if issubclass(law, Separated):
        in_range("cohort.size", size, 0, whole("clients", clients, 1), open_low=True)
        more = {"separation": int(clients / size) if separation is None else separation}
    return cast(Sampler, law(clients, size, **more))


LAWS: dict[str, Any] = {law.name: law for law in (Poisson, Truncated, Fixed, Full, MinSeparation, CyclicPoisson)}
NAMES = tuple(LAWS)
SECRET = ("poisson", "truncated", "fixed")
"""Laws whose cohorts nobody knows."""
