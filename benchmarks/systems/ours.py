"""fedflat: whole rounds as ``fedflat.run`` does them, with clip, noise, ledger and ε.

Usage: python -m benchmarks.systems.ours WORKLOAD FOLDER BACKEND[:PROCESSES] fp32|bf16 [DEVICE]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import Gate
from benchmarks.workloads import BY_NAME, Workload, read_data
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.process import using_threads
from fedflat.data.clients import FederatedData
from fedflat.engine.job import Job
from fedflat.engine.train import train


def federation(workload: Workload, folder: str) -> FederatedData:
    """The workload's data as a federation."""
    inputs, targets = read_data(folder)
    parts = tuple(workload.part(i) for i in range(workload.clients))
    none = (np.empty(0, dtype=np.int64),) * workload.clients
    return FederatedData(inputs, targets, parts, none, None, None, workload.classes, "benchmark")


def engine(kind: str, precision: str, device: str) -> dict[str, Any]:
    """The recipe's section for, say, ``workers:4``: four worker processes."""
    backend, *more = kind.split(":")
    options: list[dict[str, Any]] = [{"processes": int(o)} for o in more]
    found = {"backend": backend, "precision": precision, "device": device}
    return {key: value for section in (found, *options) for key, value in section.items()}


def recipe(workload: Workload, kind: str, precision: str, device: str) -> dict[str, Any]:
    """The workload as a recipe; cohorts of exactly one size, as the peers have them."""
    method = {"name": "dp-fedsam", "rho": workload.rho} if workload.rho else {"name": "dp-fedavg"}
    return {
        "rounds": 1000,
        "data": {"classes": workload.classes, "examples_per_client": workload.examples},
        "model": {"name": workload.model},
        "algorithm": method,
        "local": {"epochs": workload.epochs, "batch_size": workload.batch, "lr": workload.lr, "momentum": 0.0},
        "cohort": {"size": workload.cohort, "sampling": "fixed"},
        "privacy": {"clip": workload.clip, "noise_multiplier": workload.noise, "delta": 1e-7},
        "engine": engine(kind, precision, device),
    }


def facts(job: Job, workload: Workload) -> dict[str, Any]:
    """What trained the cohort."""
    found = {name: getattr(job.backend, name, None) for name in ("name", "block", "threads")}
    return {
        "backend": found["name"],
        "block": found["block"],
        "samples": workload.samples,
    }


def main(name: str, folder: str, kind: str, precision: str, device: str = "cpu") -> None:
    gate, workload = Gate(torch.cuda.synchronize if device != "cpu" else bool), BY_NAME[name]
    job = prepare(Recipe.of(recipe(workload, kind, precision, device)), data=federation(workload, folder))
    before: dict[str, float] = {}

    def between(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        nonlocal before
        if released["round"] > 1:
            stages = {k: v - before.get(k, 0.0) for k, v in job.stages.items()}
            gate.done(**facts(job, workload), stages=stages)
        if released["round"] > 0:
            before = dict(job.stages)
            gate.wait()

    with using_threads(1):
        train(job, on_round=between)


if __name__ == "__main__":
    main(*sys.argv[1:])
