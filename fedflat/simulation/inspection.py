"""``fedflat verify``: every record of a run checked against every other, and what cannot be checked named.

Example::

    >>> for check in inspect_run("runs/quick-start"):  # doctest: +SKIP
    ...     print(check.verdict, check.record, check.about)
    ok ledger.jsonl 20 events in an unbroken chain
"""

import math
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedflat.config.reading import dumped
from fedflat.core import InputError, counted, digest_of, digest_of_file, read_tensors, require, wrong
from fedflat.privacy.ledger import read
from fedflat.privacy.statement import checksum
from fedflat.records import checkpoint, keys, signing
from fedflat.records import folder as files
from fedflat.records.folder import CARDS, LEDGER, METRICS, OPENING, PRIVATE, RECIPE, REPORT, SEALED, STATEMENT
from fedflat.records.opening import Opening
from fedflat.records.signing import MADE_FOR, SIGNATURE, TIPS
from fedflat.report.metrics import lost_rounds, read_records, uncounted
from fedflat.simulation import recomputed
from fedflat.simulation.recomputed import MODEL, PREPARATION, UNREADABLE, Check, Records, Verdict
from fedflat.simulation.settings import CHARGE, WINNER, faults


def inspect_run(folder: str | Path, key: Path | None = None, witness: Path | None = None) -> list[Check]:
    """Check every record of a run's folder, or of an exported one.

    key: the operator's public key, which must have signed the records. witness: a tip that a client kept.

    Raises:
        InputError: the folder holds no run, or a folder where a record belongs; key holds no public key.
    """
    path = Path(folder)
    require(witness is None or witness.is_file(), "--witness", f"{witness}, no such file", "a tip that a client kept")
    public = None if key is None else signing.read_public(key)
    runs = any((path / name).is_file() for name in (RECIPE, LEDGER, STATEMENT))
    if (path / CHARGE).is_file() and not runs:
        return [*check_selection(path, key, witness)]
    if not runs:
        state = "a folder without recipe.yaml, ledger.jsonl and privacy.json" if path.is_dir() else "no folder"
        raise wrong("verify", f"{path}, {state}", "the folder of a run, or an exported one")
    attested = (path / "check.py").is_file() and not (path / RECIPE).is_file()
    require(not attested, "verify", f"{path}, an attested folder", "a run or an export", hint="Its check.py checks it.")
    files.check_kinds(path)
    run = Records(path)
    run.refuse_older()
    return [*checked(run, CHECKS), *check_signed(run, public, witness)]


def checked(run: Records, checks: Mapping[str, Callable[[Records], Iterable[Check]]]) -> Iterator[Check]:
    """Yield what the checks say; the record of one that cannot be read, or made again, is wrong."""
    for record, check in checks.items():
        try:
            yield from check(run)
        except UNREADABLE as error:
            words = " ".join(str(error).split())
            yield Check(record, "wrong", words if isinstance(error, InputError) else f"cannot be read again ({words})")


def check_selection(path: Path, key: Path | None, witness: Path | None) -> Iterator[Check]:
    """Check a folder of fedflat tune: what was charged, what was public, what the winner states."""
    try:
        problems = faults(path)
    except InputError as error:
        problems = [str(error)]
    claim = "one charge of the selection that selection.yaml describes, not below the winner's ε"
    yield from _outcome(CHARGE, problems, claim)
    hidden = "how many there were is secret, the losers are deleted, and what was tried stands in no signed record"
    yield Check("the trials", "unchecked", hidden)
    if not (path / WINNER).is_dir():
        yield Check(WINNER, "unchecked", "there is none (yet)")
        return
    yield from (check._replace(record=f"{WINNER}/{check.record}") for check in inspect_run(path / WINNER, key, witness))


