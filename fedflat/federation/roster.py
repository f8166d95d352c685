"""Who the clients are: each client's number, and the public key with which its SuperNode authenticates.

The population M is the roster, fixed before round 0. The server draws cohorts from it, whether a client is connected
or not, so who happens to be online changes neither q nor the denominator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, wrong


@dataclass(frozen=True)
class Roster:
    """Public keys in client order, in OpenSSH form without a comment (``ecdsa-sha2-nistp384 AAAA…``)."""

    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise wrong("roster.json", "the same public key for two clients", "one key for each client")

    @property
    def clients(self) -> int:
        """M, the number of clients in the roster."""
        return len(self.keys)

    def connected(self, nodes: Iterable[Any]) -> dict[int, int]:
        """Client number -> Flower node id, for the nodes whose authenticated key is in the roster.

        A node with an unknown key is left out. Of two nodes with one key (which Flower refuses to register) none
        counts.
        """
        number = {canonical(key): client for client, key in enumerate(self.keys)}
        found: dict[int, int] = {}
        twice: set[int] = set()
        for node in nodes:
            key = _from_node(node)
            client = None if key is None else number.get(key)
            if client is None:
                continue
            if client in found:
                twice.add(client)
            found[client] = node.node_id
        return {client: node for client, node in found.items() if client not in twice}

    @classmethod
    def read(cls, path: Path) -> Roster:
        """The roster in a JSON file; InputError if it is none."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            keys = tuple(str(entry["public_key"]) for entry in value["clients"])
            numbers = [entry["client"] for entry in value["clients"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: found no roster ({error}); allowed: the file that fedflat deploy wrote."
            ) from error
        if numbers != list(range(len(keys))):
            raise wrong(str(path), "client numbers with gaps or in another order", "0, 1, 2, …")
        for key in keys:
            canonical(key)
        return cls(keys)

    def dump(self) -> Mapping[str, Any]:
        """The roster as values for JSON."""
        return {"clients": [{"client": i, "public_key": key} for i, key in enumerate(self.keys)]}


def canonical(key: str) -> bytes:
    """One byte form of a public key in OpenSSH form; InputError if it is no elliptic-curve key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        loaded = load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm):
        loaded = None
    if not isinstance(loaded, EllipticCurvePublicKey):
        raise wrong("roster.json: public_key", key[:24], "an elliptic-curve public key in OpenSSH form")
    return _bytes(loaded)


def _from_node(node: Any) -> bytes | None:
    """The canonical form of the key that a node authenticated with (PEM, as Flower keeps it)."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return _bytes(load_pem_public_key(bytes(node.public_key)))
    except ValueError:
        return None


def _bytes(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
