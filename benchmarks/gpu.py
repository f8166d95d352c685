"""``python -m benchmarks --device cuda``: fedflat's rounds on a GPU beside one central model at its best batch size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.environments import ROOT
from benchmarks.turns import System, environment, measure
from benchmarks.workloads import BY_NAME

KINDS = {
    "fedflat": ("ours", "auto"),
    "sequential": ("ours", "sequential"),
    "vectorized": ("ours", "vectorized"),
    "limit": ("central", "eager"),
    "limit-compile": ("central", "compile"),
    "limit-graph": ("central", "graph"),
}
"""Systems by name: module and kind."""
LIMITS = tuple(name for name, (module, _) in KINDS.items() if module == "central")
SMALL = ("fedflat", "sequential", "vectorized", "limit", "limit-graph")
PARTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "G1": ("G1", "fp32", tuple(KINDS)),
    "G1-bf16": ("G1", "bf16", ("fedflat", "sequential", *LIMITS)),
    "W2": ("W2", "fp32", SMALL),
    "W1": ("W1", "fp32", SMALL),
}
"""What is measured, in this order: workload, precision, systems."""


def missing() -> str:
    """Why there is no GPU; empty where there is one."""
    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda is not None
    return "PyTorch finds no GPU" if built else f"this PyTorch ({torch.__version__}) is built without CUDA"


def systems_of(part: str, wanted: list[str]) -> list[System]:
    """A part's systems among those wanted."""
    _, precision, names = PARTS[part]
    return [System(name, *KINDS[name], precision, device="cuda") for name in names if name in wanted]


def described() -> dict[str, Any]:
    """The GPU and what drives it."""
    facts = torch.cuda.get_device_properties(0)
    ask = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30).stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError):
        said = []
    return {
        "name": facts.name,
        "memory_gib": facts.total_memory / 2**30,
        "driver": said[0] if said and said[0] else "unknown",
        "power_limit": said[1] if len(said) > 1 else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def check() -> list[dict[str, Any]]:
    """``benchmarks.agreement`` in a process of its own, so that whatever ends it ends nothing else."""
    command = [sys.executable, "-m", "benchmarks.agreement", "cuda"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment())
        rows: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [{"method": "all", "apart": {"all": "not done after 300 s"}, "same": False, "tolerance": 0.0}]
    except (IndexError, json.JSONDecodeError):
        return [{"method": "all", "apart": {"all": found.stderr[-500:]}, "same": False, "tolerance": 0.0}]
    return rows


def part_of(part: str, wanted: list[str], rounds: int, environments: Path) -> dict[str, Any]:
    """Measure one part."""
    workload, precision, _ = PARTS[part]
    found = measure(BY_NAME[workload], systems_of(part, wanted), rounds, environments)
    return found | {"precision": precision}
