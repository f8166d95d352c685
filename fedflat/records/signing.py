"""Sign records with an operator's Ed25519 key: in-toto Statements in DSSE envelopes, which other tools read too.

The private half lies outside every run's folder, readable by its owner only; the public half is given away. A run signs
what it ended with in ``signature.json``, and each round's place in the ledger in ``tips.jsonl``. A *tip* is the SHA-256
of the ledger's last line, which chains all lines before it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     operator = Operator.create(Path(folder) / "operator.pem")
...     sealed = operator.sign(statement_of("urn:example", {"ledger.jsonl": "00"}, {"run": "1"}))
...     opened(sealed, operator.public)["predicate"]
{'run': '1'}
"""

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedflat.core import InputError, durable, making, owners_only, reading, require, turning, writing, wrong
from fedflat.records import keys
from fedflat.records.folder import LEDGER, STATEMENT, metrics_digest, read_lines, single_keys

IN_TOTO = "https://in-toto.io/Statement/v1"
PAYLOAD = "application/vnd.in-toto+json"
RUN, TIP = "urn:fedflat:run:1", "urn:fedflat:tip:1"
"""Predicate types: what a run ended with, and how far its ledger was after a round."""
SIGNATURE, TIPS = "signature.json", "tips.jsonl"
MADE_FOR = "made_for"
"""The subject of a signature that says which inputs a model takes, and which class each output is."""

Envelope = dict[str, Any]


def place() -> Path:
    """Return where an operator's key lies unless another file is named: beside the noise keys."""
    return keys.folder().parent / "operator.pem"


def public_place(path: Path) -> Path:
    """Return the public half's file beside a private half's."""
    return path.with_suffix(".pub")


def keyid(public: Ed25519PublicKey) -> str:
    """Return the SHA-256 of the 32 bytes of a public key."""
    return hashlib.sha256(public.public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw)).hexdigest()


@dataclass(frozen=True)
class Operator:
    """An operator's key."""

    private: Ed25519PrivateKey = field(repr=False)

    @property
    def public(self) -> Ed25519PublicKey:
        """The half that is given away."""
        return self.private.public_key()

    @classmethod
    def create(cls, path: Path) -> "Operator":
        """Make a key: ``path`` (0600) and its public half beside it, ``….pub``; never in place of another key.

        Raises:
            InputError: there is a key already, or the files cannot be written.
        """
        key, public = cls(Ed25519PrivateKey.generate()), public_place(path)
        require(public != path, "--key", str(path), "a name that does not end in .pub, as its public half's does")
        for file in (path, public):  # a public half may be all that tells which key others have pinned
            hint = "a key is never overwritten, nor a public half without its private one"
            require(not os.path.lexists(file), "keys", f"{file}, which exists", f"another --key; {hint}")
        with making("keys", path, "a new file in a folder you may write to"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.create(
                path, key.private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
            )
            durable.replace(public, pem(key.public), mode=0o644)
        return key

    @classmethod
    def load(cls, path: Path) -> "Operator":
        """Read a private key.

        Raises:
            InputError: no Ed25519 key, or a file that others may read.
        """
        private = _loaded(path, "private", Ed25519PrivateKey, "an Ed25519 key made by fedflat keys new")
        owners_only(path, "0600: a private key is its owner's only")
        return cls(private)

    @classmethod
    def of_account(cls) -> "Operator | None":
        """Return this account's key, in the usual place, or None where nobody made one."""
        return cls.load(place()) if place().exists() else None

    def sign(self, statement: Mapping[str, Any]) -> Envelope:
        """Return a DSSE envelope of an in-toto Statement."""
        body = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
        signature = {"keyid": keyid(self.public), "sig": base64.b64encode(self.private.sign(pae(body))).decode()}
        return {"payload": base64.b64encode(body).decode(), "payloadType": PAYLOAD, "signatures": [signature]}


def _loaded(path: Path, half: str, kind: type, allowed: str) -> Any:
    """Return the key in a file; InputError where it holds none of this half and kind."""
    none = wrong("--key", f"{path}, no {half} key", allowed)
    with making("--key", path, allowed), turning((ValueError, TypeError, UnsupportedAlgorithm), none):
        text = path.read_bytes()
        key = forms.load_pem_private_key(text, None) if half == "private" else forms.load_pem_public_key(text)
    require(isinstance(key, kind), "--key", f"{path}, a key of another kind", allowed)
    return key


def pem(public: Ed25519PublicKey) -> bytes:
    """Return a public key as a file."""
    return public.public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)


def read_public(path: Path) -> Ed25519PublicKey:
    """Read a public key.

    Raises:
        InputError: the file holds none. A private half is refused too: it has no place where a public one is asked for.
    """
    key: Ed25519PublicKey = _loaded(path, "public", Ed25519PublicKey, "the operator's Ed25519 key, operator.pub")
    return key


def own_key(folder: Path) -> Path | None:
    """Return this account's public key, where it signed the run in a folder."""
    path = public_place(place())
    try:
        signers = [signature["keyid"] for signature in read(folder / SIGNATURE)["signatures"]]
        return path if keyid(read_public(path)) in signers else None
    except (InputError, KeyError, TypeError):
        return None


def pae(body: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(body), body)


