"""One CUDA stream on which recorded graphs are replayed: all that touches ``torch.cuda`` in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


class Stream(Protocol):
    """A stream of work beside the main one. Nothing here waits for the device, but for ``record``."""

    def record(self, step: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        """Run ``step`` once, record it, and give what replays it and what it leaves, which a replay overwrites."""

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """Copy a tensor of the processor into a buffer, behind what the stream does now."""

    def start(self, replay: Callable[[], None]) -> None:
        """Replay, behind everything that this stream and the main one have been given."""

    def finish(self) -> None:
        """Let the main stream go on only behind everything that this one has been given."""

    def examine(self, step: Callable[[], object]) -> bool:
        """Run ``step`` twice: whether it draws from the device's random generator.

        Raises RuntimeError where it waits for the device, which no recording can hold.
        """

    def forget(self) -> None:
        """Nothing recorded here is needed any more."""


class CudaStream:
    """A CUDA stream with memory of its own: what streams do at the same time must not share any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        """Run ``step`` once, so that this stream's kernels and workspaces are there, then record it."""
        self._follow()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):  # around the recording too: one that fails would leave its stream behind
            step()
            self.stream.synchronize()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                found = step()
        return graph.replay, found

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """Copy from page-locked memory, so that the host does not wait; behind the main stream, which fills buffers
        when they are new."""
        self._follow()
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

    def examine(self, step: Callable[[], object]) -> bool:
        """Once to choose and compile kernels, once under PyTorch's own watch for waiting; a recording that fails would
        spoil the process. The generator's state tells whether it was drawn from."""
        self._follow()
        before, watched = torch.cuda.get_rng_state(self.device), torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self.stream):
            step()
            try:
                torch.cuda.set_sync_debug_mode("error")
                step()
            finally:
                torch.cuda.set_sync_debug_mode(watched)
        self.stream.synchronize()
        return not torch.equal(before, torch.cuda.get_rng_state(self.device))

    def forget(self) -> None:
        """The old pool goes with its graphs."""
        self.pool = torch.cuda.graph_pool_handle()

    def _follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
