"""What clients of secure aggregation send each other through the server: keys, signed deals, complaints, consent.

A dealer signs each box together with its commitments, so nobody else can have made a bad one. A receiver that finds no
true share in a signed box signs a complaint. The dealer then shows the secret key that it made for this one box: if the
box opens to a true share with it, it does so for its receiver too, and the complaint is false; otherwise the deal is.

A complaint about an honest dealer can only come from a dishonest client, which knows the shares in its box already: an
honest one complains only about what the dealer itself signed, for the very same set of everybody's keys (hence the same
threshold), and an honest dealer answers no other. So the answer tells nobody anything new, whatever the server does to
keys, boxes and complaints on their way.

Consent is round 3 (ConsistencyCheck) of Bonawitz et al. 2017, Figure 4, against a server that lies: it could tell one
client that u survived and another that u dropped out, and so unmask a sum of fewer vectors than each client was
promised. So each survivor signs what it was told, and reveals only after ``threshold`` survivors, itself among them,
have signed the very same. Two different views cannot both get that many signatures while 2·threshold > n + f (n clients
in the session, f of them in league with the server): honest clients sign once. The paper signs the survivors U3 only;
here the signature covers the whole public transcript: context, everybody's keys (hence n and the threshold), U2 and U3.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedflat.core import insist, turning
from fedflat.federation.secagg import sharing
from fedflat.federation.secagg.protocol import Aborted, PublicKeys, Secrets, Shares, agreed
from fedflat.federation.secagg.sharing import POINT_BYTES, SHARE_BYTES, Point
from fedflat.federation.wire import Malformed, read_map, write_map

KEYS, SHARES, CHECK, ANSWER = "keys", "shares", "check", "answer"
VECTOR, CONSENT, REVEAL, END = "vector", "consent", "reveal", "end"
"""The steps. ANSWER is asked of accused dealers only; END, at any time, makes a client forget every session but the one
that is named."""
SIGNATURE_BYTES = 64
BOX_BYTES = 32 + 2 * SHARE_BYTES + 16
"""The box's own public key, two shares, the cipher's tag."""
SIGNED_BOX_BYTES = BOX_BYTES + SIGNATURE_BYTES
KEY_BYTES = 64 + POINT_BYTES
DEAL, COMPLAINT = "deal", "complaint"
"""What clients sign beside their consent."""
_LABEL = b"fedflat secure aggregation: "


def text(*parts: int | bytes) -> bytes:
    """Return parts as one byte string, each with its length before, so that none runs into the next; a number as 8.

    >>> text(b"ab", b"c") == text(b"a", b"bc")
    False
    """
    encoded = [part if isinstance(part, bytes) else part.to_bytes(8, "big") for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)


def signed(secrets: Secrets, kind: str, seen: bytes, *parts: int | bytes) -> bytes:
    """Return a client's signature of what it says to others.

    kind: DEAL (of receiver, commitments, box), COMPLAINT (of the dealer: its signed box holds no true shares for this
    client) or CONSENT. seen: the hash of what the client was told (``keys_seen``; for CONSENT the whole
    ``transcript``).
    """
    message = text(_LABEL, kind.encode(), seen, secrets.client, *parts)
    return Ed25519PrivateKey.from_private_bytes(secrets.sign).sign(message)


def is_signed(client: int, public: PublicKeys, signature: bytes, kind: str, seen: bytes, *parts: int | bytes) -> bool:
    """Return whether a client of these public keys said so (``signed``)."""
    message = text(_LABEL, kind.encode(), seen, client, *parts)
    try:
        Ed25519PublicKey.from_public_bytes(public.sign).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def write_keys(keys: Mapping[int, PublicKeys]) -> bytes:
    """Return the clients' public keys as bytes for a message."""
    return write_map({client: key.halves + key.signature for client, key in keys.items()})


def read_keys(data: Any) -> dict[int, PublicKeys]:
    """Return public keys of clients, or ``Malformed``."""
    parts = read_map(data)
    insist(all(len(part) > KEY_BYTES for part in parts.values()), Malformed("form"))
    return {client: PublicKeys.of(part[:KEY_BYTES], part[KEY_BYTES:]) for client, part in parts.items()}


def write_numbers(values: Mapping[int, int]) -> bytes:
    """Return shares of clients' secrets as bytes for a message."""
    return write_map({client: value.to_bytes(SHARE_BYTES, "big") for client, value in values.items()})


def read_numbers(data: Any) -> dict[int, int]:
    """Return shares of clients' secrets, or ``Malformed``."""
    return {client: int.from_bytes(value, "big") for client, value in read_map(data, SHARE_BYTES).items()}


@dataclass(frozen=True)
class Deal:
    """What a client deals: commitments to its seed's and mask secret's polynomials (the mask's first point is its
    public key, and left out); receiver -> box and the dealer's signature of box and commitments.
    """

    commitments: bytes
    boxes: Mapping[int, bytes]


def deal(secrets: Secrets, keys: Mapping[int, PublicKeys], threshold: int) -> tuple[Deal, Shares]:
    """Return boxes for every other client of ``keys``, and the shares that the client keeps itself.

    A threshold of half the clients or less is refused: one half could be asked for b and the other for the mask secret.
    """
    insist(len(keys) >= threshold and secrets.client in keys, Aborted("too few clients"))
    insist(2 * threshold > len(keys), Aborted("a threshold that is no majority"))
    seed, seed_points = sharing.split(int.from_bytes(secrets.seed, "big"), threshold, keys)
    mask, mask_points = sharing.split(int.from_bytes(secrets.mask, "big"), threshold, keys)
    commitments, seen = b"".join([*seed_points, *mask_points[1:]]), keys_seen(secrets.context, keys)
    boxes = {}
    for other in keys:
        if other != secrets.client:
            plaintext = b"".join(share.to_bytes(SHARE_BYTES, "big") for share in (seed[other], mask[other]))
            once = key_of_box(secrets, other)
            public = X25519PrivateKey.from_private_bytes(once).public_key().public_bytes_raw()
            cipher = _cipher(once, keys[other].seal, secrets.context, secrets.client, other)
            box = public + cipher.encrypt(bytes(12), plaintext, public)
            boxes[other] = box + signed(secrets, DEAL, seen, other, commitments, box)
    return Deal(commitments, boxes), Shares(seed[secrets.client], mask[secrets.client])


