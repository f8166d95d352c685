"""SuperLink, SuperNodes and apps as real processes on this machine: a whole run; client and server killed; restarts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

if shutil.which("flower-superlink") is None and not (Path(os.sys.executable).parent / "flower-superlink").exists():  # type: ignore[attr-defined]
    pytest.skip("Flower's programs are not installed", allow_module_level=True)

from fork_server import CONTEXT
from forked import Forked, programs
from ports import free_port
from stand_in import client_at, final_shared, rows, small

from fedflat.core.types import Broadcast
from fedflat.federation import local
from fedflat.federation.local import Federation
from fedflat.federation.project import PACKAGE, write_project
from fedflat.federation.server import run_id
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint
from fedflat.simulation import run as simulation

PATIENCE = 240.0
WINDOW = 160
"""Bytes from the end of an update (weights of the last layer) that are looked for in files."""


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def made(folder: Path, nodes: int, **changes: Any) -> Federation:
    write_project(small(data={"clients": nodes}, cohort={"size": nodes}, **changes), folder, port=free_port())
    return Forked(folder, PATIENCE)


def logs(federation: Federation) -> str:
    return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(federation.logs.glob("*")))


def wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not path.exists():
        time.sleep(0.1)
    assert path.exists()


def files_with(folder: Path, needle: bytes) -> list[Path]:
    """Every file under a folder that holds these bytes."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and needle in path.read_bytes()]


def first_updates(fed: Path) -> tuple[torch.Tensor, list[Any]]:
    """w before round 0, and what each client sends then under central trust: float32, clipped, without noise."""
    copy = fed.with_name("copy")
    shutil.copytree(fed, copy)
    task, found = Task.read(fed / "app" / PACKAGE), []
    for number in range(task.form.clients):
        client = client_at(copy, task, number)
        job = client.job
        broadcast = Broadcast(0, job.initial_weights[: job.parts.layout.dimension], job.threshold, 1.0)
        found.append(client.update(broadcast)[0].numpy())
    shutil.rmtree(copy)
    return broadcast.shared, found


