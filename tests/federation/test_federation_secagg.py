"""The parts of secure aggregation: shares, masks, keys, boxes; what the server cannot see, and what is refused.

Its rounds, with clients that drop out at every step, are in ``test_federation_secure_culprits``.
"""

from collections.abc import Iterable

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import chi2

from fedflat.federation.secagg import dealing, sharing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.protocol import Aborted, PublicKeys, Secrets, Shares

BITS, SIZE = 16, 300
SIGNERS = {i: ec.generate_private_key(ec.SECP384R1()) for i in range(7)}
KNOWN = {i: key.public_key() for i, key in SIGNERS.items()}
CONTEXT = b"round 3, session x"


def vectors(clients: Iterable[int]) -> dict[int, np.ndarray]:
    drawn = np.random.Generator(np.random.Philox(7))
    return {i: drawn.integers(0, 1 << BITS, SIZE) for i in clients}


def test_shamir_any_threshold_of_shares_and_no_fewer() -> None:
    secret = int.from_bytes(bytes(range(32)), "big")
    shares, _ = sharing.split(secret, 3, range(6))
    for chosen in ((0, 1, 2), (5, 3, 1), (0, 2, 4, 5)):
        assert sharing.value_at({i: shares[i] for i in chosen}, 0) == secret
        assert sharing.value_at({i: shares[i] for i in chosen}, 4) == shares[3]
    fresh = [sharing.split(secret, 3, range(6))[0] for _ in range(20)]
    assert secret not in [sharing.value_at({i: found[i] for i in (0, 1)}, 0) for found in fresh]
    assert sharing.value_at(sharing.split(sharing.ORDER - 1, 1, [4])[0], 0) == sharing.ORDER - 1


def test_a_masked_vector_looks_the_same_whatever_the_input() -> None:
    """With fresh secrets, what the server gets for zeros and for ones is uniform: chi-square over 16 bins."""
    for value in (0, 1):
        counts = np.zeros(16)
        for _ in range(40):
            own, other = Secrets.fresh(0, CONTEXT), Secrets.fresh(1, CONTEXT)
            keys = {0: own.public(SIGNERS[0]), 1: other.public(SIGNERS[1])}
            sent = secagg.masked(own, keys, keys, np.full(SIZE, value, dtype=np.int64), BITS)
            counts += np.bincount(sent >> (BITS - 4), minlength=16)
        expected = counts.sum() / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-6, 15)


def test_without_the_seed_of_its_own_a_slow_clients_vector_could_be_unmasked() -> None:
    """Why there are two masks (4.2 of the paper): the twin without b, said to have dropped out, arrives late."""
    own, other = Secrets.fresh(0, CONTEXT), Secrets.fresh(1, CONTEXT)
    keys = {0: own.public(SIGNERS[0]), 1: other.public(SIGNERS[1])}
    vector = vectors([0])[0]
    pair = secagg._pair_mask(own.mask, 0, keys[1].mask, 1, CONTEXT, SIZE, BITS)
    sent = secagg.masked(own, keys, keys, vector, BITS)
    assert not np.array_equal(secagg.wrap(sent - pair, BITS), vector)
    assert np.array_equal(secagg.wrap(secagg.wrap(sent - secagg.prg(own.seed, SIZE, BITS), BITS) - pair, BITS), vector)


def test_keys_must_carry_their_clients_signature_for_this_session() -> None:
    keys = {i: Secrets.fresh(i, CONTEXT).public(SIGNERS[i]) for i in range(3)}
    secagg.verify(keys, KNOWN, CONTEXT)
    servers_own = Secrets.fresh(1, CONTEXT).public(SIGNERS[0])
    for bad in (
        {**keys, 1: servers_own},
        {**keys, 1: keys[0]},
        {**keys, 9: keys[0]},
        {**keys, 1: PublicKeys(keys[1].seal, keys[2].mask, keys[1].sign, keys[1].signature)},
        {**keys, 1: PublicKeys(keys[1].seal, keys[1].mask, keys[2].sign, keys[1].signature)},
    ):
        with pytest.raises(Aborted):
            secagg.verify(bad, KNOWN, CONTEXT)
    with pytest.raises(Aborted):
        secagg.verify(keys, KNOWN, b"another session")


def test_a_point_of_low_order_is_refused_at_the_door() -> None:
    """A client's keys with which no common secret can be made would stop every other client later."""
    whole = Secrets.fresh(0, CONTEXT).public(SIGNERS[0])
    low, none = (bytes(32), b"\x01" + bytes(31)), (bytes(33), b"\x02" + b"\xff" * 32, b"\x04" + bytes(32))
    for bad in [*((seal, whole.mask) for seal in low), *((whole.seal, mask) for mask in none)]:
        for seal, mask in (bad,):
            bare = PublicKeys(seal, mask, whole.sign, b"")
            signed = SIGNERS[0].sign(bare.signed(CONTEXT, 0), ec.ECDSA(hashes.SHA384()))
            with pytest.raises(Aborted, match="no common secret"):
                secagg.verify({0: PublicKeys(seal, mask, whole.sign, signed)}, KNOWN, CONTEXT)


def test_a_threshold_that_is_no_majority_is_refused() -> None:
    """With 2t ≤ n one half could be asked for a client's seed, and the other for its mask secret: the twin is read."""
    everybody = {i: Secrets.fresh(i, CONTEXT) for i in range(4)}
    keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    with pytest.raises(Aborted, match="no majority"):
        dealing.deal(everybody[0], keys, 2)
    vector = vectors([0])[0]
    sent = secagg.masked(everybody[0], keys, keys, vector, BITS)
    secrets = (int.from_bytes(secret, "big") for secret in (everybody[0].seed, everybody[0].mask))
    seed, mask = (sharing.split(secret, 2, keys)[0] for secret in secrets)  # the twin's
    halves = ({i: seed[i] for i in (0, 1)}, {i: mask[i] for i in (2, 3)})
    seeds, masks = (sharing.value_at(half, 0).to_bytes(32, "big") for half in halves)
    read = sent - secagg.prg(seeds, SIZE, BITS)
    for other in (1, 2, 3):
        read = read - secagg._pair_mask(masks, 0, keys[other].mask, other, CONTEXT, SIZE, BITS)
    assert np.array_equal(secagg.wrap(read, BITS), vector)


def test_a_box_opens_for_its_receiver_from_its_sender_in_its_session_only() -> None:
    everybody = {i: Secrets.fresh(i, CONTEXT) for i in range(3)}
    keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    dealt, _ = dealing.deal(everybody[0], keys, 2)
    boxes, points = dealt.boxes, dealing.points_of(keys[0], dealt.commitments, 2)
    assert isinstance(dealing.open_box(everybody[1], 0, boxes[1], points), Shares)
    spoilt = boxes[1][:50] + bytes([boxes[1][50] ^ 1]) + boxes[1][51:]
    for receiver, sender, box in ((2, 0, boxes[1]), (1, 2, boxes[1]), (1, 0, boxes[2]), (1, 0, spoilt)):
        with pytest.raises(Aborted):
            dealing.open_box(everybody[receiver], sender, box, points)
        assert not dealing.is_dealt(
            keys[sender], dealing.keys_seen(CONTEXT, keys), sender, receiver, dealt.commitments, box
        )
    moved = Secrets(1, b"another", everybody[1].seal, everybody[1].mask, everybody[1].seed, everybody[1].sign)
    with pytest.raises(Aborted):
        dealing.open_box(moved, 0, boxes[1], points)
