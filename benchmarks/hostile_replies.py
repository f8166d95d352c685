"""What one client of the roster can make a federation pay with what it uploads: memory, and the others' work.

    python -m benchmarks.hostile_replies [D [WORD]]

Real: SuperLink, ServerApp, the SuperNodes of three honest clients. The fourth client speaks Flower's Fleet API with its
own key and answers one question with each attack, in its own time: rounds go on meanwhile. For each attack: the most
memory of each program until the next one, whom the operator's file names, and how many answers each round kept of the
honest three. WORD: only the attacks in whose names it stands.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.superlink_load import dimension_of, lost, operator_lines, recipe_of
from fedflat.federation import wire
from fedflat.federation.local import Federation
from fedflat.federation.project import client_folder, write_project

CLIENTS, PORT = 4, 18543
CHUNK, ZEROS, NOISE, RECORDS = 5_242_880, 800, 300, 1_000_000
"""Bytes of a chunk; chunks of zeros (4 GB), of noise (1.5 GB), entries."""
LINES, SLOW = 64, 75
"""Connections of one client, and seconds that it keeps them."""
GAP = 3.0
"""Seconds after an attack in which memory is watched."""
ROUNDS, ANSWER, PATIENCE = 200, 40.0, 1800.0
"""Rounds that are there (each attack takes one or more); seconds for an answer, and for all of it."""


class Attacker:
    """A connected client of the roster that answers as it likes."""

    def __init__(self, connection: Any, folder: Path, address: str, key: Any) -> None:
        self.node, self.receive, self.send, *_, self.push, _ = connection
        self.tree: Any = None
        self.folder, self.key, self.address = folder, key, address

    def next(self) -> Any:
        """Wait for the next question; its objects stand in ``tree``."""
        while (received := self.receive()) is None:
            time.sleep(0.2)
        asked, self.tree = received
        return asked

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
        with suppress(OSError), self.connected() as line:
            line.sendall(self.head("push-object", NOISE * CHUNK))
            for _ in range(NOISE):
                line.sendall(os.urandom(CHUNK))

    def dribbled(self, asked: Any, dimension: int) -> None:
        """Signed requests as long as a reply's, of whose bodies a byte comes each second."""
        with ExitStack() as held:
            lines = [held.enter_context(self.connected()) for _ in range(LINES)]
            for line in lines:
                line.sendall(self.head("push-object", 4 * dimension // 2))
            for _ in range(SLOW):
                time.sleep(1)
                for line in lines:
                    with suppress(OSError):
                        line.sendall(b"x")

    def unread(self, asked: Any) -> None:
        """Signed requests for the round's model, whose answers nobody reads."""
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.proto.node_pb2 import Node

        wanted = list(_ids(self.tree))
        with ExitStack() as held:
            for place in range(LINES):
                line = held.enter_context(self.connected())
                name = wanted[place % len(wanted)]
                body = PullObjectRequest(node=Node(node_id=self.node), run_id=asked.metadata.run_id, object_id=name)
                content = body.SerializeToString()
                with suppress(OSError):
                    line.sendall(self.head("pull-object", len(content)) + content)
            time.sleep(SLOW)

    def connected(self) -> ssl.SSLSocket:
        """A connection to the SuperLink that takes little in advance."""
        host, port = self.address.rsplit(":", 1)
        bare = socket.socket()
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.connect((host, int(port)))
        context = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.crt"))
        return context.wrap_socket(bare, server_hostname=host)

    def head(self, what: str, length: int) -> bytes:
        """The head of a signed request, for a body of some length."""
        import httpx
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        headers = {"content-length": str(length), "content-type": "application/protobuf"}
        request = httpx.Request("POST", f"https://{self.address}/v1/fleet/{what}", headers=headers)
        asks: Any = type("Context", (), {"request": request})
        signer: Any = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        signer.intercept(asks, lambda sent: None)
        fields = [f"{name}: {value}" for name, value in request.headers.items()]
        return "\r\n".join([f"POST {request.url.path} HTTP/1.1", *fields, "", ""]).encode()

    def records(self, asked: Any, count: int) -> None:
        """A record of so many entries of a few bytes."""
        from flwr.app import ConfigRecord

        reply = self.reply(asked, np.zeros(8, dtype=np.float32))
        record = ConfigRecord({format(number, "x"): 0 for number in range(count)})
        packed = record.deflate()
        record.deflate = lambda: packed  # type: ignore[method-assign]  # Flower packs it 23 times: minutes
        reply.content["facts"] = record
        self.upload(asked, reply)

    def leaves(self, asked: Any) -> None:
        """A million objects, each declared by a name."""

        def many(tree: Any) -> None:
            for number in range(RECORDS):
                tree.children.add().object_id = f"{number:064x}"

        self.upload(asked, self.reply(asked, np.zeros(8, dtype=np.float32)), many)


def _ids(tree: Any) -> Iterator[str]:
    """The ids of objects that have no other in them, as chunks."""
    for child in tree.children:
        yield from _ids(child)
    if not tree.children:
        yield tree.object_id


def _once(tree: Any) -> None:
    """Let each object of a tree stand in it once."""
    kept = {child.object_id: child for child in tree.children}
    copies = [type(tree).FromString(child.SerializeToString()) for child in kept.values()]
    del tree.children[:]
    tree.children.extend(copies)
    for child in tree.children:
        _once(child)


ATTACKS: dict[str, Callable[[Attacker, Any, int], None]] = {
    "a reply of the agreed form, without the nonce": lambda a, asked, d: a.upload(
        asked, a.reply(asked, np.zeros(d, dtype=np.float32))
    ),
    "5 MB that unpack to 4 GB of zeros": lambda a, asked, d: a.zeros(asked, False),
    "the same, its tree says 5 MB": lambda a, asked, d: a.zeros(asked, True),
    "1.5 GB of noise, 300 objects": lambda a, asked, d: a.noise(asked),
    "1.5 GB of noise, one object": lambda a, asked, d: a.whole(asked),
    "10^6 entries": lambda a, asked, d: a.records(asked, RECORDS),
    "entries up to the length of a reply": lambda a, asked, d: a.records(asked, 4 * d // 14),
    "10^6 objects": lambda a, asked, d: a.leaves(asked),
    "half a reply on each of 64 lines, a byte a second": lambda a, asked, d: a.dribbled(asked, d),
    "the model on each of 64 lines, and nobody reads it": lambda a, asked, d: a.unread(asked),
}


def hostile(folder: Path, number: int, address: str, dimension: int, attacks: list[str], began: Any) -> None:
    """The fourth client; ``began`` gets the round in which each attack began, and is -1 for those to come."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.fleet_http_connection import http_request_response

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    key: Any = load_ssh_private_key((client_folder(folder, number) / "auth.key").read_bytes(), None)
    authority = str(folder / "certificates" / "ca.crt")
    with http_request_response(address, False, authority, (key, key.public_key()), 2) as connection:
        attacker = Attacker(connection, folder, address, key)
        for place in range(underway(began) + 1, len(attacks)):
            asked = attacker.next()
            began[place] = int(asked.metadata.group_id)
            with suppress(Exception):
                ATTACKS[attacks[place]](attacker, asked, dimension)
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


def underway(began: Any) -> int:
    """The attack that is on; -1 before the first."""
    return len([round for round in began if round >= 0]) - 1


def watch(pids: dict[str, int], began: Any, peaks: list[dict[str, float]], done: threading.Event) -> None:
    """Note the most memory of each program while each attack is on; a program's forked processes count with it."""
    while not done.wait(0.1):
        seen = resident()
        for pid, (parent, name, size) in seen.items():
            above = parent
            while above not in pids.values() and above in seen:
                above = seen[above][0]
            for program, top in pids.items():
                if top in (pid, above):
                    what = {"flwr-serverapp": "ServerApp"}.get(name, program)
                    peaks[underway(began)][what] = max(peaks[underway(began)].get(what, 0.0), size)


def measure(dimension: int, attacks: list[str], place: Path) -> None:
    """Run the attacks, one after the other, and print a line for each."""
    folder, honest = place / "fed", CLIENTS - 1
    recipe = recipe_of(CLIENTS, dimension).model_copy(update={"rounds": ROUNDS})
    write_project(recipe, folder, port=PORT)
    context = multiprocessing.get_context("spawn")
    began, done = context.Array("i", [-1] * len(attacks)), threading.Event()
    peaks: list[dict[str, float]] = [{} for _ in range(len(attacks) + 1)]  # the last: before the first attack
    with Federation(folder) as federation:
        federation.start(clients=range(honest))
        real, address = dimension_of(federation), f"{federation.host}:{federation.port}"
        names = {"SuperLink": "superlink", "SuperNode": "client-0"}
        pids = {name: federation.processes[program].pid for name, program in names.items()}
        words = (folder, honest, address, real, attacks, began)
        attacker = context.Process(target=hostile, args=words)
        attacker.start()
        threading.Thread(target=watch, args=(pids, began, peaks, done), daemon=True).start()
        run = federation.run(config=f"wait-for-nodes={CLIENTS} answer-seconds={ANSWER} exclusion-limit=99")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not federation.status(run).startswith("finished"):
            federation.check_alive()
            if not attacker.is_alive() and underway(began) + 1 == len(attacks):
                break
            if not attacker.is_alive():  # Flower ends a client that is refused
                attacker = context.Process(target=hostile, args=words)
                attacker.start()
            time.sleep(0.5)
        done.set()
        attacker.terminate()
        status = federation.status(run)
        report(folder, real, peaks, dict(zip(attacks, began[:])), status)


def report(folder: Path, dimension: int, peaks: list[dict[str, float]], began: dict[str, int], status: str) -> None:
    """One line an attack, and what honest clients' logs say went wrong."""
    named = {line["round"]: line["excluded"] for line in operator_lines() if "excluded" in line}
    counts = {line["round"]: line for line in operator_lines() if "excluded" not in line}
    print(f"d = {dimension:,}; {status}, {len(counts)} rounds; load {os.getloadavg()[0]:.1f}")
    ends = [*[*began.values()][1:], max(counts, default=0) + 1]
    for (name, first), sizes, end in zip(began.items(), peaks, ends):
        if first < 0:
            print(f"{name}: not reached")
            continue
        shown = ", ".join(f"{program} {size:.0f}" for program, size in sorted(sizes.items()))
        rounds = [round for round in range(first, max(end, first + 1)) if round in counts]
        kept = [CLIENTS - lost(counts[round]) for round in rounds]
        who = {round: named[round] for round in rounds if round in named}
        print(f"{name}: MiB {shown}; answers kept by rounds {first} to {rounds[-1:]}: {kept}; named {who or 'nobody'}")
    for path in sorted((folder / "logs").glob("client-*.log")):
        said = [line for line in path.read_text(errors="replace").splitlines() if "ERROR" in line]
        print(f"{path.stem}: {len(said)} errors {said[:3]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = f"{made}/state"
        given = dict(enumerate(sys.argv))
        word = given.get(2, "")
        measure(int(given.get(1, 1_000_000)), [name for name in ATTACKS if word in name], Path(made))
