"""Run the rounds of a job, on its ledger, from where its folder stands: evaluation, checkpoints, and where it stops.

Clients are trained by the job's back end. ``write_beginning`` and ``write_ending`` write what a run leaves on disk
before its first round and after its last one; when all rounds are over, the noise key is forgotten.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from fedflat.core import AVERAGE, Layout, PersonalState, RoundState, durable, in_background, stop_signal
from fedflat.core.checks import becoming, counted, writing, wrong
from fedflat.engine import evaluate
from fedflat.engine.device import exact
from fedflat.engine.job import Job, MemoryLedger, OnRound, Outcome, Record, RoundResult, Start, charge_remaining_rounds
from fedflat.engine.reduce import RoundSum
from fedflat.engine.resume import charge_drawn, first_start, note_software, resume_run, update_plan
from fedflat.engine.round import MALFORMED, accumulator_of, broadcast_of, finish_round, select_cohort, within_cap
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.statement import write
from fedflat.records import checkpoint, keys
from fedflat.records.folder import BODY, LEDGER, RECIPE, STATEMENT
from fedflat.records.signing import note_tip, sign_run

LARGE = 200_000
"""Parameters from which drawing a round's noise takes longer than starting a thread."""


def train(job: Job, *, on_round: OnRound | None = None, should_stop: Callable[[], bool] | None = None) -> Outcome:
    """Run the rounds left from where the job's folder stands; stop before a round that would exceed the budget, or
    after one for which ``on_round`` gives True."""
    plan = job.parts.plan
    with contextlib.ExitStack() as stack:
        stack.enter_context(exact(job.problem.device))
        # A run that failed leaves processes that would answer the next one; a process that ends waits for its own.
        stack.callback(getattr(job.backend, "close", lambda: None))
        ledger, start = stack.enter_context(_opened(job))
        state, heads, history, private = start.state, start.heads, start.history, start.private
        before = max(ledger.rounds_recorded(), default=-1)
        update_plan(job, ledger, start.state.round, state.round)
        stopped, peeked, seen = "", False, False
        # The newest checkpoint may still be on its way to the disk when the loop ends, or breaks.
        saved: Callable[[], object] = nullcontext
        stack.callback(lambda: saved())
        while state.round < plan.rounds:
            # Asked every round: what is charged again on a resume shortens the run.
            if state.round >= job.last_round:
                stopped = f"stopped before round {state.round}: it would exceed the budget ε = {plan.budget:g}"
                break
            if should_stop is not None and should_stop():
                stopped = f"stopped as asked after {counted(state.round, 'round')}"
                seen = peeked and not stop_signal()
                break
            turn = _Round(job, state, charge_drawn(job, ledger, state.round))
            for cohort, reduced in turn.draws(heads):
                # The back end maps, the round reduces: here, so that a step's gradient is one frame less away.
                for part in job.backend.train(cohort, reduced.broadcast, heads, reduced.clipped):
                    reduced.add(part)
            state, released, hidden = turn.finish(heads, ledger, saved)
            if state.round <= before + 1:
                update_plan(job, ledger, start.state.round, state.round)
            history.append(released)
            private.append(hidden)
            if job.folder is not None:
                mark = {"events": len(ledger.entries), "tip": ledger.tip(len(ledger.entries))}
                saved = _save(job, state, heads, released, hidden, mark)
            if on_round is None:
                continue
            after = RoundResult(state, hidden, functools.partial(final_module, job, Start(state, heads, [], [])))
            ended = on_round(dict(released), after) is True
            peeked = peeked or after.read_private
            if ended and state.round < job.last_round:
                if peeked:  # no ε covers an end that private values decided
                    found = "a run ended by a function that has read state.private"
                    raise wrong("on_round", found, "True only from a function of the released record and state.model()")
                remaining = range(state.round, job.last_round)
                charge_remaining_rounds(ledger, job.parts.plan, remaining, job.parts.clip.bound(state.clip))
                stopped = f"ended early after {counted(state.round, 'round')} by what was released"
                break
        complete = state.round >= job.last_round
        if malformed := [count for record in private if (count := record.get(MALFORMED))]:
            job.say(f"{counted(sum(malformed), 'malformed message')}, counted as zero (rounds: {len(malformed)})")
        return Outcome(state, heads, history, private, list(ledger.entries), stopped, tuple(job.notes), complete, seen)


