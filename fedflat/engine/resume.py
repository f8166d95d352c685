"""Resume a run: what its folder proves, which key draws its next rounds, what is charged again.

A round that may have been released is drawn again with the same key only where that provably gives the same bits: the
same run (``opening``), the same software, the same clients' answers, and a key whose use is known. Otherwise it is one
release more: a fresh key, and one more charge.
"""

import hmac
import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fedflat.core import PersonalState, RunError, fresh_key, noise_key, wrong
from fedflat.engine.device import exact
from fedflat.engine.job import Job, Record, Start
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Backend
from fedflat.privacy.ledger import Entry, Ledger, run_of
from fedflat.privacy.statement import is_whole
from fedflat.records import checkpoint, keys
from fedflat.records.folder import CARDS, METRICS, OPENING, REPORT, STATEMENT, set_aside
from fedflat.records.opening import Opening, machine
from fedflat.records.signing import SIGNATURE, TIPS, keep_tips, tips_of

GONE = "the noise key is gone"
OF_A_STOP = (SIGNATURE, REPORT, f"private/{REPORT}", *CARDS, STATEMENT)
_PLANNED = (
    "mechanism", "sampling", "relation", "trust", "clients", "cohort", "q", "noise_multiplier", "delta", "separation",
    "factor",
)  # fmt: skip
"""Fields of a ledger line that the plan fixes for the whole run."""


def first_start(job: Job) -> Start:
    """Return the start of a run that has no record yet: w^0, before round 0."""
    size = job.parts.layout.dimension
    state = job.parts.first_state(job.initial_weights[:size], job.threshold)
    # A server keeps no client's state, so it has no place for them either.
    states = () if job.folder is not None and job.folder.deployment else job.parts.algorithm.client_state
    return Start(state, PersonalState(job.initial_weights[size:].clone(), states={s.name: {} for s in states}), [], [])


def resume_run(job: Job, ledger: Ledger) -> Start:
    """Return the state to go on from, with ``job.key`` chosen and everything charged that may be released twice.

    Raises:
        InputError: the ledger is another run's or another plan's, or lacks events that the run's other files prove.
    """
    if job.folder is None or job.opening is None:
        raise TypeError("a run without a folder has nothing to take up")
    for note in ledger.notes:
        job.say(note)
    _check_ledger(job, ledger)
    statement = job.folder.path / STATEMENT
    if statement.exists() and not is_whole(statement):  # the run writes its own at its end
        aside = set_aside(statement).name
        job.say(f"{statement.name} is not as it was written; set aside as {aside}, a new one comes at the end")
    named = checkpoint.rounds_named(job.folder.checkpoints)  # before a damaged one is set aside
    loaded = checkpoint.newest(job.folder.checkpoints, lambda path, why: job.say(_aside(path, why)))
    start = first_start(job)
    state, heads, facts = (start.state, start.heads, {}) if loaded is None else loaded
    # Its weights would go on under another run's ledger.
    if facts.get("run", job.opening.run) != job.opening.run:
        raise wrong(str(job.folder.checkpoints), "a checkpoint of another run", "those of the run in this folder")
    _check_noted(job, state.round, facts, ledger.entries)
    _check_events(job, ledger, max([state.round, *named]), facts.get("ledger"))
    history, private, damage = job.folder.keep_rounds(state.round)
    keep_tips(job.folder.path, state.round)
    for note in damage:
        job.say(note)
    ledger.copy_to(lambda line: _follow(ledger.path.parent, line))
    _choose_key(job, ledger, state.round, facts.get("sha256", ""))
    return Start(state, heads, history, private)


def _follow(path: Path, line: bytes, mark: keys.Mark | None = None) -> None:
    """Copy a new ledger line to the run's mark; take away what an earlier stop said of ε, not pages made since."""
    if mark is not None:
        mark.append(line)
    for name in OF_A_STOP if (path / STATEMENT).exists() else ():
        (path / name).unlink(missing_ok=True)


