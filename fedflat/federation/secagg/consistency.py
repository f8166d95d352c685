"""The fourth step of secure aggregation: clients make sure that all of them were told the same before they reveal.

Round 3 (ConsistencyCheck) of Bonawitz et al. 2017, Figure 4, against a server that lies. Such a server could tell one
client that u survived and another that u dropped out, and so unmask a sum of fewer vectors than each client was
promised. So each survivor signs what it saw, and reveals only after ``threshold`` survivors, itself among them, have
signed the very same. Two different views cannot both get that many signatures while 2·threshold > n + f (n clients in
the session, f of them in league with the server): honest clients sign once.

The paper signs the survivors U3 only; here the signature covers the whole public transcript: context, everybody's
keys (hence n and the threshold), U2 and U3. Signature keys are fresh Ed25519 keys; each is vouched for by its client's
key in the roster, like the other two public keys of the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedflat.federation.secagg.protocol import Aborted, PublicKeys, Secrets

SIGNATURE_BYTES = 64
_LABEL = b"fedflat secure aggregation: consistency"


def enough_for_lies(clients: int, colluders: int) -> int:
    """The smallest threshold t with 2t > n + f: any two sets of t clients share an honest one."""
    return (clients + colluders) // 2 + 1


def transcript(
    context: bytes, keys: Mapping[int, PublicKeys], shared: Iterable[int], survivors: Iterable[int]
) -> bytes:
    """SHA-256 of what all clients of a session must have seen alike, each part with its length before it.

    keys: everybody's public keys with their signatures. shared: U2, who sent shares. survivors: U3.
    """
    told = b"".join(
        number.to_bytes(8, "big") + public.halves + _counted(public.signature)
        for number, public in sorted(keys.items())
    )
    sets = [b"".join(number.to_bytes(8, "big") for number in sorted(found)) for found in (shared, survivors)]
    return hashlib.sha256(b"".join(_counted(part) for part in (_LABEL, context, told, *sets))).digest()


def _counted(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def consent(own: Secrets, seen: bytes) -> bytes:
    """A client's signature of the transcript that it saw."""
    return Ed25519PrivateKey.from_private_bytes(own.sign).sign(_LABEL + own.client.to_bytes(8, "big") + seen)


def agrees(client: int, public: PublicKeys, seen: bytes, signature: bytes) -> bool:
    """Whether a client's signature is of this transcript."""
    try:
        Ed25519PublicKey.from_public_bytes(public.sign).verify(signature, _LABEL + client.to_bytes(8, "big") + seen)
    except InvalidSignature:
        return False
    return True


def require_consent(
    signatures: Mapping[int, bytes], keys: Mapping[int, PublicKeys], survivors: set[int], seen: bytes, threshold: int
) -> None:
    """What a client checks before it reveals anything.

    Raises:
        Aborted: fewer than ``threshold`` signatures, one of somebody who is no survivor, or one of another transcript.
    """
    if len(signatures) < threshold or not set(signatures) <= survivors:
        raise Aborted("too few clients agree on who is there")
    if not all(agrees(client, keys[client], seen, signature) for client, signature in signatures.items()):
        raise Aborted("clients were told different things")
