"""The server's side: the simulation's own loop, with a cohort that trains elsewhere.

``train`` chooses the cohort, broadcasts, sums, finishes the round, writes the ledger and checkpoints; this module only
carries messages, checks replies in, and keeps the run's key and folder. A client that does not answer, or not as agreed,
is not added: a zero vector under the same denominator.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import RunError, wrong
from fedflat.core.types import Aggregate, Broadcast, Clip
from fedflat.engine import checkpoint, keys
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.choose import one_thread
from fedflat.engine.folder import LEDGER, RECIPE, STATEMENT, RunFolder, plain
from fedflat.engine.folder import replace as write_whole
from fedflat.engine.heads import Heads
from fedflat.engine.train import Job, Outcome, train
from fedflat.federation import wire
from fedflat.federation.desk import Desk, loggable
from fedflat.federation.roster import Roster
from fedflat.federation.store import read_examples
from fedflat.federation.task import Task, check_deployable
from fedflat.pieces.clipping import whole_vector
from fedflat.privacy.ledger import read as read_ledger

log = logging.getLogger("fedflat.server")

TRAIN = "train"
POLL_SECONDS = 0.3
AT_ONCE = 16
"""Messages pushed or pulled together: what the server holds of a cohort at any time, beside one sum."""
CHECK_INS = (
    "The cohort is drawn by the server from the roster of registered clients, connected or not; a client that does not "
    "answer counts as a zero vector. So a client takes part with probability at most q, whatever decides who is connected, "
    "and the sampling law holds towards everybody who does not learn the cohort. Not towards those who do: who runs the "
    "SuperLink, who watches the network, and the client itself."
)


@dataclass
class Flower:
    """A back end whose clients are SuperNodes: asks a cohort, adds each answer as it comes, waits no longer than agreed.

    answer_seconds: from the last ask to the end of the round. public: counts of refusals that may be logged.
    """

    grid: Any
    roster: Roster
    pin: str
    dimension: int
    answer_seconds: float
    refusals: Callable[[int, Counter[str]], None]
    ttl: float = 3600.0
    poll: float = POLL_SECONDS
    name: str = "flower"
    _late: tuple[str, ...] = ()

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Any, heads: Heads) -> None:
        """Ask the connected clients of the cohort; add what they answer. Nothing of a client is kept but the sum."""
        desk = Desk(broadcast.round, self.dimension)
        self._ask(desk, cohort, broadcast)
        until = time.monotonic() + self.answer_seconds
        while desk.waiting and time.monotonic() < until:
            if not self._collect(desk, accumulator):
                time.sleep(self.poll)
        if self._late:
            desk.late(self.grid.pull_messages(list(self._late)))
        self._late = desk.close()
        self.refusals(broadcast.round, desk.refused)

    def _ask(self, desk: Desk, cohort: np.ndarray, broadcast: Broadcast) -> None:
        connected = self.roster.connected(self.grid.get_nodes())
        common = wire.write_broadcast(broadcast)
        asked = [client for client in cohort.tolist() if client in connected]
        desk.refused["missing"] += len(cohort) - len(asked)
        for start in range(0, len(asked), AT_ONCE):
            slips = [desk.slip(client, connected[client]) for client in asked[start : start + AT_ONCE]]
            asks = [wire.Ask(slip.client, slip.nonce, self.pin, broadcast) for slip in slips]
            messages = [self._message(ask, slip.node, common) for ask, slip in zip(asks, slips)]
            for number, slip in zip(self.grid.push_messages(messages), slips):
                if number:
                    desk.sent(number, slip)
                else:
                    desk.refused["missing"] += 1

    def _message(self, ask: wire.Ask, node: int, common: Any) -> Any:
        from flwr.app import Message

        content = wire.write_ask(ask, common)
        return Message(content, node, TRAIN, ttl=self.ttl, group_id=str(ask.broadcast.round))

    def _collect(self, desk: Desk, accumulator: Any) -> int:
        """Pull what is there, a few at a time, in the order asked; how many replies came."""
        came = 0
        waiting = desk.waiting
        for start in range(0, len(waiting), AT_ONCE):
            for reply in self.grid.pull_messages(list(waiting[start : start + AT_ONCE])):
                came += 1
                taken = desk.take(reply)
                if taken is not None:
                    _, answer = taken
                    accumulator.add(wire.tensor_of(answer)[None], [max(answer.examples, 1)])
        return came


@dataclass(frozen=True)
class ClientNoise:
    """trust: local. Every message carries its client's own noise, so the server clips and adds nothing."""

    count_std: float = 0.0

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """A plain sum: a noised message is longer than the clip, and already private."""
        return Accumulator(whole_vector(float("inf")), float("inf"), tensors, broadcast.shared.numel())

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """None: it is in the sum."""
        return torch.zeros_like(aggregate.total)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Refused: the plan allows no adaptive clip under local trust."""
        raise wrong("privacy.clip", "adaptive", "a constant clip with privacy.trust: local")


@dataclass(frozen=True)
class Settings:
    """Where and how a server runs. out: the run's folder. test: public test set, or None. nodes: connected clients to wait
    for before round 0, at most ``start_seconds``. answer_seconds: how long a round waits for its clients."""

    out: Path
    test: Path | None = None
    answer_seconds: float = 600.0
    nodes: int = 1
    start_seconds: float = 600.0
    poll: float = POLL_SECONDS

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From a Flower app's run config."""
        test = str(config.get("test", ""))
        return cls(
            Path(str(config["out"])).expanduser(),
            Path(test).expanduser() if test else None,
            float(config.get("answer-seconds", 600.0)),
            int(config.get("wait-for-nodes", 1)),
            float(config.get("start-seconds", 600.0)),
        )


