"""Training on a GPU that is pretended (``pretended_gpu``): every method, every kind of run, every refusal."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretended_gpu import Elsewhere, PretendedStream, elsewhere, here, pretended_gpu
from torch import Tensor, nn

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.backends import choose
from fedflat.backends.cuda import graphs
from fedflat.backends.cuda.graphs import Graphs
from fedflat.backends.cuda.streams import CudaStream
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.types import Algorithm, Broadcast, Phase
from fedflat.engine import device
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.evaluate import scores
from fedflat.engine.train import train
from fedflat.simulation import experiment
from fedflat.simulation import run as simulation

METHODS = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]
KEEPING = [name for name in METHODS if ALGORITHMS[name]().client_state]
"""Recordings, and the low-rank form, keep no states."""
PERSONAL = [name for name in METHODS if ALGORITHMS[name]().head is not None]
SIZES = (7, 3, 0, 12, 1, 5, 12)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
_processor: dict[str, Tensor] = {}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_gpu(monkeypatch):
        yield


def clients(sizes: tuple[int, ...] = SIZES, shape: tuple[int, ...] = (6,)) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(2)
    return [
        (torch.tensor(rng.normal(size=(n, *shape)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, n)))
        for n in sizes
    ]


def module(kind: str = "dense") -> nn.Module:
    """Weights without a global generator."""
    network: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    if kind == "convolution":
        network = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    if kind == "dropout":
        network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return network


def recipe(method: str, changes: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    found = {
        "rounds": 3,
        "algorithm": {"name": method},
        "local": {
            "steps": 3, "batch_size": 4, "lr": 0.3, "lr_decay": 0.5, "weight_decay": 0.01, "max_grad_norm": 2.0
        },
        "cohort": {"size": 5},
        "privacy": {"clip": 0.2, "noise_multiplier": 1.0, "delta": 1e-5},
        "engine": engine,
    }  # fmt: skip
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if name:
            found.setdefault(section, {})[name] = value
        else:
            found[section] = value
    return found


def trained(
    method: str,
    changes: dict[str, Any] | None = None,
    kind: str = "dense",
    sizes: tuple[int, ...] = SIZES,
    algorithm: Algorithm | None = None,
    **engine: Any,
) -> Tensor:
    given = clients(sizes, (2, 4, 4) if kind == "convolution" else (6,))
    found = fedflat.run(recipe(method, changes, **engine), model=module(kind), clients=given, algorithm=algorithm)
    return torch.cat([p.detach().reshape(-1) for p in found.model.parameters()])


IN_EVERY_WAY = ("dp-fedavg", "dp-fedsam-blur", "dp-fedavg-lus", "fed-smp-topk", "dp-fedpgn", "dp2-fedsam")
"""One of each form: a rule, a transform that asks for gradients, a mask, a broadcast vector, a head."""


@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_a_gpu_agrees_on_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(method, backend="sequential", device="cpu")
    ways: list[dict[str, Any]] = [
        {"backend": "graphs", "processes": 3},
        {"backend": "graphs", "block": 2, "processes": 2},
        {"backend": "sequential"},
        {"backend": "vectorized", "block": 3},
    ]
    if method == IN_EVERY_WAY[0]:
        ways.append({"backend": "auto", "device": "auto"})
    if method not in PERSONAL:
        ways.append({"backend": "lowrank", "block": 3})
    if method in KEEPING:
        ways = [way for way in ways if way["backend"] not in ("graphs", "lowrank")]
    elif method == "dp-fedavg-la":  # a recording is not given class shares anew
        ways = [way for way in ways if way["backend"] != "graphs"]
    elif method not in IN_EVERY_WAY:
        ways = ways[:1]
    with pretended_gpu(monkeypatch):
        for way in ways:
            found = trained(method, **({"device": "cuda"} | way))
            assert type(found) is Tensor  # the model that comes back is on the processor
            torch.testing.assert_close(found, expected, **CLOSE, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.parametrize("method", KEEPING)
def test_recordings_keep_no_states(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch), pytest.raises(InputError, match=r"graphs with .*whose clients keep a state"):
        trained(method, backend="graphs", device="cuda")


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adaptive clip": (
        "dp-fedavg-blur",
        {"privacy.clip": {"kind": "adaptive", "initial": 0.1, "quantile": 0.5, "count_noise": 2.0}},
    ),
    "a clip for each tensor": ("dp-fedsam", {"privacy.clip": {"kind": "per-tensor", "values": [0.1, 0.2, 0.1, 0.3]}}),
    "secure noise": ("dp-fedavg", {"privacy.secure_rng": True}),
    "local trust": ("dp-fedpgn", {"privacy.trust": "local"}),
    "distributed trust": ("dp-fedsam", {"privacy.trust": "distributed", "cohort.sampling": "fixed"}),
    "ddgauss": ("ddgauss", {"privacy.noise_multiplier": 2.0, "cohort.size": 30}),
    "published": ("dp-fedsam", {"privacy.protocol": "published", "local": {"epochs": 2, "batch_size": 4, "lr": 0.3}}),
    "personal accuracy": ("dp-fedavg-ft", {"data": {"client_test_fraction": 0.3}}),
    "personal heads": ("dp2-fedsam", {"data": {"client_test_fraction": 0.3}}),
    "whole clients as batches": ("dp-fedavg-lus", {"local.batch_size": 50}),
    "weighted mean": ("fedavg", {"server": {"weights": "samples"}}),
    "momentum": ("dp-fedavg", {"local.momentum": 0.9}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_agrees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, changes = KINDS[kind]
    if kind == "secure noise":  # its key differs from run to run; the sum does not
        monkeypatch.setattr("fedflat.simulation.run.fresh_key", lambda: bytes(32), raising=False)
        changes = changes | {"privacy.noise_multiplier": 0}
    sizes = SIZES * 6 if kind == "ddgauss" else SIZES
    expected = trained(method, changes, sizes=sizes, backend="sequential", device="cpu")
    with pretended_gpu(monkeypatch):
        found = trained(method, changes, sizes=sizes, backend="graphs", device="cuda")
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("sizes", "block"), [(SIZES, 1), (SIZES, 2), ((8,) * 7, 2), ((4,) * 7, 1)])
def test_convolutions_with_any_sizes(sizes: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("dp-fedavg-lus", kind="convolution", sizes=sizes, backend="sequential", device="cpu")
    with pretended_gpu(monkeypatch):
        found = trained("dp-fedavg-lus", kind="convolution", sizes=sizes, backend="graphs", device="cuda", block=block)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_votes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"algorithm": {"name": "ae-dpfl", "queries": 12, "student_epochs": 2}}
    base = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "model": {"name": "mlp", "hidden": 8},
        "local": {"steps": 5, "batch_size": 16}, "cohort": {"size": 8}, "privacy": {"noise_multiplier": 4.0}, **changes,
    }  # fmt: skip
    found = {}
    for where in "cpu", "cuda":
        with pretended_gpu(monkeypatch):
            result = fedflat.run(base | {"engine": {"device": where}})
            found[where] = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
    torch.testing.assert_close(found["cuda"], found["cpu"], **CLOSE)


def test_the_number_of_streams_changes_no_bit(gpu: None) -> None:
    one, five = (trained("dp-fedsam", backend="graphs", device="cuda", processes=n) for n in (1, 5))
    assert torch.equal(one, five)


def test_dropout_draws_as_the_plain_loop_does_on_one_stream(gpu: None) -> None:
    full = (4, 8, 12, 8, 4, 4, 8)  # padding would draw too
    plain = trained("dp-fedavg", kind="dropout", sizes=full, backend="sequential", device="cuda")
    graph = trained("dp-fedavg", kind="dropout", sizes=full, backend="graphs", device="cuda", processes=3)
    torch.testing.assert_close(graph, plain, **CLOSE)


def test_a_killed_run_goes_on_bit_for_bit(gpu: None, tmp_path: Path) -> None:
    asked = recipe("dp-fedpgn", backend="graphs", device="cuda")

    def weights(result: Any) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    whole = fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "whole")
    seen = 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return seen > 2

    fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "cut", should_stop=stop)
    again = fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "cut", resume=True)
    assert torch.equal(weights(again), weights(whole))
    text = (tmp_path / "whole" / "recipe.yaml").read_text(encoding="utf-8")
    assert "backend: graphs" in text and "device: cuda:0" in text and "compile: false" in text


def _backend(**engine: Any) -> tuple[Graphs, Any]:
    job = prepare(Recipe.of(recipe("dp-fedavg", backend="graphs", device="cuda", **engine)), module(), clients())
    assert isinstance(job.backend, Graphs)
    return job.backend, job


def test_short_memory_takes_streams_and_then_half_the_block(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("dp-fedavg", backend="graphs", device="cuda", block=4, processes=3)

    class Short(PretendedStream):
        asked = 0

        def record(self, step: Any) -> Any:
            Short.asked += 1
            if Short.asked in (2, 3):
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().record(step)

    monkeypatch.setattr(graphs, "CudaStream", Short)
    with pytest.warns(UserWarning) as told:
        found = trained("dp-fedavg", backend="graphs", device="cuda", block=4, processes=3)
    assert [str(w.message) for w in told if "memory" in str(w.message)] == [
        "engine.processes: memory is short; going on with 1 streams",
        "engine.block: 4 clients did not fit into memory; going on with 2",
    ]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_one_client_that_does_not_fit_ends_the_run(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PretendedStream, step: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(PretendedStream, "record", full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RunError, match="round 0, 1 clients, local training as a CUDA graph: CUDA out of memory"):
            trained("dp-fedavg", backend="graphs", device="cuda", block=2, processes=2)


def test_short_memory_while_adding_ends_the_run(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a message may be noted by then; going on would lose it in silence."""
    _, job = _backend(processes=2)
    honest, calls = Accumulator._sum, 0

    def short(self: Accumulator, messages: Tensor, factors: Tensor) -> None:
        nonlocal calls
        calls += isinstance(messages, Elsewhere)
        if calls == 2:
            raise RuntimeError("CUDA out of memory")
        honest(self, messages, factors)

    monkeypatch.setattr(Accumulator, "_sum", short)
    with pytest.raises(RunError, match=r"clients \[\d\], clip and sum on cuda:0: CUDA out of memory"):
        train(job)


