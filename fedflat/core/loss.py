"""Mean cross-entropy, per example: the loss of all local training and evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


def example_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss ``(b,)`` and accuracy ``(b,)`` of each example.

    logits ``(b, V)`` with targets ``(b,)``, or ``(b, T, V)`` with ``(b, T)`` (mean over the tokens that are not -100).
    """
    if logits.dim() == 2:
        return F.cross_entropy(logits, targets, reduction="none"), (logits.argmax(-1) == targets).to(logits.dtype)
    tokens = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORE)
    counted = (targets != IGNORE).to(logits.dtype)
    number = counted.sum(-1).clamp_min(1)
    right = (logits.argmax(-1) == targets).to(logits.dtype) * counted
    return tokens.sum(-1) / number, right.sum(-1) / number


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over the last axis; with 0/1 ``weights`` only over the examples that are there (0 if none is)."""
    if weights is None:
        return values.mean(-1)
    return (values * weights).sum(-1) / torch.clamp(weights.sum(-1), min=1)
