"""Read stacks of linear layers off a module, and write out their arithmetic for a block of clients.

Three matrix products per layer and pass, and nothing else: no graph, no module call. ``DenseProblem`` has weights
``(n, D)``; ``factored`` has them as factors.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import Layout, Part, cross_entropy, weighted_mean
from fedflat.engine.problem import Batch, Gradient

FEW_CLASSES = 32
"""Classes up to which ``log_softmax`` goes along examples."""
Activation = Literal["relu", "tanh", "none"]
_ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.ReLU: "relu", nn.Tanh: "tanh"}

LOSS, GRADIENT = 1e-4, 1e-3
"""Relative distance at which a module's own loss and gradient still are the written-out ones: float32 sums in another
order differ by less, and a hook or another ``forward`` by far more."""


@dataclass(frozen=True)
class Linear:
    """One layer ``y = activation(x Wᵀ + b)``: where W ``(outputs, inputs)`` and b lie in the flat vector."""

    inputs: int
    outputs: int
    weight: slice
    bias: slice | None
    activation: Activation

    def matrix(self, vector: Tensor) -> Tensor:
        """W as a view of ``vector (…, D)``: ``(…, outputs, inputs)``."""
        return vector[..., self.weight].view(*vector.shape[:-1], self.outputs, self.inputs)


def layers_of(module: nn.Module, layout: Layout) -> tuple[Linear, ...] | None:
    """Return the module as a stack of linear layers, or None if it is anything else.

    Read: ``nn.Sequential`` of Flatten, Linear, ReLU and Tanh, and modules that list such layers with a method
    ``linear_layers()``. What was read is compared with the module itself, loss and gradient, before it is believed.
    """
    headed = getattr(module, "frozen", False) is True  # a head on features of a frozen body, which no pass runs
    declared = getattr(module, "linear_layers", None)
    listed = list(module) if type(module) is nn.Sequential else declared() if callable(declared) else None
    counted = sum(p.requires_grad or not headed for p in module.parameters())
    if listed is None or len(layout.names) != counted or (any(True for _ in module.buffers()) and not headed):
        return None
    where = dict(zip(layout.names, layout.tensors()))
    names = {id(p): n for n, p in module.named_parameters()}
    stack: list[Linear] = []
    for layer in listed:
        if type(layer) is nn.Linear:
            bias = None if layer.bias is None else where[names[id(layer.bias)]]
            stack.append(Linear(layer.in_features, layer.out_features, where[names[id(layer.weight)]], bias, "none"))
        elif type(layer) in _ACTIVATIONS and stack and stack[-1].activation == "none":
            stack[-1] = replace(stack[-1], activation=_ACTIVATIONS[type(layer)])
        elif type(layer) is not nn.Identity and (stack or not _flattens(layer)):
            # Two activations in a row, or one before the first layer, are no stack that is written out here.
            return None
    layers, once = tuple(stack), len({layer.weight.start for layer in stack}) == len(stack)
    plain = once and bool(layers) and layers[-1].activation == "none"
    return layers if plain and _agrees(module, layout, layers) else None


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1


def _agrees(module: nn.Module, layout: Layout, layers: tuple[Linear, ...]) -> bool:
    """Return whether made-up examples give the module's own loss and gradient: it may have hooks, or a forward of its
    own.
    """
    parameters = dict(module.named_parameters())
    chosen = [parameters[name] for name in layout.names]
    inputs = torch.linspace(-1, 1, 2 * layers[0].inputs).sin().reshape(2, -1).to(chosen[0].device)
    targets = torch.zeros(2, dtype=torch.int64, device=inputs.device)
    try:
        # The module as it is, hooks and all: what it computes decides, not what it lists.
        losses = cross_entropy(module(inputs), targets)
        grads = torch.autograd.grad(losses.mean(), chosen)
    except (RuntimeError, ValueError):
        return False
    vector = torch.cat([p.detach().reshape(-1) for p in chosen])[None]
    actual = DenseProblem(layout, layers).gradient(vector, "all", Batch(inputs[None], targets[None]))
    expected = torch.cat([g.reshape(-1) for g in grads])
    return torch.allclose(actual.loss, losses.mean(), rtol=LOSS, atol=LOSS / 100) and torch.allclose(
        actual.vector[0], expected, rtol=GRADIENT, atol=GRADIENT / 100 * max(1.0, float(expected.abs().max()))
    )


def affine(layer: Linear, matrix: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """x Wᵀ + b of every client, in the precision of x ``(n, b, inputs)`` and W: weights ``(n, D)`` have b in them."""
    if layer.bias is None:
        return torch.bmm(x, matrix.transpose(1, 2))
    return torch.baddbmm(weights[:, None, layer.bias].to(x.dtype), x, matrix.transpose(1, 2))


def forward(layers: tuple[Linear, ...], x: Tensor, apply: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Return the input of every layer, then the logits: ``[(n, b, inputs_0), …, (n, b, classes)]``."""
    states = [x]
    for index, layer in enumerate(layers):
        y = apply(index, states[-1])
        states.append(F.relu_(y) if layer.activation == "relu" else y.tanh_() if layer.activation == "tanh" else y)
    return states


