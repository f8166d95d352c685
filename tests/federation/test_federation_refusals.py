"""What a client may send, and what becomes of it: every wrong reply is refused and counted, none moves the sum."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from stand_in import deployed, final_shared, grid_of, honest, rows, settings, small

from fedflat.core.checks import RunError
from fedflat.core.types import Broadcast
from fedflat.federation import replies as replies_module
from fedflat.federation import server, wire
from fedflat.federation.replies import DATA_FAULTS, PROTOCOL_FAULTS, PendingReply, ReplyTracker, loggable
from fedflat.federation.server import serve
from fedflat.federation.wire import Answer, Malformed
from fedflat.methods.noise import ClientNoise
from fedflat.records import keys

D = 5


def reply(answer: Any, to: str = "m0", node: int = 7) -> Any:
    """What the tracker reads of a Flower message."""
    metadata = SimpleNamespace(reply_to_message_id=to, src_node_id=node)
    return SimpleNamespace(metadata=metadata, content=answer, has_content=lambda: True, has_error=lambda: False)


def tracker_with_one(round: int = 3) -> tuple[ReplyTracker, PendingReply]:
    tracker = ReplyTracker(round, lambda content: wire.read_answer(content, D))
    pending = PendingReply(client=2, node=7)
    tracker.sent("m0", pending)
    return tracker, pending


def answer(pending: PendingReply, **changes: Any) -> Any:
    usual = {"round": 3, "nonce": pending.nonce, "update": np.ones(D, np.float32), "examples": 0}
    return wire.write_answer(Answer(**{**usual, **changes}))


def with_facts(content: Any, **changes: Any) -> Any:
    facts = {k: v for k, v in {**content["facts"], **changes}.items() if v is not None}
    return RecordDict({"arrays": content["arrays"], "facts": ConfigRecord(facts)})


def with_array(content: Any, array: Any, name: str = "update") -> Any:
    return RecordDict({"arrays": ArrayRecord({name: array}), "facts": content["facts"]})


def lying(shape: tuple[int, ...], data: bytes, dtype: str = "<f4", stype: str = wire.RAW) -> Array:
    return Array(dtype, shape, stype, data)


ONES = np.ones(D, np.float32)
BAD_CONTENT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "wrong shape": ("shape", lambda c: with_array(c, wire.pack(np.ones(D + 1, np.float32)))),
    "two axes": ("shape", lambda c: with_array(c, wire.pack(np.ones((1, D), np.float32)))),
    "empty": ("shape", lambda c: with_array(c, wire.pack(np.ones(0, np.float32)))),
    "wrong dtype": ("dtype", lambda c: with_array(c, wire.pack(np.ones(D, np.float64)))),
    "whole numbers": ("dtype", lambda c: with_array(c, wire.pack(np.ones(D, np.int32)))),
    "objects": ("dtype", lambda c: with_array(c, lying((D,), wire.pack(ONES).data, "|O8"))),
    "other serialisation": ("dtype", lambda c: with_array(c, lying((D,), wire.pack(ONES).data, stype="pickle"))),
    "claims terabytes": ("shape", lambda c: with_array(c, lying((10**12,), wire.pack(ONES).data))),
    "negative": ("shape", lambda c: with_array(c, lying((-D,), wire.pack(ONES).data))),
    "big-endian": ("dtype", lambda c: with_array(c, lying((D,), wire.pack(ONES).data, ">f4"))),
    "cut off": ("shape", lambda c: with_array(c, lying((D,), wire.pack(ONES).data[:-1]))),
    "longer": ("shape", lambda c: with_array(c, lying((D,), wire.pack(ONES).data + b"more"))),
    "NaN": ("not finite", lambda c: with_array(c, wire.pack(np.full(D, np.nan, np.float32)))),
    "inf": ("not finite", lambda c: with_array(c, wire.pack(np.array([1, 2, np.inf, 3, 4], np.float32)))),
    "other name": ("form", lambda c: with_array(c, wire.pack(ONES), "weights")),
    "no facts": ("form", lambda c: RecordDict({"arrays": c["arrays"]})),
    "no arrays": ("form", lambda c: RecordDict({"facts": c["facts"]})),
    "another record": ("form", lambda c: RecordDict({**c, "extra": ConfigRecord({"x": 1})})),
    "another protocol": ("protocol", lambda c: with_facts(c, protocol=wire.PROTOCOL + 1)),
    "no nonce": ("form", lambda c: with_facts(c, nonce=None)),
    "short nonce": ("form", lambda c: with_facts(c, nonce=b"x")),
    "nonce as text": ("form", lambda c: with_facts(c, nonce="x" * 16)),
    "another nonce": ("replayed", lambda c: with_facts(c, nonce=b"x" * 16)),
    "earlier round": ("late", lambda c: with_facts(c, round=2)),
    "later round": ("early", lambda c: with_facts(c, round=4)),
    "negative round": ("form", lambda c: with_facts(c, round=-3)),
    "round as float": ("form", lambda c: with_facts(c, round=3.0)),
    "negative examples": ("form", lambda c: with_facts(c, examples=-1)),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_wrong_content_is_refused_and_uses_up_the_question(name: str) -> None:
    reason, spoil = BAD_CONTENT[name]
    tracker, pending = tracker_with_one()
    good = answer(pending)
    assert tracker.take(reply(spoil(good))) is None
    assert tracker.refused == Counter({reason: 1})
    assert tracker.waiting == ()
    assert tracker.take(reply(good)) is None  # no second try
    assert tracker.refused["duplicate"] == 1


def test_a_good_answer_counts_once() -> None:
    tracker, pending = tracker_with_one()
    found = tracker.take(reply(answer(pending)))
    assert found is not None and found[0] == 2 and np.array_equal(found[1].update, ONES)
    assert tracker.take(reply(answer(pending))) is None and tracker.refused == Counter({"duplicate": 1})


def test_unasked_and_foreign_replies_do_not_use_up_a_question() -> None:
    tracker, pending = tracker_with_one()
    assert tracker.take(reply(answer(pending), to="m9")) is None
    assert tracker.take(reply(answer(pending), node=8)) is None
    assert tracker.refused == Counter({"unasked": 1, "sender": 1})
    assert tracker.take(reply(answer(pending))) is not None


def test_missing_and_late_are_counted() -> None:
    tracker, pending = tracker_with_one()
    assert tracker.close() == ("m0",)
    assert tracker.take(reply(answer(pending))) is None
    assert tracker.refused == Counter({"missing": 1, "duplicate": 1})


def test_the_superlinks_word_that_a_client_is_away_is_no_reply_and_counts_nothing() -> None:
    """Flower answers in a dead node's place, at every poll, as node 1: nothing of that may be logged or be a fault."""
    tracker, pending = tracker_with_one()
    away = reply(None, node=1)
    away.has_error, away.has_content = lambda: True, lambda: False
    for _ in range(3):
        assert tracker.take(away) is None
    assert tracker.refused == Counter() and tracker.waiting == ("m0",)
    assert tracker.take(reply(answer(pending))) is not None  # it came back in time
    tracker.late([away, reply(answer(pending))])
    assert tracker.refused == Counter({"too late": 1}) and loggable(tracker.refused) == {}


