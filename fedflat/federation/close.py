"""End a deployment for good before its last round: ``python -m fedflat.federation.close APP RUN``.

A run that is stopped has its ledger, but no statement yet, and its noise key still lies on the server's disk. This
marks the run as ended (no server goes on with it), writes the statement of what the ledger says was released (a round
whose release is uncertain counts), and deletes the key. Without the key, nobody can subtract the noise.

Where the server is not trusted it has the clients' noised updates, or their noised sum, *before* the ledger line of
their round. So an unfinished run under trust local or distributed is charged the round that may have been open.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.assembly.stating import state_privacy
from fedflat.core import RunError, counted, durable, reading, wrong
from fedflat.engine.job import Job, Outcome
from fedflat.engine.train import write_ending
from fedflat.federation.processes import program
from fedflat.federation.server import ENDED, Settings, _versions, job_of, run_id, stored_outcome
from fedflat.federation.task import Task
from fedflat.federation.tips import restore_lines
from fedflat.privacy.ledger import Ledger, run_of
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint, keys
from fedflat.records.folder import LEDGER, RECIPE, STATEMENT, RunFolder
from fedflat.records.signing import SIGNATURE, Operator, keep_tips, place, tip_signers, tips_of

OPEN = "the run was ended: what clients sent for its open round may have reached the server"


def close(task: Task, out: Path) -> tuple[dict[str, Any], str]:
    """End the run in ``out`` as it stands: mark, open round, statement, noise key; doing it twice is harmless.

    Return the statement, and what became of the noise key: deleted, gone (deleted before) or missing.

    Raises:
        InputError: ``out`` is no run of this task, or its ledger is damaged. RunError: a server is running it, or the
            ledger cannot be written.
    """
    if not (out / RECIPE).is_file() or _versions(out).get("task") != task.identity:
        raise wrong("RUN", str(out), "the folder of a run of this app")
    job, run, path = job_of(task, Settings(out)), run_id(out), out / LEDGER
    if path.exists() and (entries := read_ledger(path)) and (other := (run_of(entries) or {}).get("id")) != run:
        raise wrong(str(path), f"the ledger of run {other}", f"that of run {run}: put it back, then close again")
    with keys.alone(out), keys.alone(out, run):
        gone, operator = _deleted_before(out), Operator.of_account()
        restore_lines(out, run)
        saved, named = stored_outcome(job, out).state.round, max(tips_of(out), default=0)
        if named > saved + 1:  # the newest may be named and not yet written
            raise wrong(str(out / "checkpoints"), f"none after round {saved}", f"that of round {named}: put it back")
        if operator is None and (out / SIGNATURE).is_file():
            raise wrong("operator's key", f"{place()}, which is gone", "the account that the server ran under")
        if job.parts.plan.private:
            _refuse_short(stored_outcome(job, out), run, path)
        if operator is None and tip_signers(out):
            print(f"{out}: its end is not signed, as its rounds were: {place()} is gone", file=sys.stderr)
        _mark(out, gone)  # before the key goes: a kill in between must leave a run that is ended, not one without a key
        with Ledger.open(path) as ledger:
            _charge_lost(ledger, run)
            _charge_open_round(ledger, job, stored_outcome(job, out), [*tips_of(out), keys.Mark(run).newest()])
        outcome = stored_outcome(job, out)
        job.folder, job.operator = RunFolder(out, deployment=True, run=run), operator
        _drop_open_records(job.folder, outcome.state.round)
        facts = write_ending(job, outcome, state_privacy(task.recipe, job, outcome))
        deleted = keys.forget(run)
        if deleted:
            _mark(out, True)
    return facts, "deleted" if deleted else "gone" if gone else "missing"


def _mark(out: Path, deleted: bool) -> None:
    """Write the mark that ``serve`` refuses; first of all, so that a kill in here leaves no run that goes on."""
    durable.replace(out / ENDED, json.dumps({"ended": "by its operator", "key_deleted": deleted}) + "\n", mode=0o644)


def _deleted_before(out: Path) -> bool:
    """Return whether close or the server deleted the key before: a statement without a mark is a complete run's."""
    if (out / ENDED).exists():
        with reading(out / ENDED, "no mark of an end", "what close wrote, or no such file"):
            return json.loads((out / ENDED).read_bytes())["key_deleted"] is True
    return (out / STATEMENT).exists()


def _refuse_short(outcome: Outcome, run: str, path: Path) -> None:
    """Refuse a ledger without a line for a round that a checkpoint has seen: its statement would say too little."""
    charged = {entry["round"] for entry in (*outcome.entries, *keys.compare(run, outcome.entries)[0])}
    if missing := sorted(set(range(max(outcome.state.round, keys.Mark(run).newest()))) - charged):
        raise wrong(str(path), f"no line for round {missing[0]}, which was released", "the ledger as it was written")


def _charge_lost(ledger: Ledger, run: str) -> None:
    """Charge events that only the mark beside the noise key has: the folder is a backup's."""
    lost, why = keys.compare(run, ledger.entries)
    for entry in lost:
        ledger.charge_lost(entry, f"{why}: its line was lost")
    if lost:
        keys.Mark(run).replace(ledger.path.read_bytes())


def _charge_open_round(ledger: Ledger, job: Job, outcome: Outcome, begun: Sequence[int]) -> None:
    """Charge one event more for a distrusted server's open round, unless the run is complete or it is charged.

    begun: rounds from which tips and the mark name a checkpoint; those that there are may be older, as a backup's.
    """
    plan, state = job.parts.plan, outcome.state
    open_round = max(state.round, *begun, *(entry["round"] for entry in outcome.entries))
    charged = any(entry["round"] >= open_round for entry in outcome.entries)
    over = outcome.complete or open_round >= plan.rounds
    if not (over or charged or not plan.private or plan.trust == "central"):
        for line in plan.records(open_round, job.parts.clip.bound(state.clip)):
            ledger.charge_open(line, OPEN)


def _drop_open_records(folder: RunFolder, finished: int) -> None:
    """Drop the record and the tip of a round whose model was never saved, as a resume does: no client was sent it."""
    released = max([finished, *checkpoint.rounds_named(folder.checkpoints)])
    for note in folder.keep_rounds(released)[2]:
        print(note, file=sys.stderr)
    keep_tips(folder.path, released)


@program("close APP RUN")
def main(app: str, run: str) -> None:
    """Close a run; exit status 2 for bad input, 1 if a server is still running it or its key is not here."""
    out = Path(run)
    facts, key = close(Task.read(Path(app)), out)
    epsilon = facts.get("epsilon")
    cost = "no finite ε" if epsilon is None else f"ε = {epsilon:.4g} at δ = {facts['delta']:g}"
    key_state = {"deleted": "key deleted", "gone": "key deleted before", "missing": "KEY NOT DELETED"}[key]
    rounds = f"{counted(facts['rounds'], 'round')}, {facts['rounds_charged']} charged"
    print(f"{out}: ended after {rounds}, {cost}; {key_state}")
    if key == "missing":  # it may still lie somewhere
        hint = "close the run again as the account, and with the XDG_STATE_HOME, that the server ran under"
        raise RunError(f"no noise key {run_id(out)} in {keys.folder()}; {hint}, or delete the file there by hand")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
