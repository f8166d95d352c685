"""Contract 1: without noise, with a clip nobody reaches and every switch neutral, each method is plain FedAvg."""

import copy
import inspect
from typing import Any

import pytest
import torch
from small_federation import NEUTRAL, UPDATES, clients, module, recipe, weights
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.core.types import MOMENTUM

ROUNDS, STEPS, LR, DECAY = 3, 4, 0.3, 0.9


def plain_fedavg(network: nn.Module, momentum: float, frozen: set[str]) -> Tensor:
    """FedAvg with torch's own optimiser, in double precision: nothing of the package."""
    network = copy.deepcopy(network).double()
    data = [(x.double(), y) for x, y in clients()]
    for round in range(ROUNDS):
        states = []
        for x, y in data:
            local = copy.deepcopy(network)
            moving = [p for n, p in local.named_parameters() if n not in frozen]
            optimiser = torch.optim.SGD(moving, lr=LR * DECAY**round, momentum=momentum)
            for _ in range(STEPS):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            states.append(local.state_dict())
        network.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
    return weights(network)


def neutral(method: str) -> dict[str, Any]:
    """The method's switches that have a neutral position, in that position."""
    return {key: value for key, value in NEUTRAL.items() if key in inspect.signature(ALGORITHMS[method]).parameters}


def run(method: str, options: dict[str, Any], backend: str, clip: float = 1e9) -> Tensor:
    local = {"steps": STEPS, "lr": LR, "lr_decay": DECAY}
    changes = {
        "rounds": ROUNDS,
        "local": local,
        "privacy": {"clip": clip, "noise_multiplier": 0.0},
        "server": {"lr": 1.0},  # what is neutral for dp-fedadam too, whose own is smaller
        "engine": {"backend": backend},
    }
    return weights(fedflat.run(recipe(method, changes, **options), model=module(), clients=clients()).model)


def difference(found: Tensor, method: str) -> float:
    """Distance to plain FedAvg, relative to how far FedAvg went."""
    frozen = {"2.weight", "2.bias"} if ALGORITHMS[method]().head is not None else set()
    frozen |= {"2.bias"} if method == "dp-fedavg-la" else set()  # held, at any strength
    twin = plain_fedavg(module(), MOMENTUM if (own := ALGORITHMS[method]().momentum) is None else own, frozen)
    first = weights(module()).double()
    return float(torch.linalg.vector_norm(found.double() - twin) / torch.linalg.vector_norm(twin - first))


PLAIN = [name for name in UPDATES if not ALGORITHMS[name]().client_state and name != "class-statistics"]
"""Methods with a setting at which they are FedAvg; what clients keep has none, nor have sums instead of means."""


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", PLAIN)
def test_neutral_switches_give_fedavg(method: str, backend: str) -> None:
    assert difference(run(method, neutral(method), backend), method) < 2e-6


# a value far from neutral; a switch that is not tested so might not be connected at all
FAR = {"rho": 0.5, "lam": 5.0, "sparsity": 0.7, "keep": 0.4, "beta": 0.3, "smoothing": 1.0, "head_lr": 0.5}
FAR |= {"mu": 5.0, "strength": 2.0, "gamma": 0.7, "kappa": 0.5, "beta1": 0.9, "floor": 1e-4}
CASES = [(method, key) for method in PLAIN for key in neutral(method)]


@pytest.mark.parametrize(("method", "key"), CASES)
def test_every_switch_matters(method: str, key: str) -> None:
    """The twin: with one switch away from neutral the comparison fails."""
    clip = 0.05 if key == "lam" else 1e9  # BLUR's threshold is the clip, so only a small one wakes it
    options = neutral(method)
    moved = run(method, {**options, key: FAR[key]}, "sequential", clip)
    if key == "lam":
        assert float((moved - run(method, options, "sequential", clip)).abs().max()) > 1e-4
    elif key == "head_lr":  # a head that learns changes what the shared part learns
        assert difference(moved, method) > 1e-4
    else:
        assert difference(moved, method) > 1e-3


@pytest.mark.parametrize("method", [m for m in PLAIN if ALGORITHMS[m]().private])
def test_a_clip_matters(method: str) -> None:
    assert difference(run(method, neutral(method), "sequential", clip=0.02), method) > 1e-2
