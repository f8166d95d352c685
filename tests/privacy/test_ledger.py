"""The ledger never shows less than was released: crashes, edits, two writers, full disks, resumes."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedflat.core.checks import InputError, RunError
from fedflat.privacy import ledger as module
from fedflat.privacy.ledger import Ledger, LedgerError, event, extra_rounds, read, run_of, seal


def payload(round_index: int, **more: object) -> dict[str, object]:
    return {"round": round_index, "kind": "poisson-gaussian", "sampling_probability": 0.1, "noise": 0.95, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def filled(path: Path, rounds: int = 3, key: str | None = None) -> list[dict[str, object]]:
    with Ledger.open(path, key_id=key) as ledger:
        for index in range(rounds):
            ledger.append(payload(index))
        return ledger.entries


def test_lines_are_numbered_chained_and_on_disk_before_append_returns(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for index in range(3):
            line = ledger.append(payload(index))
            assert json.loads(path.read_bytes().splitlines()[index]) == line
            assert line["line"] == index
        assert ledger.rounds_recorded() == {0, 1, 2}
    assert read(path) == ledger.entries
    assert path.read_bytes().endswith(b"\n") and not (path.parent / "ledger.torn").exists()


def test_numbers_come_back_exactly_and_an_infinite_one_is_null(path: Path) -> None:
    numbers = {"third": 1 / 3, "tiny": 5e-324, "single": np.float32(0.1), "whole": np.int64(3), "none": np.inf}
    with Ledger.open(path) as ledger:
        ledger.append({"round": np.int64(0), "parts": (1.5, {"flag": True}), **numbers})
    line = read(path)[0]
    assert line["third"] == 1 / 3 and line["tiny"] == 5e-324 and line["single"] == float(np.float32(0.1))
    assert line["whole"] == 3 and line["none"] is None and line["parts"] == [1.5, {"flag": True}]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"round": 0, "x": float("nan")}, "ledger event.x: found nan; allowed: a number"),
        ({"round": 0, "x": -np.inf}, "ledger event.x: found -inf"),
        ({"round": 0, "x": np.zeros(2)}, "ledger event.x: found ndarray"),
        ({"round": 0, "line": 7}, "ledger event: found line; allowed: names other than"),
        ({"round": 0, "attempt": 2}, "found attempt"),
        ({"kind": "gaussian"}, "ledger event.round: found None; allowed: a whole number"),
    ],
)
def test_a_payload_that_cannot_be_kept_exactly_is_refused(path: Path, bad: dict[str, object], sentence: str) -> None:
    with Ledger.open(path) as ledger:
        with pytest.raises(InputError, match=sentence):
            ledger.append(bad)
        assert ledger.entries == [] and path.read_bytes() == b""


def test_a_crash_at_any_byte_of_the_last_line_is_healed(path: Path) -> None:
    entries = filled(path, key="a")
    whole = path.read_bytes()
    start = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for cut in range(start, len(whole) + 1):
        path.write_bytes(whole[:cut])
        aside = path.parent / "ledger.torn"
        aside.unlink(missing_ok=True)
        torn = start < cut < len(whole) - 1
        assert read(path) == entries[: 2 if cut < len(whole) - 1 else 3]
        assert path.read_bytes() == whole[:cut]  # reading changes nothing
        with Ledger.open(path, key_id="a") as ledger:
            assert len(ledger.notes) == torn
            assert (aside.read_bytes() == whole[start:cut] + b"\n") if torn else not aside.exists()
            if torn:
                assert "line 2" in ledger.notes[0] and "had not been released" in ledger.notes[0]
            ledger.append(payload(2))  # the round is run again with the same key
        assert path.read_bytes() == whole


def test_zero_bytes_after_a_power_cut_are_torn(path: Path) -> None:
    entries = filled(path)
    with path.open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    assert read(path) == entries
    with Ledger.open(path) as ledger:
        assert ledger.entries == entries and "torn" in ledger.notes[0]
    assert (path.parent / "ledger.torn").read_bytes() == b"\0" * 40 + b"\n"


def test_every_edited_byte_is_found(path: Path) -> None:
    filled(path, 2)
    whole = path.read_bytes()
    for position in range(whole.index(b"\n"), len(whole) - 1):
        for flip in (1, 32):
            edited = bytearray(whole)
            edited[position] ^= flip
            path.write_bytes(bytes(edited))
            with pytest.raises(LedgerError, match=r"ledger.jsonl line [01]: found .*; allowed: "):
                read(path)


def resealed(line: bytes) -> bytes:
    """A forger who recomputes the line's own checksum breaks the next one's link."""
    one = json.loads(line)
    return json.dumps(seal({**event(one), "noise": 9.5}, 1, one["previous"]), separators=(",", ":")).encode()


EDITS: dict[str, tuple[Callable[[bytes, bytes], list[bytes]], int, str]] = {
    "digit": (lambda a, b: [a, b.replace(b"0.95", b"0.96")], 1, "'checksum'"),
    "swapped": (lambda a, b: [b, a], 0, "event number 1"),
    "dropped": (lambda a, b: [a], 1, "event number 2"),
    "doubled": (lambda a, b: [a, b, b], 2, "event number 1"),
    "resealed": (lambda a, b: [a, resealed(b)], 2, "'previous'"),
    "spaced": (lambda a, b: [a, json.dumps(json.loads(b)).encode()], 1, "not a ledger line"),
    "infinite": (lambda a, b: [a, b.replace(b"0.95", b"1e999")], 1, "not a ledger line"),
    "list": (lambda a, b: [a, b"[1]"], 1, "not a ledger line"),
    "deep": (lambda a, b: [a, b"[" * 100_000], 1, "not a ledger line"),
    "blank": (lambda a, b: [a, b""], 1, "not a ledger line"),
}
"""What is done to the first two lines of four; the line that is named, and as what."""


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_moved_or_missing_line_is_named(path: Path, kind: str) -> None:
    edit, line, found = EDITS[kind]
    filled(path, 4)
    first, second, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*edit(first, second), *others]) + b"\n")
    before = path.read_bytes()
    for action in (lambda: read(path), lambda: Ledger.open(path)):
        with pytest.raises(LedgerError, match=rf"ledger.jsonl line {line}: found .*{found}"):
            action()
    assert path.read_bytes() == before
    Ledger.open(path.parent / "other" / "ledger.jsonl").close()  # and the refused open kept no lock
    with pytest.raises(LedgerError):
        Ledger.open(path)


def test_resuming_with_the_key_writes_no_event_twice_and_without_one_every_event(path: Path) -> None:
    filled(path, key="a")
    before = path.read_bytes()
    with Ledger.open(path, key_id="a") as ledger:
        assert ledger.append(payload(2))["line"] == 2
        assert path.read_bytes() == before
        assert ledger.append(payload(2))["line"] == 3  # a second equal event of the running round is charged
        assert ledger.append(payload(3, clip=0.2))["line"] == 4
    with Ledger.open(path) as ledger:
        assert [ledger.append(payload(0))["line"] for _ in range(2)] == [5, 6]
    with Ledger.open(path) as ledger:
        assert ledger.append(payload(0))["line"] == 7  # nothing tells it from another release


def test_equal_events_of_one_running_round_are_all_charged(path: Path) -> None:
    with Ledger.open(path, key_id="a") as ledger:
        assert [ledger.append(payload(0))["line"] for _ in range(3)] == [0, 1, 2]
    with Ledger.open(path, key_id="a") as ledger:
        assert [ledger.append(payload(0))["line"] for _ in range(4)] == [0, 1, 2, 3]


def test_resuming_without_the_key_charges_the_open_round_again(path: Path) -> None:
    filled(path)
    with Ledger.open(path) as ledger:
        again = ledger.charge_again("the noise key is gone", round=2)
        assert [(line["round"], line["attempt"], line["reason"]) for line in again] == [(2, 2, "the noise key is gone")]
        assert event(again[0]) == payload(2)
        assert ledger.append(payload(2)) == again[0]
        ledger.append(payload(3))
    assert [line["round"] for line in read(path)] == [0, 1, 2, 2, 3]
    with Ledger.open(path) as ledger:
        for round, attempt in ((2, 3), (3, 2)):
            (again,) = ledger.charge_again("once more", round=round)
            assert (again["round"], again["attempt"]) == (round, attempt)


def test_an_attempt_is_matched_once(path: Path) -> None:
    filled(path, 1, "a")
    with Ledger.open(path, key_id="b") as ledger:
        ledger.charge_again("the noise key is gone", round=0)
    with Ledger.open(path, key_id="b") as ledger:  # one event of the second attempt is known, its twin was never drawn
        assert [ledger.append(payload(0))["line"] for _ in range(2)] == [1, 2]


def test_an_open_round_is_charged_with_its_reason_and_spends_as_any_other(path: Path) -> None:
    filled(path, 1)
    with Ledger.open(path) as ledger:
        ledger.charge_open(payload(1), "ended")
    first, second = read(path)
    assert second["reason"] == "ended" and event(second) == event(seal(payload(1), 1, "")) and "reason" not in first
    assert "attempt" not in second  # a round of its own, not a second draw of one


def test_a_named_key_tells_drawn_again_from_drawn_anew(path: Path) -> None:
    with Ledger.open(path, key_id="a") as ledger:
        for index in range(4):
            ledger.append(payload(index))
    with Ledger.open(path, key_id="a") as ledger:  # same key: any round since the checkpoint
        assert [ledger.append(payload(index))["line"] for index in (2, 3, 4)] == [2, 3, 4]
    with Ledger.open(path, key_id="b") as ledger:  # other key: charged even if the caller forgot to say so
        assert ledger.append(payload(4))["line"] == 5
    with Ledger.open(path, key_id="c") as ledger:
        assert [line["line"] for line in ledger.drawn_before(4)] == [4, 5] and ledger.drawn_before(9) == []
        again = ledger.charge_again("the noise key is gone", round=4)
        assert [line["attempt"] for line in again] == [2, 2] and again[0]["key_id"] == "c"
        assert ledger.drawn_before(4) == []
        assert ledger.append(payload(4)) == again[0]


HOLDER = """
import sys
from fedflat.privacy.ledger import Ledger
with Ledger.open(sys.argv[1]) as ledger:
    ledger.append({"round": 0})
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_reader_that_asks_whether_a_run_goes_on_stops_no_writer(path: Path) -> None:
    filled(path)
    with path.with_suffix(".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(module.MOMENT / 4, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        Ledger.open(path).close()


def test_a_second_process_is_told_who_holds_the_ledger(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=rf"{path.parent}: another process \(pid {holder.pid}\)"):
        Ledger.open(path)
    assert module.is_open(path) and len(read(path)) == 1  # reading needs no lock
    holder.kill()  # the system gives a dead writer's lock back
    assert holder.wait() and not module.is_open(path) and not module.is_open(path.parent / "none.jsonl")
    with Ledger.open(path) as ledger:
        assert ledger.rounds_recorded() == {0}


def test_two_writers_in_one_process_and_a_nameless_holder(path: Path) -> None:
    with Ledger.open(path):
        path.with_suffix(".lock").write_bytes(b"")
        with pytest.raises(RunError, match="pid unknown"):
            Ledger.open(path)


def test_a_closed_ledger_releases_nothing(path: Path) -> None:
    filled(path, 1)
    with Ledger.open(path) as ledger:
        pass
    with pytest.raises(RunError, match="not open for writing; the round was not released"):
        ledger.append(payload(1))
    with pytest.raises(InputError, match="No such file"):
        read(path.parent / "none.jsonl")
    with pytest.raises(InputError, match="Is a directory"):
        read(path.parent)


def test_a_full_disk_stops_the_round(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as ledger, open("/dev/full", "wb", buffering=0) as full:
        ledger.append(payload(0))
        real = os.write
        monkeypatch.setattr(module.os, "write", lambda _, data: real(full.fileno(), data))
        with pytest.raises(RunError, match=r"round 1 could not be written \(No space left.*the round was not released"):
            ledger.append(payload(1))
        monkeypatch.undo()
        with pytest.raises(RunError, match="not open for writing"):  # after a failure nothing is appended blindly
            ledger.append(payload(2))
    assert len(read(path)) == 1


def test_a_disk_that_fills_in_mid_line_leaves_a_torn_line(path: Path) -> None:
    script = (
        "import resource, sys; from fedflat.privacy.ledger import Ledger\n"
        "from fedflat.core.checks import RunError; import signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "ledger = Ledger.open(sys.argv[1]); ledger.append({'round': 0})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (ledger._size + 50,) * 2)\n"
        "try: ledger.append({'round': 1})\n"
        "except RunError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "round 1 could not be written (File too large); the round was not released" in done.stdout
    assert len(path.read_bytes().splitlines()) == 2
    with Ledger.open(path) as ledger:
        assert ledger.rounds_recorded() == {0} and len(ledger.notes) == 1


def test_short_writes_are_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: real(file, data[:7]))
    filled(path)
    assert len(read(path)) == 3


def test_a_failed_sync_is_not_a_written_event(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Ledger.open(path, key_id="a") as ledger:
        monkeypatch.setattr(module.os, "fsync", fail)
        with pytest.raises(RunError, match="Input/output error"):
            ledger.append(payload(0))
    with pytest.raises(RunError, match=r"cannot be opened for writing \(Input/output error\)"):
        Ledger.open(path)
    monkeypatch.undo()
    with Ledger.open(path, key_id="a") as ledger:  # the line did reach the disk: it is charged, and not twice
        assert ledger.append(payload(0))["line"] == 0


@pytest.mark.parametrize("change", ["grown", "deleted", "replaced"])
def test_a_file_changed_under_the_writer_is_refused(path: Path, change: str) -> None:
    with Ledger.open(path) as ledger:
        ledger.append(payload(0))
        data = path.read_bytes()
        if change == "grown":
            path.write_bytes(data + b"x")
        else:
            path.unlink()
            if change == "replaced":
                path.write_bytes(data)
        with pytest.raises(RunError, match=r"round 1 could not be written.*not released"):
            ledger.append(payload(1))


def test_a_folder_that_cannot_be_made_or_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="the ledger cannot be opened for writing"):
        Ledger.open(tmp_path / "file" / "ledger.jsonl")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunError, match="No locks available"):
        Ledger.open(tmp_path / "ledger.jsonl")


