"""Modules of a body and a head. Where the body is frozen, what it makes of an input can be computed once and kept."""

from __future__ import annotations

from torch import Tensor, nn


class Headed(nn.Module):
    """``head(features(inputs))``; a matrix of floats (b, n) is taken for features already computed.

    ``trained``: the beginning of the names of the head's parameters. ``prior``: what shaped the weights before any
    client's data, as the privacy statement names it.
    """

    trained = "body.classifier."
    prior = "none"

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs (b, …) -> features (b, n)."""
        raise NotImplementedError

    def head(self, features: Tensor) -> Tensor:
        """Features (b, n) -> logits (b, classes)."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        known = inputs.is_floating_point() and inputs.dim() == 2
        return self.head(inputs if known else self.features(inputs))

    @property
    def frozen(self) -> bool:
        """Whether the features of an input stay the same while the module is trained: head only, and no dropout."""
        free = (name for name, p in self.named_parameters() if p.requires_grad)
        still = all(name.startswith(self.trained) for name in free)
        return still and not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in self.modules())
