"""Flower on its simulation engine (Ray), tuned: one actor of one thread per core, data mapped once per actor.

Usage: python -m benchmarks.systems.flower WORKLOAD FOLDER tuned fp32
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import Gate
from benchmarks.systems.plain import client_batches, train
from benchmarks.workloads import BY_NAME, Workload, network, read_data

_KEPT: dict[str, Any] = {}


def _kept(workload: Workload, folder: str) -> tuple[Any, Any, Any]:
    """Model and data, once per actor."""
    if not _KEPT:
        torch.set_num_threads(1)
        inputs, targets = read_data(folder)
        model = network(workload)
        if inputs.dim() == 4:
            model = model.to(memory_format=torch.channels_last)
        _KEPT.update(model=model, inputs=inputs, targets=targets)
    return _KEPT["model"], _KEPT["inputs"], _KEPT["targets"]


def client_app(workload: Workload, folder: str) -> Any:
    """A NumPy client that trains on its rows."""
    import contextlib

    from flwr.client import ClientApp, NumPyClient

    class Client(NumPyClient):
        def __init__(self, number: int) -> None:
            self.number = number

        def fit(
            self, parameters: list[np.ndarray], config: dict[str, Any]
        ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
            model, inputs, targets = _kept(workload, folder)
            with torch.no_grad():
                for p, value in zip(model.parameters(), parameters):
                    p.copy_(torch.from_numpy(value))
            rows = torch.from_numpy(workload.part(self.number))
            train(model, workload, client_batches(workload, rows, inputs, targets), contextlib.nullcontext)
            return [p.detach().numpy() for p in model.parameters()], len(rows), {}

    return ClientApp(client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client())


def server_app(workload: Workload, gate: Gate) -> Any:
    """FedAvg with Flower's own server-side fixed clipping and noise; waits between rounds."""
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

    class Paused(DifferentialPrivacyServerSideFixedClipping):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round > 2:
                gate.wait()
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            found = super().aggregate_fit(server_round, results, failures)
            if failures or len(results) != workload.cohort:
                raise RuntimeError(f"{len(failures)} of {workload.cohort} clients failed")
            if server_round > 2:
                gate.done(threads=1)
            return found

    inner = FedAvg(
        fraction_fit=workload.cohort / workload.clients,
        fraction_evaluate=0.0,
        min_fit_clients=workload.cohort,
        min_available_clients=workload.clients,
        initial_parameters=ndarrays_to_parameters([p.detach().numpy() for p in network(workload).parameters()]),
    )
    strategy = Paused(inner, workload.noise, workload.clip, workload.cohort)
    return ServerApp(
        server_fn=lambda context: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=10**6))
    )


def main(name: str, folder: str, kind: str, precision: str) -> None:
    gate, workload, cores = Gate(), BY_NAME[name], len(os.sched_getaffinity(0))
    from flwr.simulation import run_simulation

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "include_dashboard": False},
    }
    run_simulation(server_app(workload, gate), client_app(workload, folder), workload.clients, backend_config=resources)


if __name__ == "__main__":
    main(*sys.argv[1:])