def _check_noted(job: Job, round: int, facts: Record, entries: Sequence[Entry]) -> None:
    """Refuse a newest checkpoint that tips.jsonl or the mark beside the noise key does not name."""
    path = job.folder.path  # type: ignore[union-attr]
    if not facts:
        return
    # A folder that went on elsewhere gets a fresh key for that, whatever its checkpoints are.
    marked = _marked(job, round) if job.stored and keys.compare(job.opening.run, entries) == ([], "") else []  # type: ignore[union-attr]
    for names, checksums in (TIPS, [tips_of(path).get(round, {}).get("checkpoint")]), ("the run's mark", marked):
        if checksums and checksums[-1] != "" and facts["sha256"] not in checksums:
            place = str(checkpoint.path_of(path / "checkpoints", round))
            raise wrong(place, f"a checkpoint that {names} does not name", f"the run's own after {round} rounds")


def _marked(job: Job, round: int) -> list[str]:
    """Return the checksums that the mark beside the noise key has of the checkpoints after ``round`` rounds."""
    return keys.Mark(job.opening.run).checkpoints(round) if job.stored else []  # type: ignore[union-attr]


def _aside(path: Path, why: str) -> str:
    halves = [half for half in (path, checkpoint.private_half(path)) if half.exists()]
    names = " and ".join(set_aside(half).name for half in halves)
    return f"{why.partition(';')[0]}; set aside as {names}, the run goes on from the checkpoint before it"


def _check_ledger(job: Job, ledger: Ledger) -> None:
    """Refuse a ledger that is not this run's, or whose events are not this plan's."""
    if not ledger.entries:
        return
    path, opening, carried = ledger.path, job.opening, run_of(ledger.entries) or {}
    if {name: carried.get(name) for name in ("id", *opening.digests)} != {"id": opening.run, **opening.digests}:  # type: ignore[union-attr]
        raise wrong(str(path), "the ledger of another run", "that of the run in this folder")
    if opening.attempt < carried.get("attempt", 1):  # type: ignore[union-attr]
        found = f"the one of attempt {opening.attempt}"  # type: ignore[union-attr]
        hint = "An older one was put back; its key has drawn these rounds."
        allowed = f"that of attempt {carried['attempt']}, as the ledger"
        raise wrong(str(path.parent / OPENING), found, allowed, hint=hint)
    planned = job.parts.plan.record(0, job.threshold)
    for entry in ledger.entries:
        for name in _PLANNED:
            if entry.get(name) != planned.get(name):
                where = f"{path} line {entry['line']}: {name}"
                raise wrong(where, entry.get(name), f"{planned.get(name)}, as the run's recipe has")


def _check_events(job: Job, ledger: Ledger, rounds: int, mark: Record | None) -> None:
    """Refuse a ledger that has fewer events than checkpoints and metrics prove."""
    if not job.parts.plan.private:
        return
    released = job.folder.sealed_rounds(METRICS) | set(range(rounds))  # type: ignore[union-attr]
    missing = sorted(released - ledger.rounds_recorded())
    allowed = "the ledger as it was written"
    if missing:
        raise wrong(str(ledger.path), f"no line for round {missing[0]}, which was released", allowed)
    if mark is not None and (mark["events"] > len(ledger.entries) or ledger.tip(mark["events"]) != mark["tip"]):
        raise wrong(str(ledger.path), "other events than those the newest checkpoint was made after", allowed)


