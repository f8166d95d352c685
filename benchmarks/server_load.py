"""What a deployment's server pays per round for 10² … 10⁵ clients' updates, streamed: seconds and memory.

    python benchmarks/server_load.py [D] [COUNTS…]

Every reply goes the real way (Flower message, desk, exact form, server clip, running sum); clients are a stand-in
that answers with one prepared vector, made when it is pulled. Memory is the process's peak beyond what it had
before the round; it must not grow with the number of clients but by the ids, nonces and norms (about 0.5 KiB each).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fedflat.core.params import PersonalState
from fedflat.core.types import Broadcast
from fedflat.engine.device import return_large_blocks
from fedflat.engine.reduce import Accumulator
from fedflat.federation import wire
from fedflat.federation.replies import Culprits
from fedflat.federation.transport import Flower
from fedflat.pieces.clipping import whole_vector


class Everybody:
    """A roster in which client i is node i, always connected."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def connected(self, nodes: Any) -> dict[int, int]:
        return {client: client for client in range(self.clients)}


class Answering:
    """A grid whose replies are made when they are pulled, so that its own memory is no part of the measurement."""

    def __init__(self, update: np.ndarray) -> None:
        self.update, self.asked, self.count = wire.pack(update), {}, 0

    def get_nodes(self) -> list[Any]:
        return []

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers = []
        for message in messages:
            numbers.append(f"{self.count}")
            self.asked[numbers[-1]] = (message.metadata.dst_node_id, message.content["facts"]["nonce"])
            self.count += 1
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        return [self.reply(number) for number in numbers if number in self.asked]

    def reply(self, number: str) -> Any:
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        node, nonce = self.asked.pop(number)
        facts = ConfigRecord({"protocol": wire.PROTOCOL, "round": 0, "nonce": nonce, "examples": 0})
        content = RecordDict({"arrays": ArrayRecord({"update": self.update}), "facts": facts})
        metadata = SimpleNamespace(reply_to_message_id=number, src_node_id=node)
        return SimpleNamespace(metadata=metadata, content=content, has_content=lambda: True, has_error=lambda: False)


def measure(dimension: int, clients: int) -> tuple[float, float]:
    """Seconds of a round, and MiB of peak memory beyond the start."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    update = np.linspace(-1, 1, dimension, dtype=np.float32)
    counts: Counter[str] = Counter()
    culprits = Culprits(Path("none.jsonl"))
    server = Flower(
        Answering(update),
        Everybody(clients),
        "pin",
        dimension,
        1e9,
        lambda round, found: counts.update(found),
        culprits,
    )
    broadcast = Broadcast(0, torch.zeros(dimension), 0.1, 1.0)
    accumulator = Accumulator(whole_vector(0.1), 0.1, (slice(0, dimension),), dimension)
    before = peak_mib()
    began = time.perf_counter()
    for part in server.train(np.arange(clients), broadcast, PersonalState(torch.zeros(0)), lambda block: block):
        part.add_to(accumulator)
    seconds = time.perf_counter() - began
    found = accumulator.result()
    if found.count != clients or +counts:
        raise SystemExit(f"{clients - found.count} of {clients} replies were lost: {dict(counts)}")
    return seconds, peak_mib() - before


def peak_mib() -> float:
    """Peak resident memory of this process in MiB (unlike getrusage, without the parent)."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print one line for each number of clients."""
    torch.set_num_threads(1)
    return_large_blocks()
    dimension = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    counts = [int(text) for text in sys.argv[2:]] or [100, 1_000, 10_000, 100_000]
    measure(dimension, 50)  # what is loaded once
    print(f"d = {dimension:,} ({dimension * 4 / 2**20:.2f} MiB per update)")
    for clients in counts:
        seconds, memory = measure(dimension, clients)
        print(
            f"{clients:>8,} clients  {seconds:8.2f} s  {1e6 * seconds / clients:8.1f} µs each  +{memory:7.1f} MiB peak"
        )


if __name__ == "__main__":
    main()
