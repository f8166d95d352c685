"""Hold everything live in a run, what its server and clients agree on, and what ``on_round`` is given after a round.

The planned run's releases are (ε, δ)-private together, and so is any part of them that is chosen by looking at them:
ending early by what was released costs what the whole plan costs, and no less is proven. A round's own number would
hold only for an end that was fixed in advance. So the rounds that are left are written to the ledger as charged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedflat.config.sections import EvaluationSection
from fedflat.core import Identity, Layout, PersonalState
from fedflat.core.types import Algorithm, Average, Clip, Local, MeanView, Mechanism, Optimizer, RoundState, broadcast_by
from fedflat.data.clients import FederatedData
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Backend
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Plan
from fedflat.records.folder import RunFolder
from fedflat.records.opening import Opening
from fedflat.records.signing import Operator

Record = dict[str, Any]
Metric = Any
"""(outputs, targets) of the test set -> a number; or an object as torchmetrics has them."""
SEEN = "should_stop ended the run after on_round had read state.private: if that decided the end, no ε covers it."
NOT_RUN = "planned and not run, since what was released ended the run"


@dataclass(frozen=True)
class RoundParts:
    """Hold what the server and the clients of a run agree on, the same in a simulation and a federation.

    optimizer: what is public of a round's noise -> the server optimiser of that round.
    weighted: mean weighted by sample counts; only for the non-private twins and published procedures.
    average: what is released of the iterates; None: the last one.
    """

    algorithm: Algorithm
    plan: Plan
    clip: Clip
    mechanism: Mechanism
    optimizer: Callable[[MeanView], Optimizer]
    local: Local
    layout: Layout
    weighted: bool = False
    average: Average | None = None

    def first_state(self, shared: Tensor, threshold: float) -> RoundState:
        """Return the server before round 0."""
        slots = {name: slot for step in self.algorithm.server for name, slot in step.initial(shared).items()}
        return RoundState(0, shared.clone(), threshold, slots)

    @property
    def message_length(self) -> int:
        """Entries of a client's message: k·d."""
        return self.algorithm.vectors * self.layout.dimension

    @property
    def message_tensors(self) -> tuple[slice, ...]:
        """The slice of each shared tensor in a message, for each of its k vectors."""
        starts = range(0, self.message_length, self.layout.dimension)
        return tuple(slice(at + s.start, at + s.stop) for at in starts for s in self.layout.tensors("shared"))

    @property
    def broadcast(self) -> tuple[str, ...]:
        """The slots that every client receives, as the server steps and the server optimiser say."""
        return broadcast_by((*self.algorithm.server, self.algorithm.optimizer))

    def shortened(self, steps: int) -> "RoundParts":
        """Return the same parts with at most ``steps`` local steps in each phase."""
        few, method = replace(self.local, steps=min(self.local.steps, steps), epochs=None), self.algorithm
        phases = tuple(p if p.steps is None else replace(p, steps=min(p.steps, few.steps)) for p in method.phases)
        return replace(self, local=few, algorithm=replace(method, phases=phases))


def marked_released(module: nn.Module) -> nn.Module:
    """Return the module of released weights, marked: a run that trains it on says so in its statement."""
    before = getattr(module, "prior", "none")
    if isinstance(before, str) and not before.startswith("earlier run"):  # it may mean something else by that name
        vars(module)["prior"] = "earlier run" if before in ("none", "unknown") else f"earlier run: {before}"
    return module


class RoundResult:
    """The state after a round, as it is released, and what only a simulation knows beside it.

    round: rounds finished. A run cannot be ended by what ``private`` says, which no ε covers.
    """

    def __init__(self, state: RoundState, private: Record, make_module: Callable[[], nn.Module]) -> None:
        self.round = state.round
        self._state, self._private, self._make_module = state, private, make_module
        self.read_private = False

    def model(self) -> nn.Module:
        """Return a module of its own with the released weights, in eval mode."""
        return marked_released(self._make_module().eval())

    @property
    def weights(self) -> Tensor:
        """The released weights ``(d,)``, a copy, in the order of the module's parameters."""
        return self._state.released.clone()

    @property
    def private(self) -> Record:
        """The round's record that no guarantee covers (private/private.jsonl)."""
        self.read_private = True
        return self._private


