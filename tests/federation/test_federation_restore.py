"""An older copy of a run's folder put back: what was released since is not forgotten, and no noise is drawn twice."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import deployed, final_shared, grid_of, settings, small

from fedflat.core.checks import InputError, RunError
from fedflat.federation import server
from fedflat.federation.client import Client
from fedflat.federation.close import close
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import keys, signing


@pytest.mark.parametrize("ended", [True, False])
def test_a_restored_backup_is_charged_for_what_was_released_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """A backup after round 0 of 3 is put back when the run has ended, or stopped after round 1."""
    task, clients = deployed(tmp_path, small(rounds=3, privacy={"noise_multiplier": 1.0}))
    run, backup = tmp_path / "run", tmp_path / "backup"
    known = server._announce

    def announce(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        known(released, hidden)
        if released["round"] == 0:
            shutil.copytree(run, backup)
        if released["round"] == 1 and not ended:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(server, "_announce", announce)
        try:
            first = server.serve(grid_of(task, clients), task, settings(tmp_path))["epsilon"]
        except KeyboardInterrupt:
            first = None
    assert (first is None) is not ended
    gone, before = read_ledger(run / "ledger.jsonl"), final_shared(run)
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    assert len(read_ledger(run / "ledger.jsonl")) < len(gone)
    facts = server.serve(grid_of(task, clients), task, settings(tmp_path))
    # Every round since the backup was released twice, with two noises: each is charged twice.
    again = len(gone) - 1
    assert facts["rounds"] == 3 and facts["rounds_charged"] == 3 + again
    assert len(read_ledger(run / "ledger.jsonl")) == 3 + again
    if first is not None:
        assert facts["epsilon"] > first
        assert not (final_shared(run) == before).all()


def test_rounds_that_a_restored_run_never_reaches_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup after round 0 of 6 is put back after the end, and the run is ended for good one round later: what was
    released counts, each time, and nothing else. The twin, which charges every round up front, states more."""
    from fedflat.engine import resume, train
    from fedflat.simulation.inspection import inspect_run

    task, clients = deployed(tmp_path / "fed", small(rounds=6, privacy={"noise_multiplier": 1.0}))
    run, known = tmp_path / "fed" / "run", server._announce
    stop_after = [0, 1, 1]

    def announce(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        known(released, hidden)
        if released["round"] == 0 and not (tmp_path / "backup").exists():
            shutil.copytree(run, tmp_path / "backup")
        elif released["round"] == stop_after[0]:
            raise KeyboardInterrupt

    def up_front(job: Any, ledger: Any, round: int) -> None:
        for number in range(round, 6):
            charge(job, ledger, number)

    charge = resume.charge_drawn
    monkeypatch.setattr(server, "_announce", announce)
    server.serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
    stated = []
    for twin in (False, True):
        for name in ("state-home", "fed"):  # the clients remember what they were shown
            source, place = tmp_path / (f"{name}-kept" if twin else name), tmp_path / (name if twin else f"{name}-kept")
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(source, place)
        if twin:
            monkeypatch.setattr(train, "charge_drawn", up_front)
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "backup", run)
        stop_after[:] = [1]
        with pytest.raises(KeyboardInterrupt):
            server.serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
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
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "backup", run)
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


def test_the_open_round_of_a_run_without_its_newest_checkpoint_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than its lines say may have been asked; where more are gone nothing is written."""
    task, clients = deployed(tmp_path, small(rounds=5, privacy={"trust": "local", "noise_multiplier": 1.0}))
    known, run = server._announce, tmp_path / "run"

    def announce(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        known(released, hidden)
        if released["round"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "_announce", announce)
    with pytest.raises(KeyboardInterrupt):
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    max(run.glob("checkpoints/*")).unlink()
    shutil.copytree(run, tmp_path / "kept")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=r"checkpoints: found none after round 0; allowed: that of round 3"):
        close(task, run)
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "kept", run)
    assert close(task, run)[0]["rounds_charged"] == 4
