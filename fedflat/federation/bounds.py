"""How large a message may be, held against what arrived before any of it is unpacked.

Flower keeps a message as a tree of objects, each stored once under its hash: an array is a list of chunks, and the same
chunk may stand in it a thousand times. So 10 MB on the wire can be 4 GB in memory. A deployment knows the size of every
honest message before it starts (``task.json``): what has more objects, longer objects, or unpacks to more, is refused
from its counts and heads alone.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from fedflat.core import insist, turning
from fedflat.engine.job import Job
from fedflat.federation.wire import Malformed
from fedflat.methods.ddgauss import SharedDiscreteNoise

log = logging.getLogger("fedflat.bounds")

FACTS = 1 << 16
"""Bytes for everything in a message but its arrays, and what grows with clients and rounds."""
FRAMES = 16
"""Objects of a message beside the chunks of its arrays: an honest one has at most nine."""
CHUNK = 5_242_880
"""Bytes of an array in one object, as Flower cuts it (FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)."""
TOO_LARGE, DAMAGED, REFUSES = 413, 400, 409
"""Codes of the errors that stand in for a refused reply, and of a client that refuses what the server asks;
Flower's own are below 100."""


ANSWER = 1 << 24
"""Bytes beyond a message that a SuperLink's answer may have: the app's bundle, with the whole roster."""


class Limit(NamedTuple):
    """The most that a message may hold. arrays: bytes of all arrays, unpacked. facts: bytes of everything else."""

    arrays: int
    facts: int

    @property
    def total(self) -> int:
        """Bytes of a whole message."""
        return self.arrays + self.facts

    @property
    def objects(self) -> int:
        """Objects of a message, chunks included."""
        return FRAMES + self.arrays // CHUNK

    @property
    def object(self) -> int:
        """Bytes of one object: a chunk, or the facts."""
        return min(self.total, max(CHUNK, self.facts) + FACTS)

    def names(self, tree: Any) -> list[str]:
        """Return the ids of a message's objects, or raise ``Malformed`` for too many; a repeated one counts again."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        names = [node.object_id for node in islice(iterate_object_tree(tree), self.objects + 1)]
        insist(len(names) <= self.objects, Malformed("size"))
        return list(dict.fromkeys(names))

    def check(self, contents: Mapping[str, bytes]) -> None:
        """Raise ``Malformed`` if objects (id -> bytes) are too many or too long, or would unpack to too much."""
        # A record of tiny entries takes forty times its bytes when it is unpacked; only a chunk takes its own.
        facts = sum(len(content) for content in contents.values() if not content.startswith(b"ArrayChunk "))
        if (
            len(contents) > self.objects
            or facts > self.facts + FACTS
            or sum(map(len, contents.values())) > self.total
            or sum(_unpacked(content, contents, self) for content in contents.values()) > self.total
        ):
            raise Malformed("size")


@dataclass(frozen=True)
class Limits:
    """The limits of a deployment. ask: of the server's messages. reply: of a client's."""

    ask: Limit
    reply: Limit

    def __post_init__(self) -> None:
        insist(min(*self.ask, *self.reply) >= 1, ValueError("limits below one byte"))

    @classmethod
    def of(cls, job: Job) -> Limits:
        """Return the limits that a job's model, method, clients and rounds need."""
        parts, plan, noise = job.parts, job.parts.plan, job.parts.mechanism
        cohort = job.data.clients if plan.trust == "distributed" else 0
        reply = 8 * noise.mechanism.padded if isinstance(noise, SharedDiscreteNoise) else 4 * parts.message_length
        arrays = parts.layout.dimension * (4 * (1 + len(parts.broadcast)) + 1)  # and a mask
        facts = FACTS + 512 * cohort  # keys and boxes of a cohort
        # The ledger's signed history, and everybody's commitments to everybody; FACTS more for heads of arrays.
        return cls(Limit(arrays + FACTS, facts + 256 * plan.rounds + 80 * cohort**2), Limit(reply + FACTS, facts))


def _unpacked(content: bytes, contents: Mapping[str, bytes], limit: Limit) -> int:
    """Return the bytes that an array's chunks come to, as often as they stand in it; 0 for any other object."""
    # Flower's form of an object: its type, its children's ids and its length, a zero byte, the content. Only the head
    # of an array says how often each chunk stands in it, which is what makes ten megabytes four gigabytes.
    head, divider, _ = content[:200_000].partition(b"\0")
    if not head.startswith(b"Array "):
        return 0
    insist(bool(divider) and len(content) - len(head) <= limit.facts, Malformed("size"))
    with turning((ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError), Malformed("form")):
        children = head.decode("ascii").split(" ")[1].split(",")
        array = json.loads(content[len(head) + 1 :])
        size = math.prod(max(int(length), 0) for length in array["shape"])
        unpacked = sum(len(contents[children[place]]) for place in array["arraychunk_ids"])
    insist(size <= limit.arrays, Malformed("shape"))
    return unpacked


