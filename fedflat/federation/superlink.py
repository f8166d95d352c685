"""The SuperLink with its lock: ``python -m fedflat.federation.superlink PROJECT``.

Two addresses, each with its own certificate (``server/superlink.toml``): *listen*, which the network sees, passes the
SuperNodes' interface alone; *control*, on this machine only, takes the operator's orders (with his token) and serves
the ServerApp. Messages are kept in memory alone; the registered SuperNodes are those of the app's roster.

Flower's own SuperExec starts whatever code came with a run. Here a process beside the SuperLink takes the ServerApp's
tasks, and runs the app in the project's own folder alone. Each task is a forked process; its token stays in memory, and
whatever it leaves behind is killed with its process group.
"""

import hashlib
import json
import logging
import os
import re
import resource
import secrets
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedflat.core import InputError, RunError, durable, free_memory, how_it_ended
from fedflat.federation import doors, lock, processes
from fedflat.federation.bounds import ReplyKeeper
from fedflat.federation.project import CONTROL_CERTIFICATE, PACKAGE, REASON, STATUS, environment, words_of
from fedflat.federation.task import Roster, Task

log = logging.getLogger("fedflat.superlink")
NODE = re.compile(r"((?:node|supernode)(?:[ _]id)?s?[ =:'\"]*)\d+", re.IGNORECASE)
"""A SuperNode's number in a line of Flower's."""
SHUTDOWN = 3
"""Seconds that open connections have to end: SuperNodes come back by themselves, so little is lost."""
POLL, GRACE = 0.5, 3.0
"""Seconds between looks for work (a round takes many), and for tasks to end before they are killed: less than what
``local`` gives this process itself."""
STATUS_SECONDS = 10.0
"""Seconds between two versions of the operator's status."""
SIGNALLED = ("Task failed with unknown error.", "the ServerApp was told to end by a signal; start it again to go on")
"""What Flower says where a ServerApp ended by neither success nor an exception, and what that is."""
KIND = "flwr-serverapp"
"""Flower's TaskType."""


