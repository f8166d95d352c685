"""The server's side of ``trust: distributed``: a round in six exchanges, of which it learns one sum, already noisy.

Whoever sends what no honest client would is left out of what follows and named by number, and the round goes on with
the others. With fewer than the threshold at any step it is aborted: it stays in the ledger, and nothing is released.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import Aggregate, Broadcast, Clip, Mechanism, PersonalState, insist
from fedflat.engine.reduce import Clipped, Part
from fedflat.federation import wire
from fedflat.federation.replies import ReplyTracker
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.client import context_of, threshold_of
from fedflat.federation.secagg.protocol import Aborted, Collector
from fedflat.federation.transport import Facts, Flower, log
from fedflat.methods.ddgauss import SharedDiscreteNoise
from fedflat.privacy.plan import Plan


@dataclass(kw_only=True)
class SecureFlower(Flower):
    """The back end of ``trust: distributed``; as ``Flower``, with six exchanges a round, seven if somebody complains.

    left_open: an earlier server of this run may have left sessions open at its clients.
    """

    plan: Plan
    mechanism: Any
    left_open: bool = False
    _stage: str = ""
    _session: bytes = b""
    _next: bytes = field(default_factory=lambda: secrets.token_bytes(wire.NONCE_BYTES))
    _ended: tuple[str, ...] = ()
    _broadcast: Broadcast = field(init=False)
    _collector: Collector = field(init=False)
    _deals: dict[int, dealing.Deal] = field(default_factory=dict)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Run one secure aggregation; yield its sum, or nothing if it is aborted.

        Raises:
            RunError: too many rounds in a row came to nothing; this one has not begun, and is not charged.
        """
        self.culprits.stop_if_in_vain()
        if self.left_open:
            self._end(broadcast.round, range(len(self.roster.keys)))
            self.left_open = False
        asked, self._deals, self._broadcast = self._begin_round(cohort), {}, broadcast
        self._session, self._next = self._next, secrets.token_bytes(wire.NONCE_BYTES)
        context = context_of(self.pin, broadcast.round, self._session)
        collector = self._collector = Collector(context, self.mechanism.padded, self.mechanism.bits, 1)
        fault = ""
        try:
            self._keys(asked)
            for step in (self._shares, self._checks, self._vectors, self._consents, self._reveals):
                step()
            yield ClientsSum(self.mechanism.dimension, collector.result(), len(collector.survivors))
        except Aborted as error:
            fault = f"{error} (step {self._stage})"
            log.warning("round %d: secure aggregation aborted: %s", broadcast.round, fault)
        finally:
            for client in collector.false:
                self._excluded.setdefault(client, "false share")
            self._end_round(broadcast.round)
        done = {holder for holders in collector.seeds.values() for holder in holders}  # they have forgotten already
        # Whoever dropped out comes back with secrets of a dead session. A server that stops in mid-round tells them
        # when it is started again: now there may be nobody to carry it.
        self._end(broadcast.round, set(asked) - done)
        if len(cohort) >= threshold_of(self.plan, len(cohort)):
            self.culprits.came_to(broadcast.round, fault and f"{fault}, {len(self._excluded)} excluded")

    def _end(self, round: int, clients: Iterable[int]) -> None:
        """Tell clients that no session but the next is open: they delete the secrets of any other, at once.

        Nobody waits for their answers. It may arrive after the next session's first step, hence the name of that one.
        """
        if self._ended:
            self.grid.pull_messages(list(self._ended))
        tracker, common = ReplyTracker(round, wire.parts_of), wire.records({}, {"round": round})
        step = {"stage": dealing.END, "session": self._next}
        self._ask(tracker, sorted(clients), common, lambda _: step)
        self._ended = tracker.waiting

    def _step(self, stage: str, clients: Iterable[int], facts: Facts, add: Callable[[int, Any], None]) -> None:
        """Put a step's question to clients; ``add`` takes each answer, or raises what makes its client a culprit."""
        self._stage, round, vector = stage, self._broadcast.round, stage == dealing.VECTOR
        common = wire.write_broadcast(self._broadcast) if vector else wire.records({}, {"round": round})
        size = self.mechanism.padded if vector else None
        step = {"stage": stage, "session": self._session}
        read = partial(wire.read_answer, size=size, dtype="int64")
        tracker = ReplyTracker(round, read, self._refused, self._excluded)
        for client, answer in self.exchange(tracker, sorted(clients), common, lambda client: {**step, **facts(client)}):
            try:
                add(client, answer)
            except (wire.Malformed, Aborted) as fault:
                reason = str(fault) if isinstance(fault, wire.Malformed) else "form"
                self._refused[reason] += 1
                self._excluded.setdefault(client, reason)

    def _keys(self, asked: list[int]) -> None:
        collector, roster = self._collector, self.roster.loaded

        def add(client: int, answer: Any) -> None:
            keys = dealing.read_keys(answer.facts.get("keys"))
            insist(set(keys) == {client}, wire.Malformed("form"))
            secagg.verify(keys, roster, collector.context)
            collector.keys |= keys

        self._step(dealing.KEYS, asked, lambda client: {}, add)
        collector.threshold = threshold_of(self.plan, len(collector.keys))
        collector.enough(set(collector.keys))

    def _shares(self) -> None:
        """Collect who dealt what; every box is signed by its dealer, and commitments are points."""
        collector, keys = self._collector, self._collector.keys
        seen = dealing.keys_seen(collector.context, keys)

        def add(client: int, answer: Any) -> None:
            boxes = wire.read_map(answer.facts.get("boxes"), dealing.SIGNED_BOX_BYTES)
            commitments = answer.facts.get("commitments")
            insist(set(boxes) == set(keys) - {client} and isinstance(commitments, bytes), wire.Malformed("form"))
            if not all(dealing.is_dealt(keys[client], seen, client, to, commitments, box) for to, box in boxes.items()):
                raise wire.Malformed("false signature")
            collector.points[client] = dealing.points_of(keys[client], commitments, collector.threshold)
            self._deals[client] = dealing.Deal(commitments, boxes)

        held = dealing.write_keys(keys)
        self._step(dealing.SHARES, keys, lambda client: {"keys": held}, add)
        collector.enough(set(self._deals))

    def _checks(self) -> None:
        """Ask every client whose shares are false; whoever lied, of dealer and receiver, is out."""
        collector, deals = self._collector, self._deals
        accused: dict[int, dict[int, bytes]] = {}
        seen = dealing.keys_seen(collector.context, collector.keys)

        def facts(client: int) -> dict[str, bytes]:
            others = {sender: deal for sender, deal in deals.items() if sender != client}
            return {
                "boxes": wire.write_map({sender: deal.boxes[client] for sender, deal in others.items()}),
                "commitments": wire.write_map({sender: deal.commitments for sender, deal in others.items()}),
            }

        def add(client: int, answer: Any) -> None:
            complaints = wire.read_map(answer.facts.get("complaints"), dealing.SIGNATURE_BYTES)
            insist(set(complaints) <= set(deals) - {client}, wire.Malformed("form"))
            for dealer, signature in complaints.items():
                if not dealing.is_signed(client, collector.keys[client], signature, dealing.COMPLAINT, seen, dealer):
                    raise wire.Malformed("false signature")
            collector.shared.add(client)
            for dealer, signature in complaints.items():
                accused.setdefault(dealer, {})[client] = signature

        self._step(dealing.CHECK, deals, facts, add)
        if accused:
            self._judge(accused)
        collector.enough(collector.shared)

    def _judge(self, accused: dict[int, dict[int, bytes]]) -> None:
        """Ask the accused dealers for the keys of the boxes in question. Who does not answer is out, and not blamed."""
        collector, answered = self._collector, set[int]()

        def add(dealer: int, answer: Any) -> None:
            opened = wire.read_map(answer.facts.get("keys"), 32)
            insist(set(opened) == set(accused[dealer]), wire.Malformed("form"))
            boxes, points, context = self._deals[dealer].boxes, collector.points[dealer], collector.context
            clear = {
                client for client, once in opened.items()
                if dealing.clears(once, collector.keys[client], context, dealer, client, boxes[client], points)
            }  # fmt: skip
            for client in clear:
                self._excluded.setdefault(client, "false complaint")
            insist(clear == set(opened), wire.Malformed("false deal"))
            answered.add(dealer)

        asked = set(accused) & collector.shared
        self._step(dealing.ANSWER, asked, lambda dealer: {"complaints": wire.write_map(accused[dealer])}, add)
        collector.shared -= (set(accused) - answered) | set(self._excluded)

    def _vectors(self) -> None:
        collector = self._collector
        shared = {"shared": wire.write_map(dict.fromkeys(collector.shared, b""))}
        asked = sorted(collector.shared)
        self._step(dealing.VECTOR, asked, lambda _: shared, lambda client, answer: collector.add(client, answer.update))
        collector.enough(collector.survivors)

    def _consents(self) -> None:
        collector = self._collector
        survivors = {"survivors": wire.write_map(dict.fromkeys(collector.survivors, b""))}
        seen = dealing.transcript(collector.context, collector.keys, collector.shared, collector.survivors)

        def add(client: int, answer: Any) -> None:
            signature = answer.facts.get("signature")
            key = collector.keys[client]
            if not isinstance(signature, bytes) or not dealing.is_signed(client, key, signature, dealing.CONSENT, seen):
                raise wire.Malformed("false signature")
            collector.signatures[client] = signature

        self._step(dealing.CONSENT, collector.survivors, lambda _: survivors, add)
        collector.enough(set(collector.signatures))

    def _reveals(self) -> None:
        collector = self._collector
        signatures = {"signatures": wire.write_map(collector.signatures)}

        def add(client: int, answer: Any) -> None:
            seeds, masks = (dealing.read_numbers(answer.facts.get(name)) for name in ("seeds", "masks"))
            insist(collector.take_shares(client, seeds, masks), wire.Malformed("form"))

        self._step(dealing.REVEAL, collector.signatures, lambda _: signatures, add)


