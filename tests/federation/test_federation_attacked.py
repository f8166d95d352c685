"""A real federation under attack: idle connections, bodies of strangers, a reply that unpacks to hundreds of times what
it weighs. The run goes on with the honest client, the operator's orders are taken, and the culprit is named."""

import json
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fork_server import CONTEXT
from forked import Forked, programs
from ports import free_port
from stand_in import be_a_task, small
from test_federation_bounds import repeated
from test_federation_processes import PATIENCE, logs, own_tmpdir  # noqa: F401

from benchmarks.superlink_load import usage
from fedflat.federation.doors import STRANGERS
from fedflat.federation.lock import Addresses
from fedflat.federation.project import client_folder, write_project

TIMES = 400
"""Chunks of a MiB that the hostile reply unpacks to."""


def hostile(folder: Path, number: int, address: str, connected: Any, done: Any) -> None:
    """A client of the roster that answers every question with one chunk of zeros, many times.

    In a process of its own: one that is refused, Flower ends (``os._exit``, or SIGINT after a 401).
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    be_a_task()
    key: Any = load_ssh_private_key((client_folder(folder, number) / "auth.key").read_bytes(), None)
    authority = str(folder / "certificates" / "ca.crt")
    with suppress(Exception), http_request_response(address, False, authority, (key, key.public_key())) as connection:
        _, receive, send, _, _, _, push, _ = connection
        connected.set()
        while not done.wait(0.2):
            with suppress(Exception):
                if (received := receive()) is None:
                    continue
                message, _ = received
                tree, contents = repeated(message, TIMES)
                from flwr.app import Message, RecordDict

                bare = Message(RecordDict(), reply_to=message)
                bare.metadata.__dict__["_message_id"] = tree.object_id
                wanted, session = send(bare, tree, 0.1)
                for name in wanted:
                    push(message.metadata.run_id, session, name, contents[name])


def idle(port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    found = []
    for _ in range(count):
        with suppress(OSError):
            found.append(socket.create_connection(("127.0.0.1", port), timeout=5))
    return found


def flood(port: int, path: str, mebibytes: int) -> int:
    """Send a large body without a credential; how many MiB were taken before the door closed."""
    lax = ssl._create_unverified_context()
    taken = 0
    with suppress(OSError), lax.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=5)) as held:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
        held.sendall(f"{head}Content-Length: {mebibytes << 20}\r\n\r\n".encode())
        while taken < mebibytes:
            held.sendall(bytes(1 << 20))
            taken += 1
    return taken


@pytest.mark.long
@pytest.mark.slow
def test_an_attacked_federation_stays_up(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    recipe = small(data={"clients": 2}, cohort={"size": 2}, rounds=5, privacy={"noise_multiplier": 0.5})
    write_project(recipe, folder, port=free_port())
    connected, done = CONTEXT.Event(), CONTEXT.Event()
    with Forked(folder, PATIENCE) as federation:
        federation.start(clients=[0])
        addresses = Addresses.read(folder)
        link = federation.processes["superlink"].pid
        before = usage(link)[1]
        words = (folder, 1, f"127.0.0.1:{addresses.listen[1]}", connected, done)
        attacker = CONTEXT.Process(target=hostile, args=words)
        attacker.start()
        assert connected.wait(60)  # one that the crowd kept out would answer nothing
        status_file = folder / "server" / "status.json"
        while not status_file.exists() or '"2 of 2"' not in status_file.read_text():
            federation.check_alive()
            time.sleep(0.2)
        held = idle(addresses.listen[1], STRANGERS + 100) + idle(addresses.control[1], STRANGERS + 100)
        run = federation.run(config="wait-for-nodes=2 answer-seconds=60.0")  # the operator's door is open
        peak = 0.0
        for path in ("control/start-run", "control/get-login-details", "runtime/push-object", "fleet/push-object"):
            assert flood(addresses.control[1], f"/v1/{path}", 200) < 100
        status = ""
        while not status.startswith("finished"):
            status = federation.status(run)
            for process in programs("flwr-serverapp", link):
                with suppress(OSError, StopIteration):
                    peak = max(peak, usage(process)[1])
            time.sleep(0.3)
        assert status == "finished:completed", logs(federation)
        grown = usage(link)[1] - before
        done.set()
        attacker.join()
        for one in held:
            one.close()
        said = (federation.logs / "superlink.log").read_text()
        assert grown < 300 and 0 < peak - before < 300, (grown, peak, before)
        assert said.count("connections have shown no credential") <= 4 and "connections have shown" in said
        names = next((tmp_path / "state-home" / "fedflat" / "operator").glob("*.excluded.jsonl")).read_text()
        rows = [json.loads(line) for line in names.splitlines()]
        assert rows == [{"round": round, "excluded": {"1": "size"}} for round in range(3)]  # then it is asked no more
        public = "".join(path.read_text(errors="replace") for path in (folder / "run").rglob("*.json*"))
        assert "excluded" not in public and (folder / "run" / "privacy.json").exists()
        assert not any(word in said for word in ("\x1b[", "push-messages", "[Fleet.", "ListRuns"))
