"""The replies that a round still waits for: who was asked, with which nonce, and what of an answer is checked.

Nothing here trusts a client. A reply counts once, from the node that was asked, with the nonce it was given, in its own
round, with an update of the agreed type and shape and finite values. Everything else is refused under one of a few
fixed words. Some of these can depend on a client's data (its training diverged, or took too long), so their counts
belong to the operator's private file; only the rest may be logged.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedflat.federation.wire import NONCE_BYTES, Malformed

PROTOCOL_FAULTS = ("unasked", "duplicate", "late", "replayed", "sender", "round", "form", "protocol", "shape", "dtype")
"""Refusals that no honest client causes, whatever its data: their counts may be logged."""
DATA_FAULTS = ("not finite", "failed", "missing", "too late")
"""What may depend on a client's data: never logged, never in the run's folder."""
UNREACHABLE = "unreachable"
"""What the transport says, at every poll, of a client that is not connected; no reply, so it is not counted. A client
that does not come back in time is counted once, as missing, which is not for the log."""


@dataclass(frozen=True)
class PendingReply:
    """One question put to one client. message: the transport's id of it, once it is sent."""

    client: int
    node: int
    nonce: bytes


@dataclass
class ReplyTracker:
    """The replies of one round. read: a message's content -> a checked answer with its round and nonce.

    blamed: client -> why its own answer to its question was first refused, for what no honest client does.
    """

    round: int
    read: Callable[[Any], Any]
    refused: Counter[str] = field(default_factory=Counter)
    blamed: dict[int, str] = field(default_factory=dict)
    _open: dict[str, PendingReply] = field(default_factory=dict)
    _closed: dict[str, PendingReply] = field(default_factory=dict)

    def pending(self, client: int, node: int) -> PendingReply:
        """A fresh nonce for one client of the round."""
        return PendingReply(client, node, secrets.token_bytes(NONCE_BYTES))

    def sent(self, message: str, pending: PendingReply) -> None:
        """The transport took the question under this id."""
        self._open[message] = pending

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the questions that are not answered yet."""
        return tuple(self._open)

    def take(self, reply: Any) -> tuple[int, Any] | None:
        """Check in one Flower message: (client, answer), or None if it is refused (and counted)."""
        try:
            return self._checked(reply)
        except Malformed as fault:
            if fault.reason == UNREACHABLE:
                return None
            self.refused[fault.reason] += 1
            pending = self._closed.get(reply.metadata.reply_to_message_id)
            if pending is not None and reply.metadata.src_node_id == pending.node and fault.reason in PROTOCOL_FAULTS:
                self.blamed.setdefault(pending.client, fault.reason)
            return None

    def _checked(self, reply: Any) -> tuple[int, Any]:
        asked = reply.metadata.reply_to_message_id
        if asked in self._closed:
            raise Malformed("duplicate")
        pending = self._open.get(asked)
        if pending is None:
            raise Malformed("unasked")
        if reply.metadata.src_node_id != pending.node:  # somebody else's reply does not use up the question
            raise Malformed(UNREACHABLE if reply.has_error() else "sender")
        self._closed[asked] = self._open.pop(asked)
        if reply.has_error() or not reply.has_content():
            raise Malformed("failed")
        answer = self.read(reply.content)
        if answer.round != self.round:
            raise Malformed("late" if answer.round < self.round else "round")
        if not hmac.compare_digest(answer.nonce, pending.nonce):
            raise Malformed("replayed")
        return pending.client, answer

    def spoilt(self, message: str) -> None:
        """The reply to this question cannot be decoded: it is refused, and uses up the question."""
        if message in self._open:
            self._closed[message] = self._open.pop(message)
            self.refused["form"] += 1

    def close(self) -> tuple[str, ...]:
        """The round is over: whoever has not answered is missing. Returns the ids that are still open."""
        left = self.waiting
        self.refused["missing"] += len(left)
        self._closed.update(self._open)
        self._open.clear()
        return left

    def late(self, replies: Iterable[Any]) -> None:
        """Count a client's replies to an earlier round's questions: slow training is no fault, and tells who was
        asked."""
        self.refused["too late"] += sum(1 for reply in replies if not reply.has_error())


def loggable(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that cannot depend on anyone's data."""
    return {name: counts[name] for name in PROTOCOL_FAULTS if counts.get(name)}
