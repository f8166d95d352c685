"""oneDNN's own tensors: images that stay in its layout from convolution to pooling to convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUMBERS = (torch.float32, torch.bfloat16)


def usable(inputs: Tensor) -> bool:
    """Whether these are images in this machine's memory, in a number format and with a torch that oneDNN serves."""
    known = inputs.dim() == 4 and inputs.device.type == "cpu" and inputs.dtype in NUMBERS
    return known and torch.backends.mkldnn.is_available()


def looked_at(module: nn.Module, inputs: Tensor) -> Tensor:
    """What the built-in convolutional networks look at of an image: they cannot cut oneDNN's tensors themselves."""
    seen = getattr(module, "seen", None)
    return inputs[..., : seen[0], : seen[1]] if isinstance(seen, tuple) else inputs
