"""Compute measures of the public test set by name (``evaluation.metrics``), by scikit-learn where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.checks import one_of, require
from fedflat.core.loss import IGNORE


def _right_side(outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    """Predicted and true class numbers, or labels."""
    if targets.dim() == 1:
        return targets.numpy(), outputs.argmax(-1).numpy()
    return (targets > 0.5).numpy(), (outputs > 0).numpy()


def f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 score of each class, or label, averaged without weights (macro)."""
    from sklearn.metrics import f1_score

    return float(f1_score(*_right_side(outputs, targets), average="macro", zero_division=0))


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share right of each class of the test set, averaged without weights."""
    from sklearn.metrics import recall_score

    return float(recall_score(*_right_side(outputs, targets), average="macro", labels=targets.unique().numpy()))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve: of class 1 among two, of each class against the rest or of each label (mean of those
    for which the test set has both kinds of examples)."""
    from sklearn.metrics import roc_auc_score

    if targets.dim() > 1:
        chances, truth = outputs.double(), (targets > 0.5)
    else:
        chances, truth = outputs.double().softmax(-1), F.one_hot(targets, outputs.shape[-1]).bool()
        if outputs.shape[-1] == 2:
            chances, truth = chances[:, 1:], truth[:, 1:]
    # A class that is everywhere or nowhere in the test set has no curve.
    both = truth.any(0) & ~truth.all(0)
    if not bool(both.any()):
        return math.nan
    found = [roc_auc_score(truth[:, i].numpy(), chances[:, i].numpy()) for i in both.nonzero().flatten().tolist()]
    return float(sum(found) / len(found))


def top5(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose class is among the five likeliest."""
    best = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    return float((best == targets[:, None]).any(-1).double().mean())


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """exp of the mean cross-entropy over every token that counts."""
    loss = F.cross_entropy(outputs.flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORE)
    return float(torch.exp(loss))


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.reshape(targets.shape).double() - targets.double()


def mae(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error."""
    return float(_errors(outputs, targets).abs().mean())


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error."""
    return float(_errors(outputs, targets).square().mean().sqrt())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that is explained; mean over several targets."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets.numpy(), outputs.reshape(targets.shape).numpy()))


CLASSES, LABELS, TOKENS, NUMBERS = "classification", "multilabel", "next-token", "regression"
MEASURES: dict[str, tuple[Callable[[Tensor, Tensor], float], tuple[str, ...]]] = {
    "f1": (f1, (CLASSES, LABELS)),
    "auc": (auc, (CLASSES, LABELS)),
    "balanced_accuracy": (balanced_accuracy, (CLASSES,)),
    "top5": (top5, (CLASSES,)),
    "perplexity": (perplexity, (TOKENS,)),
    "mae": (mae, (NUMBERS,)),
    "rmse": (rmse, (NUMBERS,)),
    "r2": (r2, (NUMBERS,)),
}
"""Each measure by name: (outputs, targets) of the whole test set -> the number; and the tasks it is for."""


def named(where: str, names: tuple[str, ...], task: str) -> dict[str, Callable[[Tensor, Tensor], float]]:
    """Return the measures of these names. Raises InputError for a name that is not here or not of the task."""
    fitting = ", ".join(name for name, (_, tasks) in MEASURES.items() if task in tasks)
    for name in names:
        _, tasks = MEASURES[one_of(where, name, MEASURES)]
        found = f"{name}, which is for {' and '.join(tasks)}"
        require(task in tasks, where, found, f"for task {task}: {fitting}")
    return {name: MEASURES[name][0] for name in names}
