"""A client's own disk: its examples, personal part, states, and how often it took part. Nothing here is ever sent."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from fedflat.core import durable, making, reading, require, writing, wrong

HEAD, ROUNDS = "head.safetensors", "rounds.jsonl"
SESSION, NODE, LOCK, RUNNING, OWNER = "session.json", "node.json", "answer.lock", "supernode.lock", "client.json"


Personal = tuple[Tensor, Mapping[str, Tensor]]
"""A client's personal part ``(D − d,)``, and its states ``(d,)`` by name."""


def write_examples(path: str | Path, inputs: Tensor, targets: Tensor) -> None:
    """Write ``inputs (n, …)`` and ``targets (n,)`` as the file that a client (or the server, its public test set)
    reads.
    """
    durable.replace_tensors(Path(path), {"inputs": inputs, "targets": targets}, {})


def read_examples(path: str | Path) -> tuple[Tensor, Tensor]:
    """Return the examples in a file; InputError if it is none."""
    allowed = "a safetensors file with inputs and targets (fedflat.federation.write_examples writes one)"
    with reading(path, "no examples", allowed):
        tensors, _ = durable.contents_of(Path(path))
        return tensors["inputs"], tensors["targets"]


@dataclass(frozen=True)
class Store:
    """The folder of one client, readable by its owner only."""

    folder: Path

    def __post_init__(self) -> None:
        with making("state", self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def answer_lock(self) -> IO[bytes]:
        """Return the lock of the folder: one answer at a time, which counts what it counts before the next asks."""
        return durable.lock_file(self.folder / LOCK)

    def node_lock(self) -> IO[bytes]:
        """Return the lock that this client's SuperNode holds while it runs; InputError if another one holds it."""
        taken = f"{self.folder}, of a SuperNode that is running"
        return durable.lock_file(self.folder / RUNNING, wrong("state", taken, "one SuperNode a client"))

    def personal(self, first: Tensor, round: int) -> Personal:
        """Return what a round starts from.

        That is w^0's personal part (``first``) and no states, or what the last earlier round left. A round that is
        asked again (the server was restarted) starts from where it started before, not from its end.
        """
        path = self.folder / HEAD
        if not path.exists():
            return first.clone(), {}
        with reading(path, "a personal part that cannot be read", "the file fedflat wrote, or none to start anew"):
            tensors, metadata = durable.contents_of(path)
            when = "before" if int(metadata["round"]) >= round else "after"
            states = {name.removeprefix(when): value for name, value in tensors.items() if name.startswith(when)}
        head = states.pop("", first[:0])
        if head.shape != first.shape:
            raise wrong(str(path), f"{head.numel()} personal parameters", f"{first.numel()}, as the model has")
        return head, states

    def keep_personal(self, round: int, before: Personal, after: Personal) -> None:
        """Store durably what a round began with and what it left (``PersonalState`` keeps nothing that diverged)."""
        both = (("before", before), ("after", after))
        held = {when + name: value for when, (head, states) in both for name, value in {"": head, **states}.items()}
        if any(value.numel() for value in held.values()):
            durable.replace_tensors(self.folder / HEAD, held, {"round": str(round)})

    def of_client(self, number: int) -> None:
        """Note whose folder this is. Raises InputError if it is another client's, whose answers it counts."""
        owner = read_note(self.folder / OWNER)
        if not owner:
            durable.replace(self.folder / OWNER, json.dumps({"client": number}).encode())
        elif owner != {"client": number}:
            raise wrong("state", f"{self.folder}, with {OWNER} of another client", f"a folder of client {number}'s own")

    def answered(self) -> list[int]:
        """Return the rounds whose answers have left this client, or may have. Raises InputError for a damaged file."""
        path = self.folder / ROUNDS
        if not path.exists():
            return []
        require(path.is_file(), str(path), "no file", "the file that fedflat wrote")
        content = path.read_bytes()
        # A line that a kill tore may stand before the next one; without its end it may have left too.
        sound = [re.fullmatch(rb'[{"round: \d}]*\{"round": \d+\}|', line) for line in content.split(b"\n")[:-1]]
        bad = f"{path}, line {sound.index(None) + 1 if None in sound else 0}"
        require(None not in sound, bad, "what no client wrote", "the file that fedflat wrote: put it back")
        return [int(round) for round in re.findall(rb'\{"round": (\d+)\}', content)]

    def keep_session(self, session: dict[str, Any]) -> None:
        """Keep the secrets of one secure aggregation until its end; there is one at a time."""
        durable.replace(self.folder / SESSION, json.dumps(session).encode())

    def session(self) -> dict[str, Any]:
        """Return the session that is open; an empty one where there is none, or where its file is damaged."""
        return read_note(self.folder / SESSION)

    def end_session(self) -> None:
        """Forget a session's secrets, also in a file that a kill left half written."""
        for name in (SESSION, SESSION + ".part"):
            (self.folder / name).unlink(missing_ok=True)

    def node(self) -> int | None:
        """Return Flower's number of this client's SuperNode, if it was ever asked anything."""
        node = read_note(self.folder / NODE).get("node")
        return node if isinstance(node, int) else None

    def note_node(self, node: int) -> None:
        """Remember Flower's number, by which the next SuperNode signs off one that was killed."""
        if self.node() != node:
            durable.replace(self.folder / NODE, json.dumps({"node": node}).encode())

    def note_participation(self, round: int) -> None:
        """Count an answer, durably, before it leaves."""
        with writing(self.folder / ROUNDS, then="nothing is sent"):
            durable.append(self.folder / ROUNDS, json.dumps({"round": round}).encode() + b"\n")


def read_note(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none, or the file is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}
