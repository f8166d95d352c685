"""The SuperLink with its lock: ``python -m fedflat.federation.superlink PROJECT``.

Two addresses, each with its own certificate (``server/superlink.toml``): *listen*, which the network sees, passes the
SuperNodes' interface alone; *control*, on this machine only, takes the operator's orders (with his token) and serves
the ServerApp. Messages are kept in memory alone; the registered SuperNodes are those of the app's roster.

Flower's own SuperExec starts whatever code came with a run. Here a process beside the SuperLink takes the ServerApp's
tasks, and runs the app in the project's own folder alone. Each task is a forked process; its token stays in memory, and
whatever it leaves behind is killed with its process group.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.federation import doors, lock, processes
from fedflat.federation.bounds import ReplyKeeper
from fedflat.federation.project import CONTROL_CERTIFICATE, PACKAGE, environment
from fedflat.federation.task import Roster, Task

log = logging.getLogger("fedflat.superlink")
NODE = re.compile(r"((?:node|supernode)(?:[ _]id)?s?[ =:'\"]*)\d+", re.IGNORECASE)
"""A SuperNode's number in a line of Flower's."""
SHUTDOWN = 3
"""Seconds that open connections have to end: SuperNodes come back by themselves, so little is lost."""
POLL, GRACE = 0.5, 3.0
"""Seconds between looks for work (a round takes many), and for tasks to end before they are killed: less than what
``local`` gives this process itself."""
KIND = "flwr-serverapp"
"""Flower's TaskType."""
LOOK = 0.05
"""Seconds between looks whether the control door is open, before the network's is."""


