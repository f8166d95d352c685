"""A whole federation of real processes on this machine: ``python -m fedflat.federation.local PROJECT``.

SuperLink and SuperNodes as their own programs, TLS and node authentication on, ``flwr run`` to start. For trying out
and for tests; every process that is started here is stopped here.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # until the programs' own way to end is set: no traceback of the imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fedflat.core import free_memory, how_it_ended, lock_file, waiting
from fedflat.core.checks import RunError, counted, making, reading, require, turning, wrong
from fedflat.federation import processes
from fedflat.federation.lock import ADDRESSES_FILE, Addresses
from fedflat.federation.project import PACKAGE, REASON, STATUS, environment, superlink_command, supernode_command
from fedflat.federation.store import read_note
from fedflat.federation.task import Task
from fedflat.records.folder import METRICS, read_lines
from fedflat.report.progress import Progress

PATIENCE, GRACE = 120.0, 8.0
"""Seconds that programs may take to start (they import torch and flwr, on a loaded machine all at once), and to end
before they are killed: longer than a worker's own."""
NODE = 350
"""MB that one SuperNode takes at most with a small model (338 in the quick start)."""
LOOK = 0.2
"""Seconds between looks whether the SuperLink listens: it takes several to start."""
TOKEN = "run `python -m fedflat.federation.lock .` in the project's folder"
"""What makes the operator's token anew; Flower names its own login, which there is none of here."""


