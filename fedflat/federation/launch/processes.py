"""The long-running programs of a federation as processes: private files, orderly ends, nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from fedflat.core.checks import wrong

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
"""Linux's numbers, of prctl.h."""
LOOK = 0.02
"""Seconds between looks at children that were asked to end: nobody notices them, and they cost nothing."""
_LIBC = ctypes.CDLL(None)
"""Loaded here and not between fork and exec."""


def private() -> None:
    """From here on: files that only this account reads (umask 077), and no core dumps (they would hold updates)."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def must_be_free(where: str, host: str, port: int) -> None:
    """InputError if another program listens on this port, or if there is no such port; said before Flower starts."""
    if port > 65535:
        raise wrong(where, f"{host}:{port}", "a port up to 65535")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower's own: a closed one may be left over
        try:
            found.bind((host, port))
        except OSError as error:  # anything else is Flower's to say: a name, an address of another network
            if error.errno == errno.EADDRINUSE:
                raise wrong(where, f"{host}:{port}, which another program uses", "a free port") from error


def hang_up_is_an_end() -> None:
    """A closed terminal (SIGHUP) ends a program as SIGTERM does; Flower handles the latter and forgets the former."""
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def end_with_an_exit() -> None:
    """Every signal that asks for an end becomes SystemExit, so that ``finally`` and ``with`` clean up."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in END_SIGNALS:
        signal.signal(number, leave)


def dies_with(parent: int) -> None:
    """Ask the kernel (Linux) for SIGTERM when the parent is gone, however it went; exit if it has gone already."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def named(name: str) -> None:
    """The name that ``ps`` and ``top`` show (Linux, 15 characters)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def end(groups: Iterable[int], seconds: float) -> None:
    """End children that lead process groups: asked first, killed with all they started after ``seconds``."""
    left = set(groups)
    for child in left:
        _signal_group(child, signal.SIGTERM)
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left -= {child for child in left if gone(child)}
        time.sleep(LOOK)
    for child in left:
        _signal_group(child, signal.SIGKILL)
        os.waitpid(child, 0)


def gone(child: int) -> bool:
    """Whether a child that leads a process group has ended; what it left behind in its group is killed then."""
    try:
        found, _ = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        found = child
    if found:
        _signal_group(child, signal.SIGKILL)
    return bool(found)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
