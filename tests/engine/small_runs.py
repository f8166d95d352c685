"""Clients' data, a recipe and a model's weights that are small enough to run everywhere."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def pairs(sizes: Sequence[int], shape: tuple[int, ...] = (6,), seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Inputs and one of three classes for each example of each client."""
    rng = np.random.default_rng(seed)
    return [
        (torch.tensor(rng.normal(size=(n, *shape)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, n)))
        for n in sizes
    ]


def filled(network: nn.Module) -> nn.Module:
    """The same network with weights of one seed."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return network


def module() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


def recipe(method: str = "dp-fedavg", engine: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """changes: what is added to sections, or put in their place."""
    made: dict[str, Any] = {
        "rounds": 2, "seed": 2, "algorithm": {"name": method},
        "local": {"steps": 3, "batch_size": 4, "lr": 0.3, "weight_decay": 0.01, "max_grad_norm": 2.0},
        "cohort": {"size": 5}, "privacy": {"clip": 0.2, "noise_multiplier": 1.0, "delta": 1e-5},
        "engine": {**(engine or {})},
    }  # fmt: skip
    for section, given in changes.items():
        made[section] = {**made.get(section, {}), **given} if isinstance(given, Mapping) else given
    return made


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])
