"""Verifiable secret sharing: shares whose holder can tell, by itself, that they belong to one secret, and to which.

Feldman 1987, "A practical scheme for non-interactive verifiable secret sharing", over the curve NIST P-256: the dealer
publishes a_k·G for each coefficient a_k of its polynomial, from which everybody can compute f(x)·G of any share f(x).
a_0·G is the public half of the secret, so for a secret that is a private key the commitment is the public key itself.
What the points tell beyond a_0·G is nothing: with a_0·G and fewer than ``threshold`` shares anybody can compute points
of the same law.

The additions of points here (``_add``) take time that depends on their values. They see public points and client
numbers only; what is secret is multiplied in ``cryptography``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

CURVE = ec.SECP256R1()
FIELD = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""FIPS 186-5: coordinates are modulo FIELD; the curve has ORDER points, a prime, the field of secrets and shares."""
POINT_BYTES, SHARE_BYTES = 33, 32

Point = tuple[int, int]
_Triple = tuple[int, int, int]  # Jacobian: x/z², y/z³; z = 0 is the point at infinity


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
    found = [ec.EllipticCurvePublicKey.from_encoded_point(CURVE, part).public_numbers() for part in parts]
    return [(number.x, number.y) for number in found]


def is_share(points: Sequence[Point], holder: int, share: int) -> bool:
    """Return whether this is the holder's share under the dealer's commitments: share·G = Σ_k (holder + 1)^k · A_k."""
    if not 0 < share < ORDER:
        return False
    total: _Triple = (1, 1, 0)
    for x, y in reversed(points):
        total = _add(_times(holder + 1, total), (x, y, 1))
    (wanted,) = read_points(public_half(share))
    return _affine(total) == wanted


def value_at(shares: Mapping[int, int], x: int) -> int:
    """Return the polynomial through shares (holder -> share) at x, by Lagrange's formula; the secret is at x = 0."""
    return sum(weight * share for weight, share in zip(_weights(tuple(shares), x), shares.values())) % ORDER


@lru_cache(maxsize=1024)
def _weights(holders: tuple[int, ...], x: int) -> list[int]:
    found = []
    for holder in holders:
        top, bottom = 1, 1
        for other in holders:
            if other != holder:  # reduced at each step: whole products would grow with the cohort
                top = top * (x - other - 1) % ORDER
                bottom = bottom * (holder - other) % ORDER
        found.append(top * pow(bottom, -1, ORDER) % ORDER)
    return found


def _times(number: int, point: _Triple) -> _Triple:
    """Return number·point for a small number ≥ 1."""
    total = point
    for bit in bin(number)[3:]:
        total = _double(total)
        if bit == "1":
            total = _add(total, point)
    return total


def _double(point: _Triple) -> _Triple:
    x, y, z = point
    slope = 3 * (x - z * z) * (x + z * z) % FIELD  # a = −3
    mixed = 4 * x * y * y % FIELD
    across = (slope * slope - 2 * mixed) % FIELD
    return across, (slope * (mixed - across) - 8 * pow(y, 4, FIELD)) % FIELD, 2 * y * z % FIELD


def _add(one: _Triple, two: _Triple) -> _Triple:
    if not one[2] or not two[2]:
        return two if not one[2] else one
    z1, z2 = one[2] * one[2] % FIELD, two[2] * two[2] % FIELD
    u, v = one[0] * z2 % FIELD, two[0] * z1 % FIELD
    s, t = one[1] * z2 * two[2] % FIELD, two[1] * z1 * one[2] % FIELD
    if u == v:
        return _double(one) if s == t else (1, 1, 0)
    h, r = v - u, t - s
    cube, square = h * h * h % FIELD, u * h * h % FIELD
    x = (r * r - cube - 2 * square) % FIELD
    return x, (r * (square - x) - s * cube) % FIELD, h * one[2] * two[2] % FIELD


def _affine(point: _Triple) -> Point | None:
    if not point[2]:
        return None
    inverse = pow(point[2], -1, FIELD)
    return point[0] * inverse**2 % FIELD, point[1] * inverse**3 % FIELD
