"""Secure aggregation: a server learns the sum of whole-number vectors modulo 2^bits, and no single one of them.

The protocol of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (Figure 4,
with the underlined parts, against a server that lies), on primitives of the ``cryptography`` library; with verifiable
shares, so that a client that lies is found out, by number, and no other is blamed. The steps:

0. every client makes three key pairs and signs the public halves;
1. it deals shares of its mask secret and of a fresh seed b, one for every client, encrypted and signed
   (``fedflat.federation.secagg.dealing``); every client checks what it was dealt, and whoever dealt falsely is left
   out;
2. it adds PRG(b) and, with each other client, ±PRG(their common secret) to its vector, and sends that;
3. it signs what it was told so far, and who sent a vector (``fedflat.federation.secagg.dealing``);
4. if enough others signed the same: for clients that sent a vector it gives its shares of b, for those that did not,
of the mask secret. Never both.

What is left of the sum of vectors when all masks cancel is the sum of inputs. Fewer than ``threshold`` clients at any
step end it without a result. Everything here is pure: no transport, no clock, no disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedflat.core import RunError, insist, turning
from fedflat.core.discrete import SecureBits
from fedflat.federation.secagg import sharing
from fedflat.federation.secagg.sharing import Point

Vector = NDArray[np.int64]


class Aborted(RunError):
    """The protocol ends without a result: too few clients, or something that an honest party would not send."""


@dataclass(frozen=True)
class PublicKeys:
    """What a client makes known: ``seal`` (X25519; others encrypt shares to it), ``mask`` (P-256, compressed; shares of
    its secret can be verified against it), ``sign`` (Ed25519), and its signature of all three.
    """

    seal: bytes
    mask: bytes
    sign: bytes
    signature: bytes

    @classmethod
    def of(cls, halves: bytes, signature: bytes) -> PublicKeys:
        """Return the keys from their bytes, one after the other."""
        return cls(halves[:32], halves[32:65], halves[65:], signature)

    @property
    def halves(self) -> bytes:
        """The three keys, one after the other."""
        return self.seal + self.mask + self.sign

    def signed(self, context: bytes, client: int) -> bytes:
        """Return the bytes that are signed."""
        return b"fedflat secure aggregation" + context + client.to_bytes(8, "big") + self.halves


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
        """Return new secrets from the operating system; mask and seed are scalars of P-256."""
        mask, seed = (sharing.fresh_scalar().to_bytes(32, "big") for _ in range(2))
        return cls(client, context, secrets.token_bytes(32), mask, seed, secrets.token_bytes(32))

    @property
    def halves(self) -> bytes:
        """The public halves, as ``PublicKeys.halves``."""
        seal = X25519PrivateKey.from_private_bytes(self.seal).public_key().public_bytes_raw()
        mask = sharing.public_half(int.from_bytes(self.mask, "big"))
        return seal + mask + Ed25519PrivateKey.from_private_bytes(self.sign).public_key().public_bytes_raw()

    def public(self, key: ec.EllipticCurvePrivateKey) -> PublicKeys:
        """Step 0: return the public halves, signed with the key that the roster knows."""
        bare = PublicKeys.of(self.halves, b"")
        return replace(bare, signature=key.sign(bare.signed(self.context, self.client), ec.ECDSA(hashes.SHA384())))


def verify(keys: Mapping[int, PublicKeys], roster: Mapping[int, ec.EllipticCurvePublicKey], context: bytes) -> None:
    """Raise Aborted unless every client's keys carry its own signature for this session, and give common secrets.

    Two clients in league may show one key: whatever is made with a key is bound to the numbers of its clients too.
    """
    for client, public in keys.items():
        insist(client in roster, Aborted("a client that is not in the roster"))
        with turning(InvalidSignature, Aborted("keys without their client's signature")):
            roster[client].verify(public.signature, public.signed(context, client), ec.ECDSA(hashes.SHA384()))
        # A point of low order would give every pair the same common secret: found before anything is sealed to it.
        agreed(secrets.token_bytes(32), public.seal, b"trial")
        _mask_point(public.mask)


def _mask_point(key: bytes) -> ec.EllipticCurvePublicKey:
    with turning(ValueError, Aborted("a key that gives no common secret")):
        return ec.EllipticCurvePublicKey.from_encoded_point(sharing.CURVE, key)


def agreed(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes that only two clients know: X25519, then HKDF. Aborted for a point of low order."""
    with turning(ValueError, Aborted("a key that gives no common secret")):
        common = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(common, purpose)