def keys_seen(context: bytes, keys: Mapping[int, PublicKeys]) -> bytes:
    """Return what deals and complaints are bound to: the session and everybody's keys, as their signer was told.

    Without it a server that tells two clients of different keys, and so of different thresholds, makes one complain
    about what the other dealt rightly, and has the share shown.
    """
    return transcript(context, keys, (), ())


def key_of_box(secrets: Secrets, receiver: int) -> bytes:
    """Return the X25519 secret of one box: shown, it opens this box and tells nothing of another."""
    purpose = _LABEL + b"box key" + secrets.context + receiver.to_bytes(8, "big")
    return HKDF(hashes.SHA256(), 32, None, purpose).derive(secrets.seal)


def points_of(public: PublicKeys, commitments: bytes, threshold: int) -> tuple[list[Point], list[Point]]:
    """Return the points a dealer is committed to, of its seed and of its mask secret; Aborted if they are not what they
    should be.
    """
    insist(len(commitments) == (2 * threshold - 1) * POINT_BYTES, Aborted("commitments of another size"))
    with turning(ValueError, Aborted("commitments that are no points")):
        seed_points = sharing.read_points(commitments[: threshold * POINT_BYTES])
        return seed_points, sharing.read_points(public.mask + commitments[threshold * POINT_BYTES :])


def is_dealt(
    public: PublicKeys, seen: bytes, sender: int, receiver: int, commitments: bytes, signed_box: bytes
) -> bool:
    """Return whether a box with these commitments is its dealer's, for the keys that were seen (``keys_seen``)."""
    box, signature = signed_box[:BOX_BYTES], signed_box[BOX_BYTES:]
    return is_signed(sender, public, signature, DEAL, seen, receiver, commitments, box)


Points = tuple[Sequence[Point], Sequence[Point]]
"""What a dealer is committed to: the points of its seed's polynomial, and of its mask secret's."""


def open_box(secrets: Secrets, sender: int, signed_box: bytes, points: Points) -> Shares:
    """Return the receiver's own true shares in a box; Aborted if there are none."""
    cipher = _cipher(secrets.seal, signed_box[:32], secrets.context, sender, secrets.client)
    return _true_shares(cipher, secrets.client, signed_box, points)


def clears(
    once: bytes, public: PublicKeys, context: bytes, sender: int, receiver: int, signed_box: bytes, points: Points
) -> bool:
    """Return whether the dealer's key of a box shows that its receiver, of these keys, finds true shares in it."""
    try:
        if X25519PrivateKey.from_private_bytes(once).public_key().public_bytes_raw() != signed_box[:32]:
            return False
        _true_shares(_cipher(once, public.seal, context, sender, receiver), receiver, signed_box, points)
    except (Aborted, ValueError):
        return False
    return True


def _true_shares(cipher: ChaCha20Poly1305, receiver: int, signed_box: bytes, points: Points) -> Shares:
    with turning(InvalidTag, Aborted("a box that does not open")):
        plaintext = cipher.decrypt(bytes(12), signed_box[32:BOX_BYTES], signed_box[:32])
    seed, mask = (int.from_bytes(part, "big") for part in (plaintext[:SHARE_BYTES], plaintext[SHARE_BYTES:]))
    if not sharing.is_share(points[0], receiver, seed) or not sharing.is_share(points[1], receiver, mask):
        raise Aborted("shares that are not of the committed secret")
    return Shares(seed, mask)


def _cipher(secret: bytes, public: bytes, context: bytes, sender: int, receiver: int) -> ChaCha20Poly1305:
    """Return the cipher of one box; each key is used once."""
    return ChaCha20Poly1305(agreed(secret, public, b"box" + context + text(sender, receiver)))


def enough_for_lies(clients: int, colluders: int) -> int:
    """Return the smallest threshold t with 2t > n + f: any two sets of t clients share an honest one."""
    return (clients + colluders) // 2 + 1


def transcript(
    context: bytes, keys: Mapping[int, PublicKeys], shared: Iterable[int], survivors: Iterable[int]
) -> bytes:
    """Return the SHA-256 of what all clients of a session must have seen alike, each part with its length before.

    keys: everybody's public keys with their signatures. shared: U2, who sent shares. survivors: U3.
    """
    everybody = b"".join(text(client, key.halves, key.signature) for client, key in sorted(keys.items()))
    sets = (text(*sorted(clients)) for clients in (shared, survivors))
    return hashlib.sha256(text(_LABEL, b"transcript", context, everybody, *sets)).digest()


def require_consent(
    signatures: Mapping[int, bytes], keys: Mapping[int, PublicKeys], survivors: set[int], seen: bytes, threshold: int
) -> None:
    """Check, before anything is revealed, that enough clients were told the same.

    Raises:
        Aborted: fewer than ``threshold`` signatures, one of somebody who is no survivor, or one of another transcript.
    """
    if len(signatures) < threshold or not set(signatures) <= survivors:
        raise Aborted("too few clients agree on who is there")
    if not all(is_signed(client, keys[client], by, CONSENT, seen) for client, by in signatures.items()):
        raise Aborted("clients were told different things")
