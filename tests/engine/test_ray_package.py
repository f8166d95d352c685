"""What travels to Ray's workers, and which session they belong to; no Ray is started here."""

import pickle
import signal
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import pairs
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.backends import ray as ours
from fedflat.backends.in_process import Sequential
from fedflat.backends.ray import in_place, packed
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.params import layout_of
from fedflat.core.types import Broadcast
from fedflat.engine.problem import ModuleProblem

SIZES = (5, 0, 8, 1)
ON_RAY = {
    "rounds": 1, "algorithm": "fedavg", "local": {"steps": 1, "batch_size": 2}, "cohort": {"size": 2},
    "engine": {"backend": "ray"},
}  # fmt: skip


def inner(network: nn.Module, shape: tuple[int, ...] = (6,), held_back: float = 0.0) -> Sequential:
    recipe = {
        "rounds": 1, "data": {"client_test_fraction": held_back}, "algorithm": "fedavg",
        "local": {"steps": 3, "batch_size": 2}, "cohort": {"size": 2}, "engine": {"backend": "sequential"},
    }  # fmt: skip
    test = (torch.full((3, *shape), 77.0), torch.zeros(3, dtype=torch.int64))
    backend = prepare(Recipe.of(recipe), network, pairs(SIZES, shape, seed=3), test).backend
    assert isinstance(backend, Sequential)
    return backend


