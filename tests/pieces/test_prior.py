"""Adjusted logits: the shift is the client's own shares, the bias stays, and what cannot be adjusted is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.data.clients import from_pairs
from fedflat.engine.batches import class_shares
from fedflat.pieces.gradients import label_prior

RECIPE: dict[str, Any] = {
    "rounds": 3, "algorithm": "dp-fedavg-la", "local": {"steps": 2, "batch_size": 50, "lr": 0.5}, "cohort": {"size": 6},
    "privacy": {"clip": 0.2, "noise_multiplier": 0.5},
}  # fmt: skip


def skewed(clients: int = 6, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each client has two of the classes; classes differ in their mean."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for client in range(clients):
        y = torch.tensor([client % classes] * 6 + [(client + 1) % classes] * 2)
        found.append((torch.randn(8, 4, generator=draw) + y[:, None], y))
    return found


@pytest.mark.parametrize("backend", ["sequential", "vectorized", "lowrank"])
def test_the_last_bias_stays_in_every_back_end(backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    result = fedflat.run({**RECIPE, "engine": {"backend": backend}}, model=model, clients=skewed())
    assert torch.equal(result.model[2].bias, model[2].bias)
    assert not torch.equal(result.model[2].weight, model[2].weight)
    assert not torch.equal(result.model[0].bias, model[0].bias)


def test_back_ends_agree() -> None:
    model, made = nn.Sequential(nn.Linear(4, 3)), []
    for backend in ("sequential", "vectorized"):
        changes = {"privacy": {"clip": 0.2, "noise_multiplier": 0.0}, "engine": {"backend": backend}}
        made.append(fedflat.run({**RECIPE, **changes}, model=model, clients=skewed()).model[0].weight)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-6)


def test_shares_are_the_client_s_own() -> None:
    data = from_pairs([(torch.zeros(4, 1), torch.tensor([0, 0, 1, 2])), (torch.zeros(1, 1), torch.tensor([2]))])
    rows = [*data.parts, np.zeros(0, dtype=np.int64)]
    assert torch.equal(class_shares(data, rows, 3), torch.tensor([[0.5, 0.25, 0.25], [0, 0, 1.0], [0, 0, 0]]))


class Scaled(nn.Module):
    """K numbers that scale the outputs stand last: as many as a bias has, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(x) * self.scale
        return outputs


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3, bias=False)),
        nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3, bias=False)),  # three entries, of a matrix
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3, bias=False)),
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.ReLU()),
        Scaled(),
    ],
)
def test_a_model_without_a_last_bias_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"dp-fedavg-la on a model whose last tensor, .*, is not the bias"):
        fedflat.run(RECIPE, model=model, clients=skewed())
    values = [(x, y[:, None] * 0.5) for x, y in skewed()]
    with pytest.raises(InputError, match="dp-fedavg-la with targets that are no classes"):  # before a folder is made
        fedflat.run({**RECIPE, "task": "regression"}, model=nn.Linear(4, 1), clients=values)
    with pytest.raises(InputError, match="loss: found squared with dp-fedavg-la; allowed: cross-entropy"):
        fedflat.run({**RECIPE, "loss": "squared"}, model=nn.Linear(4, 3), clients=skewed())


def test_log_probabilities_have_their_bias_too() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1))
    assert torch.equal(fedflat.run(RECIPE, model=model, clients=skewed()).model[0].bias, model[0].bias)


@pytest.mark.parametrize("wrong", [{"strength": -1}, {"absent": 0.0}, {"absent": 2.0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"algorithm.{next(iter(wrong))}"):
        label_prior(**wrong)
