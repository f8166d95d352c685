"""A client's own record of how well the models do for it: the simulation's personal accuracy, and never on the wire."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import client_at, deployed, grid_of, settings, small
from test_federation_clients import ask_of

from fedflat.core.checks import InputError
from fedflat.federation import personal
from fedflat.federation.client import Client, client_of
from fedflat.federation.project import PACKAGE, client_folder, supernode_command
from fedflat.federation.server import serve
from fedflat.federation.store import Store, read_examples, write_examples
from fedflat.simulation import run as simulation


def holding(client: Client, folder: Path) -> Client:
    """The client with its held-back file, as its SuperNode would start it."""
    found = client_at(folder, client.task, client.number)
    found.held = client_folder(folder, client.number) / "held.safetensors"
    return found


def recipe_of(name: str, **changes: Any) -> Any:
    return small(algorithm=name, rounds=3, data={"client_test_fraction": 0.3}, **changes)


@pytest.mark.parametrize("name", ["dp2-fedsam", "centaur", "p-fedsam", "dp-fedavg-ft", "dp-fedsam-ft", "dp-fedpgn"])
def test_clients_note_the_simulations_personal_accuracy(name: str, tmp_path: Path) -> None:
    """Asked in round t, a client notes the model after t rounds; the last one it evaluates by the command."""
    folder = tmp_path / "fed"
    task, clients = deployed(folder, recipe_of(name, local={"momentum": 0 if name == "dp-fedpgn" else 0.5}))
    serve(grid_of(task, [holding(client, folder) for client in clients]), task, settings(folder))
    for number in range(4):
        own = client_folder(folder, number)
        words = ["--state", str(own / "state"), "--client", str(number), "--data", str(own / "data.safetensors")]
        words += ["--held", str(own / "held.safetensors")]
        words += ["--model", str(folder / "run" / "checkpoints" / "round-000003.safetensors")]
        assert personal.main([str(folder / "app" / PACKAGE), *words]) == 0
    noted = [client_at(folder, task, number).store.accuracies() for number in range(4)]
    assert [[row["round"] for row in rows] for rows in noted] == [[0, 1, 2, 3]] * 4
    simulated = simulation.run(task.recipe, out=tmp_path / "sim")
    key = "client_accuracy" if name == "dp-fedpgn" else "personal_accuracy"
    shown = {row["round"]: row[key] for row in simulated.private_history if row.get(key) is not None}
    assert shown
    for finished, accuracy in shown.items():
        mean = sum(rows[finished + 1]["personal_accuracy"] for rows in noted) / 4
        assert mean == pytest.approx(accuracy, abs=1e-6)


def test_what_leaves_is_the_same_with_and_without_the_record(tmp_path: Path) -> None:
    """Bit for bit, whatever the held-back examples are; the twin that lets an accuracy in is found."""
    folder = tmp_path / "fed"
    _, clients = deployed(folder, recipe_of("dp-fedsam-ft"))
    plain = clients[0].answer(ask_of(clients[0]))
    held = client_folder(folder, 0) / "held.safetensors"
    inputs, targets = read_examples(held)
    noted = []
    for answers in (targets, (targets + 1) % 10):
        write_examples(held, inputs, answers)
        again = holding(clients[0], folder)
        found = again.answer(ask_of(again))
        assert same(found, plain)
        noted.append(again.store.accuracies()[0])
    assert (
        noted[0]["examples"] == len(targets)
        and stat.S_IMODE((again.store.folder / "personal.jsonl").stat().st_mode) == 0o600
    )
    leaky = again.answer(ask_of(again))
    leaky["facts"]["examples"] = noted[0]["examples"]
    assert not same(leaky, plain)


def same(one: Any, other: Any) -> bool:
    facts = [dict(content["facts"].items()) for content in (one, other)]
    arrays = [{k: v.data for k, v in content["arrays"].items()} for content in (one, other)]
    return facts[0] == facts[1] and arrays[0] == arrays[1]


def test_a_record_survives_a_restart_and_its_failure_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "fed"
    _, clients = deployed(folder, recipe_of("dp2-fedsam"))
    one = holding(clients[0], folder)
    one.answer(ask_of(one))
    again = holding(clients[0], folder)
    again.answer(ask_of(again, round=1))
    assert [row["round"] for row in Store(one.store.folder).accuracies()] == [0, 1]
    again.answer(ask_of(again, round=1))  # asked again: one line, not two
    assert len((one.store.folder / "personal.jsonl").read_text().splitlines()) == 2
    broken = holding(clients[0], folder)
    broken.held = tmp_path / "none.safetensors"
    plain = clients[0].answer(ask_of(clients[0]))
    assert same(broken.answer(ask_of(broken)), plain)

    def explode(*given: object) -> None:
        raise KeyError("whatever")

    monkeypatch.setattr(personal, "evaluate", explode)
    assert same(again.answer(ask_of(again)), plain)
    assert len(one.store.accuracies()) == 2
    for damage in ("{", "3\n", '{"round": null}\n', "[" * 9999):
        (one.store.folder / "personal.jsonl").write_text(damage)
        assert same(again.answer(ask_of(again)), plain)
        with pytest.raises(InputError, match="damaged record"):
            one.store.accuracies()
    assert not any(record.exc_info for record in caplog.records)  # one line each, without a traceback


def test_the_node_config_names_the_file_where_there_is_one(tmp_path: Path) -> None:
    task, _ = deployed(tmp_path / "fed", recipe_of("dp2-fedsam"))
    config = supernode_command(tmp_path / "fed", 0, "127.0.0.1", 1, task.pin)
    assert any(f'held="{client_folder(tmp_path / "fed", 0)}/held.safetensors"' in word for word in config)
    own = {"client": 0, "data": "d", "state": str(tmp_path / "s")}
    assert client_of(task, {**own, "held": "h"}).held == Path("h") and client_of(task, own).held is None
    other, _ = deployed(tmp_path / "none", small())
    assert not any("held=" in word for word in supernode_command(tmp_path / "none", 0, "127.0.0.1", 1, other.pin))


def test_what_cannot_be_evaluated_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    _, clients = deployed(folder, recipe_of("dp2-fedsam"))
    app, state = str(folder / "app" / PACKAGE), ["--state", str(clients[0].store.folder)]
    assert personal.main([app, *state]) == 0 and "personal %" in capsys.readouterr().out
    assert personal.main([app, *state, "--model", "x"]) == 2 and "--held" in capsys.readouterr().err
    with pytest.raises(InputError, match="node config: held"):
        personal.evaluate(clients[0], torch.zeros(3), 0)
    with pytest.raises(InputError, match="--model"):
        personal.evaluate(holding(clients[0], folder), torch.zeros(3), 0)
    assert json.dumps(clients[0].store.accuracies()) == "[]"
