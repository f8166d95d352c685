"""The client's own checks, its disk, the roster, and the project that deploy writes."""

import errno
import importlib
import io
import json
import os
import shutil
import stat
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from stand_in import deployed, grid_of, pem, settings, small

from fedflat.cli.training import deploy
from fedflat.core.checks import InputError
from fedflat.core.types import Broadcast
from fedflat.data.sources import load
from fedflat.engine.reduce import Trained
from fedflat.federation import client as client_module
from fedflat.federation import lock, server, superlink, transport, wire
from fedflat.federation import project as project_module
from fedflat.federation import task as tasks
from fedflat.federation.client import Client, Refused, client_of, reply_to
from fedflat.federation.lock import write_client_keys
from fedflat.federation.project import PACKAGE, client_folder, write_project
from fedflat.federation.server import serve
from fedflat.federation.store import Store, read_examples, write_examples
from fedflat.federation.supernode import taking_over
from fedflat.federation.task import Roster, Task

Deployed = tuple[Path, Task, list[Client]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    folder = tmp_path_factory.mktemp("deployed") / "fed"
    task, clients = deployed(folder, small())
    return folder, task, clients


def ask_of(client: Client, /, **changes: Any) -> Any:
    shared = client.job.initial_weights[: client.job.parts.layout.dimension]
    broadcast = {"round": 0, "shared": shared, "clip": client.job.threshold, "rate": 1.0}
    facts = {"client": client.number, "nonce": b"n" * 16, "pin": client.task.pin}
    broadcast |= {k: v for k, v in changes.items() if k in broadcast}
    facts |= {k: v for k, v in changes.items() if k in facts}
    return wire.write_request(wire.write_broadcast(Broadcast(**broadcast)), **facts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": 1}, "this is client 0"),
        ({"pin": "another"}, "another recipe"),
        ({"round": 2}, "round 2 of 2"),
        ({"clip": 100.0}, "another clip"),
        ({"clip": float("inf")}, "another clip"),
        ({"shared": torch.zeros(3)}, "malformed: shape"),
    ],
)
def test_what_a_client_does_not_take_the_servers_word_for(
    project: Deployed, changes: dict[str, Any], said: str
) -> None:
    client = project[2][0]
    with pytest.raises(Refused, match=said):
        client.answer(ask_of(client, **changes))
    assert client.answer(ask_of(client)) is not None


def test_what_leaves_a_client_is_clipped(project: Deployed) -> None:
    client = project[2][0]
    answer = wire.read_answer(client.answer(ask_of(client)), client.job.parts.layout.dimension)
    assert 0.05 < float(torch.from_numpy(answer.update).norm()) <= 0.1 * (1 + 1e-6)
    assert answer.examples == 0  # how much data it has is nobody's business


def test_local_trust_a_client_counts_its_own_participations(tmp_path: Path) -> None:
    privacy = {"trust": "local", "noise_multiplier": 2.0}
    task, clients = deployed(tmp_path / "fed", small(rounds=3, privacy=privacy, cohort={"max_participations": 2}))
    for round in (0, 1):
        clients[0].answer(ask_of(clients[0], round=round))
    again = Client(task, 0, clients[0].data, Store(clients[0].store.folder), task.pin)
    with pytest.raises(Refused, match="2 times"):
        again.answer(ask_of(again, round=2))


def test_local_trust_a_client_answers_once_in_a_round(tmp_path: Path) -> None:
    """Whatever nonce it is asked with, and after a restart; a torn line (a full disk) does not hide a whole one."""
    task, clients = deployed(tmp_path / "fed", small(privacy={"trust": "local", "noise_multiplier": 2.0}))
    (clients[0].store.folder / "rounds.jsonl").write_text('{"rou')
    clients[0].answer(ask_of(clients[0]))
    again = Client(task, 0, clients[0].data, Store(clients[0].store.folder), task.pin)
    for nonce in (b"n" * 16, b"m" * 16):
        with pytest.raises(Refused, match="round 0 has left already"):
            again.answer(ask_of(again, nonce=nonce))
    assert again.answer(ask_of(again, round=1)) is not None


def test_a_state_folder_is_one_clients_and_its_answers_are_what_it_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.of_client(1)
    with pytest.raises(InputError, match="of another client; allowed: a folder of client 2's own"):
        store.of_client(2)
    for damage in (b"\0\0\0\n", '{"round": 0}\n'.encode("utf-16")):
        (tmp_path / "state/rounds.jsonl").write_bytes(damage)
        with pytest.raises(InputError, match="found what no client wrote"):
            store.answered()