def refuse_damage(folder: Path) -> Records:
    """Return a run's records before they are used, once the same checks were asked without the second accountant; pages
    and modes may differ.

    Raises:
        InputError: the first record that is not as it was written, or says what the run does not give.
    """
    files.check_kinds(folder)
    read(folder / LEDGER)
    run = Records(folder)
    run.refuse_older()
    require((folder / STATEMENT).is_file(), str(folder / STATEMENT), "no such file", "the record as it was written")
    # The statement last: its fields are wrong as well where a record that they follow from is.
    ordered = sorted(CHECKS.items(), key=lambda item: item[0] == FIELDS)
    asked = {record: check for record, check in ordered if record not in UNASKED}
    for check in (*checked(run, asked), *check_signed(run)):
        if check.verdict == "wrong" and ".damaged" not in check.record and check.record not in (REPORT, *CARDS):
            place, hint = str(folder / check.record), f"See fedflat verify {folder}."
            fault = check.about.removeprefix(f"{place}: found ").partition("; allowed:")[0]
            raise wrong(place, fault, "the record as it was written", hint=hint)
    if uncounted(run.statement or {}, run.entries):
        fewer, hint = f"a statement of fewer rounds than {LEDGER} charges", f"fedflat run --resume {folder} goes on."
        raise wrong(str(folder / STATEMENT), fewer, "a run at its end", hint=hint)
    return run


def check_opening(run: Records) -> Iterator[Check]:
    """Check that private/run.json is whole, and that the ledger's lines are its run's."""
    if run.locked:
        yield Check(OPENING, "unchecked", f"{files.LOCKED}, where the seals of recipe and metrics lie; its owner can")
        return
    if not (run.folder / "private").is_dir():
        missing = "not in this folder, which is an exported one" if run.exported else f"missing, and so is {SEALED}"
        yield Check(OPENING, "unchecked" if run.exported else "wrong", missing)
        return
    opening = Opening.read(run.folder)
    expected = {"format": opening.format, "id": opening.run, "terms": dict(opening.terms), **opening.digests}
    first = {"attempt": 1, **(expected if run.first is None else run.first)}
    if {key: first.get(key) for key in expected} != expected or opening.attempt < first["attempt"]:
        other = "the ledger's lines are another run's, say other terms, or are of a later attempt"
        yield Check(OPENING, "wrong", other)
        return
    yield Check(OPENING, "ok", "the run's id, terms and keyed digests are those that the ledger's lines carry")
    yield Check("data, model", "unchecked", "only keyed digests are kept; --resume compares them with the data at hand")


def _unfinished(run: Records) -> str:
    """Return why there is no statement yet, of a run that goes on or was interrupted; "" where there should be one."""
    if run.exported:
        return ""
    if run.going:
        return "the run goes on; it is written when it ends"
    planned, done = run.setting("rounds"), max([run.stated_rounds, *(1 + entry["round"] for entry in run.entries)])
    if not isinstance(planned, int) or done >= planned:
        return ""
    return f"the run was interrupted (round {done} of {planned}); it is written when it ends"


def check_recipe(run: Records) -> Iterator[Check]:
    """Check that recipe.yaml is as it was written."""
    if not (run.folder / RECIPE).is_file():
        yield Check(RECIPE, "wrong", "missing")
    elif run.opening is None:
        yield Check(RECIPE, "unchecked", "its checksum lies in private/run.json, which cannot be read")
    else:
        yield _same(RECIPE, run.opening.is_recipe((run.folder / RECIPE).read_bytes()), "as it was written")


def _same(record: str, good: bool, claim: str) -> Check:
    return Check(record, "ok" if good else "wrong", claim if good else f"not {claim}")


def check_body(run: Records) -> Iterator[Check]:
    """Check the frozen body beside the weights against the digest that recipe.yaml names."""
    path = run.folder / files.BODY
    wanted = run.setting("model", "sha256") if run.setting("model", "name") in files.WITH_BODY else None
    if wanted and not path.is_file():
        yield Check(files.BODY, "wrong", "missing")
    elif wanted or path.exists():
        tensors = read_tensors(path) if path.is_file() else None
        yield _same(files.BODY, tensors is not None and digest_of(tensors) == wanted, "as recipe.yaml names it")


def check_ledger(run: Records) -> Iterator[Check]:
    """Check the ledger's chain, and that its last line is whole."""
    why, ledger = _unfinished(run), run.folder / LEDGER
    if not ledger.is_file():
        begun = not why or run.stated_rounds or (run.folder / METRICS).exists()
        yield Check(LEDGER, "wrong" if begun else "unchecked", "missing" if begun else "no round was begun")
    elif run.ledger.fault:
        yield Check(LEDGER, "wrong", run.ledger.fault)
    else:
        yield Check(LEDGER, "ok", f"{counted(len(run.entries), 'event')} in an unbroken chain")
        if not ledger.read_bytes().endswith(b"\n") and run.entries and not run.going:
            torn = "a torn last line, of an event whose round was not released; --resume sets it aside"
            yield Check(LEDGER, "unchecked" if why else "wrong", torn)


