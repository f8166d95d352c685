"""Clients that lie in a secure aggregation: each is named, nobody else is, and the others' sum comes out.

The twins are the code without the verification: a false share gives a random sum, and one bad box ends every round.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Message
from stand_in import Grid, Handler, deployed, grid_of, honest, rows, settings
from test_federation_secure_rounds import STEPS, ddgauss, for_check, keys_shown, question, refused, set_of, silent_from

from fedflat.core.checks import InputError, RunError, insist
from fedflat.core.params import PersonalState
from fedflat.core.types import Broadcast
from fedflat.federation import wire
from fedflat.federation.client import Client
from fedflat.federation.replies import Culprits
from fedflat.federation.secagg import client as secure_client
from fedflat.federation.secagg import dealing, sharing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.dealing import Deal
from fedflat.federation.secagg.protocol import Aborted, Secrets
from fedflat.federation.secagg.rounds import ClientsSum, SecureFlower
from fedflat.federation.server import Settings, serve
from fedflat.federation.supernode import taking_over
from fedflat.federation.task import Task

N, LIAR = 5, 1


RECIPE = ddgauss(rounds=9, data={"clients": N}, cohort={"size": N, "min": 2})
"""Five clients; three are needed at every step."""


@pytest.fixture(autouse=True)
def known_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' training is replaced by vectors that the test knows."""

    def encoded(client: Client, broadcast: Broadcast) -> np.ndarray:
        return vector_of(client.number, client.job.parts.mechanism.mechanism.padded)  # type: ignore[attr-defined]

    monkeypatch.setattr(secure_client, "_encoded", encoded)


def vector_of(client: int, size: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(client)).integers(-50, 50, size)


@dataclass
class Federation:
    """One server and its clients, with nothing on their disks yet."""

    folder: Path
    task: Task
    clients: list[Client]
    grid: Grid
    server: SecureFlower
    refusals: list[Counter[str]] = field(default_factory=list)
    sums: list[ClientsSum] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Self:
        task, clients = deployed(folder / "fed", RECIPE)
        grid, parts = grid_of(task, clients), clients[0].job.parts
        refusals: list[Counter[str]] = []
        server = SecureFlower(
            grid, task.roster, task.pin, parts.layout.dimension, 0.05, lambda round, found: refusals.append(found),
            Culprits(folder / "run.excluded.jsonl"), poll=0.01, plan=parts.plan,
            mechanism=parts.mechanism.mechanism,  # type: ignore[attr-defined]
        )  # fmt: skip
        return cls(folder, task, clients, grid, server, refusals)

    def round(self, number: int = 0, cohort: range | list[int] = range(N)) -> ClientsSum:
        """One round's sum; its count is 0 if it was aborted."""
        job = self.clients[0].job
        found = ClientsSum(job.parts.layout.dimension, np.zeros(1, dtype=np.int64))
        broadcast = Broadcast(number, job.initial_weights, job.threshold, 1.0)
        kept = PersonalState(job.initial_weights[:0])
        for part in self.server.train(np.array(list(cohort)), broadcast, kept, lambda block: block):
            part.add_to(found)  # type: ignore[arg-type]
        self.sums.append(found)
        return found

    def lie(self, client: int, stage: str, change: Callable[[Any, Any], Any]) -> None:
        self.grid.handlers[client] = instead(self.clients[client], stage, change)

    def named(self) -> dict[int, str]:
        """Everybody whom the durable record names, and why."""
        path = self.server.culprits.path  # type: ignore[union-attr]
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(i): why for line in lines for i, why in json.loads(line)["excluded"].items()}

    def secrets(self) -> list[int]:
        """Clients with anything of a session on their disks."""
        return [c.number for c in self.clients if any(c.store.folder.glob("session*"))]


def is_sum_of(found: ClientsSum, clients: list[int], bits: int = 16) -> bool:
    wanted = sum(vector_of(i, found.total.size) for i in clients)
    return found.count == len(clients) and np.array_equal(found.total, secagg.wrap(np.asarray(wanted), bits))


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.of(tmp_path)


def instead(client: Client, stage: str, change: Callable[[Any, Any], Any]) -> Handler:
    """A client that changes its honest answer to one step. change: message, content of the answer -> content."""

    def handle(message: Any) -> Any:
        reply = honest(client)(message)
        if message.content["facts"].get("stage") != stage:
            return reply
        return Message(change(message, reply.content), reply_to=message)

    return handle


def twice(handler: Handler, stage: str) -> Handler:
    """A client that sends its answer to one step twice."""

    def handle(message: Any) -> Any:
        reply = handler(message)
        return [reply, reply] if message.content["facts"].get("stage") == stage else reply

    return handle


def with_facts(**facts: Any) -> Callable[[Any, Any], Any]:
    """The answer with other facts."""

    def change(message: Any, content: Any) -> Any:
        for name, value in facts.items():
            content["facts"][name] = value(content["facts"][name]) if callable(value) else value
        return content

    return change


