"""Who gets in: two attacks with real processes, against the deployment as it is made and against Flower left open.

The attacker's app reads the server's noise keys and a client's own key, and its clients send an update that is easy
to find on a disk. Everything that fails against what ``fedflat deploy`` makes works against the open configuration.
"""

import asyncio
import base64
import json
import shlex
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zipfile import ZipFile

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ACCESS_TOKEN_KEY, ErrorCode
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.supernode import fleet_http_connection as connection
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from forked import Forked, finished
from ports import free_port
from stand_in import be_a_task, deployed, objects_of, small
from test_federation_processes import PATIENCE, WINDOW, files_with, first_updates, logs

from fedflat.core.checks import InputError, RunError
from fedflat.federation import doors, local, lock, processes, superlink, supernode
from fedflat.federation.bounds import Limit
from fedflat.federation.local import Federation
from fedflat.federation.lock import write_authority_and_server
from fedflat.federation.processes import must_be_free
from fedflat.federation.project import PACKAGE, client_folder, supernode_command, write_project
from fedflat.federation.supernode import difference
from fedflat.federation.wire import Answer, write_answer

STOLEN = np.full(3000, 0.12345678, dtype=np.float32)

PYPROJECT = """
[project]
name = "hostile"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "fedflat_app.server_app:app"
clientapp = "fedflat_app.client_app:app"
"""

SERVER = """
import time
from pathlib import Path
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    found = [path.read_bytes() for path in Path("{keys}").iterdir()]
    (Path("{loot}") / "server").write_bytes(b"".join(found))
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    nodes = grid.get_node_ids()
    asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]
    replies = list(grid.send_and_receive(asked, timeout=60))
    (Path("{loot}") / "answers").write_text(str([reply.has_error() for reply in replies]))
"""

CLIENT = """
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def answer(message, context):
    own = Path(str(context.node_config["key"]))
    (Path("{loot}") / ("client-" + str(context.node_config["client"]))).write_bytes(own.read_bytes())
    update = Array(np.full(3000, 0.12345678, dtype=np.float32))
    return Message(RecordDict({{"arrays": ArrayRecord({{"update": update}})}}), reply_to=message)
"""