def test_local_trust_noise_is_never_drawn_twice(tmp_path: Path) -> None:
    _, clients = deployed(tmp_path / "fed", small(privacy={"trust": "local", "noise_multiplier": 2.0}))
    size = clients[0].job.parts.layout.dimension
    broadcast = wire.read_broadcast(ask_of(clients[0]), size)  # below the rule that it is answered once
    one, two = (clients[0].update(broadcast)[0] for _ in range(2))
    assert (one - two).std() == pytest.approx(2**0.5 * 0.2, rel=0.2)
    write_examples(clients[1].data, *(side[:0] for side in read_examples(clients[1].data)))
    assert clients[1].update(broadcast)[0].std() == pytest.approx(0.2, rel=0.2)  # of who has no examples, too


def test_the_reply_to_a_failure_says_nothing(
    project: Deployed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, task, clients = project
    grid = grid_of(task, clients)
    message = Message(ask_of(clients[0]), 1000, "train")
    message.metadata.__dict__["_message_id"] = "m0"
    own = client_folder(folder, 0)
    config = {"client": 0, "data": str(own / "data.safetensors"), "state": str(own / "state"), "pin": task.pin}
    app = folder / "app" / PACKAGE
    assert reply_to(message, config, app).has_content()

    faults = [ValueError("row 17 of patient 3"), OSError(28, "No space left on device")]

    def explode(self: Any, content: Any) -> Any:
        raise faults.pop(0)

    monkeypatch.setattr(client_module.Client, "answer", explode)
    for found in (reply_to(message, config, app), reply_to(message, config, app), reply_to(message, {}, app)):
        assert found.has_error() and found.error == Error(code=0, reason="no answer")
    assert [record.exc_info is None for record in caplog.records] == [False, True, True]  # a full disk is a line
    assert grid.task is task


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "node config"),
        ({"client": "0", "data": "d", "state": "s"}, "node config: client"),
        ({"client": 9, "data": "d", "state": "s"}, "0 to 3"),
        ({"client": 0, "data": "d\0", "state": "s"}, "data: .*code 0"),
        ({"client": 0, "data": "d", "state": "s", "pin": "beef"}, "node config: pin"),
    ],
)
def test_a_wrong_node_config_is_one_sentence(
    project: Deployed, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as found:
        client_of(project[1], {**config, "state": str(tmp_path / "s")} if "state" in config else config)
    assert "\n" not in str(found.value)


def test_a_supernode_takes_over_from_the_last_and_no_other_does(tmp_path: Path) -> None:
    """That a killed one is let in is in the processes' test; a SuperLink that does not answer is no error here."""
    store, key = Store(tmp_path / "state"), ec.generate_private_key(ec.SECP384R1())
    given: Any = (store, ("127.0.0.1:9", False, None), (key, key.public_key()))
    store.note_node(77)
    store.keep_session({"secret": "s"})
    with taking_over(*given):
        assert store.node() == 77 and not store.session()
        with pytest.raises(InputError, match="of a SuperNode that is running"), taking_over(*given):
            pass
    with taking_over(*given):
        pass


def test_a_changed_recipe_has_another_pin(project: Deployed, tmp_path: Path) -> None:
    copy = tmp_path / "app"
    shutil.copytree(project[0] / "app" / PACKAGE, copy)
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("noise_multiplier: 0.0", "noise_multiplier: 0.01"))
    assert Task.read(copy).pin != project[1].pin
    (copy / "roster.json").write_text("{}")
    with pytest.raises(InputError, match="roster"):
        Task.read(copy)


def test_examples_of_another_form_are_refused(project: Deployed, tmp_path: Path) -> None:
    folder, task, _ = project
    inputs, targets = read_examples(client_folder(folder, 0) / "data.safetensors")
    for name, bad in {
        "shape": (inputs[..., :1], targets),
        "int64": (inputs, targets.float()),
        "0 to 9": (inputs, targets + 10),
        "float32": (inputs.double(), targets),
    }.items():
        path = tmp_path / f"{name}.safetensors"
        write_examples(path, *bad)
        with pytest.raises(InputError, match=name):
            _ = Client(task, 0, path, Store(tmp_path / "s")).job
    (tmp_path / "none").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="found no examples"):
        read_examples(tmp_path / "none")


