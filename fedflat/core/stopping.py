"""Ctrl-C and SIGTERM: once, what runs ends in order (a round, with its checkpoint); twice, at once."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_asked: list[int] = []


def asked() -> int:
    """The signal that asked this process to stop, since ``forget``; 0 for none."""
    return _asked[0] if _asked else 0


def forget() -> None:
    """Nobody has asked."""
    _asked.clear()


@contextlib.contextmanager
def on_request(what: str, stop: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside the block the first signal calls ``stop`` and says that it ends after ``what``; a second one raises
    KeyboardInterrupt. Does nothing outside the main thread, where signals cannot be set."""

    def handler(number: int, frame: object) -> None:
        if _asked:
            raise KeyboardInterrupt
        _asked.append(number)
        stop()
        print(f"\nStopping after {what} (Ctrl-C again to stop at once).", file=sys.stderr)

    with _set(handler):
        yield


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Inside the block both signals are ignored; processes started there inherit that."""
    with _set(signal.SIG_IGN):
        yield


def leave_to_parent() -> None:
    """For a worker process: its parent stops it, also where a signal reaches the whole group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