def check_numbers(federation: Federation, folder: Path) -> None:
    """The run in ``folder/fed/run`` is the simulation's, and left nothing where it should not be."""
    simulated = simulation.run(federation.task.recipe, out=folder / "sim")
    run = folder / "fed" / "run"
    torch.testing.assert_close(final_shared(run), final_shared(folder / "sim"), rtol=1e-5, atol=1e-6)
    shown = rows(run / "metrics.jsonl")
    assert [row["test_accuracy"] for row in shown] == [row["test_accuracy"] for row in simulated.history]
    assert (folder / "fed" / "clients" / "00000" / "state" / "head.safetensors").exists()
    assert json.loads((run / "privacy.json").read_text())["noise_source"].startswith("256 bits")
    assert list((folder / "state-home" / "fedflat" / "keys").iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_federation_of_processes(tmp_path: Path) -> None:
    """SuperLink, two SuperNodes, `flwr run`: the simulation's numbers. Then a run in which a client is killed while it
    trains, a second server is refused, the server is killed, the client is back, and a third server goes on to the
    end."""
    run = tmp_path / "fed" / "faults"
    federation = made(tmp_path / "fed", 2, algorithm="dp2-fedsam")
    sent = [update.tobytes()[-WINDOW:] for update in first_updates(tmp_path / "fed")[1]]  # what to look for in files
    began = time.time()
    with federation:
        federation.start()
        assert federation.wait(federation.run(), PATIENCE) == "finished:completed", logs(federation)
        check_numbers(federation, tmp_path)
        before, updates = first_updates(tmp_path / "fed")  # others than in the first run: the heads have moved
        sent += [update.tobytes()[-WINDOW:] for update in updates]
        first = federation.run(config=f'out="{run}" answer-seconds=25.0')
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not programs("flwr-clientapp", federation.processes["client-1"].pid):
            time.sleep(0.05)
        federation.kill("client-1")
        second = federation.run(config=f'out="{run}" wait-for-nodes=1')  # while the first waits for client 1
        assert federation.wait(second, PATIENCE) == "finished:failed"
        wait_for(run / "checkpoints" / "round-000001.safetensors", PATIENCE)
        for process in programs("flwr-serverapp", federation.processes["superlink"].pid):
            os.kill(process, signal.SIGKILL)
        moved = checkpoint.load(run / "checkpoints" / "round-000001.safetensors")[0].shared - before
        torch.testing.assert_close(2 * moved, torch.from_numpy(updates[0]), rtol=1e-4, atol=1e-6)  # client 0's alone
        assert [path for needle in sent for path in files_with(tmp_path, needle)] == []  # killed, and in mid-round
        lines = [entry["round"] for entry in read_ledger(run / "ledger.jsonl")]
        assert lines == [0] and not (run / "privacy.json").exists()
        assert federation.wait(first, PATIENCE) == "finished:failed"  # the SuperLink sees by itself that it is gone
        federation.start_node(1)  # it signs off the killed one: Flower alone would refuse it for up to a minute
        third = federation.run(config=f'out="{run}" answer-seconds=25.0 wait-for-nodes=2')
        assert federation.wait(third, PATIENCE) == "finished:completed", logs(federation)
    assert [path for needle in sent for path in files_with(tmp_path, needle)] == []  # what clients sent is nowhere
    open_to_others = [path for path in (tmp_path / "fed").rglob("*") if path.stat().st_mode & 0o077]
    compiled = {*(tmp_path / "fed" / "app").rglob("__pycache__"), *(tmp_path / "fed" / "app").rglob("*.pyc")}
    compiled |= {path.parent for path in compiled}  # Python's own copy of the app's code, which is nobody's secret
    assert [path for path in open_to_others if path.stat().st_mtime > began and path not in compiled] == []
    operator = tmp_path / "state-home" / "fedflat" / "operator" / f"{run_id(run)}.jsonl"
    counts = rows(operator)
    assert counts == [{"round": 0, "missing": 1}, {"round": 1}]  # in round 1 it took part again
    assert [entry["round"] for entry in read_ledger(run / "ledger.jsonl")] == [0, 1]
    facts = json.loads((run / "privacy.json").read_text())
    assert facts["rounds"] == facts["rounds_charged"] == 2


def of(folder: Path) -> dict[int, str]:
    """Every process whose surroundings name this folder, but this one."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    found.pop(os.getpid(), None)
    return found


def until_none(folder: Path, seconds: float) -> dict[int, str]:
    """What is left of a folder's processes after at most so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and of(folder):
        time.sleep(0.1)
    return of(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
@pytest.mark.long
def test_an_ended_and_a_killed_launcher_leave_nothing(tmp_path: Path) -> None:
    """`python -m fedflat.federation.local`: SIGHUP (a closed terminal) in a round ends everything in order; the second
    launcher, which goes on from there, is killed, and everything ends by itself."""
    fed = tmp_path / "fed"
    write_project(small(rounds=4, data={"clients": 2}, cohort={"size": 2}), fed, port=free_port())

    def launched() -> subprocess.Popen[bytes]:
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fedflat.federation.local", str(fed)]
        return subprocess.Popen(command, env=surroundings, stderr=subprocess.DEVNULL, start_new_session=True)

    for number, finished, status in (signal.SIGHUP, 1, 128 + signal.SIGHUP), (signal.SIGKILL, 2, -signal.SIGKILL):
        launcher = launched()
        wait_for(fed / "run" / "checkpoints" / f"round-{finished:06d}.safetensors", PATIENCE)
        assert {"flwr-serverapp"} <= set(of(tmp_path).values())
        launcher.send_signal(number)
        assert launcher.wait(30) == status
        assert until_none(tmp_path, 15) == {}
        assert not (fed / "run" / "privacy.json").exists()
    charged = [entry["round"] for entry in read_ledger(fed / "run" / "ledger.jsonl")]
    assert {0, 1} <= set(charged) <= {0, 1, 2} and len(charged) <= 5


def idle(project: Path) -> int:
    """A launcher's work, with a process that only waits; a second signal comes while it tidies up."""
    with Federation(project) as federation, ExitStack() as end:
        end.callback(lambda: (signal.raise_signal(signal.SIGTERM), (project / "tidied").touch()))
        federation._spawn("idle", ["sleep", "600"])
        (project / "started").touch()
        time.sleep(600)
    return 0


def launch(project: Path) -> None:
    local._whole_run = idle
    sys.exit(local.main([str(project)]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.long
def test_every_signal_that_asks_for_an_end_ends_what_was_started(tmp_path: Path, number: int) -> None:
    fed = made(tmp_path / "fed", 2).project
    launcher = CONTEXT.Process(target=launch, args=(fed,))
    launcher.start()
    wait_for(fed / "started", PATIENCE)
    assert "sleep" in of(tmp_path).values()
    os.kill(launcher.pid or 0, number)
    launcher.join(30)
    assert launcher.exitcode == 128 + number and (fed / "tidied").exists()
    end = time.monotonic() + 15
    while time.monotonic() < end and "sleep" in of(tmp_path).values():
        time.sleep(0.1)
    assert "sleep" not in of(tmp_path).values()
