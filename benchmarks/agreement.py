"""Whether a device adds up what the processor does: every method's clipped sums of three rounds, on small models.

Usage: python -m benchmarks.agreement [DEVICE]: one line of JSON, a row for each method with its largest differences.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.algorithms import ALGORITHMS
from fedflat.assembly import records
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.process import using_threads
from fedflat.engine.device import TOLERANCE
from fedflat.engine.reduce import Part
from fedflat.engine.train import train

SIZES = (7, 3, 0, 12, 1, 5, 12)
WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"backend": "sequential"},
    "vectorized": {"backend": "vectorized", "block": 3},
}
DENSE = WAYS | {"lowrank": {"backend": "lowrank", "block": 3}}
METHODS = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]


def network(dense: bool) -> nn.Module:
    """A small model, the same at every call."""
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)]
    first = [nn.Flatten(), nn.Linear(32, 16), nn.ReLU()] if dense else [*layers, nn.Flatten()]
    model, generator = nn.Sequential(*first, nn.Linear(16, 3)), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def clients() -> list[tuple[Tensor, Tensor]]:
    """Few, of different sizes, one with nothing."""
    rng = np.random.default_rng(2)
    return [
        (torch.tensor(rng.normal(size=(n, 2, 4, 4)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, n)))
        for n in SIZES
    ]


class Noted:
    """A back end whose sums are kept."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.sums = inner, inner.name, list[Tensor]()

    def train(self, cohort: Any, broadcast: Any, kept: Any, clipped: Any) -> Iterator[Part]:
        yield from self.inner.train(cohort, broadcast, kept, clipped)
        self.sums.append(clipped.__self__.total.total.clone())


def sums(method: str, dense: bool, **engine: Any) -> Tensor:
    """The clipped sums ``(rounds, d)`` of a run, in float64. Runs that differ in their engine share noise here."""
    recipe = {
        "rounds": 3,
        "algorithm": {"name": method},
        "local": {"steps": 3, "batch_size": 4, "lr": 0.3, "lr_decay": 0.5, "weight_decay": 0.01},
        "cohort": {"size": 5},
        "privacy": {"clip": 0.2, "noise_multiplier": 1.0, "delta": 1e-5, "randomness": "seeded", "benchmark": True},
        "engine": engine,
    }
    with mock.patch.object(records, "engine_facts", return_value=""):
        job = prepare(Recipe.of(recipe), model=network(dense), clients=clients())
    noted = job.backend = Noted(job.backend)
    with using_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(job)
    return torch.stack(noted.sums)


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a round's sums, relative to the expected sum's norm."""
    scale = torch.linalg.vector_norm(expected, dim=1).clamp_min(1e-12)
    return float((torch.linalg.vector_norm(found - expected, dim=1) / scale).nan_to_num(torch.inf).max())


def row(method: str, device: str, dense: bool, precision: str, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A method's differences by way of training, and what failed."""
    expected = sums(method, dense, device="cpu", backend="sequential", precision=precision)
    found: dict[str, Any] = {}
    for way, engine in ways.items():
        try:
            found[way] = apart(sums(method, dense, device=device, precision=precision, **engine), expected)
        except (InputError, RuntimeError) as error:
            found[way] = str(error)[-300:]
    same = all(isinstance(value, float) and value <= TOLERANCE[precision] for value in found.values())
    name = f"{method}{', dense' if dense else ''}{', bf16' if precision == 'bf16' else ''}"
    return {"method": name, "apart": found, "same": same, "tolerance": TOLERANCE[precision]}


def compare(device: str, methods: list[str] = METHODS, kernels: bool = True) -> list[dict[str, Any]]:
    """Every method on a convolutional model, two on a dense one. kernels: two in bf16 as well."""
    few = [name for name in methods if name in ("dp-fedavg", "dp-fedsam")]
    found = [row(name, device, False, "fp32", WAYS) for name in methods]
    found += [row(name, device, True, "fp32", DENSE) for name in few]
    if kernels:
        found += [row(name, device, False, "bf16", WAYS) for name in few]
    return found


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1] if len(sys.argv) > 1 else "cuda")))
