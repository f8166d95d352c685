"""SuperLink, SuperNodes and apps as real processes on this machine: a whole run; client and server killed; restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
if shutil.which("flower-superlink") is None and not (Path(os.sys.executable).parent / "flower-superlink").exists():  # type: ignore[attr-defined]
    pytest.skip("Flower's programs are not installed", allow_module_level=True)

from stand_in import final_shared, small

from fedflat import simulation
from fedflat.federation.local import Federation
from fedflat.federation.project import write_project
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger

PATIENCE = 240.0


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def made(folder: Path, nodes: int, **changes: Any) -> Federation:
    write_project(small(data={"clients": nodes}, cohort={"size": nodes}, **changes), folder, port=free_port())
    return Federation(folder, PATIENCE)


def logs(federation: Federation) -> str:
    return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(federation.logs.glob("*")))


def wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not path.exists():
        time.sleep(0.1)
    assert path.exists()


def programs(name: str, port: int) -> list[int]:
    """Flower's short-lived app processes that report to a port of this machine, by the name of their program."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if any(word.endswith(name.encode()) for word in words) and f"127.0.0.1:{port}".encode() in words:
            found.append(int(entry.name))
    return found


def test_a_federation_of_processes_gives_the_simulations_numbers(tmp_path: Path) -> None:
    """`fedflat deploy`, SuperLink, two SuperNodes, `flwr run`; personal heads; an unregistered key is turned away."""
    with made(tmp_path / "fed", 2, algorithm="dp2-fedsam") as federation:
        federation.start()
        run = federation.run()
        assert federation.wait(run, PATIENCE) == "finished:completed", logs(federation)
    simulated = simulation.run(federation.task.recipe, out=tmp_path / "sim")
    torch.testing.assert_close(
        final_shared(tmp_path / "fed" / "run"), final_shared(tmp_path / "sim"), rtol=1e-5, atol=1e-6
    )
    shown = [json.loads(line) for line in (tmp_path / "fed" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["test_accuracy"] for row in shown] == [row["test_accuracy"] for row in simulated.history]
    assert (tmp_path / "fed" / "clients" / "00000" / "state" / "head.safetensors").exists()
    facts = json.loads((tmp_path / "fed" / "run" / "privacy.json").read_text())
    assert facts["noise_source"].startswith("256 bits")
    assert list((tmp_path / "state-home" / "fedflat" / "keys").iterdir()) == []


@pytest.mark.slow
def test_a_client_and_the_server_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    """A SuperNode is killed in training, a second `flwr run` refused, the ServerApp killed; a third ends the run."""
    changes = {"rounds": 3, "privacy": {"noise_multiplier": 1.0}}
    with made(tmp_path / "fed", 2, **changes) as federation:
        federation.start()
        federation.run(config="answer-seconds=20.0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not programs("flwr-clientapp", federation.port + 2):
            time.sleep(0.05)
        federation.kill("client-1")  # in the middle of its local training; it stays away
        wait_for(tmp_path / "fed" / "run" / "checkpoints" / "round-000001.safetensors", PATIENCE)
        second = federation.run(config="wait-for-nodes=1")
        assert federation.wait(second, PATIENCE) == "finished:failed"  # two servers on one run: the second is refused
        for process in programs("flwr-serverapp", federation.port):
            os.kill(process, signal.SIGKILL)
        lines = len(read_ledger(tmp_path / "fed" / "run" / "ledger.jsonl"))
        assert 1 <= lines < 3 and not (tmp_path / "fed" / "run" / "privacy.json").exists()
        third = federation.run(config="answer-seconds=20.0 wait-for-nodes=1")
        assert federation.wait(third, PATIENCE) == "finished:completed", logs(federation)
    rounds = [entry["round"] for entry in read_ledger(tmp_path / "fed" / "run" / "ledger.jsonl")]
    assert rounds[:lines] == list(range(lines)) and set(rounds) == {0, 1, 2}
    facts = json.loads((tmp_path / "fed" / "run" / "privacy.json").read_text())
    assert facts["rounds"] == 3 and facts["rounds_charged"] == len(rounds)
    assert Task.read(tmp_path / "fed" / "app" / "fedflat_app").form.clients == 2
