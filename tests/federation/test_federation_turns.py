"""Clients that take turns as they come: nobody comes back too early, through restarts too, and deploy says why."""

import fcntl
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in import deployed, grid_of, put_back, rows, settings, small, stopped

from fedflat.assembly.plans import plan_of
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.cohorts import MinSeparation
from fedflat.core.types import RoundState
from fedflat.federation import server
from fedflat.federation.project import _taking_turns, write_project
from fedflat.federation.replies import CheckIns
from fedflat.privacy.accounting.factorisation import factor_for
from fedflat.privacy.ledger import read as read_ledger
from fedflat.privacy.plan import build_plan
from fedflat.simulation.recomputed import Records, second_account

TURNS: dict[str, Any] = {
    "rounds": 6, "cohort": {"size": 1, "sampling": "min-separation", "separation": 3},
    "privacy": {"noise_multiplier": 1.0, "noise": {"kind": "banded"}},
}  # fmt: skip


def asks(grid: Any) -> list[tuple[int, int]]:
    """(round, client) of every message that went out."""
    return [(m.content["facts"]["round"], m.metadata.dst_node_id - 1000) for m in grid.pushed]


def gaps(asked: list[tuple[int, int]]) -> list[int]:
    turns = {client: [r for r, c in asked if c == client] for _, client in asked}
    return [b - a for mine in turns.values() for a, b in pairwise(mine)]


def test_a_deployment_takes_turns(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    task, clients = deployed(folder, small(**TURNS))
    grid = grid_of(task, clients)
    facts = server.serve(grid, task, settings(folder))
    asked = asks(grid)
    assert len(asked) == 6
    assert min(gaps(asked)) >= 3
    assert "take turns" in facts["facts"]["check_ins"]
    assert facts["facts"]["epsilon_cohort_known"] is None  # the figure holds towards them already
    assert second_account(Records(folder / "run")).ok


def test_restarts_bring_nobody_back_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops in round 2, after its line was written and before its model is kept."""
    folder = tmp_path / "fed"
    task, clients = deployed(folder, small(**TURNS))
    first = grid_of(task, clients)
    real, seen = server.train, []

    def stopping(job: Any, **named: Any) -> Any:
        def stop(released: Any, hidden: Any) -> None:
            seen.append(released["round"])
            if released["round"] == 1:
                step = job.parts.optimizer

                def fails(view: Any) -> Any:
                    raise OSError(28, "no space")

                job.parts = job.parts.__class__(**{**vars(job.parts), "optimizer": fails})
                assert step is not fails

        return real(job, on_round=stop)

    monkeypatch.setattr(server, "train", stopping)
    with pytest.raises(RunError):
        server.serve(first, task, settings(folder))
    assert {entry["round"] for entry in read_ledger(folder / "run" / "ledger.jsonl")} == {0, 1, 2}
    monkeypatch.setattr(server, "train", real)
    second = grid_of(task, clients)
    facts = server.serve(second, task, settings(folder))
    assert min(gaps(asks(first) + asks(second))) >= 3
    again = [client for round, client in asks(second) if round == 2]
    assert again != [client for round, client in asks(first) if round == 2]
    assert any("noise keys drew" in reason for reason in facts["reasons"])
    assert second_account(Records(folder / "run")).ok


def test_the_first_log_line_counts_every_key(caplog: pytest.LogCaptureFixture) -> None:
    numbers: dict[str, Any] = {"clients": 40, "cohort": 8, "rounds": 12, "noise_multiplier": 0.9}
    plan = build_plan(**numbers, sampling="min-separation", noise="toeplitz", bands=2)
    entries = [{**plan.record(t, 0.5), "key_id": key} for t, key in enumerate(["a"] * 4 + ["b"] * 4 + ["c"] * 2)]
    job = SimpleNamespace(parts=SimpleNamespace(plan=plan))
    with caplog.at_level("INFO", "fedflat.server"):
        server._tell_start(job, SimpleNamespace(state=state(10), entries=entries))  # type: ignore[arg-type]
    told = caplog.records[-1].facts["epsilon"]  # type: ignore[attr-defined]
    assert told == plan.standing(entries).epsilon(10) > plan.epsilon(10)


def test_a_backup_put_back_brings_nobody_back_early(tmp_path: Path) -> None:
    """A copy of the folder from after round 1, put back when round 3 was released: its ledger lacks two rounds."""
    folder, backup = tmp_path / "fed", tmp_path / "backup"
    task, clients = deployed(folder, small(**TURNS))
    first, second = grid_of(task, clients), grid_of(task, clients)

    def copied(round: int) -> None:
        if round == 1:
            shutil.copytree(folder / "run", backup)

    stopped(task, first, settings(folder), after=3, act=copied)
    put_back(backup, folder / "run")
    facts = server.serve(second, task, settings(folder))
    assert min(gaps(sorted(asks(first) + asks(second)))) >= 3
    assert any("2 noise keys drew" in reason for reason in facts["reasons"])
    assert second_account(Records(folder / "run")).ok


def test_one_server_on_copies_of_a_folder(tmp_path: Path) -> None:
    """They share half a key and everybody's last turns: the second is refused, whatever folder it has."""
    folder = tmp_path / "fed"
    task, clients = deployed(folder, small(**TURNS))
    with pytest.raises(RunError, match="connected"):  # opened, and nobody there
        server.serve(grid_of(task, []), task, settings(folder, wait_for_nodes=1))
    (lock,) = (tmp_path / "state-home" / "fedflat" / "locks").iterdir()
    copy = tmp_path / "copy"
    shutil.copytree(folder / "run", copy)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="copy of its folder"):
            server.serve(grid_of(task, clients), task, settings(folder, out=copy))
    assert not (copy / "privacy.json").exists()


