"""Compute measures of the public test set by name (``evaluation.metrics``), by scikit-learn where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.checks import one_of, wrong
from fedflat.core.loss import IGNORE


@dataclass(frozen=True)
class Measure:
    """tasks: those it is for. of: (outputs, targets) of the whole test set -> the number."""

    tasks: tuple[str, ...]
    of: Callable[[Tensor, Tensor], float]


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


MEASURES: Mapping[str, Measure] = {
    "f1": Measure(("classification", "multilabel"), f1),
    "auc": Measure(("classification", "multilabel"), auc),
    "balanced_accuracy": Measure(("classification",), balanced_accuracy),
    "top5": Measure(("classification",), top5),
    "perplexity": Measure(("next-token",), perplexity),
    "mae": Measure(("regression",), mae),
    "rmse": Measure(("regression",), rmse),
    "r2": Measure(("regression",), r2),
}


def named(where: str, names: tuple[str, ...], task: str) -> dict[str, Callable[[Tensor, Tensor], float]]:
    """Return the measures of these names. Raises InputError for a name that is not here or not of the task."""
    for name in names:
        measure = MEASURES[one_of(where, name, MEASURES)]
        if task not in measure.tasks:
            of_task = ", ".join(key for key, each in MEASURES.items() if task in each.tasks)
            raise wrong(where, f"{name}, which is for {' and '.join(measure.tasks)}", f"for task {task}: {of_task}")
    return {name: MEASURES[name].of for name in names}
