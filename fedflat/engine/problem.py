"""Compute the gradient of a client's minibatch loss as a function of one flat vector, or of a block's."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from fedflat.core import InputError, Layout, Part, StateWatch, looked_at, own_code
from fedflat.core.loss import CROSS_ENTROPY, Objective, weighted_mean

LEAST = 4
"""Examples from which oneDNN's own tensors pay: the weights are put into its layout for every minibatch."""


@dataclass(frozen=True)
class Batch:
    """Inputs ``(…, b, …)``, targets and 0/1 weights ``(…, b)`` (None: every example counts)."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @cached_property
    def flat(self) -> Tensor:
        """The inputs of a block with each example as one row: ``(n, b, inputs)``, the same tensor at every call."""
        return self.inputs if self.inputs.dim() == 3 else self.inputs.flatten(2)


@dataclass(frozen=True)
class Gradient:
    """Gradient ``(…, n)`` of the mean loss, with the loss and accuracy ``(…)`` there."""

    vector: Tensor
    loss: Tensor
    accuracy: Tensor


class Problem(Protocol):
    """Weights ``(…, D)`` and a batch -> gradient of a part."""

    @property
    def layout(self) -> Layout: ...
    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient: ...
    def evaluating(self) -> AbstractContextManager[None]: ...


class Buffers:
    """A module's buffers as they were at w^0.

    A forward pass may write into a buffer (running statistics, counters); without this, that would carry one client's
    data to the next client, into the public test metrics and out with the released model, unclipped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._first = [
            (owner, name, buffer, None if buffer is None else buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
        ]
        self._versions = [0 if buffer is None else buffer._version for _, _, buffer, _ in self._first]

    def restore(self) -> None:
        """Undo every write since w^0. Costs a comparison of counters where nothing was written."""
        for index, (owner, name, buffer, first) in enumerate(self._first):
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
            if buffer is not None and first is not None and buffer._version != self._versions[index]:
                with torch.no_grad():
                    buffer.copy_(first)
                self._versions[index] = buffer._version


def refuse_change(watched: StateWatch, of: str = "model", *, everything: bool = False) -> None:
    """Raise InputError, naming it, where something is not as it was before the first client."""
    if (changed := watched.changed(everything=everything)) is not None:
        raise InputError(
            f"{of}: {changed} was changed by a client's training, outside the clipped update; nothing of this round is "
            "released. Remedy: keep nothing between passes, or a registered buffer, which is put back."
        )


class ModuleProblem:
    """One client at a time on one module: the readable reference.

    The module's parameters are bound to views of whichever weight vector is asked for, so nothing is copied.
    precision: fp32, or bf16 for the layers' arithmetic; weights, gradients, updates and the loss stay float32.
    random: whether clients are trained one by one: where training draws from torch's generator, or runs pieces of a
    user's own.
    pristine: a copy of the module, made before any client's data was seen; it is what a run releases.
    objective: the loss.
    onednn: whether the training passes of minibatches run on oneDNN's own tensors (``device.serves`` finds out).
    """

    def __init__(
        self, module: nn.Module, layout: Layout, precision: str = "fp32", *, onednn: bool = False,
        random: bool = False, pristine: nn.Module | None = None, objective: Objective = CROSS_ENTROPY,
    ) -> None:  # fmt: skip
        self.module, self.layout, self.precision = module, layout, precision
        self.onednn, self.random, self.pristine, self.objective = onednn, random, pristine, objective
        parameters = dict(module.named_parameters())
        self.parameters = [parameters[name] for name in layout.names]
        self._bound = torch.empty(0)
        self._buffers = Buffers(module)
        self._twins = [module]
        self.module.train()
        self._watched = [StateWatch(module, self.parameters)]
        self._loss = None if objective.own is None else StateWatch(objective.own)
        self._own_code = own_code(module)

    def restore_and_check(self, *, everything: bool = False) -> None:
        """After a client: undo what was written into buffers, and raise InputError, by name, for any other change.

        everything: look into all tensors (see ``StateWatch.changed``), as always where a module runs a user's own code.
        """
        self._buffers.restore()
        for watched in self._watched:
            refuse_change(watched, everything=everything or self._own_code)
        if self._loss is not None:
            refuse_change(self._loss, "loss", everything=True)

    def released(self, weights: Tensor) -> nn.Module:
        """Return what a run gives back: w^0's module in eval mode, on the processor, with nothing changed but the
        parameters, which are ``weights`` ``(D,)``.
        """
        module = copy.deepcopy(self.module if self.pristine is None else self.pristine).cpu()
        parameters = dict(module.named_parameters())
        for name, (_, view) in zip(self.layout.names, self.layout.views(weights.detach().cpu().clone())):
            parameters[name].data = view
        return module.eval()

    @property
    def device(self) -> torch.device:
        """The device that the module's parameters are on."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def bind(self, weights: Tensor) -> None:
        """Let the parameters be views of ``weights`` ``(D,)`` on the module's device, the buffers w^0's."""
        self._buffers.restore()
        if weights.data_ptr() != self._bound.data_ptr():
            for parameter, (_, view) in zip(self.parameters, self.layout.views(weights)):
                parameter.data = view
            self._bound = weights  # keeps the storage alive, so that its address stays unique

    def logits(self, inputs: Tensor, module: nn.Module | None = None) -> Tensor:
        """Return the module's output in float32; ``module``: one of ``twins`` instead."""
        module = self.module if module is None else module
        with layers_in(self.precision, inputs):
            outputs: Tensor = module(inputs)
        return outputs if self.precision == "fp32" else outputs.float()

    def twins(self, count: int) -> list[nn.Module]:
        """``count`` modules for as many threads, the first being the module itself.

        All share one set of parameters and buffers, so whatever is bound holds for each; what a forward pass may write
        to the module itself is their own. Only one where the module cannot be copied.
        """
        if len(self._twins) < count:
            shared = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
            try:
                # Parameters and buffers are in the memo, so copies share them and have only their own attributes.
                more = [copy.deepcopy(self.module, dict(shared)) for _ in range(count - len(self._twins))]
            except Exception:  # any class may refuse in its own way
                return [self.module]
            self._watched += [StateWatch(twin.eval(), self.parameters) for twin in more]
            self._twins += more
        return self._twins[:count]

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """Return the gradient of the mean minibatch loss at ``weights`` ``(D,)`` with respect to one part."""
        self.bind(weights)
        shared = self.layout.shared
        chosen = self.parameters[{"all": slice(None), "shared": slice(shared), "personal": slice(shared, None)}[part]]
        # Its own tensors only in training: evaluation must give what another machine gives.
        if self.onednn and self.module.training and len(batch.inputs) >= LEAST:
            logits = self.module(looked_at(self.module, batch.inputs).to_mkldnn()).to_dense()
        else:
            logits = self.logits(batch.inputs)
        losses, right = self.objective(logits, batch.targets)
        loss = weighted_mean(losses, batch.weights)
        grads = torch.autograd.grad(loss, chosen, allow_unused=True)
        # A parameter that the pass did not use has gradient zero.
        flat = [torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1) for g, p in zip(grads, chosen)]
        return Gradient(torch.cat(flat), loss.detach(), weighted_mean(right, batch.weights))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode inside the block (LUS's gradient)."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()
        self.restore_and_check()


class BlockProblem(ModuleProblem):
    """A block of n clients at once by torch.func.vmap: weights ``(n, D)``, inputs ``(n, b, …)``, weights ``(n, b)``."""

    def __init__(
        self, module: nn.Module, layout: Layout, precision: str = "fp32", *, objective: Objective = CROSS_ENTROPY
    ) -> None:
        super().__init__(module, layout, precision, objective=objective)
        # Made here, for inside vmap they would be wrapped in it, and stay so.
        trained = set(layout.names)
        self._fixed = {n: p.detach() for n, p in module.named_parameters() if n not in trained}
        self._fixed |= dict(module.named_buffers())

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """Return the gradients ``(n, …)`` of each client's mean minibatch loss with respect to one part."""
        self._buffers.restore()
        span = self.layout.span(part)
        before, after = weights[:, : span.start], weights[:, span.stop :]
        inputs, targets, counted = batch.inputs, batch.targets, batch.weights
        counted = torch.ones(targets.shape[:2], device=inputs.device) if counted is None else counted
        per_client = torch.func.vmap(torch.func.grad_and_value(self._client_loss, has_aux=True), randomness="error")
        vectors, (loss, right) = per_client(weights[:, span], before, after, inputs, targets, counted)
        return Gradient(vectors, loss.detach(), right.detach())

    def _client_loss(
        self, trained: Tensor, before: Tensor, after: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        parameters = dict(self.layout.views(torch.cat([before, trained, after]))) | self._fixed
        with layers_in(self.precision, inputs):
            logits = torch.func.functional_call(self.module, parameters, (inputs,))
        losses, right = self.objective(logits if self.precision == "fp32" else logits.float(), targets)
        return weighted_mean(losses, weights), weighted_mean(right, weights)


@dataclass
class LinearProblem:
    """A loss linear in the weights; a batch's inputs are its gradient ``(…, D)``."""

    layout: Layout

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """Return the constant gradient of one part."""
        zero = torch.zeros(weights.shape[:-1])
        return Gradient(batch.inputs[..., self.layout.span(part)].clone(), zero, zero)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A linear loss has one mode."""
        yield


@dataclass(frozen=True)
class LinearData:
    """Data of a client, or a block of clients, whose gradient ``(…, D)`` is the same at every step."""

    slope: Tensor
    most: int | None = None

    def batches(self, phase: int, steps: int) -> Iterator[Batch]:
        """Yield the same gradient at every step, of which there are ``most`` at most."""
        for _ in range(steps)[: self.most]:
            yield Batch(self.slope, torch.zeros(0))

    def everything(self) -> Iterator[tuple[Batch, Tensor]]:
        """Return the one batch, whose share of the data is 1."""
        yield Batch(self.slope, torch.zeros(0)), torch.ones(1)

    def class_shares(self, classes: int) -> Tensor:
        """Return all classes alike."""
        return torch.full((*self.slope.shape[:-1], classes), 1 / classes)


def layers_in(precision: str, inputs: Tensor) -> AbstractContextManager[object]:
    """Inside, layers compute in ``precision`` fp32 or bf16; their parameters stay as they are."""
    if precision == "fp32":
        return nullcontext()
    # On a GPU a weight is used once a pass.
    kind = inputs.device.type
    return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=kind == "cpu" and torch.is_autocast_cache_enabled())
