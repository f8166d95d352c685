"""The files of a run: what was released, what is private to the simulation; append-only or replaced whole.

Each line of metrics.jsonl and private/private.jsonl has a seal in a file beside it (``metrics.seals``,
``private/private.seals``): the round, and SHA-256 over the run's id, the file's name and the line's bytes; or the round
and ``lost`` for a line that was set aside as damaged.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.core import InputError, durable, flush, making, plain, require, turning, writing, wrong

METRICS, PRIVATE, LEDGER = "metrics.jsonl", "private/private.jsonl", "ledger.jsonl"
RECIPE, STATEMENT = "recipe.yaml", "privacy.json"
REPORT, CARDS = "report.html", ("card.html", "card.md")
SEALED = "SHA256SUMS"
"""The file of checksums of an exported folder."""
OPENING, LOCK = "private/run.json", "ledger.lock"
BODY, WITH_BODY = "body.safetensors", ("representation", "image-encoder")
"""The frozen body beside what was trained on it, in an exported folder too, and the models whose runs keep it."""
PRIVATE_NOTE = "private to the simulation: not covered by the privacy guarantee, never written by a deployment"
_LOST = "lost"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. ``deployment`` never writes what is private to a simulation. run: the run's id, in each seal."""

    path: Path
    deployment: bool = False
    run: str = ""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoints"

    def append(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, and one of private/private.jsonl unless this is a deployment."""
        self._line(METRICS, released)
        if not self.deployment:
            self._line(PRIVATE, {"note": PRIVATE_NOTE, **private} if private.get("round") == 0 else private)

    def _line(self, name: str, record: Mapping[str, Any]) -> None:
        with writing(self.path / name, then="the run stops, resume it later."):
            (self.path / name).parent.mkdir(mode=0o700, exist_ok=True)
            line = json.dumps(plain(record)) + "\n"
            # The line before its seal: a kill leaves a line without one, whose round runs again, never a seal alone.
            self._add(name, line)
            self._add(seals_of(name), f"{record['round']} {self._seal(name, line)}\n")

    def released(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl."""
        return read_lines(self.path / METRICS)

    def flush_lines(self) -> None:
        """Make every line written so far durable."""
        files = [self.path / name for lines in (METRICS, PRIVATE) for name in (lines, seals_of(lines))]
        there = [path for path in files if path.exists()]
        for path in [*there, *dict.fromkeys(path.parent for path in there)]:  # their names too
            flush(path)

    def _add(self, name: str, text: str) -> None:
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _mode(name))
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def _seal(self, name: str, line: str) -> str:
        return hashlib.sha256(f"{self.run}\n{name}\n{line}".encode()).hexdigest()

    def sealed_rounds(self, name: str) -> set[int]:
        """Return the rounds whose line is there as it was written."""
        lines, sealed = _numbered(self.path / name)[0], _sealed(self.path / seals_of(name))
        return {round for round, text in lines.items() if sealed.get(round) == self._seal(name, text)}

    def keep_rounds(self, finished: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
        """Drop metric lines of rounds the checkpoint has not seen (they will run again).

        Returns the kept records of both files, and a sentence for each file that is not as it was written: it is set
        aside (kept as ``NAME.damaged``), and its sound lines go on.
        """
        notes: list[str] = []
        released = self._keep(METRICS, finished, notes)
        return released, [] if self.deployment else self._keep(PRIVATE, finished, notes), notes

    def _keep(self, name: str, finished: int, notes: list[str]) -> list[dict[str, Any]]:
        path, seals = self.path / name, self.path / seals_of(name)
        if not path.exists() and finished == 0:
            return []
        (numbered, strange), sealed = _numbered(path), _sealed(seals)
        sound = {r: text for r, text in numbered.items() if r < finished and sealed.get(r) == self._seal(name, text)}
        lost = {r for r, seal in sealed.items() if seal == _LOST}
        missing = [r for r in range(finished) if r not in sound and r not in lost]
        if missing or strange:
            aside = [set_aside(file).name for file in (path, seals) if file.exists()]
            gone = f"round {', '.join(map(str, missing[:5]))} lost" if missing else "every round's line is there"
            notes.append(f"{name} is not as it was written ({gone}); set aside as {' and '.join(aside) or 'nothing'}")
        lines = {r: f"{r} {self._seal(name, sound[r])}\n" if r in sound else f"{r} {_LOST}\n" for r in range(finished)}
        durable.replace(path, "".join(sound[r] for r in sorted(sound)), _mode(name))
        durable.replace(seals, "".join(lines.values()), _mode(name))
        return [json.loads(sound[r]) for r in sorted(sound)]


def _mode(name: str) -> int:
    return 0o600 if name.startswith("private/") else 0o644


def _numbered(path: Path) -> tuple[dict[int, str], int]:
    """Return lines by their round, with the newline, and how many are no record, come twice or out of order.

    What stands behind the last newline is left out: a kill leaves that, of a round that was open.
    """
    raw_lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    lines: dict[int, str] = {}
    strange, newest = 0, -1
    for raw in raw_lines:
        record = _record(raw)
        if record is None or record["round"] <= newest:
            strange += 1
        else:
            newest = record["round"]
            lines[newest] = raw.decode() + "\n"
    return lines, strange


def _record(raw: bytes) -> dict[str, Any] | None:
    """Return a round's record from its line; None where the line is torn, or none, or has a key twice."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(raw.decode(), object_pairs_hook=single_keys)
        round = record.get("round") if isinstance(record, dict) else None
        return record if isinstance(round, int) and not isinstance(round, bool) and round >= 0 else None
    return None


def _sealed(path: Path) -> dict[int, str]:
    """Return round -> its newest seal; a line that is none is passed over."""
    text = path.read_bytes().decode("ascii", "replace") if path.exists() else ""
    pairs = (line.split() for line in text.splitlines())
    return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Make a new folder, nobody else's while the block runs, which writes recipe.yaml last; one that already holds a
    run is never overwritten.

    Raises:
        InputError: it holds a run, is being made one by another process, or cannot be written.
    """
    check_new(path)
    with contextlib.ExitStack() as claims:
        with making("--out", f"{path}, which cannot be created"), turning(BlockingIOError, _taken(path)):
            path.mkdir(parents=True, exist_ok=True)
            (path / "private").mkdir(mode=0o700, exist_ok=True)
            claim = os.open(path / "private", os.O_RDONLY)
            claims.callback(os.close, claim)
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_new(path)
        yield


def check_unsealed(path: Path) -> None:
    """Raise InputError where ``path`` is an exported folder, to whose files nothing is added and none is changed."""
    require(not (path / SEALED).exists(), "--out", f"{path}, whose files are sealed", "another folder")


def check_new(path: Path) -> None:
    """Raise InputError where ``path`` holds a run already, or is no folder."""
    with making("--out", f"{path}, which cannot be created"):
        require(path.is_dir() or not path.exists(), "--out", f"{path}, which is no folder", "a new folder")
        if any((path / name).exists() for name in (METRICS, LEDGER, RECIPE)):
            raise _taken(path)


def check_name(name: str) -> None:
    """Raise InputError for a run's name that cannot be a folder's, or would lead elsewhere."""
    if name != Path(name).name or name in ("", ".", "..") or not name.isprintable():
        raise wrong("name", name, "a name that can be a folder's, without slashes")


def _taken(path: Path) -> InputError:
    return wrong("--out", f"{path}, which holds a run", f"a new folder, or --resume {path} to go on")


def seals_of(name: str) -> str:
    """Return the file of seals beside a file of records."""
    return name.removesuffix(".jsonl") + ".seals"


def check_kinds(folder: Path) -> None:
    """Raise InputError where a run's record is no file (reading a pipe would wait for ever), or a folder is none."""
    names = [RECIPE, METRICS, seals_of(METRICS), LEDGER, LOCK, STATEMENT]
    names += [] if locked(folder) else [OPENING, PRIVATE, seals_of(PRIVATE)]
    records = [folder / name for name in names]
    pages = [path for path in folder.glob("*") if path.suffix in (".json", ".jsonl", ".html", ".md")]
    for path in (*records, *pages):
        require(not path.is_dir(), str(path), "a folder", "the file that was written")
    for path in (folder / "private", folder / "checkpoints"):
        require(path.is_dir() or not path.exists(), str(path), "no folder", "the folder that was written")
    for path in folder.rglob("*"):
        # A named pipe in the place of a record would make the reader wait for ever.
        require(path.is_file() or path.is_dir() or not path.exists(), str(path), "no file", "the file that was written")
    for path in (*records, *folder.glob("checkpoints/*"), folder / "checkpoints"):
        may = readable(path) or not path.exists()
        require(may, str(path), "what this account may not read", "a record that it may read")


def readable(path: Path) -> bool:
    """Return whether this account may read a file, or list a folder and open what is in it."""
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def locked(folder: Path) -> bool:
    """Return whether a run's private/ is there, and this account may not read all of it."""
    private = folder / "private"
    return private.is_dir() and not (readable(private) and all(map(readable, private.rglob("*"))))


LOCKED = "this account may not read private/"


def set_aside(path: Path) -> Path:
    """Give a damaged file another name, ``NAME.damaged`` or ``NAME.damaged-2``, …; it is never deleted."""
    number, aside = 1, path.with_name(path.name + ".damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    os.rename(path, aside)
    return aside


def single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict. Raises ValueError for a key that comes twice: readers differ on those."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key comes twice")
    return mapping


def metrics_digest(folder: Path) -> str:
    """Return the SHA-256 of the released records; "" where there are none, or not only records."""
    lines = whole_lines(folder / METRICS)
    return durable.digest_of_json(lines) if lines else ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of rounds in a JSON-lines file; a line that is torn, or none, or has a key twice is none."""
    raw_lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [record for record in map(_record, raw_lines) if record is not None]


def whole_lines(path: Path) -> list[dict[str, Any]] | None:
    """Return the records of rounds in a JSON-lines file; None where a line is torn, comes twice, or is no record."""
    lines, strange = _numbered(path)
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    return None if strange or torn else [json.loads(text) for text in lines.values()]
