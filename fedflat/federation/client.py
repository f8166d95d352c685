"""The client's side of a round: read the ask, train on its own examples, clip, answer. Data and head stay here."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import Broadcast, PersonalState, fresh_key, using_threads
from fedflat.core.checks import InputError, RunError, becoming, insist, one_of, require, wrong
from fedflat.engine.device import exact
from fedflat.engine.job import Job
from fedflat.engine.reduce import Accumulator, RoundSum, states_of
from fedflat.engine.round import accumulator_of, noisy_sum
from fedflat.federation import wire
from fedflat.federation.bounds import REFUSES
from fedflat.federation.events import log_to_stderr
from fedflat.federation.processes import draw_apart
from fedflat.federation.secagg.client import answer_stage
from fedflat.federation.store import Store, read_examples
from fedflat.federation.task import Task
from fedflat.federation.tips import without_tip
from fedflat.federation.wire import Answered, Malformed, Refused

log = logging.getLogger("fedflat.client")


@dataclass
class Client:
    """One client: its number, its own data file, its own state folder, and what it agreed to (the task).

    pin: a hash that the operator of the client fixed by hand; with it, another recipe is refused whatever the server
    says. operator: the public key of who runs the server; without one the first that is seen is pinned.
    """

    task: Task
    number: int
    data: Path
    store: Store
    pin: str = ""
    key: Path | None = None
    operator: Path | None = None

    def __post_init__(self) -> None:
        clients = self.task.form.clients
        require(0 <= self.number < clients, "node config: client", self.number, f"0 to {clients - 1}")
        if self.pin and self.pin != self.task.pin:
            raise wrong("node config: pin", self.pin, f"{self.task.pin}, the hash of the app's recipe, task and roster")

    @cached_property
    def job(self) -> Job:
        """Model, plan and data, built as the simulation builds them; only this client's rows are there, trained on by
        one thread.
        """
        from fedflat.assembly.jobs import prepare

        engine = self.task.recipe.engine.model_copy(update={"backend": "sequential", "processes": None})
        recipe = self.task.recipe.model_copy(update={"engine": engine})
        return prepare(recipe, data=self.task.form.federation(self.number, self.examples()))

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return its inputs and targets; InputError where they are not of the form that the task says."""
        inputs, targets = read_examples(self.data)
        self.task.form.check(str(self.data), inputs, targets)
        return inputs, targets

    def answer(self, content: Any) -> Any:
        """Return the content of the reply to a message's content.

        Raises:
            Refused: the ask is malformed, meant for another client or another recipe, or beyond what was agreed.
        """
        content = without_tip(content, self.store.folder, self.operator)
        with becoming(lambda fault: Refused(f"the server's message is malformed: {fault}"), Malformed):
            _, facts = wire.parts_of(content)
            round, client = wire.number(facts, "round"), wire.number(facts, "client")
            insist(client == self.number, Refused(f"the server asks client {client}, this is client {self.number}"))
            insist(facts.get("pin") == self.task.pin, Refused("the server runs another recipe, task or roster"))
            nonce, plan = wire.sixteen(facts, "nonce"), self.job.parts.plan
            insist(round < plan.rounds, Refused(f"the server asks for round {round} of {plan.rounds}"))
            if "stage" in facts:
                insist(plan.trust == "distributed", Refused("the recipe's trust model is not distributed"))
                return answer_stage(self, content, round, nonce)
            if plan.trust == "distributed":
                raise Refused("the server asks for an update without secure aggregation")
            broadcast = self.read_broadcast(content)
        update, examples = self.update(broadcast)
        if plan.trust == "local":
            self.store.note_participation(round)
        return wire.write_answer(wire.Answer(round, nonce, update.numpy(), examples))

    def read_broadcast(self, content: Any) -> Broadcast:
        """Return what a message broadcasts, if it is what a client need not take the server's word for."""
        plan, clip = self.job.parts.plan, self.job.parts.clip
        broadcast = wire.read_broadcast(content, self.job.parts.layout.dimension, self.job.parts.broadcast)
        if not clip.moves and broadcast.clip != self.job.threshold:
            raise Refused("the server asks for another clip than the recipe's")
        if plan.trust != "local":
            return broadcast
        if broadcast.round in self.store.answered():  # a second noised answer would be one more than is charged
            raise Answered(f"this client's answer to round {broadcast.round} has left already")
        allowed = plan.rounds if plan.max_participations is None else plan.max_participations
        if len(self.store.answered()) >= allowed:
            raise Answered(f"this client has taken part {allowed} times, which is all its guarantee allows")
        return broadcast

    def update(self, broadcast: Broadcast) -> tuple[Tensor, int]:
        """Return the clipped update ``(k·d,)``, noised under local trust, and the sample count if it is asked for.

        One without examples answers as any other, noise included: who has none is nobody's to know. Where the server
        counts clipped messages (adaptive clip), the message leaves as it is. A state is moved by it as clipped here.
        """
        job, parts, key = self.job, self.job.parts, fresh_key()  # never stored: nobody can draw this noise again
        noised = parts.plan.trust == "local" and parts.plan.private
        plain = Accumulator(parts.clip, broadcast.clip, parts.message_tensors, parts.message_length)
        total = accumulator_of(parts, broadcast, key) if noised else plain
        head, stored = self.store.personal(job.initial_weights[parts.layout.dimension :], broadcast.round)
        personal = PersonalState(head, states={name: {self.number: state} for name, state in stored.items()})
        before = states_of(parts.algorithm, personal, self.number, broadcast.shared)
        reduced = RoundSum(parts.algorithm, parts.local, broadcast, total, personal)
        part: Any
        # One thread and exact arithmetic: a client's message has the same bits here as in the simulation.
        with using_threads(1), exact(job.problem.device):
            (part,) = job.backend.train(np.array([self.number]), broadcast, personal, reduced.clipped)
            reduced.add(part)
        after = personal.of(self.number), states_of(parts.algorithm, personal, self.number, broadcast.shared)
        self.store.keep_personal(broadcast.round, (head, before), after)
        if noised:
            update = noisy_sum(parts, broadcast, total.result(), key)
        else:
            update = part.messages[0].cpu() if parts.clip.moves else plain.result().total
        return update.to(torch.float32), len(job.data.parts[self.number]) if parts.weighted else 0


