"""Work that a thread does while the clients train: noise, ε of the round, the last round's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(work: Callable[[], T]) -> Callable[[], T]:
    """``work()`` is done by a thread from now on; calling what is returned waits for it and gives what it gave, or
    raises what it raised."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(work)
    pool.shutdown(wait=False)
    return found.result
