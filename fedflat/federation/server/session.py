"""The server's side: the simulation's own loop, with a cohort that trains elsewhere.

``train`` chooses the cohort, broadcasts, sums, finishes the round, writes the ledger and checkpoints; this module only
carries messages, checks replies in, and keeps the run's key and folder. A client that does not answer, or not as
agreed, is not added: a zero vector under the same denominator.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedflat.core import durable
from fedflat.core.checks import RunError, whole, wrong
from fedflat.core.personal import PersonalState
from fedflat.core.rng import fresh_key
from fedflat.core.schedules import MinSeparation
from fedflat.core.threads import using_threads
from fedflat.core.types import RoundState
from fedflat.engine.resume import compare
from fedflat.engine.train import Job, Outcome, train
from fedflat.federation.client.store import read_examples
from fedflat.federation.events import told
from fedflat.federation.roster import Roster
from fedflat.federation.secagg.noise_shares import ClientShares
from fedflat.federation.secagg.rounds import SecureFlower
from fedflat.federation.server.check_ins import CheckIns
from fedflat.federation.server.claims import deployment_statement
from fedflat.federation.server.culprits import Culprits
from fedflat.federation.server.monitor import shown
from fedflat.federation.server.transport import POLL_SECONDS, ClientNoise, Flower, Refusals, return_large_blocks
from fedflat.federation.task import Task, check_deployable
from fedflat.methods.ddgauss.mechanism import SharedDiscreteNoise
from fedflat.pieces.clipping import MethodScale, whole_vector
from fedflat.privacy.ledger import read as read_ledger
from fedflat.privacy.statement import write as write_statement
from fedflat.records import checkpoint, keys
from fedflat.records.folder import LEDGER, RECIPE, STATEMENT, RunFolder, plain
from fedflat.records.opening import Opening
from fedflat.simulation.planning import drowned

log = logging.getLogger("fedflat.server")

ENDED = "ended.json"
"""In the folder of a run that ``fedflat.federation.close`` ended."""

WAIT_SECONDS = 600.0
"""How long a run that says nothing waits for its first nodes, and for answers in a round: ten minutes of training."""


@dataclass(frozen=True)
class Settings:
    """Where and how a server runs. out: the run's folder. test: public test set, or None. nodes: connected clients to
    wait for before round 0, at most ``start_seconds``. answer_seconds: how long a round waits for its clients. Under
    secure aggregation, ``abort_limit``: the run stops after so many charged rounds in a row without a result;
    ``exclusion_limit``: a client that was excluded so often is asked no more. metrics: where a page about the server is
    (``HOST:PORT``, beyond this machine only if ``beyond``), or empty."""

    out: Path
    test: Path | None = None
    answer_seconds: float = 600.0
    nodes: int = 1
    start_seconds: float = 600.0
    poll: float = POLL_SECONDS
    abort_limit: int = 3
    exclusion_limit: int = 3
    metrics: str = ""
    beyond: bool = False

    def __post_init__(self) -> None:
        whole("abort-limit", self.abort_limit, 1)
        whole("exclusion-limit", self.exclusion_limit, 1)

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From a Flower app's run config."""
        test = str(config.get("test", ""))
        return cls(
            Path(str(config["out"])).expanduser(),
            Path(test).expanduser() if test else None,
            float(config.get("answer-seconds", WAIT_SECONDS)),
            int(config.get("wait-for-nodes", 1)),
            float(config.get("start-seconds", WAIT_SECONDS)),
            abort_limit=config.get("abort-limit", 3),
            exclusion_limit=config.get("exclusion-limit", 3),
            metrics=str(config.get("metrics", "")),
            beyond=config.get("metrics-beyond-this-machine", False) is True,
        )


