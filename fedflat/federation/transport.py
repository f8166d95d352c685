"""How a round's broadcast reaches a cohort of SuperNodes, and how their answers reach the sum.

A back end like any other (``engine.reduce.Backend``): it asks, waits as long as agreed, checks every reply in, and
yields what is left for the round to add, one by one. What it holds of clients at any time is a handful of replies. It
limits what may come, and notes in the operator's file how many replies were refused.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.core import Broadcast, PersonalState, RunError, counted, durable, insist
from fedflat.engine.reduce import Clipped, Part, Trained
from fedflat.federation import wire
from fedflat.federation.bounds import Limit, pulled, refusal, unpacked
from fedflat.federation.events import log_fields
from fedflat.federation.replies import Culprits, PendingReply, ReplyTracker, loggable
from fedflat.federation.task import Roster
from fedflat.federation.tips import RECORD
from fedflat.federation.wire import Malformed

log = logging.getLogger("fedflat.server")

TTL = 3600.0
"""Seconds that a message may be under way."""
Facts = Callable[[int], Mapping[str, Any]]
"""Client -> what its question says beside what all of them are told."""
AT_ONCE = 16
"""Messages pushed or pulled together: what the server holds of a cohort at any time, beside one sum."""


REFUSED = (
    "the clients refuse this run: their app, recipe or roster is another one, or its ledger or signature is not what "
    "they were shown (their logs say which; a folder put back without the state folder's marks needs another one)"
)


def limit_replies(grid: Any, limit: Limit) -> Any:
    """Return Flower's grid with a limit on every reply; whatever is refused comes as an error of the node that sent it.

    grid: one of its methods is replaced.
    """
    from flwr.common.serde import metadata_from_proto
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    def pull_messages(asked: list[str]) -> list[Any]:
        """Return the replies to some questions, refused ones as errors."""
        client, replies = grid._runtime_client, []
        answer = client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        for sent, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            metadata = metadata_from_proto(sent.metadata)
            run = {"node": grid.node, "run_id": metadata.run_id}

            def pull(name: str, run: dict[str, Any] = run) -> bytes:
                return bytes(client.PullObject(PullObjectRequest(object_id=name, **run)).object_content)

            try:
                message = unpacked(metadata.message_id, pulled(limit, tree, pull))
                origin = {"_src_node_id": metadata.src_node_id, "_reply_to_message_id": metadata.reply_to_message_id}
                message.metadata.__dict__.update(origin)
                replies.append(message)
            except Malformed as fault:
                replies.append(refusal(metadata, str(fault)))
            client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=metadata.message_id, **run))
        return replies

    grid.pull_messages = pull_messages
    return grid


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
    culprits: Culprits
    poll: float = 0.3
    name: str = "flower"
    tip: Callable[[int], Any] | None = None
    """Round -> the record with the ledger's signed tip that goes with every message of it."""
    _refused: Counter[str] = field(default_factory=Counter)
    _excluded: dict[int, str] = field(default_factory=dict)
    """Client -> why, of this round's culprits."""
    _late: tuple[str, ...] = ()
    _against: int = 0
    """Refusals since anybody answered."""

    def present(self) -> set[int]:
        """Return the clients that are connected, without those that are asked no more."""
        return self.roster.connected(self.grid.get_nodes()).keys() - self.culprits.off

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Ask the connected clients of the cohort; yield what they answer. Nothing of a client is kept but the sum."""
        if not bool(torch.isfinite(broadcast.shared).all()):  # a lie under trust: local may have made it so
            raise RunError("the model is not finite, and no client trains from it: begin a run in another folder")
        # Packed once: a model for each client of a cohort would fill the memory.
        common = wire.write_broadcast(broadcast)
        asked, answered = self._begin_round(cohort), False
        read = partial(wire.read_answer, size=self.dimension)
        tracker = ReplyTracker(broadcast.round, read, self._refused, self._excluded)
        for _, answer in self.exchange(tracker, asked, common, lambda _: {}):
            answered = True
            # Zeros are what a client without examples sends: with ½ for it in the adaptive clip's count, presence would
            # move that by 1.
            yield Trained(torch.from_numpy(answer.update)[None], [answer.examples or int(answer.update.any())])
        self._end_round(broadcast.round)
        self._against = 0 if answered else self._against + self._refused["refuses"]
        # One may be a client that has not heard of a new roster. Before this round is charged, or another one.
        insist(self._against <= 1, RunError(REFUSED))

    def _begin_round(self, cohort: np.ndarray) -> list[int]:
        """Return whom of a cohort a round asks; so far nothing is refused in it."""
        self._refused, self._excluded, off = Counter(), {}, self.culprits.off
        asked = [client for client in cohort.tolist() if client not in off]
        self._refused["missing"] += len(cohort) - len(asked)
        return asked

    def _end_round(self, round: int) -> None:
        """Write down what was refused, and name those who broke the protocol in the operator's file; the log, which
        others may read, says how many.
        """
        self.refusals(round, self._refused)
        if self._excluded:
            more = "; one or more are asked no more in this run" if self.culprits.note(round, self._excluded) else ""
            who = counted(len(self._excluded), "client")
            log.warning("round %d: %s broke the protocol, named in %s%s", round, who, self.culprits.path, more)

    def exchange(
        self, tracker: ReplyTracker, clients: list[int], common: Any, facts: Facts
    ) -> Iterator[tuple[int, Any]]:
        """Put one question to each client, take one answer from each in time; yield the checked ones as they come.

        common: what all of them are told.
        """
        self._ask(tracker, clients, common, facts)
        until = time.monotonic() + self.answer_seconds
        while tracker.waiting and time.monotonic() < until:
            came, waiting = False, tracker.waiting
            for start in range(0, len(waiting), AT_ONCE):  # a few at a time, in the order asked
                for reply in self.grid.pull_messages(list(waiting[start : start + AT_ONCE])):
                    came = True
                    if (taken := tracker.take(reply)) is not None:
                        yield taken
            if not came:
                time.sleep(self.poll)
        if self._late:
            tracker.late(self.grid.pull_messages(list(self._late)))
        self._late = tracker.close()

    def _ask(self, tracker: ReplyTracker, clients: list[int], common: Any, facts: Facts) -> None:
        connected = self.roster.connected(self.grid.get_nodes())
        log.debug("%d clients are connected", len(connected), extra=log_fields("connected", connected=len(connected)))
        asked = [client for client in clients if client in connected]
        tracker.refused["missing"] += len(clients) - len(asked)
        for start in range(0, len(asked), AT_ONCE):
            awaited = [PendingReply(client, connected[client]) for client in asked[start : start + AT_ONCE]]
            messages = [self._message(common, pending, tracker.round, facts(pending.client)) for pending in awaited]
            for number, pending in zip(self.grid.push_messages(messages), awaited):
                if number:
                    tracker.sent(number, pending)
                else:
                    tracker.refused["missing"] += 1

    def _message(self, common: Any, pending: PendingReply, round: int, facts: Mapping[str, Any]) -> Any:
        from flwr.app import Message, RecordDict

        content = wire.write_request(common, pending.client, pending.nonce, self.pin, **facts)
        if self.tip is not None:
            content = RecordDict({**content, RECORD: self.tip(round)})
        return Message(content, pending.node, "train", ttl=TTL, group_id=str(round))


def note_refusals(path: Path, round: int, counts: Counter[str]) -> None:
    """Write a round's counts of replies that were not added to the operator's file; log what no honest client causes.

    The file lies beside the noise key, not in the run's folder: who is missing, or whose training diverged, may depend
    on data.
    """
    line = {"round": round, **{kind: count for kind, count in counts.items() if count}}
    durable.append(path, json.dumps(line).encode() + b"\n")
    if faults := loggable(counts):
        words = ", ".join(f"{v} ({k})" for k, v in faults.items())
        log.warning("round %d: refused %s", round, words, extra=log_fields("refused", round=round, counts=faults))
