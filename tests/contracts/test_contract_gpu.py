"""The plain path on a real GPU, where there is one: numbers, bits, precision, the whole command."""

from typing import Any

import pytest
import torch
from small_federation import clients, module, recipe, weights
from torch import Tensor

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.config.recipe import Recipe

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("noise_of_the_seed"),
]
METHODS = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]


def trained(method: str, **engine: Any) -> Tensor:
    changes = {"local": {"steps": 3, "batch_size": 4, "lr": 0.3}, "engine": engine}
    found = fedflat.run(recipe(method, changes), module(), clients())
    return weights(found.model)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_agrees_with_the_processor(method: str) -> None:
    expected = trained(method, backend="sequential", device="cpu")
    for way in ({"backend": "sequential"}, {"backend": "vectorized", "block": 3}, {"backend": "auto"}):
        torch.testing.assert_close(trained(method, device="cuda", **way), expected, rtol=1e-3, atol=2e-5)


def test_runs_repeat_bit_for_bit() -> None:
    one, other = (trained("dp-fedsam", backend="vectorized", device="cuda") for _ in range(2))
    assert torch.equal(one, other)


def test_bf16_is_bf16() -> None:
    exact, rounded = (trained("dp-fedavg", backend="sequential", device="cuda", precision=p) for p in ("fp32", "bf16"))
    assert float((rounded - exact).norm()) > 1e-5


def test_the_quick_start_on_a_gpu() -> None:
    there, here = (
        fedflat.run(Recipe.load("quick-start-dp-fedsam", ["rounds=2", f"engine.device={device}"]))
        for device in ("cuda", "cpu")
    )
    assert abs(there.history[-1]["test_accuracy"] - here.history[-1]["test_accuracy"]) < 0.02
    assert there.history[-1]["epsilon"] == here.history[-1]["epsilon"]
