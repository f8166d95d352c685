"""A round on many workers, on paper, from what was measured on one machine; and the table of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MACHINE = 16
"""Workers on one machine of the cluster, on paper."""
COHORTS = {"W1": (50, 1000), "W2": (500, 10_000), "W3": (50, 1000)}
WORKERS = (1, 2, 4, 10, 100)


@dataclass(frozen=True)
class Costs:
    """Measured seconds of one client of a workload: its training, what its worker and its driver pay beyond it, and
    what its message takes from another machine's object store."""

    workload: str
    d: int
    client: float
    worker: float
    driver: float
    wire: float

    @property
    def least(self) -> float:
        """Seconds a client costs the driver, however many workers there are: adding it, or receiving it."""
        return max(self.driver, self.wire)

    @property
    def most_workers(self) -> float:
        """Workers beyond which the driver is the bound: (client + worker) / least."""
        return (self.client + self.worker) / self.least

    def round(self, cohort: int, workers: int) -> float:
        """Seconds of a round: the broadcast to every machine, then the slower of the workers and the driver.

        T = machines·wire + max(⌈m/P⌉·(client + worker), m·least); one machine needs no network.
        """
        machines = math.ceil(workers / MACHINE)
        wire, least = (self.wire, self.least) if machines > 1 else (0.0, self.driver)
        return machines * wire + max(math.ceil(cohort / workers) * (self.client + self.worker), cohort * least)

    def bound(self, cohort: int, workers: int) -> str:
        """Who is waited for: the workers, the driver's additions, or its network."""
        least = self.least if workers > MACHINE else self.driver
        if math.ceil(cohort / workers) * (self.client + self.worker) >= cohort * least:
            return "workers"
        return "driver" if self.driver >= least else "transfer"


def markdown(report: dict[str, Any]) -> str:
    """Measured rounds, constants, projection."""
    machine = report["machine"]
    lines = [
        "# Rounds on Ray: overhead, and a projection",
        "",
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, Ray {report['versions']['ray']}, torch "
        f"{report['versions']['torch']}; load before: {machine['load_before']:.1f}. Medians of {report['rounds']} "
        "rounds. *Arithmetic* is what the clients take alone in one process; *overhead* is the round less "
        "arithmetic ÷ workers (no more than cores, but for clients that wait). *CPU overhead*: CPU seconds "
        "of all processes less those of the arithmetic. Every round's sum was compared, bit for bit. Where the load "
        "exceeds the cores, rounds and overheads hold the waiting for cores too; CPU seconds do not.",
        "",
        "| clients | workers | load | arithmetic | Ray: round | overhead | CPU overhead a client | of it the driver's "
        "| worker back end: round | overhead | CPU overhead a client | same bits |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in report["rows"]]
    lines += ["", "## Constants", "", "| | ms |", "|---|---|"]
    lines += [f"| {CONSTANTS[name]} | {1e3 * value:.3f} |" for name, value in report["constants"].items()]
    return "\n".join(lines + _paper([Costs(**c) for c in report["costs"]])) + "\n"


CONSTANTS = {
    "put_per_mb": "broadcast into the object store, per MB",
    "first_mb_puts": "the same for a vector of 1 MB",
    "task_latency": "an empty task there and back",
    "task_throughput": "an empty task among many, per task",
    "task_driver": "of that the driver's thread",
    "answer_per_mb": "an answer there and back, per MB beyond the empty task",
    "read_per_mb": "an answer's first reading by the driver, per MB",
    "transfer_per_mb": "an answer from another node's store on this machine (loopback, two stores), per MB",
    "add_per_mb": "clip and addition by the driver, per MB of float32 message",
}


def _row(row: dict[str, Any]) -> str:
    ray, other = row["ray"], row.get("workers")
    cells = [row["kind"], row["count"], f"{max(row['load']):.1f}", _seconds(row["arithmetic"])]
    cells += [_seconds(ray["seconds"]), _seconds(ray["overhead"])]
    cells += [_seconds(value / row["clients"]) for value in (ray["cpu_overhead"], ray["driver"])]
    cells += [_seconds(other["seconds"]), _seconds(other["overhead"])] if other else ["–", "–"]
    cells += [_seconds(other["cpu_overhead"] / row["clients"]) if other else "–"]
    return "| " + " | ".join(map(str, [*cells, "yes" if row["same"] else "NO"])) + " |"


def _paper(costs: list[Costs]) -> list[str]:
    lines = [
        "",
        "## On paper",
        "",
        f"T = machines·w + max(⌈m/P⌉·(c + a), m·max(k, w)): c a client's training, a its worker's and k its "
        f"driver's cost beyond that (CPU seconds in the empty rounds, medians over numbers of workers; "
        "a with the wait for a task), "
        f"w a message's way from another node's store (a network of 10 Gb/s alone would take 0.8 ms per MB); {MACHINE} "
        "workers a machine, and nothing on the way with one machine.",
        "",
        "| | d | c | a | k | w | workers beyond which the driver binds | m | "
        + " | ".join(f"P = {workers}" for workers in WORKERS)
        + " | speed-up at 100 |",
        "|---|---|---|---|---|---|---|---|" + "---|" * (len(WORKERS) + 1),
    ]
    for cost in costs:
        for cohort in COHORTS[cost.workload]:
            rounds = [f"{_seconds(cost.round(cohort, p))} ({cost.bound(cohort, p)})" for p in WORKERS]
            cells = [cost.workload, f"{cost.d:,}", *map(_seconds, (cost.client, cost.worker, cost.driver, cost.wire))]
            cells += [f"{cost.most_workers:.0f}", f"{cohort:,}", *rounds]
            cells += [f"{cohort * cost.client / cost.round(cohort, 100):.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if abs(value) >= 1 else f"{1e3 * value:.3g} ms"
