"""How a round's broadcast reaches a cohort of SuperNodes, and how their answers reach the sum.

A back end like any other (``engine.train.Backend``): it asks, waits as long as agreed, checks every reply in, and adds
what is left to the accumulator, one by one. What it holds of clients at any time is a handful of replies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.core.personal import PersonalState
from fedflat.core.types import Aggregate, Broadcast, Clip
from fedflat.engine.accumulate import Accumulator
from fedflat.federation import wire
from fedflat.federation.events import told
from fedflat.federation.roster import Roster
from fedflat.federation.server.replies import PendingReply, ReplyTracker, loggable
from fedflat.pieces.clipping import whole_vector
from fedflat.records.folder import plain

log = logging.getLogger("fedflat.server")

TRAIN = "train"
POLL_SECONDS = 0.3
"""Seconds between looks for answers: short beside local training, and few calls while it goes on."""
AT_ONCE = 16
"""Messages pushed or pulled together: what the server holds of a cohort at any time, beside one sum."""


def return_large_blocks() -> None:
    """Tell glibc to map each block over 64 KiB by itself, and to give it back when it is freed.

    A server frees every reply at once and keeps a few small facts of it; from one heap, those keep the heap from
    shrinking, and memory grows by about a model with every client. Local training wants the opposite
    (``backends.resident``).
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


_MMAP_THRESHOLD, _LARGE = -3, 1 << 16
"""The parameter's number in glibc's malloc.h, and 64 KiB: above the small facts, below every model's update."""


@dataclass
class Flower:
    """A back end whose clients are SuperNodes: asks a cohort, adds each answer as it comes, waits no longer than
    agreed.

    answer_seconds: from the last ask to the end of the round. public: counts of refusals that may be logged.
    """

    grid: Any
    roster: Roster
    pin: str
    dimension: int
    answer_seconds: float
    refusals: Callable[[int, Counter[str]], None]
    ttl: float = 3600.0
    poll: float = POLL_SECONDS
    name: str = "flower"
    _late: tuple[str, ...] = ()

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Any, heads: PersonalState) -> None:
        """Ask the connected clients of the cohort; add what they answer. Nothing of a client is kept but the sum."""
        common = wire.write_broadcast(broadcast)

        def content(pending: PendingReply) -> Any:
            return wire.write_request(wire.Request(pending.client, pending.nonce, self.pin, broadcast), common)

        def add(client: int, answer: wire.Answer) -> None:
            accumulator.add(wire.tensor_of(answer)[None], [max(answer.examples, 1)])

        tracker = ReplyTracker(broadcast.round, lambda content: wire.read_answer(content, self.dimension))
        self.exchange(tracker, cohort.tolist(), content, add)
        self.refusals(broadcast.round, tracker.refused)

    def exchange(
        self,
        tracker: ReplyTracker,
        clients: Iterable[int],
        content: Callable[[PendingReply], Any],
        add: Callable[[int, Any], None],
    ) -> None:
        """One question to each client, one answer from each in time: ``add`` gets the checked ones as they come."""
        self._ask(tracker, list(clients), content)
        until = time.monotonic() + self.answer_seconds
        while tracker.waiting and time.monotonic() < until:
            if not self._collect(tracker, add):
                time.sleep(self.poll)
        if self._late:
            tracker.late(self._pulled(tracker, self._late))
        self._late = tracker.close()

    def _ask(self, tracker: ReplyTracker, clients: list[int], content: Callable[[PendingReply], Any]) -> None:
        connected = self.roster.connected(self.grid.get_nodes())
        log.debug("%d clients are connected", len(connected), extra=told("connected", connected=len(connected)))
        asked = [client for client in clients if client in connected]
        tracker.refused["missing"] += len(clients) - len(asked)
        for start in range(0, len(asked), AT_ONCE):
            awaited = [tracker.pending(client, connected[client]) for client in asked[start : start + AT_ONCE]]
            messages = [self._message(content(pending), pending.node, tracker.round) for pending in awaited]
            for number, pending in zip(self.grid.push_messages(messages), awaited):
                if number:
                    tracker.sent(number, pending)
                else:
                    tracker.refused["missing"] += 1

    def _message(self, content: Any, node: int, round: int) -> Any:
        from flwr.app import Message

        return Message(content, node, TRAIN, ttl=self.ttl, group_id=str(round))

    def _collect(self, tracker: ReplyTracker, add: Callable[[int, Any], None]) -> int:
        """Pull what is there, a few at a time, in the order asked; how many replies came."""
        came = 0
        waiting = tracker.waiting
        for start in range(0, len(waiting), AT_ONCE):
            for reply in self._pulled(tracker, waiting[start : start + AT_ONCE]):
                came += 1
                taken = tracker.take(reply)
                if taken is not None:
                    add(*taken)
        return came

    def _pulled(self, tracker: ReplyTracker, numbers: tuple[str, ...]) -> list[Any]:
        """The replies to some questions. One that Flower cannot even decode is refused, and its neighbours are not."""
        try:
            return list(self.grid.pull_messages(list(numbers)))
        except Exception as error:  # whatever a decoder raises on bytes that a client chose
            if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
                raise
            if len(numbers) == 1:
                tracker.spoilt(numbers[0])
                return []
            return [reply for number in numbers for reply in self._pulled(tracker, (number,))]


@dataclass(frozen=True)
class ClientNoise:
    """trust: local. Every message carries its client's own noise, so the server clips and adds nothing."""

    count_std: float = 0.0

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """A plain sum: a noised message is longer than the clip, and already private."""
        return Accumulator(whole_vector(float("inf")), float("inf"), tensors, tensors[-1].stop)

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """None: it is in the sum."""
        return torch.zeros_like(aggregate.total)

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Refused: the plan allows no adaptive clip under local trust."""
        raise wrong("privacy.clip", "adaptive", "a constant clip with privacy.trust: local")


@dataclass
class Refusals:
    """Counts of replies that were not added: per round in the operator's own file, and what may be said in the log.

    The file lies beside the noise key, not in the run's folder: who is missing, or whose training diverged, may depend
    on data.
    """

    path: Path
    total: Counter[str] = field(default_factory=Counter)

    def note(self, round: int, counts: Counter[str]) -> None:
        """Write a round's counts to the operator's file; log those that no honest client causes."""
        self.total += counts
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain({"round": round, **{k: v for k, v in counts.items() if v}})) + "\n")
        shown = loggable(counts)
        if shown:
            words = ", ".join(f"{v} ({k})" for k, v in shown.items())
            log.warning("round %d: refused %s", round, words, extra=told("refused", round=round, counts=shown))
