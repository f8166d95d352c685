"""The benchmark on a GPU, without one: the limit's search and steps, sums compared, tables, what is refused."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import __main__ as command
from benchmarks import agreement, gpu
from benchmarks.systems import central, ours
from benchmarks.systems.central import BATCHES, Central, best, search, sizes_of
from benchmarks.table_gpu import limit, markdown_gpu, share
from benchmarks.workloads import BY_NAME, G1, network
from fedflat.models import build

MACHINE = {"cpu": "a cpu", "cores": 4, "load_before": 0.1}
GPU = {"name": "a gpu", "memory_gib": 139.8, "power_limit": "700 W", "driver": "1.2", "torch": "2", "cuda": "12"}


def test_the_workload_is_resnet18_with_fifty_clients() -> None:
    counts = [sum(p.numel() for p in m.parameters()) for m in (network(G1), build("resnet18", (3, 32, 32), 10, 0))]
    assert counts == [11_173_962] * 2
    assert (G1.samples, G1.cohort * G1.steps * G1.batch) == (5000, 5000)


def test_the_search_takes_the_fastest_size_that_fits() -> None:
    speeds = {50: 10.0, 100: 30.0, 200: 20.0}

    def rate(size: int) -> float:
        if size not in speeds:
            try:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            finally:
                if size > 800:
                    raise RuntimeError("the recording was invalidated")
        return speeds[size]

    found = search(BATCHES, rate)
    assert search((50, 1600), rate) == {50: 10.0}
    assert found == speeds and best(found) == 100
    with pytest.raises(MemoryError, match="50"):
        search(BATCHES, lambda size: rate(10 * size + 1))
    with pytest.raises(RuntimeError, match="illegal"):  # any other fault is no answer
        search(BATCHES, lambda size: (_ for _ in ()).throw(RuntimeError("illegal access")))


def test_sizes_end_where_the_data_does() -> None:
    assert sizes_of(G1) == BATCHES
    assert sizes_of(BY_NAME["W2"]) == (*BATCHES, 5000)
    assert sizes_of(dataclasses.replace(G1, clients=4, cohort=4)) == (50, 100, 200, 400)


def work(low: bool = False) -> Central:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    inputs = torch.randn(10, 2, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
    return Central(model, inputs, torch.arange(10) % 3, 0.1, low)


def weights(one: Central) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in one.model.parameters()])


def by_hand(one: Central, rows: list[slice]) -> Tensor:
    for some in rows:
        loss = F.cross_entropy(one.model(one.inputs[some]), one.targets[some])
        grads = torch.autograd.grad(loss, list(one.model.parameters()))
        with torch.no_grad():
            for p, g in zip(one.model.parameters(), grads):
                p -= 0.1 * g
    return weights(one)


@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_a_step_of_the_limit_is_forward_backward_and_sgd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(central, "recorded", lambda step: step)  # replays read what was copied into their batch
    one = work()
    step = one.steps(kind, 4)
    for index in range(3):
        step(index)
    torch.testing.assert_close(weights(one), by_hand(work(), [slice(0, 4), slice(4, 8), slice(0, 4)]))
    low = work(low=True)
    low.steps(kind, 4)(0)
    assert not torch.equal(weights(low), weights(work())) and weights(low).dtype == torch.float32


def test_a_rate_counts_examples_and_synchronizes_before_each_reading() -> None:
    calls: list[str] = []
    assert work().rate("eager", 5, lambda: calls.append("wait"), wanted=10) > 0 and len(calls) == 6


def entry(seconds: float, **facts: Any) -> dict[str, Any]:
    return {"seconds": [seconds], "min": 0.9 * seconds, "median": seconds, "facts": {"samples": 5000} | facts}


def report() -> dict[str, Any]:
    stages = {"local training, clip and sum": 0.9, "noise, ledger and server": 0.1}
    systems = {
        "fedflat": entry(0.5, backend="vectorized", block=8, stages=stages),
        "vectorized": {"seconds": [], "error": "CUDA error: out of memory"},
        "limit": entry(0.4, batch=800, rates={"400": 12_000.0, "800": 12_500.0}),
        "limit-graph": entry(0.288, batch=1600, samples=4800, rates={"1600": 16_666.0}),
    }
    row = {"method": "dp-fedavg", "apart": {"sequential": 3e-7, "vectorized": "a | fault\nof two lines"}, "same": False}
    return {
        "machine": MACHINE, "gpu": GPU | {"cudnn": 9}, "date": "2026-01-01", "rounds": 5,
        "check": [row | {"tolerance": 0.002}],
        "workloads": {"G1": {"workload": dataclasses.asdict(G1), "systems": systems, "precision": "fp32"}},
    }  # fmt: skip


def test_the_table_is_beside_the_fastest_limit_and_says_what_failed() -> None:
    made = report()
    assert limit(made["workloads"]["G1"]) == pytest.approx(4800 / 0.288)  # its own examples, not the round's
    assert share(made, "G1") == pytest.approx(0.6)
    text = markdown_gpu(made)
    assert "a gpu (140 GiB, power limit 700 W), driver 1.2" in text
    how = "vectorized, blocks of 8, local training 90% of the round"
    assert f"| fedflat | 10,000 | 11,111 | 0.60 | 0.5000 | 0.4500 | {how} |" in text
    assert "| vectorized | – | – | – | – | – | failed: 'CUDA error: out of memory' |" in text
    assert "limit, examples/s by batch size: 400: 12,000, 800: 12,500." in text and "| batch 800 |" in text
    assert "| G1: fedflat of the limit | 0.7 | 0.60 | no |" in text and "G1-bf16" not in text
    assert "| dp-fedavg | 3.0e-07 | failed: a / fault of two lines | 0.002 |" in text
    assert "Not the processor's: dp-fedavg" in text


def test_a_target_is_met_from_its_share_on_and_nothing_is_said_of_what_was_not_measured() -> None:
    made = report()
    made["workloads"]["G1"]["systems"]["fedflat"] = entry(0.3 / 0.75, backend="vectorized")
    text = markdown_gpu(made)
    assert "| 0.7 | 0.75 | yes |" in text and "| 0.9 | 0.75 | no |" in text
    del made["workloads"]["G1"]["systems"]["fedflat"]
    assert share(made, "G1") is None and "Targets" not in markdown_gpu(made)
    bare = markdown_gpu(made | {"workloads": {}, "check": []})
    assert bare.startswith("# On a GPU") and "##" not in bare


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cuda", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert str(refused.value).startswith("python -m benchmarks: --device cuda, but ")
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_the_command_checks_first_then_measures_and_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, calls = report(), list[str]()
    monkeypatch.setattr(gpu, "missing", lambda: "")
    monkeypatch.setattr(gpu, "described", lambda: made["gpu"])
    monkeypatch.setattr(gpu, "check", lambda: calls.append("check") or made["check"])
    monkeypatch.setattr(gpu, "part_of", lambda part, *rest: calls.append(part) or made["workloads"]["G1"])

    def run(words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cuda", "--out", str(tmp_path), *words.split()])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code

    assert run("--check") == 1 and calls == ["check"] and not list(tmp_path.iterdir())  # nothing was timed
    assert run("--only G1") == 1 and calls == ["check", "check", "G1"]
    assert run("--only W2 --add --without-extras") == 1 and calls[3:] == ["W2"]
    kept = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert list(kept["workloads"]) == ["G1", "W2"] and kept["check"] == made["check"]
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == markdown_gpu(kept)
    made["check"][0]["same"] = True
    assert run("") == 0 and calls[4:] == ["check", *gpu.PARTS]


@pytest.mark.parametrize(
    "words", ["--device cuda --only W3", "--only G1", "--device cuda --systems pfl", "--check", "--device tpu"]
)
def test_options_that_belong_to_the_other_device_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments(words.split())
    assert words.split()[-1] in capsys.readouterr().err


def test_parts_and_recipes_name_what_runs() -> None:
    assert [s.name for s in gpu.systems_of("G1", ["limit", "vectorized"])] == ["vectorized", "limit"]
    assert {s.precision for s in gpu.systems_of("G1-bf16", list(gpu.KINDS))} == {"bf16"}
    found = ours.recipe(G1, "workers:4", "bf16", "cpu")["engine"]
    assert found == {"backend": "workers", "precision": "bf16", "device": "cpu", "processes": 4}
    assert ours.recipe(G1, "auto", "fp32", "cpu")["engine"] == {"backend": "auto", "precision": "fp32", "device": "cpu"}


def test_a_wrong_or_failing_sum_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    right = agreement.sums("dp-fedavg", False, device="cpu", backend="sequential")
    assert right.shape[0] == 3 and bool((right.norm(dim=1) > 0.01).all())  # each round has something to compare

    def made(method: str, dense: bool, device: str, backend: str, **engine: Any) -> Tensor:
        if backend == "vectorized":
            raise RuntimeError("no such kernel")
        wrong = torch.zeros_like(right)
        wrong[2, 5] = 0.01
        return right + wrong if device == "cuda" and backend == "sequential" else right

    monkeypatch.setattr(agreement, "sums", made)
    row = agreement.row("dp-fedavg", "cuda", False, "fp32", agreement.WAYS)
    assert not row["same"] and row["apart"]["vectorized"] == "no such kernel"
    assert row["apart"]["sequential"] == pytest.approx(0.01 / float(right[2].norm()))
    assert agreement.apart(torch.full((1, 2), torch.nan), torch.ones(1, 2)) == np.inf


def test_what_the_check_cannot_answer_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        stdout, stderr = "", "a driver that is too old"

    monkeypatch.setattr(gpu.subprocess, "run", lambda *a, **k: Dead())
    (row,) = gpu.check()
    assert not row["same"] and row["apart"]["all"] == "a driver that is too old"
