"""Keys and certificates of a test federation: an authority, the SuperLink's certificate, one key pair for each client.

For trying out on one machine, and as a picture of what is needed. On real machines each client makes its own key pair
and sends only the public half (docs/deploy.md).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from fedflat.core.checks import wrong

DAYS = 90
"""A certificate's life: longer than most runs, short enough that a lost key is of no use for long."""


def write_authority_and_server(folder: Path, hosts: list[str], *, keep: bool = True) -> None:
    """Write ca.crt, ca.key, server.crt and server.key; the server's certificate is good for ``hosts``.

    keep: False for an authority that signs this one certificate: its key never reaches the disk.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, server = _private_key(), _private_key()
    certificate = _certificate("fedflat test authority", authority.public_key(), None, authority, [])
    if keep:
        _write_private(folder / "ca.key", authority)
    _write(folder / "ca.crt", _pem(certificate))
    _write_private(folder / "server.key", server)
    signed = _certificate("fedflat SuperLink", server.public_key(), certificate, authority, hosts)
    _write(folder / "server.crt", _pem(signed))


def write_client_keys(folder: Path) -> str:
    """Write auth.key (0600) and auth.pub, a P-384 pair in OpenSSH form; returns the public key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _private_key()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(folder / "auth.key", secret, 0o600)
    _write(folder / "auth.pub", public + b"\n")
    return public.decode()


def _private_key() -> Any:
    return ec.generate_private_key(ec.SECP384R1())


def _certificate(name: str, public: Any, issuer: Any, signer: Any, hosts: list[str]) -> Any:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signs = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signs else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(signs), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _host(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise wrong("--host", host, "a host name or an IP address") from None


def _pem(certificate: Any) -> bytes:
    return bytes(certificate.public_bytes(Encoding.PEM))


def _write_private(path: Path, key: Any) -> None:
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
