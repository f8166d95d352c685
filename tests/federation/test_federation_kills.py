"""A server killed (SIGKILL) at any of its durable operations: what left it is charged, and all records agree."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_in import Grid, client_at, deployed, grid_of, settings, small

from fedflat.federation import server
from fedflat.federation.close import close
from fedflat.federation.processes import private
from fedflat.federation.project import PACKAGE
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger
from fedflat.simulation.inspection import inspect_run

OPERATIONS = ("fsync", "replace", "unlink", "write")
ROUNDS, LAST = 3, 100
"""Rounds of a run, and how many of its operations a kill is drawn from: all but the last, the clients' among them."""


RECIPE = small(rounds=ROUNDS, cohort={"size": 4, "sampling": "full"}, privacy={"noise_multiplier": 1.0})


def watched(folder: Path) -> Grid:
    """Honest clients, and a spy that writes down which model went out in which round."""
    task = Task.read(folder / "app" / PACKAGE)
    grid = grid_of(task, [client_at(folder, task, number) for number in range(task.form.clients)])

    def spied(answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(message: Any) -> Any:
            sent = message.content["arrays"]["shared"].data
            line = json.dumps([message.content["facts"]["round"], hashlib.sha256(sent).hexdigest()]) + "\n"
            with (folder / "seen").open("a") as file:
                file.write(line)
            return answer(message)

        return handle

    grid.handlers = {number: spied(answer) for number, answer in grid.handlers.items()}
    return grid


def serve_and_die(folder: Path, at: int, after: bool) -> int:
    """Serve in a child that kills itself at its ``at``-th durable operation, before or after it; the signal, or 0."""
    grid = watched(folder)
    child = os.fork()
    if not child:
        try:
            private()
            _count_down(at, after)
            server.serve(grid, Task.read(folder / "app" / PACKAGE), settings(folder, answer_seconds=60))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return os.WTERMSIG(status)


def _count_down(at: int, after: bool) -> None:
    numbers = itertools.count(1)  # one for each operation, whichever thread does it: a checkpoint is written by one

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any, **named: Any) -> Any:
            number = next(numbers)
            if number == at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*given, **named)
            finally:
                if number == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def wrong_in(run: Path) -> list[str]:
    return [f"{check.record}: {check.about}" for check in inspect_run(run) if check.verdict == "wrong"]


def uncharged(folder: Path) -> dict[int, int]:
    """Rounds of which more different results left the server than the ledger has charges of."""
    seen = {tuple(json.loads(line)) for line in (folder / "seen").read_text().splitlines()}
    charged = [entry["round"] for entry in read_ledger(folder / "run" / "ledger.jsonl")]
    left = {round: len([1 for found, _ in seen if found == round + 1]) for round in range(ROUNDS)}
    return {round: count for round, count in left.items() if count > charged.count(round)}


@pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")
@pytest.mark.parametrize("seed", range(10))
def test_a_server_killed_anywhere_owes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Killed twice; what is left is ended for good in a copy, and goes on to its end in place: both hold."""
    folder = tmp_path / "fed"
    deployed(folder, RECIPE)
    (folder / "seen").touch()
    draw = random.Random(seed)
    killed = [serve_and_die(folder, draw.randint(1, last), draw.random() < 0.5) for last in (LAST, LAST // 2)]
    assert killed[0] == signal.SIGKILL
    assert [path for path in (folder / "run").rglob("*") if path.stat().st_mode & 0o077] == []
    if (folder / "run" / "recipe.yaml").exists():
        with monkeypatch.context() as patch:
            for name in ("fed", "state-home"):
                if (tmp_path / name).exists():
                    shutil.copytree(tmp_path / name, tmp_path / "copy" / name)
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "copy" / "state-home"))
            close(Task.read(folder / "app" / PACKAGE), tmp_path / "copy" / "fed" / "run")
        assert wrong_in(tmp_path / "copy" / "fed" / "run") == [] and uncharged(tmp_path / "copy" / "fed") == {}
    server.serve(watched(folder), Task.read(folder / "app" / PACKAGE), settings(folder, answer_seconds=60))
    assert wrong_in(folder / "run") == [] and uncharged(folder) == {}
    facts = json.loads((folder / "run" / "privacy.json").read_text())
    charged = read_ledger(folder / "run" / "ledger.jsonl")
    assert facts["rounds"] == ROUNDS and facts["rounds_charged"] == len(charged) >= ROUNDS
    assert list((tmp_path / "state-home" / "fedflat" / "keys").iterdir()) == []


def test_the_count_of_what_left_finds_a_charge_that_is_missing(tmp_path: Path) -> None:
    """The twin: two different results of a round, one charge."""
    folder = tmp_path / "fed"
    (folder / "run").mkdir(parents=True)
    (folder / "seen").write_text("".join(json.dumps([1, name]) + "\n" for name in ("a", "b", "b")))
    (folder / "run" / "ledger.jsonl").touch()
    assert uncharged(folder) == {0: 2}
