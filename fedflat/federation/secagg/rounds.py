"""The server's side of ``trust: distributed``: a round in six exchanges, of which it learns one sum, already noisy.

Whoever sends what no honest client would is left out of what follows and named by number, and the round goes on with
the others. With fewer than the threshold at any step it is aborted: it stays in the ledger, and nothing is released.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedflat.core.personal import PersonalState
from fedflat.core.types import Broadcast
from fedflat.federation.secagg import consistency, dealing, stages
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.client import context_of, known_keys, threshold_of
from fedflat.federation.secagg.dealing import Deal
from fedflat.federation.secagg.protocol import Aborted, Collector
from fedflat.federation.server.culprits import Culprits
from fedflat.federation.server.replies import PendingReply, ReplyTracker
from fedflat.federation.server.transport import Flower, log
from fedflat.federation.task import Task
from fedflat.federation.wire import NONCE_BYTES, Malformed
from fedflat.privacy.plan import Plan


@dataclass
class SecureFlower(Flower):
    """The back end of ``trust: distributed``; as ``Flower``, with six exchanges a round, seven if somebody complains.

    left_open: an earlier server of this run may have left sessions open at its clients.
    """

    task: Task | None = None
    plan: Plan | None = None
    mechanism: Any = None
    culprits: Culprits | None = None
    left_open: bool = False
    _refused: Counter[str] = field(default_factory=Counter)
    _excluded: dict[int, str] = field(default_factory=dict)
    _stage: str = ""
    _next: bytes = field(default_factory=lambda: secrets.token_bytes(stages.SESSION_BYTES))
    _ended: tuple[str, ...] = ()

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Any, heads: PersonalState) -> None:
        """One secure aggregation; the accumulator gets its sum, or nothing if it is aborted.

        Raises:
            RunError: too many rounds in a row came to nothing; this one has not begun, and is not charged.
        """
        culprits: Culprits = self.culprits  # type: ignore[assignment]
        culprits.stop_if_in_vain()
        if self.left_open:
            self._end(broadcast.round, range(self.roster.clients))
            self.left_open = False
        self._refused, self._excluded = Counter(), {}
        session, self._next = self._next, secrets.token_bytes(stages.SESSION_BYTES)
        asked = sorted(set(cohort.tolist()) - culprits.off)
        collector = Collector(context_of(self.pin, broadcast.round, session), self.mechanism.padded,
                              self.mechanism.bits, 1)  # fmt: skip
        fault = ""
        try:
            self._aggregate(collector, session, asked, broadcast)
            accumulator.take(collector.result(), len(collector.survivors))
        except Aborted as error:
            fault = f"{error} (step {self._stage})"
            log.warning("round %d: secure aggregation aborted: %s", broadcast.round, fault)
        finally:
            self._close(collector, broadcast.round)
            done = {holder for given in collector.seeds.values() for holder in given}  # they have forgotten already
            self._end(broadcast.round, set(asked) - done)
        if len(cohort) >= threshold_of(self.plan, len(cohort)):  # type: ignore[arg-type]
            culprits.came_to(broadcast.round, fault and self._seen(fault))
        self.refusals(broadcast.round, self._refused)

    def _seen(self, fault: str) -> str:
        named = ", ".join(f"client {client} ({why})" for client, why in sorted(self._excluded.items()))
        return f"{fault}, excluded {named or 'nobody'}"

    def _close(self, collector: Collector, round: int) -> None:
        """Name those who were excluded, in the log and durably."""
        for client in collector.false:
            self._blame(client, "false share")
        if self._excluded:
            log.warning("round %d: %s", round, self._seen("secure aggregation"))
        for client in sorted(self.culprits.note(round, self._excluded)):  # type: ignore[union-attr]
            log.warning("client %d is asked no more in this run", client)

    def _blame(self, client: int, why: str) -> None:
        self._excluded.setdefault(client, why)

    def _end(self, round: int, clients: Iterable[int]) -> None:
        """Tell clients that no session but the next is open: they delete the secrets of any other, at once.

        Nobody waits for their answers. It may arrive after the next session's first step, hence the name of that one.
        """
        if self._ended:
            self._pulled(ReplyTracker(round, lambda found: found), self._ended)
        connected = self.roster.connected(self.grid.get_nodes())
        messages = []
        for client in sorted(set(clients) & set(connected)):
            pending = PendingReply(client, connected[client], secrets.token_bytes(NONCE_BYTES))
            content = stages.write_question(stages.END, pending, round, self._next, self.pin, {})
            messages.append(self._message(content, pending.node, round))
        self._ended = tuple(number for number in self.grid.push_messages(messages) if number) if messages else ()

    def _aggregate(self, collector: Collector, session: bytes, asked: list[int], broadcast: Broadcast) -> None:
        self._keys(collector, session, asked, broadcast)
        deals = self._shares(collector, session, broadcast)
        self._checks(collector, session, deals, broadcast)
        self._vectors(collector, session, broadcast)
        self._consents(collector, session, broadcast)
        self._reveals(collector, session, broadcast)

    def _step(
        self, stage: str, session: bytes, broadcast: Broadcast, clients: Iterable[int],
        facts: Callable[[int], dict[str, bytes]], add: Callable[[int, Any], None],
    ) -> None:  # fmt: skip
        self._stage, vector = stage, stage == stages.VECTOR
        size = self.mechanism.padded if vector else None

        def content(pending: PendingReply) -> Any:
            own, sent = facts(pending.client), broadcast if vector else None
            return stages.write_question(stage, pending, broadcast.round, session, self.pin, own, sent)

        def checked(client: int, answer: Any) -> None:
            try:
                add(client, answer)
            except (Malformed, Aborted) as fault:
                reason = fault.reason if isinstance(fault, Malformed) else "form"
                self._refused[reason] += 1
                self._blame(client, reason)

        tracker = ReplyTracker(broadcast.round, lambda found: stages.read_reply(found, size))
        self.exchange(tracker, sorted(clients), content, checked)
        self._refused += tracker.refused
        for client, reason in tracker.blamed.items():
            if reason == "duplicate":  # refused, the first answer counts, and the client goes on
                log.warning("round %d: a second answer of client %d to step %s", broadcast.round, client, stage)
            else:
                self._blame(client, reason)

    def _keys(self, collector: Collector, session: bytes, asked: list[int], broadcast: Broadcast) -> None:
        known = known_keys(self.task)  # type: ignore[arg-type]

        def add(client: int, answer: Any) -> None:
            found = stages.read_keys(answer.facts.get("keys"))
            if set(found) != {client}:
                raise Malformed("form")
            secagg.verify(found, known, collector.context)
            collector.keys |= found

        self._step(stages.KEYS, session, broadcast, asked, lambda client: {}, add)
        collector.threshold = threshold_of(self.plan, len(collector.keys))  # type: ignore[arg-type]
        collector.enough(set(collector.keys))

    def _shares(self, collector: Collector, session: bytes, broadcast: Broadcast) -> dict[int, Deal]:
        """Who dealt what; every box is signed by its dealer, and commitments are points."""
        deals: dict[int, Deal] = {}
        keys = collector.keys
        seen = dealing.keys_seen(collector.context, keys)

        def add(client: int, answer: Any) -> None:
            boxes = stages.read_map(answer.facts.get("boxes"), stages.SIGNED_BOX_BYTES)
            told = answer.facts.get("commitments")
            if set(boxes) != set(keys) - {client} or not isinstance(told, bytes):
                raise Malformed("form")
            if not all(dealing.is_dealt(keys[client], seen, client, to, told, box) for to, box in boxes.items()):
                raise Malformed("false signature")
            collector.points[client] = dealing.points_of(keys[client], told, collector.threshold)
            deals[client] = Deal(told, boxes)

        held = stages.write_keys(keys)
        self._step(stages.SHARES, session, broadcast, keys, lambda client: {"keys": held}, add)
        collector.enough(set(deals))
        return deals

    def _checks(self, collector: Collector, session: bytes, deals: dict[int, Deal], broadcast: Broadcast) -> None:
        """Every client says whose shares are false; whoever lied, of dealer and receiver, is out."""
        accused: dict[int, dict[int, bytes]] = {}
        seen = dealing.keys_seen(collector.context, collector.keys)

        def facts(client: int) -> dict[str, bytes]:
            others = {sender: deal for sender, deal in deals.items() if sender != client}
            return {
                "boxes": stages.write_map({sender: deal.boxes[client] for sender, deal in others.items()}),
                "commitments": stages.write_map({sender: deal.commitments for sender, deal in others.items()}),
            }

        def add(client: int, answer: Any) -> None:
            found = stages.read_map(answer.facts.get("complaints"), dealing.SIGNATURE_BYTES)
            public = collector.keys[client]
            if not set(found) <= set(deals) - {client}:
                raise Malformed("form")
            if not all(dealing.is_complaint(public, seen, client, of, by) for of, by in found.items()):
                raise Malformed("false signature")
            collector.shared.add(client)
            for dealer, signature in found.items():
                accused.setdefault(dealer, {})[client] = signature

        self._step(stages.CHECK, session, broadcast, deals, facts, add)
        if accused:
            self._judge(collector, session, deals, accused, broadcast)
        collector.enough(collector.shared)

    def _judge(
        self, collector: Collector, session: bytes, deals: dict[int, Deal], accused: dict[int, dict[int, bytes]],
        broadcast: Broadcast,
    ) -> None:  # fmt: skip
        """Ask the accused dealers for the keys of the boxes in question. Who does not answer is out, and not blamed."""
        answered: set[int] = set()

        def add(dealer: int, answer: Any) -> None:
            shown = stages.read_map(answer.facts.get("keys"), 32)
            if set(shown) != set(accused[dealer]):
                raise Malformed("form")
            points = collector.points[dealer]
            clear = {
                client
                for client, once in shown.items()
                if dealing.clears(once, collector.keys[client], collector.context, dealer, client,
                                  deals[dealer].boxes[client], points)
            }  # fmt: skip
            for client in clear:
                self._blame(client, "false complaint")
            if clear != set(shown):
                raise Malformed("false deal")
            answered.add(dealer)

        asked = set(accused) & collector.shared
        self._step(
            stages.ANSWER, session, broadcast, asked,
            lambda dealer: {"complaints": stages.write_map(accused[dealer])}, add,
        )  # fmt: skip
        collector.shared -= (set(accused) - answered) | set(self._excluded)

    def _vectors(self, collector: Collector, session: bytes, broadcast: Broadcast) -> None:
        shared = stages.write_map(dict.fromkeys(collector.shared, b""))

        self._step(
            stages.VECTOR, session, broadcast, collector.shared, lambda client: {"shared": shared},
            lambda client, answer: collector.add(client, answer.vector),
        )  # fmt: skip
        collector.enough(collector.survivors)

    def _consents(self, collector: Collector, session: bytes, broadcast: Broadcast) -> None:
        survivors = stages.write_map(dict.fromkeys(collector.survivors, b""))
        seen = consistency.transcript(collector.context, collector.keys, collector.shared, collector.survivors)

        def add(client: int, answer: Any) -> None:
            found = answer.facts.get("signature")
            if not isinstance(found, bytes) or not consistency.agrees(client, collector.keys[client], seen, found):
                raise Malformed("false signature")
            collector.signatures[client] = found

        self._step(
            stages.CONSENT, session, broadcast, collector.survivors, lambda client: {"survivors": survivors}, add
        )
        collector.enough(set(collector.signatures))

    def _reveals(self, collector: Collector, session: bytes, broadcast: Broadcast) -> None:
        signatures = stages.write_map(collector.signatures)

        def add(client: int, answer: Any) -> None:
            seeds, masks = (stages.read_numbers(answer.facts.get(name)) for name in ("seeds", "masks"))
            if not collector.take_shares(client, seeds, masks):
                raise Malformed("form")

        self._step(
            stages.REVEAL, session, broadcast, collector.signatures, lambda client: {"signatures": signatures}, add
        )
