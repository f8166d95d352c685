"""A run's statement made again from its other files, its pages made again, and its signatures held against them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedflat.assembly import going_on
from fedflat.assembly.stating import Terms, restated, tested
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.durable import digest_of
from fedflat.engine.job import SEEN
from fedflat.privacy.compare import Difference, differences, unsaid, worded
from fedflat.privacy.ledger import Entry, Scan, run_of, scan
from fedflat.privacy.verify import _json as read_json
from fedflat.records import checkpoint, signing
from fedflat.records.folder import LEDGER, METRICS, OPENING, RECIPE, STATEMENT, locked, read_lines, seals_of
from fedflat.records.folder import SEALED as SUMS
from fedflat.records.opening import Opening, versions
from fedflat.records.signing import SIGNATURE, TIPS, tips_of

MODEL, REPORT, CARDS = "model.safetensors", "report.html", ("card.html", "card.md")
UNREADABLE = (
    InputError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, yaml.YAMLError,
)  # fmt: skip
"""What reading a damaged recipe or statement may raise."""
Verdict = Literal["ok", "wrong", "unchecked"]


class Check(NamedTuple):
    """One record: what was checked, the outcome, and a sentence about it."""

    record: str
    verdict: Verdict
    about: str


@dataclasses.dataclass(frozen=True)
class Records:
    """What a run's folder says of the run, each record read once; a damaged one counts as one that is not there."""

    folder: Path

    @cached_property
    def locked(self) -> bool:
        """Whether this account may not read all of private/."""
        return locked(self.folder)

    @cached_property
    def exported(self) -> bool:
        """Whether this is an exported folder, whose files have a list of checksums."""
        return (self.folder / SUMS).is_file()

    @cached_property
    def going(self) -> bool:
        """Whether a process has the run's ledger open for writing."""
        with contextlib.suppress(OSError), (self.folder / LEDGER).with_suffix(".lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @cached_property
    def old(self) -> bool:
        """Whether this is a run of fedflat 0.1: its ledger names no run, and its statement has no checksum."""
        newer = self.locked or (self.folder / OPENING).exists() or self.exported or self.first is not None
        sealed = "checksum" in (self.statement or {}) or (self.folder / seals_of(METRICS)).exists()
        return not newer and not sealed and (self.folder / LEDGER).is_file()

    @cached_property
    def opening(self) -> Opening | None:
        """private/run.json."""
        with contextlib.suppress(InputError):
            return Opening.read(self.folder)
        return None

    @cached_property
    def ledger(self) -> Scan:
        """The ledger's lines, what a crash tore of the last one, and its tip."""
        with contextlib.suppress(OSError, InputError):
            return scan(self.folder / LEDGER, (self.folder / LEDGER).read_bytes())
        return Scan([], b"", "")

    @property
    def entries(self) -> list[Entry]:
        """The ledger's events."""
        return self.ledger.entries

    @cached_property
    def first(self) -> Entry | None:
        """What the ledger's first line says of the run; None of one before 0.2."""
        return run_of(self.entries)

    @cached_property
    def statement(self) -> dict[str, Any] | None:
        """privacy.json."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads((self.folder / STATEMENT).read_bytes())
            return found if isinstance(found, dict) else None
        return None

    @cached_property
    def recipe(self) -> Any:
        """recipe.yaml."""
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            return yaml.safe_load((self.folder / RECIPE).read_bytes())
        return None

    def given(self, *keys: str) -> Any:
        """Return a value of the recipe by its keys; None where there is none."""
        found = self.recipe
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @cached_property
    def tips(self) -> dict[int, dict[str, Any]]:
        """The lines of tips.jsonl by round."""
        return tips_of(self.folder)

    @cached_property
    def files(self) -> list[str]:
        """The paths in the folder of all that is no folder."""
        return [str(file.relative_to(self.folder)) for file in sorted(self.folder.rglob("*")) if not file.is_dir()]

    @cached_property
    def id(self) -> str:
        """The run's id, by its ledger or else by private/run.json."""
        if self.first is not None:
            return str(self.first.get("id"))
        return "" if self.opening is None else self.opening.run

    @cached_property
    def terms(self) -> Mapping[str, Any]:
        """The terms that the run began with; empty of a run of 0.2."""
        if self.first is not None:
            return dict(self.first.get("terms") or {})
        return {} if self.opening is None else self.opening.terms

    def _saved_rounds(self) -> list[int]:
        return [checkpoint.round_of(file) for file in (self.folder / "checkpoints").glob("round-*.safetensors")]

    @cached_property
    def finished_rounds(self) -> int:
        """How many rounds metrics and checkpoints say were finished."""
        lines = [row for row in read_lines(self.folder / METRICS) if isinstance(row, dict)]
        rounds: list[int] = [row["round"] + 1 for row in lines if isinstance(row.get("round"), int)]
        return max([0, *rounds, *self._saved_rounds()])

    @cached_property
    def stated_rounds(self) -> int:
        """How many rounds checkpoints and the statement say were finished: against these, metrics are checked."""
        stated = (self.statement or {}).get("rounds")
        return max([stated if isinstance(stated, int) else 0, *self._saved_rounds()])

    def tip_at(self, events: Any) -> str | None:
        """Return the ledger's tip after its first ``events`` lines; None where it has fewer."""
        if not isinstance(events, int) or not 0 <= events <= len(self.entries):
            return None
        return self.ledger.tip if events == len(self.entries) else str(self.entries[events]["previous"])


def remade(run: Records) -> tuple[list[Difference], list[str]]:
    """Make the statement again from recipe, ledger, metrics and code, and compare it field by field.

    Return where it differs from the one that is there, and what could not be compared.

    Raises:
        InputError: the recipe is none from which a statement follows.
    """
    stated, entries, record = read_json(run.folder / STATEMENT), run.entries, run.terms
    recipe, metrics = Recipe.load(run.folder / RECIPE), read_lines(run.folder / METRICS)
    terms = Terms.read(recipe, record or _terms_stated(stated))
    public_data = tested(metrics) if record else bool(dict(stated["facts"]).get("public_data"))
    try:
        known: dict[str, Any] = {"rounds": run.finished_rounds, "entries": entries, "public_data": public_data}
        found = restated(recipe, run.recipe, terms, **known)
    except RunError as error:
        return [], [str(error)]
    unchecked = []
    found["warnings"] += [SEEN] if SEEN in stated["warnings"] else []
    if recipe.after is not None:
        try:
            found["warnings"] += going_on.warning(recipe, entries, found["proven_epsilon"])
        except InputError:
            unchecked.append(f"what it costs together with {recipe.after}, which is not here")
            found["warnings"] = stated["warnings"]
    different = differences(stated, found)
    here = versions(("fedflat",))["fedflat"]
    older = terms.fedflat != here
    words = [each for each in different if older and (worded(each) or (not record and unsaid(each)))]
    if words:
        made = f"fedflat {terms.fedflat}" if terms.fedflat else "fedflat 0.2"
        named = ", ".join(dict.fromkeys(each.field.partition("[")[0] for each in words))
        unchecked.append(f"the wording of {named}: {made} wrote it, and this is {here}; that version compares it")
    return [each for each in different if each not in words], unchecked


def _terms_stated(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a run of 0.2, as far as its own statement tells them."""
    facts = dict(stated["facts"])
    known = {
        name: facts[name] for name in ("personal", "finetuned", "client_state", "prior", "held_out") if name in facts
    }
    known |= {"algorithm": stated["algorithm"], "private": facts.get("clip") is not None}
    known |= {"identified": not facts.get("unidentified"), "deployment": bool(facts.get("deployment"))}
    return known


# -------------------------------------------------------------------------------------------------------- weights


def released_digest(path: Path, rounds: int) -> str | None:
    """Return the SHA-256 of an exported folder's weights, or of the checkpoint's after ``rounds``; None without."""
    if (path / MODEL).is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with contextlib.suppress(SafetensorError, OSError):
            return digest_of(load_file(path / MODEL))
        return ""
    file = path / "checkpoints" / f"round-{rounds:06d}.safetensors"
    if not file.is_file():
        return None
    try:
        state, _, facts = checkpoint.load(file, hidden=False)
    except InputError:
        return ""
    return digest_of(checkpoint.released(state, facts))


def tip_faults(run: Records) -> list[str]:
    """Return what of tips.jsonl does not fit the ledger."""
    text = (run.folder / TIPS).read_bytes() if (run.folder / TIPS).exists() else b""
    found = [f"no line for round {number}" for number in range(1, run.finished_rounds + 1) if number not in run.tips]
    if text and (not text.endswith(b"\n") or text.count(b"\n") != len(run.tips)):
        found.append("a line that is torn, comes twice or is none")
    for number, line in run.tips.items():
        if line.get("tip") != run.tip_at(line.get("events")):
            found.append(f"round {number} was finished with other events in the ledger")
    return found[:3]


# ----------------------------------------------------------------------------------------------------- signatures

UNSIGNED = "unsigned: chains and checksums are no signature, so who rewrites every file goes unseen"


def signatures(run: Records, public: Ed25519PublicKey | None, witness: Path | None) -> Iterator[Check]:
    """Hold signature.json, tips.jsonl and a client's tip against the ledger, the statement and the weights.

    public: the operator's key. Without one only what is signed is compared, not by whom.
    """
    yield _signature(run, public)
    signed = [line for line in run.tips.values() if "signed" in line]
    bad = [line["round"] for line in signed if not _tip_fits(run, line, public)]
    if bad:
        yield Check(TIPS, "wrong", f"round {bad[0]}: not what the operator signed")
    elif signed and public is not None:
        yield Check(TIPS, "ok", f"{len(signed)} of {len(run.tips)} rounds signed by this key")
    if witness is not None:
        yield Check(f"witness {witness.name}", *_witnessed(run, public, witness))


def _payload(envelope: Any, public: Ed25519PublicKey | None) -> dict[str, Any]:
    return signing.payload_of(envelope) if public is None else signing.opened(envelope, public)


def _signature(run: Records, public: Ed25519PublicKey | None) -> Check:
    path = run.folder
    if not (path / SIGNATURE).is_file():
        if public is not None and (path / STATEMENT).is_file():
            return Check("signature", "wrong", "there is none, and a key was given")
        return Check("signature", "unchecked", UNSIGNED)
    try:
        envelope = signing.read(path / SIGNATURE)
        found = _payload(envelope, public)
    except InputError as error:
        return Check(SIGNATURE, "wrong", str(error))
    said, subjects = found.get("predicate") or {}, found["subjects"]
    faults = [
        f"it is about another {name}" for name in (LEDGER, STATEMENT) if subjects.get(name) != _sha256(path / name)
    ]
    if said.get("run") != run.id or (run.entries and said.get("tip") != run.ledger.tip):
        faults.append("it is about another run or another ledger")
    weights = released_digest(path, run.finished_rounds)
    if weights is not None and subjects.get("weights") != weights:
        faults.append("it is about another model")
    if faults:
        return Check(SIGNATURE, "wrong", "; ".join(faults))
    if public is None:
        named = ", ".join(str(each.get("keyid"))[:16] for each in envelope["signatures"])
        return Check(SIGNATURE, "unchecked", f"about these records, by the key {named}; --key operator.pub checks it")
    return Check(SIGNATURE, "ok", f"run, ledger, statement and weights signed by the key {signing.keyid(public)[:16]}")


def _tip_fits(run: Records, line: Mapping[str, Any], public: Ed25519PublicKey | None) -> bool:
    try:
        found = _payload(line["signed"], public)
        expected = signing.tip_statement(run.id, line["round"], line["events"], line["tip"], line["checkpoint"])
    except (InputError, KeyError):
        return False
    return bool(found["predicate"] == expected["predicate"] and found["subject"] == expected["subject"])


def _witnessed(run: Records, public: Ed25519PublicKey | None, witness: Path) -> tuple[Verdict, str]:
    """Compare what a client kept of the run with the ledger."""
    try:
        said = _payload(signing.read(witness), public)["predicate"]
        events, name = int(said["events"]), str(said["run"])
    except InputError as error:
        return "wrong", str(error)
    except (KeyError, TypeError, ValueError):
        return "wrong", "no tip of a run"
    if name != run.id:
        return "wrong", "of another run"
    if events > len(run.entries):
        return "wrong", f"the client saw {events} events, and the ledger has {len(run.entries)}"
    if events and run.tip_at(events) != said.get("tip"):
        return "wrong", "the client saw other events than the ledger has"
    by = "" if public is not None else ", by a key that was not given"
    return "ok", f"the {events} events that the client saw are in the ledger{by}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


# ---------------------------------------------------------------------------------------------------------- pages


def page_fits(path: Path) -> bool | None:
    """Return whether report.html is the page of these records; None for a page of several runs."""
    from fedflat.report import public, read_run, render

    text = (path / REPORT).read_text("utf-8", "replace")
    title = re.search(r"<h1>([^<]*)</h1>", text)
    run = read_run(path)
    names = dict.fromkeys([run.name, str(run.recipe.get("name") or run.algorithm)])
    shown = html.unescape(title[1]) if title else ""
    if re.fullmatch(r"[\w.+ -]{1,60}", shown):  # the folder was renamed since
        names[shown] = None
    shapes = [public(run)] if locked(path) else [public(run), run]  # before 1.0 a run's page showed private charts too
    made = (render([dataclasses.replace(each, name=name)]) for each in shapes for name in names)
    if any(_of_any_folder(again) == _of_any_folder(text) for again in made):
        return True
    return None if 'id="differences"' in text or 'id="runs"' in text else False


def _of_any_folder(text: str) -> str:
    """Return a page without the folder's name in its commands, and without the day of its files: copies differ."""
    text = re.sub(r"(?<=fedflat\.load\(&#34;)[\w.+ -]{1,60}(?=&#34;\))", "", text)
    text = re.sub(r"(?<=<code>fedflat export )[\w.+-]{1,60}(?= FOLDER</code>)", "", text)
    return re.sub(r" · \d{1,2} [A-Z][a-z]{2,8} \d{4}(?=<)", "", text)


def card_fits(path: Path, name: str) -> bool | None:
    """Return whether a card is that of these records; None where it was made with ``--about`` or ``--with``."""
    from fedflat.report import card as making
    from fedflat.report import read_run

    made, text = making.card(read_run(path)), (path / name).read_text("utf-8", "replace")
    again = making.html(made) if name.endswith(".html") else making.markdown(made)
    if again == text:
        return True
    kept = making.figures(made, name.endswith(".html"))
    return None if all(line in text for line in kept) else False