def charge_remaining_rounds(ledger: Ledger, plan: Plan, rounds: range, bound: float) -> None:
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
    """Return what must be said of a run with fewer rounds than planned: that nothing shows who ended it, and by
    what."""
    stated = isinstance(plan.mechanism, ScheduledPlan) or plan.selection is not None  # the planned run's ε already
    if not 0 < charged < planned or not plan.private or plan.protocol != "sound" or stated:
        return []
    return [
        f"ε is that of {charged} rounds, of {planned} planned: it holds unless what was released decided when to stop "
        f"(then ε = {plan.epsilon(planned):.4g}, of all that were planned)."
    ]


OnRound = Callable[[Record, RoundResult], object]
"""Called after a round with its released record and the state it left; True ends the run."""


@dataclass
class Job:
    """Hold everything live in a run: frozen parts, the data, a module to evaluate with, a back end, keys and a folder.

    initial_weights: w^0 ``(D,)``. identity: what the run is. opening: what its folder says it is. stored: its key comes
    from OS entropy and lies in a file outside the folder. A run without a folder is drawn with ``key`` as it is.
    tell: is given each note at once. made_for: the shapes the module was built for. metrics: the user's own, on public
    test data. check_ins: chooses the cohort from who is there, in a deployment. operator: the key that signs the run's
    records, if there is one. why: why rounds are drawn again. threads: test batches at once.
    """

    parts: RoundParts
    data: FederatedData
    problem: ModuleProblem
    backend: Backend
    initial_weights: Tensor
    threshold: float
    seed: int
    key: bytes = field(repr=False)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    threads: int = 1
    folder: RunFolder | None = None
    identity: Identity = field(default_factory=lambda: Identity(""))
    opening: Opening | None = None
    stored: bool = False
    notes: list[str] = field(default_factory=list)
    tell: Callable[[str], object] | None = None
    public_update: Callable[[RoundState], Tensor] | None = None
    operator: Operator | None = None
    stages: dict[str, float] = field(default_factory=dict)
    charged_again: int = 0
    why: str = ""
    made_for: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    check_ins: Callable[[RoundState], np.ndarray] | None = None

    @cached_property
    def last_round(self) -> int:
        """The number of rounds the plan and its budget allow, rounds charged twice included."""
        return min(self.parts.plan.rounds, self.parts.plan.rounds_within_budget(self.charged_again))

    def say(self, note: str) -> None:
        """Note what was found on resuming: for ``Outcome.notes``, and at once for whoever listens."""
        self.notes.append(note)
        if self.tell is not None:
            self.tell(note)

    @cached_property
    def held(self) -> list[int]:
        """Ids of the clients that hold data back for their personal accuracy."""
        return [i for i, rows in enumerate(self.data.held_back) if len(rows)]


@dataclass(frozen=True)
class Start:
    """Where a run goes on: its state, what clients keep, and the records of the rounds that are done."""

    state: RoundState
    heads: PersonalState
    history: list[Record]
    private: list[Record]


@dataclass(frozen=True)
class Outcome(Start):
    """Where a run ended. ``stopped`` says why, if before the last round; seen: on request, after private values were
    read, and by no signal."""

    entries: list[Record]
    stopped: str = ""
    notes: tuple[str, ...] = ()
    complete: bool = True
    seen: bool = False


class MemoryLedger:
    """A ledger for runs without a folder: the same lines, kept in memory."""

    key_id = None

    def __init__(self) -> None:
        self.entries: list[Record] = []

    def append(self, payload: Mapping[str, Any]) -> Record:
        """Record one privacy event, in memory only."""
        self.entries.append({"line": len(self.entries), **payload})
        return self.entries[-1]

    def charge_open(self, payload: Mapping[str, Any], reason: str) -> Record:
        """Record an event of a round that is never finished."""
        return self.append({**payload, "reason": reason})

    def rounds_recorded(self) -> set[int]:
        """Return the rounds that have at least one event."""
        return {entry["round"] for entry in self.entries}
