"""A client's SuperNode that runs nothing but fedflat: ``python -m fedflat.federation.supernode --app … --superlink …``.

Flower's SuperNode runs the code that comes with a run. Here it is started with ``--isolation process``: it fetches
messages only, and a process of the client's owner answers them with the installed fedflat (``worker``). What the two
say to each other on 127.0.0.1 goes through TLS with a certificate made at each start, and a secret kept in memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.core.checks import RunError, wrong
from fedflat.federation import processes
from fedflat.federation.bounds import limit_messages
from fedflat.federation.doors import this_machine_only, worker_or_task
from fedflat.federation.project import HERE, QUIET
from fedflat.federation.task import Task
from fedflat.federation.worker import Runtime, client_work, start_worker


def serve(given: argparse.Namespace) -> int:
    """Run the SuperNode until it is told to end.

    Raises:
        InputError: files that are missing or open to others, a taken port. RunError: the SuperLink lost the node.
    """
    app, key, authority = given.app.absolute(), given.auth_supernode_private_key.absolute(), given.root_certificates
    processes.check_flower()
    task = Task.read(app)
    if not authority.is_file():
        raise wrong("--root-certificates", str(authority), "the authority's certificate (ca.crt)")
    processes.check_private(key, "--auth-supernode-private-key ")
    processes.must_be_free("--port", HERE, given.port)
    processes.begin()
    limit_messages(task.limits.ask)
    os.environ.update(QUIET)
    own = key.parent / "port"
    runtime = Runtime.fresh((HERE, given.port), own)
    start_worker(runtime, "flwr-clientapp", partial(client_work, app))
    _be_the_supernode(given, key, own, runtime.secret)
    with suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)  # Flower came back from a lost connection, but its own port is still open
    raise RunError(f"{given.superlink} no longer knows this SuperNode (was it started again?); start this one again")


def _be_the_supernode(given: argparse.Namespace, key: Path, own: Path, secret: bytes) -> None:
    from flwr.supernode import main as served
    from flwr.supernode.cli import flower_supernode

    # Flower has no hook for its local port, so the function that makes its application is replaced by one with a door.
    create_app = served.create_app

    def guarded(state_factory: Any, superexec_auth_secret: Any) -> Any:
        allowed = worker_or_task(secret, state_factory.state)
        return this_machine_only(create_app(state_factory, superexec_auth_secret), allowed)

    served.create_app = guarded
    reader, writer = os.pipe()  # Flower wants a file
    os.write(writer, secret)
    os.close(writer)
    sys.argv = [
        "flower-supernode", "--superlink", given.superlink, "--root-certificates", str(given.root_certificates),
        "--auth-supernode-private-key", str(key), "--node-config", given.node_config,
        "--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{reader}",
        "--host", HERE, "--port", str(given.port), "--ssl-ca-certfile", f"{own}/ca.crt",
        "--ssl-certfile", f"{own}/server.crt", "--ssl-keyfile", f"{own}/server.key",
    ]  # fmt: skip
    flower_supernode()


def main(arguments: Sequence[str]) -> int:
    """Run a SuperNode; exit status 2 with one line for what is missing."""
    parser = processes.node_options("supernode", __doc__)
    parser.add_argument("--app", required=True, type=Path, help="the owner's copy of the app's package (fedflat_app)")
    parser.add_argument("--node-config", required=True, help="client=, data=, state= and so on (docs/deploy.md)")
    parser.add_argument("--port", type=int, default=9094, help="a free port of this machine, on 127.0.0.1 alone")
    given = parser.parse_args(arguments)
    return processes.status_of(lambda: serve(given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