def test_an_evaluation_that_does_not_fit_takes_smaller_batches(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = _backend()
    honest, seen = job.problem.logits, list[int]()
    inputs, targets = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(10, dtype=torch.int64)
    expected = scores(job.problem, job.first, inputs, targets, 10)

    def short(some: Tensor, module: Any = None) -> Tensor:
        seen.append(len(some))
        if len(some) > 3:
            raise RuntimeError("CUDA out of memory")
        return honest(some, module)

    monkeypatch.setattr(job.problem, "logits", short)
    found = scores(job.problem, job.first, inputs, targets, 10)
    assert seen == [10, 5, 2, 2, 2, 2, 2]
    torch.testing.assert_close(found.loss, expected.loss)


def test_what_cannot_be_recorded_says_so_and_auto_goes_without(gpu: None) -> None:
    """A rule that reads a value on the host: no CUDA graph can hold it."""

    def reads(gradient: Any, view: Any) -> Any:
        def found(w: Tensor) -> Tensor:
            g = gradient(w)
            float(g.norm())
            return g * 0.5

        return found

    own = Algorithm("own", phases=(Phase(rule=reads),))
    with pytest.raises(RunError, match=r"training as a CUDA graph: operation not permitted when stream is captur"):
        trained("dp-fedavg", algorithm=own, backend="graphs", device="cuda")
    expected = trained("dp-fedavg", algorithm=own, backend="sequential", device="cpu")
    torch.testing.assert_close(trained("dp-fedavg", algorithm=own, device="auto"), expected, **CLOSE)


class Counts(nn.Module):
    """Writes into a buffer at every pass; what it computes does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[operator]
        return self.linear(x)


def test_a_model_that_writes_into_a_buffer_is_not_recorded(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.models.refuse_unclipped_state", lambda module, example, known: False)
    with pytest.raises(RunError, match="found graphs with a model that writes into its buffers; allowed: sequential"):
        fedflat.run(recipe("dp-fedavg", backend="graphs", device="cuda"), model=Counts(), clients=clients())


# What the pretended device must catch: each of these twins is a fault that a real GPU has no mercy on.


def _differs(monkeypatch: pytest.MonkeyPatch) -> bool:
    expected = trained("dp-fedavg", backend="sequential", device="cpu")
    with pretended_gpu(monkeypatch):
        found = _spoiled(monkeypatch)
    return not torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def _spoiled(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    return trained("dp-fedavg", backend="graphs", device="cuda", processes=2)


def test_twin_a_rate_that_is_baked_into_the_recording_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Graphs._receive

    def baked(self: Graphs, broadcast: Broadcast) -> Broadcast:
        return dataclasses.replace(honest(self, broadcast), rate=broadcast.rate)

    assert not _differs(monkeypatch)
    monkeypatch.setattr(Graphs, "_receive", baked)
    assert _differs(monkeypatch)


def test_twin_an_outcome_read_before_its_lane_is_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendedStream, "finish", lambda self: None)
    assert _differs(monkeypatch)


def test_twin_a_broadcast_that_recordings_do_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(self: Graphs, broadcast: Broadcast) -> Broadcast:
        self._static = None
        return honest(self, broadcast)

    honest = Graphs._receive
    monkeypatch.setattr(Graphs, "_receive", fresh)
    assert _differs(monkeypatch)


def test_twin_padding_clients_that_are_added_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are filled up with the last client; its further messages must be dropped."""
    expected = trained("fedavg", {"cohort": {"size": 7}}, sizes=(4, 4, 4, 4, 4, 4, 4), backend="sequential")
    honest = Graphs._start

    def start(self: Graphs, track: Any, clients: Any, static: Any, heads: Any) -> Any:
        found = honest(self, track, clients, static, heads)
        filled = np.concatenate([clients, np.repeat(clients[-1:], self._together - len(clients))])
        return dataclasses.replace(found, clients=filled)

    with pretended_gpu(monkeypatch):
        asked: dict[str, Any] = {"backend": "graphs", "device": "cuda", "block": 3}
        sizes = (4, 4, 4, 4, 4, 4, 4)
        found = trained("fedavg", {"cohort": {"size": 7}}, sizes=sizes, **asked)
        torch.testing.assert_close(found, expected, **CLOSE)
        monkeypatch.setattr(Graphs, "_start", start)
        assert not torch.allclose(trained("fedavg", {"cohort": {"size": 7}}, sizes=sizes, **asked), expected, atol=1e-3)


def test_tensors_of_the_pretended_device_do_not_mix_with_the_processors(gpu: None) -> None:
    there, own = elsewhere(torch.ones(2)), torch.ones(2)
    assert there.device.type == "cuda" and own.device.type == "cpu"
    with pytest.raises(RuntimeError, match="same device"):
        there + own
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert torch.equal(here(there + torch.ones(())), torch.tensor([2.0, 2.0]))


# The real stream's order of work, on streams that only note what they are asked for.


def test_a_lane_waits_for_the_main_stream_before_it_writes_and_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New buffers are filled on the main stream: rows written before that would be overwritten with zeros."""
    log: list[str] = []

    class Stream:
        def __init__(self, device: Any) -> None: ...

        def wait_stream(self, other: Any) -> None:
            log.append("stream waits for main" if other == "main" else "main waits for stream")

        def synchronize(self) -> None:
            log.append("host waits")

    class Main:
        def __eq__(self, other: object) -> bool:
            return other == "main"

        def wait_stream(self, other: Any) -> None:
            log.append("main waits for stream")

    class Buffer:
        def copy_(self, value: Any, non_blocking: bool) -> None:
            log.append(f"copy {value} {non_blocking}")

    class Value:
        def pin_memory(self) -> str:
            return "from page-locked memory"

    current: list[Any] = ["main"]

    class On:
        def __init__(self, stream: Any) -> None:
            self.stream, self.before = stream, current[0]

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    class Capture(On):
        """As PyTorch's: where ending the capture fails, the stream is not put back."""

        def __init__(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> None:
            super().__init__(stream)

        def __exit__(self, kind: Any, *error: object) -> None:
            if kind is None:
                super().__exit__()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Main())
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: log.append("replay")))
    stream = CudaStream(torch.device("cuda", 0))
    stream.put(Buffer(), Value())  # type: ignore[arg-type]
    assert log == ["stream waits for main", "copy from page-locked memory True"]
    log.clear()
    replay, found = stream.record(lambda: log.append("step") or "outcome")
    assert found == "outcome" and log == ["stream waits for main", "step", "host waits", "step"]
    log.clear()
    stream.start(replay)
    stream.finish()
    assert log == ["stream waits for main", "replay", "main waits for stream"] and current == ["main"]
    calls = 0

    def fails_at_recording() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        stream.record(fails_at_recording)
    assert current == ["main"]


