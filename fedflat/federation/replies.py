"""Whom a deployment's server asks, and which replies count: questions of a round, refusals, culprits and turns.

Nothing here trusts a client. A reply counts once, from the node that was asked, with the nonce it was given, in its own
round, with an update of the agreed type and shape and finite values. Everything else is refused under one of a few
fixed words. Some of these can depend on a client's data (its training diverged, or took too long), so their counts
belong to the operator's private file; only the rest may be logged.

Where clients take turns as they come (``CheckIns``), those are asked that are connected and have waited longest, at
most m. Each ask is on disk before it is sent, in the operator's own file beside the noise keys: no restart and no
backup of the run's folder brings anybody back earlier.
"""

import hmac
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.core import NEVER, Ids, MinSeparation, RoundState, RunError, durable, insist, writing
from fedflat.federation.bounds import DAMAGED, REFUSES, TOO_LARGE
from fedflat.federation.wire import NONCE_BYTES, Malformed

log = logging.getLogger("fedflat.server")

PROTOCOL_FAULTS = (
    "unasked", "duplicate", "late", "replayed", "sender", "early", "form", "protocol", "shape", "dtype", "size",
)  # fmt: skip
"""Refusals that no honest client causes, whatever its data: their counts may be logged."""
DATA_FAULTS = ("not finite", "failed", "missing", "too late", "refuses")
"""What may depend on a client's data, or tell how many were asked: never logged, never in the run's folder."""
CODES = {TOO_LARGE: "size", DAMAGED: "form", REFUSES: "refuses", 7: "refuses"}
"""What an error's code says; 7 is Flower's (INVALID_FAB) of a SuperNode whose own app is another one."""
UNREACHABLE = "unreachable"
"""What the transport says, at every poll, of a client that is not connected; no reply, so it is not counted. A client
that does not come back in time is counted once, as missing, which is not for the log."""


@dataclass(frozen=True)
class PendingReply:
    """One question put to one client. message: the transport's id of it, once it is sent."""

    client: int
    node: int
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))


@dataclass
class ReplyTracker:
    """The replies of one round. read: a message's content -> a checked answer with its round and nonce.

    blamed: client -> why its own answer to its question was first refused, for what no honest client does; not who
    answered twice, whose first answer counts.
    """

    round: int
    read: Callable[[Any], Any]
    refused: Counter[str] = field(default_factory=Counter)
    blamed: dict[int, str] = field(default_factory=dict)
    _open: dict[str, PendingReply] = field(default_factory=dict)
    _closed: dict[str, PendingReply] = field(default_factory=dict)

    def sent(self, message: str, pending: PendingReply) -> None:
        """Note that the transport took the question under this id."""
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
            if (reason := str(fault)) == UNREACHABLE:
                return None
            self.refused[reason] += 1
            pending = self._closed.get(reply.metadata.reply_to_message_id)
            at_fault = reason in PROTOCOL_FAULTS and reason != "duplicate"
            if at_fault and pending is not None and reply.metadata.src_node_id == pending.node:
                self.blamed.setdefault(pending.client, reason)
            return None

    def _checked(self, reply: Any) -> tuple[int, Any]:
        # The order matters: what an honest client can cause is told apart before anybody is blamed.
        asked = reply.metadata.reply_to_message_id
        insist(asked not in self._closed, Malformed("duplicate"))
        pending = self._open.get(asked)
        if pending is None:
            raise Malformed("unasked")
        # Somebody else's reply does not use up the question.
        insist(reply.metadata.src_node_id == pending.node, Malformed(UNREACHABLE if reply.has_error() else "sender"))
        self._closed[asked] = self._open.pop(asked)
        if reply.has_error() or not reply.has_content():
            raise Malformed(CODES.get(reply.error.code if reply.has_error() else 0, "failed"))
        answer = self.read(reply.content)
        insist(answer.round == self.round, Malformed("late" if answer.round < self.round else "early"))
        insist(hmac.compare_digest(answer.nonce, pending.nonce), Malformed("replayed"))
        return pending.client, answer

    def close(self) -> tuple[str, ...]:
        """End the round: whoever has not answered is missing. Return the ids of the questions that were still open."""
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
    """Return the counts that cannot depend on anyone's data."""
    return {name: counts[name] for name in PROTOCOL_FAULTS if counts.get(name)}