def pulled(limit: Limit, tree: Any, pull: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return the objects of a message, held against the limit one by one; ``Malformed`` for too many or too long."""
    contents: dict[str, bytes] = {}
    for name in limit.names(tree):
        contents[name] = pull(name)
        if sum(map(len, contents.values())) > limit.total:
            break
    limit.check(contents)
    return contents


def unpacked(number: str, contents: dict[str, bytes]) -> Any:
    """Return the message of this id, which was held against the limit; ``Malformed`` if it is none."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    with turning(Exception, Malformed("form")):  # whatever a decoder raises on bytes that somebody else chose
        message = inflate_object_from_contents(number, contents)
    message.metadata.__dict__["_message_id"] = number
    return message


def limit_answers(limit: Limit) -> None:
    """Refuse an answer of a SuperLink that is longer than a message or the app's bundle, before it is read."""
    import httpx
    from flwr.supercore.protobuf.client import ProtobufClient

    initialise = ProtobufClient.__init__

    def refuse_long(response: Any) -> None:
        length = response.headers.get("content-length", "")
        if "content-encoding" in response.headers or not length.isdigit() or int(length) > limit.total + ANSWER:
            raise httpx.DecodingError("an answer longer than a message can be", request=response.request)

    def limited(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self._client.event_hooks = {"response": [refuse_long]}

    ProtobufClient.__init__ = limited  # type: ignore[method-assign]


@dataclass
class _Reply:
    """What a SuperLink has of one reply. tree: its objects, as they were declared first. session: Flower's, in which
    they come; length: bytes that came so far."""

    message: Any
    tree: bytes
    session: str = ""
    length: int = 0


class ReplyKeeper:
    """Lets a SuperLink's state keep one reply to a question, of at most the ``limit``, and give it out when it is
    whole; an error of the same node takes the place of any other, and its objects go.

    state: Flower's, in memory; three of its methods are replaced.
    """

    def __init__(self, state: Any, limit: Limit) -> None:
        self.state, self.limit = state, limit
        self._keep, self._put = state.store_message_and_object_tree, state.store_object
        self._give = state.get_message_res
        self._replies: dict[str, _Reply] = {}
        self._lock = threading.RLock()
        state.store_message_and_object_tree, state.store_object = self.declare, self.store
        state.get_message_res = self.complete

    def declare(self, message: Any, tree: Any, session: str) -> tuple[bool, list[str]]:
        """Take a message and the tree of its objects; return whether it is kept, and which objects are wanted."""
        asked = message.metadata.reply_to_message_id
        # Flower's store is used from several threads; a reply must not grow between the look at it and its storage.
        with self._lock:
            if asked and not self._is_honest(message, tree, asked):
                return self._refuse(message)
            stored: tuple[bool, list[str]] = self._keep(message, tree, session)
            if asked and stored[0]:
                self._replies[asked].session = session
            elif asked:
                self._replies.pop(asked)
            return stored

    def _is_honest(self, message: Any, tree: Any, asked: str) -> bool:
        """Return whether a reply's tree is within the limit, its own, and the one that was declared before."""
        questions = self.state.message_ins_store
        self._replies = {number: reply for number, reply in self._replies.items() if number in questions}
        try:
            self.limit.names(tree)
        except Malformed:
            return False
        declared = tree.SerializeToString(deterministic=True)
        reply = self._replies.setdefault(asked, _Reply(message, declared))
        return bool(tree.object_id == message.metadata.message_id) and reply.tree == declared

    def store(self, run_id: int, session: str, object_id: str, content: bytes) -> bool:
        """Take one object's content; return whether it is kept."""
        with self._lock:
            for reply in [one for one in self._replies.values() if session and one.session == session]:
                reply.length += len(content)
                if reply.length > self.limit.total:
                    self._drop(reply)
                    return False
        return bool(session and self._put(run_id, session, object_id, content))

    def _incomplete(self) -> dict[str, _Reply]:
        """Return the replies that have not all arrived, by their questions."""
        # Asked one by one: Flower's other threads change the table, which cannot be walked meanwhile.
        table = self.state._object_push_sessions
        pushes = {number: table.get(reply.session) for number, reply in self._replies.items()}
        return {number: self._replies[number] for number, push in pushes.items() if push and push.pending_object_ids}

    def complete(self, message_ids: set[str], run_id: int) -> Any:
        """Return the replies to some questions whose objects have all arrived: a slow upload holds nobody up."""
        with self._lock:
            pending = self._incomplete().keys()
        return self._give(set(message_ids) - pending, run_id)

    def blame(self, key: bytes) -> None:
        """Refuse whatever the node of a key has declared or was asked: the door did not read what it sent."""
        from flwr.app import Message, RecordDict

        node = self.state.get_node_id_by_public_key(key)
        with self._lock:
            for reply in self._incomplete().values():
                if reply.message.metadata.src_node_id == node:
                    self._drop(reply)
            for number, question in list(self.state.message_ins_store.items()):
                if question.metadata.dst_node_id == node and number not in self.state.message_ins_id_to_message_res_id:
                    self._refuse(Message(RecordDict(), reply_to=question))

    def _drop(self, reply: _Reply) -> None:
        """Refuse a reply of which a part is kept; what is there of it goes."""
        self.state._cleanup_push_session(reply.session, cleanup_messages=True)
        reply.session = ""  # what still comes of it is Flower's to refuse, without another word
        self._refuse(reply.message)

    def _refuse(self, message: Any) -> tuple[bool, list[str]]:
        log.warning(
            "a reply was refused before it was kept: more than %d objects or %d bytes, or another than was declared",
            self.limit.objects, self.limit.total,
        )  # fmt: skip
        error = refusal(message.metadata, "size")
        # Flower sets an id when a message is sent; this one is made where it would have arrived.
        error.metadata.__dict__["_message_id"] = error.object_id
        with self.state.lock:
            if self.state.store_message_res(error) is not None:
                self.state._store_generated_message(error)
        return False, []


def refusal(metadata: Any, reason: str) -> Any:
    """Return the error that stands in for a refused reply, as from its sender. metadata: the reply's."""
    from flwr.app import Error
    from flwr.app.message import make_message

    return make_message(copy(metadata), error=Error(TOO_LARGE if reason == "size" else DAMAGED, reason))
