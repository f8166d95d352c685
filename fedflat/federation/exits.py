"""How the small programs of a federation end: what is wrong in one line, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fedflat.core.checks import InputError, RunError


def status_of(work: Callable[[], int]) -> int:
    """The exit status of ``work()``: 2 with one line for bad input, 1 with one line for a fault of the surroundings."""
    try:
        return work()
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