def check_account(run: Records) -> Iterator[Check]:
    """Check the stated ε by a second accountant, and that every released round has a line in the ledger."""
    if not (run.folder / LEDGER).is_file():  # missing, which is said already
        return
    why = _unfinished(run)
    if (run.folder / STATEMENT).is_file() and not (why and run.going):
        account = recomputed.second_account(run)
        stated, again = account.epsilon_recorded, account.epsilon_recomputed
        figures = f"ε stated {stated:.6g}, recomputed {again:.6g} ({account.method})"
        if math.isinf(stated):
            figures = "no finite ε is stated, so there is none to check"
        yield Check(STATEMENT, "wrong" if account.notes else "ok", "; ".join([figures, *account.notes]))
        return
    yield Check(STATEMENT, "unchecked" if why else "wrong", why or "missing")
    if missing := set(range(run.stated_rounds)) - {entry["round"] for entry in run.entries}:
        yield Check(LEDGER, "wrong", f"no line for round {min(missing)}, which was released")


def check_fields(run: Records) -> Iterator[Check]:
    """Check that privacy.json is as it was written and this run's; and every figure and sentence of it, and each
    round's ε and clip, by recipe, ledger and code.
    """
    if not (run.folder / STATEMENT).is_file():
        return
    body = run.statement or {}
    here = run.opening.run if run.opening is not None else (run.first or {}).get("id")
    if body.get("checksum") != checksum(body) or (here is not None and body.get("run") != here):
        yield Check(STATEMENT, "wrong", "not as it was written")
    if run.going or (_unfinished(run) and body.get("rounds") != run.finished_rounds):
        return
    comparable = bool(run.metrics and run.entries)
    different, unchecked = recomputed.remade(run)
    faults_shown = list(recomputed.metrics_faults(run)) if comparable else []
    contrary = list(recomputed.ledger_faults(run)) if run.entries else []
    yield from (Check(LEDGER, "wrong", fault) for fault in contrary[:5])
    yield from (Check(FIELDS, "unchecked", reason) for reason in unchecked)
    yield from _outcome(FIELDS, different, "as recipe, ledger, metrics and this code give it")
    if comparable:
        yield from _outcome(SHOWN, faults_shown, "as recipe, ledger and this code give them")
    weights = recomputed.released(run, run.stated_rounds)
    if weights is not None:
        yield _same("the weights", body.get("weights") == weights[0], "those of the statement")


FIELDS, SHOWN, METADATA = f"{STATEMENT}, every field", f"{METRICS}, ε and clip", f"{MODEL}, metadata"


def check_rounds(run: Records) -> Iterator[Check]:
    """Check that every line of metrics.jsonl and private.jsonl is as it was sealed, and no round is missing."""
    for name in (METRICS,) if run.locked else (METRICS, PRIVATE):
        if not (run.folder / name).exists():
            if (run.folder / files.seals_of(name)).exists() or (name == METRICS and run.stated_rounds):
                yield Check(name, "wrong", "missing, although rounds were finished")
        elif run.opening is None:
            gone = lost_rounds(run.stated_rounds, read_records(run.folder / name)) if name == METRICS else []
            yield Check(name, "unchecked", "its seals need private/run.json")
            yield from (Check(name, "wrong", f"no line for round {round}") for round in gone)
        else:
            one = _check_seals(run, files.RunFolder(run.folder, run=run.opening.run), name)
            yield one._replace(verdict="unchecked", about=WRITING) if run.going and one.verdict == "wrong" else one


WRITING = "the run goes on, and lines are being written"


def _check_seals(run: Records, folder: files.RunFolder, name: str) -> Check:
    text, path = (run.folder / name).read_bytes(), run.folder / files.seals_of(name)
    seals = path.read_bytes() if path.exists() else b""
    lines, sealed = text.count(b"\n"), folder.sealed_rounds(name)
    gaps = set(range(max(run.stated_rounds, max(sealed, default=-1) + 1))) - sealed
    torn = any(content and not content.endswith(b"\n") for content in (text, seals))
    odd = seals.count(b"\n") != lines or any(len(line.split()) != 2 for line in seals.splitlines())
    if len(sealed) != lines or gaps or torn or odd:
        found = f"{counted(lines, 'line')} and {len(seals.splitlines())} seals, of which {len(sealed)} fit"
        return Check(name, "wrong", f"{found}{f'; none for round {min(gaps)}' if gaps else ''}")
    return Check(name, "ok", f"{counted(lines, 'line')}, as written")


