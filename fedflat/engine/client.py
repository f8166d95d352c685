"""The only local training loop. It serves one client ``(D,)`` and a block of clients ``(n, D)`` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.core.params import Layout
from fedflat.core.personal import NOTHING, Own
from fedflat.core.types import Algorithm, Broadcast, Local, LocalView, Phase, UpdateView, whole_gradient
from fedflat.engine.problem import Batch, Gradient, Problem


class LocalData(Protocol):
    """A client's (or a block's) own data, as the local loop asks for it."""

    def batches(self, phase: int, steps: int) -> Iterable[Batch]:
        """K reshuffled minibatches for a phase, fresh for each phase."""

    def everything(self) -> Iterable[tuple[Batch, Tensor]]:
        """All of the client's data in pieces, each with the share ``(…, 1)`` it has of the whole."""


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
    own: Own = NOTHING,
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
    own: Own,
) -> None:
    """K steps of momentum SGD with the phase's gradient rule, in place on the phase's part of ``weights``."""
    part = weights[..., problem.layout.span(phase.part)]
    start = part.clone()
    shared = phase.part != "personal"
    rule = phase.rule or whole_gradient
    momentum = local.momentum if phase.momentum is None else phase.momentum
    lr = rate_of(phase, local, broadcast)
    view = LocalView(
        start=start,
        clip=broadcast.clip,
        steps=steps_of(phase, local),
        lr=lr,
        broadcast=broadcast.vectors if shared else {},
        state=own.state if shared else {},
        generator=own.generator,
    )
    buffer: Tensor | None = None
    for batch in data.batches(index, view.steps):
        gradient = rule(_loss_gradient(problem, phase, local, weights, batch, record), view)(part)
        gradient = _like(gradient, part, f"algorithm.phases[{index}].rule")
        if momentum:
            buffer = gradient.clone() if buffer is None else buffer.mul_(momentum).add_(gradient)
            gradient = buffer
        if isinstance(lr, Tensor):
            part.addcmul_(gradient, lr, value=-1.0)
        else:
            part.sub_(gradient, alpha=lr)


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
        vector = vector * (local.max_grad_norm / norm.clamp_min(1e-12)).clamp(max=1.0)
    return vector.add(at, alpha=local.weight_decay) if local.weight_decay else vector


def local_gradient(problem: Problem, weights: Tensor, data: LocalData) -> Tensor:
    """Gradient ``(…, d)`` of a client's whole loss at its final weights, in evaluation mode, without any penalty.

    LUS scores entries by it (Cheng et al. 2022, Eq. 11).
    """
    total = torch.zeros_like(weights[..., problem.layout.span("shared")])
    with problem.evaluating():  # type: ignore[attr-defined]
        for batch, share in data.everything():
            total += problem.gradient(weights, "shared", batch).vector * share
    return total
