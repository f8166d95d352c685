"""fedflat: whole rounds as ``fedflat.run`` does them, with clip, noise, ledger and ε.

Usage: python -m benchmarks.systems.ours WORKLOAD FOLDER BACKEND fp32|bf16
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.protocol import Gate
from benchmarks.workloads import BY_NAME, Workload, read_data
from fedflat.data.clients import Federated
from fedflat.engine.choose import one_thread
from fedflat.engine.train import train
from fedflat.recipe import Recipe
from fedflat.simulation import prepare


def federation(workload: Workload, folder: str) -> Federated:
    """The workload's data as a federation."""
    inputs, targets = read_data(folder)
    parts = tuple(workload.part(i) for i in range(workload.clients))
    none = (np.empty(0, dtype=np.int64),) * workload.clients
    return Federated(inputs, targets, parts, none, None, None, workload.classes, "benchmark")


def recipe(workload: Workload, backend: str, precision: str) -> dict[str, Any]:
    """The workload as a recipe; cohorts of exactly one size, as the peers have them."""
    method = {"name": "dp-fedsam", "rho": workload.rho} if workload.rho else {"name": "dp-fedavg"}
    return {
        "rounds": 1000,
        "model": {"name": workload.model},
        "algorithm": method,
        "local": {"epochs": workload.epochs, "batch_size": workload.batch, "lr": workload.lr, "momentum": 0.0},
        "cohort": {"size": workload.cohort, "sampling": "fixed"},
        "privacy": {"clip": workload.clip, "noise_multiplier": workload.noise, "delta": 1e-7},
        "engine": {"backend": backend, "precision": precision},
    }


def main(name: str, folder: str, backend: str, precision: str) -> None:
    gate, workload = Gate(), BY_NAME[name]
    job = prepare(Recipe.of(recipe(workload, backend, precision)), data=federation(workload, folder))
    before: dict[str, float] = {}

    def between(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        nonlocal before
        if released["round"] > 1:
            stages = {k: v - before.get(k, 0.0) for k, v in job.stages.items()}
            gate.done(backend=job.backend.name, block=getattr(job.backend, "block", None), stages=stages)
        if released["round"] > 0:
            before = dict(job.stages)
            gate.wait()

    with one_thread():
        train(job, on_round=between)


if __name__ == "__main__":
    main(*sys.argv[1:])