def other_vector(array: np.ndarray) -> Callable[[Any, Any], Any]:
    def change(message: Any, content: Any) -> Any:
        return wire.write_answer(wire.Answer(content["facts"]["round"], content["facts"]["nonce"], array))

    return change


def other_shares(data: bytes) -> bytes:
    """Every share of a map, one more than it should be."""
    return dealing.write_numbers({i: share + 1 for i, share in dealing.read_numbers(data).items()})


def other_complaints(federation: Federation, dealers: list[int]) -> Callable[[bytes], bytes]:
    """Well signed complaints of the liar about clients that dealt it true shares."""

    def change(data: bytes) -> bytes:
        liar = federation.clients[LIAR]
        return wire.write_map({dealer: complaint_of(liar, dealer) for dealer in dealers})

    return change


def complaint_of(client: Client, dealer: int, **changes: Any) -> bytes:
    """A client's complaint, whether it has a reason or not."""
    state = client.store.session()
    own = replace(secure_client._secrets(client, state), **changes)
    return dealing.signed(own, dealing.COMPLAINT, dealing.keys_seen(own.context, secure_client._keys(state)), dealer)


def deal_falsely(kind: str, victims: list[int]) -> Callable[..., Any]:
    """``dealing.deal`` of a client that signs boxes with no true shares in them for some receivers."""

    def deal(own: Secrets, keys: Any, threshold: int) -> Any:
        whole, kept = TRUE_DEAL(own, keys, threshold)
        boxes = dict(whole.boxes)
        for victim in victims:
            once = dealing.key_of_box(own, victim)
            public = X25519PrivateKey.from_private_bytes(once).public_key().public_bytes_raw()
            cipher = dealing._cipher(once, keys[victim].seal, own.context, own.client, victim)
            text = b"".join(sharing.fresh_scalar().to_bytes(32, "big") for _ in range(2))
            sealed = cipher.encrypt(bytes(12), bytes(64) if kind == "zero share" else text, public)
            if kind == "closed box":
                sealed = bytes(80)
            if kind == "low order":
                public = bytes(32)
            seen, box = dealing.keys_seen(own.context, keys), public + sealed
            boxes[victim] = box + dealing.signed(own, dealing.DEAL, seen, victim, whole.commitments, box)
        return Deal(whole.commitments, boxes), kept

    return deal


TRUE_DEAL, TRUE_SIGNED = dealing.deal, dealing.signed


def false_dealer(client: Client, kind: str, victims: list[int]) -> Handler:
    def handle(message: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dealing, "deal", deal_falsely(kind, victims))
            return honest(client)(message)

    return handle


LIES: dict[str, tuple[str, Callable[[Any, Any], Any], str, bool]] = {
    # what -> step, lie, what it is called, whether the liar's own vector is in the sum all the same
    "no keys": (dealing.KEYS, with_facts(keys=b""), "form", False),
    "keys of another": (dealing.KEYS, with_facts(keys=wire.write_map({2: b"x" * 100})), "form", False),
    "cut keys": (dealing.KEYS, with_facts(keys=lambda data: data[:-1]), "form", False),
    "unsigned keys": (dealing.KEYS, with_facts(keys=lambda data: data[:-9] + bytes(9)), "form", False),
    "no boxes": (dealing.SHARES, with_facts(boxes=b""), "form", False),
    "cut boxes": (dealing.SHARES, with_facts(boxes=b"x" * 30), "form", False),
    "unsigned boxes": (dealing.SHARES, with_facts(boxes=lambda data: data[:-9] + bytes(9)), "false signature", False),
    "no commitments": (dealing.SHARES, with_facts(commitments=b""), "false signature", False),
    "complaints of another form": (dealing.CHECK, with_facts(complaints=b"x"), "form", False),
    "a complaint about nobody": (dealing.CHECK, with_facts(complaints=wire.write_map({9: bytes(64)})), "form", False),
    "an unsigned complaint": (
        dealing.CHECK, with_facts(complaints=wire.write_map({2: bytes(64)})), "false signature", False),
    "a float vector": (dealing.VECTOR, other_vector(np.ones(512, np.float32)), "dtype", False),
    "a short vector": (dealing.VECTOR, other_vector(np.ones(3, np.int64)), "shape", False),
    "no consent": (dealing.CONSENT, with_facts(signature=b""), "false signature", True),
    "a false consent": (dealing.CONSENT, with_facts(signature=bytes(64)), "false signature", True),
    "no shares": (dealing.REVEAL, with_facts(seeds=b""), "form", True),
    "huge shares": (dealing.REVEAL, with_facts(seeds=lambda data: data[:-32] + b"\xff" * 32),
                    "false share", True),
    "false seed shares": (dealing.REVEAL, with_facts(seeds=other_shares), "false share", True),
}  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_a_liar_is_named_and_the_others_sum_comes_out(what: str, federation: Federation) -> None:
    stage, lie, why, counted = LIES[what]
    federation.lie(LIAR, stage, lie)
    assert is_sum_of(federation.round(), [i for i in range(N) if counted or i != LIAR])
    assert federation.named() == {LIAR: why}
    assert federation.secrets() == []


