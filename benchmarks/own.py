"""A method of one's own beside the packaged one that does the same: clients a second, the two taking turns.

Usage: python -m benchmarks.own [ROUNDS]: one line of JSON. Dense models, as in W2 and W4 of ``workloads.py``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.params import PersonalState
from fedflat.core.process import using_threads
from fedflat.core.types import Algorithm, ClientView, GradientFn, Phase
from fedflat.data.clients import from_pairs
from fedflat.engine.job import Job
from fedflat.engine.reduce import RoundSum
from fedflat.engine.round import accumulator_of, broadcast_of
from fedflat.pieces.gradients import compose, proximal, sam

RHO, MU = 0.05, 0.1
CLIENTS, EXAMPLES = 384, 20
MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "linear 512-10": (512, lambda: nn.Sequential(nn.Linear(512, 10))),
    "mlp 784-64-10": (784, lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))),
}


class OwnRule:
    """SAM over a proximal term, as a user would write it."""

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        """Return the rule's gradient function."""

        def pulled(w: Tensor) -> Tensor:
            return gradient(w) + MU * (w - view.start)

        def rule(w: Tensor) -> Tensor:
            g = pulled(w)
            return pulled(w + g * (RHO / g.norm().clamp_min(1e-12)))

        return rule


METHODS = {
    "packaged": lambda: Algorithm("packaged", phases=(Phase(rule=compose(sam(RHO), proximal(MU))),)),
    "own": lambda: Algorithm("own", phases=(Phase(rule=OwnRule()),)),
}


def job(model: str, method: str, backend: str) -> Job:
    """A run's job, with everybody in the cohort."""
    width, make = MODELS[model]
    draw = np.random.default_rng(0)
    pairs = [
        (torch.from_numpy(draw.standard_normal((EXAMPLES, width), dtype=np.float32)), torch.arange(EXAMPLES) % 10)
        for _ in range(CLIENTS)
    ]
    recipe = {
        "rounds": 10,
        "algorithm": "dp-fedavg",
        "local": {"steps": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.0},
        "cohort": {"size": CLIENTS},
        "privacy": {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "engine": {"backend": backend},
    }
    return prepare(Recipe.of(recipe), make(), from_pairs(pairs), algorithm=METHODS[method]())


def seconds(made: Job) -> float:
    """Local training, clip and sum of a round."""
    parts, size = made.parts, made.parts.layout.dimension
    broadcast = broadcast_of(parts, parts.first_state(made.initial_weights[:size], 1.0), made.seed)
    accumulator = accumulator_of(parts, broadcast, made.key)
    began = time.perf_counter()
    kept = PersonalState(made.initial_weights[size:].clone())
    RoundSum(parts.algorithm, parts.local, broadcast, accumulator, kept).add_cohort(made.backend, np.arange(CLIENTS))
    return time.perf_counter() - began


def compare(rounds: int) -> list[dict[str, Any]]:
    """Clients a second of both, and own over packaged, for each model and back end."""
    rows = []
    for model in MODELS:
        for backend in ("vectorized", "auto"):
            jobs = {method: job(model, method, backend) for method in METHODS}
            with using_threads(1):
                times = [{method: seconds(made) for method, made in jobs.items()} for _ in range(rounds + 1)][1:]
            ratio = statistics.median(pair["packaged"] / pair["own"] for pair in times)
            speed = {method: round(CLIENTS / min(pair[method] for pair in times)) for method in METHODS}
            chosen = {name: [made.backend.name, getattr(made.backend, "block", None)] for name, made in jobs.items()}
            rows.append({"model": model, "backend": backend, **speed, "ratio": round(ratio, 3), "chosen": chosen})
    return rows


if __name__ == "__main__":
    for row in compare(int(sys.argv[1]) if len(sys.argv) > 1 else 15):
        print(json.dumps(row))