@dataclass
class ClientsSum:
    """The round's whole-number sum of ``count`` clients, with their noise in it; no vector of a client is ever here.

    What secure aggregation yields is all of it, and takes the place of the empty one that the round began with.
    """

    dimension: int
    total: np.ndarray
    count: int = 0
    clients: tuple[int, ...] = ()
    personal: None = None

    def add_to(self, total: ClientsSum) -> None:
        """Put it in the place of the round's sum."""
        total.total, total.count = self.total, self.count

    def of(self, draw: int) -> ClientsSum:
        """Return the sum of a cohort draw: there is one."""
        return self

    def result(self) -> Aggregate:
        """Return the aggregate; norms and the plain sum are nobody's to know."""
        nothing = torch.zeros(0, dtype=torch.float64)
        unknown = torch.zeros(self.dimension, dtype=torch.float64)
        return Aggregate(unknown, self.count, 0.0, nothing, nothing, {}, self.total)


@dataclass(frozen=True)
class ClientShares(Mechanism):
    """The distributed discrete Gaussian where each client has added its share: the server tops up to n_max, and
    decodes.
    """

    inner: SharedDiscreteNoise

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> ClientsSum:
        """Return where the round's sum goes."""
        return ClientsSum(self.inner.mechanism.dimension, np.zeros(self.inner.mechanism.padded, dtype=np.int64))

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the decoded noisy sum, float32 ``(d,)``, with n_max shares in it."""
        lacking = max(0, self.inner.shares - aggregate.count)
        return replace(self.inner, shares=lacking).release(key, broadcast, aggregate, bound)
