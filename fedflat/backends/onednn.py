"""Whether a module may be trained on oneDNN's own tensors: tried before the run, against plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedflat.core.onednn import usable
from fedflat.core.params import Layout, flatten
from fedflat.core.rng import seeded_torch, stream
from fedflat.engine.problem import LEAST, Batch, ModuleProblem

TRIES, EXAMPLES = 3, LEAST
"""Batches that are tried, odd so that one is in the middle, and examples in each: the fewest that go by oneDNN."""
TOLERANCE = 1e-4
"""Largest distance of two gradients, relative to their length, in the middle one of the tries: in one of them a pooling
or a ReLU may decide otherwise between two nearly equal numbers, as it also may against exact arithmetic."""


def serves(module: nn.Module, layout: Layout, precision: str, inputs: Tensor) -> bool:
    """Whether gradients on oneDNN's own tensors are those on plain ones, but for rounding.

    Only layers that oneDNN has (convolution, pooling, ReLU, linear) run on such tensors, in float32. The answer is a
    function of the module with its weights, the shape of ``inputs`` ``(N, c, h, w)``, torch and the processor; only
    made-up images are looked at, so that a resumed run and every worker go the same way. Weights, buffers and
    generators are left as they were.

    Not the same: oneDNN's pooling passes over NaN and its ReLU makes 0 of it. An image that is not finite still shows
    in the gradient, which is multiplied by it, and weights that are not finite in the update.
    """
    if precision != "fp32" or not usable(inputs) or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    own, plain = (ModuleProblem(module, layout, precision, onednn=onednn) for onednn in (True, False))
    weights = flatten(module, layout)
    try:
        distances = sorted(_distance(own, plain, weights, _images(number, inputs)) for number in range(TRIES))
    except Exception:  # a module may do anything with its inputs, and most of it is not there for these tensors
        return False
    finally:
        plain.bind(weights)  # a forward pass may have written to buffers
    return distances[TRIES // 2] <= TOLERANCE


def _images(number: int, like: Tensor) -> Batch:
    drawn = stream(0, "images to try layers on", number).standard_normal((EXAMPLES, *like.shape[1:]))
    images = torch.from_numpy(drawn).to(like.dtype).contiguous(memory_format=torch.channels_last)
    return Batch(images, torch.zeros(EXAMPLES, dtype=torch.int64))


def _distance(own: ModuleProblem, plain: ModuleProblem, weights: Tensor, batch: Batch) -> float:
    """‖g − g′‖/‖g‖ of the two problems' gradients; infinite where either is not finite."""
    with seeded_torch(0, "images to try layers on"):  # neither draws what the run would draw
        found = own.gradient(weights, "all", batch).vector
    with seeded_torch(0, "images to try layers on"):
        expected = plain.gradient(weights, "all", batch).vector
    distance = float((found - expected).norm() / expected.norm())
    return distance if distance >= 0 else float("inf")