def hostile_app(folder: Path, keys: Path, loot: Path) -> Path:
    """An app that steals what it can reach."""
    package = folder / "hostile" / PACKAGE
    package.mkdir(parents=True)
    loot.mkdir()
    keys.mkdir(parents=True)
    (keys / "noise").write_bytes(b"256 bits of noise key")
    (package.parent / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(SERVER.format(keys=keys, loot=loot))
    (package / "client_app.py").write_text(CLIENT.format(loot=loot))
    return package.parent


def flower_home(folder: Path, address: str, authority: Path) -> Path:
    """A FLWR_HOME of somebody who knows an address and the authority."""
    folder.mkdir()
    text = f'[superlink]\ndefault = "fedflat"\n[superlink.fedflat]\naddress = "{address}"\n'
    (folder / "config.toml").write_text(text + f'root-certificates = "{authority}"\n')
    return folder


def flwr(home: Path, federation: Federation, *words: str) -> subprocess.CompletedProcess[str]:
    """What somebody's own ``flwr`` says."""
    surroundings = {**federation._environment(), "FLWR_HOME": str(home)}
    found: subprocess.CompletedProcess[str] = finished(["flwr", *words], surroundings, home, PATIENCE)
    return found


def listening(port: int) -> bool:
    """Whether it is worth a ``flwr``, which takes a second to say that nobody is there."""
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def status_of(url: str) -> int:
    """The HTTP status of an empty order, without looking at certificates."""
    lax = ssl._create_unverified_context()
    asked = urllib.request.Request(url, b"", {"Content-Type": "application/protobuf"}, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=20, context=lax) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    write_project(small(data={"clients": 2}, cohort={"size": 2}), tmp_path / "fed", port=free_port())
    return tmp_path


@pytest.mark.long
def test_only_the_operator_gives_orders_and_only_for_this_app(place: Path) -> None:
    """``flwr run`` from the network, from this machine without the token, and with it but for another app."""
    app = hostile_app(place, place / "state-home" / "fedflat" / "keys", place / "loot")
    with Forked(place / "fed", PATIENCE) as federation:
        federation.start(clients=[])
        addresses = lock.Addresses.read(federation.project)
        network, inside = (f"127.0.0.1:{port}" for port in (addresses.listen[1], addresses.control[1]))
        public, own = place / "fed" / "certificates" / "ca.crt", place / "fed" / "flower" / "control" / "ca.crt"
        for home in [flower_home(place / "a", network, public), flower_home(place / "b", inside, own)]:
            refused = flwr(home, federation, "run", str(app), "fedflat")
            assert refused.returncode, refused.stdout
        assert "Created run" not in logs(federation)
        paths = ("control/start-run", "control/stop-run", "runtime/acquire-task", "runtime/pull-messages", "fleet/../x")
        assert [status_of(f"https://{network}/v1/{path}") for path in paths] == [404] * 4 + [401]
        assert [status_of(f"https://{network}/{path}") for path in ("docs", "openapi.json", "health")] == [404] * 3
        assert status_of(f"https://{network}/v1/fleet/pull-messages") == 401  # nobody's key
        assert [status_of(f"https://{inside}/v1/{path}") for path in paths[:4]] == [401] * 4
        order = flwr(federation.project / "flower", federation, "run", str(app), "fedflat", "--format", "json")
        assert "run-id" in order.stdout, order.stdout + logs(federation)
        assert federation.wait(int(json.loads(order.stdout)["run-id"]), PATIENCE) == "finished:failed", logs(federation)
    assert list((place / "loot").iterdir()) == []
    assert "refused: run" in logs(federation)


@pytest.mark.long
def test_a_node_runs_nothing_that_comes_with_a_run(place: Path) -> None:
    """An operator who attacks: a SuperLink left open, on which the hostile app may run. One client's SuperNode is
    ours; the other is the twin, Flower's own, and loses its key. So do the server's noise keys, and the SuperLink's
    database keeps the twin's update in a file."""
    app = hostile_app(place, place / "state-home" / "fedflat" / "keys", place / "loot")
    with Forked(place / "fed", PATIENCE) as federation:
        address, held = f"127.0.0.1:{federation.port}", place / "fed" / "certificates"
        tls = ["--ssl-ca-certfile", f"{held}/ca.crt", "--ssl-certfile", f"{held}/server.crt"]
        tls += ["--ssl-keyfile", f"{held}/server.key"]
        old = ["flower-superlink", "--host", "127.0.0.1", "--port", str(federation.port), "--enable-supernode-auth"]
        old += ["--disable-runtime-dependency-installation", "--database", str(place / "fed" / "server" / "links.db")]
        federation._spawn("open", [*old, *tls])
        home = flower_home(place / "anybody", address, held / "ca.crt")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not listening(federation.port):
            time.sleep(0.1)
        for client in range(2):
            key = str(client_folder(place / "fed", client) / "auth.pub")
            while flwr(home, federation, "supernode", "register", key, "fedflat").returncode:
                assert time.monotonic() < until, logs(federation)
        federation.start_node(0)
        ours = supernode_command(place / "fed", 1, "127.0.0.1", federation.port, federation.task.pin)
        kept = ours[ours.index("--superlink") :]
        federation._spawn("client-1", ["flower-supernode", *kept, "--port", str(free_port()), *tls])
        order = flwr(home, federation, "run", str(app), "fedflat", "--format", "json")
        assert json.loads(order.stdout)["success"], order.stdout
        answers = place / "loot" / "answers"
        while time.monotonic() < until and not answers.exists():
            time.sleep(0.2)
        assert answers.exists(), logs(federation)
    assert sorted(json.loads(answers.read_text().lower())) == [False, True]
    assert sorted(path.name for path in (place / "loot").iterdir()) == ["answers", "client-1", "server"]
    assert (place / "loot" / "client-1").read_bytes() == (client_folder(place / "fed", 1) / "auth.key").read_bytes()
    assert (place / "loot" / "server").read_bytes() == b"256 bits of noise key"
    assert "refused: run" in (federation.logs / "client-0.log").read_text()
    assert [path.parent.name for path in files_with(place / "fed", STOLEN.tobytes()[:400])] != []


def test_a_wrong_address_or_lock_is_refused_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = tmp_path / "fed"
    write_project(small(), fed, port=8443)
    addresses, secret = fed / "server" / "superlink.toml", fed / "server" / lock.LOCK
    good = addresses.read_text()

    def said() -> str:
        assert superlink.main([str(fed)]) == 2
        found = capsys.readouterr().err
        assert found.count("\n") == 1 and "allowed:" in found
        return found

    for text in ("0.0.0.0:8444", "10.0.0.1:8444", "fed.example.org:8444", "localhost:8444", "[::]:8444"):
        addresses.write_text(good.replace("127.0.0.1:8444", text))
        assert f"control: found {text}; allowed: an address of this machine alone, as 127.0.0.1:8444" in said()
    for text in ("127.0.0.1:8443", "127.0.0.1", "127.0.0.1:0", ":8444", "127.0.0.1 x:8444"):
        addresses.write_text(good.replace("127.0.0.1:8444", text))
        assert "control: found" in said()
    for text in ("", "listen = 3", "control = ["):
        addresses.write_text(text)
        said()
    addresses.write_text(good.replace("127.0.0.1:8444", "[::1]:8444"))
    for mode in (0o644, 0o660):
        secret.chmod(mode)
        assert f"found mode {mode:04o}; allowed: 0600" in said()
    for text in ("", "ab", "no hash"):
        secret.chmod(0o600)
        secret.write_text(text)
        assert str(secret) in said()
    secret.unlink()
    assert "found no lock" in said()
    assert superlink.main([]) == 2 and lock.main([]) == 2 and lock.main([str(tmp_path)]) == 2
    addresses.write_text(good)
    pair = fed / "certificates" / "server.crt"
    for damage in (b"", bytes(range(256)), (fed / "certificates" / "ca.crt").read_bytes()):  # the last has another key
        pair.write_bytes(damage)
        secret.touch(0o600)
        assert lock.main([str(fed)]) == 0
        capsys.readouterr()
        assert "server.crt and server.key: found" in said()
    assert lock.main([str(fed)]) == 0 and len(lock.read_lock(secret)) == 32  # a new token mends it
    assert "127.0.0.1:8444.oidc-access-token" in (fed / "flower" / "credentials.yaml").read_text()


def test_a_port_that_is_taken_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fed, port = tmp_path / "fed", free_port()
    write_project(small(), fed, port=port)
    starts = [
        *((taken, superlink.main, [str(fed)]) for taken in (port, port + 1)),
        *((taken, local.main, [str(fed)]) for taken in (port, port + 1)),
    ]  # fmt: skip
    for taken, main, words in starts:
        with socket.create_server(("127.0.0.1", taken)):
            assert main(words) == 2
        found = capsys.readouterr().err
        assert f"found 127.0.0.1:{taken}, which another program uses; allowed: a free port." in found
        assert found.count("\n") == 1
    assert not list(fed.rglob("*.log"))
    with pytest.raises(InputError, match="up to 65535"):
        must_be_free("--port", "127.0.0.1", 65536)
    must_be_free("listen", "198.51.100.1", port)  # an address of another machine: nothing is known of it


def test_what_ended_by_itself_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_project(small(), tmp_path / "fed", port=free_port())
    with Federation(tmp_path / "fed") as federation:
        federation._spawn("client-3", ["python", "-c", "print('error: no key'); print(); exit(2)"])
        federation.processes["client-3"].wait(PATIENCE)
        with pytest.raises(RunError, match=r"client-3 has ended: no key \(see .*client-3.log\)"):
            federation.check_alive()
        federation._spawn("client-3", ["sleep", "1000"])
        federation.check_alive()
        federation.processes["client-3"].kill()
        federation.processes["client-3"].wait(PATIENCE)
        with pytest.raises(RunError, match="client-3 has ended: it was killed by SIGKILL"):
            federation.check_alive()
        refused = mock.Mock(stdout="", stderr="Authentication failed. Please run `flwr login` to authenticate.")
        monkeypatch.setattr(federation, "_flwr", lambda command: refused)
        with pytest.raises(RunError, match=r"Please run `python -m fedflat\.federation\.lock \.`"):
            federation.run()
    monkeypatch.setattr(Federation, "_spawn", mock.Mock())
    monkeypatch.setattr(Federation, "start_superlink", mock.Mock())
    for free, said in ((0.5, "Warning: that is 1 GB, of 0 free"), (1.5, "starting 4 clients, each a process")):
        monkeypatch.setattr(local, "free_memory", lambda free=free: free * 2**30)
        federation.start()
        assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    (tmp_path / "fed" / "server" / "status.json").write_text('{"run 1": "finished:failed", "run 1: why": "no luck"}')
    for name, found in {"start": None, "run": 1}.items():
        monkeypatch.setattr(Federation, name, lambda self, found=found: found)
    assert local.main([str(tmp_path / "fed")]) == 1  # what says why is in the SuperLink's log, and here
    assert capsys.readouterr().err.endswith(f"no luck (see {tmp_path / 'fed' / 'logs' / 'superlink.log'})\n")


def test_a_launcher_reads_how_a_run_stands(tmp_path: Path) -> None:
    """It asks no door, which may be full; before the SuperLink has noted anything, nothing is known."""
    with pytest.raises(InputError, match=r"found .*nothing; allowed: a folder that fedflat deploy wrote"):
        local._whole_run(tmp_path / "nothing")
    write_project(small(), tmp_path / "fed", port=free_port())
    federation = Federation(tmp_path / "fed")
    federation.logs.touch()
    with pytest.raises(InputError, match=r"logs \(File exists\)"), federation:
        pass
    for text in ("[[", "", "tool = 3", "[tool.flwr.app.config]\nout = 3", "[tool.flwr.app.config]\nout = '/gone/run'"):
        (tmp_path / "fed" / "app" / "pyproject.toml").write_text(text)
        with pytest.raises(InputError, match=r"pyproject.toml: (found no project|out: found /gone/run, in no)"):
            local._folder_of_run(tmp_path / "fed")
    assert federation.status(1) == "unknown"
    (tmp_path / "fed" / "server" / "status.json").write_text('{"run 1": "finished:failed"}\n')
    assert [federation.status(1), federation.status(2)] == ["finished:failed", "unknown"]
    federation.patience = 0.1  # a full disk: what was noted last stays, and would be waited for without end
    with pytest.raises(RunError, match=r"has not written .*status.json for 0.1 s"):
        federation.wait(2, 60)
    assert federation.wait(1, 60) == "finished:failed"


def test_a_node_looks_at_its_files_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = tmp_path / "fed"
    task, _ = deployed(fed, small())
    command = supernode_command(fed, 0, "127.0.0.1", 8443, task.pin)[3:]
    key = client_folder(fed, 0) / "auth.key"

    def said(*changed: str) -> str:
        words = list(command)
        for flag, value in zip(changed[::2], changed[1::2], strict=True):
            words[words.index(flag) + 1] = value
        assert supernode.main(words) == 2
        return capsys.readouterr().err

    assert "found no roster" in said("--app", str(tmp_path))
    assert "--root-certificates" in said("--root-certificates", str(tmp_path / "none"))
    assert "ca.crt" in said("--root-certificates", str(fed / "README.md"))  # no certificate: not Flower's traceback
    key.chmod(0o644)
    assert "found mode 0644" in said()
    assert "no such file" in said("--auth-supernode-private-key", str(tmp_path / "none"))
    for word in ("--isolation", "--insecure", "--host"):
        with pytest.raises(SystemExit):
            supernode.main([*command, word, "subprocess"])
        capsys.readouterr()


@pytest.mark.parametrize("patient", [True, False], ids=["ours", "twin: Flower's own"])
def test_a_handshake_that_was_cut_is_tried_again(patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flooded server closes connections in mid-handshake; a certificate of another authority stays an end."""
    for name in ("make_simple_http_retry_invoker", "NodeAuthHttpInterceptor", "flwr_exit"):  # put back after the test
        monkeypatch.setattr(connection, name, getattr(connection, name))
    if patient:
        supernode.mend_connection("host:1", 1)
    invoker = connection.make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None
    left = [
        httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"),
        httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"),
        httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    ]

    def ask() -> None:
        raise left.pop(0)

    with pytest.raises(httpx.ConnectError, match="VERIFY_FAILED" if patient else "EOF"):
        invoker.invoke(ask)
    assert len(left) == (0 if patient else 2)


def test_a_node_that_the_superlink_does_not_know_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower interrupts the process after a 401, and shows a page where there is no connection."""
    answers = mock.Mock(**{"return_value.intercept.return_value.status_code": 412})
    monkeypatch.setattr(connection, "NodeAuthHttpInterceptor", type("Signer", (), {"intercept": answers().intercept}))
    for name in ("flwr_exit", "make_simple_http_retry_invoker"):  # put back after the test
        monkeypatch.setattr(connection, name, getattr(connection, name))
    supernode.mend_connection("host:1", 1)
    with pytest.raises(RunError, match="another SuperNode has this client's key"):
        connection.NodeAuthHttpInterceptor().intercept(mock.Mock(rpc_method="/ActivateNode"), None)  # type: ignore[call-arg]
    answers.return_value.intercept.return_value.status_code = 401
    for method, said in {"/ActivateNode": "not in the SuperLink's roster", "/PullMessages": "no longer knows"}.items():
        with pytest.raises(RunError, match=said) as found:
            connection.NodeAuthHttpInterceptor().intercept(mock.Mock(rpc_method=method), None)  # type: ignore[call-arg]
        receive = mock.Mock(side_effect=found.value)
        assert supernode._take_messages((0, receive, *[0] * 6), Limit(1, 1), Path(), mock.Mock(), 0) is found.value
    with pytest.raises(RunError, match=r"^host:1: no: way there$"):
        connection.flwr_exit(1, "no. way\nthere")


@pytest.mark.parametrize("patient", [True, False], ids=["ours", "twin: asked once"])
def test_a_message_whose_objects_are_on_their_way_is_waited_for(
    patient: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower hands one out, once, when the ServerApp declares it; what a killed process leaves is answered, too."""
    be_a_task()
    message, limit, got = Message(RecordDict(), 1, "train"), Limit(1, 1 << 16), list[Any]()
    message.metadata.__dict__["_message_id"] = message.object_id
    tree, contents = objects_of(message)
    receive = mock.Mock(side_effect=[(message, tree), SystemExit])
    late = ObjectUnavailableError("x")
    pull = mock.Mock(side_effect=[late, late, *(contents[name] for name in limit.names(tree))])
    for name, value in {"UPLOAD": 60.0 if patient else -1.0, "AGAIN": 0.0, "difference": lambda *_: ""}.items():
        monkeypatch.setattr(supernode, name, value)
    worker: Any = SimpleNamespace(send=got.append, recv=lambda: -9)
    other, send = mock.Mock(), mock.Mock(return_value=((), "session"))
    with pytest.raises(SystemExit):
        supernode._take_messages((None, receive, send, other, other, pull, other, other), limit, Path(), worker, 0.0)
    assert got == ([(message.object_id, contents)] if patient else [])
    assert [call.args[0].error.code for call in send.call_args_list] == [ErrorCode.CLIENT_APP_CRASHED] * patient
    assert ("ObjectUnavailableError" in caplog.text) is not patient


def fab_of(files: dict[str, bytes], folder: Path) -> bytes:
    with ZipFile(folder / "fab", "w") as written:
        for name, text in files.items():
            written.writestr(name, text)
    return (folder / "fab").read_bytes()


def test_a_bundle_is_compared_file_by_file_and_never_unpacked(tmp_path: Path) -> None:
    fed = tmp_path / "fed"
    deployed(fed, small())
    app = fed / "app" / PACKAGE
    assert difference(build_fab_from_disk(fed / "app"), app) == ""
    settings = (fed / "app" / "pyproject.toml").read_text()
    (fed / "app" / "pyproject.toml").write_text(settings.replace("600.0", "30.0"))  # the operator's business
    assert difference(build_fab_from_disk(fed / "app"), app) == ""
    same = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in app.iterdir()}
    assert difference(fab_of(same, tmp_path), app) == ""
    for name in same:
        assert name in difference(fab_of({**same, name: same[name] + b" "}, tmp_path), app)
        assert name in difference(fab_of({k: v for k, v in same.items() if k != name}, tmp_path), app)
    for name in (f"{PACKAGE}/more.py", f"{PACKAGE}/sub/x.py", "other/x.py", "../x.py"):
        assert name in difference(fab_of({**same, name: b""}, tmp_path), app)
    assert difference(b"no zip", app) == "not readable (BadZipFile)"


def ask(door: Any, path: str, kind: str = "http", headers: dict[str, str] | None = None) -> list[Any]:
    send = mock.AsyncMock()
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    asyncio.run(door({"type": kind, "path": path, "headers": raw, "client": ("127.0.0.1", 1)}, None, send))
    return [call.args[0] for call in send.call_args_list]


def headers_of(key: Any) -> dict[str, str]:
    """How Flower's SuperNode signs a request."""
    request = httpx.Request("POST", "https://x")
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(SimpleNamespace(request=request), lambda context: None)  # type: ignore[arg-type, return-value]
    return {name: value for name, value in request.headers.items() if name.startswith("flwr-")}


def test_the_network_s_door_passes_the_nodes_interface_alone() -> None:
    """Nothing but Fleet, and nothing without the signature of a key in the roster."""
    reached: list[str] = []
    app = mock.AsyncMock(side_effect=lambda scope, *_: reached.append(scope["path"]))
    ours, stranger = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    known = public_key_to_bytes(ours.public_key())
    gate, blamed = doors.Gate("listen", "127.0.0.1", 0), list[bytes]()
    door, signed = doors.fleet_only(app, {known}, Limit(1000, 1000), gate, blamed.append), headers_of(ours)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/V1/fleet/x", "/v1/fleet", "//v1/fleet/x", "/"):
        assert ask(door, path, headers=signed)[0]["status"] == 404
    assert ask(door, "/v1/fleet/x", "websocket") == [] and ask(door, "/v1/fleet/x", "lifespan") == []
    pull = "/v1/fleet/pull-messages"
    other = headers_of(stranger)
    false = [{}, other, {**other, FLEET_HTTP_PUBLIC_KEY_HEADER: signed[FLEET_HTTP_PUBLIC_KEY_HEADER]}]
    false += [{**signed, name: value} for name in signed for value in ("", "é", "====", "2026")]
    for headers in false:  # the app, which would read the whole body, never hears of these
        assert ask(door, pull, headers=headers)[0]["status"] == 401
    assert reached == []
    assert ask(door, pull, headers={**signed, "content-length": "10"}) == [] and reached == [pull]
    lengths = [{}, {"content-length": "-1"}, {"content-length": "1" * 20}]
    for headers in [*lengths, {"content-length": "10", "transfer-encoding": "chunked"}]:  # a length that is not said
        assert ask(door, pull, headers={**signed, **headers})[0]["status"] == 411
    long = {"content-length": str(1 << 20)}
    with mock.patch("fedflat.federation.doors.datetime", wraps=datetime) as clock:  # recorded a while ago: no blame
        clock.now.return_value = datetime.now(UTC) + timedelta(minutes=10)
        assert ask(door, pull, headers={**signed, **long})[0]["status"] == 401 and blamed == []
    assert reached == [pull]
    assert ask(door, pull, headers={**signed, **long})[0]["status"] == 413 and blamed == [known]
    gate.close()
    assert ask(app, "/v1/control/start-run") == [] and reached[-1] == "/v1/control/start-run"  # the twin: no door


@pytest.mark.parametrize(("what", "most"), [("push", 17), ("pull", 16)])
def test_a_connection_that_was_cut_makes_no_culprit(what: str, most: int) -> None:
    """A client whose connection died in mid-upload, or before it had read what it asked for, asks again while the dead
    one still counts: it has to wait."""
    key, blamed, sent, parted = ec.generate_private_key(ec.SECP384R1()), list[bytes](), list[Any](), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await parted.wait()  # the rest of a body that never comes
        await send({"body": bytes(100_000) if what == "pull" else b""})

    async def send(event: Any) -> None:
        sent.append(event)

    gate = doors.Gate("listen", "127.0.0.1", 0)
    door = doors.fleet_only(app, {public_key_to_bytes(key.public_key())}, Limit(1000, 1000), gate, blamed.append)
    said = {**headers_of(key), "content-length": "60000"}
    raw = [(name.lower().encode(), value.encode()) for name, value in said.items()]
    scope = {"type": "http", "path": f"/v1/fleet/{what}-object", "headers": raw, "client": ("127.0.0.1", 1)}

    async def upload() -> None:
        dead = [asyncio.create_task(door(scope, None, send)) for _ in range(most)]
        await asyncio.sleep(0)
        await door(scope, None, send)
        assert [event.get("status", 0) for event in sent] == [503, 0] and blamed == []
        parted.set()  # the kernel closes what answers no keepalive (ALIVE), and there is room again
        await asyncio.gather(*dead)
        await door(scope, None, send)

    asyncio.run(upload())
    assert [len(event["body"]) for event in sent[2:]] == ([65_536, 34_464] if what == "pull" else [0]) * (most + 1)
    gate.listen()
    with socket.create_connection(gate.getsockname()), gate.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    gate.close()


def test_who_comes_again_from_the_same_port_is_counted() -> None:
    gate = doors.Gate("listen", "127.0.0.1", 0)
    gate.listen()
    first = socket.create_connection(gate.getsockname())
    place, one = first.getsockname(), gate.accept()[0]
    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
    first.close()
    with socket.create_connection(gate.getsockname(), source_address=place), gate.accept()[0] as again:
        one.close()  # only now does its owner hear of the reset
        assert list(gate._open.values()) == [again]
    assert gate._open == {}
    gate.close()


SERVER_OF_TWO = """
import resource, sys
from pathlib import Path
from fedflat.federation import doors, processes, superlink
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
assert processes.raise_descriptor_limit() == 1024
async def app(scope, receive, send):
    if scope["type"] == "http":
        await doors._refuse(204, scope, receive, send)
own, port, late = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
gates = [doors.Gate(name, "127.0.0.1", port + i, seconds=late) for i, name in enumerate(("control", "listen"))]
superlink._run(*((doors.this_machine_only(app, lambda *_: True, gate), gate, own) for gate in gates))
"""


@pytest.mark.long
def test_idle_connections_leave_the_operators_door_open(tmp_path: Path) -> None:
    """1,100 connections that say nothing, against a limit of 1,024 descriptors."""
    processes.raise_descriptor_limit()
    write_authority_and_server(tmp_path / "own", ["127.0.0.1"])
    port, until = free_port(), time.monotonic() + PATIENCE
    server = subprocess.Popen([sys.executable, "-c", SERVER_OF_TWO, str(tmp_path / "own"), str(port), "15"])
    idle = []
    try:
        while time.monotonic() < until and not listening(port + 1):
            time.sleep(0.1)
        idle = [socket.create_connection(("127.0.0.1", port + 1), timeout=20) for _ in range(1100)]
        assert status_of(f"https://127.0.0.1:{port}/v1/control/list-runs") == 204
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 512
    finally:
        server.terminate()
        for one in idle:
            one.close()
        server.wait(PATIENCE)


def test_nothing_is_read_on_this_machine_without_a_credential() -> None:
    """Tasks' tokens, and neither the SuperNodes' paths nor any other."""
    reached: list[str] = []
    app = mock.AsyncMock(side_effect=lambda scope, *_: reached.append(scope["path"]))

    def allowed(path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith(doors.RUNTIME) and headers.get("flwr-task-token") == "task"

    door = doors.this_machine_only(app, allowed, doors.Gate("control", "127.0.0.1", 0))
    own, pull, acquire = {"Flwr-Task-Token": "task"}, "/v1/runtime/pull-object", "/v1/runtime/acquire-task"
    for path in ("/v1/fleet/push-object", "/health", "/docs", "/"):
        assert ask(door, path, headers=own)[0]["status"] == 404
    for headers in ({}, {"flwr-task-token": "other"}, {"authorization": "task"}):
        assert [ask(door, path, headers=headers)[0]["status"] for path in (pull, acquire)] == [401, 401]
    assert ask(door, "/v1/control/start-run", headers=own)[0]["status"] == 401 and reached == []
    assert ask(door, pull, headers=own) == [] and reached == [pull]
    assert ask(door, "/", "websocket") == []
    assert ask(door, "/", "lifespan") == [] and reached[1:] == ["/"]


def test_a_gate_keeps_few_strangers_and_each_for_a_short_time(caplog: pytest.LogCaptureFixture) -> None:
    gate = doors.Gate("listen", "127.0.0.1", 0, strangers=3, seconds=0.0)
    gate.listen()

    def come() -> tuple[socket.socket, socket.socket, Any]:
        asked = socket.create_connection(gate.getsockname())
        accepted, place = gate.accept()
        return asked, accepted, place

    def is_open(asked: socket.socket) -> bool:
        asked.settimeout(0.2)
        with suppress(TimeoutError):
            return asked.recv(1) != b""
        return True

    known = come()
    gate.welcome(known[2], b"key")
    first, *others = [come() for _ in range(4)]
    assert [is_open(one[0]) for one in (known, first, *others)] == [True, False, True, True, True]
    asyncio.run(gate.sweep())
    assert [is_open(one[0]) for one in (known, *others)] == [True, False, False, False]
    many = []
    for _ in range(doors.EACH):
        many.append(come())
        gate.welcome(many[-1][2], b"key")
    assert not is_open(known[0]) and is_open(many[-1][0])  # one key's oldest
    for one in (known, first, *others, *many):
        one[0].close()
        one[1].close()
    assert not gate._open
    assert caplog.text.count("connections have shown") == caplog.text.count("are closed after") == 1
    gate.close()


def test_one_token_and_no_other(tmp_path: Path) -> None:
    for folder in ("server", "flower"):
        (tmp_path / folder).mkdir()
    name = ACCESS_TOKEN_KEY
    path, credentials = tmp_path / "server" / lock.LOCK, tmp_path / "flower" / "credentials.yaml"
    lock.write_lock(path, credentials, "127.0.0.1:1")
    assert {file.stat().st_mode & 0o777 for file in (path, credentials)} == {0o600}
    kept = json.loads(credentials.read_text())
    token = base64.b64decode(kept["flower.account-auth.127.0.0.1:1.oidc-access-token"]).decode()
    assert token not in path.read_text() and len(token) >= 43

    def lets_in(plugin: Any, given: Iterable[tuple[str, str | bytes]]) -> bool:
        return bool(plugin.validate_tokens_in_metadata(list(given))[0])

    ours = lock.OperatorOnly(lock.read_lock(path))
    assert lets_in(ours, [(name, token)]) and lets_in(ours, [(name, token.encode())])
    wrong: list[Any] = [[], [(name, "")], [(name, token[:-1])], [(name, path.read_text().strip())], [("x", token)]]
    assert not any(lets_in(ours, given) for given in wrong)
    assert all(lets_in(NoOpControlAuthnPlugin(), given) for given in wrong)  # the twin: what Flower does by itself
    lock.write_lock(path, credentials, "127.0.0.1:1")  # another one: the old is worth nothing
    assert not lets_in(lock.OperatorOnly(lock.read_lock(path)), [(name, token)])


def test_the_search_finds_an_answer_in_a_database_and_none_in_memory(tmp_path: Path) -> None:
    """The twin of the searches in the process tests: a real answer, as Flower stored it before (a file)."""
    deployed(tmp_path / "fed", small())
    update = first_updates(tmp_path / "fed")[1][0]
    answer = write_answer(Answer(0, b"0" * 16, update, 0))
    for database, found in ((FLWR_IN_MEMORY_DB_NAME, False), (str(tmp_path / "links.db"), True)):
        store = ObjectStoreFactory(database).store()
        store.preregister(1, get_object_tree(answer))
        for name, part in get_all_nested_objects(answer).items():
            store.put(name, part.deflate())
        store.delete(answer.object_id)  # what Flower does when the ServerApp has it
        assert bool(files_with(tmp_path, update.tobytes()[-WINDOW:])) is found


def test_the_readme_s_commands_fit_a_terminal_and_are_the_real_ones(tmp_path: Path) -> None:
    task, _ = deployed(tmp_path / "fed", small())
    shown = [block for block in (tmp_path / "fed" / "README.md").read_text().split("\n\n") if block.startswith("    ")]
    assert max(len(line) for block in shown for line in block.splitlines()) <= 80
    typed = [shlex.split(block.replace("\\\n", " ")) for block in shown]
    real = supernode_command(tmp_path / "fed", 0, "127.0.0.1", 8443, task.pin)
    assert [" ".join(word.split()) for word in typed[3]] == [w.replace(f"{tmp_path}/fed/", "") for w in real]
    assert typed[2] == ["python", "-m", "fedflat.federation.superlink", "."]
