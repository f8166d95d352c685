"""Secure aggregation: a server learns the sum of whole-number vectors modulo 2^bits, and no single one of them.

The protocol of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (Figure 4,
with the underlined parts, against a server that lies), on primitives of the ``cryptography`` library. Five steps:

0. every client makes three key pairs and signs the public halves;
1. it splits its mask secret and a fresh seed b into shares, one for every client, encrypted to each;
2. it adds PRG(b) and, with each other client, ±PRG(their common secret) to its vector, and sends that;
3. it signs what it was told so far, and who sent a vector (``fedflat.federation.consistency``);
4. if enough others signed the same: for clients that sent a vector it gives its shares of b, for those that did not,
of the mask secret. Never both.

What is left of the sum of vectors when all masks cancel is the sum of inputs. Fewer than ``threshold`` clients at any
step end it without a result. Everything here is pure: no transport, no clock, no disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedflat.core.checks import RunError
from fedflat.core.discrete import SecureBits

Vector = NDArray[np.int64]
PRIME = 2**256 + 297
"""The smallest prime above 2^256: the field of the shares of 32-byte secrets."""
SHARE_BYTES = 33


class Aborted(RunError):
    """The protocol ends without a result: too few clients, or something that an honest party would not send."""


@dataclass(frozen=True)
class PublicKeys:
    """What a client makes known: ``seal`` (others encrypt shares to it) and ``mask`` (X25519), ``sign`` (Ed25519), each
    32 bytes, and its signature of all three.
    """

    seal: bytes
    mask: bytes
    sign: bytes
    signature: bytes

    def signed(self, context: bytes, client: int) -> bytes:
        """The bytes that are signed."""
        return b"fedflat secure aggregation" + context + client.to_bytes(8, "big") + self.seal + self.mask + self.sign


@dataclass(frozen=True)
class Shares:
    """What one client holds of another: a share of its seed b and one of its mask secret."""

    seed: int
    mask: int


@dataclass
class Secrets:
    """A client's own secrets of one session, 32 bytes each. context: round and session, the same for all."""

    client: int
    context: bytes
    seal: bytes
    mask: bytes
    seed: bytes
    sign: bytes

    @classmethod
    def fresh(cls, client: int, context: bytes) -> Secrets:
        """New secrets from the operating system."""
        return cls(client, context, *(secrets.token_bytes(32) for _ in range(4)))

    def public(self, key: EllipticCurvePrivateKey) -> PublicKeys:
        """Step 0: the public halves, signed with the key that the roster knows."""
        seal, mask = (
            X25519PrivateKey.from_private_bytes(s).public_key().public_bytes_raw() for s in (self.seal, self.mask)
        )
        sign = Ed25519PrivateKey.from_private_bytes(self.sign).public_key().public_bytes_raw()
        bare = PublicKeys(seal, mask, sign, b"")
        return PublicKeys(seal, mask, sign, key.sign(bare.signed(self.context, self.client), ECDSA(hashes.SHA384())))