def test_an_error_reply_is_a_failure_without_its_text() -> None:
    tracker, _ = tracker_with_one()
    failed = reply(None)
    failed.has_error, failed.error = lambda: True, SimpleNamespace(code=7)  # of a client whose app is another one
    assert tracker.take(failed) is None and tracker.refused == Counter({"refuses": 1})


def test_every_reason_is_either_loggable_or_private() -> None:
    assert {reason for reason, _ in BAD_CONTENT.values()} <= {*PROTOCOL_FAULTS, *DATA_FAULTS}
    assert set(loggable(Counter(dict.fromkeys((*PROTOCOL_FAULTS, *DATA_FAULTS), 1)))) == set(PROTOCOL_FAULTS)


def test_broken_twin_without_nonces_accepts_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that finds a replay, without what it checks."""
    monkeypatch.setattr(replies_module.hmac, "compare_digest", lambda a, b: True)
    tracker, pending = tracker_with_one()
    assert tracker.take(reply(with_facts(answer(pending), nonce=b"x" * 16))) is not None


def test_nonces_are_fresh() -> None:
    assert len({PendingReply(i, i).nonce for i in range(1000)}) == 1000


def hostile(kind: str, client: Any) -> Callable[[Any], Any]:
    """A client that sends something else than it should, as Flower messages."""
    remembered: list[Any] = []

    def handle(message: Any) -> Any:
        facts = message.content["facts"]
        size = client.job.parts.layout.dimension
        mine = lambda update: Message(  # noqa: E731
            wire.write_answer(Answer(facts["round"], facts["nonce"], update)), reply_to=message
        )
        if kind == "silent":
            return None
        if kind == "huge":
            return mine(np.full(size, 1e30, np.float32))
        if kind == "nan":
            return mine(np.full(size, np.nan, np.float32))
        if kind == "failed":
            return Message(Error(code=0, reason="secret 42"), reply_to=message)
        if kind == "duplicate":
            one = honest(client)(message)
            return [one, one]
        if kind == "replay":
            remembered.append(honest(client)(message).content)
            return Message(remembered[0], reply_to=message)
        raise AssertionError(kind)

    return handle


def run_with(folder: Path, kind: str, rounds: int = 1) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The movement of w with client 0 hostile, and the operator's counts."""
    task, clients = deployed(folder, small(rounds=rounds))
    grid = grid_of(task, clients)
    if kind != "honest":
        grid.handlers[0] = hostile(kind, clients[0])
    serve(grid, task, settings(folder))
    moved = final_shared(folder / "run") - clients[1].job.initial_weights
    operator = next((keys.folder().parent / "operator").glob(f"{server.run_id(folder / 'run')}.jsonl"))
    return moved, rows(operator)


