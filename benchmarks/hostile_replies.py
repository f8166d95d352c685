"""What one client of the roster can make a federation pay with what it uploads: memory, and the others' work.

    python benchmarks/hostile_replies.py [D]

Real: SuperLink, ServerApp, the SuperNodes of three honest clients. The fourth client speaks Flower's Fleet API with its
own key and answers each round's question with another attack. After each: the most memory of each program in that
round, what the operator's file says, and whether a round lost an honest answer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.superlink_load import dimension_of, recipe_of
from fedflat.federation import wire
from fedflat.federation.local import Federation
from fedflat.federation.project import client_folder, write_project

CLIENTS, PORT = 4, 18543
CHUNK, ZEROS, NOISE, RECORDS = 5_242_880, 800, 300, 1_000_000
"""Bytes of a chunk; chunks of zeros (4 GB), of noise (1.5 GB), entries."""
GAP = 3.0
"""Seconds after an attack in which memory is watched."""


class Attacker:
    """A connected client of the roster that answers as it likes."""

    def __init__(self, connection: Any, folder: Path, address: str, key: Any) -> None:
        self.receive, self.send, self.push = connection[1], connection[2], connection[6]
        self.folder, self.key, self.address = folder, key, address

    def reply(self, asked: Any, update: np.ndarray) -> Any:
        """Return a reply of the agreed form with some vector."""
        from flwr.app import Message

        answer = wire.Answer(int(asked.metadata.group_id), b"n" * wire.NONCE_BYTES, update)
        return Message(wire.write_answer(answer), reply_to=asked)

    def upload(self, asked: Any, reply: Any, alter: Callable[[Any], None] = lambda tree: None) -> None:
        """Declare a reply and push all of it, wanted or not. alter: changes the tree that is declared."""
        from flwr.app import Message, RecordDict
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        reply.metadata.__dict__["_message_id"] = reply.object_id
        contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        tree = get_object_tree(reply)
        alter(tree)
        bare = Message(RecordDict(), reply_to=asked)
        bare.metadata.__dict__["_message_id"] = reply.object_id
        _, session = self.send(bare, tree, 0.1)
        run = asked.metadata.run_id
        with ThreadPoolExecutor(16) as pool:  # all at a time
            for pushed in [pool.submit(self.push, run, session, *one) for one in contents.items()]:
                with suppress(Exception):
                    pushed.result()

    def zeros(self, asked: Any, hidden: bool) -> None:
        """One chunk of zeros that the array names 800 times. hidden: the tree names it once."""
        from flwr.app.message.arraychunk import ArrayChunk

        reply = self.reply(asked, np.zeros(8, dtype=np.float32))
        array, one = reply.content["arrays"]["update"], ArrayChunk(memoryview(bytes(CHUNK)))
        array.data = b""
        array.__dict__["_chunks"] = [(one.object_id, one)] * ZEROS
        self.upload(asked, reply, lambda tree: _once(tree) if hidden else None)

    def noise(self, asked: Any) -> None:
        """1.5 GB of noise as an array in chunks, pushed whether wanted or not."""
        self.upload(asked, self.reply(asked, np.random.default_rng(0).random(NOISE * CHUNK // 4, dtype=np.float32)))

    def whole(self, asked: Any) -> None:
        """1.5 GB of noise as the body of one signed request."""
        import httpx
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        def body() -> Iterator[bytes]:
            for _ in range(NOISE):
                yield os.urandom(CHUNK)

        context = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.crt"))
        with httpx.Client(verify=context, timeout=60) as client:
            headers = {"content-length": str(NOISE * CHUNK), "content-type": "application/protobuf"}
            request = client.build_request(
                "POST", f"https://{self.address}/v1/fleet/push-object", content=body(), headers=headers
            )
            asks: Any = type("Context", (), {"request": request})
            with suppress(httpx.HTTPError):
                NodeAuthHttpInterceptor(self.key, self.key.public_key()).intercept(
                    asks, lambda sent: client.send(sent.request)
                )

    def records(self, asked: Any, count: int) -> None:
        """A record of so many entries of a few bytes."""
        from flwr.app import ConfigRecord

        reply = self.reply(asked, np.zeros(8, dtype=np.float32))
        reply.content["facts"] = ConfigRecord({format(number, "x"): 0 for number in range(count)})
        self.upload(asked, reply)

    def leaves(self, asked: Any) -> None:
        """A million objects, each declared by a name."""

        def many(tree: Any) -> None:
            for number in range(RECORDS):
                tree.children.add().object_id = f"{number:064x}"

        self.upload(asked, self.reply(asked, np.zeros(8, dtype=np.float32)), many)


def _once(tree: Any) -> None:
    """Let each object of a tree stand in it once."""
    kept = {child.object_id: child for child in tree.children}
    copies = [type(tree).FromString(child.SerializeToString()) for child in kept.values()]
    del tree.children[:]
    tree.children.extend(copies)
    for child in tree.children:
        _once(child)


ATTACKS: dict[str, Callable[[Attacker, Any, int], None]] = {
    "an honest reply": lambda a, asked, d: a.upload(asked, a.reply(asked, np.zeros(d, dtype=np.float32))),
    "5 MB that unpack to 4 GB of zeros": lambda a, asked, d: a.zeros(asked, False),
    "the same, its tree says 5 MB": lambda a, asked, d: a.zeros(asked, True),
    "1.5 GB of noise, 300 objects": lambda a, asked, d: a.noise(asked),
    "1.5 GB of noise, one object": lambda a, asked, d: a.whole(asked),
    "10^6 entries": lambda a, asked, d: a.records(asked, RECORDS),
    "entries up to the length of a reply": lambda a, asked, d: a.records(asked, 4 * d // 14),
    "10^6 objects": lambda a, asked, d: a.leaves(asked),
}


def hostile(folder: Path, number: int, address: str, dimension: int, at: Any) -> None:
    """The fourth client; ``at`` becomes the round whose attack is on."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.fleet_http_connection import http_request_response

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    key: Any = load_ssh_private_key((client_folder(folder, number) / "auth.key").read_bytes(), None)
    authority = str(folder / "certificates" / "ca.crt")
    with http_request_response(address, False, authority, (key, key.public_key()), 2) as connection:
        attacker = Attacker(connection, folder, address, key)
        while True:
            while (received := attacker.receive()) is None:
                time.sleep(0.2)
            at.value = int(received[0].metadata.group_id)  # a round that an attack outlasts has none of its own
            with suppress(Exception):
                list(ATTACKS.values())[at.value](attacker, received[0], dimension)
            time.sleep(GAP)


