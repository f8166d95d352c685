"""``class-statistics``: the message is the sum of features by class, on every back end, from any first head."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.algorithms import class_statistics
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.types import Algorithm
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.engine.train import train
from fedflat.pieces.transforms import ClassSums

SIZES = (7, 3, 12, 1, 0)


def federation() -> FederatedData:
    draw = torch.Generator().manual_seed(3)
    return from_pairs([(torch.randn(n, 4, generator=draw), torch.arange(n) % 3) for n in SIZES])


def released(
    module: nn.Module, backend: str, clip: float = 1e6, twin: Algorithm | None = None, **changes: Any
) -> Tensor:
    recipe = {
        "rounds": 1, "algorithm": "class-statistics", "cohort": {"size": len(SIZES)},
        "local": {"steps": 3, "batch_size": 4}, "privacy": {"clip": clip, "noise_multiplier": 0.0},
        "engine": {"backend": backend},
    }  # fmt: skip
    return train(prepare(Recipe.of(recipe | changes), module, federation(), algorithm=twin)).state.shared * len(SIZES)


def sums(limit: float = 1e6) -> Tensor:
    """The released sum, from the definition."""
    data, total = federation(), torch.zeros(3 * 4 + 3)
    for i in range(data.clients):
        x, y = data.client(i)
        residual = torch.nn.functional.one_hot(y, 3).float() - 1 / 3
        own = torch.cat([(residual.T @ x).flatten(), residual.sum(0)])
        total += own * min(1.0, limit / max(float(own.norm()), 1e-9))
    return total


@pytest.mark.parametrize("backend", ["sequential", "vectorized", "lowrank"])
@pytest.mark.parametrize("limit", [1e6, 2.0])
def test_the_message_is_the_class_sums(backend: str, limit: float) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))  # its random head is set to zero
    torch.testing.assert_close(released(module, backend, limit), sums(limit), rtol=1e-4, atol=1e-5)


def test_means_would_be_noticed() -> None:
    """The broken twin forgets how many examples a client has."""

    class Means(ClassSums):
        def __call__(self, update: Tensor, view: Any) -> Tensor:
            return -view.gradient()

    twin = replace(class_statistics(), transforms=(Means(),))
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    one_step = {"algorithm": "dp-fedavg", "local": {"steps": 1, "momentum": 0.0}}
    assert not torch.allclose(released(module, "sequential", twin=twin, **one_step), sums(), rtol=0.1)


def test_layers_below_the_head_stay_and_the_given_module_is_not_changed() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    head = module[3].weight.detach().clone()
    data = federation()
    recipe = {
        "rounds": 1, "algorithm": "class-statistics", "cohort": {"size": 5},
        "privacy": {"clip": 1e6, "noise_multiplier": 0.0},
    }  # fmt: skip
    found = fedflat.run(recipe, model=module, clients=data).model
    assert torch.equal(found[1].weight, module[1].weight) and torch.equal(module[3].weight, head)
    x, y = (torch.cat(parts) for parts in zip(*(data.client(i) for i in range(4))))
    residual = torch.nn.functional.one_hot(y, 3).float() - 1 / 3
    torch.testing.assert_close(found[3].weight * 5, residual.T @ module[:3](x), rtol=1e-4, atol=1e-5)


def test_local_momentum_is_refused() -> None:
    with pytest.raises(fedflat.InputError, match="no local step"):
        released(nn.Linear(4, 3), "sequential", local={"momentum": 0.5})
