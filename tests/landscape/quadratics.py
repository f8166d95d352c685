"""Losses with known curvature for the tests: cross-entropy of a linear model has a Hessian in closed form."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.params import Layout, flatten, layout_of
from fedflat.landscape.objective import Objective


class Linear(nn.Module):
    """Multinomial logistic regression in float64."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, classes, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def logistic(threads: int = 1) -> tuple[Objective, Tensor, np.ndarray]:
    """An objective, weights ``(D,)`` and the exact Hessian (D, D): Σ_x (diag p − ppᵀ) ⊗ (x,1)(x,1)ᵀ / N."""
    module = Linear(4, 3)
    layout = layout_of(module)
    weights = drawn(layout.size, seed=1)
    x, y = drawn(700, 4, seed=2), torch.arange(700) % 3
    hessian = np.zeros((layout.size, layout.size))
    matrix, bias = weights[:12].reshape(3, 4), weights[12:]
    for row, p in zip(x.numpy(), torch.softmax(x @ matrix.T + bias, -1).numpy(), strict=True):
        jacobian = np.zeros((3, layout.size))
        for c in range(3):
            jacobian[c, 4 * c : 4 * c + 4], jacobian[c, 12 + c] = row, 1.0
        hessian += jacobian.T @ (np.diag(p) - np.outer(p, p)) @ jacobian / len(x)
    return Objective(module, layout, x, y, threads=threads), weights, hessian


class Small(nn.Module):
    """Convolution, group norm, dense: every kind of tensor that normalisation treats in its own way."""

    def __init__(self, smooth: bool = False) -> None:
        super().__init__()
        self.activation = torch.tanh if smooth else torch.relu
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.norm(self.conv(x))).flatten(1))


def small(threads: int = 1, examples: int = 130, smooth: bool = False) -> tuple[Objective, Tensor, Layout, Small]:
    """A convolutional objective on 5 × 5 images with its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = Small(smooth)
    layout = layout_of(module)
    x, y = drawn(examples, 1, 5, 5, seed=4).float(), torch.arange(examples) % 3
    return Objective(module, layout, x, y, threads=threads), flatten(module, layout), layout, module


def plain(module: nn.Module, layout: Layout, at: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and accuracy at these weights by one call of the module on all examples."""
    with torch.no_grad():
        logits = torch.func.functional_call(module.eval(), dict(layout.views(at)), (x,))
    return float(F.cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())
