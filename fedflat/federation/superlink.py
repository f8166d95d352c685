"""The SuperLink with its lock: ``python -m fedflat.federation.superlink PROJECT``.

Two addresses, each with its own certificate (``server/superlink.toml``): *listen*, which the network sees, passes the
SuperNodes' interface alone; *control*, on this machine only, takes the operator's orders (with his token) and serves
the ServerApp. Messages are kept in memory alone; the registered SuperNodes are those of the app's roster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, wrong
from fedflat.federation.exits import status_of
from fedflat.federation.launch.certificates import write_authority_and_server
from fedflat.federation.launch.flower import check_flower
from fedflat.federation.launch.processes import hang_up_is_an_end, must_be_free, private
from fedflat.federation.launch.project import ADDRESSES_FILE, CONTROL_CERTIFICATE, PACKAGE, environment
from fedflat.federation.lock import LOCK, OperatorOnly, address_of, fleet_only, loopback_of, read_lock
from fedflat.federation.roster import Roster
from fedflat.federation.task import ROSTER
from fedflat.federation.worker import Runtime, server_work, start_worker

SHUTDOWN = 3
"""Seconds that open connections have to end: SuperNodes come back by themselves, so little is lost."""
LOOK = 0.05
"""Seconds between looks whether the control door is open, before the network's is."""


@dataclass(frozen=True)
class Addresses:
    """Addresses (host, port) that the SuperLink listens at."""

    listen: tuple[str, int]
    control: tuple[str, int]

    @classmethod
    def read(cls, project: Path) -> Addresses:
        """What ``server/superlink.toml`` of a project says; InputError unless orders come from this machine alone."""
        path = project / ADDRESSES_FILE
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: found no addresses ({error}); allowed: what fedflat deploy wrote.") from error
        addresses = cls(
            address_of(f"{path}: listen", found.get("listen")), loopback_of(f"{path}: control", found.get("control"))
        )
        if addresses.listen[1] == addresses.control[1]:
            raise wrong(f"{path}: control", f"port {addresses.control[1]}, as in listen", "another port")
        return addresses


def serve(project: Path) -> int:
    """Run the SuperLink of a project until it is told to end.

    Raises:
        InputError: no project, a control address or a key open to others, no lock, or a port that is taken.
    """
    check_flower()
    addresses, lock = Addresses.read(project), read_lock(project / "server" / LOCK)
    roster = Roster.read(project / "app" / PACKAGE / ROSTER)
    key = project / "certificates" / "server.key"
    if not key.is_file() or key.stat().st_mode & 0o077:
        raise wrong(str(key), "no such file" if not key.is_file() else "a mode other than 0600", "a private key, 0600")
    for door, address in (("listen", addresses.listen), ("control", addresses.control)):
        must_be_free(f"{project / ADDRESSES_FILE}: {door}", *address)
    private()
    hang_up_is_an_end()
    os.environ.update(environment(project))
    for door in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):  # Flower's former ones
        os.environ.pop(door, None)
    own = (project / CONTROL_CERTIFICATE).parent.absolute()
    shutil.rmtree(own, ignore_errors=True)
    write_authority_and_server(own, [addresses.control[0]], keep=False)  # new at each start, for this process
    runtime = Runtime(shown(addresses.control), own / "ca.crt", secrets.token_bytes(32))
    start_worker(runtime, "flwr-serverapp", partial(server_work, (project / "app").absolute()))
    app = _application(addresses, own, lock, runtime.secret)
    _run(app, fleet_only(app, _register(app, roster)), addresses, own, project / "certificates")
    return 0


def shown(address: tuple[str, int]) -> str:
    """An address as Flower takes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _application(addresses: Addresses, own: Path, lock: bytes, secret: bytes) -> Any:
    """Flower's SuperLink: registered SuperNodes only, state in memory, apps run by our worker, orders by token."""
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    host, port = addresses.control
    sys.argv = [
        "flower-superlink", "--host", host, "--port", str(port), "--ssl-ca-certfile", f"{own}/ca.crt",
        "--ssl-certfile", f"{own}/server.crt", "--ssl-keyfile", f"{own}/server.key",
        "--enable-supernode-auth", "--disable-runtime-dependency-installation", "--isolation", "process",
    ]  # fmt: skip
    config = _parse_superlink_lifespan_config()
    return create_app(replace(config, authn_plugin=OperatorOnly(lock), superexec_auth_secret=secret), SuperLinkLifespan)


def _register(app: Any, roster: Roster) -> set[bytes]:
    """What ``flwr supernode register`` does, for every key of the roster; nobody else gets in. The keys, as Flower
    has them."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    state = app.state.linkstate_factory.state()
    known = set()
    for number, text in enumerate(roster.keys):
        key: Any = load_ssh_public_key(text.encode())
        found = public_key_to_bytes(key)
        state.create_node(NOOP_FLWR_AID, "operator", found, heartbeat_interval=0, name=f"client-{number}")
        known.add(found)
    return known


def _run(app: Any, outside: Any, addresses: Addresses, own: Path, public: Path) -> None:
    """Both addresses of one application: the network's in a thread, control in the main one, which gets the signals."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler

    said = get_uvicorn_log_config(console_handler.level)

    def server(application: Any, address: tuple[str, int], certificates: Path, **more: Any) -> uvicorn.Server:
        return uvicorn.Server(
            uvicorn.Config(
                application, host=address[0], port=address[1], log_config=said, workers=1, ws="none",
                ssl_certfile=certificates / "server.crt", ssl_keyfile=str(certificates / "server.key"),
                timeout_graceful_shutdown=SHUTDOWN, **more,
            )
        )  # fmt: skip

    control = server(app, addresses.control, own)
    network = server(outside, addresses.listen, public, lifespan="off")

    def open_to_the_network() -> None:
        while not (control.started or control.should_exit):
            time.sleep(LOOK)
        try:
            network.run()
        finally:
            control.should_exit = True  # neither address without the other

    thread = threading.Thread(target=open_to_the_network)
    thread.start()
    for number in (signal.SIGTERM, signal.SIGINT):  # what uvicorn raises again after an orderly end
        signal.signal(number, lambda *_: None)
    try:
        control.run()
    finally:
        network.should_exit = True
        thread.join()


def main(arguments: Sequence[str]) -> int:
    """Exit status 2 with one line for a SuperLink that would be open."""
    if len(arguments) != 1:
        print("usage: python -m fedflat.federation.superlink PROJECT", file=sys.stderr)
        return 2
    return status_of(lambda: serve(Path(arguments[0])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