def test_a_server_says_that_noise_drowns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "fed"
    task, clients = deployed(folder, small(**{**TURNS, "privacy": {**TURNS["privacy"], "noise_multiplier": 50.0}}))
    with caplog.at_level("WARNING", "fedflat.server"):
        server.serve(grid_of(task, clients), task, settings(folder))
    assert [record for record in caplog.records if "drowns the signal" in record.getMessage()]


def check_ins(path: Path, charged: set[int]) -> CheckIns:
    return CheckIns(MinSeparation(6, 2, 3), lambda: range(6), path, frozenset(charged))


def state(round: int) -> RoundState:
    return RoundState(round, np.zeros(1), 1.0)  # type: ignore[arg-type]


def test_asks_are_durable_and_void_ones_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "asks"
    check_ins(path, {2, 5})  # the file was lost
    assert "no line for round 2, which was charged" in caplog.messages[0] and not path.exists()
    first = check_ins(path, set())
    taken = [first.cohort(state(t)).tolist() for t in range(3)]
    assert sorted(c for cohort in taken for c in cohort) == list(range(6))
    assert [row["round"] for row in rows(path)] == [0, 1, 2]
    with path.open("a") as file:
        file.write('{"round": 3, "cli')  # torn: nobody was asked
    assert check_ins(path, {0, 1, 2}).cohort(state(2)).tolist() == []
    assert check_ins(path, {0, 1}).cohort(state(2)).tolist() == taken[2]
    assert check_ins(path, {0, 1, 2}).cohort(state(3)).tolist() == taken[0]
    path.write_text(path.read_text().replace('"clients": [', '"clients": [99, '))
    with pytest.raises(RunError, match="asks, line 1: not as it was written"):
        check_ins(path, set())
    path.write_bytes(b'{"round": 0, "clients": [0]}\n{"round": 1, "clients": ["\xff"]}\n')
    with pytest.raises(RunError, match="asks, line 2: not as it was written"):
        check_ins(path, set())
    assert caplog.messages[1:] == [f"{path}, line 4: unfinished, as a kill leaves it; taken out"]
    with pytest.raises(RunError, match="cannot be read"):
        check_ins(tmp_path, set())
    with pytest.raises(RunError, match="cannot be written"):
        check_ins(tmp_path / "nowhere" / "asks", set()).cohort(state(0))


def test_deploy_takes_turns_by_default_and_says_why(tmp_path: Path) -> None:
    recipe = small(cohort={"size": 2}, privacy={"noise_multiplier": None, "epsilon": 5.0, "clip": 0.1})
    made = write_project(recipe, tmp_path / "fed")
    assert "min-separation, 2 rounds apart" in made.note
    assert "banded" in made.note
    assert made.epsilon == pytest.approx(5, rel=1e-3)
    written = (tmp_path / "fed" / "app" / "fedflat_app" / "recipe.yaml").read_text()
    assert "sampling: min-separation" in written
    assert "kind: banded" in written


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": {"noise_multiplier": 1.0}}, "that of a round"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 5.0, "trust": "local"}}, "allowed: central"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 5.0, "clip": {"kind": "adaptive"}}}, "one constant clip"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 5.0}, "cohort": {"size": 3}}, "at most half"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 5.0}, "cohort": {"size": 2, "min": 2}}, "cohort.min"),
        ({"algorithm": {"name": "fedavg"}}, ""),
    ],
)
def test_where_secret_coins_stay(changes: dict[str, Any], said: str) -> None:
    recipe = small(**{"cohort": {"size": 2}, **changes})
    same, note = _taking_turns(recipe, True)
    assert same == recipe
    assert said in note
    assert bool(note) == bool(said)
    assert _taking_turns(recipe, False) == (recipe, "")


def test_clients_of_a_table_that_nobody_counted_take_turns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("who,x,y\n" + "".join(f"{who},{who % 3},{who % 2}\n" for who in range(9)))
    table = {"dataset": str(tmp_path / "t.csv"), "by": "who", "inputs": ["x"], "target": "y", "max_per_client": 1}
    privacy = {"noise_multiplier": None, "epsilon": 5.0}
    recipe = Recipe.of({**small(cohort={"size": 3}, privacy=privacy).dump(), "data": table, "model": "linear"})
    assert _taking_turns(recipe, True)[0].cohort.separation == 3


def test_turns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cohort\.separation"):
        write_project(small(**{**TURNS, "cohort": {**TURNS["cohort"], "separation": 9}}), tmp_path / "fed")


def test_factors_are_made_once_for_a_node_and_not_for_each_message(tmp_path: Path) -> None:
    """A message is answered by a fork of what has made the plan."""
    task, clients = deployed(tmp_path / "fed", small(**TURNS))
    factor_for.cache_clear()
    plan_of(task.recipe, algorithm_of(task.recipe), task.form.clients)
    made = factor_for.cache_info().misses
    assert clients[0].job.parts.plan.rounds == 6
    assert made == factor_for.cache_info().misses == 1
