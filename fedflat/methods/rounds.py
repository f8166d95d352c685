"""Make ``RoundParts``, what a recipe's method brings to each round: clip and first threshold, noise, server optimiser,
average, whether clients count by their examples. Refuse models whose logits a method cannot adjust.
"""

import copy
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedflat.config.method import constant_clip, is_published, server_of
from fedflat.config.recipe import Recipe
from fedflat.core import Layout, Objective, require, squared_by_class, wrong
from fedflat.core.types import Algorithm, Average, Clip, Local, MeanView, Optimizer
from fedflat.engine.job import RoundParts
from fedflat.methods import shares
from fedflat.methods.noise import mechanism_of
from fedflat.methods.published import Published
from fedflat.pieces import server as steps
from fedflat.pieces.clipping import Adaptive, MethodScale, per_tensor, whole_vector
from fedflat.pieces.gradients import HoldBias, LabelPrior
from fedflat.privacy.plan import Plan


def parts_of(recipe: Recipe, method: Algorithm, plan: Plan, local: Local, layout: Layout) -> tuple[RoundParts, float]:
    """Return what the server and the clients agree on, and the first threshold."""
    paper = plan.mechanism if isinstance(plan.mechanism, Published) else None
    clip, threshold = _clip(recipe, method, layout) if paper is None else shares.clip_of(paper, layout)
    parts = RoundParts(
        algorithm=method, plan=plan, clip=clip, mechanism=mechanism_of(recipe, plan),
        optimizer=_optimizer(recipe, method), local=local, layout=layout,
        weighted=weighted(recipe, method), average=_average(recipe, method),
    )  # fmt: skip
    return parts if paper is None else shares.parts_of(parts, paper), threshold


def scaling_clip(rule: Callable[[Tensor, float], Tensor]) -> Clip:
    """Return the clip of a method that scales messages itself: its factor of a norm, and the clip at C behind it."""
    return MethodScale(rule)


def _clip(recipe: Recipe, method: Algorithm, layout: Layout) -> tuple[Clip, float]:
    """Return the clip and its first threshold C; non-private twins clip nothing."""
    if not method.private:
        return whole_vector(math.inf), math.inf
    setting = recipe.privacy.clipping
    if method.scale is not None:
        return scaling_clip(method.scale), constant_clip(recipe, f"{method.name}, which scales messages itself")
    if setting.initial is not None:
        return Adaptive(setting.initial, setting.quantile), setting.initial
    if setting.values is not None:
        clip = per_tensor(setting.values, layout.shared * method.vectors)
        return clip, clip.threshold
    if setting.value is None:
        allowed = "a number > 0, {kind: adaptive, initial: …} or {kind: per-tensor, values: …}"
        raise wrong("privacy.clip", setting.kind, allowed)
    return whole_vector(setting.value), setting.value


def _optimizer(recipe: Recipe, method: Algorithm) -> Callable[[MeanView], Optimizer]:
    """Return the server optimiser of each round: the method's own, or the recipe's, which asks nothing of the noise."""
    server = server_of(recipe, method).model_dump()
    if method.optimizer is not None:
        return functools.partial(method.optimizer, server["lr"])
    if server["optimizer"] == "sgd":
        return lambda view: steps.Sgd(server["lr"], server["momentum"])
    return lambda view: steps.Adaptive(server["optimizer"], *(server[key] for key in ("lr", "beta1", "beta2", "tau")))


def _average(recipe: Recipe, method: Algorithm) -> Average | None:
    """Return what is released of the server's iterates; None: the last one."""
    server, keep = recipe.server, recipe.evaluation.keep
    beside = method.name if server.average == "none" else "server.average"
    plain = server.average == "none" and method.head is None and method.kind != "votes"
    require(keep == "last" or plain, "evaluation.keep", f"{keep} with {beside}", "last")
    if server.average == "none":
        return None
    average = f"{server.average} with privacy.protocol: published"
    require(not is_published(recipe, method), "server.average", average, "none")
    return steps.TailAverage(recipe.rounds) if server.average == "tail" else steps.MovingAverage(server.decay)


def weighted(recipe: Recipe, method: Algorithm) -> bool:
    """Sample weights make the sensitivity depend on data sizes: only non-private twins may use them."""
    samples, hint = recipe.server.weights == "samples", "Weights n_i make the sensitivity depend on data sizes."
    require(not samples or not method.private, "server.weights", "samples", "uniform for a private method", hint=hint)
    return samples


def check_logits(
    method: Algorithm, objective: Objective, module: nn.Module, layout: Layout, inputs: Tensor, targets: Tensor
) -> None:
    """Raise InputError where a method adjusts logits that no softmax follows; or holds the last bias, and targets are
    no classes ``(n,)``, or what is added to the last shared tensor does not come out as it went in, up to a constant in
    each row. inputs: made up, ``(b, …)``.
    """
    adjusted = objective.own is squared_by_class and any(isinstance(phase.rule, LabelPrior) for phase in method.phases)
    require(not adjusted, "loss", f"squared with {method.name}", "cross-entropy, whose logits it adjusts")
    if not any(isinstance(step, HoldBias) for step in method.server):
        return
    classes = targets.dim() == 1 and not targets.is_floating_point()
    require(classes, "algorithm", f"{method.name} with targets that are no classes", "a classification")
    name = layout.names[layout.shared - 1]
    tried = copy.deepcopy(module).eval()
    bias = dict(tried.named_parameters())[name]
    with torch.no_grad():
        before = tried(inputs).double()
        added = torch.arange(1.0, bias.numel() + 1).to(bias)
        moved = before.shape == (len(inputs), bias.numel()) and bias.dim() == 1
        if moved:
            bias.add_(added)
            residual = tried(inputs).double() - before - added  # a constant in each row changes no softmax
            moved = bool((residual - residual.mean(-1, keepdim=True)).abs().max() < 1e-3 * len(added))
    found = f"{method.name} on a model whose last tensor, {name}, is not the bias of its outputs"
    require(moved, "algorithm", found, "a model that ends in a linear layer with a bias")
