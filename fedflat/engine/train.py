"""Rounds, evaluation, checkpoints and the stop at the budget: what turns one round into a run."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedflat.core.checks import RunError
from fedflat.core.personal import ClientContext, PersonalState
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.stopping import asked
from fedflat.core.types import Algorithm, Broadcast, Phase, RoundState, ScaledMechanism
from fedflat.data.clients import FederatedData
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.ahead import ahead
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import train_client
from fedflat.engine.device import exact, sent
from fedflat.engine.early import After, charge_rest, refuse_private
from fedflat.engine.evaluate import (
    Metric,
    Scores,
    class_accuracy,
    client_accuracies,
    measured,
    outputs_of,
    scores,
    spread,
)
from fedflat.engine.parts import Parts
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.resume import Start, first_start, ledger_mark, resume_run
from fedflat.engine.round import MALFORMED, accumulator_of, broadcast_of, finish_round, select_cohort, within_cap
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Claiming, Plan
from fedflat.records import checkpoint
from fedflat.records.folder import LEDGER, RunFolder
from fedflat.records.opening import Identity, Opening

Record = dict[str, Any]
OnRound = Callable[[Record, After], object]
"""Called after a round with its released record and the state it left; True ends the run."""

LARGE = 200_000
"""Parameters from which drawing a round's noise takes longer than starting a thread."""

PERSONAL_TIMES = 10
"""Evaluations of clients' own models in a run whose recipe says nothing: each passes over all held-back data."""


class Backend(Protocol):
    """Trains a cohort and adds every client's message to the accumulator, in client order."""

    name: str

    def train(
        self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState
    ) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """every: rounds between evaluations on public test data. personal_every: the same for personal accuracy
    (None: about ten times in a run). The last round is always evaluated. threads: batches at once."""

    every: int = 1
    personal_every: int | None = None
    batch_size: int = 500
    threads: int = 1


@dataclass
class Job:
    """Everything live in a run: frozen parts, the data, a module to evaluate with, a back end, keys and a folder.

    identity: what the run is. opening: what its folder says it is. stored: its key comes from OS entropy and lies in a
    file outside the folder. tell: is given each note at once. made_for: the shapes the module was built for. metrics:
    the user's own, on public test data. check_ins: chooses the cohort from who is there, in a deployment.
    first_backend: of round 0, where that is made of something else (``Parts.first``). A run without a folder is drawn
    with ``key`` as it is, so a test that needs a key of its own sets it.
    """

    parts: Parts
    data: FederatedData
    problem: ModuleProblem
    backend: Backend
    first: Tensor
    threshold: float
    seed: int
    key: bytes = field(repr=False)
    evaluation: Evaluation = Evaluation()
    folder: RunFolder | None = None
    identity: Identity = field(default_factory=lambda: Identity(""))
    opening: Opening | None = None
    stored: bool = False
    notes: list[str] = field(default_factory=list)
    tell: Callable[[str], object] | None = None
    public_update: Callable[[RoundState], Tensor] | None = None
    stages: dict[str, float] = field(default_factory=dict)
    charged_again: int = 0
    made_for: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    check_ins: Callable[[RoundState], np.ndarray] | None = None
    first_backend: Backend | None = None

    @cached_property
    def last_round(self) -> int:
        """The number of rounds the plan and its budget allow, rounds charged twice included."""
        return min(self.parts.plan.rounds, self.parts.plan.rounds_within_budget(self.charged_again))

    @property
    def fingerprint(self) -> str:
        """One string for everything that makes the run what it is; never written anywhere."""
        return self.identity.fingerprint

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
class Outcome:
    """Where a run ended. ``stopped`` says why, if before the last round; seen: on request, after private values were
    read, and by no signal."""

    state: RoundState
    heads: PersonalState
    history: list[Record]
    private: list[Record]
    entries: list[Record]
    stopped: str = ""
    notes: tuple[str, ...] = ()
    complete: bool = True
    seen: bool = False