def serve(grid: Any, task: Task, settings: Settings) -> dict[str, Any]:
    """Run a deployment to its end, or go on with the one in ``settings.out``; returns the privacy statement.

    Raises:
        InputError: the task, the folder or the roster is not what it should be. RunError: the disk refuses, or another
            server has the run.
    """
    job = job_of(task, settings)
    with _only_server(settings.out):
        folder = _folder(task, job, settings.out)
        job.folder = folder
        job.key = _key(folder)
        counts = Refusals(folder)
        dimension = job.parts.layout.dimension
        job.backend = Flower(
            grid, task.roster, task.pin, dimension, settings.answer_seconds, counts.note, poll=settings.poll
        )
        _wait_for_nodes(grid, task.roster, settings)
        with one_thread():
            outcome = train(job, resume=True, on_round=_announce)
        facts = deployment_statement(task, job, outcome)
        write_whole(folder.path / STATEMENT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        if outcome.complete:
            keys.forget(_name(folder.path))
        log.info("run complete: %s", folder.path)
        return facts


def job_of(task: Task, settings: Settings) -> Job:
    """The run's parts, built as the simulation builds them, with the public test set and nobody's examples."""
    from fedflat.noising import trust_of
    from fedflat.simulation import algorithm_of, prepare

    method = algorithm_of(task.recipe)
    check_deployable(task.recipe, method, trust_of(task.recipe, method))
    test = None
    if settings.test is not None:
        test = read_examples(settings.test)
        task.form.check(str(settings.test), *test)
    job = prepare(task.recipe, data=task.form.federation(test=test))
    if job.parts.plan.trust == "local" and job.parts.plan.private:
        job.parts = replace(job.parts, mechanism=ClientNoise())
    return job


@contextmanager
def _only_server(out: Path) -> Iterator[None]:
    """One server on a run: the second is refused before it touches key, ledger or network."""
    import fcntl

    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise wrong("out", f"{out} ({error.strerror})", "a folder you may write to") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"{out}: another server is running this run") from error
        yield
    finally:
        os.close(descriptor)


