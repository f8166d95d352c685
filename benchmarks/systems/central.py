"""The limit on a GPU: one central model, its batches on the device, nothing of federated learning or privacy.

Usage: python -m benchmarks.systems.central WORKLOAD FOLDER eager|compile|graph fp32|bf16 [DEVICE]

A step is forward, backward and SGD. The batch size is the one with most examples a second, found by a search before
the rounds. It may use whatever is fastest in its precision (channels-last, cuDNN's search, kernels whose sums vary),
but not TF32, which fedflat does not use either.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.protocol import Gate
from benchmarks.workloads import BY_NAME, Workload, network, read_data
from fedflat.engine.device import out_of_memory

BATCHES = (50, 100, 200, 400, 800, 1600, 3200)
SEARCHED = 6400
"""Examples of one timing in the search; the best of three counts."""

Step = Callable[[int], object]
"""Takes the i-th step."""


def sizes_of(workload: Workload) -> tuple[int, ...]:
    """Batch sizes to search; where clients train together, the cohort's minibatches as one as well."""
    more = {workload.cohort * workload.batch} if workload.together else set()
    return tuple(sorted(size for size in {*BATCHES, *more} if size <= workload.rows))


def search(sizes: Sequence[int], rate: Callable[[int], float]) -> dict[int, float]:
    """Examples a second for each batch size that fits into memory. Raises MemoryError where none does."""
    found: dict[int, float] = {}
    for size in sizes:
        try:
            found[size] = rate(size)
        except RuntimeError as error:  # a failed recording hides the reason behind one of its own
            if not any(out_of_memory(e) for e in (error, error.__context__) if isinstance(e, Exception)):
                raise
            break
    if not found:
        raise MemoryError(f"not even a batch of {sizes[0]} fits")
    return found


def best(rates: dict[int, float]) -> int:
    """The batch size with most examples a second."""
    return max(rates, key=lambda size: rates[size])


@dataclass(frozen=True)
class Central:
    """One model and its data on a device."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    lr: float
    low: bool

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def batch(self, size: int, index: int) -> tuple[Tensor, Tensor]:
        """The i-th piece of the data, a view."""
        start = index % max(1, len(self.inputs) // size) * size
        return self.inputs[start : start + size], self.targets[start : start + size]

    def steps(self, kind: str, size: int) -> Step:
        """Steps on batches of one size."""
        model = torch.compile(self.model, dynamic=False) if kind == "compile" else self.model
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, foreach=True)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            with self._precision():
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()

        if kind != "graph":
            return lambda index: step(*self.batch(size, index))
        x, y = (part.clone() for part in self.batch(size, 0))
        replay = recorded(lambda: step(x, y))

        def replayed(index: int) -> None:
            for kept, new in zip((x, y), self.batch(size, index)):
                kept.copy_(new)
            replay()

        return replayed

    def rate(self, kind: str, size: int, synchronize: Callable[[], object], wanted: int = SEARCHED) -> float:
        """Examples a second, warm."""
        step, count = self.steps(kind, size), max(2, wanted // size)
        step(0), step(1)
        times = []
        for _ in range(3):
            synchronize()
            began = time.perf_counter()
            for index in range(count):
                step(index)
            synchronize()
            times.append(time.perf_counter() - began)
        return count * size / min(times)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        """A graph must cast the weights at every replay: no cache."""
        if not self.low:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)


def recorded(step: Callable[[], object]) -> Callable[[], None]:
    """A step as a CUDA graph, recorded after three on a stream of their own, as PyTorch's documentation does it."""
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    main.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def central(workload: Workload, folder: str, precision: str, device: str) -> Central:
    """The workload's model and data on a device, channels-last where they have channels."""
    inputs, targets = (part.to(device) for part in read_data(folder))
    model = network(workload).to(device)
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Central(model, inputs, targets, workload.lr, precision == "bf16")


def main(name: str, folder: str, kind: str, precision: str, device: str = "cpu") -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    synchronize = torch.cuda.synchronize if device != "cpu" else bool
    gate, workload = Gate(synchronize), BY_NAME[name]
    work = central(workload, folder, precision, device)

    def rate(size: int) -> float:
        if device != "cpu":
            torch.cuda.empty_cache()
        return work.rate("eager" if kind == "compile" else kind, size, synchronize)

    rates = search(sizes_of(workload), rate)  # a compiled model takes the eager one's: each size would compile anew
    size = best(rates)
    if device != "cpu":
        torch.cuda.empty_cache()
    step, count = work.steps(kind, size), math.ceil(workload.samples / size)
    for round in itertools.count():
        if round:
            gate.wait()
        for index in range(count):
            step(index)
        if round:
            gate.done(batch=size, samples=count * size, rates=rates)


if __name__ == "__main__":
    main(*sys.argv[1:])
