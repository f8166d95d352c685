"""The server's side of ``trust: distributed``: a round in five exchanges, of which it learns one sum, already noisy.

A round with fewer clients than the threshold at any step is aborted: it stays in the ledger, and nothing is released.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.types import Aggregate, Broadcast, Clip
from fedflat.engine.heads import Heads
from fedflat.federation import consistency, secagg, stages
from fedflat.federation.desk import Desk, Slip
from fedflat.federation.secagg import Aborted, Collector
from fedflat.federation.secure_client import context_of, known_keys, threshold_of
from fedflat.federation.task import Task
from fedflat.federation.transport import Flower, log
from fedflat.federation.wire import Malformed
from fedflat.pieces.ddgauss import SharedDiscreteNoise
from fedflat.privacy.plan import Plan


@dataclass
class ClientsSum:
    """The round's whole-number sum, with the clients' noise in it; no vector of a client is ever here."""

    dimension: int
    total: np.ndarray
    count: int = 0
    divisor: None = None

    def take(self, total: np.ndarray, count: int) -> None:
        """The unmasked sum of ``count`` clients."""
        self.total, self.count = total, count

    def result(self) -> Aggregate:
        """The aggregate; norms and the plain sum are nobody's to know."""
        nothing = torch.zeros(0, dtype=torch.float64)
        unknown = torch.zeros(self.dimension, dtype=torch.float64)
        return Aggregate(unknown, self.count, 0.0, nothing, nothing, {}, self.total)


@dataclass(frozen=True)
class ClientShares:
    """The distributed discrete Gaussian where each client has added its share: the server tops up to n_max, and
    decodes.
    """

    inner: SharedDiscreteNoise

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> ClientsSum:
        """Where the round's sum goes."""
        return ClientsSum(broadcast.shared.numel(), np.zeros(self.inner.mechanism.padded, dtype=np.int64))

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float) -> Any:
        """Refused: clients encode."""
        raise NotImplementedError("clients encode their own updates")

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """The decoded noisy sum, float32 ``(d,)``, with n_max shares in it."""
        total = (
            aggregate.exact if aggregate.exact is not None else np.zeros(self.inner.mechanism.padded, dtype=np.int64)
        )
        lacking = (self.inner.shares or aggregate.count) - aggregate.count
        if lacking > 0:
            rest = replace(self.inner, shares=lacking)
            return rest.release(key, broadcast, replace(aggregate, exact=total), bound)
        return self.inner.mechanism.decode(total, self.inner._signs(broadcast))

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """None of its own: it is in the sum."""
        return torch.zeros_like(aggregate.total)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Refused: the grid is made for one clip."""
        return self.inner.noisy_count(key, round, aggregate)


@dataclass
class SecureFlower(Flower):
    """The back end of ``trust: distributed``; as ``Flower``, with five exchanges a round."""

    task: Task | None = None
    plan: Plan | None = None
    mechanism: Any = None
    _refused: Counter[str] = field(default_factory=Counter)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Any, heads: Heads) -> None:
        """One secure aggregation; the accumulator gets its sum, or nothing if it is aborted."""
        self._refused = Counter()
        try:
            collector = self._aggregate(cohort.tolist(), broadcast)
            accumulator.take(collector.result(), len(collector.survivors))
        except Aborted as fault:
            log.warning("round %d: secure aggregation aborted: %s", broadcast.round, fault)
        self.refusals(broadcast.round, self._refused)

    def _aggregate(self, cohort: list[int], broadcast: Broadcast) -> Collector:
        session = secrets.token_bytes(stages.SESSION_BYTES)
        context = context_of(self.pin, broadcast.round, session)
        collector = Collector(context, self.mechanism.padded, self.mechanism.bits, 1)
        self._keys(collector, session, cohort, broadcast)
        boxes = self._shares(collector, session, broadcast)
        self._vectors(collector, session, boxes, broadcast)
        self._consents(collector, session, broadcast)
        self._reveals(collector, session, broadcast)
        return collector

    def _step(
        self, stage: str, session: bytes, broadcast: Broadcast, clients: Iterable[int],
        facts: Callable[[int], dict[str, bytes]], add: Callable[[int, Any], None],
    ) -> None:  # fmt: skip
        vector = stage == stages.VECTOR
        size = self.mechanism.padded if vector else None

        def content(slip: Slip) -> Any:
            own, sent = facts(slip.client), broadcast if vector else None
            return stages.write_question(stage, slip, broadcast.round, session, self.pin, own, sent)

        def checked(client: int, answer: Any) -> None:
            try:
                add(client, answer)
            except Malformed as fault:
                self._refused[fault.reason] += 1

        desk = Desk(broadcast.round, lambda found: stages.read_reply(found, size))
        self.exchange(desk, sorted(clients), content, checked)
        self._refused += desk.refused

    def _keys(self, collector: Collector, session: bytes, cohort: list[int], broadcast: Broadcast) -> None:
        known = known_keys(self.task)  # type: ignore[arg-type]

        def add(client: int, answer: Any) -> None:
            found = stages.read_keys(answer.facts.get("keys"))
            if set(found) != {client}:
                raise Malformed("form")
            try:
                secagg.verify(found, known, collector.context)
            except Aborted:
                raise Malformed("form") from None
            collector.keys |= found

        self._step(stages.KEYS, session, broadcast, cohort, lambda client: {}, add)
        collector.threshold = threshold_of(self.plan, len(collector.keys))  # type: ignore[arg-type]
        collector.enough(set(collector.keys))

    def _shares(self, collector: Collector, session: bytes, broadcast: Broadcast) -> dict[int, dict[int, bytes]]:
        """Receiver -> sender -> box."""
        given: dict[int, dict[int, bytes]] = {}

        def add(client: int, answer: Any) -> None:
            found = stages.read_map(answer.facts.get("boxes"), stages.BOX_BYTES)
            if set(found) != set(collector.keys) - {client}:
                raise Malformed("form")
            given[client] = found
            collector.shared.add(client)

        held = stages.write_keys(collector.keys)
        self._step(stages.SHARES, session, broadcast, collector.keys, lambda client: {"keys": held}, add)
        collector.enough(collector.shared)
        return {to: {sender: given[sender][to] for sender in given if sender != to} for to in given}

    def _vectors(
        self, collector: Collector, session: bytes, boxes: dict[int, dict[int, bytes]], broadcast: Broadcast
    ) -> None:
        def facts(client: int) -> dict[str, bytes]:
            return {"boxes": stages.write_map(boxes[client])}

        self._step(
            stages.VECTOR, session, broadcast, collector.shared, facts,
            lambda client, answer: collector.add(client, answer.vector),
        )  # fmt: skip
        collector.enough(collector.survivors)

    def _consents(self, collector: Collector, session: bytes, broadcast: Broadcast) -> None:
        survivors = stages.write_map(dict.fromkeys(collector.survivors, b""))
        seen = consistency.transcript(collector.context, collector.keys, collector.shared, collector.survivors)

        def add(client: int, answer: Any) -> None:
            found = answer.facts.get("signature")
            if not isinstance(found, bytes) or not consistency.agrees(client, collector.keys[client], seen, found):
                raise Malformed("form")
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