def _folder(task: Task, job: Job, out: Path) -> RunFolder:
    """The run's folder: new, or the one of the same recipe, data form and model."""
    import secrets

    import yaml

    from fedflat.simulation import settled, versions

    folder = RunFolder(out, deployment=True)
    if not (out / RECIPE).exists():
        dump = settled(task.recipe, job.parts.plan, job.parts.local, job.data.clients)
        marks = {
            **versions(("fedflat", "flwr", "torch", "numpy", "dp-accounting")),
            "run": secrets.token_hex(16),
            "pin": task.pin,
        }
        write_whole(out / RECIPE, yaml.safe_dump({**dump, "versions": marks}, sort_keys=False, allow_unicode=True))
        return folder
    if _versions(out).get("pin") != task.pin:
        raise wrong(
            "out", f"{out}, the folder of another deployment", "a new folder, or the one this task was started in"
        )
    return folder


def _versions(out: Path) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load((out / RECIPE).read_text(encoding="utf-8"))
    return dict(found.get("versions") or {}) if isinstance(found, dict) else {}


def _name(out: Path) -> str:
    return str(_versions(out).get("run", ""))


def _key(folder: RunFolder) -> bytes:
    """The key of cohorts and noise: the stored one while no round is open, otherwise a fresh one.

    A round is open if its ledger line is there and its checkpoint is not. Its release may have been seen, and the clients
    that answer it again may be others: the same noise on two sums would give their difference away. So the round is drawn
    again with a fresh key and charged again (``train`` sees that the key's name changed).
    """
    keys.check_outside(folder.path)
    name = _name(folder.path)
    found = keys.load(name)
    done = checkpoint.newest(folder.checkpoints)
    finished = 0 if done is None else done[0].round
    lines = read_ledger(folder.path / LEDGER) if (folder.path / LEDGER).exists() else []
    if found is not None and not any(line["round"] >= finished for line in lines):
        return found
    keys.forget(name)
    return keys.create(name)


@dataclass
class Refusals:
    """Counts of replies that were not added: per round in the operator's own file, and what may be said in the log.

    The file lies beside the noise key, not in the run's folder: who is missing, or whose training diverged, may depend on data.
    """

    folder: RunFolder
    path: Path = field(init=False)
    total: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        place = keys.folder().parent / "operator"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = place / f"{_name(self.folder.path)}.jsonl"

    def note(self, round: int, counts: Counter[str]) -> None:
        """Write a round's counts to the operator's file; log those that no honest client causes."""
        self.total += counts
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain({"round": round, **{k: v for k, v in counts.items() if v}})) + "\n")
        shown = loggable(counts)
        if shown:
            log.warning("round %d: refused %s", round, ", ".join(f"{v} ({k})" for k, v in shown.items()))


def _wait_for_nodes(grid: Any, roster: Roster, settings: Settings) -> None:
    until = time.monotonic() + settings.start_seconds
    while len(roster.connected(grid.get_nodes())) < min(settings.nodes, roster.clients):
        if time.monotonic() > until:
            raise RunError(
                f"fewer than {settings.nodes} clients of the roster connected in {settings.start_seconds:g} s"
            )
        time.sleep(settings.poll)


def _announce(released: dict[str, Any], hidden: dict[str, Any]) -> None:
    """One log line of a round, of what was released anyway."""
    shown = {name: released.get(name) for name in ("epsilon", "test_accuracy", "seconds")}
    log.info("round %d: %s", released["round"], json.dumps(plain(shown)))


def deployment_statement(task: Task, job: Job, outcome: Outcome) -> dict[str, Any]:
    """The privacy statement of a deployment: no simulation, OS entropy, and what real check-ins mean for the sampling."""
    from fedflat.noising import facts as noise_facts
    from fedflat.privacy.statement import statement
    from fedflat.simulation import _stated_facts, settled

    plan = job.parts.plan
    facts = settled(task.recipe, plan, job.parts.local, job.data.clients) | _stated_facts(task.recipe, job)
    facts |= noise_facts(task.recipe, plan) | {"simulation": False, "deployment": True, "check_ins": CHECK_INS}
    return statement(
        plan,
        rounds_run=outcome.state.round,
        algorithm=job.parts.algorithm.name,
        facts=facts,
        key_source="os-entropy",
        entries=outcome.entries,
        warnings=[CHECK_INS] if plan.private else (),
    )
