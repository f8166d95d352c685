"""How well the models do for one client, on its own held-back examples: measured by the client, kept by the client.

Nothing here is ever sent. An accuracy on private examples is not covered by ε; so it leaves a client only if its owner
carries it out. With ``held=FILE`` in its node config a client notes, each time it is asked, the accuracy of the model
that it was sent: with its own head, or after fine-tuning on its own training examples, as its method says.

    python -m fedflat.federation.personal APP --state STATE                       (what was noted)
    python -m fedflat.federation.personal APP --state STATE --client 0 --data FILE --held FILE --model CHECKPOINT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.core.checks import wrong
from fedflat.federation.client import Client, evaluate
from fedflat.federation.processes import status_of
from fedflat.federation.store import Store
from fedflat.federation.task import Task
from fedflat.records import checkpoint


def table_of(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as a small table."""
    lines = [f"{'round':>6} {'personal %':>11} {'shared %':>9} {'examples':>9}"]
    for row in records:
        personal, plain = (100 * row[name] for name in ("personal_accuracy", "shared_accuracy"))
        lines.append(f"{row['round']:>6} {personal:>11.2f} {plain:>9.2f} {row['examples']:>9}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print what a client noted; with ``--model`` first evaluate that released model and note it."""
    parser = argparse.ArgumentParser(prog="python -m fedflat.federation.personal", description=__doc__.split("\n")[0])
    parser.add_argument("app", type=Path, help="the app's folder (app/fedflat_app)")
    parser.add_argument("--state", required=True, type=Path, help="the client's state folder")
    parser.add_argument("--client", type=int, default=0, help="the client's number")
    parser.add_argument("--data", type=Path, help="the client's training examples")
    parser.add_argument("--held", type=Path, help="the client's held-back examples")
    parser.add_argument("--model", type=Path, help="a released model: run/checkpoints/round-N.safetensors")
    given = parser.parse_args(arguments)

    def work() -> int:
        store = Store(given.state)
        if given.model is not None:
            if given.data is None or given.held is None:
                raise wrong("--model", "no --data or no --held", "both files of the client")
            client = Client(Task.read(given.app), given.client, given.data, store, held=given.held)
            released = checkpoint.load_released(given.model)
            store.note_accuracy(evaluate(client, released.released, released.round))
        print(table_of(store.accuracies()))
        return 0

    return status_of(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
