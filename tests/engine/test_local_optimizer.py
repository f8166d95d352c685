"""Local Adam against torch's own, the same on every back end; schedules and warm-up as their formulas say."""

import math
from typing import Any

import pytest
import torch
from small_runs import module, pairs, weights
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.types import Local

SIZES = (6, 3, 0, 9)
LOCAL: dict[str, Any] = {"steps": 4, "batch_size": 20, "lr": 0.02, "optimizer": "adam"}


def trained(backend: str, method: str = "fedavg", rounds: int = 1, **local: Any) -> torch.Tensor:
    recipe = {
        "rounds": rounds, "algorithm": method, "local": {**LOCAL, **local}, "cohort": {"size": len(SIZES)},
        "privacy": {"clip": 0.05, "noise_multiplier": 0.0},
        "engine": {"backend": backend, "device": "cpu", "precision": "fp32"},
    }  # fmt: skip
    return weights(fedflat.run(recipe, model=module(), clients=pairs(SIZES)).model)


def test_adam_is_torchs_and_begins_anew_each_round() -> None:
    network = module()
    for _ in range(2):
        sent = []
        for x, y in (pair for pair in pairs(SIZES) if len(pair[0])):
            own = module()
            own.load_state_dict(network.state_dict())
            optimizer = torch.optim.Adam(own.parameters(), lr=LOCAL["lr"])
            for _ in range(LOCAL["steps"]):
                optimizer.zero_grad()
                F.cross_entropy(own(x), y).backward()
                optimizer.step()
            sent.append(weights(own) - weights(network))
        mean = torch.stack(sent).sum(0) / len(SIZES)
        vector = weights(network) + mean
        nn.utils.vector_to_parameters(vector, network.parameters())
    assert torch.allclose(trained("sequential", rounds=2), vector, atol=2e-6)


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam"])
def test_back_ends_agree(method: str) -> None:
    alone = trained("sequential", method, rounds=2, batch_size=2)
    for backend in ("vectorized", "workers"):
        assert torch.allclose(trained(backend, method, rounds=2, batch_size=2), alone, atol=2e-5), backend


def test_the_low_rank_form_does_not_serve_it() -> None:
    with pytest.raises(InputError, match=r"local\.optimizer: adam"):
        trained("lowrank")


@pytest.mark.parametrize(
    ("method", "local", "said"),
    [
        ("dp-fedpgn", {}, r"local\.optimizer: found adam; allowed: sgd for dp-fedpgn"),
        ("dp-fedavg", {"momentum": 0.5}, r"local\.momentum: found 0\.5; allowed: no value with local\.optimizer adam"),
    ],
)
def test_what_it_cannot_be_with_is_refused(method: str, local: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trained("sequential", method, **local)


def test_rates_of_rounds() -> None:
    plain = {"steps": 1, "batch_size": 1, "lr": 1.0, "rounds": 4}
    assert [Local(**plain, lr_decay=0.5).rate(t) for t in range(4)] == [1, 0.5, 0.25, 0.125]
    assert [Local(**plain, schedule="linear").rate(t) for t in range(4)] == [1, 0.75, 0.5, 0.25]
    cosine = [Local(**plain, schedule="cosine").rate(t) for t in range(4)]
    assert cosine == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert [Local(**plain, warmup=1).rate(t) for t in range(3)] == [0.5, 1, 1]
    assert Local(**plain, schedule="linear", lr_decay=0.5, warmup=2).rate(1) == pytest.approx(0.75 * 0.5 * 2 / 3)
