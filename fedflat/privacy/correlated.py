"""The account of rounds that follow a schedule, with independent or correlated noise (docs/participation.md).

The whole run is one Gaussian mechanism, C·X/s + σ·Z, however the rounds' sums X answered to what was released; or,
where groups join by secret coins, ⌈T/b⌉ Poisson-sampled ones. Rounds that a run drew with another key (a server that
was killed) are a span of their own: a Gaussian mechanism of those rounds' columns, which composes with the others.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedflat.core import CyclicPoisson, Full, Sampler, Separated, require, wrong
from fedflat.core.factors import Factor
from fedflat.privacy.accounting.curves import compose_epsilon, schedule_epsilon
from fedflat.privacy.accounting.factorisation import factor_for
from fedflat.privacy.trust import Accounted, Guarantee

Span = tuple[int, int]
PUBLIC = (
    "everyone who sees the released models, and whoever knows who took part in which round: the schedule is public and "
    "hides nobody; the server itself is trusted"
)
COINS = (
    "everyone who sees the released models, whoever knows each client's group included; who joined by coin is secret, "
    "and the server itself is trusted"
)


@dataclass(frozen=True)
class ScheduledPlan(Accounted):
    """The account of rounds whose participants follow a schedule.

    factor: C of all T rounds. kind: of the noise. separation: b, between rounds of one client. chance: p with which a
    client joins a round of its group, None where the schedule is public. relation: zero-out (the client's slots stay,
    empty) or add-remove. spans: [first, last) of rounds that were drawn with other keys than this run's present one,
    which draws from ``start`` on.
    """

    factor: Factor
    kind: str
    separation: int
    chance: float | None
    relation: str
    spans: tuple[Span, ...] = ()
    start: int = 0

    @property
    def name(self) -> str:
        """The name that the ledger shows."""
        return "gaussian" if self.kind == "independent" else "correlated"

    @property
    def sentence(self) -> str:
        """The mechanism in words, for the statement."""
        bands = "" if self.kind == "tree" else f" of {self.factor.bands} bands"
        law = "one Poisson-sampled Gaussian mechanism for each turn of a client's group"
        return (
            "Gaussian noise that later rounds partly take back, row t of C⁻¹Z on round t's sum of clipped updates, "
            f"divided by the public expected cohort. C: {self.kind}{bands}, digest {self.factor.digest[:12]}; the std "
            f"of Z allows for its sensitivity {self.scale:.5g}. "
            f"The run is {'one Gaussian mechanism' if self.chance is None else law}."
        )

    @property
    def scale(self) -> float:
        """s/C_clip, by which the noise is multiplied; 1 for independent noise, whose σ is that of each round."""
        if self.kind == "independent":
            return 1.0
        return self.factor.largest_column() if self.chance is not None else self.factor.sensitivity(self.separation)

    def guarantees(self, plan: Any, rounds: int) -> tuple[Guarantee, ...]:
        """Return the guarantee towards recipients after ``rounds`` rounds, a number that is fixed in advance."""
        how = COINS if self.chance is not None else PUBLIC
        return (plan.guarantee("recipients", how, self.epsilon(plan, rounds)),)

    def known_epsilon(self, plan: Any, rounds: int) -> float:
        """Return ε towards somebody who learns which coins fell: Gaussians over Bin(turns, p) participations."""
        # A client has one turn in each span of `separation` rounds, and a new key begins a new span.
        turns = self._turns(rounds)
        return schedule_epsilon(turns, self.chance or 1.0, plan.event_multiplier, plan.delta) if turns else 0.0

    def epsilon(self, plan: Any, rounds: int, *, moved: float = 1.0) -> float:
        """ε at the plan's δ after ``rounds``. moved: 2 for replace-one neighbours of a public schedule."""
        import dp_accounting

        sigma = plan.event_multiplier
        if not self._spans(rounds):
            return 0.0
        if sigma == 0:
            return math.inf
        if self.chance is not None:
            return compose_epsilon(plan.sampler.event(sigma), self._turns(rounds), plan.delta, plan.accountant)
        # Spans were drawn with keys of their own: independent Gaussians, whose squares add up.
        squares = sum(self.factor.sensitivity(self.separation, *span) ** 2 for span in self._spans(rounds))
        event = dp_accounting.GaussianDpEvent(sigma * self.scale / math.sqrt(squares) / moved)
        return compose_epsilon(event, 1, plan.delta, plan.accountant)

    def record(self, plan: Any) -> dict[str, Any]:
        """Return what the ledger needs beside the plan's fields: C's description, b, k and p."""
        return {
            "noise": self.kind, "bands": self.factor.bands, "factor": self.factor.digest, "rounds": self.factor.rounds,
            "separation": self.separation, "participations": -(-self.factor.rounds // self.separation),
            **({} if self.chance is None else {"chance": self.chance}),
        }  # fmt: skip

    def by_round(self, plan: Any, round: int) -> dict[str, Any]:
        """The column of C of a round, from which its sensitivity follows, and the norm of its row of C⁻¹."""
        if self.kind == "independent" or round >= self.factor.rounds:
            return {}
        column = {} if self.kind == "tree" else {"column": [float(c) for c in self.factor.columns[round]]}
        return {**column, "row_norm": float(self.factor.row_norms[round])}

    def standing(self, entries: Iterable[Mapping[str, Any]], key: str | None, start: int) -> "ScheduledPlan":
        """Return the plan with the spans that a ledger's lines show for each key; ``key`` draws from ``start`` on.

        key: None for that of the last line.
        """
        spans: dict[Any, Span] = {}
        name = None
        for entry in entries:
            name, round = entry.get("key_id"), int(entry["round"])
            first, last = spans.get(name, (round, round + 1))
            spans[name] = (min(first, round), max(last, round + 1))
        # The present key's rounds are not over yet, so its span ends with the run.
        current = spans.pop(name if key is None else key, (start, start))
        return replace(self, spans=tuple(spans.values()), start=current[0])

    def _turns(self, rounds: int) -> int:
        """Return how often a client's group has its turn."""
        return sum(-(-(last - first) // self.separation) for first, last in self._spans(rounds))

    def _spans(self, rounds: int) -> tuple[Span, ...]:
        present = (self.start, min(rounds, self.factor.rounds))
        return tuple((first, last) for first, last in (*self.spans, present) if last > first)


def scheduled_plan(
    sampler: Sampler, rounds: int, kind: str = "independent", bands: int | None = None, momentum: float = 0.0
) -> ScheduledPlan | None:
    """The account that a cohort law and a kind of noise need; None for the plain account of independent noise.

    Raises:
        InputError: correlated noise with a cohort law that keeps no rounds apart, or impossible bands.
    """
    if kind == "independent" and not isinstance(sampler, Separated):
        require(bands is None, "privacy.noise.bands", bands, "nothing with kind: independent")
        return None
    if not isinstance(sampler, (Full, Separated)):
        allowed = f"full, min-separation or cyclic-poisson with {kind} noise"
        hint = "Its proof needs rounds of one client that are known to lie apart."
        raise wrong("cohort.sampling", sampler.name, allowed, hint=hint)
    chance = sampler.chance if isinstance(sampler, CyclicPoisson) else None
    if kind == "tree" and chance is not None:
        hint = "Amplification is proven for as many bands as there are groups, and a tree has more."
        raise wrong("privacy.noise.kind", kind, "banded or toeplitz with sampling: cyclic-poisson", hint=hint)
    factor = factor_for(kind, rounds, sampler.separation, bands, momentum, once=chance is not None)
    return ScheduledPlan(factor, kind, sampler.separation, chance, sampler.relation)
