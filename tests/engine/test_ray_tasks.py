"""Cohort blocks as Ray tasks: the sequential back end's numbers, whatever the blocks, workers, faults and retries."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import filled, module, pairs, recipe, weights
from torch import Tensor, nn

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.backends import ray as ray_tasks
from fedflat.backends.ray import IN_FLIGHT, RayTasks
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.types import Algorithm, Phase

pytestmark = [pytest.mark.usefixtures("noise_of_the_seed"), pytest.mark.long]

ray = pytest.importorskip("ray")

METHODS = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]
SIZES = (7, 3, 0, 12, 1, 5, 12, 4, 9)
RAY = {"backend": "ray", "processes": 2}
clients = partial(pairs, SIZES)


@pytest.fixture(scope="module", autouse=True)
def _one_session() -> Iterator[None]:
    """Two workers for all tests here; what these tests define is sent along, for workers cannot import tests."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def untimed(result: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in result.private_history]


def same(found: Any, expected: Any) -> None:
    """Weights, what is private to the simulation, and heads: bit for bit."""
    assert torch.equal(weights(found.model), weights(expected.model))
    assert untimed(found) == untimed(expected)
    assert sorted(found.heads) == sorted(expected.heads)
    assert all(torch.equal(found.heads[i], head) for i, head in expected.heads.items())


def both(
    engine: dict[str, Any] = RAY, network: Any = module, method: str = "dp-fedavg", **given: Any
) -> tuple[Any, Any]:
    """A run on Ray and one on the sequential back end."""
    changes = given.pop("changes", {})
    given = {"clients": clients(), **given}
    return tuple(  # type: ignore[return-value]
        fedflat.run(recipe(method, e, **changes), model=network(), **given) for e in (engine, {"backend": "sequential"})
    )


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_ray_is_the_sequential_back_end_bit_for_bit_for_every_method(method: str) -> None:
    same(*both(method=method))


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_the_block_size_changes_nothing(block: int) -> None:
    same(*both(RAY | {"block": block}, method="dp2-fedsam"))


def test_every_client_in_every_round_and_an_empty_cohort() -> None:
    same(*both(changes={"cohort": {"size": len(SIZES)}}))
    found, expected = both(changes={"cohort": {"size": 1e-9}})
    assert expected.private_history[0]["cohort"] == 0
    same(found, expected)


def images() -> nn.Module:
    return filled(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)))


def test_images_stay_channels_last() -> None:
    same(*both(network=images, clients=clients((2, 6, 6))))


class Layered(nn.Module):
    """A frozen layer, dropout, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.drop = nn.Linear(6, 5), nn.Linear(5, 3), nn.Dropout(0.3)
        self.register_buffer("factor", torch.full((1,), 1.5))
        self.below.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.drop(torch.tanh(self.below(x)))) * self.factor


def test_frozen_layers_dropout_and_buffers() -> None:
    same(*both(network=lambda: filled(Layered())))


def test_a_users_own_rule_and_odd_messages() -> None:
    """Lambdas travel; what is no number counts as zero, as everywhere, and a wrong length is refused by name.

    The trial of pieces has blocks of two and the run's own three steps: it refuses before anybody trains.
    """
    sign = Phase(rule=lambda gradient, view: lambda w: torch.sign(gradient(w)))
    for transform in (
        lambda update, view: update.bfloat16() if view.steps == 3 else update,
        lambda update, view: update * float("nan"),
    ):
        same(*both(algorithm=Algorithm("own", phases=(sign,), transforms=(transform,))))
    short = Algorithm("own", phases=(sign,), transforms=(lambda u, view: u[..., :-1] if view.steps == 3 else u,))
    for engine in (RAY, {"backend": "sequential"}):
        with pytest.raises(InputError, match=r"^algorithm\.transforms\[0\].*52,?\) returned for \(.*53,?\)"):
            both(engine, algorithm=short)


def test_the_comparison_would_notice_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: blocks are taken back in another order than clients."""
    in_order = RayTasks.blocks
    monkeypatch.setattr(RayTasks, "blocks", lambda self, *given: in_order(self, *given)[::-1])
    with pytest.raises(AssertionError):
        same(*both(RAY | {"block": 1}))