CONFIG_KEYS = ("client", "data", "state", "pin", "key", "operator", "log")
"""What a ``--node-config`` may say."""


def client_of(task: Task, config: Any) -> Client:
    """Return the client that a ``--node-config`` describes: client, data, state; perhaps pin, key, operator, log."""
    example = '--node-config \'client=0 data="…" state="…"\''
    for name in ("client", "data", "state"):
        require(name in config, "node config", "nothing", f"{name}=…, for example {example}")
    for name, value in config.items():
        one_of("node config", name, CONFIG_KEYS)
        require("\0" not in str(value), f"node config: {name}", repr(value), "no character of code 0")
    if not isinstance(config["client"], int) or isinstance(config["client"], bool):
        raise wrong("node config: client", repr(config["client"]), "the client's number in the roster, unquoted")
    paths = {name: Path(str(config[name])) for name in ("data", "state", "key", "operator") if config.get(name)}
    if operator := paths.get("operator"):  # the key that was asked for, and no other that is seen first
        require(operator.is_file(), "node config: operator", f"{operator}, no such file", "the operator's public key")
    client = Client(task, config["client"], store=Store(paths.pop("state")), pin=str(config.get("pin", "")), **paths)
    client.store.of_client(client.number)
    return client


def client_app(folder: str | Path) -> Any:
    """Return the ``flwr.clientapp.ClientApp`` for the task (recipe.yaml, task.json, roster.json) in ``folder``.

    The node config names client, data and state.
    """
    from flwr.clientapp import ClientApp

    draw_apart()
    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        log_to_stderr(str(context.node_config.get("log", "text")))
        return reply_to(message, context.node_config, Path(folder))

    app.train()(answer)
    return app


def reply_to(message: Any, config: Any, app_folder: Path) -> Any:
    """Return the Flower reply to a Flower message; what went wrong stays in this client's own log."""
    from flwr.app import Error, Message

    code = 0
    try:
        client = client_of(Task.read(app_folder), config)
        with client.store.answer_lock():
            client.store.note_node(message.metadata.dst_node_id)
            return Message(client.answer(message.content), reply_to=message)
    except (InputError, RunError, OSError) as error:  # a full disk of the client's
        log.error("no answer: %s", error)
        code = REFUSES if isinstance(error, Refused) and not isinstance(error, Answered) else 0
    except Exception:  # a traceback in the reply could carry data
        log.exception("local training failed")
    return Message(Error(code=code, reason="no answer"), reply_to=message)
