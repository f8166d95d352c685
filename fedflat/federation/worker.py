"""Who runs the ServerApp: a process beside the SuperLink that runs the app in the project's own folder alone.

Flower's own SuperExec starts whatever code came with a run. This one takes only the ServerApp's tasks, and looks at
what came. Each task is a forked process; its token stays in memory, and whatever the task leaves behind is killed with
its process group.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError
from fedflat.federation import processes
from fedflat.federation.lock import address_text, write_authority_and_server

log = logging.getLogger("fedflat.worker")

POLL, GRACE = 0.5, 3.0
"""Seconds between looks for work (a round takes many), and for tasks to end before they are killed: less than what
``local`` gives this process itself."""
KIND = "flwr-serverapp"
"""Flower's TaskType."""


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