def train(
    job: Job,
    *,
    on_round: OnRound | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Run the rounds left from where the job's folder stands; stop before a round that would exceed the budget, or
    after one for which ``on_round`` gives True."""
    plan = job.parts.plan
    with contextlib.ExitStack() as stack:
        stack.enter_context(exact(job.problem.device))
        ledger, start = stack.enter_context(_opened(job))
        state, heads, history, private = start.state, start.heads, start.history, start.private
        plan = plan.standing(ledger.entries, ledger.key_id, state.round)
        job.parts = job.parts if plan is job.parts.plan else replace(job.parts, plan=plan)
        job.charged_again = plan.again(ledger.entries)
        vars(job).pop("last_round", None)  # whoever asked before now did not know what is charged again
        stopped, peeked, seen = "", False, False
        saved: Callable[[], object] = _nothing
        stack.callback(lambda: saved())
        while state.round < plan.rounds:
            if state.round >= job.last_round:
                stopped = f"stopped before round {state.round}: it would exceed the budget ε = {plan.budget:g}"
                break
            if should_stop is not None and should_stop():
                stopped = f"stopped as asked after {state.round} rounds"
                seen = peeked and not asked()
                break
            state, released, hidden = _one_round(job, state, heads, ledger, saved)
            history.append(released)
            private.append(hidden)
            if job.folder is not None:
                saved = _save(job, state, heads, released, hidden, ledger_mark(ledger))
            if on_round is None:
                continue
            after = After(state, hidden, functools.partial(_module, job, state, heads))
            ended = on_round(released, after) is True
            peeked = peeked or after.read_private
            if ended and state.round < job.last_round:
                refuse_private(peeked)
                rest, bound = range(state.round, job.last_round), job.parts.clip.bound(state.clip)
                charge_rest(ledger, job.parts.plan, rest, bound)
                stopped = f"ended early after {state.round} rounds by what was released"
                break
        complete = state.round >= job.last_round
        if broken := [found for record in private if (found := record.get(MALFORMED))]:
            job.say(f"{sum(broken)} messages in {len(broken)} rounds were malformed and counted as zero")
        return Outcome(state, heads, history, private, list(ledger.entries), stopped, tuple(job.notes), complete, seen)


@contextlib.contextmanager
def _opened(job: Job) -> Iterator[tuple[Ledger, Start]]:
    """The run's ledger (in memory only when the run writes no files), and where the run goes on."""
    if job.folder is None:
        yield MemoryLedger(), first_start(job)  # type: ignore[misc]
        return
    path = job.folder.path / LEDGER
    made = [file for file in (path, path.with_suffix(".lock")) if not file.exists()]
    with Ledger.open(path) as ledger:
        try:
            start = resume_run(job, ledger)
        except BaseException:
            if path in made and not ledger.entries:  # no trace of an attempt at a run whose ledger is gone
                for file in made:
                    file.unlink(missing_ok=True)
            raise
        yield ledger, start


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
        """The rounds that have at least one event."""
        return {entry["round"] for entry in self.entries}


def _one_round(
    job: Job, state: RoundState, heads: PersonalState, ledger: Ledger, saved: Callable[[], object]
) -> tuple[RoundState, Record, Record]:
    """One round from the secret cohort to the evaluated new state. saved: waits for the last round's checkpoint."""
    began, parts, clock = time.perf_counter(), job.parts, _Clock(job.stages)
    start = state
    public = None if job.public_update is None else lambda: job.public_update(start)  # type: ignore[misc]
    broadcast = broadcast_of(parts, state, job.seed, public)
    accumulator = accumulator_of(parts, broadcast, job.key)
    spent = _epsilon_after(parts.plan, state.round + 1 + job.charged_again)
    unit = _noise_ahead(job, state.round)
    early = 0
    for draw in parts.plan.draws(state.round):
        chosen = select_cohort(parts, job.key, draw) if job.check_ins is None else job.check_ins(state)
        cohort, state = within_cap(parts, state, chosen)
        early += len(chosen) - len(cohort)
        clock("cohort and broadcast")
        backend = job.first_backend if job.first_backend is not None and state.round == 0 else job.backend
        backend.train(cohort, replace(broadcast, draw=draw), accumulator, heads)
        clock("local training, clip and sum")
    aggregate = accumulator.result()
    saved()  # before the next round is charged, the last one's checkpoint is there
    new, info = finish_round(
        parts, state, broadcast, aggregate, job.key, ledger.append, divisor=accumulator.divisor, unit=unit
    )
    clock("noise, ledger and server")
    released, hidden = dict(info.released), {"round": state.round, **info.private}
    hidden |= {"left_out": early} if early else {}
    plan = parts.plan
    released["epsilon"] = spent()
    if isinstance(plan.mechanism, Claiming):  # published procedures: never without the proven ε beside it
        released["claimed_epsilon"] = plan.mechanism.claimed(plan, new.round + job.charged_again)
    public_facts, private_facts = _evaluate(job, new, heads)
    clock("evaluation")
    released |= public_facts
    released["seconds"] = time.perf_counter() - began
    order = ["round", "epsilon", "clip", "test_loss", "test_accuracy"]
    if "claimed_epsilon" in released:
        order.insert(2, "claimed_epsilon")
    released = {k: released.get(k) for k in order} | {k: v for k, v in released.items() if k not in order}
    return new, released, hidden | private_facts


@dataclass
class _Clock:
    """Adds the seconds since its last call to a named stage."""

    stages: dict[str, float]
    last: float = field(default_factory=time.perf_counter)

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self.last
        self.last = now


def _save(
    job: Job, state: RoundState, heads: PersonalState, released: Record, hidden: Record, ledger: Record
) -> Callable[[], object]:
    """Metrics, then the checkpoint: after a kill, lines newer than the checkpoint are dropped and run again.

    A thread writes the checkpoint while the next round's clients train; the answer waits for it. In a deployment it is
    written before the model leaves.
    """
    clock, folder = _Clock(job.stages), job.folder
    folder.append(released, hidden)  # type: ignore[union-attr]
    kept, layout = heads.copy(), job.parts.layout
    names = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes)]
    facts = {"run": folder.run, "ledger": ledger, "tensors": names, "shared_tensors": layout.shared}  # type: ignore[union-attr]
    facts |= {"made_for": dict(job.made_for)} if job.made_for else {}

    def save() -> object:
        try:
            folder.settle()  # type: ignore[union-attr]
            return checkpoint.save(folder.checkpoints, state, kept, facts)  # type: ignore[union-attr]
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())
            found = f"{folder.checkpoints}: cannot be written ({why})"  # type: ignore[union-attr]
            raise RunError(f"{found}; the run stops, resume it later.") from error

    if folder.deployment:  # type: ignore[union-attr]  # a model is broadcast only when a restarted server knows it
        save()
    written = _nothing if folder.deployment else ahead(save)  # type: ignore[union-attr]
    clock("metrics and checkpoint")
    return written


