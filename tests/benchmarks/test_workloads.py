"""The benchmark compares the same work: models of the same size, every system reachable, a table from any report."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import SYSTEMS, measure
from benchmarks.table import markdown, ratio
from benchmarks.workloads import ALL, BY_NAME, network, read_data, write_data
from fedflat.models import build

BARE = {"date": "", "rounds": 1, "machine": {"cpu": "", "cores": 1, "load_before": 0.0}}


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_peers_train_the_same_model(workload: object) -> None:
    ours = build(workload.model, workload.shape, workload.classes, 0)  # type: ignore[attr-defined]
    theirs = network(workload)  # type: ignore[arg-type]
    sizes = [sorted(p.numel() for p in m.parameters()) for m in (ours, theirs)]
    assert sizes[0] == sizes[1]
    with torch.no_grad():
        assert theirs(torch.zeros(2, *workload.shape)).shape == (2, workload.classes)  # type: ignore[attr-defined]


def test_clients_of_a_pool_share_rows_and_others_do_not() -> None:
    own, shared = BY_NAME["W2"], BY_NAME["W4"]
    assert not set(own.part(0)) & set(own.part(1))
    assert max(int(shared.part(c).max()) for c in (0, 999_999, 10_000)) < shared.rows
    assert len(np.unique(shared.cohort_of(3))) == shared.cohort


def test_written_data_is_what_every_system_reads(tmp_path: Path) -> None:
    small = dataclasses.replace(BY_NAME["W2"], clients=7, cohort=3)
    write_data(small, tmp_path)
    inputs, targets = read_data(tmp_path)
    assert inputs.shape == (140, 784) and targets.shape == (140,)
    assert int(targets.max()) < small.classes


@pytest.mark.slow
@pytest.mark.long
def test_systems_take_turns_and_fill_the_table(tmp_path: Path) -> None:
    found = measure(BY_NAME["W2"], [s for s in SYSTEMS if s.name in ("fedflat", "limit")], 1, tmp_path)
    assert {len(entry["seconds"]) for entry in found["systems"].values()} == {1}
    report = BARE | {"workloads": {"W2": found}}
    assert ratio(report, "W2", "fedflat", "limit") is not None
    assert "| limit |" in markdown(report)


def test_a_system_that_failed_is_in_the_table() -> None:
    workload = dataclasses.asdict(BY_NAME["W1"])
    systems = {"fedflat": {"min": 1.0, "median": 1.0, "facts": {}}, "pfl": {"error": "no wheel"}}
    assert "failed: 'no wheel'" in markdown(BARE | {"workloads": {"W1": {"workload": workload, "systems": systems}}})