def serve(project: Path) -> None:
    """Run the SuperLink of a project until it is told to end.

    Raises:
        InputError: no project, a control address or a key open to others, no lock, or a port that is taken.
    """
    processes.check_flower()
    addresses, token_hash = lock.Addresses.read(project), lock.read_lock(project / "server" / lock.LOCK)
    task = Task.read(project / "app" / PACKAGE)
    processes.check_pair(project / "certificates")
    for door, address in (("listen", addresses.listen), ("control", addresses.control)):
        processes.must_be_free(f"{project / lock.ADDRESSES_FILE}: {door}", *address)
    descriptors = processes.begin()
    os.environ.update(environment(project))
    for former in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(former, None)  # each would open a door of Flower's former protocol beside ours
    certs = (project / CONTROL_CERTIFICATE).parent.absolute()
    # The control door's certificate is made anew: the one on disk may be known to whoever had this folder before.
    shutil.rmtree(certs, ignore_errors=True)
    lock.write_authority_and_server(certs, [addresses.control[0]], keep=False)
    ours, workers = Pipe()
    processes.start_companion(partial(_run_tasks, workers, lock.address_text(addresses.control), certs / "ca.crt"))
    plain_log()
    plugin = lock.OperatorOnly(token_hash)
    app = _application(addresses, certs, plugin)
    state = app.state.linkstate_factory.state()
    keeper = ReplyKeeper(state, task.limits.reply)
    threading.Thread(target=_hand_out, args=(state, (project / "app").absolute(), ours), daemon=True).start()

    def allowed(path: str, headers: Mapping[str, str]) -> bool:
        if path.startswith(doors.CONTROL):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            return scheme.lower() == "bearer" and plugin.is_token(token.strip())
        return state.get_task_by_token(headers.get("flwr-task-token", "")) is not None

    # All clients come at once when the SuperLink was started again; the operator's door keeps its share of descriptors.
    strangers = min(max(doors.STRANGERS, 2 * task.form.clients), descriptors // 4)
    network, control = doors.Gate("listen", *addresses.listen, strangers), doors.Gate("control", *addresses.control)
    _register(state, task.roster)
    outside = doors.fleet_only(app, task.roster.numbers, task.limits.reply, network, keeper.blame)
    _run((doors.this_machine_only(app, allowed, control), control, certs), (outside, network, project / "certificates"))


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
    handler.addFilter(lambda record: record.levelno > logging.INFO or not str(record.msg).startswith("[Fleet."))
    for name in ("flwr", "uvicorn", "fedflat"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def _application(addresses: lock.Addresses, certs: Path, plugin: lock.OperatorOnly) -> Any:
    """Return Flower's SuperLink: registered SuperNodes only, state in memory, orders by token, and no SuperExec."""
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    host, port = addresses.control
    # Flower reads its settings from the command line alone.
    sys.argv = words_of("superlink.txt", {"host": host, "port": port, "certs": certs})
    # A secret that nobody is told: tasks go to our worker, through a pipe.
    changes = {"authn_plugin": plugin, "superexec_auth_secret": secrets.token_bytes(32)}
    return create_app(replace(_parse_superlink_lifespan_config(), **changes), SuperLinkLifespan)


def _register(state: Any, roster: Roster) -> None:
    """Do what ``flwr supernode register`` does, for every key of the roster; nobody else gets in."""
    from flwr.common.constant import NOOP_FLWR_AID

    for key, client in roster.numbers.items():
        state.create_node(NOOP_FLWR_AID, "operator", key, heartbeat_interval=0, name=f"client-{client}")


def _run(control: tuple[Any, doors.Gate, Path], network: tuple[Any, doors.Gate, Path]) -> None:
    """Serve two applications, each at its gate with its certificates: the network's in a thread, control in the main
    one, which gets the signals."""
    import uvicorn

    def server(application: Any, gate: doors.Gate, certificates: Path, **more: Any) -> uvicorn.Server:
        pair = (certificates / "server.crt", certificates / "server.key")
        loaded = [file.stat().st_mtime_ns for file in pair]

        async def look() -> None:
            """Close late strangers; take a renewed certificate, for the connections to come."""
            await gate.sweep()
            try:
                if (now := [file.stat().st_mtime_ns for file in pair]) != loaded:
                    # A context that is given a certificate without its key serves nobody: both are tried apart first.
                    for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):
                        context.load_cert_chain(*pair)  # type: ignore[union-attr]
                    loaded[:] = now
                    log.info("%s: the certificate was renewed", gate.name)
            except OSError as error:  # which an SSLError is
                gate.say("certificate", f"a changed certificate is not taken ({error}); the one before is used")

        # asyncio accepts a whole backlog at once, and closes only then what the gate turned away: uvicorn's 2,048 would
        # take every descriptor in one burst.
        config = uvicorn.Config(
            application, loop="asyncio", log_config=None, access_log=False, workers=1, ws="none",
            ssl_certfile=pair[0], ssl_keyfile=str(pair[1]), timeout_graceful_shutdown=SHUTDOWN, callback_notify=look,
            timeout_notify=1, backlog=doors.STRANGERS, **more,
        )  # fmt: skip
        return uvicorn.Server(config)

    inside, outside = server(*control), server(*network, lifespan="off")

    def open_to_the_network() -> None:
        while not (inside.started or inside.should_exit):
            time.sleep(processes.LOOK)
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


def _hand_out(state: Any, app: Path, worker: Connection) -> None:
    """Give the worker the token of each task of a ServerApp, if its run is of the app in this folder."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.constant import Status

    noted: dict[str, str] = {}
    due = 0.0
    while True:
        for task in state.get_tasks(statuses=[Status.PENDING], order_by="pending_at"):
            token = state.claim_task(task.task_id) if task.type == KIND else None
            if token and hashlib.sha256(build_fab_from_disk(app)).hexdigest() == task.fab_hash:
                worker.send(token)
            elif token:
                log.error("refused: run %d is of another app than %s", task.run_id, app)
                state.finish_task(task.task_id, sub_status="failed", details="This SuperLink runs its own app alone.")
        while worker.poll():  # one that was killed could not say so itself
            token, how = worker.recv()
            if (ended := state.get_task_by_token(token)) is not None:
                state.finish_task(ended.task_id, sub_status="failed", details=f"the ServerApp has ended: {how}")
        if (now := status_of(state)) != noted or time.monotonic() >= due:
            noted, due = now, time.monotonic() + STATUS_SECONDS
            _write_status(app.parent / "server" / STATUS, now)
        time.sleep(POLL)


def status_of(state: Any) -> dict[str, str]:
    """Return how many SuperNodes are online, how each run stands, as ``finished:completed``, and why one failed."""
    online, registered = (len(state.get_node_info(statuses=statuses)) for statuses in (["online"], None))
    runs = {f"run {run.run_id}": run.status for run in state.get_run_info()}
    states = {name: ":".join(filter(None, (status.status, status.sub_status))) for name, status in runs.items()}
    details = {name: " ".join(status.details.split()).replace(*SIGNALLED) for name, status in runs.items()}
    reasons = {name + REASON: words for name, words in details.items() if words}
    return {"SuperNodes online": f"{online} of {registered}", **states, **reasons}


def _write_status(path: Path, status: dict[str, str]) -> None:
    """Write how the SuperLink does into a file for its operator, which ``fedflat watch --private`` shows."""
    memory = {
        "SuperLink's memory, the most so far": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "free memory of this machine": (free_memory() or 0.0) / (1 << 20),
    }
    with suppress(OSError):  # a full disk stops the run, and says so there
        text = json.dumps(status | {name: f"{size:.0f} MiB" for name, size in memory.items()})
        durable.replace(path, f"{text}\n")


def _run_tasks(superlink: Connection, address: str, certificate: Path) -> None:
    """Run a ServerApp for each token that the SuperLink gives, in a process of its own; send back how it ended."""
    import fedflat.federation.server  # noqa: F401  # loaded once, before the forks

    tasks: dict[int, str] = {}
    try:
        while True:
            for task in list(tasks):
                if (status := processes.ended(task)) is not None:
                    superlink.send((tasks.pop(task), how_it_ended(status)))
            if superlink.poll(POLL):
                token = superlink.recv()
                tasks[processes.task(KIND, partial(_run_server, address, certificate, token))] = token
    finally:
        processes.end(tasks, GRACE)


def _run_server(address: str, certificate: Path, token: str) -> None:
    from queue import Queue

    from flwr.supercore.logger import mirror_output_to_queue
    from flwr.superlink.runtime import run_serverapp

    logging.getLogger("flwr").addFilter(_in_a_line)
    queue: Queue[str | None] = Queue()
    mirror_output_to_queue(queue)
    run_serverapp(
        runtime_api_address=address, log_queue=queue, token=token, insecure=False,
        certificates=certificate.read_bytes(), runtime_dependency_install=False,
    )  # fmt: skip


def _in_a_line(record: logging.LogRecord) -> bool:
    """Let what fedflat itself says of a fault stand in Flower's log without a traceback."""
    if record.exc_info and isinstance(record.exc_info[1], (InputError, RunError, OSError)):
        record.msg, record.args, record.exc_info = "error: %s", (record.exc_info[1],), None
    return True


@processes.program("superlink PROJECT")
def main(project: str) -> None:
    """Run a SuperLink; exit status 2 with one line for one that would be open."""
    serve(Path(project))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
