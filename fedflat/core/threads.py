"""How many threads work on one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """``count`` intra-op threads inside the block, put back afterwards.

    With one, sums have one order: equal passes give equal bits, and cores work on different clients, not on one matrix.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
