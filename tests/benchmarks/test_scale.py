"""The projection's arithmetic; what is measured is what is said: whole messages, no training, the same sums."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from benchmarks.scale import KINDS, Pause, alone, loop, timed_round
from benchmarks.scale_paper import MACHINE, Costs, markdown

COSTS = Costs("W1", 667_402, client=0.2, worker=0.004, driver=0.002, wire=0.00214)


def test_few_workers_wait_for_themselves_and_many_for_the_driver() -> None:
    assert COSTS.round(50, 1) == pytest.approx(50 * 0.204)
    assert COSTS.round(50, 4) == pytest.approx(13 * 0.204)  # 13 clients for the busiest
    machines = math.ceil(100 / MACHINE)
    assert COSTS.least == 0.00214  # 2.1 ms on the network, 2.0 ms for the driver
    assert COSTS.round(1000, 100) == pytest.approx(machines * 0.00214 + max(10 * 0.204, 2.14))
    assert [COSTS.bound(1000, p) for p in (1, 16, 100)] == ["workers", "workers", "transfer"]
    slow = dataclasses.replace(COSTS, driver=0.02)
    assert slow.bound(1000, 100) == "driver" and slow.round(1000, 1000) >= 20.0
    assert slow.most_workers == pytest.approx(0.204 / 0.02)


def test_a_round_is_never_faster_with_fewer_workers_or_than_the_driver() -> None:
    on_one_machine = [COSTS.round(100, p) for p in (1, 2, 4, 8, 16)]
    assert on_one_machine == sorted(on_one_machine, reverse=True)
    assert all(COSTS.round(100, p) >= 100 * COSTS.driver for p in (1, 10, 100, 1000))


def test_empty_clients_send_whole_messages_and_add_up_to_nothing() -> None:
    small = dataclasses.replace(KINDS[0], clients=3)
    inner = loop(small)
    found = timed_round(inner, inner)
    assert found.total.shape == (50_890,) and not found.total.any() and min(found.seconds, found.driver, found.cpu) > 0
    assert min(alone(inner)) > 0
    seconds, cpu = alone(loop(dataclasses.replace(small, pause=0.05)))
    assert seconds - cpu >= 0.149  # three pauses, in which nothing is worked
    assert torch.equal(Pause(0.0)(torch.ones(2), None), torch.ones(2))  # type: ignore[arg-type]


def test_real_clients_train() -> None:
    inner = loop(dataclasses.replace(KINDS[-1], model="W2", clients=2))
    assert timed_round(inner, inner).total.any()


def test_the_table_holds_rounds_constants_and_projection() -> None:
    row: dict[str, Any] = {"kind": "empty", "d": 10, "clients": 4, "count": 2, "load": (0.5, 1.0), "arithmetic": 0.1}
    spent = {"seconds": 0.2, "overhead": 0.15, "cpu_overhead": 0.08, "driver": 0.01, "min": 0.19}
    row |= {"same": False, "ray": spent}
    report = {
        "date": "2026-01-01", "machine": {"cpu": "a cpu", "cores": 2, "load_before": 0.1},
        "versions": {"ray": "2", "torch": "2"}, "rounds": 5,
        "rows": [row, row | {"same": True, "workers": spent | {"seconds": 3.0, "overhead": 2.5}}],
        "constants": {"put_per_mb": 0.001}, "costs": [vars(COSTS)],
    }  # fmt: skip
    text = markdown(report)
    assert "| 1.0 | 100 ms | 200 ms | 150 ms | 20 ms | 2.5 ms | – | – | – | NO |" in text
    assert "| 3.00 s | 2.50 s | 20 ms | yes |" in text
    assert "| broadcast into the object store, per MB | 1.000 |" in text
    assert "| W1 | 667,402 | 200 ms | 4 ms | 2 ms | 2.14 ms | 95 | 50 |" in text