def test_a_head_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    store, first = Store(tmp_path / "s"), torch.zeros(3)
    assert torch.equal(store.personal(first, 5)[0], first)
    store.keep_personal(5, (first, {}), (torch.ones(3), {}))
    assert torch.equal(store.personal(first, 6)[0], torch.ones(3)) and torch.equal(store.personal(first, 5)[0], first)
    store.keep_personal(6, (torch.ones(3), {}), (torch.ones(3), {"c": first}))
    head, states = store.personal(first, 7)
    assert torch.equal(head, torch.ones(3)) and torch.equal(states["c"], first)
    assert stat.S_IMODE((tmp_path / "s" / "head.safetensors").stat().st_mode) == 0o600
    (tmp_path / "s" / "head.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="personal part"):
        store.personal(first, 7)


def test_a_client_without_examples_is_not_in_the_adaptive_clips_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has it a weight; the server knows it by its zeros. With ½ for it, presence would move the count by 1."""
    privacy = {"clip": {"kind": "adaptive", "initial": 0.1}, "noise_multiplier": 0.3}
    task, clients = deployed(tmp_path, small(rounds=1, privacy=privacy))
    write_examples(clients[1].data, *(side[:0] for side in read_examples(clients[1].data)))
    monkeypatch.setattr(transport, "Trained", noted := Mock(side_effect=Trained))
    server.serve(grid_of(task, clients), task, settings(tmp_path))
    assert sorted(call.args[1] for call in noted.call_args_list) == [[0], [1], [1], [1]]


def node(number: int, key: str) -> Any:
    return SimpleNamespace(node_id=number, public_key=pem(key))


def test_only_keys_of_the_roster_are_clients(tmp_path: Path) -> None:
    keys = [write_client_keys(tmp_path / str(i)) for i in range(3)]
    roster = Roster(tuple(keys[:2]))
    assert roster.connected([node(7, keys[1]), node(8, keys[2]), SimpleNamespace(node_id=9, public_key=b"x")]) == {1: 7}
    assert roster.connected([node(7, keys[1]), node(8, keys[1])]) == {}
    with pytest.raises(InputError, match="same public key"):
        Roster((keys[0], keys[0]))
    path = tmp_path / "roster.json"
    path.write_text(json.dumps({"clients": [{"client": 0, "public_key": "ssh-rsa AAAA"}]}))
    with pytest.raises(InputError, match="elliptic-curve"):
        Roster.read(path)


def test_secrets_of_a_project_are_for_their_owner(project: Deployed) -> None:
    folder = project[0]
    for secret in [*folder.glob("clients/*/*"), *folder.glob("certificates/*.key")]:
        if secret.suffix in (".key", ".safetensors"):
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600, secret
    app = [path.name for path in (folder / "app").rglob("*") if path.is_file()]
    assert not any(name.endswith((".key", ".safetensors", ".crt")) for name in app)


def test_each_client_has_its_own_examples_only(project: Deployed) -> None:
    folder, task, _ = project
    data = load(small().data, 0)
    for number in range(4):
        inputs, targets = read_examples(client_folder(folder, number) / "data.safetensors")
        wanted = data.client(number)
        assert torch.equal(inputs, wanted[0]) and torch.equal(targets, wanted[1])
    assert task.form.federation().inputs.shape[0] == 0


@pytest.mark.parametrize(
    ("changes", "nodes", "said"),
    [
        ({"algorithm": {"name": "ae-dpfl", "queries": 10}}, None, "ae-dpfl"),
        ({"privacy": {"trust": "distributed", "noise_multiplier": 1.0}}, None, "ddgauss"),
        ({"privacy": {"noise_cohort": 100, "noise_multiplier": 1.0}}, None, "noise_cohort"),
        ({"privacy": {"protocol": "published"}}, None, "published"),
        ({}, 3, "--nodes"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_nothing_written(
    tmp_path: Path, changes: dict[str, Any], nodes: int | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        write_project(small(**changes), tmp_path / "fed", nodes)
    assert not (tmp_path / "fed").exists()


def test_a_folder_that_holds_something_is_not_overwritten(project: Deployed) -> None:
    with pytest.raises(InputError, match="not empty"):
        write_project(small(), project[0])


def test_a_full_disk_leaves_no_half_project_and_the_former_token(
    project: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = project[0] / "server" / lock.LOCK, project[0] / "flower" / "credentials.yaml"
    before = [path.read_bytes() for path in secrets]
    full, prepare = OSError(errno.ENOSPC, "No space left"), project_module.prepare
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=[None, None, full]))  # the first file is whole, the second is not
        with pytest.raises(OSError, match="No space"):
            lock.write_lock(*secrets, "127.0.0.1:1")
        patch.setattr(os, "fsync", Mock(side_effect=full))
        with pytest.raises(InputError, match="No space left"):
            write_project(small(), tmp_path / "fed")
    assert [path.read_bytes() for path in secrets] == before and not (tmp_path / "fed").exists()
    assert not [*project[0].glob("*/*.new")]
    theirs = tmp_path / "fed" / "app" / PACKAGE / "theirs"

    def meanwhile(*given: Any, **named: Any) -> Any:
        theirs.parent.mkdir(parents=True)
        theirs.touch()
        return prepare(*given, **named)

    monkeypatch.setattr(project_module, "prepare", meanwhile)
    with pytest.raises(InputError, match="File exists"):
        write_project(small(), tmp_path / "fed")
    assert theirs.exists()  # another project that came in the seconds between


def test_another_task_does_not_go_on_in_a_runs_folder(project: Deployed, tmp_path: Path) -> None:
    folder, task, clients = project
    serve(grid_of(task, clients), task, settings(folder))
    other, others = deployed(tmp_path / "other", small(rounds=3))
    with pytest.raises(InputError, match="another deployment"):
        serve(grid_of(other, others), other, settings(tmp_path / "other", out=folder / "run"))


def test_the_deploy_command_makes_a_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["cohort.size=2", "rounds=3", "model.hidden=4"]
    deploy("quick-start", out=tmp_path / "fed", nodes=3, override=changes)
    said = capsys.readouterr().out
    assert "for 3 clients" in said and 0 < float(said.partition("proven ε = ")[2].split()[0]) <= 8
    deploy("quick-start", out=tmp_path / "two", nodes=3, override=[*changes, "algorithm.name=fedavg", "privacy={}"])
    assert "no finite ε" in capsys.readouterr().out
    readme = (tmp_path / "fed" / "README.md").read_text()
    programs = [f"fedflat.federation.{name}" for name in ("superlink", "supernode", "close", "local")]
    for command in (*programs, "flwr run", "flwr stop"):
        assert command in readme
    assert Task.read(tmp_path / "fed" / "app" / PACKAGE).pin in readme
    flower = (tmp_path / "fed" / "app" / "pyproject.toml").read_text()
    assert tomllib.loads(flower)["tool"]["flwr"]["app"]["components"]["serverapp"] == "fedflat_app.server_app:app"


def test_flower_builds_the_app_and_loads_both_sides(project: Deployed, monkeypatch: Any) -> None:
    """What `flwr run` packs holds recipe, task and roster and no secret; its modules give Flower's app objects."""
    names = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(project[0] / "app"))).namelist()
    assert {f"{PACKAGE}/{name}" for name in ("recipe.yaml", "task.json", "roster.json", "server_app.py")} <= set(names)
    assert not any(name.endswith((".key", ".safetensors", ".crt")) for name in names)
    monkeypatch.syspath_prepend(str(project[0] / "app"))
    assert isinstance(importlib.import_module(f"{PACKAGE}.server_app").app, ServerApp)
    assert isinstance(importlib.import_module(f"{PACKAGE}.client_app").app, ClientApp)


