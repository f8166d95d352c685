"""Logits adjusted by what a client's own labels say, so that its message is about features and not about its labels.

Under label skew most of a client's update says which labels it has: the bias, and every feature's mean, are pushed
towards its own classes. Over all clients that cancels; in each client's clip it takes the place of the rest. With
τ·log π_i added to the logits, π_i the shares of the classes in the client's own data, a client's optimum no longer
follows π_i (Menon et al. 2021; between clients, Zhang et al. 2022). π_i stays with the client: only its update, clipped
as any, is about it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedflat.core.checks import in_range, wrong
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, GradientFn, LocalView, ServerView


@dataclass(frozen=True)
class LabelPrior:
    """The gradient with the last layer's bias moved by τ·log((π_i + s)/(1 + K·s)), and none along that bias.

    strength: τ ≥ 0; 0 only leaves the bias alone. absent: s > 0, what a class counts that a client does not have.
    The last of the shared tensors is taken to be the bias, of length K.

    >>> view = LocalView(torch.zeros(3), 1.0, 1, 0.1, tensors=(slice(0, 1), slice(1, 3)))
    >>> LabelPrior(strength=1.0, absent=0.01)(lambda w: 2 * w, view)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([2., 0., 0.])
    """

    strength: float
    absent: float

    def __call__(self, gradient: GradientFn, view: LocalView) -> GradientFn:
        bias = view.tensors[-1]
        classes = bias.stop - bias.start
        shares = (view.shares(classes) + self.absent) / (1 + classes * self.absent)
        around = (bias.start, view.start.shape[-1] - bias.stop)
        shift = torch.nn.functional.pad(self.strength * torch.log(shares), around)
        kept = 1 - torch.nn.functional.pad(torch.ones_like(shares), around)

        def adjusted(w: Tensor) -> Tensor:
            return gradient(w + shift) * kept

        return adjusted


@dataclass(frozen=True)
class HoldBias:
    """The server step that drops what the noisy mean has for the last layer's bias: noise alone, if clients leave it.

    >>> view = ServerView(0, 1, 0.1, (slice(0, 1), slice(1, 3)), {}, cohort=5.0, clients=50)
    >>> HoldBias()(torch.tensor([1.0, 2.0, 3.0]), view)
    (tensor([1., 0., 0.]), {})
    """

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        held = mean.clone()
        held[view.tensors[-1]] = 0
        return held, {}


def check_bias(algorithm: Algorithm, module: nn.Module, layout: Layout, inputs: Tensor) -> None:
    """Raise InputError for a method that holds the last bias on a module whose last shared tensor is another: what is
    added to it must come out as it went in, up to a constant in each row. inputs: made up, ``(b, …)``.

    >>> from fedflat.core.params import layout_of
    >>> model = nn.Linear(2, 3)
    >>> check_bias(Algorithm("held", server=(HoldBias(),)), model, layout_of(model), torch.zeros(1, 2))
    """
    if not any(isinstance(step, HoldBias) for step in algorithm.server):
        return
    name = layout.names[layout.shared - 1]
    tried = copy.deepcopy(module).eval()
    bias = dict(tried.named_parameters())[name]
    with torch.no_grad():
        before = tried(inputs).double()
        added = torch.arange(1.0, bias.numel() + 1).to(bias)
        moved = before.shape == (len(inputs), bias.numel()) and bias.dim() == 1
        if moved:
            bias.add_(added)
            rest = tried(inputs).double() - before - added
            moved = bool((rest - rest.mean(-1, keepdim=True)).abs().max() < 1e-3 * len(added))
    if not moved:
        found = f"{algorithm.name} on a model whose last tensor, {name}, is not the bias of its outputs"
        raise wrong("algorithm", found, "a model that ends in a linear layer with a bias")


def label_prior(strength: float = 1.0, absent: float = 0.01) -> LabelPrior:
    """Logit adjustment with ``strength`` τ ≥ 0 and ``absent`` s in (0, 1] (Menon et al. 2021); raises InputError.

    >>> label_prior(0.5)
    LabelPrior(strength=0.5, absent=0.01)
    """
    return LabelPrior(
        in_range("algorithm.strength", strength, 0),
        in_range("algorithm.absent", absent, 0, 1, open_low=True),
    )
