"""Test accuracy beside the noise table: ``python -m benchmarks.noise_accuracy mnist`` (and ``fashion_mnist``).

Every row of ``benchmarks.noise`` at every ε and T, over three seeds: 500 clients, Dirichlet 0.6, δ = 1/500, a linear
head on features of random images (docs/representations.md), one local step a round, dp-fedavg. Each seed splits the
data and draws batches, cohorts and noise anew. It writes ``benchmarks/results/noise-NAME.json`` after every run and
goes on from there.

The clip is that of the packaged recipes for such heads. The server's rate is one for all rows of a column (data set,
ε, T): that with the best accuracy, mean over the rows in ``TRIED``, where of 600 clients of training data 500 train and
the rest is tested on, with a seed of its own. Test data had no say in it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedflat
from benchmarks.noise import CLIENTS, COHORT, DELTA, EPSILONS, LAWS, RESULTS, ROUNDS, best, key
from benchmarks.turns import machine
from fedflat.backends.features import with_features
from fedflat.config.sections import Partition
from fedflat.data.clients import FederatedData
from fedflat.data.partition import partition
from fedflat.data.sources import load
from fedflat.models import build
from fedflat.privacy.accounting.factorisation import KINDS

DATASETS = {path.stem.removeprefix("noise-"): path for path in RESULTS.values()}
BODY = {"kind": "patches", "filters": 128, "dimension": 200, "whitening": 0.5, "images": 2000, "seed": 0}
SEEDS, CHOOSING, HELD_BACK = (1, 2, 3), 100, 100
CLIP, RATES = 0.05, (5.0, 15.0, 50.0, 150.0)
TRIED = (("poisson", "independent"), ("min-separation", "banded"))


@functools.cache
def features(dataset: str) -> FederatedData:
    """All examples as features of the frozen body, one client's."""
    data = load({"dataset": dataset, "partition": {"kind": "iid"}, "clients": 1}, 0)
    module = build("representation", data.input_shape, data.classes, 0, body=BODY, head="linear")
    return with_features(data, module)


@functools.cache
def federation(dataset: str, seed: int, choosing: bool) -> FederatedData:
    """500 clients; the test set is the data set's own, or the examples of 100 clients more."""
    data, more = features(dataset), HELD_BACK if choosing else 0
    parts = partition(data.targets.numpy(), Partition(kind="dirichlet", alpha=0.6), CLIENTS + more, seed)
    rows = torch.from_numpy(np.concatenate([*parts[CLIENTS:], np.zeros(0, np.int64)]))
    test: tuple[Any, Any] = (data.inputs[rows], data.targets[rows]) if more else (data.test_inputs, data.test_targets)
    return FederatedData(data.inputs, data.targets, parts[:CLIENTS], (), *test, data.classes, "clients")


def head(inputs: Tensor, classes: int) -> nn.Module:
    """A linear layer of zeros."""
    made = nn.Sequential(nn.Linear(inputs.shape[1], classes))
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


def accuracy(data: FederatedData, row: tuple[str, str], epsilon: float, rounds: int, rate: float, seed: int) -> float:
    """Test accuracy of the last round, in per cent."""
    law, kind = row
    plan = best(law, kind, rounds, epsilon)
    assert plan is not None
    apart = plan.sampler.separation if law in ("min-separation", "cyclic-poisson") else None  # type: ignore[attr-defined]
    recipe = {
        "rounds": rounds,
        "seed": seed,
        "algorithm": "dp-fedavg",
        "local": {"steps": 1, "batch_size": 16, "lr": 1.0, "momentum": 0.0},
        "cohort": {"size": CLIENTS if law == "full" else COHORT, "sampling": law, "separation": apart},
        "privacy": {"clip": CLIP, "noise_multiplier": plan.noise_multiplier, "delta": DELTA, "noise": kind},
        "server": {"lr": rate},
        "engine": {"device": "cpu", "backend": "vectorized"},
        "evaluation": {"every": rounds},
    }
    result = fedflat.run(recipe, model=head(data.inputs, data.classes), clients=data)
    return 100 * float(result.history[-1]["test_accuracy"])


def rows() -> list[tuple[str, str]]:
    """Those of the table, the quickest first."""
    laws = sorted(LAWS, key=lambda law: law == "full")
    return [(law, kind) for law in laws for kind in KINDS if best(law, kind, ROUNDS[0], EPSILONS[0]) is not None]


def measure(dataset: str, path: Path, runs: list[int]) -> None:
    """Every run that the file lacks; the file is written after each."""
    found = json.loads(path.read_text()) if path.is_file() else {"choice": {}, "chosen": {}, "accuracy": {}}
    found = {**facts(dataset), **{name: found[name] for name in ("choice", "chosen", "accuracy")}}

    def figure(section: str, name: str, *about: Any) -> None:
        if name not in found[section]:
            found[section][name] = round(accuracy(*about), 2)
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(section, name, found[section][name], flush=True)

    for rounds, epsilon in itertools.product(runs, EPSILONS):
        column, held = f"{epsilon:g} {rounds}", federation(dataset, CHOOSING, True)
        for row, rate in itertools.product(TRIED, RATES):
            figure("choice", key(*row, epsilon, rounds, rate), held, row, epsilon, rounds, rate, CHOOSING)

        def on_others(rate: float) -> float:
            return statistics.mean(found["choice"][key(*row, epsilon, rounds, rate)] for row in TRIED)  # noqa: B023

        found["chosen"][column] = chosen = max(RATES, key=on_others)
        for row, seed in itertools.product(rows(), SEEDS):
            about = (federation(dataset, seed, False), row, epsilon, rounds, chosen, seed)
            figure("accuracy", key(*row, epsilon, rounds, seed), *about)


def facts(dataset: str) -> dict[str, Any]:
    """What the figures are of."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "command": f"python -m benchmarks.noise_accuracy {dataset}",
        "commit": commit or None,
        "date": datetime.date.today().isoformat(),
        "machine": {name: value for name, value in machine().items() if name != "load_before"},
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "settings": {
            "clients": CLIENTS, "cohort": COHORT, "delta": DELTA, "partition": "dirichlet 0.6", "body": BODY,
            "head": "linear, from zero", "local": "one step on 16 examples, rate 1", "method": "dp-fedavg",
            "seeds": SEEDS, "choice": "mean accuracy on 100 held-back clients, seed 100, over " + str(TRIED),
            "clip": CLIP, "rates": RATES,
        },
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("--rounds", type=int, nargs="*", default=[*ROUNDS])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    measure(given.dataset, given.out or DATASETS[given.dataset], given.rounds)
