"""Systems that take turns: each a process, started together, one round at a time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, python_of, versions
from benchmarks.workloads import Workload, write_data

PATIENCE = 900.0


@dataclass(frozen=True)
class System:
    """name: as in the table. module, kind: what runs. peer: whose environment; empty for this one.
    device: cpu or cuda.
    """

    name: str
    module: str
    kind: str
    precision: str = "fp32"
    peer: str = ""
    device: str = "cpu"

    def fits(self, workload: Workload) -> bool:
        """bf16 is measured where convolutions are; peers where they can."""
        convolutional = len(workload.shape) == 3
        return self.name not in workload.without and (self.precision == "fp32" or convolutional)


class Running:
    """A started system: it has loaded its libraries when it first answers, and is warm after the first ``ask``."""

    def __init__(self, system: System, workload: Workload, folder: Path, environments: Path) -> None:
        python = python_of(system.peer, environments) if system.peer else sys.executable
        self.system, self.versions = system, versions(python)
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed with the process)
        words = [workload.name, str(folder), system.kind, system.precision]
        words += [] if system.device == "cpu" else [system.device]
        self.process = subprocess.Popen(
            [python, "-m", f"benchmarks.systems.{system.module}", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(),
        )

    def answer(self) -> dict[str, Any]:
        """The next line it says."""
        ready, _, _ = select.select([self.process.stdout.fileno()], [], [], PATIENCE)  # type: ignore[union-attr]
        line = self.process.stdout.readline() if ready else ""  # type: ignore[union-attr]
        if not line:
            self.process.kill()
            self.log.seek(0)
            raise RuntimeError(f"{self.system.name} ended: {self.log.read()[-1500:]}")
        return dict(json.loads(line))

    def ask(self) -> dict[str, Any]:
        """Let it go on: to its warm-up, or to one round."""
        with contextlib.suppress(BrokenPipeError):  # its end is in the answer
            self.process.stdin.write("go\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        return self.answer()

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def environment() -> dict[str, str]:
    """As the user's own, with the project importable and without Ray's and Flower's reports."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def measure(workload: Workload, systems: list[System], rounds: int, environments: Path) -> dict[str, Any]:
    """Rounds of all systems in turn; each waits while the others work. Only what loads libraries runs together."""
    entries: dict[str, Any] = {}
    running: list[Running] = []

    def attempt(system: System, action: Callable[[], Any]) -> Any:
        try:
            return None if "error" in entries[system.name] else action()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            entries[system.name]["error"] = str(error)[-500:]
            print(f"{workload.name} {system.name}: {error}", file=sys.stderr)
            return None

    with tempfile.TemporaryDirectory() as place:
        write_data(workload, Path(place))
        for system in (s for s in systems if s.fits(workload)):
            entries[system.name] = {"seconds": []}
            one = attempt(system, partial(Running, system, workload, Path(place), environments))
            if one is not None:
                running.append(one)
                entries[system.name]["versions"] = one.versions
        for one in running:
            attempt(one.system, one.answer)
        for one in running:
            attempt(one.system, one.ask)
        for index in range(rounds):
            for one in running:
                said = attempt(one.system, one.ask)
                if said is not None:
                    _note(entries[one.system.name], said, f"{workload.name} round {index} {one.system.name}")
        for one in running:
            one.stop()
    for entry in entries.values():
        if entry["seconds"]:
            entry["min"], entry["median"] = min(entry["seconds"]), statistics.median(entry["seconds"])
    return {"workload": asdict(workload), "systems": entries}


def _note(entry: dict[str, Any], said: dict[str, Any], where: str) -> None:
    entry["seconds"].append(said.pop("seconds"))
    entry["facts"] = said
    print(f"{where} {entry['seconds'][-1]:.4f} s", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.system(), "load_before": load}
