"""``fedflat verify``: every record of a run checked against every other, and what cannot be checked named."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fedflat.core.cache import digest_of, read_tensors
from fedflat.core.checks import InputError, wrong
from fedflat.engine.resume import compare
from fedflat.models.representation import FILE, NAME
from fedflat.privacy.ledger import Entry, LedgerError, read, run_of
from fedflat.privacy.statement import checksum
from fedflat.privacy.verify import Verification, verify_run
from fedflat.records import checkpoint, keys
from fedflat.records.folder import (
    LEDGER,
    METRICS,
    OPENING,
    PRIVATE,
    RECIPE,
    STATEMENT,
    RunFolder,
    check_kinds,
    seals_of,
)
from fedflat.records.opening import Opening
from fedflat.simulation.export import MODEL, SUMS
from fedflat.simulation.tuning_records import CHARGE, WINNER, faults

Verdict = Literal["ok", "wrong", "unchecked"]


@dataclass(frozen=True)
class Check:
    """One record: what was checked, the outcome, and a sentence about it."""

    record: str
    verdict: Verdict
    about: str


def inspect_run(folder: str | Path) -> list[Check]:
    """Check every record of a run's folder, or of an exported one.

    Raises:
        InputError: the folder holds no run, or a folder where a record belongs.
    """
    path = Path(folder)
    if (path / CHARGE).is_file():
        return [*check_selection(path), *_of_the_winner(path / WINNER)]
    if not any((path / name).is_file() for name in (RECIPE, LEDGER, STATEMENT)):
        found = "a folder without recipe.yaml, ledger.jsonl and privacy.json" if path.is_dir() else "no folder"
        raise wrong("verify", f"{path}, {found}", "the folder of a run, or an exported one")
    check_kinds(path)
    return [check for each in CHECKS for check in each(path)]


def check_selection(path: Path) -> Iterator[Check]:
    """A folder of fedflat tune: what was charged, what was public, what the winner states."""
    try:
        wrongs = faults(path)
    except InputError as error:
        wrongs = [str(error)]
    for fault in wrongs:
        yield Check(CHARGE, "wrong", fault)
    if not wrongs:
        yield Check(CHARGE, "ok", "one charge of the selection that selection.yaml describes, not below the winner's ε")
    yield Check(
        "the trials", "unchecked", "how many there were and which scored best is secret, and the losers deleted"
    )


def _of_the_winner(path: Path) -> list[Check]:
    if not path.is_dir():
        return [Check(WINNER, "unchecked", "there is none (yet)")]
    return [Check(f"{WINNER}/{check.record}", check.verdict, check.about) for check in inspect_run(path)]


def refuse_damage(folder: Path) -> None:
    """Check every record that has a checksum, without working out ε again.

    Raises:
        InputError: the first that is not as it was written.
    """
    check_kinds(folder)
    read(folder / LEDGER)
    found = [
        check for each in (check_opening, check_recipe, check_body, check_rounds, check_sums) for check in each(folder)
    ]
    found += [check for check in check_checkpoints(folder) if ".damaged" not in check.record]
    if not _whole_statement(folder):
        found.append(Check(STATEMENT, "wrong", "not as it was written"))
    for check in found:
        if check.verdict == "wrong":
            hint = f"See fedflat verify {folder}."
            raise wrong(str(folder / check.record), check.about, "the record as it was written", hint=hint)


def _opening(path: Path) -> Opening | None:
    try:
        return Opening.read(path)
    except InputError:
        return None


def check_opening(path: Path) -> Iterator[Check]:
    """private/run.json is whole, and the ledger's lines are its run's."""
    name = "private/run.json"
    if _old(path):
        yield Check(name, "unchecked", "a run of fedflat 0.1 has none, nor seals and checksums")
        return
    if not (path / "private").is_dir():
        if (path / SUMS).is_file():
            yield Check(name, "unchecked", "not in this folder, which is an exported one")
        else:
            yield Check(name, "wrong", f"missing, and this is no exported folder: it has no {SUMS}")
        return
    try:
        opening = Opening.read(path)
    except InputError as error:
        yield Check(name, "wrong", str(error))
        return
    try:
        carried = run_of(read(path / LEDGER)) if (path / LEDGER).exists() else None
    except InputError:
        carried = None  # the ledger's own check says why
    if carried is not None and {key: carried.get(key) for key in ("id", *opening.digests)} != {
        "id": opening.run,
        **opening.digests,
    }:
        yield Check(name, "wrong", "the ledger's lines are another run's")
        return
    if carried is not None and opening.attempt < carried.get("attempt", 1):
        yield Check(name, "wrong", f"of attempt {opening.attempt}, older than the ledger's {carried['attempt']}")
        return
    yield Check(name, "ok", "the run's id and keyed digests are those that the ledger's lines carry")
    yield Check("data, model", "unchecked", "only keyed digests are kept; --resume compares them with the data at hand")


def _old(path: Path) -> bool:
    """Whether this is a run of fedflat 0.1: its ledger names no run, and its statement has no checksum."""
    if (path / OPENING).exists() or (path / SUMS).is_file() or not (path / LEDGER).is_file():
        return False
    body: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads((path / STATEMENT).read_bytes())
    sealed = isinstance(body, dict) and "checksum" in body
    return not sealed and run_of(_entries(path)) is None and not (path / seals_of(METRICS)).exists()


def _going(path: Path) -> bool:
    """Whether a process has the run's ledger open for writing."""
    try:
        lock = os.open((path / LEDGER).with_suffix(".lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _unfinished(path: Path) -> str:
    """Why there is no statement yet, of a run that goes on or was interrupted; "" where there should be one."""
    if (path / SUMS).is_file():
        return ""
    if _going(path):
        return "the run goes on; it is written when it ends"
    planned = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        planned = int(yaml.safe_load((path / RECIPE).read_bytes())["rounds"])
    done = max([_finished(path), *(1 + entry["round"] for entry in _entries(path))])
    if done >= planned:
        return ""
    return f"the run was interrupted (round {done} of {planned}); it is written when it ends"


def check_recipe(path: Path) -> Iterator[Check]:
    """recipe.yaml as it was written."""
    opening = _opening(path)
    if not (path / RECIPE).is_file():
        yield Check(RECIPE, "wrong", "missing")
    elif opening is None:
        yield Check(RECIPE, "unchecked", "its checksum lies in private/run.json, which is missing or damaged")
    elif opening.is_recipe((path / RECIPE).read_bytes()):
        yield Check(RECIPE, "ok", "as it was written")
    else:
        yield Check(RECIPE, "wrong", "not as it was written")


def check_body(path: Path) -> Iterator[Check]:
    """The frozen body beside the weights, against the digest that recipe.yaml names."""
    wanted: Any = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        model = yaml.safe_load((path / RECIPE).read_bytes())["model"]
        wanted = model["sha256"] if model["name"] == NAME else None
    if not wanted and not (path / FILE).exists():
        return
    if not (path / FILE).is_file():
        yield Check(FILE, "wrong", "missing")
        return
    found = read_tensors(path / FILE)
    same = found is not None and digest_of(found) == wanted
    yield Check(FILE, "ok" if same else "wrong", "as recipe.yaml names it" if same else "not the one of recipe.yaml")


def check_privacy(path: Path) -> Iterator[Check]:
    """Ledger, statement and metrics: the chain, ε by a second accountant, a line for every released round."""
    why = _unfinished(path)
    if not (path / LEDGER).is_file():
        begun = not why or _finished(path) or (path / METRICS).exists()
        yield Check(LEDGER, "wrong" if begun else "unchecked", "missing" if begun else "no round was begun")
        return
    try:
        entries = read(path / LEDGER)
        yield Check(LEDGER, "ok", f"{_count(len(entries), 'event')} in an unbroken chain")
    except LedgerError as error:
        yield Check(LEDGER, "wrong", str(error))
        entries = []
    if not (path / STATEMENT).is_file() or (why and _going(path)):
        yield Check(STATEMENT, "unchecked" if why else "wrong", why or "missing")
        missing = set(range(_finished(path))) - {entry["round"] for entry in entries}
        if missing:
            yield Check(LEDGER, "wrong", f"no line for round {min(missing)}, which was released")
        return
    try:
        found = verify_run(path)
    except InputError as error:
        yield Check(STATEMENT, "wrong", str(error))
        return
    about = figures(found)
    notes = [*found.notes, *([] if _whole_statement(path) else ["not as it was written"])]
    yield Check(STATEMENT, "wrong" if notes else "ok", "; ".join([about, *notes]))


def figures(found: Verification) -> str:
    """The stated and the recomputed ε in words."""
    if math.isinf(found.epsilon_recorded):
        return "no finite ε is stated, so there is none to check"
    return f"ε stated {found.epsilon_recorded:.6g}, recomputed {found.epsilon_recomputed:.6g} ({found.method})"


def _whole_statement(path: Path) -> bool:
    """Whether privacy.json is as it was written, and this run's; one of before 0.2, whose ledger names no run, has no
    checksum."""
    body: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads((path / STATEMENT).read_bytes())
    if not isinstance(body, dict):
        return False
    opening, carried = _opening(path), run_of(_entries(path))
    if "checksum" not in body:
        return not (path / OPENING).exists() and carried is None
    here = opening.run if opening is not None else (carried or {}).get("id")
    return bool(body["checksum"] == checksum(body)) and (here is None or body.get("run", here) == here)


def check_rounds(path: Path) -> Iterator[Check]:
    """metrics.jsonl and private.jsonl: every line as it was sealed, no round missing."""
    opening = _opening(path)
    for name in (METRICS, PRIVATE):
        if not (path / name).exists():
            if (path / seals_of(name)).exists() or (name == METRICS and _finished(path)):
                yield Check(name, "wrong", "missing, although rounds were finished")
            continue
        if opening is None:
            yield Check(name, "unchecked", "its seals need private/run.json")
            continue
        found = _sealed(RunFolder(path, run=opening.run), name)
        if found.verdict == "wrong" and _going(path):
            found = Check(name, "unchecked", "the run goes on, and lines are being written")
        yield found


def _finished(path: Path) -> int:
    """The number of finished rounds that other files know of."""
    saved = [checkpoint.round_of(file) for file in (path / "checkpoints").glob("round-*.safetensors")]
    stated = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # its own check says why
        stated = int(json.loads((path / STATEMENT).read_bytes())["rounds"])
    return max([0, stated, *saved])


def _sealed(folder: RunFolder, name: str) -> Check:
    text = (folder.path / name).read_bytes()
    lines, sealed = text.count(b"\n"), folder.sealed_rounds(name)
    gaps = sorted(set(range(max(_finished(folder.path), max(sealed, default=-1) + 1))) - sealed)
    seals = (folder.path / seals_of(name)).read_bytes() if (folder.path / seals_of(name)).exists() else b""
    torn = any(content and not content.endswith(b"\n") for content in (text, seals))
    if len(sealed) != lines or gaps or torn or any(len(line.split()) != 2 for line in seals.splitlines()):
        missing = f"; no sound line for round {gaps[0]}" if gaps else ""
        return Check(name, "wrong", f"{lines} lines, {len(sealed)} as they were written{missing}")
    return Check(name, "ok", f"{_count(lines, 'line')}, as written")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _entries(path: Path) -> list[Entry]:
    try:
        return read(path / LEDGER)
    except InputError:
        return []


def _events(path: Path) -> int:
    return len(_entries(path))


def check_checkpoints(path: Path) -> Iterator[Check]:
    """Both halves of every checkpoint against their checksums, and against the ledger."""
    found = sorted((path / "checkpoints").glob("round-*.safetensors"))
    for file in found:
        name = f"checkpoints/{file.name}"
        try:
            _, _, facts = checkpoint.load(file)
        except InputError as error:
            if _old(path) and checkpoint.unsealed(file):
                yield Check(name, "unchecked", "of fedflat 0.1, without a checksum")
            else:
                yield Check(name, "wrong", str(error))
            continue
        mark = facts.get("ledger") or {}
        follows = _follows(path, mark)
        if not follows:
            yield Check(name, "wrong", "not made after the ledger's events")
            continue
        yield Check(name, "ok", f"checksums match, made after {_count(mark['events'], 'event')}")
    newest = max(map(checkpoint.round_of, found), default=0)
    if (path / "private").is_dir() and newest < _finished(path):
        yield Check("checkpoints/", "wrong", f"the newest is of round {newest}, the run finished {_finished(path)}")
    for file in sorted(path.rglob("*.damaged*")):
        yield Check(str(file.relative_to(path)), "wrong", "set aside as damaged when the run was resumed")


def _follows(path: Path, mark: Mapping[str, Any]) -> bool:
    """Whether the ledger begins with the events that a checkpoint was made after."""
    try:
        entries = read(path / LEDGER)
    except InputError:
        return False
    if not mark or mark["events"] > len(entries):
        return False
    events = mark["events"]
    return bool(events == len(entries) or entries[events]["previous"] == mark["tip"])


def check_mark(path: Path) -> Iterator[Check]:
    """The mark beside the noise key, of runs with a key of their own."""
    opening, name = _opening(path), "noise key's mark"
    if opening is None or not (path / LEDGER).exists():
        return
    if not keys.Mark(opening.run).path.exists():
        if _keyed_by_entropy(path):
            yield Check(name, "unchecked", "not on this machine: whether every key was used once cannot be seen here")
        return
    try:
        lost, why = compare(opening.run, read(path / LEDGER))
    except InputError as error:
        yield Check(name, "wrong", str(error))
        return
    good = not lost and not why
    yield Check(name, "ok" if good else "wrong", why or f"{_count(_events(path), 'event')}, as in the ledger")


def _keyed_by_entropy(path: Path) -> bool:
    """Whether the run's recipe asks for a key of its own."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return bool(yaml.safe_load((path / RECIPE).read_bytes())["privacy"]["secure_rng"])
    return False


def check_sums(path: Path) -> Iterator[Check]:
    """SHA256SUMS of an exported folder."""
    if not (path / SUMS).is_file():
        return
    wanted = [line.split("  ", 1) for line in (path / SUMS).read_text("utf-8", "replace").splitlines()]
    for name in sorted({MODEL, LEDGER, STATEMENT, RECIPE, METRICS} - {pair[-1] for pair in wanted}):
        yield Check(SUMS, "wrong", f"no line for {name}")
    strange = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    for name in sorted(strange - {SUMS, *(pair[-1] for pair in wanted)}):
        yield Check(name, "wrong", f"not in {SUMS}: nobody exported it")
    for known, name in (pair for pair in wanted if len(pair) == 2):
        file = path / name
        same = file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == known
        yield Check(name, "ok" if same else "wrong", "as it was exported" if same else "not as it was exported")


def check_limits(path: Path) -> Iterator[Check]:
    """What no record can show."""
    yield Check("the whole", "unchecked", "chains and checksums are no signature: who rewrites every file goes unseen")


def check_modes(path: Path) -> Iterator[Check]:
    """private/ is for its owner only."""
    if not (path / "private").is_dir():
        return
    inside = [path / "private", *(path / "private").rglob("*")]
    open_to_others = [file for file in inside if stat.S_IMODE(file.stat().st_mode) & 0o077]
    shown = ", ".join(str(file.relative_to(path)) for file in open_to_others[:3])
    yield Check("private/", "wrong" if shown else "ok", f"readable by others: {shown}" if shown else "its owner's only")


CHECKS: tuple[Callable[[Path], Iterator[Check]], ...] = (
    check_opening,
    check_recipe,
    check_body,
    check_privacy,
    check_rounds,
    check_checkpoints,
    check_mark,
    check_sums,
    check_modes,
    check_limits,
)
