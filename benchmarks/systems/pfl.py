"""pfl-research: FedAvg with the central Gaussian mechanism on its simulated backend.

Usage: python -m benchmarks.systems.pfl WORKLOAD FOLDER default|tuned fp32|bf16

default: as its published benchmarks do it. tuned: the better number of threads, channels-last data and model, freed
memory kept.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.protocol import Gate, Threads, Untuned, keep_freed_memory
from benchmarks.workloads import BY_NAME, Workload, network, read_data


class Model(nn.Module):
    """pfl asks a module for its loss and metrics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.eval() if eval else self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}


def run(workload: Workload, folder: str, tuned: bool, precision: str, gate: Gate) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism

    inputs, targets = read_data(folder)
    module = Model(network(workload))
    if tuned and inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        module = module.to(memory_format=torch.channels_last)

    def dataset(client: int) -> Dataset:
        rows = workload.part(client)
        whole = rows[0] < rows[-1]
        piece = slice(int(rows[0]), int(rows[-1]) + 1) if whole else torch.from_numpy(rows)
        return Dataset(raw_data=[inputs[piece], targets[piece]], user_id=str(client))

    class Pause(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
            if not threads.after(central_iteration):
                gate.done(threads=torch.get_num_threads())
            if not threads.before(central_iteration + 1):
                gate.wait()
            return False, Metrics()

    threads = Threads() if tuned else Untuned()
    threads.before(0)
    data = FederatedDataset(dataset, get_user_sampler("random", list(range(workload.clients))))
    mechanism = GaussianMechanism(workload.clip, workload.noise / workload.cohort)
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if precision == "bf16" else None,
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**6,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[mechanism]),
        model,
        NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.lr,
            local_batch_size=workload.batch,
        ),
        callbacks=[Pause()],
    )


def main(name: str, folder: str, kind: str, precision: str) -> None:
    gate = Gate()
    if kind == "tuned":
        keep_freed_memory()
    run(BY_NAME[name], folder, kind == "tuned", precision, gate)


if __name__ == "__main__":
    main(*sys.argv[1:])
