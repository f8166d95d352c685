"""Who runs the apps: a process that the SuperLink's or the client's owner started, and that runs fedflat alone.

Flower's own SuperExec starts whatever code came with a run. This one takes only tasks of one kind, and looks at what
came: the client's side never runs it (what runs is the installed fedflat, on the owner's copy of the app), the
server's side runs it only if it is the app in its own folder. Each task is a forked process; its token stays in
memory, and whatever the task leaves behind is killed with its process group.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import secrets
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError
from fedflat.federation.lock import address_text, write_authority_and_server
from fedflat.federation.processes import dies_with, end, end_with_an_exit, gone, named

log = logging.getLogger("fedflat.worker")

POLL, GRACE = 0.5, 3.0
"""Seconds between looks for work (a round takes many), and for tasks to end before they are killed: less than what
``local`` gives this process itself."""
Work = Callable[["Runtime", Any, str], None]


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
        try:
            write_authority_and_server(folder, [address[0]], keep=False)
        except OSError as error:
            raise InputError(f"{folder}: found {error.strerror}; allowed: a folder you may write to.") from error
        return cls(address_text(address), folder / "ca.crt", secrets.token_bytes(32))

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


def start_worker(runtime: Runtime, kind: str, made: Callable[[], Work]) -> None:
    """Fork the worker of this program, for tasks of one kind (Flower's TaskType). To be called before any thread is
    started. Each of the two ends with the other.

    made: gives the work. It loads what tasks need, in the worker, while this program starts.
    """

    # A fork and not a thread: what an app does to its process (signals, memory, a crash) stays there.
    def take_tasks() -> None:
        end_with_an_exit()
        _take_tasks(runtime, kind, made())

    child = _forked(take_tasks)
    threading.Thread(target=_end_after, args=(child,), daemon=True).start()


def _forked(work: Callable[[], object]) -> int:
    """Do some work in a forked process, which ends when this one does; return its number."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        dies_with(parent)
        work()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        log.exception("a forked process failed")
    finally:
        os._exit(status)


def _end_after(child: int) -> None:
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _take_tasks(runtime: Runtime, kind: str, work: Work) -> None:
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    proof = SuperExecAuthHttpInterceptor(master_secret=runtime.secret, protected_methods=methods)
    client = runtime.client(proof, tries=1)
    tasks: set[int] = set()
    try:
        while True:
            tasks -= {task for task in tasks if gone(task)}
            with suppress(httpx.HTTPError):  # not up yet, or going down
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
                if found.token:
                    tasks.add(_fork(runtime, found.task, found.token, work))
                    continue
            time.sleep(POLL)
    finally:
        end(tasks, GRACE)


def _fork(runtime: Runtime, task: Any, token: str, work: Work) -> int:
    """Do a task in a process of its own, the leader of a group of its own; return its number."""

    def do() -> None:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # a task has nothing to tidy up, and must not run the worker's end
        named(str(task.type))
        work(runtime, task, token)

    child = _forked(do)
    with suppress(OSError):
        os.setpgid(child, child)
    return child


def server_work(app: Path) -> Work:
    """Run the ServerApp of a run, if the run is of the app in this folder."""
    from flwr.superlink.runtime import run_serverapp

    import fedflat.federation.server
    import fedflat.simulation.run  # noqa: F401  # loaded once, before the forks

    def work(runtime: Runtime, task: Any, token: str) -> None:
        from queue import Queue

        from flwr.cli.build import build_fab_from_disk
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest
        from flwr.supercore.logger import mirror_output_to_queue

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

    return work


def client_work(app: Path) -> Work:
    """Answer a message with the installed fedflat and the owner's copy of the app; refuse runs of another app."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.common.serde import context_to_proto
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

    import fedflat.federation.client
    import fedflat.simulation.run  # noqa: F401  # loaded once, before the forks
    from fedflat.assembly.plans import algorithm_of, plan_of
    from fedflat.federation import client_app
    from fedflat.federation.task import Task

    task = Task.read(app)
    with suppress(InputError):  # said where a message is answered
        plan_of(task.recipe, algorithm_of(task.recipe), task.form.clients)  # seconds with correlated noise, but kept

    def work(runtime: Runtime, task: Any, token: str) -> None:
        client = runtime.task_client(token)
        HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
        message, context, _, fab = pull_task_input(client)
        if fault := difference(fab.content, app):
            log.error("refused: run %d is of another app than %s: %s", task.run_id, app, fault)
            error = Error(code=ErrorCode.INVALID_FAB, reason="This node answers for its own app alone.")
            reply = Message(error, reply_to=message)
        else:
            reply = client_app(app)(message, context)
        push_message(client, reply, context)
        done = PushTaskOutputRequest(context=context_to_proto(context), sub_status=SubStatus.COMPLETED, details="")
        client.PushTaskOutput(done)

    return work


def difference(bundle: bytes, app: Path) -> str:
    """Return where the package in a Flower app bundle (FAB) differs from the folder ``app``; nothing of it is run."""
    own = {f"{app.name}/{path.name}": path for path in app.iterdir() if path.is_file()}
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            came = {entry.filename: entry for entry in files.infolist() if "/" in entry.filename}
            # .info/ is Flower's list of files; what counts is the files, compared byte by byte and never unpacked.
            came = {name: entry for name, entry in came.items() if not name.startswith(".info/")}
            for name in sorted(own.keys() | came.keys()):
                if name not in own or name not in came:
                    return f"{name} is only {'here' if name in own else 'there'}"
                text = own[name].read_bytes()
                if came[name].file_size != len(text) or files.read(name) != text:
                    return f"{name} differs"
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"not readable ({type(error).__name__})"
    return ""
