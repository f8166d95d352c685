"""``python -m benchmarks``: every system on every workload, interleaved; JSON and a table in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.environments import FOLDER, ROOT
from benchmarks.server import server_costs
from benchmarks.table import markdown
from benchmarks.table_gpu import markdown_gpu
from benchmarks.turns import System, environment, machine, measure
from benchmarks.workloads import ALL, BY_NAME
from fedflat.core.process import using_threads

RESULTS = Path(__file__).parent / "results"


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


def start_up(rounds: int) -> dict[str, Any]:
    """Seconds from the command to the first finished round of the quick start, in fresh processes."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            began = time.perf_counter()
            command = [sys.executable, "-m", "fedflat", "run", "-o", "rounds=1", "--out", str(Path(place) / "run")]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment())
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "min": min(seconds), "median": statistics.median(seconds)}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command's options, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: benchmarks.gpu, on one GPU")
    parser.add_argument("--only", nargs="+", help="workloads")
    parser.add_argument("--systems", nargs="+")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each system (at least 5 for a result)"
    )
    parser.add_argument("--environments", type=Path, default=FOLDER, help="where peers are installed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="keep other workloads' results of an earlier session")
    parser.add_argument(
        "--without-extras", action="store_true", help="leave out start-up time and server cost; on a GPU the check"
    )
    parser.add_argument("--check", action="store_true", help="on a GPU: only compare sums with the processor's")
    given = parser.parse_args(words)
    on_gpu = given.device == "cuda"
    known = {
        "only": list(gpu.PARTS) if on_gpu else [w.name for w in ALL],
        "systems": list(gpu.KINDS) if on_gpu else [s.name for s in SYSTEMS],
    }
    for key, names in known.items():
        chosen = getattr(given, key) or names
        setattr(given, key, chosen)
        for name in chosen:
            if name not in names:
                parser.error(f"--{key}: {name}; on {given.device} there is {', '.join(names)}")
    if given.check and not on_gpu:
        parser.error("--check: only with --device cuda")
    return given


def main() -> None:
    given = arguments()
    missing = gpu.missing() if given.device == "cuda" else ""
    if missing:
        sys.exit(f"python -m benchmarks: --device cuda, but {missing}")
    report: dict[str, Any] = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": given.rounds,
        "workloads": {},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    sys.exit((on_gpu if given.device == "cuda" else on_cpu)(given, report))


def on_cpu(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """All systems on the processor, start-up and the server's cost."""
    report = _earlier(report, given, "results")
    chosen = [s for s in SYSTEMS if s.name in given.systems]
    for name in given.only:
        report["workloads"][name] = measure(BY_NAME[name], chosen, given.rounds, given.environments)
        _write(report, given.out, "results", markdown)  # what was measured stays, whatever happens later
    if not given.without_extras:
        report["start_up"] = start_up(given.rounds)
        with using_threads(1):
            report["server"] = server_costs()
    _write(report, given.out, "results", markdown)
    print(markdown(report))


def on_gpu(given: argparse.Namespace, report: dict[str, Any]) -> int:
    """First whether the sums are right, then how fast they are; 1 where a sum is not the processor's."""
    report = _earlier(report | {"gpu": gpu.described()}, given, "gpu")
    if given.check or not given.without_extras:
        report["check"] = gpu.check()
    for name in [] if given.check else given.only:
        report["workloads"][name] = gpu.part_of(name, given.systems, given.rounds, given.environments)
        _write(report, given.out, "gpu", markdown_gpu)
    print(markdown_gpu(report))
    return int(not all(row["same"] for row in report.get("check", [])))


def _earlier(report: dict[str, Any], given: argparse.Namespace, name: str) -> dict[str, Any]:
    """The report of an earlier session, to be added to, or a new one."""
    path = given.out / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if given.add and path.is_file() else report


def _write(report: dict[str, Any], out: Path, name: str, table: Callable[[dict[str, Any]], str]) -> None:
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(table(report), encoding="utf-8")


if __name__ == "__main__":
    main()