@pytest.mark.parametrize("start", ["legacy", "matmul", "conv", "high", "nothing"])
def test_exact_products_whatever_was_set_before_and_everything_put_back(start: str) -> None:
    backends: Any = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    origin = [part.fp32_precision for part in parts]
    set_up = {
        "legacy": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
        "matmul": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
        "conv": lambda: setattr(backends.cudnn.conv, "fp32_precision", "tf32"),
        "high": lambda: torch.set_float32_matmul_precision("high"),
        "nothing": lambda: None,
    }
    precision = torch.get_float32_matmul_precision()
    try:
        set_up[start]()
        before = [part.fp32_precision for part in parts], backends.cudnn.deterministic
        with device.exact(torch.device("cuda", 0)):
            assert [part.fp32_precision for part in parts] == ["ieee"] * 3 and backends.cudnn.deterministic
            assert torch.are_deterministic_algorithms_enabled() and not backends.cuda.flash_sdp_enabled()
        assert ([part.fp32_precision for part in parts], backends.cudnn.deterministic) == before
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(precision)
        for part, value in zip(parts, origin):
            part.fp32_precision = value


# Which device and which way.


def test_a_gpu_that_is_not_there_is_one_line() -> None:
    for name in "cuda", "cuda:1":
        with pytest.raises(InputError, match=rf"engine\.device: found {name}, but .*; allowed: cpu or auto\."):
            trained("dp-fedavg", device=name)
    with pytest.raises(InputError, match=r"engine\.device: found gpu; allowed: auto, cpu, cuda or one of"):
        trained("dp-fedavg", device="gpu")
    with pytest.raises(InputError, match=r"engine\.backend: found graphs on cpu; allowed: auto, sequential, vector"):
        trained("dp-fedavg", backend="graphs")


