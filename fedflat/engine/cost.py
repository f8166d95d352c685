"""What a round costs a client: gradient passes (as Liu et al. 2025, Table I, counts them) and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.core.types import Algorithm, LocalView, Phase, UpdateView, broadcast_by

FLOAT = 4
"""Bytes of a coordinate of what is sent and received."""
_SMALL = 8
"""Length of the vector on which pieces are tried out."""


@dataclass(frozen=True)
class Cost:
    """One round of one client.

    per_step: gradient passes of a local step of the shared part: 1 for SGD, 2 for SAM. passes: minibatch gradients in
    all, phases and transforms together. up, down: bytes of dense float32 vectors: the message, and the shared weights
    with what the server's steps broadcast. Compression, encryption and votes are not in it.
    """

    per_step: int
    passes: int
    up: int
    down: int


def cost_of(method: Algorithm, dimension: int, steps: int, batches: int = 1) -> Cost:
    """The cost of a round of ``method`` with d = ``dimension`` shared parameters and K = ``steps``.

    batches: minibatches in a client's data; a transform that asks for the gradient of the full local loss (LUS) costs
    as many passes. Pieces are tried on a vector of ones, so those that pass more often on some data count as on that.
    """
    phases = [(count_passes(phase, method), steps if phase.steps is None else phase.steps) for phase in method.phases]
    full = batches * _transform_gradients(method)
    sent = len(broadcast_by((*method.server, method.optimizer)))
    return Cost(
        per_step=count_passes(method.shared_phase, method),
        passes=sum(passes * count for passes, count in phases) + full,
        up=FLOAT * dimension * method.vectors,
        down=FLOAT * dimension * (1 + sent) + (math.ceil(dimension / 8) if method.mask is not None else 0),
    )


def count_passes(phase: Phase, method: Algorithm) -> int:
    """How often one local step of a phase asks for the minibatch's gradient."""
    counted, gradient = _counter()
    if phase.rule is None:
        return 1
    phase.rule(gradient, _view(method))(torch.ones(_SMALL))
    return len(counted)


def _transform_gradients(method: Algorithm) -> int:
    counted, gradient = _counter()
    named = _view(method)
    view = UpdateView(
        (slice(0, _SMALL),), lambda: gradient(torch.ones(_SMALL)), 1, 0.1, named.broadcast, named.state,
    )  # fmt: skip
    update = torch.ones(_SMALL)
    for transform in method.transforms:
        update = transform(update, view)
    return len(counted)


def _counter() -> tuple[list[int], Callable[[Tensor], Tensor]]:
    counted: list[int] = []

    def gradient(weights: Tensor) -> Tensor:
        counted.append(1)
        return torch.ones_like(weights)

    return counted, gradient


def _view(method: Algorithm) -> LocalView:
    ones = torch.ones(_SMALL)
    names = broadcast_by((*method.server, method.optimizer))
    return LocalView(
        start=torch.zeros(_SMALL), clip=1.0, steps=1, lr=0.1,
        broadcast=dict.fromkeys(names, ones), state={state.name: ones for state in method.client_state},
        tensors=(slice(0, _SMALL - 1), slice(_SMALL - 1, _SMALL)),
    )  # fmt: skip
