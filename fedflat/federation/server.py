"""The server's side: the simulation's own loop, with a cohort that trains elsewhere.

``train`` chooses the cohort, broadcasts, sums, finishes the round, writes the ledger and checkpoints; this module only
carries messages, checks replies in, and keeps the run's key and folder. A client that does not answer, or not as
agreed, is not added: a zero vector under the same denominator.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedflat.assembly.jobs import prepare
from fedflat.assembly.planning import drowned
from fedflat.assembly.records import frozen_of, settled
from fedflat.assembly.stating import Terms, state_privacy
from fedflat.config import reading
from fedflat.core import MinSeparation, RoundState, durable, fresh_key, using_threads, versions
from fedflat.core.checks import RunError, becoming, require, whole, wrong
from fedflat.engine.device import return_large_blocks
from fedflat.engine.job import Job, Outcome
from fedflat.engine.resume import first_start
from fedflat.engine.train import train, write_beginning, write_ending
from fedflat.federation.bounds import Limits
from fedflat.federation.events import log_fields, log_to_stderr, serve_metrics
from fedflat.federation.processes import draw_apart
from fedflat.federation.replies import CheckIns, Culprits
from fedflat.federation.secagg.rounds import ClientShares, SecureFlower
from fedflat.federation.store import read_examples
from fedflat.federation.task import Roster, Task, check_deployable
from fedflat.federation.tips import new_run, operator_file, operator_key, restore_lines, tip_record
from fedflat.federation.transport import Flower, limit_replies, note_refusals
from fedflat.methods.ddgauss import SharedDiscreteNoise
from fedflat.methods.noise import of_a_server
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint, keys
from fedflat.records.folder import LEDGER, RECIPE, RunFolder
from fedflat.records.opening import Opening, refuse_older

log = logging.getLogger("fedflat.server")

ENDED = "ended.json"
"""In the folder of a run that ``fedflat.federation.close`` ended."""


@dataclass(frozen=True)
class Settings:
    """Where and how a server runs. out: the run's folder. test: public test set, or None. wait_for_nodes: connected
    clients to wait for before round 0, at most ``start_seconds``. answer_seconds: how long a round waits for its
    clients. exclusion_limit: a client that broke the protocol in so many rounds is asked no more. abort_limit: under
    secure aggregation the run stops after so many charged rounds in a row without a result. poll: seconds between looks
    for answers, short beside local training, and few calls while it goes on. metrics: where a page about the server is
    (``HOST:PORT``), or empty. metrics_beyond_this_machine: True for one that other machines reach."""

    out: Path
    test: Path | None = None
    answer_seconds: float = 600.0
    wait_for_nodes: int = 1
    start_seconds: float = 600.0
    poll: float = 0.3
    abort_limit: int = 3
    exclusion_limit: int = 3
    metrics: str = ""
    metrics_beyond_this_machine: bool = False

    def __post_init__(self) -> None:
        whole("abort-limit", self.abort_limit, 1)
        whole("exclusion-limit", self.exclusion_limit, 1)

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Read the settings from a Flower app's run config."""
        keys = {field.name: field.name.replace("_", "-") for field in fields(cls)}
        values = {name: config[key] for name, key in keys.items() if key in config}
        values["out"] = Path(str(config["out"])).expanduser()
        values["test"] = Path(str(values["test"])).expanduser() if values.get("test") else None
        return cls(**values)


def server_app(folder: str | Path) -> Any:
    """Return the ``flwr.serverapp.ServerApp`` for the task (recipe.yaml, task.json, roster.json) in ``folder``."""
    from flwr.serverapp import ServerApp

    draw_apart()
    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        log_to_stderr(str(context.run_config.get("log", "text")))
        serve(grid, Task.read(Path(folder)), Settings.of(context.run_config))

    app.main()(main)
    return app


