"""Contracts 2 and 6 across processes: worker processes and Ray tasks are the sequential back end, bit for bit.

One module, so that all of it is done by one process with one Ray session and one fork server.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from small_federation import Meeting, Sharing, clients, recipe, weights
from test_contract_engines import run
from test_contract_state import KEEPING, made, same
from test_contract_strangers import same_but_for_the_watched, strangers
from test_contract_text import messages as text_messages
from test_contract_worlds import SHORT, stage, too_far
from torch import nn

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.audit.worlds import Engine
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.engine.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers", "noise_of_any_engine")]
BOTH = pytest.mark.parametrize("backend", ["workers", pytest.param("ray", marks=pytest.mark.long)])


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "ray" in request.node.name:
        pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def _one_session() -> Iterator[None]:
    yield
    try:
        import ray
    except ImportError:
        return
    ray.shutdown()  # a process that forks later must have none


@BOTH
def test_a_hostile_client_moves_a_release_by_c_at_most(backend: str) -> None:
    assert too_far(stage("dp-fedsam", "linear 12"), Engine(backend, {"processes": 2}), SHORT[1:2]) == []


@BOTH
def test_nobodys_message_depends_on_another_clients_data(backend: str) -> None:
    kinds = ("dense",) if backend == "ray" else ("dense", "dropout")  # Ray's workers cannot import a test's class
    for kind in kinds:
        strangers(kind, "dp-fedsam", backend=backend, processes=2)


def test_writers_of_text_are_strangers() -> None:
    engines = {"present": {"backend": "sequential"}, "largest id": {"backend": "workers", "processes": 2}}
    same_but_for_the_watched(lambda world: text_messages("bow-linear", world, engines[world]), ["largest id"])


@pytest.mark.parametrize("kind", [Meeting, Sharing])
def test_what_a_hostile_client_writes_into_a_buffer_stays_with_it(kind: type[Meeting], tmp_path: Path) -> None:
    """Ray's workers each unpack a copy of their own, and cannot import a test's class."""
    data = [(x * 1e20 if i % 2 else x, y) for i, (x, y) in enumerate(clients(sizes=(4, 4)))]

    def released(backend: str) -> torch.Tensor:
        changes = {"engine": {"backend": backend, "processes": 2}, "privacy": {"noise_multiplier": 0.0}}
        given = recipe("dp-fedavg", changes | {"cohort": {"size": 2}, "rounds": 1})
        return weights(fedflat.run(given, model=kind(tmp_path), clients=data).model)

    alone = released("sequential")
    if kind is Meeting:
        assert torch.equal(released("workers"), alone)
    else:
        with pytest.raises((InputError, AssertionError)):  # mostly the watch on state sees it
            assert torch.equal(released("workers"), alone)


@BOTH
@pytest.mark.parametrize("method", KEEPING)
def test_clients_keep_the_same(method: str, backend: str) -> None:
    alone = train(made(method))
    job = made(method, {"engine": {"backend": backend, "processes": 2}})
    found = train(job)
    assert backend == "ray" or job.backend.processes == [], "they end with the run"
    assert torch.equal(found.state.shared, alone.state.shared)
    same(found.heads, alone.heads)


def test_worker_processes_are_the_sequential_engine_bit_for_bit() -> None:
    alone = run("dp2-fedsam", {"backend": "sequential"})
    shared = run("dp2-fedsam", {"backend": "workers", "processes": 2})
    assert torch.equal(weights(shared.model), weights(alone.model))
    histories = [[{**line, "seconds": 0} for line in each.private_history] for each in (shared, alone)]
    assert histories[0] == histories[1]
    assert all(torch.equal(shared.heads[i], head) for i, head in alone.heads.items())


def test_what_one_process_keeps_of_a_client_is_found_before_the_round_ends() -> None:
    """A library's own code keeps it, which is looked at when a process may have given its last answer of a round."""
    layer = nn.TransformerEncoderLayer(6, 1, 4, dropout=0.0)
    once = {"local": {"steps": 1}, "cohort": {"size": 1, "sampling": "fixed"}}
    changes = {"engine": {"backend": "workers", "processes": 3}, **once}
    job = prepare(Recipe.of(recipe("dp-fedavg", changes)), nn.Sequential(layer, nn.Linear(6, 3)), clients())
    job.backend.inner.problem.module[0].activation = partial(dict.setdefault, {}, "first")  # gives back the first batch
    with pytest.raises(InputError, match=r"model: .*activation.* was changed by a client's training"):
        train(job)
    assert job.backend.processes == [], "they would answer the next run with what is left of this one"
