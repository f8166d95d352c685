"""One CUDA stream on which recorded graphs are replayed: all that touches ``torch.cuda`` in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


class Lane(Protocol):
    """A queue of work beside the main one. Nothing here waits for the device, but for ``record``."""

    def record(self, step: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        """Run ``step`` once, record it, and give what replays it and what it leaves, which a replay overwrites."""

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """Copy a tensor of the processor into a buffer, behind what the lane does now."""

    def start(self, replay: Callable[[], None]) -> None:
        """Replay, behind everything that the lane and the main queue have been given."""

    def finish(self) -> None:
        """Let the main queue go on only behind everything that the lane has been given."""

    def draws(self, step: Callable[[], object]) -> bool:
        """Whether ``step`` draws from the device's random generator."""


class CudaLane:
    """A lane of its own stream and its own memory: what lanes do at the same time must not share any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        """Run ``step`` once, so that kernels are chosen and compiled, then record it."""
        self._follow()
        with torch.cuda.stream(self.stream):
            step()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            found = step()
        return graph.replay, found

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """Copy from page-locked memory, so that the host does not wait."""
        with torch.cuda.stream(self.stream):
            buffer.copy_(value.pin_memory(), non_blocking=True)

    def start(self, replay: Callable[[], None]) -> None:
        """Replay behind the main stream, which reads the last replay's outcome and writes the round's broadcast."""
        self._follow()
        with torch.cuda.stream(self.stream):
            replay()

    def finish(self) -> None:
        """Let the main stream wait."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def draws(self, step: Callable[[], object]) -> bool:
        """Compare the generator's state before and after."""
        before = torch.cuda.get_rng_state(self.device)
        self._follow()
        with torch.cuda.stream(self.stream):
            step()
        self.stream.synchronize()
        return not torch.equal(before, torch.cuda.get_rng_state(self.device))

    def _follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
