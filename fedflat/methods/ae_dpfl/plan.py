"""Noisy votes (ae-dpfl) as a plan's mechanism: how many cohort draws a round makes, and what each of them spends."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedflat.core.rounding import ROUNDING
from fedflat.privacy.trust import AccountingParams, Guarantee, guarantees

if TYPE_CHECKING:
    from fedflat.privacy.plan import Plan


@dataclass(frozen=True)
class VotesPlan:
    """`fedflat.privacy.plan.Accounted` for one-hot votes of Q labels per cohort draw.

    σ is the noise std per class, in votes. One draw is PoissonSampled(q, Gaussian(σ/√Q)): its Q·V votes of one client
    have norm √Q. Under replace-one Q ones move, so the sensitivity is √(2Q), not 2√Q.

    labels: Q. total: cohort draws of the whole run, spread evenly over the plan's rounds. relation: as the cohort law
    and the trust model earn it.
    """

    labels: int
    total: int
    relation: str = "add-remove"
    name: str = "votes"

    def draws(self, plan: Plan, round: int) -> range:
        """The cohort draws of a round, numbered through the run."""
        return range(self.spent(plan, round), self.spent(plan, round + 1))

    def spent(self, plan: Plan, rounds: int) -> int:
        """Draws made after so many rounds; beyond the planned rounds at the same pace, rounded up."""
        if rounds <= plan.rounds:
            return self.total * rounds // max(plan.rounds, 1)
        return -(-self.total * rounds // max(plan.rounds, 1))

    def sensitivity(self, plan: Plan) -> float:
        """√Q·(1 + s) under add-remove, √(2Q)·(1 + s) under replace-one: a hostile ballot may make the sum round."""
        return math.sqrt(self.labels * (2 if self.relation == "replace-one" else 1)) * (1 + ROUNDING)

    def std(self, plan: Plan) -> float:
        """σ·(1 + s): std of the noise on each class's count."""
        return plan.event_multiplier * (1 + ROUNDING)

    def params(self, plan: Plan, rounds: int) -> AccountingParams:
        """The Gaussian account of the draws; its multiplier is scaled so that std / sensitivity is the drawn one."""
        base = plan.params
        multiplier = base.factor * self.std(plan) / self.sensitivity(plan)
        return dataclasses.replace(base, rounds=self.spent(plan, rounds), noise_multiplier=multiplier)

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        """Towards each adversary after all draws of `rounds` rounds."""
        return guarantees(self.params(plan, rounds))

    def event(self, plan: Plan) -> Any:
        """The event of one cohort draw, for dp-accounting."""
        import dp_accounting

        multiplier = self.std(plan) / self.sensitivity(plan)
        if multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(multiplier) if plan.trust == "local" else plan.sampler.event(multiplier)

    def record(self, plan: Plan) -> dict[str, Any]:
        """Q; std and sensitivity are in the plan's own fields."""
        return {"labels_per_draw": self.labels}
