"""Blocks of clients on a stack of linear layers: batched matrix products, no graph (weights ``(n, D)``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.params import Layout
from fedflat.core.types import Part
from fedflat.engine.problem import Batch, Gradient
from fedflat.engine.stack import Linear, affine, forward, head, write_gradient


@dataclass(frozen=True)
class DenseProblem:
    """What ``BlockProblem`` computes, for stacks of linear layers only."""

    layout: Layout
    stack: tuple[Linear, ...]

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """Gradients ``(n, …)`` of each client's mean minibatch loss with respect to one part."""
        states = forward(self.stack, batch.flat, lambda index, x: affine(self.stack[index], weights, x))
        loss, right, delta = head(states[-1], batch)
        whole = torch.empty_like(weights)
        write_gradient(self.stack, weights, states, delta, whole)
        return Gradient(whole[:, self.layout.span(part)], loss, right)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Nothing in a stack differs between training and evaluation."""
        yield
