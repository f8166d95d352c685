"""The only local training loop. It serves one client ``(D,)`` and a block of clients ``(n, D)`` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.core.params import Layout
from fedflat.core.personal import NOTHING, ClientContext
from fedflat.core.types import Algorithm, Broadcast, Local, LocalView, Phase, UpdateView, plain_gradient
from fedflat.engine.problem import Batch, Gradient, Problem


class LocalData(Protocol):
    """A client's (or a block's) own data, as the local loop asks for it."""

    def batches(self, phase: int, steps: int) -> Iterable[Batch]:
        """K reshuffled minibatches for a phase, fresh for each phase."""

    def everything(self) -> Iterable[tuple[Batch, Tensor]]:
        """All of the client's data in pieces, each with the share ``(…, 1)`` it has of the whole."""

    def class_shares(self, classes: int) -> Tensor:
        """Shares of the classes ``(…, K)`` among the client's examples; zero for a client without any."""


TINY = 1e-12
"""Least norm that a clipped gradient is divided by: a zero gradient stays zero instead of becoming NaN."""


@dataclass(frozen=True)
class LocalResult:
    """What a client has after local training. ``message`` ``(…, d)`` is sent (after the clip), the rest stays."""

    message: Tensor
    personal: Tensor
    loss: Tensor
    accuracy: Tensor


@dataclass
class _Record:
    """First-pass loss and accuracy of each step, averaged at the end."""

    loss: list[Tensor] = field(default_factory=list)
    accuracy: list[Tensor] = field(default_factory=list)


def train_client(
    algorithm: Algorithm,
    problem: Problem,
    broadcast: Broadcast,
    local: Local,
    data: LocalData,
    weights: Tensor,
    own: ClientContext = NOTHING,
) -> LocalResult:
    """Local phases, update, mask and transforms of a client (docs/specification.md, "The round", steps 3 and 4).

    weights: ``(…, D)`` with w^t in the shared part and the client's own head behind it; it is overwritten.
    """
    layout, record = problem.layout, _Record()
    for index, phase in enumerate(algorithm.phases):
        _run_phase(phase, index, problem, broadcast, local, data, weights, record, own)
    shared = layout.span("shared")
    update = weights[..., shared] - broadcast.shared
    if broadcast.mask is not None:
        update = update * broadcast.mask
    phase = algorithm.shared_phase
    view = UpdateView(
        tensors=layout.tensors("shared"),
        gradient=lambda: local_gradient(problem, weights, data),
        steps=steps_of(phase, local),
        lr=rate_of(phase, local, broadcast),
        broadcast=broadcast.vectors,
        state=own.state,
        generator=own.generator,
        examples=lambda: examples_of(data, weights),
    )
    last, like = len(algorithm.transforms) - 1, update
    for index, transform in enumerate(algorithm.transforms):
        if index == last and algorithm.vectors > 1:
            like = update.new_empty(*update.shape[:-1], algorithm.vectors * update.shape[-1])
        update = _like(transform(update, view), like, f"algorithm.transforms[{index}]")
    zero = weights.new_zeros(weights.shape[:-1])
    loss = torch.stack(record.loss).mean(0) if record.loss else zero
    accuracy = torch.stack(record.accuracy).mean(0) if record.accuracy else zero
    return LocalResult(update, weights[..., layout.span("personal")], loss, accuracy)


def _like(found: Tensor, given: Tensor, name: str) -> Tensor:
    """What a piece returned, if it has the form of what it was given; a trial cannot see what only some data bring."""
    if not hasattr(found, "shape") or found.shape != given.shape or not found.is_floating_point():
        told = tuple(found.shape) if hasattr(found, "shape") else type(found).__name__
        raise wrong(name, f"{told} returned for {tuple(given.shape)}", "numbers of the same shape")
    return found


def steps_of(phase: Phase, local: Local) -> int:
    """The public number of steps K of a phase."""
    return local.steps if phase.steps is None else phase.steps


def rate_of(phase: Phase, local: Local, broadcast: Broadcast) -> float:
    """η_t of a phase: its learning rate times the round's decay (a tensor ``()`` inside a recorded graph)."""
    return (local.lr if phase.lr is None else phase.lr) * broadcast.rate


