"""How a round's cohort is drawn: the public law, the neighbouring relation it earns, and the draw itself.

Public facts (number of clients, expected size, maximum) are fields; the secret is the generator given to
``select``. The laws live here rather than in ``pieces`` because the privacy accounts need them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range, one_of, whole, wrong
from fedflat.core.rng import stream
from fedflat.core.schedules import CyclicPoisson, Full, MinSeparation
from fedflat.core.types import Sampler

Ids = NDArray[np.int64]
SECRET = ("poisson", "truncated", "fixed")
"""Laws whose cohorts nobody knows."""
NAMES = (*SECRET, "full", "min-separation", "cyclic-poisson")


def _subset(generator: np.random.Generator, clients: int, count: int) -> Ids:
    """A uniform subset of ``count`` ids, sorted. Unshuffled ``choice`` is exact and O(count) (Floyd's method)."""
    chosen = generator.choice(clients, size=count, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))


def _poisson_event(q: float, multiplier: float) -> Any:
    import dp_accounting

    plain = dp_accounting.GaussianDpEvent(multiplier)
    return plain if q >= 1 else dp_accounting.PoissonSampledDpEvent(q, plain)


@dataclass(frozen=True)
class Poisson:
    """Each client takes part independently with probability q = size / clients.

    Args:
        clients: population M.
        size: expected cohort m = qM; the public constant every mean is divided by.

    Raises:
        InputError: unless 0 < size ≤ clients.
    """

    clients: int
    size: float

    name, maximum = "poisson", None
    relation = "add-remove"

    def __post_init__(self) -> None:
        whole("clients", self.clients, 1)
        in_range("cohort.size", self.size, 0, self.clients, open_low=True)

    @property
    def q(self) -> float:
        """Probability that a given client takes part in a given round."""
        return self.size / self.clients

    def select(self, generator: np.random.Generator) -> Ids:
        """One cohort: int64 ids, ascending, possibly none. Cost grows with the cohort, not with the population.

        The number of participants of M independent coins is Binomial(M, q), and given their number they are
        a uniform subset; so drawing the two in turn is the same law.
        """
        return _subset(generator, self.clients, int(generator.binomial(self.clients, self.q)))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round with noise ``multiplier`` × the add-remove sensitivity."""
        return _poisson_event(self.q, multiplier)


@dataclass(frozen=True)
class Truncated:
    """Poisson cohorts of which a uniformly random ``maximum`` stay when more were drawn (arXiv 2508.15089).

    Args:
        clients: population M.
        size: expected Poisson draw m = qM before the truncation; the public divisor.
        maximum: no cohort is larger than this.

    Raises:
        InputError: unless 0 < size ≤ clients and size ≤ maximum.
    """

    clients: int
    size: float
    maximum: int

    name = "truncated"
    relation = "add-remove"

    def __post_init__(self) -> None:
        whole("clients", self.clients, 1)
        in_range("cohort.size", self.size, 0, self.clients, open_low=True)
        if whole("cohort.max", self.maximum, 1) < self.size:
            raise wrong("cohort.max", self.maximum, f"at least cohort.size = {self.size:g}")

    @property
    def q(self) -> float:
        """Probability of being drawn, before the truncation."""
        return self.size / self.clients

    def select(self, generator: np.random.Generator) -> Ids:
        """One cohort of at most ``maximum`` ids: a random subset of a random subset is a random subset."""
        drawn = int(generator.binomial(self.clients, self.q))
        return _subset(generator, self.clients, min(drawn, self.maximum))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event; the plain Poisson one where the maximum can never bind."""
        import dp_accounting

        if self.maximum >= self.clients:
            return _poisson_event(self.q, multiplier)
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(self.clients, self.q, self.maximum, multiplier)


