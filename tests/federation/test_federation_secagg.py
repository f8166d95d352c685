"""Secure aggregation against its own steps: sums, dropouts at every stage, what the server cannot see, refusals."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedflat.federation import secagg
from fedflat.federation.secagg import Aborted, Collector, PublicKeys, Secrets, Shares

BITS, SIZE = 16, 300
SIGNERS = {i: ec.generate_private_key(ec.SECP384R1()) for i in range(7)}
KNOWN = {i: key.public_key() for i, key in SIGNERS.items()}
CONTEXT = b"round 3, session x"


def vectors(clients: Iterable[int]) -> dict[int, np.ndarray]:
    drawn = np.random.Generator(np.random.Philox(7))
    return {i: drawn.integers(0, 1 << BITS, SIZE) for i in clients}


def run(
    threshold: int,
    *,
    clients: int = 7,
    no_shares: Iterable[int] = (),
    no_vector: Iterable[int] = (),
    no_reveal: Iterable[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """The whole protocol with clients dropping out before a step; (result, sum of the vectors that were sent)."""
    inputs = vectors(range(clients))
    everybody = {i: Secrets.fresh(i, CONTEXT) for i in range(clients)}
    server = Collector(CONTEXT, SIZE, BITS, threshold)
    server.keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    server.enough(set(server.keys))
    secagg.verify(server.keys, KNOWN, CONTEXT)
    boxes, held = {}, {}
    for i, own in everybody.items():
        if i not in no_shares:
            boxes[i], kept = secagg.seal_shares(own, server.keys, threshold)
            held[i] = {i: kept}
    server.shared = set(boxes)
    server.enough(server.shared)
    for i in server.shared - set(no_vector):
        for j in server.shared - {i}:
            held[i][j] = secagg.open_box(everybody[i], server.keys, j, boxes[j][i])
        server.add(i, secagg.masked(everybody[i], server.keys, server.shared, inputs[i], BITS))
    server.enough(server.survivors)
    for i in server.survivors - set(no_reveal):
        assert server.take_shares(i, *secagg.reveal(held[i], server.survivors, server.shared, threshold))
    expected = sum((inputs[i] for i in server.survivors), np.zeros(SIZE, dtype=np.int64))
    return server.result(), secagg.wrap(expected, BITS)


@pytest.mark.parametrize(
    "gone",
    [
        {},
        {"no_shares": (0,)},
        {"no_vector": (6,)},
        {"no_vector": (0, 3)},
        {"no_reveal": (2, 5)},
        {"no_shares": (1,), "no_vector": (2,), "no_reveal": (3,)},
    ],
)
def test_the_sum_of_those_who_sent_whoever_drops_out_when(gone: dict[str, tuple[int, ...]]) -> None:
    found, expected = run(4, **gone)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "gone", [{"no_shares": (0, 1, 2, 3)}, {"no_vector": (0, 1, 2, 3)}, {"no_reveal": (0, 1, 2, 3)}]
)
def test_fewer_than_the_threshold_is_no_result(gone: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(Aborted, match="too few"):
        run(4, **gone)


def test_two_clients() -> None:
    found, expected = run(2, clients=2)
    assert np.array_equal(found, expected)


def test_shamir_any_threshold_of_shares_and_no_fewer() -> None:
    secret = bytes(range(32))
    shares = secagg.split(secret, 3, range(6))
    for chosen in ((0, 1, 2), (5, 3, 1), (0, 2, 4, 5)):
        assert secagg.combine({i: shares[i] for i in chosen}) == secret
    tries = []
    for _ in range(20):
        fresh = secagg.split(secret, 3, range(6))
        try:
            tries.append(secagg.combine({i: fresh[i] for i in (0, 1)}))
        except Aborted:
            continue
    assert secret not in tries
    assert secagg.combine(secagg.split(b"\xff" * 32, 1, [4])) == b"\xff" * 32


def test_a_masked_vector_looks_the_same_whatever_the_input() -> None:
    """With fresh secrets, what the server gets for zeros and for ones is uniform: chi-square over 16 bins."""
    from scipy.stats import chi2

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
    twin = secagg.wrap(sent - secagg.prg(own.seed, SIZE, BITS), BITS)
    assert np.array_equal(secagg.wrap(twin - pair, BITS), vector)


def test_no_client_gives_both_shares_of_another() -> None:
    held = {i: Shares(i, 10 + i) for i in range(5)}
    seeds, masks = secagg.reveal(held, {0, 1, 2}, {0, 1, 2, 3, 4}, 3)
    assert seeds == {0: 0, 1: 1, 2: 2} and masks == {3: 13, 4: 14}
    for survivors, shared in (({0, 1}, {0, 1, 2, 3, 4}), ({0, 1, 9}, {0, 1, 2}), ({0, 1, 2}, {0, 1, 2, 9})):
        with pytest.raises(Aborted):
            secagg.reveal(held, survivors, shared, 3)


def test_keys_must_carry_their_clients_signature_for_this_session() -> None:
    keys = {i: Secrets.fresh(i, CONTEXT).public(SIGNERS[i]) for i in range(3)}
    secagg.verify(keys, KNOWN, CONTEXT)
    servers_own = Secrets.fresh(1, CONTEXT).public(SIGNERS[0])
    for bad in (
        {**keys, 1: servers_own},
        {**keys, 1: keys[0]},
        {**keys, 9: keys[0]},
        {**keys, 1: PublicKeys(keys[1].seal, keys[2].mask, keys[1].signature)},
    ):
        with pytest.raises(Aborted):
            secagg.verify(bad, KNOWN, CONTEXT)
    with pytest.raises(Aborted):
        secagg.verify(keys, KNOWN, b"another session")


def test_a_box_opens_for_its_receiver_from_its_sender_in_its_session_only() -> None:
    everybody = {i: Secrets.fresh(i, CONTEXT) for i in range(3)}
    keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    boxes, _ = secagg.seal_shares(everybody[0], keys, 2)
    assert isinstance(secagg.open_box(everybody[1], keys, 0, boxes[1]), Shares)
    for receiver, sender, box in ((2, 0, boxes[1]), (1, 2, boxes[1]), (1, 0, boxes[2]), (1, 0, boxes[1][:-1] + b"x")):
        with pytest.raises(Aborted):
            secagg.open_box(everybody[receiver], keys, sender, box)
    moved = Secrets(1, b"another", everybody[1].seal, everybody[1].mask, everybody[1].seed)
    with pytest.raises(Aborted):
        secagg.open_box(moved, keys, 0, boxes[1])


def test_false_shares_give_no_result_or_a_wrong_one_but_no_input() -> None:
    server = Collector(CONTEXT, SIZE, BITS, 2)
    everybody = {i: Secrets.fresh(i, CONTEXT) for i in range(3)}
    server.keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    server.shared = {0, 1, 2}
    for i in (0, 1):
        server.add(i, secagg.masked(everybody[i], server.keys, server.keys, vectors([i])[i], BITS))
    assert not server.take_shares(0, {0: 1}, {2: 1})
    for holder in (0, 1):
        assert server.take_shares(holder, {0: 1, 1: 2}, {2: 5})
    with pytest.raises(Aborted, match="another secret"):
        server.result()