@dataclass
class Federation:
    """The processes of a project; use ``with Federation(project) as federation``."""

    project: Path
    patience: float = PATIENCE
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    """Where each process's own lines begin in its log."""

    def __post_init__(self) -> None:
        if not (self.project / ADDRESSES_FILE).is_file():
            raise wrong("PROJECT", str(self.project), "a folder that fedflat deploy wrote")
        self.addresses = Addresses.read(self.project)
        self.host, self.port = self.addresses.listen
        self.task = Task.read(self.project / "app" / PACKAGE)
        self.logs = self.project / "logs"
        self.log = self.logs / "superlink.log"

    def __enter__(self) -> Federation:
        with making("PROJECT", self.logs):
            self.logs.mkdir(mode=0o700, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, clients: Sequence[int] | None = None) -> None:
        """Start SuperLink and the SuperNodes of ``clients`` (default: all); nothing is started if one port is taken."""
        chosen = range(self.task.form.clients) if clients is None else clients
        for address in (self.addresses.listen, self.addresses.control):
            processes.must_be_free(str(self.project / ADDRESSES_FILE), *address)
        print(f"starting {counted(len(chosen), 'client')}, each a process of about {NODE} MB", file=sys.stderr)
        need, free = len(chosen) * NODE / 1024, (free_memory() or math.inf) / (1 << 30)
        if need > free:
            print(f"Warning: that is {need:.0f} GB, of {free:.0f} free: processes may be killed", file=sys.stderr)
        self.start_superlink()
        for client in chosen:
            self.start_node(client)

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        self._spawn("superlink", superlink_command(self.project))
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            self.check_alive()
            with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
                return
            time.sleep(LOOK)
        raise RunError(f"the SuperLink did not start; see {self.log}")

    def check_alive(self) -> None:
        """Raise RunError, with the last error in its log, if a process that was started here has ended by itself."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                output = (self.logs / f"{name}.log").read_bytes()[self.begun[name] :].decode(errors="replace").strip()
                lines = output.splitlines() or ["no word"]
                last = ([line for line in lines if "error" in line.lower()] or lines)[-1].removeprefix("error: ")
                last = last if process.returncode >= 0 else how_it_ended(process.returncode, output)
                raise RunError(f"{name} has ended: {last.strip()} (see {self.logs / name}.log)")

    def start_node(self, client: int) -> None:
        """Start (again) the SuperNode of one client."""
        self._spawn(f"client-{client}", supernode_command(self.project, client, self.host, self.port, self.task.pin))

    def run(self, *, config: str = "") -> int:
        """Submit the app with ``flwr run``; return Flower's run id."""
        command = ["flwr", "run", str(self.project / "app"), "fedflat", "--format", "json"]
        late = RunError(f"flwr run had no answer in {self.patience:g} s; see {self.log}")
        with turning(subprocess.TimeoutExpired, late):
            completed = self._flwr([*command, *(["--run-config", config] if config else [])])
        message = (completed.stdout + completed.stderr)[-500:]
        with suppress(ValueError, KeyError):
            answer = json.loads(completed.stdout[completed.stdout.index("{") :])
            if answer["success"]:
                return int(answer["run-id"])
            message = answer["error-message"]
        raise RunError(f"flwr run failed: {' '.join(message.split()).replace('run `flwr login`', TOKEN)}")

    def _flwr(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        env = self._environment()
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=self.patience, check=False)

    def status(self, run: int, suffix: str = "") -> str:
        """Return Flower's status of a run, like ``finished:completed``, as the SuperLink noted it last.

        suffix: ``REASON``, for why the run ended instead.
        """
        # None yet, or damaged: the SuperLink writes it anew.
        return str(read_note(self.project / "server" / STATUS).get(f"run {run}{suffix}", "unknown"))

    def wait(self, run: int, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> str:
        """Wait until a run is finished; return its last status.

        Raises:
            RunError: a process has ended, or the SuperLink has not noted for long how the run stands.
        """
        file, last, noted = self.project / "server" / STATUS, 0, time.monotonic()
        until, status = noted + seconds, ""
        while time.monotonic() < until:
            status = self.status(run)
            meanwhile()
            if status.startswith("finished"):
                break
            self.check_alive()
            # By the clock that stands still while this machine sleeps: the SuperLink slept too.
            if (now := file.stat().st_mtime_ns if file.exists() else 0) != last:
                last, noted = now, time.monotonic()
            if time.monotonic() - noted > self.patience:
                fault = f"the SuperLink has not written {file} for {self.patience:g} s"
                raise RunError(f"{fault}: is the disk full? see {self.log}; nothing is lost")
            time.sleep(0.5)
        return status

    def stop(self) -> None:
        """Stop every process started here: it is asked first, then killed."""
        processes.end([process.pid for process in self.processes.values()], GRACE)
        self.processes.clear()

    def _environment(self) -> dict[str, str]:
        # What this process runs comes first: a SuperNode must not run another installation's fedflat.
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            **environment(self.project),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # Where the programs are looked for: beside this Python first.
            "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),
            "OMP_NUM_THREADS": "1",
        }

    def _spawn(self, name: str, command: list[str]) -> None:
        parent, env = os.getpid(), self._environment()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.END_SIGNALS)
            processes.private()
            processes.dies_with(parent)

        with os.fdopen(os.open(self.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self.begun[name] = log.tell()
            with waiting(processes.END_SIGNALS):
                self.processes[name] = subprocess.Popen(
                    command, preexec_fn=prepare, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
                )


@processes.program("local PROJECT")
def main(folder: str) -> None:
    """Run a project on this machine; exit status 0 if the run completed."""
    processes.private()
    processes.raise_descriptor_limit()
    processes.end_with_an_exit()
    _whole_run(Path(folder))


def _whole_run(project: Path) -> None:
    taken = wrong("PROJECT", f"{project}, which runs already", "one run of it at a time")
    with Federation(project) as federation, lock_file(federation.logs / "local.lock", taken):
        records = _folder_of_run(project) / METRICS
        seen = len(read_lines(records))
        if seen >= federation.task.recipe.rounds:
            print(f"{records.parent}: {counted(seen, 'round')} done before, and no more to do", file=sys.stderr)
        federation.start()
        run = federation.run()
        print(f"run {run} started; logs in {federation.logs}", file=sys.stderr)
        with Progress(federation.task.recipe, what="clients connect", stderr=True) as progress:

            def tell() -> None:
                nonlocal seen
                rows = read_lines(records)
                for row in rows[seen:]:
                    progress.round(row, {})
                seen = len(rows)

            status = federation.wait(run, float("inf"), tell)
        print(status)
        if status != "finished:completed":
            raise RunError(f"the run has no result: {federation.status(run, REASON)} (see {federation.log})")


def _folder_of_run(project: Path) -> Path:
    path = project / "app" / "pyproject.toml"
    with reading(path, "no project", "what fedflat deploy wrote, with out = …"):
        config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
        folder = Path(config["out"]).expanduser()
    moved = "Was the project moved? Move it back: its files name its folder."
    require(folder.parent.is_dir(), f"{path}: out", f"{folder}, in no folder", "a place in a folder", hint=moved)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
