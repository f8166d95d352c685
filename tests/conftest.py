"""For every test: one torch thread (the tests' tensors are small; more threads only wait for each other)."""

from __future__ import annotations

import os
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
    "test_federation_processes", "test_federation_doors", "test_federation_partition", "test_ray_tasks", "test_graphs",
    "test_audit_mechanism", "test_contract_strangers", "test_docs", "test_published_runs", "test_secure_runs",
    "test_experiment",
)  # fmt: skip
"""Modules that take long, some mostly by waiting for processes: begun first, so that none is left alone at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadscope --no-loadscope-reorder`` a worker takes module by module in this order."""
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True)
def umask_of_its_own() -> Iterator[None]:
    """Programs of a deployment keep their files from others, for good: not from the next test of this process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes from a server that has loaded torch once: handed their work by pickle as spawned ones are, but
    without the seconds of imports that each of those begins with."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedflat.backends.workers", "fedflat.algorithms", "fedflat.models"])
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda how: context)


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
