"""Account for methods with a mechanism of their own: noisy votes and the discrete Gaussian."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from fedflat.core import ROUNDING, require
from fedflat.core.discrete import default_granularity
from fedflat.privacy.accounting.discrete import DDGaussAccount
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import TEXTS
from fedflat.privacy.trust import Accounted, AccountingParams, Guarantee, guarantees


@dataclass(frozen=True)
class VotesPlan(Accounted):
    """The account of one-hot votes of Q labels per cohort draw.

    σ is the noise std per class, in votes. One draw is PoissonSampled(q, Gaussian(σ/√Q)): its Q·V votes of one client
    have norm √Q. Under replace-one Q ones move, so the sensitivity is √(2Q), not 2√Q.

    labels: Q. total: cohort draws of the whole run, spread evenly over the plan's rounds. relation: as the cohort law
    and the trust model earn it.
    """

    labels: int
    total: int
    relation: str = "add-remove"
    name: str = "votes"
    several = True

    @property
    def queries(self) -> int:
        """Labels bought in all."""
        return self.labels * self.total

    @property
    def facts(self) -> dict[str, str]:
        """What the privacy statement says of the mechanism."""
        return {
            "mechanism": TEXTS["noise"]["votes"],
            "clip": f"of one vote 1, of a draw's votes {math.sqrt(self.labels):.4g}",
        }

    def draws(self, plan: Plan, round: int) -> range:
        """Return the cohort draws of a round, numbered through the run."""
        return range(self.spent(plan, round), self.spent(plan, round + 1))

    def spent(self, plan: Plan, rounds: int) -> int:
        """Return the draws made after so many rounds; beyond the planned rounds at the same pace, rounded up."""
        if rounds <= plan.rounds:
            return self.total * rounds // max(plan.rounds, 1)
        return -(-self.total * rounds // max(plan.rounds, 1))

    def sensitivity(self, plan: Plan, bound: float = 1.0) -> float:
        """√Q·(1 + s) under add-remove, √(2Q)·(1 + s) under replace-one: a hostile ballot may make the sum round."""
        return math.sqrt(self.labels * (2 if self.relation == "replace-one" else 1)) * (1 + ROUNDING)

    def std(self, plan: Plan, bound: float = 1.0) -> float:
        """σ·(1 + s): std of the noise on each class's count."""
        return plan.event_multiplier * (1 + ROUNDING)

    def params(self, plan: Plan, rounds: int) -> AccountingParams:
        """Return the Gaussian account of the draws; its multiplier is scaled so that std / sensitivity is the drawn
        one.
        """
        base = plan.params
        # The account divides by the relation's factor again.
        multiplier = base.factor * self.std(plan) / self.sensitivity(plan)
        return replace(base, rounds=self.spent(plan, rounds), noise_multiplier=multiplier)

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        """Return the guarantee towards each adversary after all draws of `rounds` rounds."""
        return guarantees(self.params(plan, rounds))

    def record(self, plan: Plan) -> dict[str, Any]:
        """Q; std and sensitivity are in the plan's own fields."""
        return {"labels_per_draw": self.labels}


def most_messages(clients: int, rate: float, rounds: int, chance: float) -> int:
    """Return the smallest n_max that no Poisson cohort of `rounds` rounds exceeds but with probability ≤ `chance`; at
    least 1.
    """
    from scipy.stats import binom

    return max(1, int(binom.isf(min(1.0, chance / max(rounds, 1)), clients, rate)) + 1)


@dataclass(frozen=True)
class DDGaussPlan(Accounted):
    """The account of the distributed discrete Gaussian, under trust: distributed.

    dimension: d. clip: C. bits, granularity (None: by `default_granularity` from the plan), beta: of the mechanism.
    The server fills every sum up to n_max shares, without which recipients get no amplification; n_max is the count
    that a cohort exceeds in any round with chance at most δ/100 (such a round is aborted, and charged to δ).
    most: n_max once it is settled (`settled`), so that a question at another δ is about the mechanism that runs.
    """

    dimension: int
    clip: float
    bits: int = 16
    granularity: float | None = None
    beta: float = math.exp(-0.5)
    most: int | None = None
    name: str = "ddgauss"
    relation: str = "add-remove"
    rounding = 0.0  # whole numbers
    facts = {"mechanism": TEXTS["noise"]["discrete"]}  # noqa: RUF012  (what the privacy statement says of it)

    def settled(self, plan: Plan) -> Self:
        """Return the same with n_max and γ as numbers: what runs must not follow the δ that ε is asked for."""
        return replace(self, granularity=self.pitch(plan), most=self.n_max(plan))

    def refuse_wrapping(self, plan: Plan) -> None:
        """Raise InputError where γ is so fine that sums wrap around, which leaves no estimate."""
        finest = replace(self, granularity=None).pitch(plan)
        allowed = f"none, or coarser: sums are modulo 2^{self.bits}"
        require(self.pitch(plan) >= finest * (1 - 1e-9), "algorithm.granularity", self.granularity, allowed)

    def n_max(self, plan: Plan) -> int:
        """Return the shares in every topped-up sum; also the number of messages that the default γ makes room for."""
        if self.most is not None:
            return self.most
        sampler = plan.sampler
        require(sampler.name == "poisson", "cohort.sampling", sampler.name, "poisson for ddgauss")
        most = most_messages(sampler.clients, sampler.q, plan.rounds, plan.delta / 100)
        return max(min(most, sampler.clients), self._min_cohort(plan) + plan.colluders)

    def pitch(self, plan: Plan) -> float:
        """γ in the update's units."""
        if self.granularity is not None:
            return self.granularity
        least, most = self._min_cohort(plan), self.n_max(plan)
        return default_granularity(self.clip, plan.event_multiplier, self.dimension, least, most, self.bits)

    def account(self, plan: Plan) -> DDGaussAccount:
        """Return the account of this mechanism in this plan; InputError unless it has Poisson cohorts and a
        min_cohort."""
        return DDGaussAccount(
            **self.record(plan), clients=plan.sampler.clients, cohort=plan.sampler.size, delta=plan.delta,
            noise_multiplier=plan.event_multiplier, min_cohort=self._min_cohort(plan), colluders=plan.colluders,
        )  # fmt: skip

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        """Return the guarantee towards recipients and the server after `rounds` rounds."""
        return self.account(plan).guarantees(rounds)

    def record(self, plan: Plan) -> dict[str, Any]:
        """All that `DDGaussAccount` needs beside the plan's own fields (the minimum cohort is one of these)."""
        return {
            "dimension": self.dimension, "clip": self.clip, "bits": self.bits, "granularity": self.pitch(plan),
            "beta": self.beta, "n_max": self.n_max(plan),
        }  # fmt: skip

    def _min_cohort(self, plan: Plan) -> int:
        require(plan.min_cohort is not None, "privacy.trust", plan.trust, "distributed, for ddgauss")
        return int(plan.min_cohort or 0)
