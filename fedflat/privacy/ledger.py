"""The privacy ledger: one durable line per privacy event, chained so that no line can be lost, moved or edited unseen.

An event is on disk *before* its round's model is released; whatever happens afterwards, the ledger shows at least what
was released. A line is JSON: ``line`` (0, 1, …), the payload, ``previous`` (SHA-256 of the line before, of a fixed
header for line 0) and ``checksum`` (SHA-256 of the canonical JSON of the other fields). The first line, and each line
from which something changed that may change bits, also says whose events these are, under ``run``: format, run id,
attempt, the recipe's digest, keyed digests of data, model and method, and the software (``records.opening``). The chain
finds accidents and careless edits; it is no signature: whoever rewrites the whole file, or cuts whole lines off its
end, goes unseen here (``engine.resume`` and ``fedflat verify`` compare with what else a run left).
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedflat.core import InputError, RunError, append, becoming, flush, lock_file, whole, writing, wrong

HEADER = b"fedflat privacy ledger, version 1"
CHAIN = ("line", "previous", "checksum")
# Fields that say why an event was charged, not what it is: two events that differ only here spend the same.
REASONS = ("attempt", "reason")
# Says which run drew an event and with what software.
RUN = "run"
_NO_EVENT = (*CHAIN, *REASONS, RUN)

Entry = dict[str, Any]


class LedgerError(InputError):
    """The ledger on disk is not the one that was written: a line is missing, edited or out of order."""


class Scan(NamedTuple):
    """What a ledger file holds: its verified entries, and the bytes of a last line that a crash tore (or none).

    fault: why there are none of a file that was edited, for who goes on all the same; ``scan`` raises it.
    """

    entries: list[Entry]
    torn: bytes
    tip: str
    fault: str = ""


def _broken(path: Path, number: int, found: str, allowed: str) -> LedgerError:
    return LedgerError(str(wrong(f"{path} line {number}", found, allowed)))


def plain_json(where: str, value: Any) -> Any:
    """JSON types only, with exact numbers; +inf becomes None (an infinite ε is ``null``)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain_json(f"{where}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(where, inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        if value == math.inf:
            return None
        raise wrong(where, value, "a number or +inf")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise wrong(where, type(value).__name__, "JSON values (numbers, text, lists, maps)")


def _dump(entry: Mapping[str, Any], *, canonical: bool = False) -> bytes:
    return json.dumps(entry, separators=(",", ":"), sort_keys=canonical, allow_nan=False).encode()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(payload: Mapping[str, Any], line: int, previous: str) -> Entry:
    """The full line for a payload: numbered, chained to ``previous`` (hex SHA-256) and with its own checksum."""
    entry: Entry = {"line": line, **payload, "previous": previous}
    return {**entry, "checksum": _sha(_dump(entry, canonical=True))}


def event(entry: Mapping[str, Any]) -> Entry:
    """What an entry spends: the entry without its chain fields, the run's facts and the reason it was charged."""
    return {key: value for key, value in entry.items() if key not in _NO_EVENT}


def extra_rounds(entries: Iterable[Mapping[str, Any]]) -> int:
    """Count the charges beyond one a round: every further line of a draw, and every line that is a new attempt.

    Lines are counted as they stand, whatever they say of themselves: two equal lines of a round are two releases.
    """
    lines, attempts = Counter[tuple[Any, Any]](), Counter[tuple[Any, Any]]()
    for entry in entries:
        # Rounds of votes have several draws, each with a line of its own.
        draw = (entry["round"], entry.get("draw"))
        lines[draw] += 1
        attempts[draw] += "attempt" in entry
    most: dict[int, int] = {}
    for draw, count in lines.items():
        most[draw[0]] = max(most.get(draw[0], 0), count - 1, attempts[draw])
    return sum(most.values())


def run_of(entries: Sequence[Mapping[str, Any]]) -> Entry | None:
    """The newest facts of the run that a ledger's lines carry; None for a ledger of before 0.2."""
    run = next((entry[RUN] for entry in reversed(entries) if RUN in entry), None)
    return run if run is None or isinstance(run, dict) else {}


def _attempts(entries: Iterable[Mapping[str, Any]], entry: Mapping[str, Any]) -> int:
    """Return how often an entry's event was drawn, with whatever key."""
    alike = (other for other in entries if {**event(other), "key_id": None} == {**event(entry), "key_id": None})
    return max((int(other.get("attempt", 1)) for other in alike), default=0)


def _check_line(path: Path, number: int, raw: bytes, previous: str) -> Entry:
    try:
        entry = json.loads(raw)
        same = isinstance(entry, dict) and isinstance(entry.get("round"), int) and _dump(entry) == raw
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise _broken(path, number, "text that is not a ledger line", "the exact line that was written")
    if entry.get("line") != number:
        raise _broken(path, number, f"event number {entry.get('line')!r}", f"number {number} (missing or moved line)")
    if entry.get("previous") != previous:
        raise _broken(path, number, "a 'previous' that does not match the line before", "an unedited line before it")
    body = {key: value for key, value in entry.items() if key != "checksum"}
    if entry.get("checksum") != _sha(_dump(body, canonical=True)):
        raise _broken(path, number, "a 'checksum' that does not match the line's content", "an unedited line")
    return dict(entry)


def scan(path: str | Path, data: bytes) -> Scan:
    """Verify the bytes of a ledger file.

    A last line without its newline is what a crash in mid-write leaves (so is one holding zero bytes, after a power
    cut): if it is whole and verifies it counts, otherwise it is ``torn``. Its round was not released, because release
    waits for the write. Anything else that does not match raises ``LedgerError`` naming the line.
    """
    path = Path(path)
    # A complete file ends with a newline, so what follows the last one was torn.
    *lines, last = data.split(b"\n")
    if not last and lines and b"\0" in lines[-1]:
        last = lines.pop() + b"\n"
    entries: list[Entry] = []
    tip = _sha(HEADER)
    for number, raw in enumerate(lines):
        entries.append(_check_line(path, number, raw, tip))
        tip = _sha(raw)
    if last:
        with contextlib.suppress(LedgerError):
            entries.append(_check_line(path, len(lines), last, tip))
            return Scan(entries, b"", _sha(last))
    return Scan(entries, last, tip)


def read(path: str | Path) -> list[Entry]:
    """The verified entries of a ledger, without locking it; a line still being written is left out.

    Raises ``InputError`` if there is no ledger and ``LedgerError`` if it was edited.
    """
    with becoming(lambda error: wrong(str(path), str(error.strerror), "a readable ledger.jsonl"), OSError):
        return scan(path, Path(path).read_bytes()).entries


MOMENT = 0.2
"""Seconds to wait for a reader, which holds the lock for the instant in which it asks whether a run goes on."""


def is_open(path: Path) -> bool:
    """Whether a process has a ledger open for writing: the lock is tried, for an instant that ``MOMENT`` allows for."""
    with contextlib.suppress(OSError), path.with_suffix(".lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _lock(path: Path) -> IO[bytes]:
    """Take the one-writer lock on a side file that names the holder; released by the system if the holder dies."""
    side = path.with_suffix(".lock")
    for wait in (MOMENT, 0.0):
        with contextlib.suppress(BlockingIOError):
            return lock_file(side, BlockingIOError(), mode=0o644)
        time.sleep(wait)
    holder = side.read_bytes()[:32].decode(errors="replace").strip() or "unknown"
    raise RunError(f"{path.parent}: another process (pid {holder}) is writing this run's ledger")


class Ledger(contextlib.AbstractContextManager["Ledger"]):
    """An append-only ledger open for writing; use ``with Ledger.open(path) as ledger``.

    ``entries`` are the verified lines, ``notes`` what was found and set aside on opening.
    """

    def __init__(self, path: Path, file: int | None, lock: IO[bytes], stored: Scan, key_id: str | None) -> None:
        self.path = path
        self.entries = stored.entries
        self.notes: list[str] = []
        self._file, self._lock_file = file, lock
        self._tip = stored.tip
        self._size = 0
        self._run: Entry | None = None
        self._copy: Callable[[bytes], None] = lambda line: None
        self.use_key(key_id)

    def use_key(self, key_id: str | None) -> None:
        """Set the public fingerprint of the key of further events; without one no event counts as drawn again."""
        self.key_id = key_id
        self._key = {} if key_id is None else {"key_id": key_id}
        self._replay = list(self.entries) if self._key else []

    def describe(self, run: Mapping[str, Any]) -> None:
        """Set the facts of the run that the next line carries, unless the newest recorded ones are the same."""
        self._run = plain_json("ledger run", run)

    def copy_to(self, write: Callable[[bytes], None]) -> None:
        """Hand the bytes of every further line, newline included, to ``write`` too before ``append`` returns."""
        self._copy = write

    @classmethod
    def open(cls, path: str | Path, *, key_id: str | None = None) -> "Ledger":
        """Open or create a ledger, verifying every line.

        ``key_id`` is a public fingerprint of the noise key, stored with each event: only an event drawn with the same
        key counts as the same event when a run is resumed, and without a key none does.
        Raises ``RunError`` if another process holds it or the disk refuses, ``LedgerError`` if it was edited.
        """
        path = Path(path)
        with contextlib.ExitStack() as undo:
            with writing(path, "the ledger cannot be opened for writing"):
                path.parent.mkdir(parents=True, exist_ok=True)
                # The lock comes before the first look: two writers must not read the same end.
                lock = _lock(path)
                undo.callback(lock.close)
                os.ftruncate(lock.fileno(), 0)
                _write_all(lock.fileno(), f"{os.getpid()}\n".encode())
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                undo.callback(os.close, file)
                flush(path.parent)
                data = path.read_bytes()
                stored = scan(path, data)
                ledger = cls(path, file, lock, stored, key_id)
                ledger._heal(file, data, stored)
            undo.pop_all()
        return ledger

    def _heal(self, file: int, data: bytes, stored: Scan) -> None:
        """Set a torn last line aside (kept in ``ledger.torn``), or finish a whole one that lacks its newline."""
        if stored.torn:
            aside = self.path.with_suffix(".torn")
            append(aside, stored.torn.rstrip(b"\n") + b"\n", mode=0o644)
            os.ftruncate(file, len(data) - len(stored.torn))
            self.notes.append(
                f"line {len(self.entries)} of {self.path.name} was torn by a crash ({len(stored.torn)} bytes, moved to "
                f"{aside.name}); its round had not been released"
            )
        elif data and not data.endswith(b"\n"):
            _write_all(file, b"\n")
        os.fsync(file)
        self._size = os.fstat(file).st_size

    def rounds_recorded(self) -> set[int]:
        """The rounds that have at least one event."""
        return {entry["round"] for entry in self.entries}

    def tip(self, events: int) -> str:
        """SHA-256 (hex) that a line after the first ``events`` lines is chained to."""
        return str(self.entries[events]["previous"]) if events < len(self.entries) else self._tip

    def _normal(self, payload: Mapping[str, Any]) -> Entry:
        plain: Entry = {**plain_json("ledger event", payload), **self._key}
        whole("ledger event.round", plain.get("round"))
        if taken := [key for key in plain if key in _NO_EVENT]:
            raise wrong("ledger event", taken[0], f"names other than {', '.join(_NO_EVENT)}")
        return plain

    def append(self, payload: Mapping[str, Any]) -> Entry:
        """Record one event durably and return its line; only then may the round be released.

        An event that a resumed run draws again (same payload, see ``open``) is returned, not written twice; each
        recorded event is matched once, so equal events of one running round are all charged.
        Raises ``InputError`` for a payload that cannot be stored exactly, ``RunError`` if the disk refuses.
        """
        plain = self._normal(payload)
        for index, entry in enumerate(self._replay):
            # What a line charged again says of ε so far is from before the key changed.
            # Each recorded event may be matched once: equal events of one round are separate releases.
            changed = {"epsilon": plain["epsilon"]} if "attempt" in entry and "epsilon" in plain else {}
            if {**event(entry), **changed} == plain:
                return self._replay.pop(index)
        return self._write(plain)

    def charge_again(self, reason: str, *, round: int) -> list[Entry]:
        """Charge a round's events once more: it is about to be drawn again with other noise.

        Each repeated line carries ``attempt`` and ``reason``. The round's own
        ``append`` that follows finds them and writes nothing more.
        """
        # All lines are written before the round is drawn, so a kill in between charges too much, never too little.
        spent: list[Entry] = []
        before = list(self.entries)
        for entry in [entry for entry in before if entry["round"] == round and "attempt" not in entry]:
            again = {"attempt": _attempts(before, entry) + 1, "reason": reason}
            spent.append(self._write({**event(entry), **self._key, **again}))
        self._replay = [entry for entry in self._replay if entry["round"] != round] + spent
        return spent

    def drawn_before(self, round: int) -> list[Entry]:
        """Return a round's first events if they were drawn with another key than this ledger's: drawn again, they are
        released again."""
        events = [entry for entry in self.entries if entry["round"] == round]
        if not events or events[-1].get("key_id") == self.key_id:
            return []
        return [entry for entry in events if "attempt" not in entry]

    def charge_lost(self, entry: Mapping[str, Any], reason: str) -> Entry:
        """Charge an event whose own line is gone from this file: it may have been released."""
        tries = _attempts(self.entries, entry)
        return self._write({**event(entry), **({"attempt": tries + 1} if tries else {}), "reason": reason})

    def charge_open(self, payload: Mapping[str, Any], reason: str) -> Entry:
        """Charge an event of a round that is never finished, because what went into it may have been seen already."""
        return self._write({**self._normal(payload), "reason": reason})

    def _write(self, payload: Mapping[str, Any]) -> Entry:
        if self._file is None:  # refused before anything is written: a closed ledger never looks like a charged round
            raise RunError(f"{self.path}: the ledger is not open for writing; the round was not released")
        if self._run is not None and run_of(self.entries) != self._run:
            payload = {**payload, RUN: self._run}
        entry = seal(payload, len(self.entries), self._tip)
        raw = _dump(entry)
        try:
            # Another program may have replaced the file since; appending to the old one would lose the event.
            on_disk = os.stat(self.path)
            if not os.path.samestat(on_disk, os.fstat(self._file)) or on_disk.st_size != self._size:
                raise OSError(0, "another program changed or replaced it")
            _write_all(self._file, raw + b"\n")
            os.fsync(self._file)
            self._copy(raw + b"\n")
        except OSError as error:
            self.close()  # what is on disk is unknown now; opening it again verifies and heals it
            raise RunError(
                f"{self.path}: the event of round {entry['round']} could not be written ({error.strerror}); "
                "the round was not released"
            ) from error
        self._size += len(raw) + 1
        self._tip = _sha(raw)
        self.entries.append(entry)
        return entry

    def close(self) -> None:
        """Close the file and give the lock back; closing twice is harmless."""
        # A failing disk may complain again; the event is refused already.
        with contextlib.suppress(OSError), contextlib.closing(self._lock_file):
            if self._file is not None:
                os.close(self._file)
        self._file = None

    def __exit__(self, *error: object) -> None:
        self.close()
