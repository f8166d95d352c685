"""A server that lies about who dropped out: what it learns without the consistency step, and that with it it does not.

The lie needs no broken key and no colluder: each client is told of as many survivors as it demands, only not the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import deployed
from test_federation_secure_rounds import ddgauss, question, refused, set_of, through_shares

from fedflat.federation import wire
from fedflat.federation.client import Client
from fedflat.federation.secagg import client as secure_client
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg.protocol import Aborted, Collector, PublicKeys, Secrets

SESSION = b"s" * 16
TOLD = {0: {0, 1, 4}, 1: {0, 1, 3}, 2: {0, 1, 2}, 3: {0, 1, 3}, 4: {0, 1, 4}}
"""Client -> the survivors it is told of: three, as it demands, and 2, 3 and 4 each dead for three of five clients."""


class Lying:
    """A server with five real clients that wants the sum of the vectors of 0 and 1 alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, self.clients = deployed(folder / "fed", ddgauss(data={"clients": 5}, cohort={"size": 5, "min": 2}))
        self.secret: dict[int, np.ndarray] = {}
        encoded = secure_client._encoded

        def noted(client: Client, broadcast: Any) -> np.ndarray:
            self.secret[client.number] = encoded(client, broadcast)
            return self.secret[client.number]

        monkeypatch.setattr(secure_client, "_encoded", noted)
        dealt: dict[int, Any] = {}
        facts = through_shares(self.clients, dealt=dealt)
        self.keys = {i: secure_client._keys(c.store.session())[i] for i, c in enumerate(self.clients)}
        mechanism = self.clients[0].job.parts.mechanism.mechanism  # type: ignore[attr-defined]
        context = secure_client.context_of(self.clients[0].task.pin, 0, SESSION)
        self.collector = Collector(context, mechanism.padded, mechanism.bits, 3, keys=self.keys, shared=set(range(5)))
        for i, found in dealt.items():
            self.collector.points[i] = dealing.points_of(self.keys[i], found["commitments"], 3)
        for client in self.clients:
            vector = client.answer(question(client, dealing.VECTOR, facts=facts[client.number]))
            if client.number in (0, 1):
                self.collector.add(client.number, wire.read_answer(vector, mechanism.padded, "int64").update)

    def consents(self, told: Mapping[int, set[int]]) -> dict[int, bytes]:
        """Every client's signature of what it is told."""
        signed = {}
        for client in self.clients:
            content = question(client, dealing.CONSENT, facts={"survivors": set_of(told[client.number])})
            signed[client.number] = client.answer(content)["facts"]["signature"]
        return signed

    def reveal(self, client: int, signatures: Mapping[int, bytes]) -> None:
        """One client's shares, whatever they are of."""
        facts = {"signatures": wire.write_map(signatures)}
        reply = self.clients[client].answer(question(self.clients[client], dealing.REVEAL, facts=facts))["facts"]
        for name, store in (("seeds", self.collector.seeds), ("masks", self.collector.masks)):
            for other, share in dealing.read_numbers(reply[name]).items():
                store.setdefault(other, {})[client] = share


def test_a_lying_server_unmasks_one_client_without_the_consistency_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin without the check: a sum of two where each client was promised three; with client 1's help, one."""
    server = Lying(tmp_path, monkeypatch)
    signatures = server.consents(TOLD)
    monkeypatch.setattr(dealing, "require_consent", lambda *given: None)
    for client in range(5):
        server.reveal(client, {client: signatures[client]})
    learned = server.collector.result()
    mask = (1 << server.collector.bits) - 1
    assert np.array_equal(learned, (server.secret[0] + server.secret[1]) & mask)
    assert np.array_equal((learned - server.secret[1]) & mask, server.secret[0] & mask)  # 1 colludes: an update of 0


def test_with_the_consistency_step_no_client_reveals_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Lying(tmp_path, monkeypatch)
    signatures = server.consents(TOLD)
    for client in range(5):
        agreeing = {i: signatures[i] for i in signatures if TOLD[i] == TOLD[client]}
        assert len(agreeing) < 3
        padded = {i: signatures[i] for i in TOLD[client]}  # the survivors' own signatures, of other lies
        beyond = {**agreeing, **{i: signatures[i] for i in set(range(5)) - TOLD[client]}}
        for given, why in ((agreeing, "too few"), (padded, "told different things"), (beyond, "too few clients agree")):
            facts = {"signatures": wire.write_map(given)}
            refused(server.clients[client], question(server.clients[client], dealing.REVEAL, facts=facts), why)
    assert not server.collector.seeds and not server.collector.masks
    with pytest.raises(Aborted):
        server.collector.result()


def test_an_honest_server_gets_the_sum_from_the_same_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Lying(tmp_path, monkeypatch)
    for client in server.clients:  # two are too few for anybody
        refused(client, question(client, dealing.CONSENT, facts={"survivors": set_of({0, 1})}), "cannot be")
    signatures = server.consents({i: set(range(5)) for i in range(5)})
    for client in range(5):
        server.reveal(client, signatures)
    assert set(server.collector.seeds) == set(range(5)) and not server.collector.masks


def session(clients: int = 5) -> tuple[dict[int, Secrets], dict[int, PublicKeys]]:
    from test_federation_secagg import SIGNERS

    everybody = {i: Secrets.fresh(i, b"here") for i in range(clients)}
    return everybody, {i: own.public(SIGNERS[i]) for i, own in everybody.items()}


def test_a_signature_is_of_one_client_and_one_transcript() -> None:
    everybody, keys = session()
    told: tuple[Any, ...] = (b"here", keys, {0, 1, 2, 3}, {0, 1, 2})
    seen = dealing.transcript(*told)
    signature = dealing.signed(everybody[0], dealing.CONSENT, seen)
    assert dealing.is_signed(0, keys[0], signature, dealing.CONSENT, seen)
    assert not dealing.is_signed(1, keys[1], signature, dealing.CONSENT, seen)
    assert not dealing.is_signed(1, keys[0], signature, dealing.CONSENT, seen)  # who claims another's key
    _, others = session()
    for place, other in ((0, b"there"), (1, {**keys, 4: others[4]}), (1, {i: keys[i] for i in range(4)}),
                         (2, {0, 1, 2}), (3, {0, 1, 3}), (3, {0, 1, 2, 3})):  # fmt: skip
        lie: list[Any] = [*told[:place], other, *told[place + 1 :]]
        assert not dealing.is_signed(0, keys[0], signature, dealing.CONSENT, dealing.transcript(*lie))


def test_sets_cannot_be_moved_into_each_other() -> None:
    """{0} then {1} is not {0, 1} then nothing: each part is counted."""
    _, keys = session()
    assert dealing.transcript(b"", keys, {0}, {1}) != dealing.transcript(b"", keys, {0, 1}, set())


def test_the_smallest_threshold_against_lies() -> None:
    """f colluders sign both views and the honest split as evenly as they can: t signatures twice are impossible from
    enough_for_lies on, and possible just below."""
    for clients in range(1, 30):
        for colluders in range(clients):
            assert dealing.enough_for_lies(clients, colluders) == (colluders + (clients - colluders) // 2) + 1
