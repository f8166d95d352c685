"""The lock on the SuperLink: who may give orders, and which of its addresses the network sees.

Flower 1.41 serves three interfaces on one port: Fleet (SuperNodes, each with its registered key), Control (``flwr
run`` and all other orders) and Runtime (the ServerApp). Control is open to everybody there unless an authentication
plugin is given, and whoever gives orders chooses the code that runs. So here the network gets Fleet alone, and orders
need the operator's token, a random number that ``flwr`` sends from its own credentials file.
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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, wrong
from fedflat.federation.exits import status_of

LOCK = "operator.sha256"
FLEET = "/v1/fleet/"


def write_lock(lock: Path, credentials: Path, address: str) -> None:
    """A new operator's token: its hash for the SuperLink, itself for ``flwr`` (in FLWR_HOME); both 0600."""
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
    """The hash of the operator's token; InputError if there is none, or if others could change or read it."""
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
    """Host and port of ``host:port`` (an IPv6 address in brackets); InputError if it is none."""
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise wrong(where, str(text), "HOST:PORT")
    return host.strip("[]"), int(port)


def loopback_of(where: str, text: Any) -> tuple[str, int]:
    """The same for an address that only this machine reaches; InputError for any other, or for a name."""
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
        """Whether the request carries the token, and the account if so."""
        from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
        from flwr.supercore.auth.typing import AccountInfo

        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        token = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(hashlib.sha256(token).digest(), self.lock):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name="operator")

    def get_login_details(self) -> None:
        """Nobody logs in: the token is a file."""

    def get_auth_tokens(self, device_code: str) -> None:
        """No token is given to anybody."""

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        """None is renewed either."""
        return None, None


def fleet_only(app: Any, known: Collection[bytes]) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """The SuperLink's ASGI application as the network sees it: nothing but the SuperNodes' own interface, and of a
    request without the signature of a ``known`` key (PEM) nothing is read. Flower itself takes the whole body in first.
    """

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        inside = scope["path"].startswith(FLEET)
        if inside and _is_signed(dict(scope["headers"]), known):
            await app(scope, receive, send)
            return
        status, headers = 401 if inside else 404, [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return door


def _is_signed(headers: Mapping[bytes, bytes], known: Collection[bytes]) -> bool:
    """Whether a known key signed the request's time. Flower asks how old that is, and whose node the request is of."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    def given(name: str) -> bytes:
        return headers.get(name.lower().encode(), b"")

    try:
        key, signature = (
            base64.b64decode(given(name), validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
    except ValueError:
        return False
    return key in known and verify_signature(bytes_to_public_key(key), given(TIMESTAMP_HEADER), signature)


def main(arguments: Sequence[str]) -> int:
    """A new token for a project; the old one is good until the SuperLink is started again."""
    if len(arguments) != 1:
        print("usage: python -m fedflat.federation.lock PROJECT", file=sys.stderr)
        return 2
    from fedflat.federation.superlink import Addresses, shown

    def work() -> int:
        project = Path(arguments[0])
        credentials = project / "flower" / "credentials.yaml"
        write_lock(project / "server" / LOCK, credentials, shown(Addresses.read(project).control))
        print(f"{credentials}: a new operator's token; start the SuperLink again")
        return 0

    return status_of(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