def statement_of(kind: str, subjects: Mapping[str, str], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return an in-toto Statement. subjects: name -> SHA-256."""
    listed = [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()]
    return {"_type": IN_TOTO, "subject": listed, "predicateType": kind, "predicate": dict(predicate)}


def tip_statement(run: str, round: int, events: int, tip: str, checkpoint: str, history: str = "") -> dict[str, Any]:
    """Return what is signed of a round: after ``round`` finished rounds the ledger had ``events`` lines and this tip.

    history: every tip up to this one, 32 bytes each, in base64; for clients, who hold none of the ledger.
    """
    subjects = {"ledger.jsonl": tip, **({"checkpoint": checkpoint} if checkpoint else {})}
    predicate = {"run": run, "round": round, "events": events, "tip": tip}
    return statement_of(TIP, subjects, predicate | ({"history": history} if history else {}))


def opened(envelope: Any, public: Ed25519PublicKey | None = None) -> dict[str, Any]:
    """Return the Statement in an envelope that ``public`` signed (None: whoever signed it), with its subjects by name.

    Raises:
        InputError: it is no envelope, or not signed by this key.
    """
    with reading("signature", "no DSSE envelope of an in-toto Statement", "what was signed"):
        if envelope["payloadType"] != PAYLOAD or envelope.keys() - {"payload", "payloadType", "signatures"}:
            raise ValueError("another payload, or more than one says")
        body = base64.b64decode(envelope["payload"], validate=True)
        statement = json.loads(body, object_pairs_hook=single_keys)
        if statement["_type"] != IN_TOTO:
            raise ValueError("another statement")
        if public is not None and not any(_is_by(public, one, body) for one in envelope.get("signatures") or []):
            raise InputError(f"signature: found none by the key {keyid(public)[:16]}; allowed: what that key signed")
        return {"subjects": {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}, **statement}


def _is_by(public: Ed25519PublicKey, signature: Any, body: bytes) -> bool:
    with contextlib.suppress(InvalidSignature, ValueError, KeyError, TypeError):
        public.verify(base64.b64decode(signature["sig"], validate=True), pae(body))
        return True
    return False


def write(path: Path, envelope: Envelope) -> None:
    """Write an envelope as a file.

    Raises:
        RunError: the disk refuses.
    """
    with writing(path, "the signature cannot be written"):
        durable.replace(path, json.dumps(envelope, indent=1) + "\n", mode=0o644)


def read(path: Path) -> Any:
    """Return an envelope from a file.

    Raises:
        InputError: the file is none.
    """
    with reading(path, "no JSON", "a signed record"):
        return json.loads(path.read_bytes(), object_pairs_hook=single_keys)


# --------------------------------------------------------------------------------------------------- tips.jsonl


def note_tip(folder: Path, run: str, round: int, ledger: Mapping[str, Any], seal: str, key: Operator | None) -> None:
    """Add a round's line to tips.jsonl: how far the ledger was, and the checksum of the checkpoint to come."""
    line: dict[str, Any] = {"round": round, "events": ledger["events"], "tip": ledger["tip"], "checkpoint": seal}
    if key is not None:
        line["signed"] = key.sign(tip_statement(run, round, ledger["events"], ledger["tip"], seal))
    # On disk before its checkpoint: one that no line names is refused.
    durable.append(folder / TIPS, _tip_line(line).encode(), mode=0o644)


def _tip_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def tips_of(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of tips.jsonl by round."""
    return {line["round"]: line for line in read_lines(path / TIPS)}


def tip_signers(path: Path) -> set[str]:
    """Return the ids of the keys that signed lines of tips.jsonl. Raises InputError where a line is no tip."""
    with reading(path / TIPS, "a line that is no tip", "what the run wrote"):
        signed = [line["signed"] for line in tips_of(path).values() if "signed" in line]
        return {signature["keyid"] for envelope in signed for signature in envelope["signatures"]}


def keep_tips(folder: Path, finished: int) -> None:
    """Drop the lines of rounds that no checkpoint has seen, and what a crash tore: those rounds run again."""
    path = folder / TIPS
    if not path.exists():
        return
    lines = [line for round, line in tips_of(folder).items() if round <= finished]  # verify names what is missing
    durable.replace(path, "".join(map(_tip_line, lines)), mode=0o644)


def sign_run(folder: Path, run: str, weights: str, made_for: Any, key: Operator | None) -> None:
    """Write signature.json over a run's ended records, or take an older one away where there is no key."""
    path = folder / SIGNATURE
    if key is None:
        path.unlink(missing_ok=True)  # of another attempt: it would be about records that are no longer these
        return
    lines = [line for line in (folder / LEDGER).read_bytes().split(b"\n") if line]
    tip = hashlib.sha256(lines[-1]).hexdigest() if lines else ""
    predicate = {"run": run, "events": len(lines), "tip": tip}
    write(path, key.sign(statement_of(RUN, subjects_of(folder, weights, made_for), predicate)))


def subjects_of(folder: Path, weights: str, made_for: Any) -> dict[str, str]:
    """Return what the signature of a run's ended records is about: name -> SHA-256.

    weights: digest of the released weights. made_for: what their checkpoint says of inputs and classes.
    """
    text = json.dumps(made_for, sort_keys=True, separators=(",", ":")).encode()
    digests = {name: durable.digest_of_file(folder / name) for name in (LEDGER, STATEMENT)}
    return digests | {"weights": weights, "metrics": metrics_digest(folder), MADE_FOR: hashlib.sha256(text).hexdigest()}