@dataclass(frozen=True)
class Fixed:
    """Exactly ``size`` clients, uniformly without replacement. Neighbours replace one client by another.

    Raises:
        InputError: unless size is a whole number in [1, clients].
    """

    clients: int
    size: float

    name, maximum = "fixed", None
    relation = "replace-one"

    def __post_init__(self) -> None:
        whole("clients", self.clients, 1)
        if not math.isfinite(self.size) or self.size != int(self.size):
            raise wrong("cohort.size", self.size, "a whole number with sampling: fixed")
        whole("cohort.size", int(self.size), 1, self.clients)

    @property
    def q(self) -> float:
        """Share of the population in each cohort."""
        return self.size / self.clients

    def select(self, generator: np.random.Generator) -> Ids:
        """One cohort of exactly ``size`` ids, int64, ascending."""
        return _subset(generator, self.clients, int(self.size))

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event; ``multiplier`` is relative to the replace-one sensitivity 2C."""
        import dp_accounting

        plain = dp_accounting.GaussianDpEvent(multiplier)
        if self.size == self.clients:
            return plain
        return dp_accounting.SampledWithoutReplacementDpEvent(self.clients, int(self.size), plain)


@dataclass(frozen=True)
class FromRound:
    """Exactly ``size`` clients, a function of the round number alone: a schedule that anyone can recompute.

    For published procedures only (docs/specification.md, item 5): nothing is secret, so nothing is amplified.

    Raises:
        InputError: unless size is a whole number in [1, clients].
    """

    clients: int
    size: float

    name, maximum = "round-number", None
    relation = "replace-one"

    def __post_init__(self) -> None:
        Fixed(self.clients, self.size)  # the same limits

    @property
    def q(self) -> float:
        """Share of the population in each cohort; amplifies nothing here."""
        return self.size / self.clients

    def public_generator(self, round: int) -> np.random.Generator:
        """What a round's cohort is drawn from, instead of the secret stream."""
        return stream(0, "published cohort", round)

    def select(self, generator: np.random.Generator) -> Ids:
        """One cohort of exactly ``size`` ids, int64, ascending."""
        return _subset(generator, self.clients, int(self.size))

    def participations(self, rounds: int) -> Ids:
        """In how many of the first ``rounds`` rounds each client takes part, int64 ``(clients,)``."""
        counts = np.zeros(self.clients, dtype=np.int64)
        for round in range(rounds):
            counts[self.select(self.public_generator(round))] += 1
        return counts

    def busiest(self, rounds: int) -> int:
        """The most of the first ``rounds`` rounds that any one client takes part in."""
        if rounds == 0:
            return 0
        return _busiest(self, 1 << (rounds - 1).bit_length())[rounds - 1]

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of a round for a client that is in it."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(multiplier)


@lru_cache(maxsize=64)
def _busiest(sampler: FromRound, rounds: int) -> tuple[int, ...]:
    """The busiest client's count after each of ``rounds`` rounds; kept, as a run asks after every round."""
    counts, found = np.zeros(sampler.clients, dtype=np.int64), []
    for round in range(rounds):
        counts[sampler.select(sampler.public_generator(round))] += 1
        found.append(int(counts.max()))
    return tuple(found)


def make_sampler(
    name: str, clients: int, size: float, maximum: int | None = None, separation: int | None = None
) -> Sampler:
    """The law called ``name`` in a recipe's ``cohort.sampling``; ``separation`` defaults to ⌊clients/size⌋.

    Raises:
        InputError: unknown name, ``max`` missing for truncated or given for another law, impossible sizes, or a
            separation for a law that keeps none.
    """
    one_of("cohort.sampling", name, NAMES)
    if maximum is not None and name != "truncated":
        raise wrong("cohort.max", maximum, f"nothing with sampling: {name}", hint="Use sampling: truncated.")
    if name in ("min-separation", "cyclic-poisson"):
        in_range("cohort.size", size, 0, whole("clients", clients, 1), open_low=True)
        apart = int(clients / size) if separation is None else separation
        return (MinSeparation if name == "min-separation" else CyclicPoisson)(clients, size, apart)
    if separation is not None:
        hint = "Use sampling: min-separation or cyclic-poisson."
        raise wrong("cohort.separation", separation, f"nothing with sampling: {name}", hint=hint)
    if name == "truncated":
        if maximum is None:
            raise wrong("cohort.max", "nothing", "a whole number with sampling: truncated")
        return Truncated(clients, size, maximum)
    if name == "full":
        return Full(clients, size)
    return Poisson(clients, size) if name == "poisson" else Fixed(clients, size)
