"""An older copy of a run's folder put back: what was released since is not forgotten, and no noise is drawn twice."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import after_rounds, deployed, final_shared, grid_of, put_back, settings, small, stopped

from fedflat.core.checks import InputError, RunError
from fedflat.engine import resume, train
from fedflat.federation import server
from fedflat.federation.client import Client
from fedflat.federation.close import close
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import keys, signing
from fedflat.simulation.inspection import inspect_run


def test_a_restored_backup_is_charged_for_what_was_released_since(tmp_path: Path) -> None:
    """A backup after round 0 of 3 is put back when the run has ended: its key is gone, the mark beside it is not."""
    task, clients = deployed(tmp_path, small(rounds=3, privacy={"noise_multiplier": 1.0}))
    run, backup = tmp_path / "run", tmp_path / "backup"
    with after_rounds(lambda round: shutil.copytree(run, backup) if round == 0 else None):
        first = server.serve(grid_of(task, clients), task, settings(tmp_path))
    before = final_shared(run)
    put_back(backup, run)
    facts = server.serve(grid_of(task, clients), task, settings(tmp_path))
    # Every round since the backup was released twice, with two noises: each is charged twice.
    assert facts["rounds"] == 3 and facts["rounds_charged"] == len(read_ledger(run / "ledger.jsonl")) == 3 + 2
    assert facts["epsilon"] > first["epsilon"] and not (final_shared(run) == before).all()


def test_rounds_that_a_restored_run_never_reaches_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup after round 0 of 6 is put back after the end, and the run is ended for good one round later: what was
    released counts, each time, and nothing else. The twin, which charges every round up front, states more."""
    task, clients = deployed(tmp_path / "fed", small(rounds=6, privacy={"noise_multiplier": 1.0}))
    run, backup = tmp_path / "fed" / "run", tmp_path / "backup"
    charge = resume.charge_drawn

    def up_front(job: Any, ledger: Any, round: int) -> None:
        for number in range(round, 6):
            charge(job, ledger, number)

    with after_rounds(lambda round: shutil.copytree(run, backup) if round == 0 else None):
        server.serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
    for name in ("state-home", "fed"):  # the clients remember what they were shown
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-kept")
    stated = []
    for charging in (charge, up_front):
        for name in ("state-home", "fed"):
            put_back(tmp_path / f"{name}-kept", tmp_path / name)
        monkeypatch.setattr(train, "charge_drawn", charging)
        put_back(backup, run)
        stopped(task, grid_of(task, clients), settings(tmp_path / "fed"), after=1)
        stated.append(close(task, run)[0])
        assert [check.about for check in inspect_run(run) if check.verdict == "wrong"] == []
    assert [facts["rounds_charged"] for facts in stated] == [6 + 1, 6 + 5]
    assert stated[0]["epsilon"] < stated[1]["epsilon"]


def test_a_run_whose_operators_key_is_gone_or_another_is_refused(tmp_path: Path) -> None:
    """Its clients would refuse every question, and each round would be released and charged without them."""
    task, clients = deployed(tmp_path, small(privacy={"noise_multiplier": 1.0}))
    server.serve(grid_of(task, clients), task, settings(tmp_path))
    place, kept = signing.place(), tmp_path / "kept.pem"
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    place.rename(kept)
    signing.public_place(place).rename(tmp_path / "kept.pub")
    with pytest.raises(InputError, match=r"operator.pem, which is gone; allowed: the key with which the run in .*run "):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    assert not place.exists()
    signing.Operator.create(place)
    with pytest.raises(InputError, match="another key than the one that signed before"):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    with pytest.raises(InputError, match=r"operator.pem, which exists; allowed: another --key"):
        signing.Operator.create(place)
    place.unlink()
    with pytest.raises(InputError, match=r"operator.pub, which exists"):  # it may be all that tells the key apart
        signing.Operator.create(place)
    with pytest.raises(InputError, match=r"key.pub; allowed: a name that does not end in .pub"):
        signing.Operator.create(tmp_path / "key.pub")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    kept.replace(place)
    assert server.serve(grid_of(task, clients), task, settings(tmp_path))["rounds_charged"] == 2


def test_no_new_run_takes_the_place_of_one_that_was_charged_and_deleted(tmp_path: Path) -> None:
    task, clients = deployed(tmp_path, small(privacy={"noise_multiplier": 1.0}))
    server.serve(grid_of(task, clients), task, settings(tmp_path))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(InputError, match=r"run, without the files of run [0-9a-f]{32}, which was charged 2 events"):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    elsewhere = settings(tmp_path, out=tmp_path / "another")
    assert server.serve(grid_of(task, clients), task, elsewhere)["rounds_charged"] == 2


def test_clients_that_refuse_the_ledger_end_the_run_before_the_next_charge(tmp_path: Path) -> None:
    """An old copy put back where the marks are lost too: no client will ever answer it. Nor is it closed for less."""
    task, clients = deployed(tmp_path, small(rounds=4, privacy={"noise_multiplier": 1.0}))
    grid, run, stop = grid_of(task, clients), tmp_path / "run", {"calls": 0}
    known = dict(grid.handlers)

    def stopped(message: Any) -> Any:
        stop["calls"] += 1
        if stop["calls"] == 2:
            shutil.copytree(run, tmp_path / "backup")
        if stop["calls"] == 4:
            raise KeyboardInterrupt
        return known[0](message)

    grid.handlers[0] = stopped
    with pytest.raises(KeyboardInterrupt):
        server.serve(grid, task, settings(tmp_path))
    ledger = run / "ledger.jsonl"
    whole, state = ledger.read_bytes(), keys.folder().parent
    for name in ("keys", "marks"):
        shutil.rmtree(state / name)
    ledger.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="found no line for round 1, which was released"):
        close(task, run)
    assert not (run / "ended.json").exists()
    put_back(tmp_path / "backup", run)
    with pytest.raises(RunError, match="the clients refuse this run: their app, recipe or roster"):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    assert len(read_ledger(ledger)) == 1


def test_a_model_that_is_not_finite_is_sent_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, clients = deployed(tmp_path, small(rounds=4, privacy={"trust": "local", "noise_multiplier": 1.0}))
    hostile = lambda client, _: (torch.full((client.job.parts.message_length,), 3e38), 0)  # noqa: E731
    monkeypatch.setattr(Client, "update", hostile)
    with pytest.raises(RunError, match="the model is not finite, and no client trains from it"):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl")) < 4


def test_clients_that_have_answered_already_end_nothing(tmp_path: Path) -> None:
    """A server that died in its first round asks again: under local trust nobody answers twice, and the run goes on."""
    task, clients = deployed(tmp_path, small(privacy={"trust": "local", "noise_multiplier": 1.0}))
    for client in clients:
        client.store.note_participation(0)
    assert server.serve(grid_of(task, clients), task, settings(tmp_path))["rounds"] == 2


def test_the_open_round_of_a_run_without_its_newest_checkpoint_is_charged(tmp_path: Path) -> None:
    """More than its lines say may have been asked; where more are gone nothing is written."""
    task, clients = deployed(tmp_path, small(rounds=5, privacy={"trust": "local", "noise_multiplier": 1.0}))
    run = tmp_path / "run"
    stopped(task, grid_of(task, clients), settings(tmp_path), after=2)
    max(run.glob("checkpoints/*")).unlink()
    shutil.copytree(run, tmp_path / "kept")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=r"checkpoints: found none after round 0; allowed: that of round 3"):
        close(task, run)
    put_back(tmp_path / "kept", run)
    assert close(task, run)[0]["rounds_charged"] == 4
