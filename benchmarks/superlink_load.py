"""What Flower's SuperLink pays while a few hundred light clients answer: CPU, memory, database, time.

    python benchmarks/superlink_load.py [CLIENTS] [D]

Real: SuperLink (TLS, node authentication, database on disk), `flwr run`, ServerApp with desk, check, clip and ledger.
Light: the clients, threads of one process that speak Flower's Fleet API with a key of their own each, pull the whole
ask, and answer with one prepared vector. Everything shares this machine's cores, the clients included.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.config.recipe import Recipe
from fedflat.federation import wire
from fedflat.federation.local import Federation
from fedflat.federation.project import client_folder, write_project
from fedflat.federation.supernode import EACH_SECOND, PAUSE, mend_connection
from fedflat.records.folder import METRICS, read_lines

ROUNDS, IDLE = 2, 20.0
INPUTS, CLASSES = 64, 10


def recipe_of(clients: int, dimension: int) -> Recipe:
    """Digits, one example or so each, a model of about ``dimension`` parameters, everybody in every round."""
    hidden = max(1, dimension // (INPUTS + CLASSES + 1))
    return Recipe.of(
        {
            "name": "superlink-load",
            "rounds": ROUNDS,
            "data": {"dataset": "digits", "clients": clients, "partition": "iid", "max_test": 20},
            "model": {"name": "mlp", "hidden": hidden},
            "algorithm": {"name": "dp-fedavg"},
            "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
            "cohort": {"size": clients},
            "privacy": {"clip": 0.1, "noise_multiplier": 1.0},
        }
    )


def client(
    number: int, folder: Path, address: str, certificates: str, dimension: int, pause: float, done: threading.Event
) -> None:
    """One light SuperNode: asks for messages as Flower's does, and answers each with the same vector."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    private: Any = load_ssh_private_key((client_folder(folder, number) / "auth.key").read_bytes(), None)
    keys = (private, private.public_key())
    update = np.linspace(-1, 1, dimension, dtype=np.float32) * (1 + number)  # like ones would be stored once
    with suppress(Exception, SystemExit), http_request_response(address, False, certificates, keys) as connection:
        while not done.wait(pause):
            with suppress(Exception):
                while answered(connection, update):
                    pass


def answered(connection: Any, update: np.ndarray) -> bool:
    """Whether there was a message; it is pulled whole and answered."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    _, receive, send, _, _, pull_object, push_object, confirm = connection
    received = receive()
    if received is None:
        return False
    message, tree = received
    run, number = message.metadata.run_id, message.metadata.message_id
    wanted = list(_ids(tree))
    contents = pull_objects(wanted, pull_object_fn=lambda name: pull_object(run, name))
    confirm(run, number)
    asked: Any = inflate_object_from_contents(number, contents)
    facts = asked.content["facts"]
    reply = Message(wire.write_answer(wire.Answer(facts["round"], facts["nonce"], update)), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    nested, tree = get_all_nested_objects(reply), get_object_tree(reply)
    packed = {name: part.deflate() for name, part in nested.items()}
    missing, session = send(reply, tree, 0.1)
    for name in missing:
        push_object(run, session, name, packed[name])
    return True


def _ids(tree: Any) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in _ids(child))]


def crowd(clients: range, folder: Path, address: str, certificates: str, dimension: int, stop: Any) -> None:
    """Threads for many clients; ends when ``stop`` is set."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    done, pause = threading.Event(), mend_connection(address, len(clients))
    for number in clients:
        words = (number, folder, address, certificates, dimension, pause, done)
        threading.Thread(target=client, args=words, daemon=True).start()
    stop.wait()
    done.set()
    time.sleep(PAUSE + 1)
    os._exit(0)


def usage(process: int) -> tuple[float, float]:
    """CPU seconds and peak resident MiB of a process."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1024


def operator_lines() -> list[dict[str, Any]]:
    """What the operator's files say: refused replies by round, and excluded clients."""
    found = sorted((Path(os.environ["XDG_STATE_HOME"]) / "fedflat" / "operator").glob("*.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text(encoding="utf-8").splitlines()]


def lost(counts: Mapping[str, int]) -> int:
    """How many clients' answers a round did not add, of its counts of refusals."""
    return sum(count for kind, count in counts.items() if kind not in ("round", "duplicate", "unasked", "too late"))


def connected(folder: Path) -> int:
    """How many SuperNodes are online, as the SuperLink notes for its operator."""
    status = folder / "server" / "status.json"
    return int(json.loads(status.read_text())["SuperNodes online"].split()[0]) if status.exists() else 0


def measure(clients: int, dimension: int, place: Path) -> None:
    """Print what one SuperLink paid for a round."""
    folder = place / "fed"
    write_project(recipe_of(clients, dimension), folder, port=18443)
    federation = Federation(folder)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with federation:
        federation.start_superlink()
        real = dimension_of(federation)
        address, certificates = f"{federation.host}:{federation.port}", str(folder / "certificates" / "ca.crt")
        others = context.Process(target=crowd, args=(range(clients), folder, address, certificates, real, stop))
        others.start()
        link = federation.processes["superlink"].pid
        while connected(folder) < clients:
            time.sleep(1)
        time.sleep(5)
        before, start = usage(link), time.monotonic()
        time.sleep(IDLE)
        idle = usage(link)
        share = (idle[0] - before[0]) / (time.monotonic() - start)
        began = time.monotonic()
        run = federation.run(config=f"answer-seconds=300.0 wait-for-nodes={clients}")
        ends: list[float] = []

        def look() -> None:
            done = len(read_lines(folder / "run" / METRICS))
            ends.extend([time.monotonic() - began] * (done - len(ends)))

        status = federation.wait(run, 900, look)
        wall, paid = time.monotonic() - began, usage(link)
        stop.set()
        others.join(20)
    report(clients, real, share, idle, paid, [*ends, wall], status)


def dimension_of(federation: Federation) -> int:
    """d of the model that the recipe made."""
    from fedflat.assembly.jobs import prepare

    return prepare(federation.task.recipe, data=federation.task.form.federation()).parts.layout.dimension


def report(
    clients: int, dimension: int, share: float, idle: tuple[float, float], paid: tuple[float, float],
    ends: list[float], status: str,
) -> None:  # fmt: skip
    """One paragraph. ends: seconds since the start at which rounds ended, and the run."""
    asked, wall = clients * ROUNDS, ends[-1]
    load = f"load {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    print(f"{clients} clients, d = {dimension:,} ({dimension * 4 / 2**20:.2f} MiB an update): {status}; {load}")
    rounds = ", ".join(f"{after - before:.0f} s" for before, after in zip([0.0, *ends], ends[:-1], strict=False))
    print(f"rounds, the first with its start: {rounds}; run {wall:.0f} s")
    told = {line["round"]: clients - lost(line) for line in operator_lines() if "excluded" not in line}
    print(f"answers added: {', '.join(f'{told[round]} of {clients}' for round in sorted(told))}")
    pause = max(PAUSE, clients / EACH_SECOND)
    print(f"SuperLink, no run: {100 * share:.0f} % of a core for SuperNodes that look every {pause:g} s")
    work = paid[0] - idle[0]
    print(f"SuperLink: {work:.1f} s of CPU in the run, {1000 * (work - share * wall) / asked:.0f} ms for each answer")
    print(f"SuperLink: peak {paid[1]:.0f} MiB ({idle[1]:.0f} MiB before the run)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = f"{made}/state"
        given = [int(text) for text in sys.argv[1:]]
        measure(given[0] if given else 200, given[1] if len(given) > 1 else 100_000, Path(made))
