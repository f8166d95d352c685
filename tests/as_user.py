"""Start programs as a user does: in new processes, with every thread of the machine and in a terminal.

Example: ``as_user("fedflat list", folder).out``. The tests' own settings (``OMP_NUM_THREADS``, the caches of the
session) do not reach these processes; their home, caches and keys are empty folders.
"""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(sys.executable).parent
NOT_A_USERS = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|NUMEXPR|PYTEST|COV|XDG)_|ATEN_CPU_CAPABILITY|DNNL_MAX_CPU_ISA|MPLBACKEND"
)


class Left(NamedTuple):
    """What a program left: its exit status (negative: the signal that ended it) and the lines the terminal showed.

    A line that was shown again, as a progress bar's is, stands once.
    """

    status: int
    out: str


def environment(home: Path) -> dict[str, str]:
    """Return the environment without the tests' settings, with a home of its own and this environment's programs."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not NOT_A_USERS.match(name)}
    return kept | {"HOME": str(home), "PATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", os.defpath)])}


def as_user(
    words: str | list[str], folder: Path, *, home: Path | None = None, stdin: str | None = None,
    stop_when: Callable[[], bool] | None = None, timeout: float = 1500, **more: str,
) -> Left:  # fmt: skip
    """Run a command in a terminal 100 columns wide and return what it left.

    Args:
        words: a shell line, or a program with its arguments.
        folder: where it runs; made if it is not there.
        home: its home, with all caches and keys; a folder beside ``folder`` if not given.
        stdin: its input, then from a pipe.
        stop_when: asked twice a second; Ctrl-C is pressed as soon as it answers True.
        more: variables of its environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        ["bash", "-c", words] if isinstance(words, str) else words, cwd=folder,
        env=environment(home or folder.with_name(f"{folder.name}-home")) | more,
        stdin=theirs if stdin is None else subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal closes with its last program
            while found := os.read(ours, 65536):
                shown.append(found)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if stdin is not None and process.stdin is not None:
            process.stdin.write(stdin.encode())
            process.stdin.close()
        while stop_when is not None and process.poll() is None:
            if stop_when():
                os.killpg(process.pid, signal.SIGINT)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        shown.append(f"\n(ended after {timeout:.0f} s)".encode())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind
        reader.join(5)
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode("utf-8", "replace"))
    return Left(process.returncode, "\n".join(dict.fromkeys(re.split(r"[\r\n]+", text))))


def works(left: Left) -> bool:
    """Return whether a program ended as it should: status 0 and no traceback."""
    return left.status == 0 and "Traceback (most recent call last)" not in left.out