def serve(project: Path) -> int:
    """Run the SuperLink of a project until it is told to end.

    Raises:
        InputError: no project, a control address or a key open to others, no lock, or a port that is taken.
    """
    processes.check_flower()
    addresses, token_hash = lock.Addresses.read(project), lock.read_lock(project / "server" / lock.LOCK)
    task = Task.read(project / "app" / PACKAGE)
    processes.check_private(project / "certificates" / "server.key")
    for door, address in (("listen", addresses.listen), ("control", addresses.control)):
        processes.must_be_free(f"{project / lock.ADDRESSES_FILE}: {door}", *address)
    descriptors = processes.begin()
    os.environ.update(environment(project))
    for former in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(former, None)  # each would open a door of Flower's former protocol beside ours
    own = (project / CONTROL_CERTIFICATE).parent.absolute()
    runtime = Runtime.fresh(addresses.control, own)
    processes.start_companion(partial(take_tasks, runtime, (project / "app").absolute()))
    plain_log()
    plugin = lock.OperatorOnly(token_hash)
    app = _application(addresses, own, plugin, runtime.secret)
    state = app.state.linkstate_factory.state()
    keeper = ReplyKeeper(state, task.limits.reply)
    worker = doors.worker_or_task(runtime.secret, lambda: state)

    def allowed(path: str, headers: Mapping[str, str]) -> bool:
        if path.startswith(doors.CONTROL):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            return scheme.lower() == "bearer" and plugin.is_token(token.strip())
        return worker(path, headers)

    # All clients come at once when the SuperLink was started again; the operator's door keeps its share of descriptors.
    strangers = min(max(doors.STRANGERS, 2 * task.roster.clients), descriptors // 4)
    network, control = doors.Gate("listen", *addresses.listen, strangers), doors.Gate("control", *addresses.control)
    _register(state, task.roster)
    outside = doors.fleet_only(app, task.roster.numbers, task.limits.reply, network, keeper.blame)
    _run((doors.this_machine_only(app, allowed, control), control, own), (outside, network, project / "certificates"))
    return 0


class _Plain(logging.Formatter):
    """Lines in UTC that name no SuperNode: who takes part is nobody's to read."""

    converter = time.gmtime  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        return NODE.sub(r"\1…", super().format(record))


def plain_log() -> None:
    """Let Flower, its HTTP server and the doors write one kind of line, without what each SuperNode asks for."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Plain("%(asctime)sZ %(levelname)s %(message)s"))
    asked = ("[Fleet.", "ControlServicer.ListRuns")
    handler.addFilter(lambda record: record.levelno > logging.INFO or not str(record.msg).startswith(asked))
    for name in ("flwr", "uvicorn", "fedflat"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def _application(addresses: lock.Addresses, own: Path, plugin: lock.OperatorOnly, secret: bytes) -> Any:
    """Return Flower's SuperLink: registered SuperNodes only, state in memory, our worker, orders by token."""
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    host, port = addresses.control
    # Flower reads its settings from the command line alone.
    sys.argv = [
        "flower-superlink", "--host", host, "--port", str(port), "--ssl-ca-certfile", f"{own}/ca.crt",
        "--ssl-certfile", f"{own}/server.crt", "--ssl-keyfile", f"{own}/server.key",
        "--enable-supernode-auth", "--disable-runtime-dependency-installation", "--isolation", "process",
    ]  # fmt: skip
    config = _parse_superlink_lifespan_config()
    return create_app(replace(config, authn_plugin=plugin, superexec_auth_secret=secret), SuperLinkLifespan)


def _register(state: Any, roster: Roster) -> None:
    """Do what ``flwr supernode register`` does, for every key of the roster; nobody else gets in."""
    from flwr.common.constant import NOOP_FLWR_AID

    for key, client in roster.numbers.items():
        state.create_node(NOOP_FLWR_AID, "operator", key, heartbeat_interval=0, name=f"client-{client}")


def _run(control: tuple[Any, doors.Gate, Path], network: tuple[Any, doors.Gate, Path]) -> None:
    """Serve two applications, each at its gate with its certificates: the network's in a thread, control in the main
    one, which gets the signals."""
    import uvicorn

    # asyncio accepts a whole backlog at once, and closes only then what the gate turned away: uvicorn's 2,048 would
    # take every descriptor in one burst.
    def server(application: Any, gate: doors.Gate, certificates: Path, **more: Any) -> uvicorn.Server:
        return uvicorn.Server(
            uvicorn.Config(
                application, loop="asyncio", log_config=None, access_log=False, workers=1, ws="none",
                ssl_certfile=certificates / "server.crt", ssl_keyfile=str(certificates / "server.key"),
                timeout_graceful_shutdown=SHUTDOWN, callback_notify=gate.sweep, timeout_notify=1,
                backlog=doors.STRANGERS, **more,
            )
        )  # fmt: skip

    inside, outside = server(*control), server(*network, lifespan="off")

    def open_to_the_network() -> None:
        while not (inside.started or inside.should_exit):
            time.sleep(LOOK)
        try:
            outside.run(sockets=[network[1]])
        finally:
            inside.should_exit = True  # neither address without the other

    thread = threading.Thread(target=open_to_the_network)
    thread.start()
    for number in (signal.SIGTERM, signal.SIGINT):  # what uvicorn raises again after an orderly end
        signal.signal(number, lambda *_: None)
    try:
        inside.run(sockets=[control[1]])
    finally:
        outside.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Runtime:
    """A Runtime interface on this machine. secret: random, known to it and to its worker alone, never on disk."""

    address: str
    certificate: Path
    secret: bytes

    @classmethod
    def fresh(cls, address: tuple[str, int], folder: Path) -> Runtime:
        """Return one at an address, with a new certificate in ``folder``: an old one may be known to others."""
        shutil.rmtree(folder, ignore_errors=True)
        lock.write_authority_and_server(folder, [address[0]], keep=False)
        return cls(lock.address_text(address), folder / "ca.crt", secrets.token_bytes(32))

    def client(self, interceptor: Any, *, tries: int | None = None) -> Any:
        """Return Flower's client of it. tries: calls made where nobody listens; None: until somebody does."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        retries = make_simple_http_retry_invoker()
        retries.max_tries = tries if tries is not None else retries.max_tries
        return RuntimeHttpClient.from_server_address(
            server_address=self.address, insecure=False, root_certificates=self.certificate.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
            retry_invoker=retries,
        )  # fmt: skip

    def task_client(self, token: str) -> Any:
        """Return the same for one task."""
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        return self.client(RuntimeTokenHttpInterceptor(token))


def take_tasks(runtime: Runtime, app: Path) -> None:
    """Do the ServerApp's tasks as they come, for runs of the app in this folder; until this process is told to end."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

    import fedflat.federation.server
    import fedflat.simulation.run  # noqa: F401  # loaded once, before the forks

    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    proof = SuperExecAuthHttpInterceptor(master_secret=runtime.secret, protected_methods=methods)
    client = runtime.client(proof, tries=1)
    tasks: set[int] = set()
    try:
        while True:
            tasks -= {task for task in tasks if processes.gone(task)}
            with suppress(httpx.HTTPError):  # not up yet, or going down
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[KIND]))
                if found.token:
                    tasks.add(processes.task(KIND, partial(run_server, app, runtime, found.task, found.token)))
                    continue
            time.sleep(POLL)
    finally:
        processes.end(tasks, GRACE)


def run_server(app: Path, runtime: Runtime, task: Any, token: str) -> None:
    """Run the ServerApp of a run, if the run is of the app in this folder."""
    from queue import Queue

    from flwr.cli.build import build_fab_from_disk
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.logger import mirror_output_to_queue
    from flwr.superlink.runtime import run_serverapp

    if hashlib.sha256(build_fab_from_disk(app)).hexdigest() != task.fab_hash:
        log.error("refused: run %d is of another app than %s", task.run_id, app)
        refusal = PushTaskOutputRequest(sub_status="failed", details="This SuperLink runs its own app alone.")
        runtime.task_client(token).PushTaskOutput(refusal)
        return
    queue: Queue[str | None] = Queue()
    mirror_output_to_queue(queue)
    run_serverapp(
        runtime_api_address=runtime.address, log_queue=queue, token=token, insecure=False,
        certificates=runtime.certificate.read_bytes(), runtime_dependency_install=False,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run a SuperLink; exit status 2 with one line for one that would be open."""
    return processes.program("superlink PROJECT", arguments, lambda: serve(Path(arguments[0])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