def _run_phase(
    phase: Phase,
    index: int,
    problem: Problem,
    broadcast: Broadcast,
    local: Local,
    data: LocalData,
    weights: Tensor,
    record: _Record,
    own: ClientContext,
) -> None:
    """K steps of the local optimiser with the phase's gradient rule, in place on the phase's part of ``weights``."""
    part = weights[..., problem.layout.span(phase.part)]
    start = part.clone()
    shared = phase.part != "personal"
    rule = phase.rule or plain_gradient
    direction = _directions(local, phase)
    lr = rate_of(phase, local, broadcast)
    view = LocalView(
        start=start,
        clip=broadcast.clip,
        steps=steps_of(phase, local),
        lr=lr,
        broadcast=broadcast.vectors if shared else {},
        state=own.state if shared else {},
        generator=own.generator,
        tensors=problem.layout.tensors("shared") if shared else (),
        shares=data.class_shares,
    )
    for batch in data.batches(index, view.steps):
        gradient = rule(_loss_gradient(problem, phase, local, weights, batch, record), view)(part)
        gradient = _like(gradient, part, f"algorithm.phases[{index}].rule")
        along = direction(gradient)
        if isinstance(lr, Tensor):
            part.addcmul_(along, lr, value=-1.0)
        else:
            part.sub_(along, alpha=lr)


def _directions(local: Local, phase: Phase) -> Callable[[Tensor], Tensor]:
    """Gradient of a step -> what the step goes along; its memory begins with the phase."""
    if local.optimizer == "adam":
        return _adam()
    momentum = local.momentum if phase.momentum is None else phase.momentum
    if not momentum:
        return lambda gradient: gradient
    kept: list[Tensor] = []

    def heavy_ball(gradient: Tensor) -> Tensor:
        kept[:] = [kept[0].mul_(momentum).add_(gradient) if kept else gradient.clone()]
        return kept[0]

    return heavy_ball


def _adam(first: float = 0.9, second: float = 0.999, floor: float = 1e-8) -> Callable[[Tensor], Tensor]:
    """Adam's direction (Kingma and Ba 2015, Algorithm 1): bias-corrected mean over root mean square, per coordinate."""
    kept: list[Tensor] = []
    step = 0

    def along(gradient: Tensor) -> Tensor:
        nonlocal step
        if not kept:
            kept.extend([torch.zeros_like(gradient), torch.zeros_like(gradient)])
        step += 1
        mean = kept[0].mul_(first).add_(gradient, alpha=1 - first)
        square = kept[1].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return mean / (1 - first**step) / ((square / (1 - second**step)).sqrt_().add_(floor))

    return along


def _loss_gradient(
    problem: Problem, phase: Phase, local: Local, weights: Tensor, batch: Batch, record: _Record
) -> Callable[[Tensor], Tensor]:
    """The minibatch gradient function of one step; only its first evaluation is recorded as the step's loss."""
    first = True

    def gradient(at: Tensor) -> Tensor:
        nonlocal first
        found = problem.gradient(_with_part(weights, at, problem.layout, phase), phase.part, batch)
        if first:
            record.loss.append(found.loss)
            record.accuracy.append(found.accuracy)
            first = False
        return _with_aids(found, at, local)

    return gradient


def _with_part(weights: Tensor, at: Tensor, layout: Layout, phase: Phase) -> Tensor:
    """The whole vector with one part replaced; no copy when the part is the whole, or is in place already."""
    span = layout.span(phase.part)
    if at.data_ptr() == weights[..., span].data_ptr() and at.shape == weights[..., span].shape:
        return weights
    if at.shape[-1] == layout.size:
        return at
    return torch.cat([weights[..., : span.start], at, weights[..., span.stop :]], dim=-1)


def _with_aids(found: Gradient, at: Tensor, local: Local) -> Tensor:
    """Gradient-norm clipping, then weight decay: training aids on the loss gradient, before any mixing."""
    vector = found.vector
    if local.max_grad_norm is not None:
        norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        vector = vector * (local.max_grad_norm / norm.clamp_min(TINY)).clamp(max=1.0)
    return vector.add(at, alpha=local.weight_decay) if local.weight_decay else vector


def examples_of(data: LocalData, weights: Tensor) -> Tensor:
    """How many examples a client, or each of a block, has ``(…, 1)``."""
    total = weights.new_zeros((*weights.shape[:-1], 1))
    for batch, _ in data.everything():
        total += len(batch.targets) if batch.weights is None else batch.weights.sum(-1, keepdim=True)
    return total


def local_gradient(problem: Problem, weights: Tensor, data: LocalData) -> Tensor:
    """Gradient ``(…, d)`` of a client's whole loss at its final weights, in evaluation mode, without any penalty.

    LUS scores entries by it (Cheng et al. 2022, Eq. 11).
    """
    total = torch.zeros_like(weights[..., problem.layout.span("shared")])
    with problem.evaluating():  # type: ignore[attr-defined]
        for batch, share in data.everything():
            total += problem.gradient(weights, "shared", batch).vector * share
    return total