def test_bad_combinations_are_one_line(gpu: None) -> None:
    with pytest.raises(InputError, match=r"engine\.device: found cuda:3; allowed: cuda:0 to cuda:0"):
        trained("dp-fedavg", device="cuda:3")
    with pytest.raises(InputError, match=r"engine\.device: found cuda with engine\.backend workers; allowed: cpu"):
        trained("dp-fedavg", device="cuda", backend="workers")
    with pytest.raises(InputError, match=r"engine\.compile: found true with engine\.backend vectorized"):
        trained("dp-fedavg", device="cuda", backend="vectorized", compile=True)


def test_auto_leaves_processes_on_the_processor(gpu: None) -> None:
    job = prepare(Recipe.of(recipe("dp-fedavg", backend="workers", processes=1)), module(), clients())
    assert job.problem.device.type == "cpu" and job.data.inputs.device.type == "cpu"


def test_a_gpu_that_computes_something_else_is_not_used(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = device.ModuleProblem.gradient

    def wrong_there(self: Any, weights: Tensor, part: Any, batch: Any) -> Any:
        found = honest(self, weights, part, batch)
        return found if weights.device.type == "cpu" else dataclasses.replace(found, vector=found.vector * 1.1)

    expected = trained("dp-fedavg", backend="sequential", device="cpu")
    monkeypatch.setattr(device.ModuleProblem, "gradient", wrong_there)
    with pytest.raises(InputError, match=r"cuda, where a gradient is 10\.0% away from the processor's; allowed: cpu"):
        trained("dp-fedavg", device="cuda")
    with pytest.warns(UserWarning, match="engine.device: going on with the processor, for on cuda:0 a gradient is"):
        found = trained("dp-fedavg", backend="sequential", device="auto")
    assert torch.equal(found, expected)


def test_a_gpu_that_fails_is_not_used(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = device.ModuleProblem.gradient

    def fails_there(self: Any, weights: Tensor, part: Any, batch: Any) -> Any:
        if weights.device.type != "cpu":
            raise RuntimeError("CUDA error: no kernel image is available\nmore lines")
        return honest(self, weights, part, batch)

    monkeypatch.setattr(device.ModuleProblem, "gradient", fails_there)
    with pytest.raises(InputError, match=r"where training fails: CUDA error: no kernel image is available; allow"):
        trained("dp-fedavg", device="cuda")


def test_the_trial_believes_no_sum_that_is_not_the_processors(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs nothing is taken, unless its sum is another one; recorded graphs are not even tried."""
    monkeypatch.setattr(
        choose, "seconds_per_client", lambda backend, *rest: 0.01 if backend.name == "sequential" else 0
    )
    tried: list[str] = []
    honest = choose._Makers.make

    def make(self: Any, name: str, *args: Any, **changes: Any) -> Any:
        tried.append(name)
        return honest(self, name, *args, **changes)

    monkeypatch.setattr(choose._Makers, "make", make)

    def chosen() -> str:
        return prepare(Recipe.of(recipe("dp-fedavg", device="cuda")), module(), clients()).backend.name

    assert chosen() in ("vectorized", "lowrank") and "graphs" not in tried
    monkeypatch.setattr(choose, "remembered", lambda key: None)
    train_block = choose.Vectorized.train

    def twice(self: Any, *args: Any) -> None:
        train_block(self, *args)
        train_block(self, *args)

    monkeypatch.setattr(choose.Vectorized, "train", twice)
    assert chosen() == "sequential"
    monkeypatch.setattr(choose.Vectorized, "train", lambda self, *args: 1 / 0)
    assert chosen() == "sequential"


def test_recorded_graphs_say_that_they_are_experimental(gpu: None) -> None:
    with pytest.warns(UserWarning, match="graphs is experimental: never run on a real GPU by us"):
        _backend()


def test_compiled_models_agree_on_the_processor() -> None:
    """The real compiler where it is there: the same numbers up to rounding."""
    expected = trained("dp-fedsam", backend="sequential", device="cpu")
    try:
        found = trained("dp-fedsam", compile=True, device="cpu")
    except RunError as error:  # no C++ compiler on this machine
        pytest.skip(str(error)[:200])
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_run_of_the_engine_by_hand_takes_a_job_on_a_gpu(gpu: None) -> None:
    backend, job = _backend(processes=2)
    outcome = train(job)
    assert outcome.complete and outcome.state.shared.device.type == "cpu" and len(backend._tracks) == 2


def test_a_gpu_that_was_not_asked_for_and_fails_later_is_left(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained("dp-fedavg", backend="sequential", device="cpu")

    def full(data: Any, where: torch.device) -> Any:
        if where.type != "cpu":
            raise RunError("engine.device: 99.0 GiB of data do not go on cuda:0: CUDA out of memory")
        return data

    monkeypatch.setattr("fedflat.assembly.jobs.placed", full)
    with pytest.warns(UserWarning, match="going on with the processor: engine.device: 99.0 GiB of data do not go"):
        assert torch.equal(trained("dp-fedavg", backend="sequential"), expected)
    with pytest.raises(RunError, match=r"99\.0 GiB"):
        trained("dp-fedavg", device="cuda")


def test_a_resumed_run_stays_on_its_device_unless_another_is_asked_for(gpu: None, tmp_path: Path) -> None:
    started = fedflat.run(recipe("dp-fedavg", device="cpu"), model=module(), clients=clients(), out=tmp_path / "run")
    assert started.folder is not None

    def engine(**asked: Any) -> Any:
        return simulation._on_the_same_engine(Recipe.of(recipe("dp-fedavg", **asked)), tmp_path / "run").engine

    assert (
        engine().device == "cpu" and engine().backend == started.recipe.engine.backend
    ) or engine().backend != "auto"
    assert engine(backend="sequential").device == "cpu"
    assert engine(device="cuda").device == "cuda" and engine(device="cuda").backend == "auto"


def test_runs_that_may_take_the_gpu_follow_each_other(gpu: None) -> None:
    def settings(**engine: Any) -> list[Any]:
        return [types.SimpleNamespace(recipe=Recipe.of(recipe("dp-fedavg", **engine)))]

    assert experiment._at_a_time(settings(), 8) == 1
    assert experiment._at_a_time(settings(device="cpu"), 8) == 8
    assert experiment._at_a_time(settings(backend="workers"), 8) == 8