def _outcome(record: str, faults: Sequence[object], claim: str) -> Iterator[Check]:
    """Yield the first faults of a record; without any, that the claim holds."""
    yield from (Check(record, "wrong", str(fault)) for fault in faults[:5])
    if not faults:
        yield Check(record, "ok", claim)


def check_checkpoints(run: Records) -> Iterator[Check]:
    """Check both halves of every checkpoint against their checksums, the run's id, the ledger and tips.jsonl."""
    path, there = run.folder, sorted((run.folder / "checkpoints").glob("round-*.safetensors"))
    for file in there:
        try:
            _, _, facts = checkpoint.load(file, hidden=not run.locked)
            fault, events = _foreign(run, facts), (facts.get("ledger") or {}).get("events", 0)
        except InputError as error:
            fault, events = str(error), 0
        sentence = fault or f"this run's, made after {counted(events, 'event')}"
        yield Check(f"checkpoints/{file.name}", "wrong" if fault else "ok", sentence)
    newest, done = max(map(checkpoint.round_of, there), default=0), run.stated_rounds
    if (path / "private").is_dir() and newest < done:
        yield Check("checkpoints/", "wrong", f"the newest is of round {newest}, the run finished {done}")
    for file in sorted(path.rglob("*.damaged*")):
        yield Check(str(file.relative_to(path)), "wrong", "set aside as damaged when the run was resumed")


def _foreign(run: Records, facts: Mapping[str, Any]) -> str:
    """Return why a sound checkpoint is not this run's, or ""."""
    mark, tip = facts.get("ledger") or {}, run.tips.get(facts["round"]) or {}
    if run.id and facts.get("run", run.id) != run.id:
        return "of another run"
    if mark.get("tip") is None or run.tip_at(mark.get("events")) != mark["tip"]:
        return "not made after the ledger's events"
    return "" if tip.get("checkpoint") == facts["sha256"] else f"not named by {TIPS}"


def check_tips(run: Records) -> Iterator[Check]:
    """Check that tips.jsonl has a line for each finished round, with the ledger's tip then."""
    path = run.folder / TIPS
    # A round that was killed before its checkpoint runs again.
    last = run.stated_rounds if _unfinished(run) else run.finished_rounds
    problems = [f"no line for round {number}" for number in range(1, last + 1) if number not in run.tips]
    problems += [IRREGULAR] if path.exists() and files.whole_lines(path) is None else []
    for number, line in run.tips.items():
        tip, due = run.tip_at(line.get("events")), range(min(number, len(run.entries)))
        paid = {entry["round"] for entry in run.entries[: line["events"]]} if tip else set()
        if line.get("tip") != tip or not paid.issuperset(due):
            problems.append(f"round {number} was finished with other events in the ledger")
        if not 0 < number <= run.finished_rounds or line.keys() - TIP:
            problems.append(f"round {number}: a line that no round of this run has")
    claim = f"{counted(len(run.tips), 'round')}, each with the ledger's tip"
    yield from [Check(TIPS, "unchecked", WRITING)] if problems and run.going else _outcome(TIPS, problems, claim)


def check_mark(run: Records) -> Iterator[Check]:
    """Check the mark beside the noise key, of runs with a key of their own."""
    if run.opening is None or not (run.folder / LEDGER).exists():
        return
    if not keys.Mark(run.opening.run).path.exists():
        if run.setting("privacy", "randomness") == "secret":
            yield Check(MARK, "unchecked", "not on this machine: whether every key was used once cannot be seen here")
        return
    _, why = keys.compare(run.opening.run, run.entries)
    yield Check(MARK, "wrong" if why else "ok", why or f"{counted(len(run.entries), 'event')}, as in the ledger")