def head(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy: loss ``(n,)``, accuracy ``(n,)`` and the gradient ``(n, b, classes)`` at the
    logits.
    """
    logs = _log_softmax(logits)
    losses = -logs.gather(-1, batch.targets[..., None]).squeeze(-1)
    right = (logits.argmax(-1) == batch.targets).to(logits.dtype)
    delta = logs.exp_()
    delta.scatter_add_(-1, batch.targets[..., None], delta.new_full((1, 1, 1), -1.0).expand(*batch.targets.shape, 1))
    if batch.weights is None:
        delta.div_(logits.shape[1])
    else:
        delta.mul_((batch.weights / batch.weights.sum(-1, keepdim=True).clamp_min(1))[..., None])
    return weighted_mean(losses, batch.weights), weighted_mean(right, batch.weights), delta


def _log_softmax(logits: Tensor) -> Tensor:
    """``log_softmax`` over few classes: PyTorch's is several times faster along rows that are long."""
    if logits.shape[-1] > FEW_CLASSES or logits.device.type != "cpu":
        return torch.log_softmax(logits, -1)
    return torch.log_softmax(logits.flatten(0, -2).T.contiguous(), 0).T.contiguous().view(logits.shape)


def through(activation: Activation, delta: Tensor, state: Tensor) -> Tensor:
    """Return the gradient before an activation, from the gradient behind it and its output; may overwrite ``delta``."""
    if activation == "relu":
        return delta.mul_(state > 0)
    if activation == "none":
        return delta
    # In bf16, 1 - state² would cancel.
    return torch.ops.aten.tanh_backward(delta, state)  # type: ignore[no-any-return]


def write_gradient(
    layers: tuple[Linear, ...], matrices: list[Tensor], states: list[Tensor], delta: Tensor, out: Tensor
) -> None:
    """Back through the stack, in the precision of W's, inputs and ``delta``: the gradients into ``out (n, D)``."""
    for index in reversed(range(len(layers))):
        layer, x = layers[index], states[index]
        if delta.dtype == out.dtype:
            torch.bmm(delta.transpose(1, 2), x, out=layer.matrix(out))
        else:
            # ``out=`` takes one precision only.
            layer.matrix(out).copy_(torch.bmm(delta.transpose(1, 2), x))
        if layer.bias is not None:
            torch.sum(delta, 1, dtype=out.dtype, out=out[:, layer.bias])
        if index:
            delta = through(layers[index - 1].activation, torch.bmm(delta, matrices[index]), x)


@dataclass(frozen=True)
class StackProblem:
    """Gradients of a block on a stack of linear layers, which runs no module: there is nothing to put back."""

    layout: Layout
    layers: tuple[Linear, ...]

    def evaluating(self) -> AbstractContextManager[None]:
        """Nothing in a stack differs between training and evaluation."""
        return nullcontext()

    def restore_and_check(self, *, everything: bool = False) -> None:
        """Nothing was changed."""


@dataclass(frozen=True)
class DenseProblem(StackProblem):
    """What ``BlockProblem`` computes, for stacks of linear layers only; ``precision`` as there.

    In bf16 numbers are rounded where ``torch.autocast`` rounds them: weights and inputs on their way in, every layer's
    output, the loss's gradient at the logits, and what matrix products give on the way back. Sums, the biases'
    gradients among them, are float32.
    """

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
        vectors = torch.empty_like(weights)
        write_gradient(self.layers, matrices, states, delta.to(kind), vectors)
        return Gradient(vectors[:, self.layout.span(part)], loss, right)
