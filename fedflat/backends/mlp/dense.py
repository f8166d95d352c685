"""Blocks of clients on a stack of linear layers: batched matrix products, no graph (weights ``(n, D)``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.params import Layout
from fedflat.core.types import Part
from fedflat.engine.mlp import Linear, affine, forward, head, write_gradient
from fedflat.engine.problem import Batch, Gradient


@dataclass(frozen=True)
class DenseProblem:
    """What ``BlockProblem`` computes, for stacks of linear layers only; ``precision`` as there.

    In bf16 numbers are rounded where ``torch.autocast`` rounds them: weights and inputs on their way in, every layer's
    output, the loss's gradient at the logits, and what matrix products give on the way back. Sums, the biases'
    gradients among them, are float32.
    """

    layout: Layout
    layers: tuple[Linear, ...]
    precision: str = "fp32"

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """Gradients ``(n, …)`` of each client's mean minibatch loss with respect to one part."""
        kind = torch.bfloat16 if self.precision == "bf16" else weights.dtype
        matrices: list[Tensor] = []

        def apply(index: int, x: Tensor) -> Tensor:
            matrices.append(self.layers[index].matrix(weights).to(kind))  # just before it is multiplied: still cached
            return affine(self.layers[index], matrices[index], weights, x)

        states = forward(self.layers, batch.flat.to(kind), apply)
        loss, right, delta = head(states[-1].to(weights.dtype), batch)
        whole = torch.empty_like(weights)
        write_gradient(self.layers, matrices, states, delta.to(kind), whole)
        return Gradient(whole[:, self.layout.span(part)], loss, right)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Nothing in a stack differs between training and evaluation."""
        yield
