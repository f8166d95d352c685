"""Where the data lives during a run, in the memory layout that the model's layers read fastest."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedflat.data.clients import FederatedData

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _LARGE = -3, -1, 1 << 30
_ARENA_MAX = -8
"""Numbers of ``mallopt``'s parameters in glibc's malloc.h; 1 GiB is more than any block that training takes."""


def resident(data: FederatedData, module: nn.Module) -> FederatedData:
    """The same federation, images channels-last for convolutional models: contiguous max pooling is slow on CPUs."""
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()) or data.inputs.dim() != 4:
        return data
    test = None if data.test_inputs is None else _channels_last(data.test_inputs)
    return replace(data, inputs=_channels_last(data.inputs), test_inputs=test)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.numel() else images


def stored(inputs: Tensor) -> tuple[Tensor, bool]:
    """Inputs in the order in which they lie in memory, and whether that is ``(N, H, W, C)`` for ``(N, C, H, W)``."""
    last = inputs.dim() == 4 and not inputs.is_contiguous() and inputs.permute(0, 2, 3, 1).is_contiguous()
    return (inputs.permute(0, 2, 3, 1) if last else inputs), last


def shown(inputs: Tensor, last: bool) -> Tensor:
    """The inverse of ``stored``, on the same memory."""
    return inputs.permute(0, 3, 1, 2) if last else inputs


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: local training frees and takes the same sizes all the time.

    One arena for all threads: a thread's own is too small for a block of clients and would ask the system each time.

    Elsewhere than on glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_ARENA_MAX, 1)