def read_journal(path: Path, parse: Callable[[Any], Any], hint: str) -> list[Any]:
    """Return the lines of a file of JSON lines that is only appended to, each as ``parse`` gives it.

    A last line that a kill tore goes, on the disk too, and is said; a whole one without its end gets it.

    Raises:
        RunError: the file cannot be read, or the line that is not as it was written; ``hint`` is what to know of that.
    """
    entries: list[Any] = []
    try:
        *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if last:
            try:
                json.loads(last)
                lines.append(last)
            except ValueError:
                log.warning("%s, line %d: unfinished, as a kill leaves it; taken out", path, len(lines) + 1)
            durable.replace(path, b"".join(line + b"\n" for line in lines))
        for line in lines:
            entries.append(parse(json.loads(line)))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(f"{path}, line {len(entries) + 1}: not as it was written; {hint}") from error
    return entries


@dataclass
class Culprits:
    """Who broke the protocol in one run, by number, and when the server stops asking them, or stops altogether.

    What counts is what no honest client does, whatever its data and its network. Silence is none of these, and nobody
    is put off for it. path: one line for each such round, in the operator's own folder; it survives restarts. limit: a
    client that broke it in so many rounds is asked no more. aborts: charged rounds in a row without a result, for
    another reason than a small draw, after which the run stops; counted from the start of this server.
    """

    path: Path
    limit: int = 3
    aborts: int = 3
    strikes: Counter[int] = field(init=False)
    _in_vain: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        exclusions = read_journal(self.path, lambda line: [*map(int, line["excluded"])], "mend it, and start again")
        self.strikes = Counter(client for clients in exclusions for client in clients)

    @property
    def off(self) -> set[int]:
        """Clients that are asked no more in this run."""
        return {client for client, count in self.strikes.items() if count >= self.limit}

    def note(self, round: int, excluded: Mapping[int, str]) -> set[int]:
        """Add one round's exclusions, durably; return the clients that are put off from now on."""
        before = self.off
        line = json.dumps({"round": round, "excluded": {str(client): excluded[client] for client in sorted(excluded)}})
        durable.append(self.path, line.encode() + b"\n")
        self.strikes.update(excluded.keys())
        return self.off - before

    def came_to(self, round: int, fault: str) -> None:
        """Note how a round ended: why it was aborted, or nothing."""
        self._in_vain = [*self._in_vain, f"round {round}: {fault}"] if fault else []

    def stop_if_in_vain(self) -> None:
        """Raise RunError before another round is spent, if the last ones came to nothing."""
        if len(self._in_vain) >= self.aborts:
            seen = f"{len(self._in_vain)} charged rounds in a row were aborted ({'; '.join(self._in_vain)})"
            hint = f"nothing is lost, start it again when the cause is mended; {self.path.parent} has the counts"
            raise RunError(f"the run stops: {seen}; {hint}")


@dataclass
class CheckIns:
    """Chooses the cohorts of a deployment under ``min-separation``.

    present: who is connected. path: the file of asks. charged: rounds that have a line in the ledger, or in the mark
    beside the noise key: what was asked in another round was never added up, and does not count.

    Raises:
        RunError: the file is not as it was written, or the disk refuses.
    """

    sampler: MinSeparation
    present: Callable[[], Iterable[int]]
    path: Path
    charged: frozenset[int] = frozenset()
    _last: Ids = field(init=False)

    def __post_init__(self) -> None:
        self._last = np.full(self.sampler.clients, NEVER, dtype=np.int64)

        def parse(line: Any) -> tuple[int, list[int]]:
            clients = [*map(int, line["clients"])]
            insist(all(0 <= client < self.sampler.clients for client in clients), ValueError())
            return int(line["round"]), clients

        asked = read_journal(self.path, parse, "nobody's last turn is known")
        if lost := self.charged.difference(round for round, _ in asked):
            effect = "which was charged; somebody may come back early (ε counts each start on its own, and holds)"
            log.warning("%s: no line for round %s, %s", self.path, min(lost), effect)
        for round, clients in asked:
            if round in self.charged:
                self._last[clients] = np.maximum(self._last[clients], round)

    def cohort(self, state: RoundState) -> Ids:
        """Return the clients to ask in a round, ascending; they are written down before this returns."""
        chosen = self.sampler.next_of(np.array(sorted(self.present()), dtype=np.int64), self._last, state.round)
        line = json.dumps({"round": state.round, "clients": chosen.tolist()}) + "\n"
        with writing(self.path, then="nobody was asked"):
            durable.append(self.path, line.encode())
        self._last[chosen] = state.round
        return chosen