def _choose_key(job: Job, ledger: Ledger, start: int, begun: str) -> None:
    """Set ``job.key``; where it must be a fresh one, charge what may have been released with another."""
    opening: Opening = job.opening  # type: ignore[assignment]
    now, job.identity = job.identity.engine, replace(job.identity, engine=opening.engine)  # as the key was made
    why, lost = reasons(job, ledger, start, begun)
    current = software_of(job)
    _say_changed(job, current)
    if why:
        # First: whoever finds the old key later must not draw these rounds again.
        keys.forget(opening.run)
        # Whatever else takes this run up elsewhere, or at another round, must get another key from the same seed.
        point = json.dumps([now, start, ledger.tip(len(ledger.entries))])
        job.identity = replace(job.identity, engine=sha256(point.encode()).hexdigest())
    job.opening = replace(opening, software=current, attempt=opening.attempt + bool(why), engine=job.identity.engine)
    job.key = _key(job, _root(job))
    job.opening = replace(job.opening, key=_name(job.opening, job.key))
    if job.opening != opening:
        job.opening.write(job.folder.path)  # type: ignore[union-attr]
    ledger.describe(job.opening.public)
    ledger.use_key(job.opening.key)
    _charge(job, ledger, start, "; ".join(why), lost)
    if job.stored:
        mark = keys.Mark(opening.run)
        mark.replace(ledger.path.read_bytes() if ledger.entries else b"")
        mark.begin(start, begun)
        # From here each line reaches the mark before the round is released.
        ledger.copy_to(lambda line: _follow(ledger.path.parent, line, mark))


def software(backend: Backend, problem: ModuleProblem) -> Record:
    """Return what may change the last bits of a result: versions, the engine that was chosen, the processor."""
    engine = {name: getattr(backend, name, None) for name in ("name", "block", "threads")}
    engine = {"backend": engine.pop("name"), **engine, "device": problem.device.type}
    return {**engine, "precision": problem.precision, "onednn": problem.onednn, **machine(problem.device)}


def software_of(job: Job) -> Record:
    """Return what may change bits here; nothing in a deployment, whose open rounds always get a fresh key."""
    if job.folder is not None and job.folder.deployment:
        return {}
    with exact(job.problem.device):  # as clients train
        return software(job.backend, job.problem)


def _say_changed(job: Job, current: Record) -> None:
    if changed := [name for name in current if current[name] != job.opening.software.get(name)]:  # type: ignore[union-attr]
        job.say(f"{', '.join(changed)} differ from when the run was started: what follows may differ in its last bits")


def note_software(job: Job, ledger: Ledger, round: int, *, charged: bool) -> None:
    """Note in private with what a round was trained, if that has changed since the run began or went on.

    It may tell how much memory the cohort's clients took, so no public record has it. charged: whether the round was
    charged just now, for a fresh key.

    Raises:
        RunError: the round was drawn before, and would be released a second time with the same noise.
    """
    opening: Opening = job.opening  # type: ignore[assignment]
    if job.folder is None or (current := software_of(job)) == opening.software:
        return
    changed = {**current, "changed": "while the run went on"}  # a round may have had both: nothing equals it
    if opening.software != changed:
        _say_changed(job, current)
        job.opening = replace(opening, software=changed)
        job.opening.write(job.folder.path)  # before the round's line: who takes it up again gets a fresh key
    if not charged and any(e["round"] == round and e.get("key_id") == ledger.key_id for e in ledger.entries):
        names = ", ".join(name for name in current if current[name] != opening.software.get(name))
        found, allowed = f"another {names} than when it was drawn before", "the same"
        raise RunError(f"round {round}: found {found}; allowed: {allowed}. Resumed again, it gets a fresh key.")


def _root(job: Job) -> int | bytes:
    if job.identity.method is None:
        return fresh_key()
    if not job.stored:
        return job.seed
    name = job.opening.run  # type: ignore[union-attr]
    held = keys.load(name)
    held = keys.create(name) if held is None else held
    # A server's key is half in memory: a machine that is put back, files and all, must not draw the same noise again.
    return sha256(held + fresh_key()).digest() if job.folder.deployment else held  # type: ignore[union-attr]


def _key(job: Job, root: int | bytes) -> bytes:
    return noise_key(root, *job.identity.facts, attempt=job.opening.attempt)  # type: ignore[union-attr]