# --- runs from the outside --------------------------------------------------------------------------------------------


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = fedflat.run(recipe("dp2-fedsam", RAY, rounds=4), model=module(), clients=clients())
    stop = iter([False, False, True])
    for resume, asked in (False, lambda: next(stop)), (True, None):
        found = fedflat.run(
            recipe("dp2-fedsam", RAY, rounds=4), model=module(), clients=clients(), out=tmp_path / "run", resume=resume,
            should_stop=asked,
        )  # fmt: skip
    assert torch.equal(weights(found.model), weights(whole.model)) and len(found.history) == 4
    stored = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert stored["engine"]["backend"] == "ray" and stored["engine"]["block"] is None


def test_the_command_line_runs_on_ray(tmp_path: Path, command: Any) -> None:
    options = ["rounds=1", "data.clients=10", "cohort.size=4", "local.steps=1"]
    models = []
    for backend, processes in ("ray", 2), ("sequential", 1):  # one thread each: two may round otherwise
        own = [*options, f"engine.backend={backend}", f"engine.processes={processes}"]
        assert command("run", "quick-start", *[word for o in own for word in ("-o", o)], "--out", backend).status == 0
        models.append(load_file(sorted((tmp_path / backend / "checkpoints").glob("*.safetensors"))[-1]))
    assert models[0].keys() == models[1].keys() and len(models[0]["shared"])
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


class Rude(nn.Linear):
    """Leaves a word where nobody looks, and stops when another run's is there."""

    def forward(self, input: Tensor) -> Tensor:
        if os.getpid() != DRIVER and os.environ.setdefault("LEFT", str(self.word)) != str(self.word):
            raise ValueError("another run was here")
        return super().forward(input)


DRIVER = os.getpid()


