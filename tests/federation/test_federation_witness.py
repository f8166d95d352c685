"""A client keeps the server's signed tips and refuses a ledger that is shorter, forked or signed by somebody else."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from fedflat.core.checks import RunError
from fedflat.federation.tips import RECORD, restore_lines, tip_record, without_tip
from fedflat.privacy.ledger import Ledger
from fedflat.records import keys, signing
from fedflat.simulation.inspection import check_signed
from fedflat.simulation.recomputed import Records

RUN = "ab12"


def spend(folder: Path, round: int, noise: float = 1.0) -> None:
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        ledger.append({"round": round, "std": noise})


def ask(folder: Path, round: int, key: signing.Operator) -> Any:
    return RecordDict({"facts": ConfigRecord({"round": round}), RECORD: tip_record(folder, RUN, key, round)})


@pytest.fixture
def operator(tmp_path: Path) -> signing.Operator:
    (tmp_path / "client").mkdir()
    return signing.Operator.create(tmp_path / "operator.pem")


def test_a_client_refuses_another_history(tmp_path: Path, operator: signing.Operator) -> None:
    client, ledger = tmp_path / "client", tmp_path / "ledger.jsonl"
    assert set(without_tip(ask(tmp_path, 0, operator), client)) == {"facts"}
    for round in (0, 1):
        spend(tmp_path, round)
    without_tip(ask(tmp_path, 2, operator), client)
    whole = ledger.read_bytes()

    with pytest.raises(RunError, match="not signed by the operator's key"):
        without_tip(ask(tmp_path, 2, signing.Operator.create(tmp_path / "other.pem")), client)
    with pytest.raises(RunError, match="no signed tip"):
        without_tip(RecordDict({"facts": ConfigRecord({"round": 2})}), client)
    ledger.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(RunError, match="has 1 events, and had 2 before"):
        without_tip(ask(tmp_path, 1, operator), client)
    for round in (1, 2):
        spend(tmp_path, round, noise=4.0)
    with pytest.raises(RunError, match="other events than it had before"):
        without_tip(ask(tmp_path, 3, operator), client)
    without_tip(ask(tmp_path, 3, operator), tmp_path)  # the twin: who kept no tip sees nothing

    ledger.write_bytes(whole)
    spend(tmp_path, 2)
    without_tip(ask(tmp_path, 3, operator), client)
    seen = [
        check
        for check in check_signed(Records(tmp_path), operator.public, client / f"{RUN}.tip")
        if "witness" in check.record
    ]
    assert [check.about for check in seen] == ["of another run"]  # this ledger names no run


def test_a_ledger_put_back_takes_its_lines_from_the_mark(tmp_path: Path, operator: signing.Operator) -> None:
    """So that it goes on from what clients were shown, instead of being another one."""
    for round in (0, 1):
        spend(tmp_path, round)
    ledger = tmp_path / "ledger.jsonl"
    keys.Mark(RUN).replace(ledger.read_bytes())
    without_tip(ask(tmp_path, 2, operator), tmp_path / "client")
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    restore_lines(tmp_path, RUN)
    spend(tmp_path, 2)
    without_tip(ask(tmp_path, 3, operator), tmp_path / "client")