def serve(grid: Any, task: Task, settings: Settings) -> dict[str, Any]:
    """Run a deployment to its end, or go on with the one in ``settings.out``; returns the privacy statement.

    Raises:
        InputError: the task, the folder or the roster is not what it should be, or the run was ended for good.
        RunError: the disk refuses, or another server has the run.
    """
    job = job_of(task, settings)
    return_large_blocks()
    with shown(settings.metrics, settings.beyond), ExitStack() as held:
        held.enter_context(_only_server(settings.out))
        folder = _folder(task, job, settings.out)
        held.enter_context(_only_server(settings.out, folder.run))
        job.folder, job.stored, job.tell = folder, True, log.warning
        outcome = standing(job, folder.path)
        # A complete run needs no key and no clients, only its statement; if its mark is ahead, it is charged first.
        if not outcome.complete or compare(folder.run, outcome.entries)[0]:
            counts = Refusals(_operator_file(folder.run))
            job.backend, job.first_backend = _backend(grid, task, job, settings, counts), None
            job.check_ins = _check_ins(grid, task, job, counts.path, folder.run, outcome)
            _tell_start(job, outcome)
            for note in drowned(task.recipe, job):
                log.warning(note)
            _wait_for_nodes(grid, task.roster, settings)
            log.info("clients enough are connected", extra=told("ready"))
            outcome = _train(job)
        facts = deployment_statement(task, job, outcome)
        write_statement(folder.path / STATEMENT, facts, folder.run)
        if outcome.complete:
            keys.forget(folder.run)
        log.info("run complete: %s", folder.path, extra=told("complete"))
        return facts


def _backend(grid: Any, task: Task, job: Job, settings: Settings, counts: Refusals) -> Flower:
    """What asks the clients: one exchange a round, or the steps of secure aggregation."""
    dimension, seconds = job.parts.message_length, settings.answer_seconds
    common = (grid, task.roster, task.pin, dimension, seconds, counts.note)
    if not isinstance(job.parts.mechanism, ClientShares):
        return Flower(*common, poll=settings.poll)
    mechanism = job.parts.mechanism.inner.mechanism
    culprits = Culprits(counts.path.with_suffix(".excluded.jsonl"), settings.exclusion_limit, settings.abort_limit)
    return SecureFlower(
        *common, poll=settings.poll, task=task, plan=job.parts.plan, mechanism=mechanism, culprits=culprits,
        left_open=(settings.out / LEDGER).exists(),
    )  # fmt: skip


def _check_ins(
    grid: Any, task: Task, job: Job, beside: Path, run: str, outcome: Outcome
) -> Callable[[RoundState], Any] | None:
    """What chooses the cohorts where clients take turns as they come; None where the law alone does."""
    sampler = job.parts.plan.sampler
    if not isinstance(sampler, MinSeparation):
        return None
    lost, _ = compare(run, outcome.entries)  # a folder put back has fewer lines than the mark beside the key
    charged = frozenset(entry["round"] for entry in (*outcome.entries, *lost))
    place = beside.with_suffix(".check-ins.jsonl")
    return CheckIns(sampler, lambda: task.roster.connected(grid.get_nodes()), place, charged).cohort


def _train(job: Job) -> Outcome:
    """The simulation's loop; a disk that refuses a checkpoint stops it before the new model is broadcast."""
    from safetensors import SafetensorError

    try:
        with using_threads(1):
            return train(job, on_round=_announce)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the run stops ({error}); nothing more was released, start it again when it is mended"
        ) from error


def job_of(task: Task, settings: Settings) -> Job:
    """The run's parts, built as the simulation builds them, with the public test set and nobody's examples."""
    from fedflat.assembly.jobs import prepare
    from fedflat.assembly.plans import algorithm_of
    from fedflat.methods.noise import trust_of

    method = algorithm_of(task.recipe)
    check_deployable(task.recipe, method, trust_of(task.recipe, method))
    test = None
    if settings.test is not None:
        test = read_examples(settings.test)
        task.form.check(str(settings.test), *test)
    job = prepare(task.recipe, data=task.form.federation(test=test))
    if isinstance(job.parts.clip, MethodScale):  # messages come scaled; once more would be another message
        job.parts = replace(job.parts, clip=whole_vector(job.threshold))
    if job.parts.plan.trust == "local" and job.parts.plan.private:
        job.parts = replace(job.parts, mechanism=ClientNoise())
    if isinstance(job.parts.mechanism, SharedDiscreteNoise):
        job.parts = replace(job.parts, mechanism=ClientShares(job.parts.mechanism))
    return job


@contextmanager
def _only_server(out: Path, run: str = "") -> Iterator[None]:
    """One server on a folder or, by its id, on a run, whose folder's copies share a key: the second is refused before
    it touches key, ledger or network."""
    import fcntl

    lock = keys.folder().parent / "servers" / f"{run}.lock" if run else out / "server.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise wrong("out", f"{lock.parent} ({error.strerror})", "a folder you may write to") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"{out}: another server is running this run, or a copy of its folder") from error
        yield
    finally:
        os.close(descriptor)