@pytest.mark.parametrize("watched", [True, False])
def test_a_users_code_meets_nothing_that_another_run_left(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its twin shares the processes."""
    if not watched:
        monkeypatch.setattr(ray_tasks, "own_code", lambda root: False)
    for word in range(2):
        network = filled(Rude(6, 3))
        network.word = word  # type: ignore[assignment]
        with pytest.raises(RunError, match="another run") if word and not watched else nullcontext():
            fedflat.run(recipe("dp-fedavg", RAY), model=network, clients=clients())


# --- memory, faults ---------------------------------------------------------------------------------------------------


def test_few_blocks_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    flying, real_fetch = [], RayTasks._fetch

    def fetch(self: Any, pending: Any, round: int) -> Any:
        flying.append(len(pending))
        return real_fetch(self, pending, round)

    monkeypatch.setattr(RayTasks, "_fetch", fetch)
    both(RAY | {"block": 1}, changes={"cohort": {"size": len(SIZES)}})
    assert max(flying) == IN_FLIGHT * 2 < len(SIZES) - 1 and flying[-1] == 1


def test_blocks_fit_the_cohort_the_workers_and_the_model() -> None:
    inner = prepare(Recipe.of(recipe("dp-fedavg", {"backend": "sequential"})), module(), clients()).backend
    tasks = RayTasks(inner, 2)  # type: ignore[arg-type]
    many = list(range(1000))
    assert [client for block in tasks.blocks(many, 2) for client in block] == many
    assert {len(b) for b in tasks.blocks(many, 2)[:-1]} == {64}
    assert {len(b) for b in tasks.blocks(many, 100)[:-1]} == {3}
    assert tasks.blocks([4], 100) == [[4]] and tasks.blocks([], 3) == []
    assert len(RayTasks(inner, 2, block=7).blocks(many, 100)[0]) == 7  # type: ignore[arg-type]


KILLED = """
import os, signal
from pathlib import Path
import torch
from torch import nn

DRIVER, MARK, EVERY = {driver}, Path({mark!r}), {every}


class Killed(nn.Sequential):
    def forward(self, x):
        if os.getpid() != DRIVER:
            try:
                MARK.touch(exist_ok=EVERY)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().forward(x.flatten(1))


def model():
    network = Killed(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return network
"""


def killing(folder: Path, every: bool) -> dict[str, Any]:
    """A recipe whose model, in the user's own file, kills the worker that trains it: the first one, or every one."""
    file = folder / f"killing_{every}.py".lower()
    file.write_text(KILLED.format(driver=os.getpid(), mark=str(folder / "killed"), every=every))
    changes = {"data": {"dataset": "digits", "clients": 6}, "cohort": {"size": 6, "sampling": "full"}}
    changes |= {"model": {"name": f"{file}:model"}, "privacy": {"clip": 0.2, "noise_multiplier": 0}}
    return recipe("dp-fedavg", RAY | {"block": 2}, **changes)


def test_a_worker_killed_in_the_middle_of_a_task_changes_nothing(tmp_path: Path) -> None:
    given = killing(tmp_path, every=False)
    found = fedflat.run(given)
    assert (tmp_path / "killed").exists()
    same(found, fedflat.run(given | {"engine": {"backend": "sequential"}}))


def test_a_task_that_always_loses_its_worker_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks, "RETRIES", 1)  # each one waits for a fresh process
    with pytest.raises(RunError, match=r"^round 0, clients \d to \d: a Ray task was lost, 1 retries included; [^\n]*$"):
        fedflat.run(killing(tmp_path, every=True))


ONE_EXAMPLE = clients()[4][0]


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.equal(x, ONE_EXAMPLE):
            raise KeyError("sizes do not fit")
        return super().forward(x)


def test_what_a_model_raises_names_the_client() -> None:
    everybody = {"cohort": {"size": len(SIZES)}}
    with pytest.raises(RunError, match=r"^Ray task: round 0, client 4, local training: 'sizes do not fit'$"):
        both(network=lambda: Fails(6, 3), changes=everybody)
    same(*both())  # the session is as good as before


def test_a_method_that_cannot_be_sent_is_refused_with_one_line() -> None:
    lock = threading.Lock()
    own = Algorithm("own", transforms=(lambda update, view: update * bool(lock),))
    with pytest.raises(InputError, match=r"^engine\.backend: found ray with a model or method that [^\n]*$"):
        both(algorithm=own)


def test_another_number_of_workers_gives_the_same_numbers() -> None:
    """The last here with a session: it closes that of two workers for one of one."""
    found, expected = both(method="dp-fedsam")
    same(found, expected)
    one, _ = both({"backend": "ray", "processes": 1, "block": 2}, method="dp-fedsam")
    same(one, expected)


CLUSTER = """
import os, sys
from pathlib import Path
import ray, torch
from ray.cluster_utils import Cluster
import fedflat
from fedflat.assembly import records

records.engine_facts = lambda recipe, problem, backend: ""  # one noise key for both engines
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
found = []
for backend in "ray", "sequential":
    result = fedflat.run({
        "rounds": 3,
        "data": {"dataset": "digits", "clients": 12},
        "model": "mlp",
        "algorithm": "dp-fedsam",
        "local": {"steps": 2, "batch_size": 8},
        "cohort": {"size": 8},
        "privacy": {"clip": 0.2, "noise_multiplier": 1.0, "randomness": "seeded"},
        "engine": {"backend": backend, "block": 1, "processes": 1},
    })
    found.append(torch.cat([p.detach().reshape(-1) for p in result.model.parameters()]))
nodes = sum(node["Alive"] for node in ray.nodes())
print("same" if torch.equal(*found) else "other", nodes, flush=True)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_of_two_nodes(tmp_path: Path) -> None:
    """Two nodes with an object store each, on this machine: data and broadcast travel, messages come back.

    In a process of its own: Ray ends a driver whose cluster goes away.
    """
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    environment = {**os.environ, "PYTHONPATH": str(Path(fedflat.__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.split()[-2:] == ["same", "2"], done.stderr[-2000:]
