"""A federation whose programs are forked from a server that has loaded them: each loads for seconds otherwise.

The programs are the real ones, with their own words, surroundings, process group and log. What a command line does
from its very start is seen by the test that starts ``python -m fedflat.federation.local`` as a user does.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fork_server import CONTEXT

from fedflat.federation.local import GRACE, Federation
from fedflat.federation.processes import dies_with, private

NETNS, CLONE_NEWNET = Path("/run/netns"), 0x40000000


def become(command: list[str], surroundings: dict[str, str], said: list[str]) -> None:
    """Be a program: ``python -m MODULE …`` or one of Flower's, if wanted in a network namespace (``ip netns exec``).
    said: files for stdout and stderr."""
    os.setsid()
    private()
    dies_with(os.getppid())
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(surroundings)
    from flwr.supercore import telemetry  # both have read their settings where this was forked from
    from flwr.supercore.credential_store import file_credential_store

    telemetry.FLWR_TELEMETRY_ENABLED = surroundings["FLWR_TELEMETRY_ENABLED"]
    file_credential_store.CREDENTIAL_FILE_PATH = Path(surroundings["FLWR_HOME"]) / "credentials.yaml"
    if command[:3] == ["ip", "netns", "exec"]:
        if ctypes.CDLL(None).setns(os.open(NETNS / command[3], os.O_RDONLY), CLONE_NEWNET):
            raise OSError(f"no network namespace {command[3]}")
        command = command[4:]
    main: Callable[..., Any]
    if command[:2] == ["python", "-m"]:
        main, given = import_module(command[2]).main, [command[3:]]
    else:
        (entry,) = entry_points(group="console_scripts", name=command[0])
        main, given, sys.argv = entry.load(), [], command
    status = main(*given)
    sys.stdout.flush()
    sys.exit(status)


@dataclass
class Program:
    """A program as ``Federation`` sees it."""

    process: Any

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def poll(self) -> int | None:
        found: int | None = self.process.exitcode
        return found

    def end(self, number: int, seconds: float | None = None) -> None:
        """Signal the group; killed after so many seconds."""
        for sent, patience in ((number, seconds), (signal.SIGKILL, None)):
            if self.process.is_alive():
                os.killpg(self.pid, sent)
                self.process.join(patience)


def start(command: list[str], surroundings: dict[str, str], *said: Path) -> Any:
    """Start a program."""
    process = CONTEXT.Process(target=become, args=(command, surroundings, [str(path) for path in said]))
    process.start()
    return process


def finished(command: list[str], surroundings: dict[str, str], folder: Path, seconds: float) -> Any:
    """A program's end: ``subprocess.run`` with what it said."""
    paths = [folder / f"said-{number}" for number in (1, 2)]
    process = start(command, surroundings, *paths)
    process.join(seconds)
    assert not process.is_alive()
    out, err = (path.read_text() for path in paths)
    for path in paths:
        path.unlink()
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


@dataclass
class Forked(Federation):
    """The processes of a project."""

    def _spawn(self, name: str, command: list[str]) -> None:
        log = self.logs / f"{name}.log"
        self.processes[name] = Program(start(command, self._environment(), log, log))  # type: ignore[assignment]

    def _flwr(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        found: subprocess.CompletedProcess[str] = finished(command, self._environment(), self.logs, self.patience)
        return found

    def kill(self, name: str) -> None:
        self.processes.pop(name).end(signal.SIGKILL)  # type: ignore[attr-defined]

    def stop(self) -> None:
        for program in self.processes.values():
            os.killpg(program.pid, signal.SIGTERM)
        for program in self.processes.values():
            program.end(0, GRACE)  # type: ignore[attr-defined]
        self.processes.clear()


def programs(name: str, under: int) -> list[int]:
    """Processes with the name that ps shows, below another one: the worker's forked ones that run an app."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                said = (entry / "stat").read_text()
                names[int(entry.name)] = said[said.index("(") + 1 : said.rindex(")")]
                parents[int(entry.name)] = int(said[said.rindex(")") + 2 :].split()[1])
        except OSError:
            continue

    def above(process: int) -> list[int]:
        found = [process]
        while found[-1] in parents:
            found.append(parents[found[-1]])
        return found

    return [process for process in names if names[process] == name and under in above(process)]
