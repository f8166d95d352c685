"""Three SuperNodes that take turns, as real processes: the server is killed (SIGKILL) in a round, and goes on."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, programs
from ports import free_port
from stand_in import deployed, final_shared, grid_of, rows, settings, small
from test_federation_processes import PATIENCE, logs, own_tmpdir, wait_for  # noqa: F401

from fedflat.federation import server
from fedflat.federation.project import write_project
from fedflat.federation.server import run_id
from fedflat.privacy.ledger import read as read_ledger
from fedflat.simulation.recomputed import Records, second_account

NODES, ROUNDS, APART = 3, 4, 3
TURNS: dict[str, Any] = {
    "rounds": ROUNDS,
    "data": {"clients": NODES},
    "cohort": {"size": 1, "sampling": "min-separation", "separation": APART},
    "privacy": {"noise_multiplier": 1e-4, "accountant": "rdp", "noise": "banded"},  # noise that hides no fault
}


@pytest.mark.slow
@pytest.mark.long
def test_killed_and_gone_on_with_nobody_comes_early(tmp_path: Path) -> None:
    """The rounds end where those of a server that nobody killed end, but for noise; both keys are counted."""
    fed, run = tmp_path / "fed", tmp_path / "fed" / "run"
    write_project(small(**TURNS), fed, port=free_port())
    with Forked(fed, PATIENCE) as federation:
        federation.start()
        first = federation.run(config=f"wait-for-nodes={NODES}")
        wait_for(run / "checkpoints" / "round-000002.safetensors", PATIENCE)
        for process in programs("flwr-serverapp", federation.processes["superlink"].pid):
            os.kill(process, signal.SIGKILL)
        before = [entry["round"] for entry in read_ledger(run / "ledger.jsonl")]
        assert federation.wait(first, PATIENCE) == "finished:failed"  # the SuperLink sees by itself that it is gone
        second = federation.run(config=f"wait-for-nodes={NODES}")
        assert federation.wait(second, PATIENCE) == "finished:completed", logs(federation)
    operator = tmp_path / "state-home" / "fedflat" / "operator"
    asked = rows(operator / f"{run_id(run)}.check-ins.jsonl")
    charged = [entry["round"] for entry in read_ledger(run / "ledger.jsonl")]
    assert set(charged) == set(range(ROUNDS))
    for client in range(NODES):
        turns = sorted({ask["round"] for ask in asked if client in ask["clients"]})
        assert turns
        assert all(b - a >= APART for a, b in pairwise(turns))
    assert second_account(Records(run)).ok
    assert any("2 noise keys drew" in reason for reason in json.loads((run / "privacy.json").read_text())["reasons"])
    if charged == [*range(ROUNDS)]:  # else a round that was charged was lost, and its clients are not asked again
        assert before == [*range(len(before))]
        torch.testing.assert_close(final_shared(run), uninterrupted(tmp_path / "whole"), rtol=0, atol=5e-4)


def uninterrupted(folder: Path) -> torch.Tensor:
    """The shared vector of the same run in this process."""
    task, clients = deployed(folder, small(**TURNS))
    server.serve(grid_of(task, clients), task, settings(folder))
    return final_shared(folder / "run")
