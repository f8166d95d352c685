"""Messages that are small on the wire and large in memory, replies that never end: refused from what they declare.

Each limit has a twin without it, in which the attack succeeds, on a scale that hurts nobody.
"""

import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from fork_server import CONTEXT
from stand_in import be_a_task, deployed, objects_of, small

from fedflat.core.checks import InputError
from fedflat.federation.bounds import TOO_LARGE, Limit, ReplyKeeper
from fedflat.federation.project import PACKAGE
from fedflat.federation.replies import PendingReply, ReplyTracker
from fedflat.federation.task import Task
from fedflat.federation.transport import limit_replies
from fedflat.federation.wire import Answer, Malformed, read_answer, write_answer

D = 3000
LIMIT = Limit(4 * D + 1000, 4000)


@pytest.fixture(autouse=True)
def a_task_of_its_own() -> None:
    be_a_task()


def question(node: int = 7) -> Any:
    asked = Message(RecordDict(), node, "train", group_id="0")
    asked.metadata.__dict__["_message_id"] = asked.object_id
    return asked


def answer_to(asked: Any, update: np.ndarray | None = None) -> Any:
    update = np.linspace(-1, 1, D, dtype=np.float32) if update is None else update
    reply = Message(write_answer(Answer(0, b"n" * 16, update)), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def repeated(asked: Any, times: int, chunk: int = 1 << 20) -> tuple[Any, dict[str, bytes]]:
    """A reply whose array is one chunk of zeros, many times: stored once, unpacked to all of it."""
    reply = answer_to(asked)
    array, one = reply.content["arrays"]["update"], ArrayChunk(memoryview(bytes(chunk)))
    array.data, array.shape = b"", (1,)
    array.__dict__["_chunks"] = [(one.object_id, one)] * times
    return objects_of(reply)


def unpack(bounded: bool, times: int, grown: Any) -> None:
    """Send by how many MiB a process grows that unpacks the attack; the twin does it without a limit."""
    be_a_task()
    tree, contents = repeated(question(), times)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if bounded:
            LIMIT.check(contents)
        inflate_object_from_contents(tree.object_id, contents)
        said = ""
    except Malformed as fault:
        said = str(fault)
    grown.send(((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, said))


@pytest.mark.parametrize("bounded", [True, False], ids=["bound", "twin without it"])
def test_identical_chunks_are_counted_before_they_are_unpacked(bounded: bool) -> None:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=unpack, args=(bounded, 300, there))
    process.start()
    grown, said = here.recv()
    process.join()
    assert (grown < 10, said) == (True, "size") if bounded else grown > 250


def test_a_message_is_held_against_what_it_declares() -> None:
    tree, contents = objects_of(answer_to(question()))
    LIMIT.check(contents)
    assert set(LIMIT.names(tree)) == set(contents)
    for limit in (Limit(D, 4000), Limit(4 * D, 10)):
        with pytest.raises(Malformed, match="size"):
            limit.check(contents)
    wide = SimpleNamespace(object_id="x", children=[SimpleNamespace(object_id=str(i), children=[]) for i in range(99)])
    with pytest.raises(Malformed, match="size"):
        LIMIT.names(wide)
    with pytest.raises(Malformed, match="size"):
        LIMIT.check({str(number): b"" for number in range(99)})
    bodies = ['{"arraychunk_ids":[0,1],"shape":[1]}', '{"arraychunk_ids":3,"shape":[1]}', '{"shape":[1]}', "[" * 3000]
    bodies += ['{"arraychunk_ids":[0],"shape":"x"}', "é", '{"arraychunk_ids":[0],"shape":[100000,100000]}']
    for body in bodies:
        with pytest.raises(Malformed):
            LIMIT.check({"a": b"Array b 0\0" + body.encode(), "b": b"ArrayChunk  0\0"})
    with pytest.raises(Malformed):
        LIMIT.check({"a": b"Array " + b"b" * 5000})
    roomy, tiny = Limit(1 << 23, 4000), bytes(200_000)
    roomy.check({"a": b"ArrayChunk  200000\0" + tiny})
    with pytest.raises(Malformed, match="size"):  # within all bytes, but forty times as long when it is unpacked
        roomy.check({"a": b"ConfigRecord  200000\0" + tiny})


def test_every_message_of_a_deployment_fits_its_limits(tmp_path: Path) -> None:
    """The grid of these tests holds every honest message against them; here: they are read back, and none is spare."""
    task, _ = deployed(tmp_path, small())
    file = tmp_path / "app" / PACKAGE / "task.json"
    head, _, held = file.read_text().partition('"bytes": ')
    assert "".join(held.split()) == f'{{"ask":{[*task.limits.ask]},"reply":{[*task.limits.reply]}}}}}'.replace(" ", "")
    wrong = ("{}", '{"ask": [1, 1]}', '{"ask": [1, 1], "reply": [0, 1]}', '{"ask": 3, "reply": 4}', '{"ask": ["x", 1]}')
    for rest in (f'"before": {held}', *(f'"bytes": {limits}}}' for limits in wrong)):  # first a run of 0.2, in mid-run
        file.write_text(head + rest)
        with pytest.raises(InputError, match=r"found no task .*another version is ended with that"):
            Task.read(file.parent)


class Runtime:
    """The SuperLink as a ServerApp sees it: replies, and those of their objects that have arrived."""

    def __init__(self, *replies: tuple[Any, Any, dict[str, bytes]]) -> None:
        self.replies = list(replies)
        self.objects = {name: content for _, _, found in replies for name, content in found.items()}
        self.pulled: list[str] = []
        self.confirmed: list[str] = []

    def PullMessages(self, request: Any) -> Any:
        given, self.replies = self.replies, []
        bare = [message_to_proto(message) for message, _, _ in given]
        return PullAppMessagesResponse(messages_list=bare, message_object_trees=[tree for _, tree, _ in given])

    def PullObject(self, request: Any) -> Any:
        self.pulled.append(request.object_id)
        found = self.objects.get(request.object_id)
        return PullObjectResponse(object_found=True, object_available=found is not None, object_content=found or b"")

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


def inbox(*replies: tuple[Any, Any, dict[str, bytes]]) -> tuple[Any, Runtime]:
    link = Runtime(*replies)
    return limit_replies(SimpleNamespace(_runtime_client=link, node=Node(node_id=1)), LIMIT), link


def sent(reply: Any, contents: dict[str, bytes] | None = None, tree: Any = None) -> tuple[Any, Any, dict[str, bytes]]:
    own_tree, own = objects_of(reply)
    return remove_content_from_message(reply), own_tree if tree is None else tree, own if contents is None else contents


def test_a_hostile_reply_is_its_sender_s_alone_and_the_others_count() -> None:
    """Too many objects, too large, not to be decoded, a sender's name that is not its own: three are refused and named,
    and the honest answers beside them count."""
    asked = [question(node) for node in range(1, 6)]
    updates = [np.full(D, node, dtype=np.float32) for node in range(5)]
    honest, large, broken, liar, many = map(answer_to, asked, updates)
    liar.metadata.__dict__["_src_node_id"] = 1
    liar.metadata.__dict__["_message_id"] = liar.object_id
    tree, zeros = repeated(asked[1], 300)
    large.metadata.__dict__["_message_id"] = tree.object_id
    damaged = dict(objects_of(broken)[1])
    damaged[broken.object_id] = b"Message  0\0"
    wide = objects_of(many)[0]
    for number in range(99):
        wide.children.add().object_id = f"{number:064x}"
    mail, link = inbox(sent(large, zeros, tree), sent(broken, damaged), sent(many, tree=wide), sent(honest), sent(liar))
    link.replies[-1][0].metadata.__dict__["_src_node_id"] = 4  # as the SuperLink knows it
    tracker = ReplyTracker(0, lambda content: read_answer(content, D))
    for client, question_ in enumerate(asked, 1):
        tracker.sent(question_.metadata.message_id, type(PendingReply(client, client))(client, client, b"n" * 16))
    taken = []
    for _ in range(2):
        for reply in mail.pull_messages(list(tracker.waiting)):
            found = tracker.take(reply)
            taken += [found[0]] if found else []
    assert taken == [1, 4] and tracker.blamed == {2: "size", 3: "form", 5: "size"} and tracker.waiting == ()
    assert len(link.confirmed) == 5  # whatever it was, the SuperLink keeps none of it
    assert len(link.pulled) < 60 and not {f"{number:064x}" for number in range(99)} & set(link.pulled)


def states() -> Any:
    """A real state of Flower's SuperLink, in memory."""
    store = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    return LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), store).state()


