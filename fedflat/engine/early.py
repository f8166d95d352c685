"""What ``on_round`` is given after a round, and what it costs when it ends the run.

The planned run's releases are (ε, δ)-private together, and so is any part of them that is chosen by looking at them:
ending early by what was released costs what the whole plan costs, and no less is proven. A round's own number would
hold only for an end that was fixed in advance. So the rounds that are left are written to the ledger as charged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fedflat.core.checks import wrong
from fedflat.core.types import RoundState
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Plan

Record = dict[str, Any]
SEEN = "should_stop ended the run after on_round had read state.private: if that decided the end, no ε covers it."
NOT_RUN = "planned and not run, since what was released ended the run"


class After:
    """The state after a round, as it is released, and what only a simulation knows beside it.

    round: rounds finished. A run cannot be ended by what ``private`` says, which no ε covers.
    """

    def __init__(self, state: RoundState, private: Record, made: Callable[[], nn.Module]) -> None:
        self.round = state.round
        self._state, self._private, self._made = state, private, made
        self.read_private = False

    def model(self) -> nn.Module:
        """A module of its own with the released weights, in eval mode."""
        return self._made().eval()

    @property
    def weights(self) -> Tensor:
        """The released weights ``(d,)``, a copy, in the order of the module's parameters."""
        return self._state.released.clone()

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """What the server carries along (momentum, a direction), copies; released like the weights."""
        return {name: value.clone() for name, value in self._state.slots.items()}

    @property
    def private(self) -> Record:
        """The round's record that no guarantee covers (private/private.jsonl)."""
        self.read_private = True
        return self._private


def refuse_private(read: bool) -> None:
    """Refuse an end that was decided with private values at hand."""
    if read:
        found = "a run ended by a function that has read state.private"
        raise wrong("on_round", found, "True only from a function of the released record and state.model()")


def charge_rest(ledger: Ledger, plan: Plan, rounds: range, bound: float) -> None:
    """Write the planned rounds that will not run to the ledger; where rounds share one account nothing is left to add.

    bound: the clip's now, which scales noise and sensitivity alike.
    """
    if not plan.private or isinstance(plan.mechanism, ScheduledPlan):
        return
    recorded = ledger.rounds_recorded()
    for round in rounds:
        for line in () if round in recorded else plan.records(round, bound):
            ledger.charge_open(line, NOT_RUN)


def interrupted(plan: Plan, charged: int, planned: int) -> list[str]:
    """What must be said of a run with fewer rounds than planned: that nothing shows who ended it, and by what."""
    stated = isinstance(plan.mechanism, ScheduledPlan) or plan.selection is not None  # the planned run's ε already
    if not 0 < charged < planned or not plan.private or plan.protocol != "sound" or stated:
        return []
    return [
        f"ε is that of {charged} rounds, of {planned} planned: it holds unless what was released decided when to stop "
        f"(then ε = {plan.epsilon(planned):.4g}, of all that were planned)."
    ]
