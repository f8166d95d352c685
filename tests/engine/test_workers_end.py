"""Worker processes do not outlive a parent that was killed, nor their run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
import fedflat
from fedflat.backends import workers
workers.WAIT = 0.5
pids = []
fedflat.run(
    {
        "rounds": 1000000,
        "data": {"dataset": "digits", "clients": 20},
        "model": "linear",
        "algorithm": "fedavg",
        "local": {"steps": 2, "batch_size": 8},
        "cohort": {"size": 10},
        "engine": {"backend": "workers", "processes": 1},
        "evaluation": {"every": 1000000},
    },
    on_start=lambda job: pids.append(job),
    on_round=lambda *facts: print(*[p.pid for p in pids[0].backend.processes], flush=True),
)
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/status").read_text().split("State:")[1].split()[0] != "Z"


@pytest.mark.long
def test_a_killed_parent_leaves_no_workers(tmp_path: Path) -> None:
    # A plain script without a __main__ guard: workers must not run it again.
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in workers if _alive(pid)]


@pytest.mark.long
def test_runs_side_by_side_end_with_their_workers(tmp_path: Path) -> None:
    """A process of the comparison's pool waits at its end for those that it has started."""
    changes = ("engine.backend=workers", "engine.processes=2", "rounds=1", "data.clients=20", "cohort.size=5")
    options = ["--seeds", "2", "--out", tmp_path / "both", *(f"-o{change}" for change in changes)]
    command = [sys.executable, "-m", "fedflat", "compare", "quick-start", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
