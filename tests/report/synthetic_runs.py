"""Run folders as the engine writes them, with made-up numbers: what the report's tests read."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from fedflat.core.rng import stream
from fedflat.report.groups import Group, group_runs
from fedflat.report.metrics import read_runs

NAMES = ("0.05", "0.25", "0.5", "0.75", "0.95")
STATEMENT: dict[str, Any] = {
    "unit": "client", "adjacency": "add-remove: one client's slot contributes nothing", "trust": "central",
    "adversaries": [{"adversary": "recipients of the released models", "epsilon": 9.37}, "nobody else"],
    "sampling": "Poisson, q = 0.1, secret", "mechanism": "Gaussian, noise multiplier 0.95, whole-vector clip 0.2",
    "epsilon": 9.37, "delta": 0.002, "claimed_epsilon": 9.37, "proven_epsilon": 9.37, "simulated_epsilon": None,
    "reasons": [],
    "not_covered": ["hyperparameters chosen on the same clients", "everything in private/private.jsonl"],
    "accountant": "pld", "noise": "simulation: noise reproducible from the seed",
}  # fmt: skip

NONE: dict[str, Any] = dict.fromkeys(("proven_epsilon", "epsilon", "claimed_epsilon"))
"""What a statement has where nothing is proven or claimed."""


def recipe(algorithm: str = "dp-fedsam", seed: int = 0, rounds: int = 300, **changes: Any) -> dict[str, Any]:
    found = {
        "name": f"cifar10-{algorithm}", "seed": seed, "rounds": rounds,
        "data": {"dataset": "cifar10", "partition": {"kind": "dirichlet", "alpha": 0.6}, "clients": 500},
        "model": {"name": "resnet18"}, "algorithm": {"name": algorithm, "rho": 0.5},
        "local": {"steps": 60, "batch_size": 50, "lr": 0.1, "momentum": 0.5, "lr_decay": 0.998, "weight_decay": 0},
        "cohort": {"size": 50, "sampling": "poisson"},
        "privacy": {"clip": 0.2, "noise_multiplier": 0.95, "delta": 0.002, "trust": "central", "protocol": "sound"},
        "server": {"optimizer": "sgd", "lr": 1.0},
        "engine": {"device": "cpu", "backend": "vectorized", "precision": "float32"},
        "versions": {"fedflat": "0.1.0", "torch": "2.13.0", "python": "3.11.4"},
    }  # fmt: skip
    return {**found, **changes}


def _quantiles(centre: float, width: float) -> dict[str, float]:
    inner = {name: centre + width * (float(name) - 0.5) for name in NAMES}
    return {"min": centre - 0.7 * width, **inner, "max": centre + 0.8 * width}


def rounds_of(recipe: dict[str, Any], top: float, private: bool, adaptive: bool) -> tuple[list[Any], list[Any]]:
    draw = stream(recipe["seed"], recipe["algorithm"]["name"])
    public, secret = [], []
    total = recipe["rounds"]
    for turn in range(total):
        done = 1 - math.exp(-3 * (turn + 1) / total)
        accuracy = 0.1 + (top - 0.1) * done + 0.008 * draw.standard_normal()
        clip = 0.2 * (1 + 0.5 * math.exp(-turn / 40)) if adaptive else 0.2
        record = {
            "round": turn, "epsilon": 9.37 * math.sqrt((turn + 1) / total), "clip": clip,
            "test_loss": 2.3 - 1.5 * done + 0.02 * draw.standard_normal(), "test_accuracy": accuracy,
        }  # fmt: skip
        if turn == total - 1:
            record["class_accuracy"] = [float(accuracy + 0.06 * draw.standard_normal()) for _ in range(10)]
        public.append(record)
        if private:
            norm = 0.35 - 0.18 * done + 0.004 * draw.standard_normal()
            secret.append(_secret(turn, norm, accuracy, done, int(draw.poisson(50))))
    return public, secret


def _secret(turn: int, norm: float, accuracy: float, done: float, cohort: int) -> dict[str, Any]:
    return {
        "round": turn, "cohort": cohort, "seconds": 4.1, "train_loss": 2.2 - 1.6 * done,
        "train_accuracy": accuracy + 0.05, "personal_accuracy": accuracy + 0.1, "update_norm_mean": norm,
        "update_norm_sd": 0.05, "update_norm_quantiles": _quantiles(norm, 0.2), "clipped_fraction": 0.98 - 0.5 * done,
        "alpha_mean": 0.6 + 0.25 * done, "alpha_spread": 0.15 - 0.08 * done, "clip_bias": 0.15 - 0.1 * done,
        "noise_norm": 12.7, "signal_to_noise": 0.012 + 0.004 * done,
        "client_accuracy_quantiles": _quantiles(accuracy, 0.35),
    }  # fmt: skip


def write_run(
    folder: Path,
    algorithm: str = "dp-fedsam",
    seed: int = 0,
    *,
    rounds: int = 300,
    top: float = 0.7,
    private: bool = True,
    adaptive: bool = False,
    statement: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """One synthetic run folder; ``statement`` changes keys of the statement, ``changes`` those of the recipe."""
    (folder / "private").mkdir(parents=True)
    made = recipe(algorithm, seed, rounds, **changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(made, sort_keys=False), encoding="utf-8")
    public, secret = rounds_of(made, top, private, adaptive)
    final = {**STATEMENT, **(statement or {})}
    if final["proven_epsilon"] is None:
        public = [{**record, "epsilon": None} for record in public]
    files = {"metrics": public, "ledger": [{"round": record["round"]} for record in public]}
    if private:
        files["private/private"] = secret
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "privacy.json").write_text(json.dumps(final))
    return folder


def grouped(folders: list[Path]) -> list[Group]:
    """The runs of these folders, by setting."""
    return group_runs(read_runs(folders))


def write_many(root: Path, methods: int, seeds: int, rounds: int = 300) -> list[Path]:
    """``methods`` × ``seeds`` run folders under ``root``."""
    names = ["dp-fedavg", "dp-fedsam", "dp-fedsam-topk", "dp-fedpgn", "dp-fedpgn-ls", "dp-fedavg-blur", "dp-fedavg-lus"]
    names += ["dp-fedavg-blurs", "fed-smp-randk", "fed-smp-topk", "dp-fedavg-ls", "ddgauss", "centaur", "dp2-fedsam"]
    names += ["dp-fedavg-ft"]
    return [
        write_run(root / f"{name}-{seed}", name, seed, top=0.55 + 0.015 * place, rounds=rounds)
        for place, name in enumerate(names[:methods])
        for seed in range(seeds)
    ]