def derived(common: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes for one purpose from a secret: HKDF."""
    return HKDF(hashes.SHA256(), 32, None, b"fedflat secure aggregation " + purpose).derive(common)


def prg(seed: bytes, size: int, bits: int) -> Vector:
    """Return a mask ``(size,)`` of uniform whole numbers in [0, 2^bits): AES-256-CTR."""
    return (SecureBits(seed, "secure aggregation mask").integers64(size) & np.uint64((1 << bits) - 1)).astype(np.int64)


def masked(own: Secrets, keys: Mapping[int, PublicKeys], others: Iterable[int], vector: Vector, bits: int) -> Vector:
    """Step 2: return the vector ``(d,)`` with PRG(b), and PRG(s_uv) for each other client v, −PRG(s_uv) if u > v."""
    total = vector + prg(own.seed, vector.size, bits)
    for other in others:
        if other != own.client:
            total += _pair_mask(own.mask, own.client, keys[other].mask, other, own.context, vector.size, bits)
    return wrap(total, bits)


def _pair_mask(secret: bytes, client: int, key: bytes, other: int, context: bytes, size: int, bits: int) -> Vector:
    """Return ±PRG of two clients' common secret. It is bound to both numbers: else a second client with the same key,
    or with its negative, would cancel the first one's mask.
    """
    common = ec.derive_private_key(int.from_bytes(secret, "big"), sharing.CURVE).exchange(ec.ECDH(), _mask_point(key))
    pair = b"".join(number.to_bytes(8, "big") for number in sorted((client, other)))
    mask = prg(derived(common, b"mask" + context + pair), size, bits)
    return mask if client < other else -mask


def wrap(values: Vector, bits: int) -> Vector:
    """Return values modulo 2^bits, in [0, 2^bits)."""
    return values & ((1 << bits) - 1)


def check_survivors(client: int, survivors: set[int], shared: set[int], threshold: int) -> None:
    """Raise Aborted unless the survivors can be: enough, of those who shared, the client that is told so among them."""
    insist(len(survivors) >= threshold and client in survivors <= shared, Aborted("survivors that cannot be"))


def reveal(held: Mapping[int, Shares], survivors: set[int], shared: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Step 4: give shares of b for survivors, of the mask secret for those that dropped out; never both of one.

    held: client -> its shares that this one has. shared: clients that took part in step 1. The survivors are
    those that the client checked and signed in step 3.
    """
    seeds = {client: held[client].seed for client in survivors}
    return seeds, {client: held[client].mask for client in shared - survivors}


@dataclass
class Collector:
    """The server's side: what it keeps is one running sum, public keys, commitments and shares. Memory O(d + n²).

    points: client -> commitments to its seed and to its mask secret. false: who gave false shares, by number.
    """

    context: bytes
    size: int
    bits: int
    threshold: int
    keys: dict[int, PublicKeys] = field(default_factory=dict)
    points: dict[int, tuple[list[Point], list[Point]]] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    survivors: set[int] = field(default_factory=set)
    signatures: dict[int, bytes] = field(default_factory=dict)
    seeds: dict[int, dict[int, int]] = field(default_factory=dict)
    masks: dict[int, dict[int, int]] = field(default_factory=dict)
    false: set[int] = field(default_factory=set)
    total: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.total = np.zeros(self.size, dtype=np.int64)

    def enough(self, clients: set[int]) -> None:
        """Raise Aborted if a step has too few clients."""
        insist(len(clients) >= self.threshold, Aborted("too few clients"))

    def add(self, client: int, vector: Vector) -> None:
        """Step 2: one masked vector; it is not kept."""
        self.survivors.add(client)
        # Wrapped before the sum as well: a hostile vector near 2^63 would overflow int64.
        self.total = wrap(self.total + wrap(vector, self.bits), self.bits)

    def take_shares(self, holder: int, seeds: Mapping[int, int], masks: Mapping[int, int]) -> bool:
        """Step 4: take one client's shares, if they are of exactly those that were asked for."""
        if set(seeds) != self.survivors or set(masks) != self.shared - self.survivors:
            return False
        for shares, store in ((seeds, self.seeds), (masks, self.masks)):
            for client, share in shares.items():
                store.setdefault(client, {})[holder] = share
        return True

    def result(self) -> Vector:
        """Return the sum of the survivors' vectors modulo 2^bits ``(d,)``; Aborted if too few gave true shares.

        Nobody sees one vector, so nobody can clip it: clients bound their own, and a hostile one's is anything.
        """
        total = self.total.copy()
        for client in sorted(self.survivors):
            secret = self._secret(self.points[client][0], self.seeds.get(client, {}))
            total -= prg(secret, self.size, self.bits)
        for client in sorted(self.shared - self.survivors):
            secret = self._secret(self.points[client][1], self.masks.get(client, {}))
            for other in sorted(self.survivors):  # what the survivors added for it is still in the sum
                total += _pair_mask(secret, client, self.keys[other].mask, other, self.context, self.size, self.bits)
        return wrap(total, self.bits)

    def _secret(self, points: list[Point], shares: Mapping[int, int]) -> bytes:
        """Return the committed secret. If all shares are of one polynomial with it, none is examined further."""
        # Examining every share costs curve points for each; interpolation is cheap, and honest shares all lie on it.
        self.enough(set(shares))
        chosen = self._first(shares)
        consistent = all(sharing.value_at(chosen, holder + 1) == share for holder, share in shares.items())
        if not consistent or not sharing.is_share(points[:1], 0, sharing.value_at(chosen, 0)):
            true = {holder: share for holder, share in shares.items() if sharing.is_share(points, holder, share)}
            self.false |= set(shares) - set(true)
            self.enough(set(true))
            chosen = self._first(true)
        return sharing.value_at(chosen, 0).to_bytes(32, "big")

    def _first(self, shares: Mapping[int, int]) -> dict[int, int]:
        return {holder: shares[holder] for holder in sorted(shares)[: self.threshold]}
