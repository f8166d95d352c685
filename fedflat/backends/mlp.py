"""Train blocks of clients on multilayer perceptrons in matrix products, dense or of low rank.

It applies to stacks of linear layers when everything is trained together (no personal head) and the rows that a
client ever sees, K·batch·passes, are few beside the layers' widths. Linear methods (SGD, momentum, SAM, BLUR, PGN,
weight decay, gradient-norm clips) never write a client's weights out; a transform or clip that needs coordinates gets
them written out once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedflat.core.params import Layout
from fedflat.core.types import Part
from fedflat.engine.factored import Declined, Factored, Trace
from fedflat.engine.mlp import Linear, affine, forward, head, through, write_gradient
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
        """Return the gradients ``(n, …)`` of each client's mean minibatch loss with respect to one part."""
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


@dataclass(frozen=True)
class LowRankProblem:
    """Gradients at factored weights, as factored vectors. In float32 whatever ``engine.precision`` says: the
    Gram matrices, which norms are taken from, must be, and bf16 in the rest gains little (docs/performance.md).
    """

    layout: Layout
    layers: tuple[Linear, ...]

    def start(self, shared: Tensor, clients: int) -> Factored:
        """w^t for every client of a block."""
        return Factored(Trace(self.layers, clients, self.layout.size, shared.device), [(shared, 1.0)], {})

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """As ``DenseProblem.gradient``, ``weights`` and the found vector being ``Factored``."""
        if not isinstance(weights, Factored) or self.layout.span(part) != self.layout.span("all"):
            raise Declined("weights outside the span of w^t and the gradients, or a personal part")
        at = cast(Factored, weights)
        trace, slots = at.trace, list[int]()
        layers = [_At(at, index) for index in range(len(self.layers))]

        def apply(index: int, x: Tensor) -> Tensor:
            slots.append(trace.slot(index, x))
            return layers[index].forward(slots[index], x)

        states = forward(self.layers, batch.flat, apply)
        loss, right, delta = head(states[-1], batch)
        deltas = [delta]
        for index in range(len(self.layers) - 1, 0, -1):
            behind = layers[index].backward(delta)
            delta = through(self.layers[index - 1].activation, behind, states[index])
            deltas.append(delta)
        found = trace.record(slots, deltas[::-1])
        vector = Factored(trace, [], {found: 1.0})
        return Gradient(cast(Tensor, vector), loss, right)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Nothing in a stack differs between training and evaluation."""
        yield


class _At:
    """One layer at factored weights."""

    def __init__(self, at: Factored, index: int) -> None:
        self.layer, self.index, self.trace = at.trace.layers[index], index, at.trace
        self.shared, self.others = at.common()
        self.mixed = at.trace.mixed(index, at.steps)

    def forward(self, slot: int, x: Tensor) -> Tensor:
        """x Wᵀ + b ``(n, b, outputs)``: one product for the whole block, and small ones for what clients learned."""
        layer = self.layer
        y = x.new_zeros(*x.shape[:2], layer.outputs) if self.shared is None else self._common(x, self.shared)
        for base, c in self.others:
            y.addcmul_(self._common(x, base), c[:, :, None])
        for known, u in self.mixed.items():
            y.baddbmm_(self.trace.gram(self.index, slot, known), u)
            if layer.bias is not None:
                y += u.sum(1, keepdim=True)
        return y

    def _common(self, x: Tensor, vector: Tensor) -> Tensor:
        matrix, layer = self.layer.matrix(vector).T, self.layer
        rows = x.flatten(0, 1)
        flat = rows @ matrix if layer.bias is None else torch.addmm(vector[layer.bias], rows, matrix)
        return flat.view(*x.shape[:2], layer.outputs)

    def backward(self, delta: Tensor) -> Tensor:
        """δ W ``(n, b, inputs)``."""
        layer = self.layer
        x = delta.new_zeros(*delta.shape[:2], layer.inputs) if self.shared is None else self._back(delta, self.shared)
        for base, c in self.others:
            x.addcmul_(self._back(delta, base), c[:, :, None])
        for known, u in self.mixed.items():
            x.baddbmm_(torch.bmm(delta, u.transpose(1, 2)), self.trace.acts[self.index][known])
        return x

    def _back(self, delta: Tensor, vector: Tensor) -> Tensor:
        found = torch.mm(delta.flatten(0, 1), self.layer.matrix(vector))
        return found.view(*delta.shape[:2], self.layer.inputs)
