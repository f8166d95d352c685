"""``python -m benchmarks``: every system on every workload, interleaved; JSON and a table in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import FOLDER, ROOT, python_of, versions
from benchmarks.server import server_costs
from benchmarks.table import markdown
from benchmarks.workloads import ALL, BY_NAME, Workload, write_data
from fedflat.engine.choose import one_thread

RESULTS = Path(__file__).parent / "results"
PATIENCE = 900.0


@dataclass(frozen=True)
class System:
    """name: as in the table. module, kind: what runs. peer: whose environment; empty for this one."""

    name: str
    module: str
    kind: str
    precision: str = "fp32"
    peer: str = ""

    def fits(self, workload: Workload) -> bool:
        """bf16 is measured where convolutions are; peers where they can."""
        convolutional = len(workload.shape) == 3
        return self.name not in workload.without and (self.precision == "fp32" or convolutional)


SYSTEMS = [
    System("fedflat", "ours", "auto"),
    System("fedflat-bf16", "ours", "auto", "bf16"),
    System("limit", "plain", "limit"),
    System("limit-bf16", "plain", "limit", "bf16"),
    System("plain-loop", "plain", "loop"),
    System("pfl", "pfl", "default", peer="pfl"),
    System("pfl-tuned", "pfl", "tuned", peer="pfl"),
    System("flower", "flower", "tuned", peer="flower"),
]


class Running:
    """A started system."""

    def __init__(self, system: System, workload: Workload, folder: Path, environments: Path) -> None:
        python = python_of(system.peer, environments) if system.peer else sys.executable
        self.system, self.versions = system, versions(python)
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed with the process)
        module = [
            python,
            "-m",
            f"benchmarks.systems.{system.module}",
            workload.name,
            str(folder),
            system.kind,
            system.precision,
        ]
        self.process = subprocess.Popen(
            module,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=_environment(),
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line it says."""
        import select

        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""  # type: ignore[union-attr]
        if not line:
            self.process.kill()
            self.log.seek(0)
            raise RuntimeError(f"{self.system.name} ended: {self.log.read()[-1500:]}")
        return dict(json.loads(line))

    def round(self) -> dict[str, Any]:
        """One round."""
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self.answer()

    def stop(self) -> None:
        """End it."""
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _environment() -> dict[str, str]:
    """As the user's own, with the project importable and without Ray's and Flower's reports."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def measure(workload: Workload, systems: list[System], rounds: int, environments: Path) -> dict[str, Any]:
    """Rounds of all systems in turn; each waits while the others work."""
    found: dict[str, Any] = {"workload": asdict(workload), "systems": {}}
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as place:
        write_data(workload, Path(place))
        for system in (s for s in systems if s.fits(workload)):
            try:
                running.append(Running(system, workload, Path(place), environments))
                found["systems"][system.name] = {"versions": running[-1].versions, "seconds": []}
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                found["systems"][system.name] = {"error": str(error)[-500:]}
                print(f"{workload.name} {system.name}: {error}", file=sys.stderr)
        for index in range(rounds):
            for one in running:
                entry = found["systems"][one.system.name]
                if "error" in entry:
                    continue
                try:
                    said = one.round()
                except (RuntimeError, OSError) as error:
                    entry["error"] = str(error)[-500:]
                    continue
                entry["seconds"].append(said.pop("seconds"))
                entry["facts"] = said
                print(
                    f"{workload.name} round {index} {one.system.name} {entry['seconds'][-1]:.4f} s",
                    file=sys.stderr,
                    flush=True,
                )
        for one in running:
            one.stop()
    for entry in found["systems"].values():
        if entry.get("seconds"):
            entry["min"], entry["median"] = min(entry["seconds"]), statistics.median(entry["seconds"])
    return found


def start_up(rounds: int) -> dict[str, Any]:
    """Seconds from the command to the first finished round of the quick start, in fresh processes."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            began = time.perf_counter()
            command = [sys.executable, "-m", "fedflat", "run", "-o", "rounds=1", "--out", str(Path(place) / "run")]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=_environment())
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "min": min(seconds), "median": statistics.median(seconds)}


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


def main() -> None:
    names, systems = [w.name for w in ALL], [s.name for s in SYSTEMS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="workloads")
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each system (at least 5 for a result)"
    )
    parser.add_argument("--environments", type=Path, default=FOLDER, help="where peers are installed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="keep other workloads' results of an earlier session")
    parser.add_argument("--without-extras", action="store_true", help="leave out start-up time and server cost")
    given = parser.parse_args()
    chosen = [s for s in SYSTEMS if s.name in given.systems]
    report: dict[str, Any] = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": given.rounds,
        "workloads": {},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    if given.add and (given.out / "results.json").is_file():
        report = json.loads((given.out / "results.json").read_text(encoding="utf-8"))
    for name in given.only:
        report["workloads"][name] = measure(BY_NAME[name], chosen, given.rounds, given.environments)
        _write(report, given.out)  # what was measured stays, whatever happens later
    if not given.without_extras:
        report["start_up"] = start_up(given.rounds)
        with one_thread():
            report["server"] = server_costs()
    _write(report, given.out)
    print(markdown(report))


def _write(report: dict[str, Any], out: Path) -> None:
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(markdown(report), encoding="utf-8")


if __name__ == "__main__":
    main()
