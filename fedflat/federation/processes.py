"""A federation's programs as processes (private files, orderly ends, nothing left behind), and which Flower they need.

Flower's own parts are used here, and they change from one minor version to the next: ``check_flower`` refuses others.
"""

import ctypes
import errno
import logging
import os
import random
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path

from fedflat.core import how_it_ended, missing, waiting
from fedflat.core.checks import InputError, RunError, becoming, owners_only, require, turning, wrong

log = logging.getLogger("fedflat.processes")
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""No telemetry, no look for updates."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
"""Linux's numbers, of prctl.h."""
LOOK = 0.02
"""Seconds between looks at children that were asked to end: nobody notices them, and they cost nothing."""
_LIBC = ctypes.CDLL(None)
"""Loaded here and not between fork and exec."""


def status_of(work: Callable[[], object]) -> int:
    """Return the exit status of ``work()``: with one line, 2 for bad input and 1 for a fault of the surroundings."""
    try:
        work()
        return 0
    except (InputError, RunError, OSError) as error:  # the last: a record that nobody may read, a full disk
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def program(usage: str) -> Callable[[Callable[..., object]], Callable[[Sequence[str]], int]]:
    """Make a program of the federation from what works on its words.

    The program takes a list of words and returns the exit status: 2 with its usage for another number of words. usage:
    its name and what it takes; what stands in brackets may be left out together.
    """
    needed, _, optional = usage.partition(" [")
    counts = {len(needed.split()) - 1, len(f"{needed} {optional}".split()) - 1}

    def decorate(work: Callable[..., object]) -> Callable[[Sequence[str]], int]:
        def main(arguments: Sequence[str]) -> int:
            if "--help" in arguments or len(arguments) not in counts:
                print(f"usage: python -m fedflat.federation.{usage}", file=sys.stderr)
                return 2
            return status_of(lambda: work(*arguments))

        return main

    return decorate


def private() -> None:
    """Let only this account read what is written from here on (umask 077); no core dumps, which would hold updates."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def must_be_free(where: str, host: str, port: int) -> None:
    """Raise InputError, before Flower starts, if another program listens on this port or there is no such port."""
    require(port <= 65535, where, f"{host}:{port}", "a port up to 65535")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower's own: a closed one may be left over
        try:
            probe.bind((host, port))
        except OSError as error:  # anything else is Flower's to say: a name, an address of another network
            if error.errno == errno.EADDRINUSE:
                raise wrong(where, f"{host}:{port}, which another program uses", "a free port") from error


def check_private(key: Path, option: str = "") -> None:
    """Raise InputError unless a private key is there, and its owner's only."""
    require(key.is_file(), f"{option}{key}", "no such file", "a private key, 0600")
    owners_only(key, "a private key, 0600", option)


def check_authority(path: Path) -> None:
    """Raise InputError unless a file holds an authority's certificate."""
    where, allowed = f"--root-certificates {path}", "the authority's certificate (ca.crt)"
    with becoming(lambda error: wrong(where, error.strerror, allowed), OSError):  # which an SSLError is
        ssl.create_default_context(cafile=path)


def check_pair(folder: Path) -> None:
    """Raise InputError unless server.crt in a folder is a certificate, and server.key its private key, 0600."""
    certificate, key = folder / "server.crt", folder / "server.key"
    check_private(key)
    where, allowed = f"{certificate} and server.key", "a certificate in PEM and its key"
    with becoming(lambda error: wrong(where, error.strerror, allowed), OSError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)


