"""The locks of a federation: who may give orders to the SuperLink, at which addresses, and with which certificates.

Flower 1.41 serves three interfaces on one port: Fleet (SuperNodes, each with its registered key), Control (``flwr
run`` and all other orders) and Runtime (the ServerApp). Control is open to everybody there unless an authentication
plugin is given, and whoever gives orders chooses the code that runs. So here the network gets Fleet alone (``doors``),
and orders need the operator's token, a random number that ``flwr`` sends from its own credentials file.

The authority, certificates and client keys that are made here are for trying out on one machine. On real machines each
client makes its own key pair and sends only the public half (docs/deploy.md).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from fedflat.core import durable, owners_only, reading, require, turning, wrong
from fedflat.federation.processes import program

LOCK = "operator.sha256"
ADDRESSES_FILE = "server/superlink.toml"


def write_lock(lock: Path, credentials: Path, address: str) -> None:
    """Write a new operator's token: its hash for the SuperLink, itself for ``flwr`` (in FLWR_HOME); both 0600."""
    token = secrets.token_urlsafe(32)
    entry = f"flower.account-auth.{address}."
    values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    encoded = {entry + name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    texts = {credentials: json.dumps(encoded, indent=1), lock: hashlib.sha256(token.encode()).hexdigest()}
    fresh = {path.with_name(f"{path.name}.new"): path for path in texts}
    try:
        for place, path in fresh.items():  # JSON is YAML, which Flower reads its credentials as
            place.unlink(missing_ok=True)
            durable.create(place, f"{texts[path]}\n".encode())
        for place, path in fresh.items():  # both are whole on the disk, so that the two always fit
            place.replace(path)
    finally:
        for place in fresh:
            place.unlink(missing_ok=True)


def read_lock(path: Path) -> bytes:
    """Return the hash of the operator's token; InputError if there is none, or if others could change or read it."""
    with reading(path, "no lock", "the file that fedflat deploy wrote"):
        token_hash = bytes.fromhex(path.read_text(encoding="ascii").strip())
    require(len(token_hash) == 32, str(path), f"{len(token_hash)} bytes", "the hash of the operator's token")
    owners_only(path, "0600, for the SuperLink's account alone")
    return token_hash


def address_of(where: str, text: Any) -> tuple[str, int]:
    """Return host and port of ``host:port`` (an IPv6 address in brackets); InputError if it is none."""
    host, _, port = str(text).rpartition(":")
    if not re.fullmatch(r"[\w.:[\]-]+", host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise wrong(where, str(text), "HOST:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; not for a name, which may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OperatorOnly:
    """Flower's plugin for the Control interface (a ControlAuthnPlugin): one account, one token; nobody else."""

    def __init__(self, lock: bytes) -> None:
        self.lock = lock

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
        """Return whether the request carries the token, and the account if so."""
        from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
        from flwr.supercore.auth.typing import AccountInfo

        token = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        if not self.is_token(token.decode("latin-1") if isinstance(token, bytes) else token):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name="operator")

    def is_token(self, token: str) -> bool:
        """Return whether this is the operator's token."""
        return hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self.lock)

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
        with reading(path, "no addresses", "what fedflat deploy wrote"):
            config = tomllib.loads(path.read_text(encoding="utf-8"))
        listen, control = (address_of(f"{path}: {door}", config.get(door)) for door in ("listen", "control"))
        allowed = f"an address of this machine alone, as 127.0.0.1:{control[1]}"
        require(is_loopback(control[0]), f"{path}: control", str(config["control"]), allowed)
        require(listen[1] != control[1], f"{path}: control", f"port {control[1]}, as in listen", "another port")
        return cls(listen, control)


def address_text(address: tuple[str, int]) -> str:
    """Return an address as Flower takes it: an IPv6 address in brackets, before its port."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DAYS = 90
"""A certificate's life: longer than most runs, short enough that a lost key is of no use for long."""


def write_authority_and_server(folder: Path, hosts: list[str], *, keep: bool = True) -> None:
    """Write ca.crt, ca.key, server.crt and server.key; the server's certificate is good for ``hosts``.

    keep: False for an authority that signs this one certificate: its key never reaches the disk.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    signers = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedflat test authority")])
    for name, key in (("ca", authority), ("server", server)) if keep else (("server", server),):
        durable.create(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    durable.create(folder / "ca.crt", _certificate(signers, signers, authority.public_key(), authority, []), 0o644)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedflat SuperLink")])
    durable.create(folder / "server.crt", _certificate(subject, signers, server.public_key(), authority, hosts), 0o644)


def write_client_keys(folder: Path) -> str:
    """Write auth.key (0600) and auth.pub, a P-384 pair in OpenSSH form; returns the public key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    durable.create(folder / "auth.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    durable.create(folder / "auth.pub", public + b"\n", 0o644)
    return public.decode()


def _certificate(subject: x509.Name, issuer: x509.Name, public: Any, signer: Any, hosts: list[str]) -> bytes:
    """Return a certificate (PEM) that is good for ``hosts``; an authority's, which signs others, for none."""
    now, signs = datetime.now(UTC), not hosts
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(signs), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)


def _usage(signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _host(host: str) -> Any:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    with turning(ValueError, wrong("--host", host, "a host name or an IP address")):
        return x509.DNSName(host)


@program("lock PROJECT")
def main(project: str) -> None:
    """Write a new token for a project; the old one is good until the SuperLink is started again."""
    folder, credentials = Path(project), Path(project) / "flower" / "credentials.yaml"
    write_lock(folder / "server" / LOCK, credentials, address_text(Addresses.read(folder).control))
    print(f"{credentials}: a new operator's token; start the SuperLink again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
