"""What travels to Ray's workers, and which session they belong to; no Ray is started here."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.backends.ray import session as ray_session
from fedflat.backends.ray import tasks as ray_tasks
from fedflat.backends.ray.package import array_of, packed, view_of
from fedflat.backends.sequential import Sequential
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.types import Broadcast

SIZES = (5, 0, 8, 1)


def pairs(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(3)
    return [
        (torch.tensor(rng.normal(size=(n, *shape)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, n)))
        for n in SIZES
    ]


def inner(network: nn.Module, shape: tuple[int, ...] = (6,), held_back: float = 0.0) -> Sequential:
    recipe = {
        "rounds": 1,
        "data": {"client_test_fraction": held_back},
        "algorithm": "fedavg",
        "local": {"steps": 3, "batch_size": 2},
        "cohort": {"size": 2},
        "engine": {"backend": "sequential"},
    }
    test = (torch.full((3, *shape), 77.0), torch.zeros(3, dtype=torch.int64))
    backend = prepare(Recipe.of(recipe), network, pairs(shape), test).backend
    assert isinstance(backend, Sequential)
    return backend


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
        opened, size = packed(run).open(), run.problem.layout.size
        assert opened.data.inputs[:1].stride() == run.data.inputs[:1].stride()
        for client in (0, 2, 3):
            assert torch.equal(trained(opened, client, size), trained(run, client, size))


def test_no_test_data_and_no_held_back_examples_travel() -> None:
    run = inner(nn.Linear(6, 3), held_back=0.4)
    assert run.data.test_inputs is not None and any(map(len, run.data.held_back))
    package = packed(run)
    kept = {row.tobytes() for row in package.arrays["inputs"]}
    trained_on = {run.data.inputs[i].numpy().tobytes() for part in run.data.parts for i in part}
    assert kept == trained_on and len(package.arrays["inputs"]) == sum(map(len, run.data.parts))
    opened = package.open().data
    assert opened.test_inputs is None and opened.test_targets is None and opened.held_back == ()


def test_parameters_travel_as_arrays_or_not_at_all() -> None:
    network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    network[0].requires_grad_(False)
    network[1].double().requires_grad_(False)  # a frozen layer of another kind stays in the module
    run = inner(nn.Linear(6, 3))
    from fedflat.core.params import layout_of
    from fedflat.engine.problem import ModuleProblem

    run = replace(run, problem=ModuleProblem(network, layout_of(network)))
    package = packed(run)
    assert [p.numel() for p in package.problem.args[0].parameters()] == [0, 0, 20, 4, 0, 0]
    assert sorted(package.frozen) == ["0.bias", "0.weight"]
    opened = package.open().problem.module
    assert torch.equal(opened[0].weight, network[0].weight) and torch.equal(opened[1].bias, network[1].bias)


def test_other_versions_are_refused() -> None:
    package = packed(inner(nn.Linear(6, 3)))
    with pytest.raises(RunError, match=r"^a machine of the Ray cluster has .* the driver fedflat .*, torch 0\.0"):
        replace(package, versions=package.versions | {"torch": "0.0"}).open()


def test_arrays() -> None:
    assert [len(part) for part in packed(inner(nn.Linear(6, 3))).open().data.parts] == list(SIZES)
    for value in torch.tensor(2.5), torch.tensor([True, False]), torch.arange(6.0).view(2, 3).T:
        assert torch.equal(view_of(array_of(value)), value)
    assert array_of(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    assert view_of(array_of({"a": torch.ones(2), "b": 3}))["b"] == 3
    assert array_of(None) is None and array_of(3) == 3


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

    def shutdown(self) -> None:
        self.opened = False

    def get_runtime_context(self) -> FakeRay:
        return self

    def get_node_id(self) -> str:
        return f"node {self.count}"

    def get_job_id(self) -> str:
        return "1"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = FakeRay()
    monkeypatch.setattr(ray_session, "_imported", lambda: found)
    monkeypatch.setattr(ray_session, "_STARTED", {})
    return found


def test_a_local_session_is_started_once_and_again_for_another_number(fake: FakeRay) -> None:
    before = signal.getsignal(signal.SIGTERM)
    names = [ray_session.connect(processes) for processes in (2, 2, 3)]
    assert names[0] == names[1] != names[2]
    assert [(g["address"], g["num_cpus"], g["include_dashboard"]) for g in fake.asked] == [
        ("local", 2, False),
        ("local", 3, False),
    ]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_session_the_caller_opened_is_used_as_it_is(fake: FakeRay) -> None:
    fake.opened = True
    assert ray_session.connect(2) == ray_session.connect(5) and fake.asked == []


def test_a_cluster_is_joined_where_the_address_says(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    ray_session.connect(2)
    assert fake.asked[0]["address"] == "192.0.2.1:6379" and "num_cpus" not in fake.asked[0]
    assert ray_session.connect(5) and len(fake.asked) == 1


def test_no_cluster_and_no_package_are_said_in_one_line(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    fake.error = ConnectionError("Could not\nfind any running Ray instance")
    with pytest.raises(
        RunError,
        match=r"^engine\.backend=ray: RAY_ADDRESS=192\.0\.2\.1:6379 \(RAY_AUTH_MODE=.*\) could not .*Could not find",
    ):
        ray_session.connect(2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^engine\.backend: found ray, which is not installed; .* '.*\[scale\]'\.$"):
        ray_session.require_ray()


def test_a_model_of_the_users_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Script(nn.Linear):
        pass

    Script.__module__ = "__main__"
    recipe = {"rounds": 1, "algorithm": "fedavg", "cohort": {"size": 2}, "engine": {"backend": "ray"}}
    recipe["local"] = {"steps": 1, "batch_size": 2}
    with pytest.raises(InputError, match=r"engine\.backend: found ray with a model that cannot be sent"):
        prepare(Recipe.of(recipe), Script(6, 3), pairs((6,)))


def test_a_task_answers_with_arrays_or_with_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = inner(nn.Linear(6, 3))
    monkeypatch.setattr(ray_tasks, "_unpacked", lambda reference: packed(run).open())
    weights = torch.linspace(-0.5, 0.5, run.problem.layout.size)
    told = array_of(vars(Broadcast(0, weights, 1.0, 1.0, vectors={"more": weights.clone()})))
    own = {"": np.zeros(0, np.float32)}
    found = ray_tasks.train_block([None], told, [0, 2], [dict(own), dict(own)])
    assert isinstance(found, list) and all(isinstance(value, np.ndarray) for each in found for value in each.values())
    for client, each in zip((0, 2), found):
        assert torch.equal(view_of(each)["message"], trained(run, client, run.problem.layout.size))

    def fails(error: Exception) -> Any:
        def one(*args: Any) -> Any:
            raise error

        monkeypatch.setattr(Sequential, "one", one)
        return ray_tasks.train_block([None], told, [2], [dict(own)])

    assert fails(InputError("model: no")) == (InputError, "model: no")
    assert fails(RunError("round 0: no")) == (RunError, "Ray task, client 2: round 0: no")
    kind, text = fails(KeyError("odd"))
    assert kind is RunError and text.startswith("Ray task, client 2: Traceback") and "KeyError: 'odd'" in text