def check_sums(run: Records) -> Iterator[Check]:
    """Check the files of an exported folder against its SHA256SUMS."""
    if not run.exported:
        return
    path = run.folder
    wanted = [line.partition("  ")[::2] for line in (path / SEALED).read_text("utf-8", "replace").splitlines()]
    for name in sorted({MODEL, LEDGER, STATEMENT, RECIPE, METRICS} - {pair[-1] for pair in wanted}):
        yield Check(SEALED, "wrong", f"no line for {name}")
    for name in sorted(set(run.files) - {SEALED, *(pair[-1] for pair in wanted)}):
        yield Check(name, "wrong", f"not in {SEALED}: nobody exported it")
    for digest, name in wanted:
        # A name that is none of the folder's files may lead out of it.
        yield _same(
            name or SEALED, name in run.files and digest_of_file(path / name) == digest != "", "as it was exported"
        )
    if run.recipe is not None and (path / RECIPE).read_bytes() != dumped(run.recipe).encode():
        yield Check(RECIPE, "wrong", "has a comment, or another form than an export writes")
    if files.whole_lines(path / METRICS) is None:
        yield Check(METRICS, "wrong", IRREGULAR)


TIP = {"round", "events", "tip", "checkpoint", "signed"}
"""What a line of tips.jsonl says."""
IRREGULAR = "a line that is torn, comes twice or is none, or has a key twice"


def check_metadata(run: Records) -> Iterator[Check]:
    """Check what an exported model says of itself: its round, the inputs it takes, and the names of its classes."""
    if (run.folder / MODEL).is_file():
        problems = list(recomputed.metadata_faults(run))
        yield from _outcome(METADATA, problems, f"as {STATEMENT}, {PREPARATION} and {RECIPE} have it")


def check_signed(run: Records, public: Ed25519PublicKey | None = None, witness: Path | None = None) -> Iterator[Check]:
    """Check what an operator signed, and what a client saw: signature.json, tips.jsonl and a client's tip.

    public: the operator's key. Without one this account's is tried, if it has one and signed the run; else only what is
    signed is compared, not by whom.
    """
    if public is None and (account_key := signing.own_key(run.folder)) is not None:
        public = signing.read_public(account_key)
    yield from _signature(run, public)
    signed = [line for line in run.tips.values() if "signed" in line]
    bad = [line["round"] for line in signed if not _tip_fits(run, line, public)]
    if bad:
        yield Check(TIPS, "wrong", f"round {bad[0]}: not what the operator signed")
    elif run.tips and public is not None:
        some = bool(signed) or (run.folder / SIGNATURE).is_file()
        verdict: Verdict = "ok" if len(signed) == len(run.tips) else "unchecked" if some else "wrong"
        yield Check(TIPS, verdict, f"{len(signed)} of {len(run.tips)} rounds signed by this key")
    if witness is not None:
        yield Check(f"witness {witness.name}", *_witnessed(run, public, witness))


def _signature(run: Records, public: Ed25519PublicKey | None) -> Iterator[Check]:
    path = run.folder
    if not (path / SIGNATURE).is_file():
        missing = public is not None and (path / STATEMENT).is_file()
        text = "there is none, and a key was given" if missing else TEXTS["unsigned"]
        yield Check("signature", "wrong" if missing else "unchecked", text)
        return
    try:
        payload = signing.opened(signing.read(path / SIGNATURE), public)
    except InputError as error:
        yield Check(SIGNATURE, "wrong", str(error))
        return
    predicate, subjects = payload.get("predicate") or {}, payload["subjects"]
    weights = recomputed.released(run, run.finished_rounds)
    ours, gone = signing.subjects_of(path, *(weights or ("", None))), () if weights else ("weights", MADE_FOR)
    different = [name for name, digest in ours.items() if name not in gone and digest != subjects.get(name)]
    others = [f"it is about other {name}" for name in different]
    if predicate.get("run") != run.id or (run.entries and predicate.get("tip") != run.ledger.tip):
        others.append("it is about another run or another ledger")
    if others:
        yield Check(SIGNATURE, "wrong", "; ".join(others))
    elif public is None:
        yield Check(SIGNATURE, "unchecked", "about these records; --key operator.pub checks whose it is")
    else:
        covered = f"run, ledger, statement, weights, metrics, {MADE_FOR}"
        yield Check(SIGNATURE, "ok", f"{covered} signed by the key {signing.keyid(public)[:16]}")


def _tip_fits(run: Records, line: Mapping[str, Any], public: Ed25519PublicKey | None) -> bool:
    try:
        payload = signing.opened(line["signed"], public)
        expected = signing.tip_statement(run.id, line["round"], line["events"], line["tip"], line["checkpoint"])
    except (InputError, KeyError):
        return False
    return bool(payload["predicate"] == expected["predicate"] and payload["subject"] == expected["subject"])


