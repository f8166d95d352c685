"""Ports for federations of real processes, which others neither get from the kernel nor from here."""

import fcntl
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

BLOCK, FIRST = 16, 12000
"""A federation's ports (the SuperLink's two, then its SuperNodes') and where to begin."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FOLDER = Path(tempfile.gettempdir()) / "fedflat-test-ports"
_held: list[IO[str]] = []


def free_port() -> int:
    """The first of BLOCK free ports below those that the kernel gives to connections; ours until this process ends."""
    FOLDER.mkdir(exist_ok=True)
    last = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    for first in range(FIRST, max(last, FIRST + 1000) - BLOCK, BLOCK):
        with suppress(OSError):
            lock = (FOLDER / str(first)).open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for port in range(first, first + BLOCK):
                with socket.socket() as found:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    found.bind(("127.0.0.1", port))
            _held.append(lock)
            return first
    raise OSError("no block of free ports")
