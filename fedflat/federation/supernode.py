"""A client's SuperNode that runs nothing but fedflat: ``python -m fedflat.federation.supernode --app … --superlink …``.

Flower's SuperNode runs the code that comes with a run, and serves what its processes need on a port. This one is a
client of the SuperLink and listens nowhere: it fetches a message, within the app's limits, and a process forked for it
answers with the installed fedflat, on the owner's copy of the app.
"""

import argparse
import io
import logging
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedflat.assembly.plans import plan_of
from fedflat.config.method import algorithm_of
from fedflat.core import RunError, how_it_ended, turning, using_threads, wrong
from fedflat.federation import processes
from fedflat.federation.bounds import Limit, limit_answers, pulled, unpacked
from fedflat.federation.client import client_of, reply_to
from fedflat.federation.events import log_to_stderr
from fedflat.federation.secagg.client import signing_key
from fedflat.federation.store import Store
from fedflat.federation.task import Task
from fedflat.federation.wire import Malformed

log = logging.getLogger("fedflat.supernode")

PAUSE, EACH_SECOND = 3.0, 25.0
"""Seconds between looks for a message, as Flower's own; looks, and signs of life, that all clients together may send in
a second: each costs the SuperLink 7 ms, and those of hundreds would leave it no time for a round."""
UPLOAD, AGAIN = 60.0, 0.5
"""Seconds that a message's objects may be on their way to the SuperLink, and between looks for one of them."""
WHY = {
    (401, False): "the SuperLink no longer knows this SuperNode (was it started again?); start this one again",
    (401, True): "this client's key is not in the SuperLink's roster, or a clock is wrong; ask the operator",
    (412, True): "another SuperNode has this client's key, or was killed less than a minute ago; end it, or wait",
}
"""What a SuperNode ends with, by the status it is answered with and whether it was about to begin."""
CUT = ("EOF occurred", "timed out", "reset by peer")
"""Words of Python's ssl module for a handshake that another attempt may finish."""


def serve(args: argparse.Namespace) -> None:
    """Run the SuperNode until it is told to end.

    Raises:
        InputError: files missing or open to others; config or data that do not fit the task; another SuperNode runs.
        RunError: the SuperLink lost the node.
    """
    app, key, authority = args.app.absolute(), args.auth_supernode_private_key.absolute(), args.root_certificates
    processes.check_flower()
    task = Task.read(app)
    processes.check_authority(authority)
    processes.check_private(key, "--auth-supernode-private-key ")
    private = signing_key(key)
    processes.begin()
    from flwr.common.config import parse_config_args

    # What Flower raises here is click's.
    with turning(Exception, wrong("--node-config", args.node_config, 'keys as in client=0 data="FILE"')):
        config = parse_config_args([args.node_config])
    log_to_stderr(str(config.get("log", "text")))
    client = client_of(task, config)  # said now, and not when a round asks first
    with using_threads(1):  # threads that had worked here would be missing in the processes forked below
        client.examples()
        # Takes seconds with correlated noise: made here, it is there for every message.
        plan_of(task.recipe, algorithm_of(task.recipe), task.form.clients)
    ours, workers = Pipe()
    processes.start_companion(partial(_answer_messages, workers, app, config))
    workers.close()
    processes.end_with_an_exit(0)
    from flwr.supernode.fleet_http_connection import http_request_response

    limit_answers(task.limits.ask)
    pause, answers = mend_connection(args.superlink, task.form.clients), len(client.store.answered())
    keys, at = (private, private.public_key()), (args.superlink, False, str(authority))
    with taking_over(client.store, at, keys), http_request_response(*at, keys) as connection:
        log.info("connected to %s, %d answers so far", args.superlink, answers)
        lost = _take_messages(connection, task.limits.ask, app, ours, pause)
    # Not in the block above: Flower would log what is raised there, and go on after it.
    raise RunError(f"{args.superlink}: {' '.join(str(lost).split())}")


@contextmanager
def taking_over(store: Store, at: tuple[str, bool, str], keys: tuple[Any, Any]) -> Iterator[None]:
    """Sign off the last SuperNode of this client, and let no other start in the block.

    One that was killed could not sign off, and Flower refuses the next under its key for up to a minute.
    """
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    with store.node_lock():
        with store.answer_lock():
            store.end_session()  # of a secure aggregation that went on without this client
        if (node := store.node()) is not None:
            signer = NodeAuthHttpInterceptor(*keys)
            # Where it does not answer, or knows the node no more, there is nothing to sign off.
            with suppress(httpx.HTTPError), FleetHttpClient.from_server_address(*at, interceptors=[signer]) as client:
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        yield


def mend_connection(superlink: str, clients: int) -> float:
    """Change how Flower connects a SuperNode that is one of so many; return the seconds between its looks.

    It asks again after a TLS handshake that was cut or took too long, as under a flood: Flower gives up on each fault
    whose words have "ssl" in them. One that is refused, or gets no connection, ends with a sentence: Flower says
    nothing, or a page. And one of many gives signs of life seldom.
    """
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection as connection
    from httpx import TransportError

    make_invoker = connection.make_simple_http_retry_invoker

    def patient() -> Any:
        invoker = make_invoker()
        gives_up = invoker.should_giveup

        def is_final(error: Exception) -> bool:
            cut = isinstance(error, TransportError) and any(words in str(error) for words in CUT)
            return not cut and (gives_up is None or gives_up(error))

        invoker.should_giveup = is_final
        return invoker

    class Signer(connection.NodeAuthHttpInterceptor):  # type: ignore[misc]
        def intercept(self, context: Any, call_next: Any) -> Any:
            answer = super().intercept(context, call_next)
            if why := WHY.get((answer.status_code, "ActivateNode" in context.rpc_method)):
                raise RunError(why)
            return answer

    def give_up(_: object, message: str) -> None:
        raise RunError(f"{superlink}: {' '.join(message.replace('.', ':', 1).split())}") from None

    connection.make_simple_http_retry_invoker = patient
    connection.NodeAuthHttpInterceptor, connection.flwr_exit = Signer, give_up
    interval = max(connection.HEARTBEAT_DEFAULT_INTERVAL, int(clients / EACH_SECOND))
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = connection.HEARTBEAT_DEFAULT_INTERVAL = interval
    return max(PAUSE, clients / EACH_SECOND)


