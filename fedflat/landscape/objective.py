"""Compute mean loss and accuracy on fixed examples as a function of flat weights: values, gradients, curvature.

Evaluations are spread over threads of one intra-op thread each. What a thread is handed (a chunk of points, a batch of
examples) and the order in which results are added do not depend on the number of threads, so neither do the numbers.
"""

import copy
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.core import CROSS_ENTROPY, Layout, require, using_threads, whole

T = TypeVar("T")
R = TypeVar("R")

CONVOLUTION_BATCH, DENSE_BATCH, GRADIENT_BATCH = 25, 1000, 250
"""Examples per pass: activations of 25 images stay in a core's cache, which is 1.4 times faster than 500 at once."""
CHUNK_ENTRIES = 2_000_000
"""Entries (weights, or examples × widest layer for the activations) of the points that one vmap evaluates at once."""


def weights_at(base: Tensor, directions: Tensor, coefficients: Tensor) -> Tensor:
    """Return the weights ``base + coefficients @ directions`` ``(P, D)``.

    base ``(D,)``, directions ``(k, D)``, coefficients ``(P, k)``. Each row is computed alone, so that no chunking
    changes it.
    """
    rows = [base.clone() for _ in coefficients]
    for row, amounts in zip(rows, coefficients.tolist(), strict=True):
        for amount, direction in zip(amounts, directions, strict=True):
            row.add_(direction, alpha=amount)
    return torch.stack(rows)


class Objective:
    """L(w): mean loss over ``inputs`` ``(N, …)`` and ``targets`` of a module in eval mode at flat weights w ``(D,)``.

    The module is copied and its buffers stay as they are. ``threads``: None for torch's number.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, inputs: Tensor, targets: Tensor, *, threads: int | None = None
    ) -> None:
        require(len(inputs) > 0, "landscape", "no example to evaluate on", "at least one")
        self.layout, self.inputs, self.targets = layout, inputs, targets
        self.threads = torch.get_num_threads() if threads is None else whole("threads", threads, 1)
        self.dense, self._batches = _dense(module), _slices(len(inputs), GRADIENT_BATCH)
        self._widest = max((m.out_features for m in module.modules() if isinstance(m, nn.Linear)), default=1)
        self._modules: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._modules.put(copy.deepcopy(module).eval())

    # ------------------------------------------------------------------------------------------------- values

    def value(self, weights: Tensor) -> tuple[float, float]:
        """Return the loss and accuracy at ``weights`` ``(D,)``."""
        loss, accuracy = self.values(weights, weights[None], torch.zeros(1, 1))[0]
        return float(loss), float(accuracy)

    def values(
        self, base: Tensor, directions: Tensor, coefficients: Tensor, on_chunk: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Return the loss and accuracy of every point of ``weights_at`` ``(P, 2)``; on_chunk: points finished."""
        dtype = torch.float64 if self.inputs.dtype == torch.float64 else torch.float32
        inputs = self.inputs.to(dtype) if self.inputs.is_floating_point() else self.inputs

        def one(module: nn.Module, chunk: slice) -> np.ndarray:
            with torch.no_grad():
                return self._measured(module, weights_at(base, directions, coefficients[chunk]).to(dtype), inputs)

        results = []
        # Chunks follow from model and data alone, so that threads do not change the numbers.
        for result in self._spread(one, _slices(len(coefficients), self._chunk())):
            results.append(result)
            if on_chunk is not None:
                on_chunk(len(result))
        return np.concatenate(results)

    def _chunk(self) -> int:
        """Return the points per task; of the model and the data only."""
        if not self.dense:
            return 1
        entries = max(self.layout.size, min(len(self.inputs), DENSE_BATCH) * self._widest)
        return max(1, min(256, CHUNK_ENTRIES // entries))

    def _at(self, module: nn.Module, inputs: Tensor, rows: slice, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and accuracy of each of some examples at weights ``(D,)``."""
        logits = torch.func.functional_call(module, dict(self.layout.views(vector)), (inputs[rows],))
        return CROSS_ENTROPY(logits, self.targets[rows])

    def _measured(self, module: nn.Module, weights: Tensor, inputs: Tensor) -> np.ndarray:
        """Return loss and accuracy ``(n, 2)`` at weights ``(n, D)``: of a dense model by batched matrix products."""
        total = torch.zeros(len(weights), 2, dtype=torch.float64)
        batch = DENSE_BATCH if self.dense else CONVOLUTION_BATCH if inputs.dim() == 4 else DENSE_BATCH // 4
        for rows in _slices(len(inputs), batch):
            at = partial(self._at, module, inputs, rows)
            # Of any other model a chunk is one point.
            measures = torch.func.vmap(at)(weights) if self.dense else at(weights[0])
            total += torch.stack([measure.double().sum(-1) for measure in measures], dim=-1)
        return (total / len(inputs)).numpy()

    # --------------------------------------------------------------------------------- gradients and products

    def gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """Return L and its gradient ``(D,)``."""

        def one(module: nn.Module, rows: slice) -> tuple[Tensor, Tensor]:
            vector = weights.detach().requires_grad_()
            loss = self._at(module, self.inputs, rows, vector)[0].sum()
            return loss.detach().double(), torch.autograd.grad(loss, vector)[0]

        losses, gradients = zip(*self._spread(one, self._batches), strict=True)
        return float(reduce(torch.add, losses)) / len(self.inputs), reduce(torch.add, gradients) / len(self.inputs)

    def product(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map from v ``(D,)`` to the Hessian of L at ``weights`` times v: the gradient differentiated again.

        At a kink (ReLU, max pooling) it is the Hessian of the piece on which the weights lie.
        """

        def times(direction: Tensor) -> Tensor:
            def one(module: nn.Module, rows: slice) -> Tensor:
                vector = weights.detach().requires_grad_()
                # The fused kernels of attention have no second derivative.
                with sdpa_kernel(SDPBackend.MATH):
                    loss = self._at(module, self.inputs, rows, vector)[0].sum()
                    gradient = torch.autograd.grad(loss, vector, create_graph=True)[0]
                    return torch.autograd.grad(gradient, vector, direction.to(weights.dtype))[0]

            # In a fixed order, so that the number of threads does not change the sum.
            return reduce(torch.add, self._spread(one, self._batches)) / len(self.inputs)

        return times

    def _spread(self, function: Callable[[nn.Module, T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield ``function(module, task)`` of every task, in the tasks' order; each thread has its own module."""

        def run(task: T) -> R:
            # ``functional_call`` swaps parameters inside the module, so each thread needs a copy of its own.
            module = self._modules.get()
            try:
                return function(module, task)
            finally:
                self._modules.put(module)

        with (
            using_threads(1),
            ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            yield from pool.map(run, tasks)


def _slices(count: int, size: int) -> list[slice]:
    """Return slices of ``size`` that cover ``count`` places, the last one shorter."""
    return [slice(start, start + size) for start in range(0, count, size)]


def _dense(module: nn.Module) -> bool:
    """Return whether every layer with weights is linear: batched matrix products win there, and lose for
    convolutions."""
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return bool(layers) and all(isinstance(m, nn.Linear) for m in layers)