def test_a_missing_reply_is_a_zero_vector_and_the_denominator_stays(tmp_path: Path) -> None:
    missing, counts = run_with(tmp_path / "a", "silent")
    assert counts == [{"round": 0, "missing": 1}]
    for kind, reason in {"nan": "not finite", "failed": "failed"}.items():
        moved, counts = run_with(tmp_path / kind, kind)
        assert torch.equal(moved, missing) and counts == [{"round": 0, reason: 1}]
    _, clients = deployed(tmp_path / "b", small(rounds=1))
    total = torch.zeros_like(missing, dtype=torch.float64)
    first = clients[0].job.initial_weights
    for client in clients[1:]:
        total += client.update(Broadcast(0, first, 0.1, 1.0))[0].double()
    torch.testing.assert_close(missing.double(), total / 4, rtol=1e-4, atol=1e-7)  # m = 4, though three answered


def test_whatever_a_client_sends_moves_the_sum_by_no_more_than_the_clip(tmp_path: Path) -> None:
    missing, _ = run_with(tmp_path / "a", "silent")
    huge, counts = run_with(tmp_path / "b", "huge")
    assert (huge - missing).norm() * 4 <= 0.1 * (1 + 1e-5)
    assert counts == [{"round": 0}]


def test_broken_twin_without_the_servers_clip_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, _ = run_with(tmp_path / "a", "silent")
    job_of = server.job_of

    def unclipped(task: Any, given: Any) -> Any:
        job = job_of(task, given)
        job.parts = replace(job.parts, mechanism=ClientNoise())
        return job

    monkeypatch.setattr(server, "job_of", unclipped)
    huge, _ = run_with(tmp_path / "b", "huge")
    assert not (huge - missing).norm() * 4 <= 0.1 * (1 + 1e-5)


def test_duplicates_and_replays_add_nothing(tmp_path: Path) -> None:
    honest_move, _ = run_with(tmp_path / "a", "honest")
    twice, counts = run_with(tmp_path / "b", "duplicate")
    torch.testing.assert_close(twice, honest_move)
    assert counts == [{"round": 0, "duplicate": 1}]
    _, counts = run_with(tmp_path / "c", "replay", rounds=2)
    assert counts == [{"round": 0}, {"round": 1, "late": 1}]  # last round's content under this round's question


def test_the_log_says_no_more_than_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fedflat")
    for kind in ("nan", "failed", "silent"):
        run_with(tmp_path / kind, kind)
    assert "refused" not in caplog.text and "secret" not in caplog.text
    run_with(tmp_path / "replay", "replay", rounds=2)
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert lines == ["round 1: refused 1 (late)"]