DAMAGE = (b"", b"{", b"\0" * 100, b"[1]", b'"x"', b"[" * 5000, b"\xff\xfe")


@pytest.mark.parametrize(
    "name", ["node.json", "session.json", "rounds.jsonl", "personal.jsonl", "RUN.tip", "operator.pub"]
)
def test_a_clients_damaged_file_is_a_line_or_none(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever lies in its state folder, a client answers or says in one line why not; it never ends in a traceback."""
    task, clients = deployed(tmp_path, small(rounds=1))
    grid = grid_of(task, clients)
    serve(grid, task, settings(tmp_path))
    state, message = clients[0].store.folder, next(m for m in grid.pushed if m.metadata.dst_node_id == 1000)
    own = client_folder(tmp_path, 0)
    config = {"client": 0, "data": str(own / "data.safetensors"), "state": str(state), "key": str(own / "auth.key")}
    path = next(state.glob("*.tip")) if name == "RUN.tip" else state / name
    for content in DAMAGE:
        path.write_bytes(content)
        caplog.clear()
        reply_to(message, config, tmp_path / "app" / PACKAGE)
        said = [record for record in caplog.records if record.name.startswith("fedflat") and record.levelno >= 40]
        assert len(said) <= 1 and not any(record.exc_info for record in said), (content, caplog.text)


def test_a_damaged_file_of_a_project_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(tmp_path, small(rounds=1))
    app = tmp_path / "app" / PACKAGE
    for path in (app / "task.json", app / "roster.json", app / "recipe.yaml", tmp_path / "server" / "superlink.toml"):
        whole = path.read_bytes()
        for content in (*DAMAGE, whole[: len(whole) // 2]):
            path.write_bytes(content)
            main, words = (superlink.main, [tmp_path]) if path.suffix == ".toml" else (tasks.main, [app])
            assert main([str(word) for word in words]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1, (path, content)
        path.write_bytes(whole)
    assert tasks.main([str(app)]) == 0
