"""Verifiable secret sharing: shares whose holder can tell, by itself, that they belong to one secret, and to which.

Feldman 1987, "A practical scheme for non-interactive verifiable secret sharing", over the curve NIST P-256: the dealer
publishes a_k·G for each coefficient a_k of its polynomial, from which everybody can compute f(x)·G of any share f(x).
a_0·G is the public half of the secret, so for a secret that is a private key the commitment is the public key itself.
What the points tell beyond a_0·G is nothing: with a_0·G and fewer than ``threshold`` shares anybody can compute points
of the same law.

The additions of points here (``_add``) take time that depends on their values. They see public points and client
numbers only; what is secret is multiplied in ``cryptography``.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

CURVE = ec.SECP256R1()
FIELD = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
"""NIST SP 800-186: y² = x³ − 3x + B modulo FIELD; the curve has ORDER points, a prime, the field of secrets and
shares."""
POINT_BYTES, SHARE_BYTES = 33, 32

Point = tuple[int, int]
_Triple = tuple[int, int, int]  # projective: x/z, y/z; z = 0 is the point at infinity


def fresh_scalar() -> int:
    """Return a secret from the operating system, uniform in [1, ORDER)."""
    return 1 + secrets.randbelow(ORDER - 1)


def public_half(scalar: int) -> bytes:
    """Return scalar·G, compressed; scalar in [1, ORDER)."""
    return ec.derive_private_key(scalar, CURVE).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def split(secret: int, threshold: int, holders: Iterable[int]) -> tuple[dict[int, int], list[bytes]]:
    """Return shares of a secret in [1, ORDER), any ``threshold`` of which give it, and the commitments."""
    coefficients = [secret, *(fresh_scalar() for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % ORDER
        return value

    # From 1 on: at 0 the polynomial is the secret itself, and clients count from 0.
    return {holder: at(holder + 1) for holder in holders}, [public_half(a) for a in coefficients]


def read_points(data: bytes) -> list[Point]:
    """Return compressed points of the curve, one after the other; ValueError if one is none."""
    if len(data) % POINT_BYTES:
        raise ValueError("not whole points")
    parts = [data[place : place + POINT_BYTES] for place in range(0, len(data), POINT_BYTES)]
    numbers = [ec.EllipticCurvePublicKey.from_encoded_point(CURVE, part).public_numbers() for part in parts]
    return [(number.x, number.y) for number in numbers]


def is_share(points: Sequence[Point], holder: int, share: int) -> bool:
    """Return whether this is the holder's share under the dealer's commitments: share·G = Σ_k (holder + 1)^k · A_k."""
    if not 0 < share < ORDER:
        return False
    total: _Triple = (0, 1, 0)
    for x, y in reversed(points):
        total = _add(_times(holder + 1, total), (x, y, 1))
    ((x, y),) = read_points(public_half(share))
    return not _add(total, (x, -y, 1))[2]  # nothing is left


def value_at(shares: Mapping[int, int], x: int) -> int:
    """Return the polynomial through shares (holder -> share) at x, by Lagrange's formula; the secret is at x = 0."""
    return sum(weight * share for weight, share in zip(_weights(tuple(shares), x), shares.values())) % ORDER


@lru_cache(maxsize=1024)
def _weights(holders: tuple[int, ...], x: int) -> list[int]:
    weights = []
    for holder in holders:
        top, bottom = 1, 1
        for other in holders:
            if other != holder:  # reduced at each step: whole products would grow with the cohort
                top = top * (x - other - 1) % ORDER
                bottom = bottom * (holder - other) % ORDER
        weights.append(top * pow(bottom, -1, ORDER) % ORDER)
    return weights


def _times(number: int, point: _Triple) -> _Triple:
    """Return number·point for a small number ≥ 1."""
    total = point
    for bit in bin(number)[3:]:
        total = _add(total, total)
        if bit == "1":
            total = _add(total, point)
    return total


def _add(one: _Triple, two: _Triple) -> _Triple:
    """Return the sum of any two points, equal ones and infinity too.

    The complete formulas for curves of prime order with a = −3: IACR ePrint 2015/1060, Algorithm 4.
    """
    (x1, y1, z1), (x2, y2, z2) = one, two
    xx, yy, zz = x1 * x2 % FIELD, y1 * y2 % FIELD, z1 * z2 % FIELD
    xy, xz, yz = (x1 * y2 + x2 * y1) % FIELD, (x1 * z2 + x2 * z1) % FIELD, (y1 * z2 + y2 * z1) % FIELD
    shift, across, slope = 3 * (B * zz - xz) % FIELD, 3 * (B * xz - xx - 3 * zz) % FIELD, 3 * (xx - zz)
    low, high = yy - shift, yy + shift
    return (xy * low - yz * across) % FIELD, (high * low + slope * across) % FIELD, (yz * high + xy * slope) % FIELD
