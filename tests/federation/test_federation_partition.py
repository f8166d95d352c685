"""A network that is cut for real: SuperLink and SuperNodes in network namespaces of their own, one link taken away.

Needs the right to make namespaces (root) and iproute2; skipped where either is missing.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest
import torch
from forked import Forked, programs
from ports import free_port
from stand_in import client_at, small
from test_federation_processes import logs

from fedflat.core.checks import InputError
from fedflat.core.types import Broadcast
from fedflat.federation.local import Federation
from fedflat.federation.project import write_project
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint

PATIENCE, CLIENTS, ROUNDS, ANSWER_SECONDS = 240.0, 2, 3, 20.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Network:
    """A switch in the SuperLink's namespace, one namespace for each client, and a line to this process."""

    tag: str = field(default_factory=lambda: f"ff{os.getpid() % 100000}")
    made: list[str] = field(default_factory=list)

    @property
    def block(self) -> str:
        return f"10.213.{os.getpid() % 250}"

    def space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def add(self, name: str) -> None:
        ip("netns", "add", self.space(name))
        self.made.append(self.space(name))
        ip("-n", self.space(name), "link", "set", "lo", "up")

    def lay(self) -> None:
        self.add("superlink")
        hub = self.space("superlink")
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "addr", "add", f"{self.block}.1/24", "dev", "hub")
        ip("-n", hub, "link", "set", "hub", "up")
        ip("link", "add", f"{self.tag}h", "type", "veth", "peer", "name", "to-host", "netns", hub)
        ip("addr", "add", f"{self.block}.2/24", "dev", f"{self.tag}h")
        ip("link", "set", f"{self.tag}h", "up")
        for client in range(CLIENTS):
            name = f"client-{client}"
            self.add(name)
            peer = ("peer", "name", "eth0", "netns", self.space(name))
            ip("-n", hub, "link", "add", f"to-{client}", "type", "veth", *peer)
            ip("-n", self.space(name), "addr", "add", f"{self.block}.{10 + client}/24", "dev", "eth0")
            ip("-n", self.space(name), "link", "set", "eth0", "up")
        for port in ("to-host", *(f"to-{client}" for client in range(CLIENTS))):
            ip("-n", hub, "link", "set", port, "master", "hub")
            ip("-n", hub, "link", "set", port, "up")

    def link(self, client: int, state: str) -> None:
        """Cut ("down") or mend ("up") a client's line, at the switch."""
        ip("-n", self.space("superlink"), "link", "set", f"to-{client}", state)

    def clear(self) -> None:
        for space in self.made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self.tag}h"], capture_output=True, check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    found = Network()
    try:
        try:
            found.lay()
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)!r}")
        yield found
    finally:
        found.clear()


@dataclass
class Spread(Forked):
    """The processes of a project, each in its namespace."""

    network: Network = field(default_factory=Network)

    def _spawn(self, name: str, command: list[str]) -> None:
        super()._spawn(name, ["ip", "netns", "exec", self.network.space(name), *command])

    def _flwr(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Orders are given on the SuperLink's machine."""
        return super()._flwr(["ip", "netns", "exec", self.network.space("superlink"), *command])

    def status(self, run: int) -> str:
        found = json.loads(self._flwr(["flwr", "ls", "--run-id", str(run), "--format", "json", "fedflat"]).stdout)
        return str(found["runs"][0]["status"])


@dataclass
class Watch:
    """Every shared model that the server kept, by the number of finished rounds, and when it was there."""

    run: Path
    models: dict[int, torch.Tensor] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    charged: dict[int, list[int]] = field(default_factory=dict)

    def look(self) -> None:
        for path in sorted((self.run / "checkpoints").glob("round-*.safetensors")):
            number = int(path.stem.split("-")[1])
            if number not in self.models:
                lines = [entry["round"] for entry in read_ledger(self.run / "ledger.jsonl")]
                try:
                    self.models[number] = checkpoint.load(path)[0].shared
                except InputError:  # the server has removed an old one meanwhile
                    continue
                self.seen[number], self.charged[number] = time.monotonic(), lines

    def until(self, done: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Look until ``done()`` holds."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end
            self.look()
            time.sleep(0.1)


def takers(folder: Path, federation: Federation, watch: Watch, round: int) -> tuple[int, ...]:
    """Whose updates a round's step is made of, whatever their number, over m: found by trying all subsets."""
    clients = [client_at(folder, federation.task, i) for i in range(CLIENTS)]
    job = clients[0].job
    before = watch.models.get(round, job.initial_weights[: job.parts.layout.dimension])
    broadcast = Broadcast(round, before, job.threshold, job.parts.local.rate(round) / job.parts.local.rate(0))
    updates = [client.update(broadcast)[0] for client in clients]
    moved = watch.models[round + 1] - before
    errors = {}
    for size in range(CLIENTS + 1):
        for chosen in combinations(range(CLIENTS), size):
            wanted = sum((updates[i] for i in chosen), torch.zeros_like(moved)) / CLIENTS
            errors[chosen] = float((moved - wanted).norm())
    best = min(errors, key=errors.__getitem__)
    assert errors[best] < 1e-5, errors
    return best


@pytest.mark.slow
@pytest.mark.long
def test_a_cut_link_is_a_zero_vector_and_the_client_comes_back(tmp_path: Path, network: Network) -> None:
    folder, run = tmp_path / "fed", tmp_path / "fed" / "run"
    recipe = small(rounds=ROUNDS, data={"clients": CLIENTS}, cohort={"size": CLIENTS})
    write_project(recipe, folder, port=free_port(), host=f"{network.block}.1")
    watch = Watch(run)
    with Spread(folder, PATIENCE, network=network) as federation:
        federation.start()
        number = federation.run(config=f"answer-seconds={ANSWER_SECONDS}")
        watch.until(lambda: programs("flwr-clientapp", federation.processes["client-1"].pid))
        network.link(1, "down")  # client 1 trains, and its answer has no way back
        cut = max(watch.models, default=0)
        watch.until(lambda: cut + 1 in watch.models)  # the round ends while the link is down
        network.link(1, "up")
        mended = time.monotonic()
        watch.until(lambda: ROUNDS in watch.models and (run / "privacy.json").exists())
        assert federation.wait(number, PATIENCE) == "finished:completed", logs(federation)
    took = {round: takers(folder, federation, watch, round) for round in range(ROUNDS)}
    assert took[cut] == (0,)
    back = [round for round in range(cut + 1, ROUNDS) if 1 in took[round]]
    assert back, took
    print(f"round {cut} cut; took {took}; back after {watch.seen[back[0] + 1] - mended:.1f} s")
    for finished, lines in watch.charged.items():  # each model that was kept had its line before
        assert set(range(finished)) <= set(lines)
    assert [entry["round"] for entry in read_ledger(run / "ledger.jsonl")] == list(range(ROUNDS))
    assert json.loads((run / "privacy.json").read_text())["rounds_charged"] == ROUNDS
