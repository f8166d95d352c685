"""Train a client, or a block of clients, in the only local loop."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from fedflat.core import NOTHING, Algorithm, Broadcast, ClientContext, ClientView, GradientFn, Local, Phase, wrong
from fedflat.engine.factored import Declined, Factored
from fedflat.engine.problem import Batch, Gradient, Problem


class LocalData(Protocol):
    """A client's (or a block's) own data, as the local loop asks for it."""

    def batches(self, phase: int, steps: int) -> Iterable[Batch]:
        """K reshuffled minibatches for a phase, fresh for each phase."""

    def everything(self) -> Iterable[tuple[Batch, Tensor]]:
        """Return all of the client's data in pieces, each with the share ``(…, 1)`` it has of the whole."""

    def class_shares(self, classes: int) -> Tensor:
        """Return the shares of the classes ``(…, K)`` among the client's examples; zero for a client without any."""


TINY = 1e-12
"""Least norm that a clipped gradient is divided by: a zero gradient stays zero instead of becoming NaN."""


@dataclass(frozen=True)
class LocalResult:
    """What a client has after local training. ``message`` ``(…, d)`` is sent (after the clip), the rest stays."""

    message: Tensor
    personal: Tensor
    loss: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class _Client:
    """What one client's local training works with: all that is the same in each of its phases."""

    problem: Problem
    broadcast: Broadcast
    local: Local
    data: LocalData
    weights: Tensor
    context: ClientContext
    losses: list[Tensor] = field(default_factory=list)
    accuracies: list[Tensor] = field(default_factory=list)

    def view(self, phase: Phase, **more: Any) -> ClientView:
        """Return what a piece may see; in a phase of the personal part nothing of the server's vectors."""
        shared = phase.part != "personal"
        return ClientView(
            steps=steps_of(phase, self.local), lr=rate_of(phase, self.local, self.broadcast),
            broadcast=self.broadcast.vectors if shared else {}, state=self.context.state if shared else {},
            generator=self.context.generator, tensors=self.problem.layout.tensors("shared") if shared else (), **more,
        )  # fmt: skip

    def loss_gradient(self, phase: Phase, batch: Batch) -> GradientFn:
        """Return the minibatch gradient function of one step; only its first evaluation counts as the step's loss."""
        step = len(self.losses)

        def gradient(at: Tensor) -> Tensor:
            result = self.problem.gradient(self.with_part(at, phase), phase.part, batch)
            # SAM and the like ask several times a step; the first answer is the loss at the step's own weights.
            if len(self.losses) == step:
                self.losses.append(result.loss)
                self.accuracies.append(result.accuracy)
            return _with_aids(result, at, self.local)

        return gradient

    def with_part(self, at: Tensor, phase: Phase) -> Tensor:
        """Return all weights with one part replaced; no copy when the part is the whole, or is in place already."""
        span, weights = self.problem.layout.span(phase.part), self.weights
        # Local SGD moves ``weights`` in place, so a part that is where it was needs no copy.
        if at.data_ptr() == weights[..., span].data_ptr() and at.shape == weights[..., span].shape:
            return weights
        if at.shape[-1] == self.problem.layout.size:
            return at
        return torch.cat([weights[..., : span.start], at, weights[..., span.stop :]], dim=-1)

    def message(self, algorithm: Algorithm) -> Tensor:
        """Return the update of the shared part under the common mask, after the algorithm's transforms."""
        update: Any = self.weights[..., self.problem.layout.span("shared")] - self.broadcast.shared
        try:
            return self._transformed(algorithm, update)
        except Declined:  # what needs coordinates gets the vectors written out
            return self._transformed(algorithm, update.dense())

    def _transformed(self, algorithm: Algorithm, update: Tensor) -> Tensor:
        if self.broadcast.mask is not None:
            update = update * self.broadcast.mask
        view = self.view(algorithm.shared_phase, gradient=lambda: self.whole_gradient, examples=self.examples)
        last, like = len(algorithm.transforms) - 1, update
        for index, transform in enumerate(algorithm.transforms):
            if index == last and algorithm.vectors > 1:
                like = update.new_empty(*update.shape[:-1], algorithm.vectors * update.shape[-1])
            update = _like(transform(update, view), like, f"algorithm.transforms[{index}]")
        return update

    @cached_property
    def whole_gradient(self) -> Tensor:
        """The gradient ``(…, d)`` of the client's whole loss at its final weights, in evaluation mode, without
        any penalty: LUS scores entries by it (Cheng et al. 2022, Eq. 11).
        """
        total = torch.zeros_like(self.weights[..., self.problem.layout.span("shared")])
        with self.problem.evaluating():
            for batch, share in self.data.everything():
                total += self.problem.gradient(self.weights, "shared", batch).vector * share
        return total.dense() if isinstance(total, Factored) else total

    def examples(self) -> Tensor:
        """Return how many examples the client, or each of a block, has ``(…, 1)``."""
        total = self.weights.new_zeros((*self.weights.shape[:-1], 1))
        for batch, _ in self.data.everything():
            total += len(batch.targets) if batch.weights is None else batch.weights.sum(-1, keepdim=True)
        return total

    def mean(self, values: list[Tensor]) -> Tensor:
        """Return the mean over the steps ``(…)``; zero without any."""
        return torch.stack(values).mean(0) if values else self.weights.new_zeros(self.weights.shape[:-1])