def arrived(sent: Any) -> Any:
    """What another process makes of something sent."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    return cloudpickle.loads(cloudpickle.dumps(sent))


def trained(run: Sequential, client: int, size: int) -> Tensor:
    start = torch.linspace(-0.5, 0.5, size)
    return run.one(client, Broadcast(0, start.clone(), 1.0, 1.0), start.clone()).message


@pytest.fixture(autouse=True)
def _ray_is_there() -> None:
    pytest.importorskip("ray")


@pytest.mark.parametrize("held_back", [0.0, 0.4])
def test_an_opened_package_trains_bit_for_bit_as_the_original(held_back: float) -> None:
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    for network, shape in (nn.Linear(6, 3), (6,)), (convolution, (2, 6, 6)):
        run = inner(network, shape, held_back)
        opened, size = arrived(packed(run)), run.problem.layout.size
        assert opened.data.inputs[:1].stride() == run.data.inputs[:1].stride()
        for client in (0, 2, 3):
            assert torch.equal(trained(opened, client, size), trained(run, client, size))


def test_no_test_data_and_no_held_back_examples_travel() -> None:
    run = inner(nn.Linear(6, 3), held_back=0.4)
    assert run.data.test_inputs is not None and any(map(len, run.data.held_back))
    opened = arrived(packed(run)).data
    kept = {row.tobytes() for row in opened.inputs.numpy()}
    trained_on = {run.data.inputs[i].numpy().tobytes() for part in run.data.parts for i in part}
    assert kept == trained_on and len(opened.inputs) == sum(map(len, run.data.parts)) == len(opened.targets)
    assert opened.test_inputs is None and opened.test_targets is None and not any(map(len, opened.held_back))
    assert b"secret" not in pickle.dumps(packed(replace(run, data=replace(run.data, names=("secret",) * 4))))


def test_large_things_travel_as_arrays_and_are_read_where_they_lie() -> None:
    network = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 40), nn.Linear(40, 3))
    network[0].requires_grad_(False)
    network[1].bfloat16().requires_grad_(False)  # no array has such entries
    network[2].register_buffer("count", torch.zeros(3))
    run = inner(nn.Linear(6, 3))
    run = replace(run, problem=ModuleProblem(network, layout_of(network)))
    run.problem.bind(torch.arange(1_000_123.0)[:123])  # of a vector's memory, only what the module has
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(packed(run), protocol=5, buffer_callback=buffers.append)
    assert len(sent) < 12_000 and sum(len(buffer.raw()) for buffer in buffers) < 4_000
    arrays = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    opened = pickle.loads(sent, buffers=arrays)
    for there, here in zip(opened.problem.module.parameters(), network.parameters(), strict=True):
        assert torch.equal(there, here) and there.requires_grad == here.requires_grad
    starts = [np.frombuffer(array, np.uint8).ctypes.data for array in arrays]
    assert opened.data.targets.data_ptr() in starts and opened.problem.module[0].weight.data_ptr() in starts
    opened.problem.module[2].count += 1  # buffers may be written to


@pytest.mark.parametrize("where, name, new", [(torch, "__version__", "0.0"), (ours, "processor", lambda: "0.0")])
def test_other_versions_and_processors_are_refused(monkeypatch: Any, where: Any, name: str, new: Any) -> None:
    told = ours.versions()
    monkeypatch.setattr(where, name, new)
    with pytest.raises(RunError, match=r"^a machine of the Ray cluster has .* 0\.0.* the driver fedflat .*, torch"):
        ours._unpacked(told, None)


def test_what_arrives_in_place() -> None:
    assert [len(part) for part in arrived(packed(inner(nn.Linear(6, 3)))).data.parts] == list(SIZES)
    for value in (
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.arange(6.0).view(2, 3).T,
        torch.ones(2).bfloat16(),
    ):
        found = arrived(in_place(value))
        assert torch.equal(found, value) and found.dtype == value.dtype
    found = arrived(in_place(Broadcast(3, torch.ones(2), 0.5, 1.0, {"a": torch.zeros(2)})))
    assert torch.equal(found.shared, torch.ones(2)) and torch.equal(found.vectors["a"], torch.zeros(2))
    assert (found.round, found.clip, found.mask) == (3, 0.5, None)


class FakeRay:
    """A Ray that only remembers what it was asked."""

    def __init__(self, error: Exception | None = None, opened: bool = False) -> None:
        self.error, self.opened, self.asked, self.count = error, opened, [], 0

    def is_initialized(self) -> bool:
        return self.opened

    def init(self, **given: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does
        self.asked.append(given)
        if self.error:
            raise self.error
        self.opened, self.count = True, self.count + 1

    def get_runtime_context(self) -> "FakeRay":
        return self

    def get_node_id(self) -> str:
        return f"node {self.count}"

    def get_job_id(self) -> str:
        return "1"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


def test_a_local_session_is_started_once(fake: FakeRay) -> None:
    before = signal.getsignal(signal.SIGTERM)
    names = [ours.connect(processes) for processes in (2, 2, 3)]
    assert len({*names}) == 1
    assert [(g["address"], g["num_cpus"], g["include_dashboard"]) for g in fake.asked] == [("local", 2, False)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_session_the_caller_opened_is_used_as_it_is(fake: FakeRay) -> None:
    fake.opened = True
    assert ours.connect(2) == ours.connect(5) and fake.asked == []


def test_a_cluster_is_joined_where_the_address_says(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    ours.connect(2)
    assert fake.asked[0]["address"] == "192.0.2.1:6379" and "num_cpus" not in fake.asked[0]
    assert ours.connect(5) and len(fake.asked) == 1


def test_no_cluster_and_no_package_are_said_in_one_line(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    fake.error = ConnectionError("Could not\nfind any running Ray instance")
    with pytest.raises(
        RunError,
        match=r"^engine\.backend=ray: RAY_ADDRESS=192\.0\.2\.1:6379 \(RAY_AUTH_MODE=.*\) could not .*Could not find",
    ):
        ours.connect(2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^engine\.backend: found ray, which is not installed; .* '.*\[scale\]'\.$"):
        prepare(Recipe.of(ON_RAY), nn.Linear(6, 3), pairs(SIZES))


def test_a_model_of_the_users_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Script(nn.Linear):
        pass

    Script.__module__ = "__main__"
    with pytest.raises(InputError, match=r"engine\.backend: found ray with a model that cannot be sent"):
        prepare(Recipe.of(ON_RAY), Script(6, 3), pairs(SIZES))


def test_a_task_answers_with_arrays_or_with_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here = inner(nn.Linear(6, 3))
    monkeypatch.setattr(ours, "_unpacked", lambda *run: arrived(packed(run_here)))
    weights = torch.linspace(-0.5, 0.5, run_here.problem.layout.size)
    told = Broadcast(0, weights, 1.0, 1.0, vectors={"more": weights.clone()})
    own: tuple[Tensor, dict[str, Tensor]] = (torch.zeros(0), {})
    found = arrived(ours.train_block([None], told, [0, 2], [own, own]))
    for client, each in zip((0, 2), found, strict=True):
        assert torch.equal(each.message, trained(run_here, client, run_here.problem.layout.size))

    def fails(error: Exception) -> Any:
        def one(*args: Any) -> Any:
            raise error

        monkeypatch.setattr(Sequential, "one", one)
        found = ours.train_block([None], told, [2], [own])
        return type(found), str(found)

    assert fails(InputError("model: no")) == (InputError, "model: no")
    assert fails(RunError("round 0: no")) == (RunError, "Ray task: round 0: no")
    kind, text = fails(KeyError("odd"))
    assert kind is RunError and text.startswith("Ray task: Traceback") and "KeyError: 'odd'" in text
