"""For every test: one torch thread (the tests' tensors are small; more threads only wait for each other), and where a
back end asks for more, threads that sleep while they wait: several tests share the cores."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded

import torch

from fedflat.cli import main as cli

torch.set_num_threads(1)


LONG = (
    "test_federation_processes", "test_federation_doors", "test_federation_partition",
    "test_federation_turns_processes", "test_ray_tasks", "test_audit_mechanism",
    "test_contract_processes", "test_contract_worlds", "test_documented", "test_published_runs",
    "test_secure_runs", "test_experiment",
)  # fmt: skip
"""Modules that take long, some mostly by waiting for processes: begun first, so that none is left alone at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadscope --no-loadscope-reorder`` a worker takes module by module in this order."""
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a process of the tests ended: pytest-xdist names the test, and neither signal nor status."""
    if error:
        with suppress(Exception):
            status = node.gateway._io.popen.wait(10)
            sys.stderr.write(f"\n{node.gateway.id} ended with status {status} (below 0: minus the signal)\n")


@pytest.fixture(scope="session", autouse=True)
def home_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Noise keys and caches are this session's: none of the person's, whose home may not even be writable."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """No test takes the power away, so that none can see whether bytes had reached the disk; each of the many thousand
    waits is milliseconds. The file must still be open; failures and kills at this place, tests bring themselves."""

    def fsync(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True)
def umask_of_its_own() -> Iterator[None]:
    """Programs of a deployment keep their files from others, for good: not from the next test of this process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def quick_workers() -> Iterator[None]:
    """Worker processes that begin without imports (``fork_server``)."""
    from fork_server import quick_processes

    with quick_processes():
        yield


class Said(NamedTuple):
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """``fedflat`` with these words, called in this process (a new one would load torch first), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedflat", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        found = capsys.readouterr()
        return Said(int(end.value.code or 0), found.out, found.err)

    return call


@pytest.fixture
def noise_of_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give seeded runs on different engines the same noise: for tests that compare engines on clients of their own."""
    from fedflat.assembly import records

    monkeypatch.setattr(records, "engine_facts", lambda recipe, problem, backend: "")


@pytest.fixture
def noise_of_the_seed(noise_of_any_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw cohorts and noise from the seed alone: for tests that compare two runs bit for bit.

    A user's runs on data of their own have secret noise, and a seeded run's key follows its engine; neither is left out
    where it is what a test is about (``test_noise_keys``, ``test_secure_runs``).
    """
    from fedflat.assembly import records, stating
    from fedflat.simulation import run

    for room in (records, stating, run):
        monkeypatch.setattr(room, "is_seeded", lambda recipe: True)
    monkeypatch.setattr(records, "check", lambda recipe: None)