def train_client(
    algorithm: Algorithm, problem: Problem, broadcast: Broadcast, local: Local, data: LocalData, weights: Tensor,
    context: ClientContext = NOTHING,
) -> LocalResult:  # fmt: skip
    """Local phases, update, mask and transforms of a client (docs/specification.md, "The round", steps 3 and 4).

    weights: ``(…, D)`` with w^t in the shared part and the client's own head behind it; it is overwritten.
    """
    layout, client = problem.layout, _Client(problem, broadcast, local, data, weights, context)
    for index, phase in enumerate(algorithm.phases):  # K steps of each, in place on its part of ``weights``
        part = weights[..., layout.span(phase.part)]
        start = part.clone() if phase.rule else part  # the plain gradient looks at no start: a copy saved
        view = client.view(phase, start=start, clip=broadcast.clip, shares=data.class_shares)
        direction = _directions(local, phase)
        for batch in data.batches(index, view.steps):
            slope = client.loss_gradient(phase, batch)
            gradient = (phase.rule(slope, view) if phase.rule else slope)(part)
            part.sub_(direction(_like(gradient, part, f"algorithm.phases[{index}].rule")), alpha=view.lr)
    message, personal = client.message(algorithm), weights[..., layout.span("personal")]
    return LocalResult(message, personal, client.mean(client.losses), client.mean(client.accuracies))


def _like(returned: Tensor, expected: Tensor, name: str) -> Tensor:
    """Return what a piece returned, if its form is the expected one; a trial cannot see what only some data bring."""
    if not hasattr(returned, "shape") or returned.shape != expected.shape or not returned.is_floating_point():
        form = tuple(returned.shape) if hasattr(returned, "shape") else type(returned).__name__
        raise wrong(name, f"{form} returned for {tuple(expected.shape)}", "numbers of the same shape")
    return returned


def steps_of(phase: Phase, local: Local) -> int:
    """Return the public number of steps K of a phase."""
    return local.steps if phase.steps is None else phase.steps


def rate_of(phase: Phase, local: Local, broadcast: Broadcast) -> float:
    """η_t of a phase: its learning rate times the round's decay."""
    return (local.lr if phase.lr is None else phase.lr) * broadcast.rate


def _directions(local: Local, phase: Phase) -> Callable[[Tensor], Tensor]:
    """Gradient of a step -> what the step goes along; its memory begins with the phase."""
    if local.optimizer == "adam":
        return _adam()
    momentum = local.momentum if phase.momentum is None else phase.momentum
    if not momentum:
        return lambda gradient: gradient
    velocity: list[Tensor] = []

    def heavy_ball(gradient: Tensor) -> Tensor:
        # In place: a vector of the model's size per step would cost more than the product.
        velocity[:] = [velocity[0].mul_(momentum).add_(gradient) if velocity else gradient.clone()]
        return velocity[0]

    return heavy_ball


def _adam(first: float = 0.9, second: float = 0.999, floor: float = 1e-8) -> Callable[[Tensor], Tensor]:
    """Adam's direction (Kingma and Ba 2015, Algorithm 1): bias-corrected mean over root mean square, per coordinate."""
    moments: list[Tensor] = []
    step = 0

    def along(gradient: Tensor) -> Tensor:
        nonlocal step
        if not moments:
            moments.extend([torch.zeros_like(gradient), torch.zeros_like(gradient)])
        step += 1
        mean = moments[0].mul_(first).add_(gradient, alpha=1 - first)
        square = moments[1].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return mean / (1 - first**step) / ((square / (1 - second**step)).sqrt_().add_(floor))

    return along


def _with_aids(result: Gradient, at: Tensor, local: Local) -> Tensor:
    """Gradient-norm clipping, then weight decay: training aids on the loss gradient, before any mixing."""
    vector = result.vector
    if local.max_grad_norm is not None:
        norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        vector = vector * (local.max_grad_norm / norm.clamp_min(TINY)).clamp(max=1.0)
    return vector.add(at, alpha=local.weight_decay) if local.weight_decay else vector
