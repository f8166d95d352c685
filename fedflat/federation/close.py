"""End a deployment for good before its last round: ``python -m fedflat.federation.close APP RUN``.

A run that is stopped has its ledger, but no statement yet, and its noise key still lies on the server's disk. This
marks the run as ended (no server goes on with it), writes the statement of what the ledger says was released (a round
whose release is uncertain counts), and deletes the key. Without the key, nobody can subtract the noise.

Where the server is not trusted it has the clients' noised updates, or their noised sum, *before* the ledger line of
their round. So an unfinished run under trust local or distributed is charged the round that may have been open.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedflat.core import durable
from fedflat.core.checks import wrong
from fedflat.engine.resume import compare
from fedflat.engine.train import Job, Outcome
from fedflat.federation.exits import status_of
from fedflat.federation.server.claims import deployment_statement
from fedflat.federation.server.session import ENDED, Settings, _name, _only_server, _versions, job_of, standing
from fedflat.federation.task import Task
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.statement import write as write_statement
from fedflat.records import keys
from fedflat.records.folder import LEDGER, METRICS, RECIPE, STATEMENT, read_lines

OPEN = "the run was ended: what clients sent for its open round may have reached the server"


class Closed(NamedTuple):
    """statement: as written. key: what became of the noise key: deleted, gone (deleted before) or missing."""

    statement: dict[str, Any]
    key: str


def close(task: Task, out: Path) -> Closed:
    """End the run in ``out`` as it stands: mark, open round, statement, noise key; doing it twice is harmless.

    Raises:
        InputError: ``out`` is no run of this task, or its ledger is damaged. RunError: a server is running it, or the
            ledger cannot be written.
    """
    if not (out / RECIPE).is_file() or _versions(out).get("task") != task.identity:
        raise wrong("RUN", str(out), "the folder of a run of this app")
    job = job_of(task, Settings(out))
    with _only_server(out), _only_server(out, _name(out)):
        gone = _deleted_before(out)
        _mark(out, gone)
        _charge_lost(out)
        outcome = _charge_open_round(job, out, standing(job, out))
        tested = any(row.get("test_accuracy") is not None for row in read_lines(out / METRICS))
        facts = deployment_statement(task, job, outcome, tested=tested)
        write_statement(out / STATEMENT, facts, _name(out))
        deleted = keys.forget(_name(out))
        if deleted:
            _mark(out, True)
    return Closed(facts, "deleted" if deleted else "gone" if gone else "missing")


def _mark(out: Path, deleted: bool) -> None:
    """What ``serve`` refuses; first of all, so that a kill in here leaves no run that goes on."""
    durable.replace(out / ENDED, json.dumps({"ended": "by its operator", "key_deleted": deleted}) + "\n", mode=0o644)


def _deleted_before(out: Path) -> bool:
    """Whether an earlier close deleted the key, or the server did: a statement without a mark is a complete run's."""
    if (out / ENDED).exists():
        return json.loads((out / ENDED).read_text(encoding="utf-8"))["key_deleted"] is True
    return (out / STATEMENT).exists()


def _charge_lost(out: Path) -> None:
    """Events that only the mark beside the noise key has: the folder is a backup's."""
    with Ledger.open(out / LEDGER) as ledger:
        lost, why = compare(_name(out), ledger.entries)
        for entry in lost:
            ledger.charge_lost(entry, f"{why}: its line was lost")
        if lost:
            keys.Mark(_name(out)).replace(ledger.path.read_bytes())


def _charge_open_round(job: Job, out: Path, outcome: Outcome) -> Outcome:
    """One event more for a distrusted server's open round, unless the run is complete or the ledger has it already."""
    plan, state = job.parts.plan, outcome.state
    if outcome.complete or not plan.private or plan.trust == "central":
        return outcome
    if any(entry["round"] >= state.round for entry in outcome.entries):
        return outcome
    with Ledger.open(out / LEDGER) as ledger:
        for line in plan.records(state.round, job.parts.clip.bound(state.clip)):
            ledger.charge_open(line, OPEN)
    return standing(job, out)


def main(arguments: Sequence[str]) -> int:
    """Close a run; exit status 2 for bad input, 1 if a server is still running it or its key is not here."""
    if len(arguments) != 2:
        print("usage: python -m fedflat.federation.close APP RUN", file=sys.stderr)
        return 2
    app, out = map(Path, arguments)
    return status_of(lambda: _told(out, close(Task.read(app), out)))


def _told(out: Path, closed: Closed) -> int:
    """Say what was done; 1 if the noise key may still lie somewhere."""
    facts, key = closed
    epsilon = facts.get("epsilon")
    shown = "no finite ε" if epsilon is None else f"ε = {epsilon:.4g} at δ = {facts['delta']:g}"
    said = {"deleted": "key deleted", "gone": "key deleted before", "missing": "KEY NOT DELETED"}[key]
    print(f"{out}: ended after {facts['rounds']} rounds, {facts['rounds_charged']} charged, {shown}; {said}")
    if key != "missing":
        return 0
    print(
        f"error: no noise key {_name(out)} in {keys.folder()}; close the run again as the account, and with the "
        "XDG_STATE_HOME, that the server ran under, or delete the file there by hand",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