def serve(grid: Any, task: Task, settings: Settings) -> dict[str, Any]:
    """Run a deployment to its end, or go on with the one in ``settings.out``; returns the privacy statement.

    Raises:
        InputError: the task, the folder or the roster is not what it should be, or the run was ended for good.
        RunError: the disk refuses, or another server has the run.
    """
    job = job_of(task, settings)
    return_large_blocks()  # before the first reply: the allocator keeps what it took in small blocks until the end
    with serve_metrics(settings.metrics, settings.metrics_beyond_this_machine is True), ExitStack() as held:
        held.enter_context(keys.alone(settings.out))
        folder = _folder(task, job, settings.out)
        held.enter_context(keys.alone(settings.out, folder.run))  # a copied folder has another path and the same key
        job.folder, job.stored, job.tell, job.operator = folder, True, log.warning, operator_key(settings.out)
        restore_lines(folder.path, folder.run)
        outcome = stored_outcome(job, folder.path)
        # A complete run needs no key and no clients, only its statement; if its mark is ahead, it is charged first.
        if not outcome.complete or keys.compare(folder.run, outcome.entries)[0]:
            culprits = Culprits(operator_file(folder.run, ".excluded"), settings.exclusion_limit, settings.abort_limit)
            job.backend = backend = _backend(grid, task, job, settings, culprits)
            job.check_ins = _check_ins(backend, job, folder.run, outcome)
            _tell_start(job, outcome)
            for note in drowned(task.recipe, job):
                log.warning(note)
            _wait_for_nodes(grid, task.roster, settings)
            log.info("clients enough are connected", extra=log_fields("ready"))
            outcome = _train(job)
        facts = write_ending(job, outcome, state_privacy(task.recipe, job, outcome))
        log.info("run complete: %s", folder.path, extra=log_fields("complete"))
        return facts


def _backend(grid: Any, task: Task, job: Job, settings: Settings, culprits: Culprits) -> Flower:
    """Return what asks the clients: one exchange a round, or the steps of secure aggregation."""
    folder: RunFolder = job.folder  # type: ignore[assignment]
    # One signature a round: all its messages go out while the ledger stands still.
    tip = functools.partial(tip_record, folder.path, folder.run, job.operator)  # type: ignore[arg-type]
    common: dict[str, Any] = {
        "grid": limit_replies(grid, task.limits.reply) if hasattr(grid, "_runtime_client") else grid,  # Flower's own
        "roster": task.roster, "pin": task.pin, "dimension": job.parts.message_length,
        "answer_seconds": settings.answer_seconds, "poll": settings.poll, "culprits": culprits,
        "refusals": functools.partial(note_refusals, operator_file(folder.run)),
        "tip": functools.lru_cache(maxsize=1)(tip),
    }  # fmt: skip
    if not isinstance(job.parts.mechanism, ClientShares):
        return Flower(**common)
    plan, left_open = job.parts.plan, (folder.path / LEDGER).exists()
    return SecureFlower(**common, plan=plan, mechanism=job.parts.mechanism.inner.mechanism, left_open=left_open)


def _check_ins(backend: Flower, job: Job, run: str, outcome: Outcome) -> Callable[[RoundState], Any] | None:
    """Return what chooses the cohorts where clients take turns as they come; None where the law alone does."""
    sampler = job.parts.plan.sampler
    if not isinstance(sampler, MinSeparation):
        return None
    lost, _ = keys.compare(run, outcome.entries)  # a folder put back has fewer lines than the mark beside the key
    charged = frozenset(entry["round"] for entry in (*outcome.entries, *lost))
    asks = operator_file(run, ".check-ins")
    return CheckIns(sampler, backend.present, asks, charged).cohort


def _train(job: Job) -> Outcome:
    """Return the simulation's loop; a disk that refuses a checkpoint stops it before the new model is broadcast."""
    from safetensors import SafetensorError

    hint = "nothing more was released, start it again when it is mended"
    stopped = becoming(lambda error: RunError(f"the run stops ({error}); {hint}"), (OSError, SafetensorError))
    with stopped, using_threads(1):
        return train(job, on_round=_announce)


def job_of(task: Task, settings: Settings) -> Job:
    """Return the run's parts, built as the simulation builds them, with the public test set and nobody's examples."""
    check_deployable(task.recipe)
    test: Any = (None, None)
    if settings.test is not None:
        test = read_examples(settings.test)
        task.form.check(str(settings.test), *test)
    engine = task.recipe.engine.model_copy(update={"device": "cpu"})  # it trains nobody, and may have no GPU
    job = prepare(task.recipe.model_copy(update={"engine": engine}), data=task.form.federation(test=test))
    if (wanted := Limits.of(job)) != task.limits:
        stated, needed = (json.dumps(asdict(limits)) for limits in (task.limits, wanted))
        raise wrong("task.json: bytes", stated, f"{needed}, as the recipe's messages need")
    job.parts = of_a_server(job.parts, job.threshold)
    if isinstance(job.parts.mechanism, SharedDiscreteNoise):
        job.parts = replace(job.parts, mechanism=ClientShares(job.parts.mechanism))
    return job


