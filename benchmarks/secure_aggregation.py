"""What secure aggregation costs each party of one round: seconds of processor time and bytes, by step.

    python benchmarks/secure_aggregation.py [COUNTS…]

All clients of a cohort in one process, nobody missing, no transport, vectors of 16,384 whole numbers modulo 2^16 (the
masks' time grows with that, the rest does not). ``false`` is the server's extra time if one client gives false shares.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedflat.federation import wire
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.protocol import Collector, Secrets

SIZE, BITS, CONTEXT = 1 << 14, 16, b"benchmark".ljust(32)


class Clock:
    """Seconds by step, added up."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.last = time.process_time()

    def __call__(self, step: str | None) -> None:
        now = time.process_time()
        if step is not None:
            self.seconds[step] += now - self.last
        self.last = now


def measure(clients: int) -> str:
    """One round of so many clients, in one line."""
    signers = {i: ec.generate_private_key(ec.SECP384R1()) for i in range(clients)}
    known = {i: key.public_key() for i, key in signers.items()}
    threshold = dealing.enough_for_lies(clients, 0)
    own, server = {i: Secrets.fresh(i, CONTEXT) for i in signers}, Collector(CONTEXT, SIZE, BITS, threshold)
    client, at_server = Clock(), Clock()
    server.keys = {i: secret.public(signers[i]) for i, secret in own.items()}
    client("keys")
    secagg.verify(server.keys, known, CONTEXT)
    client("check others' keys")
    for _ in range(clients - 1):
        secagg.verify(server.keys, known, CONTEXT)
    client("check others' keys")
    seen = dealing.keys_seen(CONTEXT, server.keys)
    deals, held = {}, {}
    client(None)
    for i, secret in own.items():
        deals[i], kept = dealing.deal(secret, server.keys, threshold)
        held[i] = {i: kept}
    client("deal")
    at_server(None)
    for i, deal in deals.items():
        server.points[i] = dealing.points_of(server.keys[i], deal.commitments, threshold)
        assert all(dealing.is_dealt(server.keys[i], seen, i, j, deal.commitments, b) for j, b in deal.boxes.items())
    at_server("check deals")
    client(None)
    for i, secret in own.items():
        for j, deal in deals.items():
            if i != j:
                assert dealing.is_dealt(server.keys[j], seen, j, i, deal.commitments, deal.boxes[i])
                points = dealing.points_of(server.keys[j], deal.commitments, threshold)
                held[i][j] = dealing.open_box(secret, j, deal.boxes[i], points)
    client("check shares")
    server.shared = set(own)
    vector = np.zeros(SIZE, dtype=np.int64)
    for i, secret in own.items():
        server.add(i, secagg.masked(secret, server.keys, own, vector, BITS))
    client("mask")
    for i in own:
        assert server.take_shares(i, *secagg.reveal(held[i], server.survivors, server.shared))
    at_server(None)
    assert not server.result().any()
    at_server("sum")
    for shares in server.seeds.values():
        shares[0] += 1
    server.result()
    at_server("false")
    assert server.false == {0}
    up = len(deals[0].commitments) + len(wire.write_map(deals[0].boxes))
    down = len(wire.write_map({j: deal.boxes[0] for j, deal in deals.items() if j}))
    down += len(wire.write_map({j: deal.commitments for j, deal in deals.items() if j}))
    each = ", ".join(f"{step} {1000 * seconds / clients:.0f}" for step, seconds in client.seconds.items())
    whole = ", ".join(f"{step} {seconds:.2f}" for step, seconds in at_server.seconds.items())
    return (
        f"n = {clients}, t = {threshold}: each client {sum(client.seconds.values()) / clients:.3f} s (ms: {each}); "
        f"deal {up:,} bytes up, {down:,} down; server s: {whole}"
    )


if __name__ == "__main__":
    for count in [int(text) for text in sys.argv[1:]] or [10, 50]:
        print(measure(count))