@pytest.mark.parametrize("victims", [[0], [0, 2, 3], [0, 2, 3, 4]])
@pytest.mark.parametrize("kind", ["false share", "zero share", "closed box", "low order"])
def test_a_false_dealer_is_named_by_receivers_complaints(kind: str, victims: list[int], federation: Federation) -> None:
    federation.grid.handlers[LIAR] = false_dealer(federation.clients[LIAR], kind, victims)
    assert is_sum_of(federation.round(), [0, 2, 3, 4])
    assert federation.named() == {LIAR: "false deal"}


@pytest.mark.parametrize("dealers", [[0], [0, 2, 3, 4]])
def test_a_false_complaint_is_seen_through(dealers: list[int], federation: Federation) -> None:
    """The accused show what they dealt to the liar, and stay."""
    federation.lie(LIAR, dealing.CHECK, with_facts(complaints=other_complaints(federation, dealers)))
    assert is_sum_of(federation.round(), [0, 2, 3, 4])
    assert federation.named() == {LIAR: "false complaint"}


def test_false_dealers_that_complain_about_honest_ones(federation: Federation) -> None:
    """Two in league, a lie in each direction: both are named, and nobody else."""
    federation.lie(LIAR, dealing.CHECK, with_facts(complaints=other_complaints(federation, [0, 2])))
    federation.grid.handlers[4] = false_dealer(federation.clients[4], "closed box", [0, 1])
    assert is_sum_of(federation.round(), [0, 2, 3])
    assert federation.named() == {LIAR: "false complaint", 4: "false deal"}


@pytest.mark.parametrize("answer", ["silent", "other", "random"])
def test_an_accused_dealer_that_does_not_clear_itself_is_out(answer: str, federation: Federation) -> None:
    """Out for its silence, but not blamed: its line may be dead; blamed for a key that is not the box's."""
    dealer = false_dealer(federation.clients[LIAR], "false share", [0])
    lies = {"other": with_facts(keys=b""), "random": with_facts(keys=wire.write_map({0: b"k" * 32}))}

    def handle(message: Any) -> Any:
        if message.content["facts"].get("stage") != dealing.ANSWER:
            return dealer(message)
        if answer == "silent":
            return None
        return instead(federation.clients[LIAR], dealing.ANSWER, lies[answer])(message)

    federation.grid.handlers[LIAR] = handle
    assert is_sum_of(federation.round(), [0, 2, 3, 4])
    assert federation.named() == {"silent": {}, "other": {LIAR: "form"}, "random": {LIAR: "false deal"}}[answer]


@pytest.mark.parametrize("holder", [0, 3])
def test_a_false_share_of_a_mask_secret_names_its_holder(holder: int, federation: Federation) -> None:
    """Client 4 drops out before its vector; one of the others gives a false share of its mask secret."""
    federation.grid.handlers[4] = silent_from(federation.clients[4], dealing.VECTOR)
    federation.lie(holder, dealing.REVEAL, with_facts(masks=other_shares))
    assert is_sum_of(federation.round(), [0, 1, 2, 3])
    assert federation.named() == {holder: "false share"}


def test_two_false_holders_in_league_cannot_frame_a_third(federation: Federation) -> None:
    """Two errors that cancel at 0: the secret is right, the polynomial is not; the two are named, nobody else is."""
    errors = {0: 1, 1: 0}
    weights = sharing._weights((0, 1, 2), 0)
    errors[1] = -weights[0] * pow(weights[1], -1, sharing.ORDER)

    def shifted(by: int) -> Callable[[bytes], bytes]:
        return lambda data: dealing.write_numbers(
            {i: (share + by) % sharing.ORDER for i, share in dealing.read_numbers(data).items()}
        )

    for liar, by in errors.items():
        federation.lie(liar, dealing.REVEAL, with_facts(seeds=shifted(by)))
    assert is_sum_of(federation.round(), [0, 1, 2, 3, 4])
    assert federation.named() == {0: "false share", 1: "false share"}


@pytest.mark.parametrize(("seeds", "why"), [(other_shares, "false share"), (b"", "form")])
def test_too_many_false_shares_are_no_sum_and_name_all_of_them(seeds: Any, why: str, federation: Federation) -> None:
    for liar in (0, 1, 2):
        federation.lie(liar, dealing.REVEAL, with_facts(seeds=seeds))
    assert federation.round().count == 0
    assert federation.named() == dict.fromkeys((0, 1, 2), why)


GONE: dict[str, dict[int, str]] = {
    **{f"one before {stage}": {LIAR: stage} for stage in STEPS},
    "two before their vectors": {0: dealing.VECTOR, 3: dealing.VECTOR},
    "two before they sign": {0: dealing.CONSENT, 4: dealing.CONSENT},
    "two before they reveal": {2: dealing.REVEAL, 4: dealing.REVEAL},
    "two at different steps": {2: dealing.VECTOR, 3: dealing.REVEAL},
    "two in turn": {1: dealing.SHARES, 2: dealing.CONSENT},
}


