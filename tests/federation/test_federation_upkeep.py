"""Upkeep of a deployment: the compose file's commands, a client's new key in mid-run, the version of Flower."""

from __future__ import annotations

import re
import shutil
import tomllib
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr")
pytest.importorskip("flwr.superlink")

from stand_in import client_at, deployed, grid_of, settings, small

from fedflat.core.checks import InputError
from fedflat.federation import superlink, supernode
from fedflat.federation.client.session import Client, client_of
from fedflat.federation.launch.certificates import write_authority_and_server, write_client_keys
from fedflat.federation.launch.flower import check_flower
from fedflat.federation.launch.project import PACKAGE, client_folder
from fedflat.federation.roster import Roster
from fedflat.federation.server import session as server
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


def composed(**variables: Any) -> dict[str, Any]:
    """The services of deploy/compose.yaml, its variables filled in as compose does."""

    def value(found: re.Match[str]) -> str:
        return str(variables.get(found[1], found[2] or ""))

    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    text = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    found = yaml.safe_load(re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", value, text))
    return dict(found["services"])


def test_the_compose_file_s_commands_are_those_of_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.common.config import parse_config_args

    task, _ = deployed(tmp_path / "fed", small())
    own, asked = client_folder(tmp_path / "fed", 2), []
    shutil.copytree(tmp_path / "fed" / "app" / PACKAGE, own / PACKAGE)
    shutil.copy(tmp_path / "fed" / "certificates" / "ca.crt", own)
    monkeypatch.setattr(superlink, "serve", lambda project: asked.append(project) or 0)
    monkeypatch.setattr(supernode, "serve", lambda given: asked.append(given) or 0)
    services = composed(
        OWNER="1:1", PROJECT=tmp_path / "fed", STATE="/s", CLIENT_FOLDER=own, NUMBER=2, PIN=task.pin,
        SUPERLINK="fed.example.org:8443",
    )  # fmt: skip
    assert set(services) == {"superlink", "supernode"}
    for name, main in (("superlink", superlink.main), ("supernode", supernode.main)):
        python, flag, module, *given = services[name]["command"]
        assert (python, flag, module) == ("python", "-m", f"fedflat.federation.{name}")
        inside = str(own) if name == "supernode" else ""
        assert main([word.replace("/client/", f"{inside}/") for word in given]) == 0
        closed = services[name]
        assert closed["read_only"] and closed["cap_drop"] == ["ALL"] and closed["ulimits"] == {"core": 0}
    project, node = asked
    assert project == tmp_path / "fed" and (project / "server" / "superlink.toml").is_file()
    assert isinstance(node, Namespace) and node.root_certificates.is_file()
    agreed = client_of(Task.read(node.app), parse_config_args([node.node_config]))
    assert isinstance(agreed, Client) and agreed.number == 2 and agreed.pin == task.pin
    assert agreed.data.is_file() and agreed.key == node.auth_supernode_private_key
    assert services["superlink"]["environment"] == {"FLWR_HOME": str(tmp_path / "fed" / "flower")}


def test_a_client_s_new_key_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating keys, as docs/deploy.md has it: the run goes on; the old key and the old pin are refused."""
    task, clients = deployed(tmp_path, small(rounds=3, privacy={"noise_multiplier": 1.0}))
    known = server._announce

    def announce(released: dict[str, Any], hidden: dict[str, Any]) -> None:
        known(released, hidden)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(server, "_announce", announce)
        server.serve(grid_of(task, clients), task, settings(tmp_path))
    app, own = tmp_path / "app" / PACKAGE, client_folder(tmp_path, 1)
    for half in ("auth.key", "auth.pub"):
        (own / half).unlink()
    keys = list(task.roster.keys)
    keys[1] = write_client_keys(own)
    Task(task.recipe, task.form, Roster(tuple(keys)), "").write(app)
    renewed = Task.read(app)
    assert renewed.pin != task.pin and renewed.identity == task.identity
    with pytest.raises(InputError, match="pin"):
        Client(renewed, 0, clients[0].data, clients[0].store, task.pin)
    again = [client_at(tmp_path, renewed, number) for number in range(task.form.clients)]
    grid = grid_of(renewed, again)
    assert set(renewed.roster.connected(grid.get_nodes())) == {0, 1, 2, 3}
    assert set(renewed.roster.connected(grid_of(task, clients).get_nodes())) == {0, 2, 3}  # the old key: nobody
    facts = server.serve(grid, renewed, settings(tmp_path))
    assert facts["rounds"] == facts["rounds_charged"] == 3
    assert [entry["round"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")] == [0, 1, 2]


def test_another_flower_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_flower()
    (needed,) = (
        line
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
            "federation"
        ]
        if line.startswith("flwr")
    )
    assert needed == "flwr>=1.41,<1.42"
    for version, allowed in (("1.41.7", True), ("1.42.0", False), ("1.4.1", False), ("2.0.0", False)):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        status = superlink.main([str(tmp_path / "nothing")])
        said = capsys.readouterr().err
        assert status == 2 and len(said.splitlines()) == 1
        assert ("flwr" in said) is not allowed, said

    def gone(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    with pytest.raises(InputError, match="which is not installed"):
        check_flower()


def test_a_throwaway_authoritys_key_never_reaches_the_disk(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path / "own", ["127.0.0.1"], keep=False)
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"ca.crt", "server.crt", "server.key"}
