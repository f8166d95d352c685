"""How the benchmark talks to a system: a line ``go`` starts one round, one JSON line answers when it is done.

Before that a first ``go`` starts its warm-up: libraries load in all systems together, warm-ups come one by one.
A system waits between its rounds, so rounds of different systems can be interleaved: whatever else the machine does in
the meantime, it does to all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Gate:
    """The system's side. Its standard output carries answers only; what libraries print goes to standard error.

    synchronize: waits for a GPU's work; called before every reading of the clock.
    """

    def __init__(self, synchronize: Callable[[], object] = bool) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0
        self._waited = False
        self._synchronize = synchronize
        synchronize()  # the first call sets the GPU up
        self.say(loaded=True)
        self._go()

    def say(self, **facts: Any) -> None:
        """One answer."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def wait(self) -> None:
        """Ready for a round: returns when it is to start; ends the process when there are no more."""
        if not self._waited:
            self._waited = True
            self.say(ready=True)
        self._go()
        self._synchronize()
        self._began = time.perf_counter()

    def _go(self) -> None:
        if sys.stdin.readline().strip() != "go":
            os._exit(0)

    def done(self, **facts: Any) -> None:
        """The round is over."""
        self._synchronize()
        self.say(seconds=time.perf_counter() - self._began, **facts)


def keep_freed_memory() -> None:
    """The allocator setting that fedflat uses, for the systems that are tuned."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 30)
    mallopt(-1, 1 << 30)


class Threads:
    """Tuning that any user would do: one thread or one per core, whichever makes a warm-up round faster.

    Four warm-up rounds: each count once cold, once timed.
    """

    WARM = 4

    def __init__(self) -> None:
        self._counts = (1, len(os.sched_getaffinity(0)))
        self._times = [0.0] * self.WARM
        self._began = 0.0

    def before(self, round: int) -> bool:
        """Set the threads of a round; True while warming up."""
        import torch

        if round < self.WARM:
            torch.set_num_threads(self._counts[round % 2])
        elif round == self.WARM:
            torch.set_num_threads(self._counts[0 if self._times[2] <= self._times[3] else 1])
        self._began = time.perf_counter()
        return round < self.WARM

    def after(self, round: int) -> bool:
        """Note a warm-up round's time; True while warming up."""
        if round < self.WARM:
            self._times[round] = time.perf_counter() - self._began
        return round < self.WARM


class Untuned(Threads):
    """Two warm-up rounds, threads as the system sets them."""

    def before(self, round: int) -> bool:
        """True while warming up."""
        return round < 2

    def after(self, round: int) -> bool:
        """True while warming up."""
        return round < 2
