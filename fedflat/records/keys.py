"""Noise keys of runs with `privacy.randomness: secret` and, half of them, of deployments: 256 bits of entropy in a file
that is not part of the run's folder.

Whoever has the key can draw a run's noise again and subtract it. So it is readable by its owner only, is never logged
or written into the run's folder, and is deleted when the run is complete. Beside the keys, in ``marks/``, lies what
each was used for: a second copy of the run's ledger, which a backup of the folder does not bring back.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from fedflat.core import KEY_BYTES, InputError, RunError, durable, fresh_key, making, owners_only, require, writing
from fedflat.privacy.ledger import Entry, LedgerError, scan


def folder() -> Path:
    """Return where keys live: ``$XDG_STATE_HOME/fedflat/keys``, or under ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The base directory specification says to ignore a relative path.
    root = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return root / "fedflat" / "keys"


def path_of(run: str) -> Path:
    """Return the key file of a run's public name."""
    require(run.isalnum(), "versions.run", run, "the name that fedflat wrote into recipe.yaml")
    return folder() / run


def check_outside(run_folder: Path, operator: Path | None = None) -> None:
    """Refuse the folder of noise keys, or an operator's key, inside the run's folder, which may be published.

    Raises:
        InputError: ``XDG_STATE_HOME``, or the operator's key, lies in the run's folder.
    """
    for where, place in {"XDG_STATE_HOME": folder(), "--key": operator}.items():
        outside = place is None or not place.resolve().is_relative_to(run_folder.resolve())
        require(outside, where, str(place), f"a place outside {run_folder}, where the key would be published")


def lock_of(run: str) -> Path:
    """Return the file that the process which runs a run, or a copy of its folder, has locked."""
    return path_of(run).parent.parent / "locks" / run


def alone(out: Path, run: str = "") -> IO[bytes]:
    """Return the lock of a server's folder or, by its name, of a run, whose folder's copies share a key.

    Two processes that went on from one round on different software would draw it with the same noise.

    Raises:
        RunError: another process has it.
        InputError: it cannot be written.
    """
    path = lock_of(run) if run else out / "server.lock"
    running = RunError(f"{out}: another process is running this run, or a copy of its folder")
    with making("out", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return durable.lock_file(path, running)


def create(run: str) -> bytes:
    """Return a fresh key for a run, durable before this returns; it takes the place of none.

    Raises:
        RunError: the file cannot be written.
    """
    path, key = path_of(run), fresh_key()
    with writing(path, "the noise key cannot be written", "nothing was released"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.create(path, key)
    return key


def load(run: str) -> bytes | None:
    """Return the key of a run, or None if there is none any more (a torn one is removed: nothing was drawn with it).

    Raises:
        InputError: others may read the file, so its noise is no secret.
    """
    path = path_of(run)
    if (key := _read(path, "the noise key")) is None:
        return None
    owners_only(path, "0600, or no file: the run then goes on with a fresh key")
    if len(key) != KEY_BYTES:
        forget(run)
        return None
    return key


def _read(path: Path, name: str) -> bytes | None:
    """Return what is in a file; None where there is none. Raises InputError where this account may not read it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {name} cannot be read ({error.strerror}); allowed: your own file.") from error


def forget(run: str) -> bool:
    """Delete a run's key; return whether there was one (a missing one is no error)."""
    try:
        path_of(run).unlink()
    except FileNotFoundError:
        return False
    return True


MARK = "the mark of the noise key"
FAILED = f"{MARK} cannot be written"
_CHECKPOINT = re.compile(rb"(\d+) ([0-9a-f]{64})")
"""A line of a mark's checkpoints: finished rounds, checksum."""


class Mark:
    """How far a run's key was used: the run's ledger lines, each written before its round is released, and beside them
    the checksum of each checkpoint, from which a round begins. It stays when the key is deleted, and holds no secret.
    """

    def __init__(self, run: str) -> None:
        self.path = path_of(run).parent.parent / "marks" / run
        self._begun = self.path.with_name(f"{run}.checkpoints")

    def note_checkpoint(self, round: int, checksum: str) -> None:
        """Note a checkpoint that is about to be written, durably. Raises RunError."""
        with writing(self._begun, FAILED, "the run stops, resume it later."):
            durable.append(self._begun, f"{round} {checksum}\n".encode())

    def begin(self, round: int, checksum: str) -> None:
        """Note the checkpoint that a run goes on from ("": none), without lines that are damaged. Raises RunError."""
        noted = self._noted()
        good = [part[0] for part in noted if part]
        if checksum or len(good) < len(noted):
            new = [f"{round} {checksum}".encode()] if checksum else []
            with writing(self._begun, FAILED, "nothing was released"):
                durable.replace(self._begun, b"".join(line + b"\n" for line in (*good, *new)))

    def checkpoints(self, round: int) -> list[str]:
        """Return the checksums of the checkpoints after ``round`` finished rounds, oldest first; none where none were
        noted, as before 1.0. Where the file is damaged the last one is "", which is nobody's.
        """
        noted = self._noted()
        checksums = [part[2].decode() for part in noted if part and int(part[1]) == round]
        return checksums if all(noted) else [*checksums, ""]

    def newest(self) -> int:
        """Return how many rounds had finished at the newest checkpoint that was noted; 0 where none was."""
        return max((int(part[1]) for part in self._noted() if part), default=0)

    def _noted(self) -> list[re.Match[bytes] | None]:
        return [*map(_CHECKPOINT.fullmatch, (_read(self._begun, MARK) or b"").splitlines())]

    def forget(self) -> None:
        """Delete the mark of a run whose folder is deleted too."""
        self.path.unlink(missing_ok=True)
        self._begun.unlink(missing_ok=True)
        lock_of(self.path.name).unlink(missing_ok=True)

    def entries(self) -> list[Entry] | None:
        """Return the events marked; None if there is no mark, or it was damaged (then it is set aside)."""
        lines = _read(self.path, MARK)
        try:
            return None if lines is None else scan(self.path, lines).entries
        except LedgerError:
            os.replace(self.path, self.path.with_name(self.path.name + ".damaged"))
            return None

    def append(self, line: bytes) -> None:
        """Add a ledger line, durably. Raises OSError, for which the ledger refuses the release."""
        # Without O_CREAT: a mark that has vanished must stop the release, not begin anew with one line.
        with open(os.open(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, lines: bytes) -> None:
        """Replace the mark by these ledger lines.

        Raises:
            RunError: it cannot be written.
        """
        with writing(self.path, FAILED, "nothing was released"):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.replace(self.path, lines)


def compare(run: str, entries: Sequence[Entry]) -> tuple[list[Entry], str]:
    """Return the events that only the mark beside the noise key has, and why the key may not be used on (or "").

    The mark may lack the events of one round: the newest, whose release waits for the mark.
    """
    marked = Mark(run).entries()
    if marked is None:
        return [], "the mark beside the noise key is gone or damaged" if entries else ""
    other = (place for place, (a, b) in enumerate(zip(entries, marked)) if a["checksum"] != b["checksum"])
    same = next(other, min(len(entries), len(marked)))
    if len(marked) > same:
        # A folder that lacks events which the mark has was put back; those events stay charged.
        return marked[same:], "the folder is behind the mark beside the noise key (was a backup restored?)"
    rounds = {entry["round"] for entry in entries[same:]}
    return [], "the folder is ahead of the mark beside the noise key" if len(rounds) > 1 else ""