def _name(opening: Opening, key: bytes) -> str:
    """Return the public name of a key: an HMAC under the run's secret, which tells nothing of what it was made from."""
    return hmac.new(bytes.fromhex(opening.secret), b"key id" + key, "sha256").hexdigest()[:16]


def reasons(job: Job, ledger: Ledger, start: int, begun: str) -> tuple[list[str], list[Entry]]:
    """Return why rounds from ``start`` on need a fresh key (none: the same key gives the same bits), and events that
    the ledger here has lost. begun: checksum of the checkpoint to begin from; "" where there is none.
    """
    why: list[str] = []
    lost: list[Entry] = []
    entries = ledger.entries
    opened = any(entry["round"] >= start for entry in entries)
    if job.stored:
        lost, behind = keys.compare(job.opening.run, entries)  # type: ignore[union-attr]
        why += [behind] if behind else []
        held = keys.load(job.opening.run)  # type: ignore[union-attr]
        entire = held is not None and not job.folder.deployment  # type: ignore[union-attr]
        if entire and job.opening.key not in ("", _name(job.opening, _key(job, held))):  # type: ignore[union-attr, arg-type]
            why.append("the noise key is not the one that the run was drawn with")
        if held is None and entries and start < job.parts.plan.rounds:
            why.append(GONE)
    if job.identity.method is None and entries:
        why.append("the method or model given in Python cannot be identified, so every start has a key of its own")
    if opened and job.folder.deployment:  # type: ignore[union-attr]
        why.append("other clients may answer the open round")
    # Of a seeded run a twin that was never stopped may exist, which draws the later rounds with the same key.
    if (opened or (entries and not job.stored)) and job.opening.software != software_of(job):  # type: ignore[union-attr]
        why.append("the software or the engine differs")
    if opened and _marked(job, start)[-1:] not in ([], [begun]):
        why.append("the run's mark does not say that these rounds were drawn from this checkpoint")
    if not begun and any(entry["round"] > 0 for entry in entries):
        why.append("no checkpoint is left, so the run starts again from round 0")
    return why, lost


def _charge(job: Job, ledger: Ledger, start: int, why: str, lost: Sequence[Entry]) -> None:
    """Charge the events that were lost; say which rounds are charged again, each when it is drawn."""
    for entry in lost:
        ledger.charge_lost(entry, f"{why}: its line was lost")
    latest = {entry["round"]: entry.get("key_id") for entry in ledger.entries if entry["round"] >= start}
    rounds = sorted(round for round, name in latest.items() if name != ledger.key_id)
    job.why = why or GONE
    if rounds:
        phrase = f"round {rounds[0]} is" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]} are"
        job.say(f"{job.why}: a fresh key from round {start} on; {phrase} charged again when drawn again")
    elif why:
        job.say(f"{why}: a fresh key from round {start} on")


def update_plan(job: Job, ledger: Ledger, start: int, round: int) -> None:
    """Set the job's plan and count of charges to those after ``round``. start: where the run goes on."""
    if job.folder is None:
        return
    planned = [*ledger.entries, *[{**entry, "attempt": 2} for entry in ledger.drawn_before(round)]]
    plan = job.parts.plan.standing(planned, ledger.key_id, start)
    job.parts = job.parts if plan == job.parts.plan else replace(job.parts, plan=plan)
    job.charged_again = plan.again(planned, round, ledger.key_id)
    vars(job).pop("last_round", None)  # whoever asked before now did not know what is charged again


def charge_drawn(job: Job, ledger: Ledger, round: int) -> bool:
    """Charge a round again if another key drew it before, since that may be released; return whether it is charged."""
    if again := job.folder is not None and bool(ledger.drawn_before(round)):
        ledger.charge_again(f"{job.why}: drawn again with a fresh key", round=round)
    return again