def _nothing() -> None:
    """There is no checkpoint to wait for."""


def _epsilon_after(plan: Plan, rounds: int) -> Callable[[], float]:
    """ε after a round; it depends on the plan and the round only."""
    if not plan.private:
        return lambda: math.inf
    begun = ahead(lambda: plan.epsilon(rounds))

    def found() -> float:
        try:
            return begun()
        except Exception:  # tried again where nothing else takes memory
            return plan.epsilon(rounds)

    return found


def _noise_ahead(job: Job, round: int) -> Callable[[], Tensor] | None:
    """N(0, I) ``(d,)`` of the round, drawn while clients train: its stream depends on the key and the round only, its
    std may depend on who took part. None where it is drawn later, in no time or by the mechanism itself."""
    parts = job.parts.of(round)
    mechanism, size = parts.mechanism, parts.message_length
    if not isinstance(mechanism, ScaledMechanism) or not job.parts.plan.private or size < LARGE:
        return None
    return ahead(lambda: mechanism.unit(job.key, round, size))


def _due(round: int, every: int, rounds: int) -> bool:
    return round % every == 0 or round == rounds


def _evaluate(job: Job, state: RoundState, heads: PersonalState) -> tuple[Record, Record]:
    """Public test metrics (released) and personal or per-client ones (private to the simulation)."""
    data, rounds, finished = job.data, job.parts.plan.rounds, state.round
    last = finished == job.last_round
    public: Record = {"test_loss": None, "test_accuracy": None}
    hidden: Record = {}
    whole = torch.cat([state.released, heads.first])
    if data.test_inputs is not None and (last or _due(finished, job.evaluation.every, rounds)):
        how = job.evaluation
        found = scores(job.problem, whole, data.test_inputs, data.test_targets, how.batch_size, how.threads)  # type: ignore[arg-type]
        public |= _tested(job, found, whole)
    every = job.evaluation.personal_every or max(1, rounds // PERSONAL_TIMES)
    if job.held and (last or _due(finished, every, rounds)):
        accuracies = client_accuracies(job.problem, data, _personal_weights(job, state, heads), job.held)
        name = "personal_accuracy" if _personal(job.parts.algorithm) else "client_accuracy"
        if not job.problem.objective.scored:
            name = name.replace("accuracy", "loss")
        hidden[name] = float(accuracies.mean())
        hidden[f"client_{name.partition('_')[2]}_quantiles"] = spread(accuracies)
    return public, hidden


def _tested(job: Job, found: Scores, weights: Tensor) -> Record:
    """Loss, accuracy where the task has one, and the user's own metrics, on public test data."""
    data, objective = job.data, job.problem.objective
    loss, score = found.mean()
    public: Record = {"test_loss": loss, "test_accuracy": score if objective.scored else None}
    if objective.task == "classification":
        public["class_accuracy"] = class_accuracy(found, data.test_targets)  # type: ignore[arg-type]
    if job.metrics:
        outputs = outputs_of(job.problem, weights, data.test_inputs, job.evaluation.batch_size)  # type: ignore[arg-type]
        targets = data.test_targets.cpu()  # type: ignore[union-attr]
        public |= {f"test_{name}": measured(metric, outputs, targets) for name, metric in job.metrics.items()}
    return public


def _personal(algorithm: Algorithm) -> bool:
    return algorithm.head is not None or algorithm.finetune is not None


def _personal_weights(job: Job, state: RoundState, heads: PersonalState) -> Callable[[int], Tensor]:
    """Client -> the weights it would use itself: own head, or the global model fine-tuned on its own data."""
    tune = job.parts.algorithm.finetune
    if tune is None:
        return lambda client: heads.whole(state.released, client)
    return lambda client: finetuned(job, state, heads.whole(state.released, client), client, tune)


def finetuned(job: Job, state: RoundState, weights: Tensor, client: int, tune: Phase) -> Tensor:
    """The global model after a client's local fine-tuning ``(D,)``; used for evaluation only, never sent."""
    parts, rows = job.parts, job.data.parts[client]
    if len(rows) == 0:
        return weights
    alone, device = Algorithm("fine-tuning", phases=(tune,)), job.problem.device
    broadcast = Broadcast(state.round, state.released, math.inf, parts.local.rate(max(state.round - 1, 0)))
    order = Order(job.seed, state.round, parts.local.batch_size)
    local_data = ClientBatches(job.data, client, order, rows)
    with seeded_torch(job.seed, "dropout of fine-tuning", state.round, client):
        weights = weights.to(device)
        own = ClientContext(generator=stream(job.seed, "pieces of fine-tuning", state.round, client))
        train_client(alone, job.problem, sent(broadcast, device), parts.local, local_data, weights, own)
    return weights


def final_module(job: Job, outcome: Outcome) -> torch.nn.Module:
    """w^0's module with the released weights, on the processor; nothing else of it has met a client's data."""
    return _module(job, outcome.state, outcome.heads)


def _module(job: Job, state: RoundState, heads: PersonalState) -> torch.nn.Module:
    return job.problem.released(torch.cat([state.released, heads.first]))
