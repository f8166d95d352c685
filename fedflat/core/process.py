"""Run and end work on this machine: threads, free memory, progress, Ctrl-C and SIGTERM."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end a process whose own compiled code is at fault."""
T = TypeVar("T")
_asked: list[int] = []


def stop_signal() -> int:
    """Return the signal that asked this process to stop, since ``forget``; 0 for none."""
    return _asked[0] if _asked else 0


def forget_signals() -> None:
    """Forget that somebody asked this process to stop."""
    _asked.clear()


def on_request(step: str, stop: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Inside the block the first signal calls ``stop`` and says that it ends after ``step``; a second one raises
    KeyboardInterrupt. Does nothing outside the main thread, where signals cannot be set."""

    def handler(number: int, frame: object) -> None:
        if _asked:
            raise KeyboardInterrupt
        _asked.append(number)
        stop()
        print(f"\nStopping after {step} (Ctrl-C again to stop at once).", file=sys.stderr)

    return _set(handler)


def ignored() -> AbstractContextManager[None]:
    """Inside the block both signals are ignored; processes started there inherit that."""
    return _set(signal.SIG_IGN)


@contextlib.contextmanager
def waiting(signals: Iterable[int]) -> Iterator[None]:
    """Inside the block signals wait: what a handler raises while Python forks would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warn_in_a_line() -> None:
    """Show warnings of this process without the place they come from, which tells a user nothing."""
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"


def leave_to_parent() -> None:
    """For a worker process: its parent stops it, also where a signal reaches the whole group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def own_stderr() -> int:
    """Return a file in memory that a worker process can write its errors to (``write_errors_to``), for ``text_of``."""
    return os.memfd_create("stderr")


def write_errors_to(parent: int, file: int) -> None:
    """In a worker process: from now on standard error is the file that process ``parent`` made by ``own_stderr``."""
    descriptor = os.open(f"/proc/{parent}/fd/{file}", os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def text_of(file: int) -> str:
    """Return what a worker process has written to its standard error so far."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").strip()


def how_it_ended(status: int | None, last: str = "") -> str:
    """Return how a worker process ended, in words, with the last line that it wrote.

    status: as ``multiprocessing`` gives it: below zero the signal that ended it; None where nobody knows it.
    """
    words = f"it ended with status {status}" if status is not None else "it was killed or crashed"
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        words = f"its compiled code crashed ({name})" if -status in CRASHES else f"it was killed by {name}"
        words += ", as the system does where memory is short" if -status == signal.SIGKILL else ""
    line = last.strip().splitlines()[-1:]
    return f'{words}; its last words were "{line[0].strip()[:300]}"' if line else words


@contextlib.contextmanager
def _set(handler: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, was in before.items():
            if was is not None:  # not set from Python: nothing to put back
                signal.signal(number, was)


@contextlib.contextmanager
def set_meanwhile(read: Callable[[], T], write: Callable[[T], object], value: T) -> Iterator[None]:
    """Inside the block a setting of the process has another value; it is put back afterwards."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def using_threads(count: int) -> AbstractContextManager[None]:
    """``count`` intra-op threads inside the block, put back afterwards.

    With one, sums have one order: equal passes give equal bits, and cores work on different clients, not on one matrix.
    """
    import torch  # here: the command line asks this file for signals before torch is loaded

    return set_meanwhile(torch.get_num_threads, torch.set_num_threads, count)


Listener = Callable[[str, int, int], object]
"""(what is done and the name of a step, steps done, steps in all)."""
_listeners: list[Listener] = []


def report_progress(step: str, done: int, total: int) -> None:
    """Tell the listeners how far a step before round 0 has come. Raises KeyboardInterrupt if asked to stop."""
    if _asked:
        raise KeyboardInterrupt
    for listener in _listeners:
        listener(step, done, total)


@contextlib.contextmanager
def listening_to_progress(listener: Listener) -> Iterator[None]:
    """Inside the block ``listener`` is called with every report of progress, from whichever thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


GIB = 2**30


def free_memory() -> float | None:
    """Available bytes, as the kernel says, or as a container's limit leaves."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        # A container sees the whole machine's memory in /proc.
        return min(free, float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no limit is the word max
        return free


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Start ``work()`` in a thread; return a function that waits for it and returns its result, or raises its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    # Lets the thread end when it is done; what is returned still waits for it.
    pool.shutdown(wait=False)
    return future.result