def _take_messages(connection: Any, limit: Limit, app: Path, worker: Connection, pause: float) -> Exception:
    """Have every message answered that comes for this client; return what ended that. pause: seconds between looks."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.supercore.run import RunNotRunningException

    _, receive, send, get_run, get_fab, pull, push, confirm = connection

    difference_of = lru_cache(maxsize=16)(lambda run: difference(get_fab(get_run(run).fab_hash, run).content, app))

    def answer_to(message: Any, tree: Any) -> Any:
        run, number = message.metadata.run_id, message.metadata.message_id
        if fault := difference_of(run):
            log.error("refused: run %d is of another app than %s: %s", run, app, fault)
            error = Error(ErrorCode.INVALID_FAB, "This node answers for its own app alone.")
            return parts_of(Message(error, reply_to=message))
        contents = pulled(limit, tree, partial(when_there, pull, run))
        confirm(run, number)
        worker.send((number, contents))
        answer = worker.recv()
        if isinstance(answer, int):  # said at once: the server would wait for it as long as a round may take
            log.error("a message has no answer, for its process has ended: %s", how_it_ended(answer))
            return parts_of(Message(Error(ErrorCode.CLIENT_APP_CRASHED, "No answer."), reply_to=message))
        worker.recv()  # that its process has ended
        return answer

    while True:
        received = None
        try:
            received = receive()
            if received is None:
                time.sleep(pause)
                continue
            since, run = time.monotonic(), received[0].metadata.run_id
            reply, tree, objects = answer_to(*received)
            wanted, session = send(reply, tree, time.monotonic() - since)
            for name in wanted:
                push(run, session, name, objects[name])
        except RunNotRunningException:
            log.info("a message of a run that has ended is not answered")
        except Malformed as refused:
            log.error("refused: a message of another size or form than was agreed (%s)", refused)
        except Exception as error:  # whatever the SuperLink, or the way to it, does with one message
            # Without a node of this key at the SuperLink, no later message comes either.
            if received is None or isinstance(error, RunError):
                return error
            log.error("a message has no answer: %s: %s", type(error).__name__, error)


def when_there(pull: Callable[[int, str], bytes], run: int, name: str) -> bytes:
    """Pull an object of a message, which Flower gives out, once, while its objects may still be on their way."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    until = time.monotonic() + UPLOAD
    while True:
        try:
            return pull(run, name)
        except ObjectUnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN)


def parts_of(reply: Any) -> tuple[Any, Any, dict[str, bytes]]:
    """Return a reply as it is sent: without its content, the tree of its objects, and these by their ids."""
    from flwr.app.message.message import remove_content_from_message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    return remove_content_from_message(reply) if reply.has_content() else reply, get_object_tree(reply), objects


def _answer_messages(connection: Connection, app: Path, config: Any) -> None:
    """Answer messages, each in a forked process of its own; send how it ended, with or without an answer before."""
    import fedflat.assembly.jobs  # noqa: F401  # loaded once, before the forks

    def answer(number: str, contents: dict[str, bytes]) -> None:
        connection.send(parts_of(reply_to(unpacked(number, contents), config, app)))

    with suppress(EOFError):
        while True:
            child = processes.task("flwr-clientapp", partial(answer, *connection.recv()))
            while (status := processes.ended(child)) is None:
                time.sleep(processes.LOOK)
            connection.send(status)


def difference(bundle: bytes, app: Path) -> str:
    """Return where the package in a Flower app bundle (FAB) differs from the folder ``app``; nothing of it is run."""
    here = {f"{app.name}/{path.name}": path for path in app.iterdir() if path.is_file()}
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            there = {entry.filename: entry for entry in files.infolist() if "/" in entry.filename}
            # .info/ is Flower's list of files; what counts is the files, compared byte by byte and never unpacked.
            there = {name: entry for name, entry in there.items() if not name.startswith(".info/")}
            for name in sorted(here.keys() | there.keys()):
                if name not in here or name not in there:
                    return f"{name} is only {'here' if name in here else 'there'}"
                text = here[name].read_bytes()
                if there[name].file_size != len(text) or files.read(name) != text:
                    return f"{name} differs"
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"not readable ({type(error).__name__})"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run a SuperNode; exit status 2 with one line for what is missing."""
    parser = argparse.ArgumentParser("python -m fedflat.federation.supernode", description=__doc__.partition("\n")[0])
    parser.add_argument("--superlink", required=True, help="host:port")
    parser.add_argument("--root-certificates", required=True, type=Path, help="the authority's certificate")
    parser.add_argument("--auth-supernode-private-key", required=True, type=Path, help="the client's auth.key")
    parser.add_argument("--app", required=True, type=Path, help="the owner's copy of the app's package (fedflat_app)")
    parser.add_argument("--node-config", required=True, help="client=, data=, state= and so on (docs/deploy.md)")
    return processes.status_of(partial(serve, parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
