"""Work that a thread does while the clients train: noise, ε of the round, the last round's checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """``work()`` done by a thread from now on; calling this waits for it and gives what it gave, or raised."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error

    def __call__(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
