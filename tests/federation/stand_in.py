"""A grid in memory: what a SuperLink does with messages, without processes, and small deployments to run on it."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedflat.config.recipe import Recipe
from fedflat.engine.job import Job
from fedflat.federation import server
from fedflat.federation.bounds import REFUSES, Limit
from fedflat.federation.client import Client, Refused
from fedflat.federation.project import PACKAGE, client_folder, write_project
from fedflat.federation.server import Settings
from fedflat.federation.store import Store
from fedflat.federation.task import Task
from fedflat.federation.wire import Answered
from fedflat.records import checkpoint

BASE: dict[str, Any] = {
    "name": "small", "rounds": 2,
    "data": {"dataset": "digits", "clients": 4, "partition": "iid", "max_examples": 120, "max_test": 60},
    "model": {"name": "mlp", "hidden": 4}, "algorithm": {"name": "dp-fedsam", "rho": 0.05},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.2}, "cohort": {"size": 4},
    "privacy": {"clip": 0.1, "noise_multiplier": 0},
}  # fmt: skip

Handler = Callable[[Any], Any]


def small(**changes: Any) -> Recipe:
    """The base recipe with sections replaced or merged key by key."""
    found = dict(BASE)
    for key, value in changes.items():
        merge = isinstance(value, dict) and key not in ("algorithm", "model")
        found[key] = {**BASE.get(key, {}), **value} if merge else value
    return Recipe.of(found)


_WRITTEN: dict[str, tuple[TemporaryDirectory[str], Task]] = {}
_JOBS: dict[tuple[str, int, bytes], Job] = {}
_FITTING: set[tuple[Any, ...]] = set()
"""Projects by what their recipe says; what clients train with, by pin, number and examples; forms of messages that fit:
each is made, or looked at, once."""


def deployed(folder: Path, recipe: Recipe) -> tuple[Task, list[Client]]:
    """A project of the recipe (a copy: two files of settings name the place of the first), its task and its clients."""
    said = recipe.model_dump_json(exclude_unset=True)
    if said not in _WRITTEN:
        place = TemporaryDirectory()
        write_project(recipe, Path(place.name) / "fed")
        _WRITTEN[said] = place, Task.read(Path(place.name) / "fed" / "app" / PACKAGE)
    place, task = _WRITTEN[said]
    shutil.copytree(Path(place.name) / "fed", folder, dirs_exist_ok=True)
    return task, [client_at(folder, task, number) for number in range(task.form.clients)]


def client_at(folder: Path, task: Task, number: int) -> Client:
    """A client as its SuperNode would start it: nothing in memory, all from its folder."""
    own = client_folder(folder, number)
    return Client(task, number, own / "data.safetensors", Store(own / "state"), task.pin, own / "auth.key")


def settings(folder: Path, **changes: Any) -> Settings:
    """Settings of a server that does not wait for long."""
    usual = {"out": folder / "run", "test": folder / "server" / "test.safetensors", "poll": 0.01}
    return Settings(**{**usual, "answer_seconds": 0.05, "start_seconds": 0.2, "wait_for_nodes": 0, **changes})


def pem(key: str) -> bytes:
    """A node's key as Flower shows it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    return load_ssh_public_key(key.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def be_a_task() -> None:
    """What a process that works for Flower is told at its start."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def objects_of(message: Any) -> tuple[Any, dict[str, bytes]]:
    """A message as Flower sends it: the tree of its objects, and their bytes by id."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    return get_object_tree(message), {name: part.deflate() for name, part in get_all_nested_objects(message).items()}


def fits(limit: Limit, message: Any) -> None:
    """Hold an honest message against the deployment's limits, as every SuperLink, SuperNode and ServerApp does. Of
    messages with the same entries and sizes, the first."""
    entries = [entry for record in message.content.values() for entry in record.items()]
    held = [(name, getattr(value, "data", value)) for name, value in entries]
    form = (limit, *((name, len(part) if isinstance(part, bytes) else 0) for name, part in held))
    if form not in _FITTING:
        tree, contents = objects_of(message)
        limit.names(tree)
        limit.check(contents)
        _FITTING.add(form)


@dataclass
class Grid:
    """Nodes 1000, 1001, …, one for each key of the roster; a handler turns a message into a reply, replies or None."""

    task: Task
    handlers: dict[int, Handler]
    pushed: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)
    connected: set[int] | None = None

    def __post_init__(self) -> None:
        be_a_task()

    def get_nodes(self) -> list[Any]:
        numbers = self.handlers if self.connected is None else self.connected
        return [SimpleNamespace(node_id=1000 + i, public_key=pem(self.task.roster.keys[i])) for i in sorted(numbers)]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"m{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = number
            fits(self.task.limits.ask, message)
            self.pushed.append(message)
            numbers.append(number)
            found = self.handlers[message.metadata.dst_node_id - 1000](message)
            self.waiting += found if isinstance(found, list) else [found] if found is not None else []
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        wanted = set(numbers)
        taken = [reply for reply in self.waiting if reply.metadata.reply_to_message_id in wanted]
        self.waiting = [reply for reply in self.waiting if reply not in taken]
        return taken


def honest(client: Client) -> Handler:
    """A client that answers as the app would, or with Flower's error."""

    def handle(message: Any) -> Any:
        from flwr.app import Error, Message

        try:
            reply = Message(client.answer(message.content), reply_to=message)
            fits(client.task.limits.reply, reply)
            return reply
        except Refused as error:
            return Message(Error(code=0 if isinstance(error, Answered) else REFUSES, reason="no"), reply_to=message)

    return handle


def grid_of(task: Task, clients: Iterable[Client]) -> Grid:
    """A grid of honest clients, each with the job that the first of its kind built."""
    clients = list(clients)
    for client in clients:
        kind = task.pin, client.number, client.data.read_bytes()
        if kind not in _JOBS:
            _JOBS[kind] = client.job
        client.__dict__["job"] = _JOBS[kind]
    return Grid(task, {client.number: honest(client) for client in clients})


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def after_rounds(act: Callable[[int], None]) -> Iterator[None]:
    """What happens when a server has released a round and said so."""
    announce = server._announce

    def announced(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        announce(released, hidden)
        act(released["round"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_announce", announced)
        yield


def stopped(task: Task, grid: Grid, given: Settings, after: int, act: Callable[[int], None] = lambda _: None) -> None:
    """A server that its operator stops after a round. act: what happens after each."""

    def stop(round: int) -> None:
        act(round)
        if round == after:
            raise KeyboardInterrupt

    with after_rounds(stop), pytest.raises(KeyboardInterrupt):
        server.serve(grid, task, given)


def put_back(backup: Path, folder: Path) -> None:
    """An older copy takes a folder's place."""
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)


def final_shared(folder: Path) -> torch.Tensor:
    """w after the last checkpoint of a run."""
    found = checkpoint.newest(folder / "checkpoints")
    return found[0].shared if found else torch.empty(0)