def verify(keys: Mapping[int, PublicKeys], known: Mapping[int, EllipticCurvePublicKey], context: bytes) -> None:
    """Raise Aborted unless every client's keys carry its own signature for this session, are points that give a common
    secret, and no key appears twice.
    """
    for client, public in keys.items():
        if client not in known:
            raise Aborted("a client that is not in the roster")
        try:
            known[client].verify(public.signature, public.signed(context, client), ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise Aborted("keys without their client's signature") from None
        for key in (public.seal, public.mask):
            agreed(secrets.token_bytes(32), key, b"trial")
    if min(len({public.mask for public in keys.values()}), len({public.sign for public in keys.values()})) < len(keys):
        raise Aborted("one key for two clients")


def split(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, int]:
    """Shamir's shares of a 32-byte secret: any ``threshold`` of them give it, fewer say nothing. Holder -> share."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        return value

    return {holder: at(holder + 1) for holder in holders}


def combine(shares: Mapping[int, int]) -> bytes:
    """The secret from shares (holder -> share), by Lagrange's formula at 0; Aborted if they are of no 32-byte
    secret.
    """
    total = 0
    for holder, share in shares.items():
        top, bottom = 1, 1
        for other in shares:
            if other != holder:
                top = top * (other + 1) % PRIME
                bottom = bottom * (other - holder) % PRIME
        total = (total + share * top * pow(bottom, -1, PRIME)) % PRIME
    if total >= 2**256:
        raise Aborted("shares that do not belong together")
    return total.to_bytes(32, "big")


def agreed(own: bytes, other: bytes, purpose: bytes) -> bytes:
    """32 bytes that only two clients know: X25519, then HKDF. Aborted for a point of low order."""
    try:
        common = X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise Aborted("a key that gives no common secret") from None
    return HKDF(hashes.SHA256(), 32, None, b"fedflat secure aggregation " + purpose).derive(common)


def prg(seed: bytes, size: int, bits: int) -> Vector:
    """A mask ``(size,)`` of uniform whole numbers in [0, 2^bits): AES-256-CTR."""
    words = SecureBits(seed, "secure aggregation mask").integers64(size)
    return (words & np.uint64((1 << bits) - 1)).astype(np.int64)


def _box(
    own: Secrets, keys: Mapping[int, PublicKeys], other: int, sender: int, receiver: int
) -> tuple[Any, bytes, bytes]:
    """Cipher, nonce and associated data of the box that ``sender`` makes for ``receiver``; each key is used once."""
    ends = sender.to_bytes(8, "big") + receiver.to_bytes(8, "big")
    key = agreed(own.seal, keys[other].seal, b"box" + own.context + ends)
    return ChaCha20Poly1305(key), bytes(12), own.context + ends


def seal_shares(own: Secrets, keys: Mapping[int, PublicKeys], threshold: int) -> tuple[dict[int, bytes], Shares]:
    """Step 1: boxes with shares for every other client of ``keys``, and the shares that the client keeps itself.

    A threshold of half the clients or less is refused: one half could be asked for b and the other for the mask secret.
    """
    if len(keys) < threshold or own.client not in keys:
        raise Aborted("too few clients")
    if 2 * threshold <= len(keys):
        raise Aborted("a threshold that is no majority")
    seed, mask = (split(secret, threshold, keys) for secret in (own.seed, own.mask))
    boxes = {}
    for other in keys:
        if other != own.client:
            cipher, nonce, bound = _box(own, keys, other, own.client, other)
            text = seed[other].to_bytes(SHARE_BYTES, "big") + mask[other].to_bytes(SHARE_BYTES, "big")
            boxes[other] = cipher.encrypt(nonce, text, bound)
    return boxes, Shares(seed[own.client], mask[own.client])


def open_box(own: Secrets, keys: Mapping[int, PublicKeys], sender: int, box: bytes) -> Shares:
    """The shares in a box from another client; Aborted if it is not from that client, for this one, in this session."""
    cipher, nonce, bound = _box(own, keys, sender, sender, own.client)
    try:
        text = cipher.decrypt(nonce, box, bound)
    except InvalidTag:
        raise Aborted("a box that does not open") from None
    if len(text) != 2 * SHARE_BYTES:
        raise Aborted("a box of another size")
    return Shares(int.from_bytes(text[:SHARE_BYTES], "big"), int.from_bytes(text[SHARE_BYTES:], "big"))


def masked(own: Secrets, keys: Mapping[int, PublicKeys], others: Iterable[int], vector: Vector, bits: int) -> Vector:
    """Step 2: the vector ``(d,)`` with PRG(b) and, for each other client v, +PRG(s_uv) if u < v and −PRG(s_uv) if u >
    v.
    """
    total = vector + prg(own.seed, vector.size, bits)
    for other in others:
        if other != own.client:
            total += _pair_mask(own.mask, own.client, keys[other].mask, other, own.context, vector.size, bits)
    return wrap(total, bits)


def _pair_mask(secret: bytes, client: int, key: bytes, other: int, context: bytes, size: int, bits: int) -> Vector:
    mask = prg(agreed(secret, key, b"mask" + context), size, bits)
    return mask if client < other else -mask


def wrap(values: Vector, bits: int) -> Vector:
    """Modulo 2^bits, in [0, 2^bits)."""
    return values & ((1 << bits) - 1)


def check_survivors(client: int, survivors: set[int], shared: set[int], threshold: int) -> None:
    """Raise Aborted unless the survivors can be: enough, of those who shared, the client that is told so among them."""
    if len(survivors) < threshold or not survivors <= shared or client not in survivors:
        raise Aborted("survivors that cannot be")


def reveal(own: Mapping[int, Shares], survivors: set[int], shared: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Step 4: shares of b for survivors, of the mask secret for clients that dropped out; never both of one client.

    own: the shares this client holds, by whose they are. shared: clients that took part in step 1. The survivors are
    those that the client checked and signed in step 3.
    """
    seeds = {client: own[client].seed for client in survivors}
    masks = {client: own[client].mask for client in shared - survivors}
    return seeds, masks


@dataclass
class Collector:
    """The server's side: what it keeps is one running sum, public keys and shares. Memory O(d + n²)."""

    context: bytes
    size: int
    bits: int
    threshold: int
    keys: dict[int, PublicKeys] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    survivors: set[int] = field(default_factory=set)
    signatures: dict[int, bytes] = field(default_factory=dict)
    seeds: dict[int, dict[int, int]] = field(default_factory=dict)
    masks: dict[int, dict[int, int]] = field(default_factory=dict)
    total: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.total = np.zeros(self.size, dtype=np.int64)

    def enough(self, clients: set[int]) -> None:
        """Raise Aborted if a step has too few clients."""
        if len(clients) < self.threshold:
            raise Aborted("too few clients")

    def add(self, client: int, vector: Vector) -> None:
        """Step 2: one masked vector; it is not kept."""
        self.survivors.add(client)
        self.total = wrap(self.total + wrap(vector, self.bits), self.bits)

    def take_shares(self, holder: int, seeds: Mapping[int, int], masks: Mapping[int, int]) -> bool:
        """Step 4: one client's shares, if they are of exactly those that were asked for."""
        if set(seeds) != self.survivors or set(masks) != self.shared - self.survivors:
            return False
        for found, store in ((seeds, self.seeds), (masks, self.masks)):
            for client, share in found.items():
                store.setdefault(client, {})[holder] = share
        return True

    def result(self) -> Vector:
        """The sum of the survivors' vectors modulo 2^bits ``(d,)``; Aborted if too few gave shares, or false ones.

        Nobody sees one vector, so nobody can clip it: clients bound their own, and a hostile one's is anything.
        """
        total = self.total.copy()
        for client in sorted(self.survivors):
            total -= prg(self._secret(self.seeds.get(client, {})), self.size, self.bits)
        for client in sorted(self.shared - self.survivors):
            secret = self._secret(self.masks.get(client, {}))
            if X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() != self.keys[client].mask:
                raise Aborted("shares of another secret")
            for other in sorted(self.survivors):  # what the survivors added for it is still in the sum
                key = self.keys[other].mask
                total += _pair_mask(secret, client, key, other, self.context, self.size, self.bits)
        return wrap(total, self.bits)

    def _secret(self, shares: Mapping[int, int]) -> bytes:
        if len(shares) < self.threshold:
            raise Aborted("too few clients")
        chosen = sorted(shares)[: self.threshold]
        return combine({holder: shares[holder] for holder in chosen})