def resident() -> dict[int, tuple[int, str, float]]:
    """Each process's parent, name, and resident MiB."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, StopIteration):
            if entry.name.isdigit():
                lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
                size = int(lines.get("VmRSS", "0 kB").split()[0]) / 1024
                found[int(entry.name)] = (int(lines["PPid"]), lines["Name"].strip(), size)
    return found


def watch(pids: dict[str, int], at: Any, peaks: list[dict[str, float]], done: threading.Event) -> None:
    """Note the most memory of each program while each attack is on; a program's forked processes count with it."""
    while not done.wait(0.05):
        seen = resident()
        for pid, (parent, name, size) in seen.items():
            above = parent
            while above not in pids.values() and above in seen:
                above = seen[above][0]
            for program, top in pids.items():
                if top in (pid, above):
                    what = {"flwr-serverapp": "ServerApp"}.get(name, program)
                    peaks[at.value][what] = max(peaks[at.value].get(what, 0.0), size)


def measure(dimension: int, place: Path) -> None:
    """Run the attacks, one a round, and print a line for each."""
    folder, count = place / "fed", len(ATTACKS)
    recipe = recipe_of(CLIENTS, dimension).model_copy(update={"rounds": count})
    write_project(recipe, folder, port=PORT)
    context = multiprocessing.get_context("spawn")
    at, peaks, done = context.Value("i", 0), [{} for _ in ATTACKS], threading.Event()
    with Federation(folder) as federation:
        federation.start(clients=range(CLIENTS - 1))

        real, address = dimension_of(federation), f"{federation.host}:{federation.port}"
        names = {"SuperLink": "superlink", "SuperNode": "client-0"}
        pids = {name: federation.processes[program].pid for name, program in names.items()}
        attacker = context.Process(target=hostile, args=(folder, CLIENTS - 1, address, real, at))
        attacker.start()
        threading.Thread(target=watch, args=(pids, at, peaks, done), daemon=True).start()
        run = federation.run(config=f"wait-for-nodes={CLIENTS} answer-seconds=600.0 exclusion-limit=99")
        status = federation.wait(run, 1800)
        done.set()
        attacker.terminate()
    report(folder, real, peaks, status)


def report(folder: Path, dimension: int, peaks: list[dict[str, float]], status: str) -> None:
    """One line an attack."""
    operator = Path(os.environ["XDG_STATE_HOME"]) / "fedflat" / "operator"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    named, counts = {}, {}
    for path in sorted(operator.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            (named if "excluded" in line else counts)[line["round"]] = line
    print(f"d = {dimension:,}; {status}, {len(rows)} of {len(ATTACKS)} rounds; load {os.getloadavg()[0]:.1f}")
    for round, name in enumerate(ATTACKS):
        sizes = ", ".join(f"{program} {size:.0f}" for program, size in sorted(peaks[round].items()))
        said = named.get(round, {}).get("excluded", "nobody")
        print(f"{name}: MiB {sizes}; named {said}; counts {counts.get(round, {})}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = f"{made}/state"
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, Path(made))