def raise_descriptor_limit() -> int:
    """Let this process open as many files and connections as the system allows; return how many these are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def begin() -> int:
    """Prepare a program of Flower's, and return how many files it may open.

    Its files are private, a closed terminal (SIGHUP) ends it as SIGTERM does, which is all that Flower handles, its
    lines have no colour codes unless a terminal shows them, and what ends a thread of Flower's is one of them.
    """
    os.environ.update(QUIET)  # before anything of Flower's is imported, which reads them once
    from flwr.supercore.logger import update_console_handler

    def ended(how: threading.ExceptHookArgs) -> None:
        log.error("a thread has ended: %s: %s", how.exc_type.__name__, str(how.exc_value).partition("\n")[0])

    threading.excepthook = ended
    private()
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    update_console_handler(colored=sys.stderr.isatty())
    return raise_descriptor_limit()


def end_with_an_exit(status: int | None = None) -> None:
    """Turn every signal that asks for an end into SystemExit, so that ``finally`` and ``with`` clean up.

    status: of the exit, where it is not to name the signal. An end that is under way is not cut short by another
    signal: what cleans up has its own limit of time.
    """

    def leave(number: int, _: object) -> None:
        for other in END_SIGNALS:
            signal.signal(other, lambda *_: None)
        raise SystemExit(128 + number if status is None else status)

    for number in END_SIGNALS:
        signal.signal(number, leave)


def dies_with(parent: int) -> None:
    """Ask the kernel (Linux) for SIGTERM when the parent is gone, however it went; exit if it has gone already."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def forked(work: Callable[[], object]) -> int:
    """Do some work in a forked process, which ends when this one does; return its number."""
    parent = os.getpid()
    with waiting(END_SIGNALS):
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


def task(name: str, work: Callable[[], object]) -> int:
    """Do a task in a forked process, the leader of a group of its own that ``ps`` shows under a name."""

    def run_task() -> None:
        with suppress(OSError):
            os.setpgid(0, 0)
        # A task has nothing to tidy up, and must not run the end of the process that started it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":  # what ps and top show, 15 characters
            _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        work()

    child = forked(run_task)
    with suppress(OSError):
        os.setpgid(child, child)
    return child


def start_companion(work: Callable[[], object]) -> None:
    """Fork a process that works beside this one; each of the two ends with the other.

    To be called before any thread is started: a fork of a process with threads may inherit a lock that nobody frees.
    """

    def run_companion() -> None:
        end_with_an_exit()
        work()

    child = forked(run_companion)

    def end_after() -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:  # otherwise it was told to end, as this one may be
            log.error("ends with the process beside it: %s", how_it_ended(status))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_after, daemon=True).start()


def end(groups: Iterable[int], seconds: float) -> None:
    """End children that lead process groups: asked first, killed with all they started after ``seconds``."""
    left = set(groups)
    for child in left:
        _signal_group(child, signal.SIGTERM)
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left -= {child for child in left if ended(child) is not None}
        time.sleep(LOOK)
    for child in left:
        _signal_group(child, signal.SIGKILL)
        os.waitpid(child, 0)


def ended(child: int) -> int | None:
    """Return how a child that leads a process group has ended, a signal as its number below zero; None if it has not.

    What it left behind in its group is killed then.
    """
    try:
        reaped, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        reaped, status = child, 0
    if reaped:
        _signal_group(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) if reaped else None


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def check_flower() -> None:
    """Refuse another Flower than the one that the tests ran with (``fedflat/tested.txt``); its patches are welcome.

    Raises:
        InputError: no Flower, or another minor version.
    """
    lines = resources.files("fedflat").joinpath("tested.txt").read_text(encoding="ascii").splitlines()
    minor = ".".join(dict(line.split("==") for line in lines)["flwr"].split(".")[:2])
    with turning(metadata.PackageNotFoundError, missing("deploy", f"flwr {minor}.*", "federation")):
        version = metadata.version("flwr")
    if ".".join(version.split(".")[:2]) != minor:
        raise wrong("flwr", version, f"{minor}.*, whose inner parts are used: pip install 'flwr=={minor}.*'")


def draw_apart() -> None:
    """Let Flower draw its waits from a generator that nobody else has.

    Each task's process sends signs of life from a thread, with waits from Python's global generator; and local training
    during which that generator moves is refused, since its draws could tell clients of each other.
    """
    from flwr.supercore import heartbeat
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.retry import retry_invoker

    # Each of them has the module `random` as a name of its own, and calls its functions through that name.
    for module in (heartbeat, inflatable_utils, retry_invoker):
        module.random = random.SystemRandom()
