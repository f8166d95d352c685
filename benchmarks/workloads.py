"""The work: sizes, models, made-up data. Imports nothing of fedflat: peers read it in environments of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """clients: population. cohort: clients a round, always exactly so many. examples: per client. pool: rows that exist
    (0: every client has its own; otherwise clients share them, so that a large population fits into memory).
    together: whether the central limit takes the cohort's minibatches as one (one large product) or one by one.
    """

    name: str
    text: str
    model: str
    clients: int
    cohort: int
    examples: int
    shape: tuple[int, ...]
    batch: int
    epochs: int
    rho: float = 0.0
    pool: int = 0
    together: bool = False
    without: tuple[str, ...] = ()
    classes: int = 10
    lr: float = 0.05
    clip: float = 1.0
    noise: float = 1.0

    @property
    def rows(self) -> int:
        """Examples in memory."""
        return self.pool or self.clients * self.examples

    @property
    def steps(self) -> int:
        """Local steps K."""
        return self.epochs * -(-self.examples // self.batch)

    @property
    def samples(self) -> int:
        """Examples that a round trains on, each as often as its epochs say."""
        return self.cohort * self.epochs * self.examples

    def part(self, client: int) -> np.ndarray:
        """Rows of a client, contiguous (wrapping around in a shared pool)."""
        return (client * self.examples + np.arange(self.examples)) % self.rows

    def cohort_of(self, round: int) -> np.ndarray:
        """A cohort for systems that do not draw their own."""
        return np.random.default_rng(round).choice(self.clients, self.cohort, replace=False)


CNN = "50 clients of 50, 100 CIFAR-shaped examples each, CNN of 667,402 parameters, batch 50, 2 epochs"
ALL = [
    Workload("W1", CNN, "cnn-3", 50, 50, 100, (3, 32, 32), 50, 2),
    Workload("W2", "500 of 10,000 clients, 20 examples each, MLP 784-64-10, batch 10, 1 epoch", "mlp",
             10_000, 500, 20, (784,), 10, 1, together=True),
    Workload("W3", "5 clients of 5, 100 CIFAR-shaped examples each, ResNet-18 (group norm), batch 50, 1 epoch",
             "resnet18", 5, 5, 100, (3, 32, 32), 50, 1),
    Workload("W4", "10,000 of 1,000,000 clients, 20 examples of 512 features each, linear model, batch 20, 1 epoch",
             "linear", 1_000_000, 10_000, 20, (512,), 20, 1, pool=200_000, together=True, without=("flower",)),
    Workload("W5", f"SAM (rho 0.5) on W1: {CNN}", "cnn-3", 50, 50, 100, (3, 32, 32), 50, 2, rho=0.5,
             without=("pfl", "pfl-tuned", "flower")),
    Workload("W6", "SAM (rho 0.5) on W3", "resnet18", 5, 5, 100, (3, 32, 32), 50, 1, rho=0.5,
             without=("pfl", "pfl-tuned", "flower")),
]  # fmt: skip
G1 = Workload("G1", "50 of 50 clients, 100 CIFAR-shaped examples each, ResNet-18 (group norm), batch 50, 1 epoch",
              "resnet18", 50, 50, 100, (3, 32, 32), 50, 1)  # fmt: skip
"""For a GPU (``--device cuda``) only."""
BY_NAME = {w.name: w for w in (*ALL, G1)}


def write_data(workload: Workload, folder: Path) -> None:
    """Inputs and targets as files that all systems map into memory."""
    rng = np.random.default_rng(0)
    rows = workload.rows
    np.save(folder / "inputs.npy", rng.standard_normal((rows, *workload.shape), dtype=np.float32))
    np.save(folder / "targets.npy", rng.integers(0, workload.classes, rows))


def read_data(folder: str | Path) -> tuple[Tensor, Tensor]:
    """The same data in every process; pages are shared."""
    inputs, targets = (np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("inputs", "targets"))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def network(workload: Workload) -> nn.Module:
    """The model, written plainly; its parameter count equals that of fedflat's (tests/benchmarks)."""
    if workload.model == "linear":
        return nn.Linear(workload.shape[0], workload.classes)
    if workload.model == "mlp":
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, workload.classes))
    if workload.model == "cnn-3":
        layers: list[nn.Module] = []
        for a, b in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv2d(a, b, 3), nn.MaxPool2d(2), nn.ReLU()]
        dense = [nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, workload.classes)]
        return nn.Sequential(*layers, nn.Flatten(), *dense)
    return _resnet18(workload.classes)


class _Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, b)
        self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, b)
        same = stride == 1 and a == b
        self.short = (
            nn.Sequential() if same else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(32, b))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def _resnet18(classes: int) -> nn.Module:
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*stem, *(_Block(*w) for w in widths), *pool)
