"""The server's memory while answers stream in: a model, not a cohort of them."""

from typing import Any

import pytest
from fork_server import CONTEXT

load = pytest.importorskip("benchmarks.server_load")


def peak(clients: int, twin: bool, answer: Any) -> None:
    """MiB beyond the start, in a process of its own (a fork of this one would inherit
    what tests left free); the twin keeps every message."""
    from fedflat.engine.reduce import Accumulator

    load.return_large_blocks()
    kept: list[Any] = []
    if twin:
        add = Accumulator.add
        Accumulator.add = lambda self, messages, *rest: (kept.append(messages), add(self, messages, *rest))[1]
    load.measure(200_000, 20)
    answer.send(load.measure(200_000, clients)[1])


@pytest.mark.parametrize("twin", [False, True], ids=["server", "twin that keeps messages"])
def test_memory_is_that_of_a_model(twin: bool) -> None:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=peak, args=(375, twin, there))
    process.start()
    grown = here.recv()
    process.join()
    assert (grown > 250) == twin and (grown < 10) == (not twin)  # 375 updates of 0.76 MiB are 286 MiB
