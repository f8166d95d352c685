"""Long work before round 0 tells how far it is, to whoever listens (the command line's progress)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, int, int], object]
"""(what is done, steps done, steps in all)."""
_listeners: list[Listener] = []


def told(what: str, done: int, total: int) -> None:
    """Tell the listeners; nothing where nobody listens."""
    for listener in _listeners:
        listener(what, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """``listener`` is told of what is done inside the block, from whichever thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