def _folder(task: Task, job: Job, out: Path) -> RunFolder:
    """The run's folder: new, or the one of the same recipe, data form and model. The job gets what the run is."""
    import yaml

    from fedflat.assembly.records import settled, write_frozen
    from fedflat.records.opening import versions

    keys.check_outside(out)
    # The public test set may come and go; whose data it is says the roster, not the server.
    job.identity = replace(job.identity, recipe=task.identity, data="")
    if not (out / RECIPE).exists():
        dump = settled(task.recipe, job.parts, job.data.clients, job.problem.pristine)
        name = secrets.token_hex(16)
        marks = {
            **versions(("fedflat", "flwr", "torch", "numpy", "dp-accounting")),
            "run": name,
            "task": task.identity,
        }
        text = yaml.safe_dump({**dump, "versions": marks}, sort_keys=False, allow_unicode=True)
        job.opening = Opening.of(job.identity, fresh_key(), text, {}, name)
        job.opening.write(out)
        write_frozen(job, out)
        durable.replace(out / RECIPE, text, mode=0o644)
        return RunFolder(out, deployment=True, run=name)
    if _versions(out).get("task") != task.identity:
        raise wrong(
            "out", f"{out}, the folder of another deployment", "a new folder, or the one this task was started in"
        )
    if (out / ENDED).exists():
        raise wrong("out", f"{out}, a run that its operator ended for good", "a new folder")
    job.opening = Opening.read(out)
    if job.opening.differing(job.identity):
        raise wrong("out", f"{out}, the folder of another deployment", "the one this task was started in")
    return RunFolder(out, deployment=True, run=job.opening.run)


def standing(job: Job, out: Path) -> Outcome:
    """The run in ``out`` as its checkpoint and ledger have it, without touching either."""
    found = checkpoint.newest(out / "checkpoints")
    size = job.parts.layout.dimension
    state = job.parts.first_state(job.first[:size], job.threshold) if found is None else found[0]
    entries = read_ledger(out / LEDGER) if (out / LEDGER).exists() else []
    plan = job.parts.plan.standing(entries)
    last = min(plan.rounds, plan.rounds_within_budget(plan.again(entries)))
    return Outcome(state, PersonalState(job.first[size:]), [], [], entries, complete=state.round >= last)


def _versions(out: Path) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load((out / RECIPE).read_text(encoding="utf-8"))
    return dict(found.get("versions") or {}) if isinstance(found, dict) else {}


def _name(out: Path) -> str:
    return str(_versions(out).get("run", ""))


def _operator_file(run: str) -> Path:
    """Where counts of missing and refused replies go: beside the noise keys, not in the run's folder."""
    place = keys.folder().parent / "operator"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{place}: cannot be made ({error.strerror})") from error
    return place / f"{run}.jsonl"


def _wait_for_nodes(grid: Any, roster: Roster, settings: Settings) -> None:
    until = time.monotonic() + settings.start_seconds
    while len(roster.connected(grid.get_nodes())) < min(settings.nodes, roster.clients):
        if time.monotonic() > until:
            raise RunError(
                f"fewer than {settings.nodes} clients of the roster connected in {settings.start_seconds:g} s"
            )
        time.sleep(settings.poll)


def _tell_start(job: Job, outcome: Outcome) -> None:
    """One log line of what is to be done, and what was done before."""
    plan, done = job.parts.plan.standing(outcome.entries), outcome.state.round
    charged = done + plan.again(outcome.entries)
    spent = (plan.epsilon(charged) if charged else 0.0) if plan.private else math.inf
    facts = {"finished": done, "rounds": plan.rounds, "epsilon": spent, "budget": plan.budget, "delta": plan.delta}
    log.info("rounds %d to %d", done, plan.rounds - 1, extra=told("start", **facts))


def _announce(released: dict[str, Any], state: object) -> None:
    """One log line of a round, of what was released anyway."""
    number = released["round"]
    figures = {name: released.get(name) for name in ("epsilon", "test_accuracy", "seconds")}
    more = {"round": number, "finished": number + 1, "aborted": bool(released.get("aborted"))}
    log.info("round %d: %s", number, json.dumps(plain(figures)), extra=told("round", **more, **figures))
