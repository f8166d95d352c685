"""Forward passes on oneDNN's own tensors: from convolution to pooling to convolution without a change of layout.

Only layers that oneDNN has (convolution, pooling, ReLU, linear) run on such tensors, so whether a module does, and to
the same numbers, is tried before it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedflat.core.onednn import looked_at, usable
from fedflat.core.params import Layout

BATCH = 200
"""Images per pass: the weights are converted for every one, which batches of 50 feel."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference of a logit from that of plain tensors, relative to the largest logit: several roundings."""


def batches(module: nn.Module, layout: Layout, weights: Tensor, inputs: Tensor) -> list[Tensor] | None:
    """``inputs`` ``(N, c, h, w)`` cut into oneDNN tensors, or None where the module must have plain ones.

    weights ``(D,)``: at which the first batch's logits are compared with those of plain tensors.
    """
    if not usable(inputs):
        return None
    first, vector = inputs[:BATCH], weights.to(inputs.dtype)
    try:
        kept = looked_at(module, inputs)
        found = torch.func.functional_call(module, converted(layout, vector), (kept[:BATCH].to_mkldnn(),)).to_dense()
    except Exception:  # a module may do anything with its inputs, and most of it is not there for these tensors
        return None
    expected = torch.func.functional_call(module, dict(layout.views(vector)), (first,))
    scale = float(expected.abs().max())
    if found.shape != expected.shape or not float((found - expected).abs().max()) <= TOLERANCE[inputs.dtype] * scale:
        return None
    return [kept[start : start + BATCH].to_mkldnn() for start in range(0, len(kept), BATCH)]


def converted(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """The parameters in ``vector`` ``(D,)`` by name, as oneDNN tensors."""
    return {name: view.to_mkldnn() for name, view in layout.views(vector)}