def _witnessed(run: Records, public: Ed25519PublicKey | None, witness: Path) -> tuple[Verdict, str]:
    """Compare what a client kept of the run with the ledger."""
    try:
        tip = signing.opened(signing.read(witness), public)["predicate"]
        events, name = int(tip["events"]), str(tip["run"])
    except UNREADABLE as error:
        return "wrong", f"no tip of a run ({error})"
    if name != run.id:
        return "wrong", "of another run"
    if events and run.tip_at(events) != tip.get("tip"):
        return "wrong", f"the client saw {events} events, and not these are in the ledger, of {len(run.entries)}"
    by = "" if public is not None else ", by a key that was not given"
    return "ok", f"the {events} events that the client saw are in the ledger{by}"


def check_pages(run: Records) -> Iterator[Check]:
    """Check report.html and the cards, made again from the records."""
    for name in (REPORT, *CARDS):
        if not (run.folder / name).is_file() or run.going:
            continue
        try:
            yield Check(name, *(recomputed.check_page(run) if name == REPORT else recomputed.check_card(run, name)))
        except UNREADABLE as error:
            yield Check(name, "unchecked", str(error))


def check_strangers(run: Records) -> Iterator[Check]:
    """Name the files that no other check covers: known ones with the reason, then unknown ones.

    In an exported folder that SHA256SUMS names them makes no difference: whoever adds a file can redo it.
    """
    covered = (*COVERED, *((MODEL, PREPARATION, SEALED) if run.exported else ()))
    others = [file for file in run.files if not any(_fits(file, one) for one in covered)]
    known = {file: why for file in others for one, why in BESIDE.items() if _fits(file, one)}
    yield from (Check(name, "unchecked", f"known, not covered: {why}") for name, why in known.items())
    links = [name for name in run.files if (run.folder / name).is_symlink()]
    yield from (Check(name, "unchecked", "a link: what it leads to may change") for name in links)
    strange = [file for file in others if file not in known]
    unknown = "unknown: no record of a run, and nothing here covers it"
    yield from (Check(name, "unchecked", unknown) for name in strange)
    counts = f"{len(run.files) - len(others)} known and covered, {len(known)} known and not covered"
    yield Check("files", "ok", f"{counts}, {len(strange)} unknown")


def _fits(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) and file.count("/") == pattern.count("/")


COVERED = (
    RECIPE, METRICS, files.seals_of(METRICS), LEDGER, STATEMENT, OPENING, PRIVATE, files.seals_of(PRIVATE), TIPS,
    SIGNATURE, files.BODY, REPORT, *CARDS, "*.damaged*", "checkpoints/round-*.safetensors",
    "private/heads/round-*.safetensors",
)  # fmt: skip
"""Files that the other checks look at."""
TEXTS = yaml.safe_load(Path(__file__).with_name("inspection.yaml").read_text("utf-8"))
BESIDE: dict[str, str] = TEXTS["beside"]
"""Files of a run that nothing here covers, each with what it is; no guarantee rests on them."""


def check_modes(run: Records) -> Iterator[Check]:
    """Check that private/ is for its owner only."""
    if not (run.folder / "private").is_dir():
        return
    inside = [run.folder / "private", *([] if run.locked else (run.folder / "private").rglob("*"))]
    open_to_others = [file for file in inside if stat.S_IMODE(file.stat().st_mode) & 0o077]
    named = ", ".join(str(file.relative_to(run.folder)) for file in open_to_others[:3])
    yield Check("private/", "wrong" if named else "ok", f"readable by others: {named}" if named else "its owner's only")


MARK = "noise key's mark"
CHECKS: dict[str, Callable[[Records], Iterable[Check]]] = {
    OPENING: check_opening, RECIPE: check_recipe, files.BODY: check_body, LEDGER: check_ledger,
    STATEMENT: check_account, "checkpoints/": check_checkpoints, FIELDS: check_fields, METRICS: check_rounds,
    TIPS: check_tips, MARK: check_mark, SEALED: check_sums, METADATA: check_metadata, REPORT: check_pages,
    "files": check_strangers, "private/": check_modes,
}  # fmt: skip
"""The checks, each by the record that is wrong where it cannot be made."""
UNASKED = (LEDGER, STATEMENT, MARK, REPORT, "files", "private/")
"""Records that may differ, or take long, before a run is used."""
