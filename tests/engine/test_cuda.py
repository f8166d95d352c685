"""The same on a real GPU, where there is one: numbers, bits, streams, precision, the compiler, the whole command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import KEEPING, KINDS, METHODS, SIZES, clients, module, recipe, trained

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import RunError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CLOSE = {"rtol": 1e-3, "atol": 2e-5}
"""Another order of sums, over three rounds."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_agrees_with_the_processor(method: str) -> None:
    expected = trained(method, backend="sequential", device="cpu")
    ways: list[dict[str, Any]] = [
        {"backend": "sequential"},
        {"backend": "graphs", "processes": 3},
        {"backend": "graphs", "block": 2, "processes": 2},
        {"backend": "vectorized", "block": 3},
        {"backend": "auto"},
    ]
    for way in ways if method not in KEEPING else [way for way in ways if way["backend"] != "graphs"]:
        found = trained(method, device="cuda", **way)
        torch.testing.assert_close(found, expected, **CLOSE, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "secure noise"])
def test_every_kind_of_run_agrees(kind: str) -> None:
    method, changes = KINDS[kind]
    sizes = SIZES * 6 if kind == "ddgauss" else SIZES
    expected = trained(method, changes, sizes=sizes, backend="sequential", device="cpu")
    found = trained(method, changes, sizes=sizes, backend="graphs", device="cuda")
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("block", [1, 2])
def test_convolutions_agree(block: int) -> None:
    expected = trained("dp-fedavg-lus", kind="convolution", backend="sequential", device="cpu")
    found = trained("dp-fedavg-lus", kind="convolution", backend="graphs", device="cuda", block=block)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_runs_repeat_bit_for_bit_with_any_number_of_streams(kind: str) -> None:
    found = [trained("dp-fedsam", kind=kind, backend="graphs", device="cuda", processes=n) for n in (1, 1, 4)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_dropout_is_that_of_the_plain_loop() -> None:
    full = (4, 8, 12, 8, 4, 4, 8)
    plain = trained("dp-fedavg", kind="dropout", sizes=full, backend="sequential", device="cuda")
    graph = trained("dp-fedavg", kind="dropout", sizes=full, backend="graphs", device="cuda", processes=3)
    torch.testing.assert_close(graph, plain, **CLOSE)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    asked, seen = recipe("dp-fedpgn", backend="graphs", device="cuda"), 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return seen > 2

    def weights(result: Any) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    whole = fedflat.run(asked, model=module(), clients=clients())
    fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "cut", should_stop=stop)
    again = fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "cut", resume=True)
    assert torch.equal(weights(again), weights(whole))


def test_bf16_is_bf16(tmp_path: Path) -> None:
    exact = trained("dp-fedavg", kind="convolution", backend="graphs", device="cuda")
    plain = trained("dp-fedavg", kind="convolution", backend="sequential", device="cuda", precision="bf16")
    graph = trained("dp-fedavg", kind="convolution", backend="graphs", device="cuda", precision="bf16")
    rounding = float((plain - exact).norm())
    assert rounding > 1e-5 and float((graph - plain).norm()) < rounding


def test_a_compiled_model_agrees() -> None:
    expected = trained("dp-fedsam", kind="convolution", backend="sequential", device="cpu")
    try:
        found = trained("dp-fedsam", kind="convolution", backend="graphs", device="cuda", compile=True)
    except RunError as error:
        pytest.skip(f"the compiler does not work here: {error}"[:300])
    torch.testing.assert_close(found, expected, **CLOSE)


def test_the_quick_start_on_a_gpu() -> None:
    texts = ["rounds=2", "engine.device=cuda"]
    found = fedflat.run(Recipe.load("quick-start-dp-fedsam", texts))
    there = fedflat.run(Recipe.load("quick-start-dp-fedsam", ["rounds=2", "engine.device=cpu"]))
    assert abs(found.history[-1]["test_accuracy"] - there.history[-1]["test_accuracy"]) < 0.02
    assert found.history[-1]["epsilon"] == there.history[-1]["epsilon"]


def test_auto_takes_the_gpu_and_says_so() -> None:
    job = prepare(Recipe.of(recipe("dp-fedavg", device="auto")), module("convolution"), clients(shape=(2, 4, 4)))
    assert job.problem.device.type == "cuda" and job.backend.name in ("sequential", "vectorized")