def test_nothing_private_lies_in_the_runs_folder(tmp_path: Path) -> None:
    run_with(tmp_path / "a", "silent")
    folder = tmp_path / "a" / "run"
    assert not (folder / "private/private.jsonl").exists()
    shown = " ".join(path.read_text() for path in folder.glob("*.json*"))
    assert "missing" not in json.dumps(rows(folder / "metrics.jsonl"))
    assert "train_loss" not in shown and "update_norm" not in shown
    facts = json.loads((folder / "privacy.json").read_text())
    assert facts["noise_source"].startswith("256 bits") and facts["facts"]["simulation"] is False
    assert "roster" in facts["facts"]["check_ins"]
    assert list(keys.folder().iterdir()) == []  # deleted at the end


def test_an_ask_survives_the_wire_and_a_bad_one_is_refused() -> None:
    shared = torch.arange(D, dtype=torch.float32)
    mask = torch.tensor([True, False, True, True, False])
    broadcast = Broadcast(3, shared, 0.1, 0.998**3, vectors={"direction": shared * 2}, mask=mask, draw=9)

    def asked(broadcast: Broadcast) -> Any:
        return wire.write_request(wire.write_broadcast(broadcast), 1, b"n" * 16, "pin")

    ask = asked(broadcast)
    found = wire.read_broadcast(ask, D, ["direction"])
    assert [ask["facts"][name] for name in ("client", "nonce", "pin")] == [1, b"n" * 16, "pin"]
    for name in ("round", "clip", "rate", "draw"):
        assert getattr(found, name) == getattr(broadcast, name)
    for name in ("shared", "mask"):
        assert torch.equal(getattr(found, name), getattr(broadcast, name))
    assert torch.equal(found.vectors["direction"], shared * 2)
    for names in ([], ["control"], ["direction", "control"]):
        with pytest.raises(Malformed):
            wire.read_broadcast(ask, D, names)
    assert wire.read_broadcast(asked(Broadcast(0, shared, float("inf"), 1.0)), D).clip == float("inf")
    for bad in (float("nan"), -1.0, 0.0, 1, True, "0x1p+0", b"1", None):
        with pytest.raises(Malformed):
            wire.read_broadcast(with_facts(ask, clip=bad), D, ["direction"])
    with pytest.raises(Malformed):
        wire.read_broadcast(asked(Broadcast(0, shared * torch.nan, 0.1, 1.0)), D)
    with pytest.raises(Malformed):
        wire.read_broadcast(ask, D + 1, ["direction"])


def test_a_grid_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    task, clients = deployed(tmp_path / "fed", small(rounds=1))
    grid = grid_of(task, clients)

    def offline(numbers: Any) -> Any:
        raise ConnectionError("the SuperLink is gone")

    grid.pull_messages = offline  # type: ignore[method-assign]
    with pytest.raises(RunError, match="SuperLink is gone"):
        serve(grid, task, settings(tmp_path / "fed", out=tmp_path / "other"))


@limits(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    facts=st.dictionaries(
        st.sampled_from(["protocol", "round", "nonce", "examples", "other"]),
        st.one_of(
            st.integers(-(2**40), 2**40),
            st.floats(),
            st.sampled_from(["", "x" * 16]),
            st.binary(max_size=20),
            st.booleans(),
        ),
    ),
    dtype=st.sampled_from(["float32", "float64", "object", "", "<f4"]),
    shape=st.lists(st.integers(-3, 10**12), max_size=3),
    stype=st.sampled_from(["numpy.ndarray", "pickle", wire.RAW]),
    data=st.one_of(st.binary(max_size=300), st.just(wire.pack(ONES).data)),
)
def test_whatever_is_sent_the_desk_only_refuses(
    facts: dict[str, Any], dtype: str, shape: list[int], stype: str, data: bytes
) -> None:
    tracker, pending = tracker_with_one()
    content = with_array(answer(pending), lying(tuple(shape), data, dtype, stype))
    assert tracker.take(reply(with_facts(content, **facts))) is None or shape == [D]
    assert sum(tracker.refused.values()) <= 1
