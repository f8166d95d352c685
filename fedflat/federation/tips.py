"""What a deployment's server signs for its clients, and what its operator keeps on runs outside their folders.

With each question the server signs how far the ledger is.

A client keeps the last such tip, and refuses a ledger that is shorter or another than before. Whoever holds one can
tell a ledger that was rewritten or cut from the one that the client was shown: ``fedflat verify RUN --key operator.pub
--witness client.tip``.
"""

import base64
import contextlib
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedflat.core import InputError, counted, durable, insist, reading, turning, writing, wrong
from fedflat.federation.replies import read_journal
from fedflat.federation.wire import Refused
from fedflat.privacy.ledger import LedgerError, scan
from fedflat.records import keys, signing
from fedflat.records.folder import LEDGER
from fedflat.records.signing import Operator

log = logging.getLogger("fedflat.server")

RECORD, ENVELOPE, PUBLIC = "record", "tip", "key"
"""The record of a message that holds the signed tip, and the names in it of the tip and of the operator's key."""


BEGUN = ".begun"
"""Ending of the operator's file that says where a run was begun."""


def operator_file(run: str, kind: str = "") -> Path:
    """Return a file that is for the operator only: beside the noise keys, not in the run's folder."""
    place = keys.folder().parent / "operator"
    with writing(place, "cannot be made"):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place / f"{run}{kind}.jsonl"


def operator_key(folder: Path) -> Operator:
    """Return the operator's key in the usual place; a deployment makes one if there is none.

    Raises:
        InputError: another key, or one that is gone, signed the run in ``folder``: its clients, who pinned that one,
            would refuse every question, and the rounds would be released and charged all the same.
    """
    operator, before = Operator.of_account(), signing.tip_signers(folder)
    if before and (operator is None or signing.keyid(operator.public) not in before):
        has = "which is gone" if operator is None else "another key than the one that signed before"
        allowed = f"the key with which the run in {folder} was begun, put back; its clients answer no other"
        raise wrong("operator's key", f"{signing.place()}, {has}", allowed)
    return operator or Operator.create(signing.place())


def new_run(pin: str, out: Path) -> str:
    """Return a fresh run's name, noted in the operator's files with its folder and its task's pin.

    Raises:
        InputError: a run of this task was charged here, and its files are gone: a new one would release it all again.
    """
    begun = {"out": str(out.resolve()), "pin": pin}
    place = operator_file("").parent
    for note in sorted(place.glob(f"*{BEGUN}")):
        charged = len(keys.Mark(note.stem).entries() or [])
        if charged and read_journal(note, dict, "delete it to forget that run") == [begun]:
            found = f"{out}, without the files of run {note.stem}, which was charged {counted(charged, 'event')} here"
            allowed = "that run's files put back, or another folder for a run that is charged beside it"
            raise wrong("out", found, allowed)
    name = secrets.token_hex(16)
    durable.append(place / f"{name}{BEGUN}", json.dumps(begun).encode() + b"\n")
    return name


def restore_lines(folder: Path, run: str) -> None:
    """Take lines that a ledger has lost from the mark beside the noise key: a folder that was put back goes on from
    what clients were shown. A ledger that the mark does not begin with stays as it is."""
    path, mark = folder / LEDGER, keys.Mark(run).path
    ours = path.read_bytes() if path.exists() else b""
    theirs = mark.read_bytes() if mark.exists() else b""
    with contextlib.suppress(LedgerError):
        if len(theirs) > len(ours) and theirs.startswith(ours) and not scan(mark, theirs).torn:
            durable.replace(path, theirs, mode=0o644)
            log.warning("%s: lines that it had lost are back, from the mark beside the noise key", path)


def tip_record(folder: Path, run: str, key: Operator, round: int) -> Any:
    """Return the record of a message before a round: the signed tip of the ledger as it stands, and the public key that
    a client may pin.
    """
    from flwr.app import ConfigRecord

    path = folder / LEDGER
    ledger = scan(path, path.read_bytes() if path.exists() else b"")
    tips = [*(str(entry["previous"]) for entry in ledger.entries[1:]), *([ledger.tip] if ledger.entries else [])]
    history = base64.b64encode(b"".join(map(bytes.fromhex, tips))).decode()
    envelope = key.sign(signing.tip_statement(run, round, len(ledger.entries), ledger.tip, "", history))
    return ConfigRecord({ENVELOPE: json.dumps(envelope).encode(), PUBLIC: signing.pem(key.public)})


PINNED = "operator.pub"
"""In a client's folder: the operator's key, as it was first seen."""


def without_tip(content: Any, folder: Path, operator: Path | None = None) -> Any:
    """Return a message's content without the server's signed tip, which is checked and kept in ``folder``/RUN.tip.

    operator: the operator's public key, if it was given by hand; else the first one that is seen is pinned.

    Raises:
        Refused: no tip where there was one before, another signer, or a ledger that is shorter or another than
            before.
        InputError: the key that was given or pinned is none, or the tip that was kept is damaged.
    """
    pinned = folder / PINNED if operator is None else operator
    record = content.get(RECORD)
    if record is None:
        insist(not pinned.exists(), Refused("the server's message has no signed tip of its ledger"))
        return content
    pinned_key = signing.read_public(pinned) if pinned.exists() else None
    fault = Refused("the server's signed tip is malformed, or not signed by the operator's key")
    with turning((InputError, ValueError, KeyError, TypeError, AttributeError), fault):
        envelope, sent_key = json.loads(record[ENVELOPE]), record[PUBLIC]
        public = pinned_key or load_pem_public_key(sent_key)
        tip = signing.opened(envelope, public)["predicate"]  # type: ignore[arg-type]
        run, events, history = str(tip["run"]), int(tip["events"]), base64.b64decode(tip.get("history", ""))
        fits = run.isalnum() and len(history) == 32 * events and (not events or history[-32:].hex() == tip["tip"])
    insist(fits, Refused("the server's signed tip contradicts itself"))
    _refuse_fork(folder / f"{run}.tip", events, history)
    if not pinned.exists():  # trust on first use, after all checks: a refused tip must pin nobody
        durable.replace(pinned, sent_key)
    durable.replace(folder / f"{run}.tip", json.dumps(envelope).encode())
    return type(content)({name: value for name, value in content.items() if name != RECORD})


def _refuse_fork(path: Path, events: int, history: bytes) -> None:
    """Refuse a ledger that does not go on from the tip that was kept of the same run."""
    if not path.exists():
        return
    with reading(path, "no signed tip", "the file as this client kept it"):
        before = signing.opened(signing.read(path))["predicate"]
        seen, tip = int(before["events"]), str(before["tip"])
    insist(events >= seen, Refused(f"the server's ledger has {events} events, and had {seen} before"))
    if seen and history[32 * (seen - 1) : 32 * seen].hex() != tip:
        raise Refused("the server's ledger has other events than it had before")