@contextlib.contextmanager
def _opened(job: Job) -> Iterator[tuple[Ledger, Start]]:
    """Yield the run's ledger (in memory if the run writes no files), and where the run goes on."""
    if job.folder is None:
        yield MemoryLedger(), first_start(job)  # type: ignore[misc]
        return
    path = job.folder.path / LEDGER
    created = [file for file in (path, path.with_suffix(".lock")) if not file.exists()]
    # A copied folder has another ledger and the same key; a server asks before it touches the network.
    shared = job.stored and not job.folder.deployment
    with keys.alone(job.folder.path, job.folder.run) if shared else nullcontext(), Ledger.open(path) as ledger:
        try:
            start = resume_run(job, ledger)
        except BaseException:
            if path in created and not ledger.entries:  # no trace of an attempt at a run whose ledger is gone
                for file in created:
                    file.unlink(missing_ok=True)
            raise
        yield ledger, start


class _Round:
    """A round from its broadcast to the evaluated new state; between the two the caller trains its cohorts.

    What depends on the round's number only, its ε and large noise, is computed in threads meanwhile.
    """

    def __init__(self, job: Job, state: RoundState, charged: bool) -> None:
        self.job, self.state, self.charged, self.left_out = job, state, charged, 0
        self.began, self.clock = time.perf_counter(), _Clock(job.stages)
        public = None if job.public_update is None else functools.partial(job.public_update, state)
        self.broadcast = broadcast_of(job.parts, state, job.seed, public)
        self.accumulator = accumulator_of(job.parts, self.broadcast, job.key)
        plan, releases = job.parts.plan, state.round + 1 + job.charged_again
        self.spent = in_background(lambda: plan.epsilon(releases))
        # The noise's stream depends on the key and the round only; its std, on who took part, comes later.
        mechanism, size = job.parts.mechanism, job.parts.message_length
        drawn = plan.private and size >= LARGE
        self.mechanism = mechanism.drawn_ahead(job.key, state.round, size) if drawn else mechanism
        self.scores: np.ndarray | None = None

    def draws(self, heads: PersonalState) -> Iterator[tuple[np.ndarray, RoundSum]]:
        """Yield the secret cohort of each draw, and what adds up its messages; in it, what its clients receive."""
        job, parts = self.job, self.job.parts
        for draw in parts.plan.draws(self.state.round):
            chosen = select_cohort(parts, job.key, draw) if job.check_ins is None else job.check_ins(self.state)
            cohort, self.state = within_cap(parts, self.state, chosen)
            self.left_out += len(chosen) - len(cohort)
            self.clock("cohort and broadcast")
            if parts.plan.evaluation is not None:  # of the model that the round begins with
                weights = torch.cat([self.state.shared, heads.first])
                self.scores = evaluate.cohort_scores(job.problem, job.data, weights, cohort.tolist())
            broadcast = replace(self.broadcast, draw=draw)
            yield cohort, RoundSum(parts.algorithm, parts.local, broadcast, self.accumulator.of(draw), heads)
            self.clock("local training, clip and sum")

    def finish(
        self, heads: PersonalState, ledger: Ledger, saved: Callable[[], object]
    ) -> tuple[RoundState, Record, Record]:
        """Release the sum and evaluate; return the new state, the released record and the private one.

        saved: waits for the last round's checkpoint, which must be there before this round is charged.
        """
        job, plan, state, aggregate = self.job, self.job.parts.plan, self.state, self.accumulator.result()
        saved()
        note_software(job, ledger, state.round, charged=self.charged)
        new, info = finish_round(
            replace(job.parts, mechanism=self.mechanism), state, self.broadcast, aggregate, job.key,
            ledger.append, scores=self.scores,
        )  # fmt: skip
        self.clock("noise, ledger and server")
        hidden = {"round": state.round, **info.private} | ({"left_out": self.left_out} if self.left_out else {})
        first: Record = {"round": info.released["round"], "epsilon": self.spent()}
        claimed = plan.account.claimed(plan, new.round + job.charged_again)
        first |= {} if claimed is None else {"claimed_epsilon": claimed}
        best = job.evaluation.keep != "last"
        candidate = replace(new, slots={**new.slots, AVERAGE: new.shared}) if best else new
        public, private = evaluate.evaluate_round(job, candidate, heads)
        new = evaluate.best_so_far(new, public) if best else new
        self.clock("evaluation")
        facts = {**info.released, **public}
        first |= {name: facts.get(name) for name in ("clip", "test_loss", "test_accuracy")}
        hidden["seconds"] = time.perf_counter() - self.began  # it tells how large the cohort was
        return new, first | {name: value for name, value in facts.items() if name not in first}, hidden | private


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
    """Write the metrics, then the checkpoint: after a kill, lines newer than the checkpoint are dropped and run again.

    A thread writes the checkpoint while the next round's clients train; the answer waits for it. In a deployment it is
    written before the model leaves.
    """
    clock, folder = _Clock(job.stages), job.folder
    folder.append(released, hidden)  # type: ignore[union-attr]
    snapshot, layout = heads.copy(), job.parts.layout
    facts = {"run": folder.run, "ledger": ledger, **tensors_of(layout)}  # type: ignore[union-attr]

    def note(checksum: str) -> None:
        note_tip(folder.path, folder.run, state.round, ledger, checksum, key=job.operator)  # type: ignore[union-attr]
        if job.stored:
            keys.Mark(folder.run).note_checkpoint(state.round, checksum)  # type: ignore[union-attr]

    facts |= {"made_for": dict(job.made_for)} if job.made_for else {}

    def save() -> object:
        as_disk = becoming(lambda error: OSError(0, " ".join(str(error).split())), SafetensorError)
        with writing(folder.checkpoints, then="the run stops, resume it later."), as_disk:  # type: ignore[union-attr]
            folder.flush_lines()  # type: ignore[union-attr]
            return checkpoint.save(folder.checkpoints, state, snapshot, facts, note)  # type: ignore[union-attr]

    written = in_background(save)
    if folder.deployment:  # type: ignore[union-attr]  # a model is broadcast only when a restarted server knows it
        written()
    clock("metrics and checkpoint")
    return written


