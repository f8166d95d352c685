"""Upkeep of a deployment: the compose file's commands, a client's new key in mid-run, the version of Flower."""

import http.client
import json
import logging
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.supercore.run import RunStatus
from ports import free_port
from stand_in import client_at, deployed, grid_of, settings, small, stopped
from test_federation_doors import SERVER_OF_TWO

from fedflat.core.checks import InputError, RunError
from fedflat.federation import server, superlink, supernode
from fedflat.federation import task as tasks
from fedflat.federation.client import Client, client_of
from fedflat.federation.lock import write_authority_and_server, write_client_keys
from fedflat.federation.processes import check_flower
from fedflat.federation.project import PACKAGE, STATUS, client_folder, superlink_command, supernode_command
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0


def composed(**variables: Any) -> dict[str, Any]:
    """The services of deploy/compose.yaml, its variables filled in as compose does."""

    def value(found: re.Match[str]) -> str:
        return str(variables.get(found[1], found[2] or ""))

    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    text = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    found = yaml.safe_load(re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", value, text))
    return dict(found["services"])


def test_the_compose_file_s_commands_are_those_of_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert closed["read_only"] and closed["cap_drop"] == ["ALL"] and closed["ulimits"]["core"] == 0
        assert closed["ulimits"]["nofile"] >= 4096 and closed["mem_limit"] == closed["memswap_limit"]
    project, node = asked
    assert project == tmp_path / "fed" and (project / "server" / "superlink.toml").is_file()
    assert isinstance(node, Namespace) and node.root_certificates.is_file()
    agreed = client_of(Task.read(node.app), parse_config_args([node.node_config]))
    assert isinstance(agreed, Client) and agreed.number == 2 and agreed.pin == task.pin
    assert agreed.data.is_file() and agreed.key == node.auth_supernode_private_key
    assert services["superlink"]["environment"] == {"FLWR_HOME": str(tmp_path / "fed" / "flower")}


def test_a_client_s_new_key_in_mid_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A client leaves and another takes its number, or its key is a new one, as docs/deploy.md has it: the run goes on;
    the old key and the old pin are refused."""
    task, clients = deployed(tmp_path, small(rounds=3, privacy={"noise_multiplier": 1.0}))
    stopped(task, grid_of(task, clients), settings(tmp_path), after=0)
    app, own = tmp_path / "app" / PACKAGE, client_folder(tmp_path, 1)
    for half in ("auth.key", pub := str(own / "auth.pub")):
        (own / half).unlink()
    write_client_keys(own)
    assert tasks.main([str(app), "1", pub]) == 0
    renewed = Task.read(app)
    assert capsys.readouterr().out.strip() == renewed.pin
    for words in (["7", pub], ["2", pub], ["1", f"{own}/auth.key"], ["x", "y"], ["", ""]):
        assert tasks.main([str(app), *words]) == 2 and Task.read(app).pin == renewed.pin  # no such client, key, number
    assert renewed.pin != task.pin and renewed.identity == task.identity
    with pytest.raises(InputError, match="pin"):
        Client(renewed, 0, clients[0].data, clients[0].store, task.pin)
    grid = grid_of(renewed, [client_at(tmp_path, renewed, number) for number in range(task.form.clients)])
    assert set(renewed.roster.connected(grid.get_nodes())) == {0, 1, 2, 3}
    assert set(renewed.roster.connected(grid_of(task, clients).get_nodes())) == {0, 2, 3}  # the old key: nobody
    facts = server.serve(grid, renewed, settings(tmp_path))
    assert facts["rounds"] == facts["rounds_charged"] == 3
    assert [entry["round"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")] == [0, 1, 2]


def test_another_flower_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_flower()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needed,) = (line for line in extras["federation"] if line.startswith("flwr"))
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


def test_the_authority_s_commands(tmp_path: Path) -> None:
    """create, renew, revoke: whom a client's ca.crt trusts after each."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", str(ROOT / "deploy" / "authority.sh"), *words], capture_output=True, text=True)

    def trusts(authority: Path, certificate: Path) -> bool:
        names = ["-CAfile", str(authority), "-verify_hostname", "fed.example.org", str(certificate)]
        return subprocess.run(["openssl", "verify", *names], capture_output=True).returncode == 0

    own, hosts = tmp_path / "ca", ("fed.example.org", "127.0.0.1", "::1")
    for words in ((), ("sign", str(own), "x"), ("create", str(own)), ("renew", str(own), "x")):
        assert run(*words).returncode == 2
    kept: list[Path] = []
    for command in ("create", "renew", "revoke"):
        assert run(command, str(own), *hosts).returncode == 0
        kept.append(tmp_path / command)
        shutil.copytree(own, kept[-1])
    assert run("create", str(own), *hosts).returncode == 2
    created, renewed, revoked = kept
    assert [trusts(created / "ca.crt", place / "server.crt") for place in kept] == [True, True, False]
    assert [trusts(revoked / "ca.crt", place / "server.crt") for place in kept] == [False, False, True]
    assert (created / "server.key").read_bytes() != (renewed / "server.key").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in own.glob("*.key")} == {0o600}


