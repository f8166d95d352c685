"""End a deployment for good before its last round: ``python -m fedflat.federation.close APP RUN``.

A run that is stopped has its ledger, but no statement yet, and its noise key still lies on the server's disk. This
writes the statement of what the ledger says was released (a round whose release is uncertain counts), and deletes the
key. Without the key, nobody can subtract the noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError, wrong
from fedflat.engine import checkpoint, keys
from fedflat.engine.folder import LEDGER, RECIPE, STATEMENT
from fedflat.engine.folder import replace as write_whole
from fedflat.engine.heads import Heads
from fedflat.engine.train import Outcome
from fedflat.federation.claims import deployment_statement
from fedflat.federation.server import Settings, _name, _only_server, _versions, job_of
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger


def close(task: Task, out: Path) -> dict[str, Any]:
    """Write the statement of the run in ``out`` as it stands, and delete its noise key; returns the statement.

    Raises:
        InputError: ``out`` is no run of this task, or its ledger is damaged. RunError: a server is running it.
    """
    if not (out / RECIPE).is_file() or _versions(out).get("task") != task.identity:
        raise wrong("RUN", str(out), "the folder of a run of this app")
    job = job_of(task, Settings(out))
    with _only_server(out):
        size = job.parts.layout.dimension
        found = checkpoint.newest(out / "checkpoints")
        state = job.parts.first_state(job.first[:size], job.threshold) if found is None else found[0]
        entries = list(read_ledger(out / LEDGER)) if (out / LEDGER).exists() else []
        outcome = Outcome(state, Heads(job.first[size:]), [], [], entries, "ended by its operator", complete=False)
        facts = deployment_statement(task, job, outcome)
        write_whole(out / STATEMENT, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        keys.forget(_name(out))
    return facts


def main(arguments: Sequence[str]) -> int:
    """Close a run; exit status 2 for bad input, 1 if a server is still running it."""
    if len(arguments) != 2:
        print("usage: python -m fedflat.federation.close APP RUN", file=sys.stderr)
        return 2
    try:
        facts = close(Task.read(Path(arguments[0])), Path(arguments[1]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    epsilon = facts.get("epsilon")
    shown = "no finite ε" if epsilon is None else f"ε = {epsilon:.4g} at δ = {facts['delta']:g}"
    print(
        f"{arguments[1]}: ended after {facts['rounds']} rounds, {facts['rounds_charged']} charged, {shown}; key deleted"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