def test_a_line_that_lacks_its_newline_on_reading_is_finished_on_opening(path: Path) -> None:
    entries = filled(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert read(path) == entries
    with Ledger.open(path) as ledger:
        assert ledger.append(payload(3))["line"] == 3
    assert [line["round"] for line in read(path)] == [0, 1, 2, 3]


def test_a_line_says_whose_it_is_when_that_changed(path: Path) -> None:
    copied: list[bytes] = []
    with Ledger.open(path, key_id="a") as ledger:
        ledger.describe({"id": "r", "attempt": 1})
        ledger.copy_to(copied.append)
        ledger.append(payload(0))
        ledger.append(payload(1))
        ledger.describe({"id": "r", "attempt": 2})
        ledger.append(payload(2))
        assert ledger.tip(1) == ledger.entries[1]["previous"] and ledger.tip(3) == ledger._tip
    found = read(path)
    assert [line.get("run") for line in found] == [{"id": "r", "attempt": 1}, None, {"id": "r", "attempt": 2}]
    assert b"".join(copied) == path.read_bytes()
    assert run_of(found) == {"id": "r", "attempt": 2} and run_of([]) is None
    assert "run" not in event(found[0]) and event(found[0]) == {**payload(0), "key_id": "a"}
    with Ledger.open(path, key_id="a") as ledger, pytest.raises(InputError, match="names other than"):
        ledger.append({**payload(3), "run": {}})


def test_a_copy_that_cannot_be_written_stops_the_release(path: Path) -> None:
    def full(line: bytes) -> None:
        raise OSError(28, "No space left on device")

    with Ledger.open(path) as ledger:
        ledger.copy_to(full)
        with pytest.raises(RunError, match="was not released"):
            ledger.append(payload(0))


def test_a_lost_event_is_charged_and_the_round_again(path: Path) -> None:
    with Ledger.open(path, key_id="b") as ledger:
        ledger.append(payload(0))
        lost = {**payload(1), "key_id": "a"}
        assert "attempt" not in ledger.charge_lost(lost, "restored")  # a release of its own, and no second one yet
        assert ledger.charge_lost(lost, "restored")["attempt"] == 2
        ledger.append(payload(1))
    lines = read(path)
    assert [line["round"] for line in lines] == [0, 1, 1, 1] and extra_rounds(lines) == 2


def test_events_are_counted_whatever_they_say_of_themselves() -> None:
    def line(round: int, **more: object) -> dict[str, object]:
        return {"round": round, **more}

    assert extra_rounds([]) == 0 and extra_rounds([line(0), line(1)]) == 0
    assert extra_rounds([line(r) for r in (0, 1, 2) * 3]) == 6
    assert extra_rounds([line(0), line(1, attempt=2), line(2, attempt=2), line(2)]) == 2
    assert extra_rounds([line(0, draw=0), line(0, draw=1), line(1, draw=2)]) == 0
    assert extra_rounds([line(0, draw=0), line(0, draw=1), line(0, draw=1, attempt=2)]) == 1