@pytest.mark.parametrize("when", GONE)
def test_silence_is_nobodys_fault(when: str, federation: Federation) -> None:
    gone = GONE[when]
    for client, stage in gone.items():
        federation.grid.handlers[client] = silent_from(federation.clients[client], stage)
    there = [i for i in range(N) if gone.get(i, dealing.REVEAL) in (dealing.CONSENT, dealing.REVEAL)]
    assert is_sum_of(federation.round(), there)
    assert federation.refusals == [Counter({"missing": len(gone)})]
    assert federation.named() == {} and federation.secrets() == []


@pytest.mark.parametrize("stage", STEPS)
def test_fewer_than_the_threshold_is_no_sum(stage: str, federation: Federation) -> None:
    for client in (0, 1, 2):
        federation.grid.handlers[client] = silent_from(federation.clients[client], stage)
    few = stage != dealing.KEYS  # two that are alone from the start are a small cohort, with a threshold of its own
    assert federation.round().count == (0 if few else 2)
    assert federation.named() == {} and federation.secrets() == []


def test_two_clients(federation: Federation) -> None:
    assert is_sum_of(federation.round(cohort=[0, 1]), [0, 1])


@pytest.mark.parametrize("stage", STEPS)
def test_a_second_answer_is_refused_and_the_first_counts(
    stage: str, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    federation.grid.handlers[LIAR] = twice(honest(federation.clients[LIAR]), stage)
    with caplog.at_level(logging.WARNING):
        assert is_sum_of(federation.round(), list(range(N)))
    assert federation.refusals[0]["duplicate"] == 1 and federation.named() == {} and "client" not in caplog.text


@pytest.mark.parametrize("stage", STEPS)
def test_an_answer_of_an_earlier_round_is_refused_and_its_sender_named(stage: str, federation: Federation) -> None:
    kept: list[Any] = []

    def replaying(message: Any) -> Any:
        reply = honest(federation.clients[LIAR])(message)
        if message.content["facts"].get("stage") != stage:
            return reply
        kept.append(reply.content)
        return Message(kept[0], reply_to=message)

    federation.grid.handlers[LIAR] = replaying
    federation.round(0)
    assert federation.named() == {}
    there = [i for i in range(N) if i != LIAR or stage in (dealing.CONSENT, dealing.REVEAL)]
    assert is_sum_of(federation.round(1), there)
    assert federation.named() == {LIAR: "late"}
    kept[0]["facts"]["round"] = 2
    assert is_sum_of(federation.round(2), there)
    assert federation.named() == {LIAR: "replayed"}


def test_two_clients_with_one_key_spoil_nothing(federation: Federation) -> None:
    """In league, so each knows the secret: what is made with a key is bound to its client's number too."""
    shown: list[Secrets] = []
    fresh = Secrets.fresh

    def shared(client: int, context: bytes) -> Secrets:
        own = fresh(client, context)
        if client in (1, 2):
            shown.append(own)
            return replace(own, mask=shown[0].mask, sign=shown[0].sign, seal=shown[0].seal)
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Secrets, "fresh", shared)
        assert is_sum_of(federation.round(), list(range(N)))
    assert federation.named() == {}


def test_a_second_answer_does_not_hide_that_the_first_was_a_lie(federation: Federation) -> None:
    lie = instead(federation.clients[LIAR], dealing.VECTOR, other_vector(np.ones(3, np.int64)))

    federation.grid.handlers[LIAR] = twice(lie, dealing.VECTOR)
    assert is_sum_of(federation.round(), [0, 2, 3, 4])
    assert federation.named() == {LIAR: "shape"}


# The twins: what the verification is for.


@pytest.mark.parametrize("lie", ["share", "deal"])
def test_without_verification_a_lie_releases_a_random_sum(
    lie: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "is_share", lambda points, holder, share: True)
    if lie == "share":
        federation.lie(LIAR, dealing.REVEAL, with_facts(seeds=other_shares))
    else:
        federation.grid.handlers[LIAR] = false_dealer(federation.clients[LIAR], "false share", [0, 2, 3, 4])
    found = federation.round()
    assert found.count == N and not is_sum_of(found, list(range(N))) and federation.named() == {}
    centred = ((found.total + (1 << 15)) & 0xFFFF) - (1 << 15)
    assert np.abs(centred).mean() == pytest.approx(1 << 14, rel=0.15)  # uniform; the true sum is below 250