def tensors_of(layout: Layout) -> Record:
    """Return what a checkpoint says of the module's parameters: all by name and shape, and how many are shared."""
    names = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes)]
    return {"tensors": names, "shared_tensors": layout.shared}


def weights_digest(job: Job, state: RoundState) -> str:
    """SHA-256 of the weights that a round released, by name: what the statement and its signature are about."""
    return durable.digest_of(checkpoint.released(state, tensors_of(job.parts.layout)))


def final_module(job: Job, at: Start) -> torch.nn.Module:
    """Return w^0's module with the released weights, on the processor; nothing else of it has met clients' data."""
    return job.problem.released(torch.cat([at.state.released, at.heads.first]))


def write_beginning(path: Path, text: str, job: Job, frozen: Mapping[str, torch.Tensor]) -> None:
    """Write what a run is, a frozen body, and the text of its recipe, which makes of a folder a run's: it is last."""
    job.opening.write(path)  # type: ignore[union-attr]
    if frozen:  # in place of one that a start left which was killed
        durable.write_tensors(path / BODY, frozen)
    durable.replace(path / RECIPE, text, mode=0o644)


def write_ending(job: Job, outcome: Outcome, facts: Record) -> Record:
    """Return a run's statement, once it is in the folder, if there is one.

    It is signed with ledger and released weights if there is an operator's key, and the noise key of a run that is over
    is forgotten.
    """
    folder = job.folder
    if folder is None:
        return facts
    weights = weights_digest(job, outcome.state)
    write(folder.path / STATEMENT, facts, folder.run, weights)
    # What an export will say, which is the checkpoint's: a run that is gone on with may have another version's.
    made_for = checkpoint.facts_of(checkpoint.path_of(folder.checkpoints, outcome.state.round)).get("made_for") or {}
    sign_run(folder.path, folder.run, weights, made_for, job.operator)
    if job.stored and outcome.complete:
        keys.forget(folder.run)
    return facts
