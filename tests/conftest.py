"""For every test: one torch thread (the tests' tensors are small; more threads only wait for each other)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedflat.cli import main as cli

torch.set_num_threads(1)


LONG = (
    "test_federation_processes.py", "test_federation_partition.py", "test_federation_doors.py::test_a_node_runs",
    "test_federation_doors.py::test_only_the_operator", "test_full_configuration_on_every_method",
    "test_contract_strangers.py::test_nor_does_it_in_other_processes", "test_ray_tasks.py", "test_gpu_benchmark.py",
    "test_secure_runs.py", "test_experiment.py", "test_compiled_models_agree_on_the_processor",
)  # fmt: skip
"""Tests that take long, mostly by waiting for processes: started first, so that none is left alone at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` a worker takes test by test, but all tests that share a fixture of their module."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if name in item.nodeid), len(LONG)))
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
        if any(found.scope == "module" for stack in fixtures.values() for found in stack):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


class Said(NamedTuple):
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Said]]:
    """``fedflat`` with these words, called in this process (a new one would load torch first), in an empty folder."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def call(*words: str) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedflat", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        found = capsys.readouterr()
        return Said(int(end.value.code or 0), found.out, found.err)

    yield call
    signal.signal(signal.SIGINT, before)