@pytest.mark.parametrize("bounded", [True, False], ids=["bound", "twin without it"])
def test_a_superlink_keeps_one_reply_of_an_honest_size_to_a_question(bounded: bool) -> None:
    """Too many objects, more bytes than declared, another tree under one name, a second reply: an error of the same
    node takes their place, which the ServerApp reads, and their objects are gone. The twin keeps all of it."""
    state = states()
    node = state.create_node("", "operator", b"key", heartbeat_interval=0, name="client-0")
    assert state.activate_node(node, 30.0)
    run = state.create_run("a", "1", "0" * 64, {}, "@none/default", None, "", "flwr-serverapp")
    state.finish_task = lambda *_, **__: True
    if bounded:
        keeper = ReplyKeeper(state, LIMIT)

    def put(message: Any, tree: Any, contents: dict[str, bytes]) -> list[bool]:
        session = state.start_session(run)
        _, wanted = state.store_message_and_object_tree(message, tree, session)
        return [state.store_object(run, session, name, contents[name]) for name in wanted]

    def asked() -> Any:
        made = question(node)
        made.metadata.__dict__.update({"_run_id": run, "_src_node_id": 1, "_group_id": str(time.monotonic())})
        made.metadata.__dict__["_message_id"] = made.object_id
        tree, contents = objects_of(made)
        assert all(put(made, tree, contents))
        return made

    honest, large, wide, slow, rude = (asked() for _ in range(5))
    good = answer_to(honest)
    assert all(put(*sent(good)[:2], objects_of(good)[1]))
    kept = len(state.object_store)
    for again in (good, answer_to(honest, np.ones(D, dtype=np.float32))):  # sent twice; then another one
        put(*sent(again)[:2], objects_of(again)[1])
    noise = answer_to(large, np.random.default_rng(0).standard_normal(200_000).astype(np.float32))
    stored = put(*sent(noise)[:2], objects_of(noise)[1])
    many = answer_to(wide)
    tree = objects_of(many)[0]
    for number in range(99):
        tree.children.add().object_id = f"{number:064x}"
    put(sent(many)[0], tree, {**objects_of(many)[1], **{f"{n:064x}": b"" for n in range(99)}})
    after = len(state.object_store)
    bare, tree, contents = sent(answer_to(slow, np.full(D, 3.0, dtype=np.float32)))
    session = state.start_session(run)
    *first, last = state.store_message_and_object_tree(bare, tree, session)[1]
    assert all(state.store_object(run, session, name, contents[name]) for name in first)
    early = state.get_message_res({slow.metadata.message_id}, run)
    assert (early == []) is bounded  # the twin gives out half a reply, and the ServerApp waits for the rest of it
    assert state.store_object(run, session, last, contents[last])
    if bounded:
        # Other threads add sessions at any time: who walks the table meets one that changes.
        walked = mock.Mock(side_effect=RuntimeError("dictionary changed size during iteration"))
        table = type("Table", (dict,), {"__iter__": walked, "items": walked, "values": walked, "keys": walked})
        state._object_push_sessions = table(state._object_push_sessions)
        keeper.blame(b"key")  # the door read nothing of a request that was too long
        assert [m.has_error() for m in state.get_message_res({slow.metadata.message_id}, run)] == [False]
        assert [m.error.code for m in state.get_message_res({rude.metadata.message_id}, run)] == [TOO_LARGE]
    replies = state.get_message_res({m.metadata.message_id for m in (honest, large, wide)}, run)
    codes = {m.metadata.reply_to_message_id: m.has_error() and m.error.code for m in replies}
    assert codes[honest.metadata.message_id] is False
    if not bounded:
        assert all(stored) and after > kept + 90
        return
    assert codes[large.metadata.message_id] == codes[wide.metadata.message_id] == TOO_LARGE
    assert not all(stored) and after == kept + 2  # the two errors
    assert not state.store_object(run, "", good.object_id, b"")  # nothing without a session