def _folder(task: Task, job: Job, out: Path) -> RunFolder:
    """Return the run's folder: new, or that of the same recipe, data form and model. The job gets what the run is."""
    keys.check_outside(out)
    # The public test set may come and go; whose data it is says the roster, not the server.
    job.identity = replace(job.identity, recipe=task.identity, data="")
    if not (out / RECIPE).exists():
        # A new run here would take the place of what that one needs to go on.
        allowed = "a new folder, or the run's own with all its files"
        require(not (out / LEDGER).exists(), "out", f"{out}, a run without its {RECIPE}", allowed)
        dump = settled(task.recipe, job.parts, job.data.clients, job.problem.pristine)
        name = new_run(task.pin, out)
        installed = versions(("fedflat", "flwr", "torch", "numpy", "dp-accounting"))
        text = reading.dumped({**dump, "versions": {**installed, "run": name, "task": task.identity}})
        terms = Terms.of(task.recipe, job, deployment=True).record()
        job.opening = Opening.of(job.identity, fresh_key(), text, {}, name, terms)
        write_beginning(out, text, job, frozen_of(job))
        return RunFolder(out, deployment=True, run=name)
    other, allowed = f"{out}, the folder of another deployment", "the one this task was started in"
    require(_versions(out).get("task") == task.identity, "out", other, f"a new folder, or {allowed}")
    require(not (out / ENDED).exists(), "out", f"{out}, a run that its operator ended for good", "a new folder")
    job.opening = Opening.read(out)
    refuse_older("out", out, job.opening.terms)
    require(not job.opening.differing(job.identity), "out", other, allowed)
    return RunFolder(out, deployment=True, run=job.opening.run)


def stored_outcome(job: Job, out: Path) -> Outcome:
    """Return the run in ``out`` as its checkpoint and ledger have it, without touching either."""
    start, newest = first_start(job), checkpoint.newest(out / "checkpoints")
    state = start.state if newest is None else newest[0]
    entries = read_ledger(out / LEDGER) if (out / LEDGER).exists() else []
    plan = job.parts.plan.standing(entries)
    last = min(plan.rounds, plan.rounds_within_budget(plan.again(entries)))
    return Outcome(state, start.heads, [], [], entries, complete=state.round >= last)


def _versions(out: Path) -> dict[str, Any]:
    return dict(reading.read(out / RECIPE).get("versions") or {})


def run_id(out: Path) -> str:
    return str(_versions(out).get("run", ""))


def _wait_for_nodes(grid: Any, roster: Roster, settings: Settings) -> None:
    until = time.monotonic() + settings.start_seconds
    while len(roster.connected(grid.get_nodes())) < min(settings.wait_for_nodes, len(roster.keys)):
        if time.monotonic() > until:
            seconds = f"{settings.start_seconds:g} s"
            raise RunError(f"fewer than {settings.wait_for_nodes} clients of the roster connected in {seconds}")
        time.sleep(settings.poll)


def _tell_start(job: Job, outcome: Outcome) -> None:
    """Log in one line what is to be done, and what was done before."""
    plan, done = job.parts.plan.standing(outcome.entries), outcome.state.round
    charged = done + plan.again(outcome.entries)
    spent = (plan.epsilon(charged) if charged else 0.0) if plan.private else math.inf
    facts = {"finished": done, "rounds": plan.rounds, "epsilon": spent, "budget": plan.budget, "delta": plan.delta}
    log.info("rounds %d to %d", done, plan.rounds - 1, extra=log_fields("start", **facts))


def _announce(released: dict[str, Any], state: object) -> None:
    """Log in one line what a round released."""
    number = released["round"]
    figures = {name: released.get(name) for name in ("epsilon", "test_accuracy")}
    more = {"round": number, "finished": number + 1, "aborted": bool(released.get("aborted"))}
    log.info("round %d: %s", number, json.dumps(durable.plain(figures)), extra=log_fields("round", **more, **figures))
