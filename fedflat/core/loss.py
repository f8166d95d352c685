"""Compute what local training and evaluation minimise: each example's loss, for each task, and its score."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
CustomLoss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a minibatch -> the loss of each example ``(b,)``."""


@dataclass(frozen=True)
class Objective:
    """Outputs and targets of b examples -> loss ``(b,)`` and score ``(b,)`` of each.

    ========================  ======================================  =============================================
    task                      targets                                 loss; score
    ========================  ======================================  =============================================
    classification            ``(b,)`` class numbers                  cross-entropy; right or not
    next-token                ``(b, T)`` token ids, -100: none        cross-entropy, mean over tokens; share right
    multilabel                ``(b, L)`` float32 in [0, 1]            binary cross-entropy, mean over labels; share
                                                                      of labels on their side of 0
    regression                ``(b,)`` or ``(b, k)`` float32          squared error, mean over k; none (NaN)
    ========================  ======================================  =============================================

    own: a loss of the user's own instead of the task's.
    """

    task: str = "classification"
    own: CustomLoss | None = None

    @property
    def cross_entropy(self) -> bool:
        """Whether it is the cross-entropy that hand-written gradients are of."""
        return self.own is None and self.task in ("classification", "next-token")

    @property
    def scored(self) -> bool:
        """Whether there is a share of right answers, an accuracy."""
        return self.task != "regression"

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and score of each example."""
        loss = (_LOSSES[self.task] if self.own is None else self.own)(outputs, targets)
        return loss, _score(self.task, outputs.detach(), targets, loss.detach())


CROSS_ENTROPY = Objective()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy ``(b,)`` of each example.

    logits ``(b, V)`` with targets ``(b,)``, or ``(b, T, V)`` with ``(b, T)`` (mean over the tokens that are not -100).
    """
    if logits.dim() == 2:
        return F.cross_entropy(logits, targets, reduction="none")
    tokens = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORE)
    return tokens.sum(-1) / _counted(targets, logits).sum(-1).clamp_min(1)


def _counted(targets: Tensor, like: Tensor) -> Tensor:
    return (targets != IGNORE).to(like.dtype)


def _right(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether each example's class is right, or which share of its tokens that count."""
    right = (logits.argmax(-1) == targets).to(logits.dtype)
    if targets.dim() == 1:
        return right
    counted = _counted(targets, logits)
    return (right * counted).sum(-1) / counted.sum(-1).clamp_min(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """``(b,)``: mean over an example's values; outputs ``(b, 1)`` also serve targets ``(b,)``."""
    # Broadcast, (b, 1) against (b,) would be (b, b) errors, without a word.
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    errors = (outputs - targets).square()
    return errors if errors.dim() == 1 else errors.flatten(1).mean(-1)


def squared_by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖z − (y − 1/K)‖² ``(b,)`` of outputs z ``(b, K)`` and class numbers, y one-hot: at z = 0 the gradient of a
    linear head is minus the class sums, and on whitened features a step of length 1 solves it.
    """
    classes = outputs.shape[-1]
    return (outputs - F.one_hot(targets, classes).to(outputs.dtype) + 1 / classes).square().sum(-1) / 2


def label_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy ``(b,)`` of logits ``(b, L)``, mean over the labels."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(-1)


_LOSSES: dict[str, CustomLoss] = {
    "classification": cross_entropy, "next-token": cross_entropy, "multilabel": label_loss, "regression": squared_error,
}  # fmt: skip


def _score(task: str, outputs: Tensor, targets: Tensor, like: Tensor) -> Tensor:
    """Return each example's score; NaN where no answer is right or wrong."""
    if task == "multilabel" and outputs.shape == targets.shape:
        return ((outputs > 0) == (targets > 0.5)).to(outputs.dtype).mean(-1)
    if task in ("classification", "next-token") and outputs.dim() == targets.dim() + 1:
        return _right(outputs, targets)
    return torch.full_like(like, torch.nan)


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over the last axis; with 0/1 ``weights`` only over the examples that are there (0 if none is)."""
    if weights is None:
        return values.mean(-1)
    return (values * weights).sum(-1) / torch.clamp(weights.sum(-1), min=1)
