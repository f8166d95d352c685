"""The lock on the SuperLink: who may give orders, and at which addresses it listens.

Flower 1.41 serves three interfaces on one port: Fleet (SuperNodes, each with its registered key), Control (``flwr
run`` and all other orders) and Runtime (the ServerApp). Control is open to everybody there unless an authentication
plugin is given, and whoever gives orders chooses the code that runs. So here the network gets Fleet alone (``doors``),
and orders need the operator's token, a random number that ``flwr`` sends from its own credentials file.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, wrong
from fedflat.federation.processes import program

LOCK = "operator.sha256"
ADDRESSES_FILE = "server/superlink.toml"


def write_lock(lock: Path, credentials: Path, address: str) -> None:
    """Write a new operator's token: its hash for the SuperLink, itself for ``flwr`` (in FLWR_HOME); both 0600."""
    token = secrets.token_urlsafe(32)
    entry = f"flower.account-auth.{address}."
    kept = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    found = {entry + name: base64.b64encode(value.encode()).decode() for name, value in kept.items()}
    _write(credentials, json.dumps(found, indent=1))  # JSON is YAML, which Flower reads there
    _write(lock, hashlib.sha256(token.encode()).hexdigest())


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text + "\n")


def read_lock(path: Path) -> bytes:
    """Return the hash of the operator's token; InputError if there is none, or if others could change or read it."""
    try:
        found, mode = bytes.fromhex(path.read_text(encoding="ascii").strip()), path.stat().st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: found no lock ({error}); allowed: the file that fedflat deploy wrote.") from error
    if len(found) != hashlib.sha256().digest_size:
        raise wrong(str(path), f"{len(found)} bytes", "the hash of the operator's token")
    if mode & 0o077:
        raise wrong(str(path), f"mode {mode & 0o777:04o}", "0600, for the SuperLink's account alone")
    return found


def address_of(where: str, text: Any) -> tuple[str, int]:
    """Return host and port of ``host:port`` (an IPv6 address in brackets); InputError if it is none."""
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise wrong(where, str(text), "HOST:PORT")
    return host.strip("[]"), int(port)


def loopback_of(where: str, text: Any) -> tuple[str, int]:
    """Return the same for an address that only this machine reaches; InputError for any other, or for a name."""
    host, port = address_of(where, text)
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise wrong(where, str(text), f"an address of this machine alone, as 127.0.0.1:{port}")
    return host, port


class OperatorOnly:
    """Flower's plugin for the Control interface (a ControlAuthnPlugin): one account, one token; nobody else."""

    def __init__(self, lock: bytes) -> None:
        self.lock = lock

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
        """Return whether the request carries the token, and the account if so."""
        from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
        from flwr.supercore.auth.typing import AccountInfo

        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        if not self.is_token(given.decode("latin-1") if isinstance(given, bytes) else given):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name="operator")

    def is_token(self, given: str) -> bool:
        """Return whether this is the operator's token."""
        return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self.lock)

    def get_login_details(self) -> None:
        """Nobody logs in: the token is a file."""

    def get_auth_tokens(self, device_code: str) -> None:
        """No token is given to anybody."""

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        """No token is renewed either."""
        return None, None


@dataclass(frozen=True)
class Addresses:
    """Addresses (host, port) that the SuperLink listens at."""

    listen: tuple[str, int]
    control: tuple[str, int]

    @classmethod
    def read(cls, project: Path) -> Addresses:
        """Return what ``server/superlink.toml`` of a project says; InputError unless orders come from this machine."""
        path = project / ADDRESSES_FILE
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: found no addresses ({error}); allowed: what fedflat deploy wrote.") from error
        listen = address_of(f"{path}: listen", found.get("listen"))
        addresses = cls(listen, loopback_of(f"{path}: control", found.get("control")))
        if addresses.listen[1] == addresses.control[1]:
            raise wrong(f"{path}: control", f"port {addresses.control[1]}, as in listen", "another port")
        return addresses


def address_text(address: tuple[str, int]) -> str:
    """Return an address as Flower takes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(arguments: Sequence[str]) -> int:
    """Write a new token for a project; the old one is good until the SuperLink is started again."""

    def work() -> int:
        project = Path(arguments[0])
        credentials = project / "flower" / "credentials.yaml"
        write_lock(project / "server" / LOCK, credentials, address_text(Addresses.read(project).control))
        print(f"{credentials}: a new operator's token; start the SuperLink again")
        return 0

    return program("lock PROJECT", arguments, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