def test_without_complaints_bad_boxes_end_the_round_and_nobody_is_named(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(own: Secrets, kind: str, *told: Any) -> bytes:
        insist(kind != dealing.COMPLAINT, Aborted("a box that does not open"))
        return TRUE_SIGNED(own, kind, *told)

    monkeypatch.setattr(dealing, "signed", none)
    federation.grid.handlers[LIAR] = false_dealer(federation.clients[LIAR], "closed box", [0, 2, 3, 4])
    assert federation.round().count == 0 and federation.named() == {}


def test_a_mask_that_is_not_bound_to_its_pair_is_cancelled_by_the_negative_of_anothers_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A colluder that shows a client's mask key with the other sign has the same common secrets with everybody."""
    from test_federation_secagg import BITS, CONTEXT, SIGNERS, SIZE, vectors

    everybody = {i: Secrets.fresh(i, CONTEXT) for i in (0, 2)}
    keys = {i: own.public(SIGNERS[i]) for i, own in everybody.items()}
    keys[1] = replace(keys[0], mask=bytes([keys[0].mask[0] ^ 1]) + keys[0].mask[1:])
    lone = replace(everybody[2], client=1)  # stands between 0 and the colluder, which is 2 here
    keys = {0: keys[0], 1: keys[2], 2: keys[1]}
    vector = vectors([1])[1]

    def left() -> np.ndarray:
        return secagg.wrap(secagg.masked(lone, keys, keys, vector, BITS) - secagg.prg(lone.seed, SIZE, BITS), BITS)

    assert not np.array_equal(left(), vector)
    derived = secagg.derived
    unbound = lambda common, purpose: derived(common, purpose[: len(b"mask" + CONTEXT)])  # noqa: E731
    monkeypatch.setattr(secagg, "derived", unbound)
    assert np.array_equal(left(), vector)  # the twin: its two masks cancel


# An active server: what the complaints let it do.


def dealt(federation: Federation) -> dict[int, Any]:
    """All clients after they dealt."""
    held = {"keys": dealing.write_keys(keys_shown(federation.clients))}
    return {c.number: c.answer(question(c, dealing.SHARES, facts=held))["facts"] for c in federation.clients}


def test_a_box_that_the_server_spoils_is_no_complaint(federation: Federation) -> None:
    """Nor is one with other commitments, nor another's box: the client stops, and no dealer has to show anything."""
    given = dealt(federation)
    one, sent = federation.clients[0], for_check(given, 0)
    boxes, told = wire.read_map(sent["boxes"]), wire.read_map(sent["commitments"])
    spoilt = [
        ({**boxes, 2: bytes(32) + boxes[2][32:]}, told),
        ({**boxes, 2: boxes[2][:-1] + bytes([boxes[2][-1] ^ 1])}, told), ({**boxes, 2: boxes[3]}, told),
        ({**boxes, 2: wire.read_map(given[2]["boxes"])[1]}, told), (boxes, {**told, 2: told[3]}),
    ]  # fmt: skip
    for some, points in spoilt:
        facts = {"boxes": wire.write_map(some), "commitments": wire.write_map(points)}
        refused(one, question(one, dealing.CHECK, facts=facts), "did not sign")
    for some, points in ((boxes, {}), ({**boxes, 9: boxes[1]}, {**told, 9: told[1]})):
        facts = {"boxes": wire.write_map(some), "commitments": wire.write_map(points)}
        refused(one, question(one, dealing.CHECK, facts=facts), "boxes that cannot be")
    facts = {"boxes": wire.write_map({1: boxes[1]}), "commitments": wire.write_map({1: told[1]})}
    refused(one, question(one, dealing.CHECK, facts=facts), "too few")


def test_a_dealer_shows_a_key_only_for_a_complaint_that_its_receiver_signed(federation: Federation) -> None:
    given = dealt(federation)
    for client in federation.clients:
        client.answer(question(client, dealing.CHECK, facts=for_check(given, client.number)))
    one, two, three = (federation.clients[i] for i in (0, 2, 3))
    context = secure_client._secrets(one, one.store.session()).context
    forged = {
        "of nobody": {9: bytes(64)}, "its own": {0: complaint_of(one, 0)}, "unsigned": {2: bytes(64)},
        "about another": {2: complaint_of(two, 1)}, "another's": {2: complaint_of(three, 0)},
        "of another session": {2: complaint_of(two, 0, context=b"then")},
    }  # fmt: skip
    for complaints in forged.values():
        refused(one, question(one, dealing.ANSWER, facts={"complaints": wire.write_map(complaints)}), "complaint")
    true = wire.write_map({2: complaint_of(two, 0)})
    shown = wire.read_map(one.answer(question(one, dealing.ANSWER, facts={"complaints": true}))["facts"]["keys"])
    assert set(shown) == {2}
    keys, boxes = secure_client._keys(one.store.session()), wire.read_map(given[0]["boxes"])
    points = dealing.points_of(keys[0], given[0]["commitments"], 3)
    for receiver in (1, 2, 3, 4):  # the key opens its own box only
        cleared = dealing.clears(shown[2], keys[receiver], context, 0, receiver, boxes[receiver], points)
        assert cleared == (receiver == 2)
    with pytest.raises(RunError, match="step answer after step answer"):
        one.answer(question(one, dealing.ANSWER, facts={"complaints": true}))
    for shared in ((1, 2, 3), (0, 1), (0, 1, 9)):
        refused(one, question(one, dealing.VECTOR, facts={"shared": set_of(shared)}), "too few")
    one.answer(question(one, dealing.VECTOR, facts={"shared": set_of(range(N))}))  # the answer is no end


def told_of_different_keys(federation: Federation) -> tuple[Any, bytes]:
    """A lying server: client 0 is told of five keys and deals for three of them, client 2 is told of three and two.

    Returns what 2 answers to 0's box, or the reason why it does not, and the box.
    """
    keys = keys_shown(federation.clients)
    given: dict[int, Any] = {}
    for i, told in ((0, range(5)), (1, range(3)), (2, range(3))):
        facts = {"keys": dealing.write_keys({other: keys[other] for other in told})}
        given[i] = federation.clients[i].answer(question(federation.clients[i], dealing.SHARES, facts=facts))["facts"]
    two = federation.clients[2]
    try:
        reply = two.answer(question(two, dealing.CHECK, facts=for_check(given, 2)))["facts"]["complaints"]
    except RunError as error:
        reply = str(error)
    return reply, wire.read_map(given[0]["boxes"])[2]


def test_nobody_complains_about_a_deal_for_other_keys(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deals that are not bound to everybody's keys an honest receiver would, and a share of 0's be shown."""
    said, _ = told_of_different_keys(federation)
    assert "did not sign" in said
    monkeypatch.setattr(dealing, "keys_seen", lambda context, keys: context)  # the twin
    said, box = told_of_different_keys(federation)
    assert set(wire.read_map(said)) == {0}
    with pytest.raises(wire.Malformed, match="form"):
        wire.read_map(said + b"\xff" * 5)  # half an entry
    zero, two = federation.clients[0], federation.clients[2]
    held = zero.store.session()
    zero.store.keep_session({**held, "stage": dealing.CHECK, "shares": {}})
    complaints = wire.write_map({2: wire.read_map(said)[0]})
    shown = zero.answer(question(zero, dealing.ANSWER, facts={"complaints": complaints}))["facts"]["keys"]
    once, seal = wire.read_map(shown)[2], secure_client._keys(held)[2].seal
    context = secure_client._secrets(two, two.store.session()).context
    cipher = dealing._cipher(once, seal, context, 0, 2)
    assert len(cipher.decrypt(bytes(12), box[32:112], box[:32])) == 64  # a true share, in the server's hands


@pytest.mark.parametrize("at", [dealing.SHARES, dealing.VECTOR])
def test_an_update_by_another_recipe_is_in_no_sum(at: str, federation: Federation, tmp_path: Path) -> None:
    """A client that moves to a recipe of less noise within a round: a session is bound to the recipe that began it."""
    small_noise = ddgauss(noise=0, rounds=9, data={"clients": N}, cohort={"size": N, "min": 2})
    other = replace(deployed(tmp_path / "other", small_noise)[0], roster=federation.task.roster)
    moved = replace(federation.clients[1], task=other, pin="")

    def handle(message: Any) -> Any:
        if message.content["facts"].get("stage") not in STEPS[STEPS.index(at) :]:
            return honest(federation.clients[1])(message)
        message.content["facts"]["pin"] = other.pin
        return honest(moved)(message)

    federation.grid.handlers[1] = handle
    total = federation.round()
    assert is_sum_of(total, [0, 2, 3, 4]) if at == dealing.SHARES else 1 in federation.named()
    assert other.pin != federation.task.pin and not is_sum_of(total, [*range(N)])


def test_a_client_takes_no_other_keys_for_its_own(federation: Federation) -> None:
    """It signed two sets for one session, which the server opened twice: only the later one is its own."""
    one = federation.clients[0]
    first, keys = keys_shown([one]), keys_shown(federation.clients)
    for told in ({**keys, **first}, {i: keys[i] for i in range(1, N)}):
        refused(
            one, question(one, dealing.SHARES, facts={"keys": dealing.write_keys(told)}), "other keys of this client"
        )
    one.answer(question(one, dealing.SHARES, facts={"keys": dealing.write_keys(keys)}))


def test_a_client_that_was_excluded_three_times_is_asked_no_more_also_after_a_restart(
    tmp_path: Path, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    liar = false_dealer(federation.clients[LIAR], "false share", [0])
    asked: list[int] = []

    def counted(message: Any) -> Any:
        asked.append(message.content["facts"]["round"])
        return liar(message)

    federation.grid.handlers[LIAR] = counted
    with caplog.at_level(logging.WARNING):
        assert all(is_sum_of(federation.round(number), [0, 2, 3, 4]) for number in range(4))
    assert set(asked) == {0, 1, 2} and "one or more are asked no more" in caplog.text
    # Who it was is the operator's to know.
    assert "1 client broke the protocol" in caplog.text and f"client {LIAR}" not in caplog.text
    again = Federation.of(tmp_path)
    again.grid.handlers[LIAR] = counted
    assert is_sum_of(again.round(4), [0, 2, 3, 4]) and set(asked) == {0, 1, 2}
    path = again.server.culprits.path  # type: ignore[union-attr]
    assert path.stat().st_mode & 0o077 == 0 and len(path.read_text().splitlines()) == 3
    whole = path.read_text()
    path.write_text('{"round": 3, "excl\n' + whole)
    with pytest.raises(RunError, match="line 1: not as it was written"):
        Culprits(path)


def test_the_run_stops_after_three_rounds_in_vain_and_says_what_it_saw(federation: Federation) -> None:
    for gone in (2, 3):
        federation.grid.handlers[gone] = silent_from(federation.clients[gone], dealing.VECTOR)
    federation.lie(LIAR, dealing.VECTOR, other_vector(np.ones(3, np.int64)))
    federation.round(0, cohort=[0])  # a small draw: no client's doing, not counted
    for number in range(1, 4):
        assert federation.round(number).count == 0 and federation.secrets() == []
    before = len(federation.grid.pushed)
    with pytest.raises(RunError, match=r"3 charged rounds in a row were aborted.*step vector\), 1 excluded"):
        federation.round(4)
    assert len(federation.grid.pushed) == before  # nothing was asked, nothing can be charged


def test_one_good_round_ends_the_row(federation: Federation) -> None:
    whole = dict(federation.grid.handlers)
    silent = {i: silent_from(federation.clients[i], dealing.VECTOR) for i in (1, 2, 3)}
    for number in range(6):
        federation.grid.handlers = whole if number == 2 else {**whole, **silent}
        assert federation.round(number).count == (N if number == 2 else 0)
    with pytest.raises(RunError, match=r"round 3: .*round 4: .*round 5: "):
        federation.round(6)


def test_the_limits_come_from_the_apps_settings(tmp_path: Path) -> None:
    given = Settings.of({"out": str(tmp_path), "abort-limit": 5, "exclusion-limit": 1})
    assert (given.abort_limit, given.exclusion_limit) == (5, 1)
    for name in ("abort-limit", "exclusion-limit"):
        for bad in (0, -1, 2.5, True, "3"):
            with pytest.raises(InputError, match=name):
                Settings.of({"out": str(tmp_path), name: bad})


def test_a_stopped_run_loses_nothing_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    task, clients = deployed(tmp_path / "fed", ddgauss(rounds=4))
    grid = grid_of(task, clients)
    whole = dict(grid.handlers)
    for i in (0, 1):
        grid.handlers[i] = silent_from(clients[i], dealing.VECTOR)
    with pytest.raises(RunError, match="2 charged rounds in a row"):
        serve(grid, task, settings(tmp_path / "fed", abort_limit=2))
    assert len((tmp_path / "fed" / "run" / "ledger.jsonl").read_text().splitlines()) == 2
    grid.handlers = whole
    facts = serve(grid, task, settings(tmp_path / "fed", abort_limit=2))
    assert facts["rounds"] == 4 and facts["rounds_charged"] == 4
    shown = rows(tmp_path / "fed" / "run" / "metrics.jsonl")
    assert [row["aborted"] for row in shown] == [True, True, False, False]


def test_what_a_crash_left_goes_when_the_server_starts_again(federation: Federation) -> None:
    """And not the session that comes next, should the word that ends all others be late."""
    dealt(federation)
    (federation.clients[2].store.folder / "session.json.part").write_text("{")
    assert federation.secrets() == list(range(N))
    federation.server.left_open = True
    federation.round(0, cohort=[0])
    assert federation.secrets() == []
    one = federation.clients[0]
    one.answer(question(one, dealing.KEYS, round=1))
    one.answer(question(one, dealing.END, round=1))
    assert federation.secrets() == [0]
    one.answer(question(one, dealing.END, b"t" * 16, round=1))
    assert federation.secrets() == []


def test_what_a_crash_left_goes_when_a_client_starts_again(federation: Federation) -> None:
    dealt(federation)
    with taking_over(federation.clients[0].store, ("127.0.0.1:23001", False, ""), (None, None)):
        assert federation.secrets() == [1, 2, 3, 4]


def affine(point: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(part * pow(point[2], -1, sharing.FIELD) % sharing.FIELD for part in point[:2])


def test_arithmetic_of_points_is_that_of_the_library() -> None:
    (one,) = sharing.read_points(sharing.public_half(1))
    minus = sharing.read_points(sharing.public_half(sharing.ORDER - 1))[0]
    nothing = sharing._add((*one, 1), (*minus, 1))
    assert nothing[2] == sharing._add(nothing, nothing)[2] == 0 and affine(sharing._add(nothing, (*one, 1))) == one
    for number in (*range(2, 40), 1000, 65537):
        wanted = sharing.read_points(sharing.public_half(number))[0]
        assert affine(sharing._times(number, (*one, 1))) == wanted
        assert affine(sharing._add(sharing._times(number - 1, (*one, 1)), (*one, 1))) == wanted
    for bad in (b"\x02", bytes(33), b"\x02" + b"\xff" * 32):
        with pytest.raises(ValueError, match=r"."):
            sharing.read_points(bad)


def test_a_share_is_of_one_holder_one_dealer_and_in_the_field() -> None:
    shares, told = sharing.split(sharing.fresh_scalar(), 4, range(7))
    points = sharing.read_points(b"".join(told))
    for holder, share in shares.items():
        assert sharing.is_share(points, holder, share)
        assert not sharing.is_share(points, holder + 1, share)
        assert not sharing.is_share(points, holder, share + sharing.ORDER)
        assert not sharing.is_share(points, holder, 0)
        assert not sharing.is_share(points[:3], holder, share)
    assert sharing.is_share([(x, sharing.FIELD - y) for x, y in points], 3, sharing.ORDER - shares[3])
    assert not sharing.is_share([points[0], (points[0][0], sharing.FIELD - points[0][1])], 0, 5)  # adds up to nothing


def test_what_the_commitments_tell_is_known_from_the_public_key_and_fewer_shares() -> None:
    """The simulator of the proof: from a_0·G and t − 1 shares, the same points, by Lagrange in the exponent."""
    secret = sharing.fresh_scalar()
    shares, told = sharing.split(secret, 3, range(5))
    known = {0: secret, 1: shares[0], 2: shares[1]}  # x -> value; the simulator knows only the point at 0

    def times(number: int, point: tuple[int, int]) -> Any:
        return sharing._times(number % sharing.ORDER, (*point, 1))

    held = {x: sharing.read_points(sharing.public_half(value))[0] for x, value in known.items()}
    # a_1 and a_2 of the parabola through (0, s), (1, u), (2, v): (4u − v − 3s)/2 and (v − 2u + s)/2
    half = pow(2, -1, sharing.ORDER)
    for place, (s, u, v) in ((1, (-3, 4, -1)), (2, (1, -2, 1))):
        parts = [times(c * half, held[x]) for c, x in ((s, 0), (u, 1), (v, 2))]
        total = sharing._add(sharing._add(parts[0], parts[1]), parts[2])
        assert affine(total) == sharing.read_points(told[place])[0]


@pytest.mark.parametrize("cut", range(1, 45))
def test_a_line_that_a_kill_tore_is_mended(tmp_path: Path, cut: int) -> None:
    """The operator's record after a kill in its last write: the lines before count, and the next one is whole."""
    path = tmp_path / "run.excluded.jsonl"
    first = Culprits(path)
    first.note(0, {1: "false deal"})
    first.note(1, {2: "false share"})
    whole = path.read_bytes()
    assert len(whole.splitlines()[1]) > 44
    path.write_bytes(whole[:-cut])
    again = Culprits(path)
    assert again.strikes == ({1: 1, 2: 1} if cut == 1 else {1: 1})
    again.note(2, {2: "false share"})
    lines = [row["round"] for row in rows(path)]
    assert lines == ([0, 1, 2] if cut == 1 else [0, 2]) and path.stat().st_mode & 0o077 == 0
    with pytest.raises(RunError, match=r"cannot be read .*mend"):
        Culprits(tmp_path)  # as a file of another account


GARBAGE = (b"\0" * 40, bytes(range(256)) * 8, b"\xff" * 12, 2**60, "x", [1])


@pytest.mark.parametrize("stage", STEPS)
def test_whatever_a_step_is_answered_with_the_others_sum_comes_out(stage: str, federation: Federation) -> None:
    """All facts of one client's answer replaced by things of another kind: it is named, and nobody else suffers."""
    federation.server.culprits.limit = len(GARBAGE) + 1  # type: ignore[union-attr]
    for number, garbage in enumerate(GARBAGE):

        def spoilt(message: Any, content: Any, garbage: Any = garbage) -> Any:
            own = [name for name, value in content["facts"].items() if isinstance(value, bytes) and name != "nonce"]
            return with_facts(**dict.fromkeys(own or ["round"], garbage))(message, content)

        federation.lie(LIAR, stage, spoilt)
        counted = range(N) if stage in (dealing.CONSENT, dealing.REVEAL) else [i for i in range(N) if i != LIAR]
        assert is_sum_of(federation.round(number), list(counted)), garbage
        assert set(federation.named()) == {LIAR}
    assert federation.server.culprits.strikes == {LIAR: len(GARBAGE)}  # type: ignore[union-attr]


def test_a_stop_in_mid_round_sends_nothing_more(federation: Federation) -> None:
    """The SuperLink may be gone already; the next server tells whoever holds secrets of a dead session."""

    def stopped(message: Any) -> Any:
        raise KeyboardInterrupt

    federation.grid.handlers[1] = stopped
    with pytest.raises(KeyboardInterrupt):
        federation.round(0)
    assert federation.grid.pushed[-1].metadata.dst_node_id == 1001