def test_flower_s_telemetry_is_off_from_the_start() -> None:
    """Whatever the surroundings say: a program that a person starts by hand sends nothing. A thread's end is a line."""
    program = "from fedflat.federation import processes; processes.begin(); from threading import Thread as T\n"
    program += "from flwr.supercore import telemetry; print(telemetry.FLWR_TELEMETRY_ENABLED); T(target=open).start()"
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    found = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    assert found.stdout == "0\n" and re.fullmatch("a thread has ended: TypeError: .*\n", found.stderr), found.stderr


def test_a_superlink_notes_its_nodes_runs_and_memory_for_its_operator(tmp_path: Path) -> None:
    nodes: dict[Any, list[int]] = {("online",): [1, 2, 3], None: [1, 2, 3, 4]}
    standing = enumerate([("running", "", ""), ("finished", "x", "no\n luck")])
    runs = [SimpleNamespace(run_id=number, status=RunStatus(*found)) for number, found in standing]
    online = lambda statuses: nodes[statuses and tuple(statuses)]  # noqa: E731
    status = superlink.status_of(SimpleNamespace(get_node_info=online, get_run_info=lambda: runs))
    assert status == {"SuperNodes online": "3 of 4", "run 0": "running", "run 1": "finished:x", "run 1: why": "no luck"}
    path = tmp_path / STATUS
    superlink._write_status(path, status)
    found = json.loads(path.read_text())
    assert found.items() > status.items() and path.stat().st_mode & 0o077 == 0
    assert all(float(found[name].removesuffix(" MiB")) > 0 for name in found.keys() - status.keys())
    superlink._write_status(tmp_path / "none" / STATUS, status)


def test_a_fault_that_is_explained_is_a_line_of_flower_s_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a log of Flower's")
    logger.addFilter(superlink._in_a_line)
    for fault in (RunError("the disk is full"), OSError(13, "no way", "run"), ValueError("a fault of ours")):
        logger.error("%s raised an exception", "ServerApp", exc_info=fault)
    assert "error: the disk is full" in caplog.text and "ServerApp raised" in caplog.text
    assert [record.exc_info is None for record in caplog.records] == [True, True, False]


@pytest.mark.slow
@pytest.mark.long
def test_a_certificate_is_renewed_while_rounds_run(tmp_path: Path) -> None:
    """New connections get the new certificate, old ones go on; a key that does not fit it changes nothing."""
    own, port, until = tmp_path / "ca", free_port(), time.monotonic() + PATIENCE

    def authority(command: str) -> None:
        subprocess.run(["sh", str(ROOT / "deploy" / "authority.sh"), command, str(own), "127.0.0.1"], check=True)

    def connected() -> Any:
        context = ssl.create_default_context(cafile=own / "ca.crt")
        client = http.client.HTTPSConnection("127.0.0.1", port + 1, context=context)
        client.connect()
        return client

    def serial(client: Any) -> str:
        return str(client.sock.getpeercert()["serialNumber"])

    authority("create")
    server = subprocess.Popen([sys.executable, "-c", SERVER_OF_TWO, str(own), str(port), "600"])
    try:
        first = None
        while first is None:
            assert time.monotonic() < until and server.poll() is None
            with suppress(OSError):
                first = connected()
        before = serial(first)
        authority("renew")
        while serial(connected()) == before:
            assert time.monotonic() < until
            time.sleep(0.1)
        after = serial(connected())
        (own / "server.key").write_text("none")
        time.sleep(2)
        assert serial(connected()) == after != before
        first.request("GET", "/v1/control/list-runs")
        assert first.getresponse().status == 204
    finally:
        server.terminate()
        server.wait(PATIENCE)


def test_the_units_are_those_of_a_deployment(tmp_path: Path) -> None:
    """systemd reads them, and their commands are what a project's README says."""
    task, _ = deployed(tmp_path / "fed", small())
    for name in ("fedflat-superlink.service", "fedflat-supernode@.service"):
        text = (ROOT / "deploy" / name).read_text().replace("/opt/fedflat/.venv/bin/python", sys.executable)
        (tmp_path / name).write_text(text.replace("User=fedflat\n", ""))
        if shutil.which("systemd-analyze"):
            found = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
            assert name.split("@")[0] not in found.stderr, found.stderr
        real = {"ExecStart=": superlink_command(tmp_path)}
        if "supernode" in name:
            real = {"ExecStart=": supernode_command(tmp_path, 2, "x", 1, task.pin)}
        for key, wanted in real.items():
            (command,) = [line for line in text.splitlines() if line.startswith(key)]
            words = shlex.split(command.removeprefix(key).replace("%i", "2").replace("${PIN}", task.pin))
            assert words[1:3] == wanted[1:3]
            assert [w for w in words if w[:2] == "--"] == [w for w in wanted if w[:2] == "--"]
    rules = (ROOT / "deploy" / "logrotate.conf").read_text()
    assert rules.count("{") == rules.count("}") == 1 and "copytruncate" in rules
