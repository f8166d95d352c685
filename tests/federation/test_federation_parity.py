"""Federation and simulation: the same numbers without noise, the same law and ledger with it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stand_in import Grid, client_at, deployed, final_shared, grid_of, honest, rows, settings, small

from fedflat.engine import resume
from fedflat.engine.round import broadcast_of
from fedflat.federation.client import Client
from fedflat.federation.server import serve
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint
from fedflat.simulation import run as simulation

METHODS: dict[str, dict[str, Any]] = {
    "dp-fedsam": {},
    "dp-fedpgn": {"algorithm": "dp-fedpgn", "server": {"lr": 0.7}},
    "common mask": {"algorithm": {"name": "fed-smp-randk", "keep": 0.4}},
    "lus and blur": {"algorithm": "dp-fedavg-blurs"},
    "filter": {"algorithm": {"name": "dp-disk", "ahead": 0.3}, "server": {"lr": 0.7}},
    "personal heads": {"algorithm": "dp2-fedsam", "rounds": 3},
    "control variates": {"algorithm": {"name": "dp-scaffold", "scale": 0.5}, "rounds": 3},
    "error feedback": {"algorithm": {"name": "fed-normec", "alpha": 0.01}, "rounds": 3},
    "adaptive clip": {"privacy": {"clip": {"kind": "adaptive", "initial": 0.05}}, "rounds": 3},
    "per-tensor clip": {"privacy": {"clip": {"kind": "per-tensor", "values": 0.03}}},
    "sample weights": {
        "algorithm": "fedavg",
        "server": {"weights": "samples"},
        "data": {"partition": {"kind": "dirichlet", "alpha": 0.5}},
    },
    "adam": {"server": {"optimizer": "adam", "lr": 0.1}},
    "class statistics": {"algorithm": "class-statistics", "rounds": 1},
    "frozen body": {
        "model": {
            "name": "representation",
            "body": {"kind": "patches", "filters": 12, "size": 3, "cells": 2, "dimension": 20, "images": 100},
        },
        "algorithm": "dp-fedavg",
        "server": {"average": "tail"},
    },
}
if importlib.util.find_spec("efficientnet_lite_pytorch") is not None:
    network = {"name": "image-encoder", "body": "efficientnet-lite0", "size": 16}
    METHODS["public network"] = {"model": network, "rounds": 1}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * n.startswith("public")) for n in METHODS])
def test_without_noise_the_numbers_agree(name: str, tmp_path: Path) -> None:
    task, clients = deployed(tmp_path / "fed", small(**METHODS[name]))
    serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
    simulated = simulation.run(task.recipe, out=tmp_path / "sim")
    found, wanted = final_shared(tmp_path / "fed" / "run"), final_shared(tmp_path / "sim")
    assert (wanted - clients[0].job.initial_weights[: wanted.numel()]).norm() > 1e-3  # it moved at all
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(rows(tmp_path / "fed" / "run" / "metrics.jsonl"), simulated.history, strict=True):
        assert (ours["clip"] or 0) == pytest.approx(theirs["clip"] or 0, rel=1e-6)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"privacy": {"noise_multiplier": 1.0, "secure_rng": True}}], ids=["float", "grid"]
)
def test_with_noise_the_same_key_draws_the_same(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohorts and noise come from the same streams of the key, and the ledger has the same events."""
    recipe = small(**{"cohort": {"size": 2}, "privacy": {"noise_multiplier": 1.0}, "rounds": 3, **changes})
    task, clients = deployed(tmp_path / "fed", recipe)
    monkeypatch.setattr(resume, "noise_key", lambda *facts, attempt: bytes(32))
    serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
    simulation.run(task.recipe, out=tmp_path / "sim")
    found, wanted = final_shared(tmp_path / "fed" / "run"), final_shared(tmp_path / "sim")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    lines = [read_ledger(folder / "ledger.jsonl") for folder in (tmp_path / "fed" / "run", tmp_path / "sim")]
    chain = ("previous", "checksum", "key_id", "run")
    plain = [[{k: v for k, v in line.items() if k not in chain} for line in found] for found in lines]
    assert plain[0] == plain[1] and len(plain[0]) == 3
    facts = json.loads((tmp_path / "fed" / "run" / "privacy.json").read_text())
    assert facts["facts"]["epsilon_cohort_known"] > facts["epsilon"] > 0  # who learns the cohorts gets no amplification
    assert f"ε = {facts['facts']['epsilon_cohort_known']:.4g}" in " ".join(facts["warnings"])


def test_local_trust_the_clients_noise_is_the_sum(tmp_path: Path) -> None:
    """Each message carries N(0, σ²C²) of its own; the server adds none: n clients, variance n·σ²C²."""
    changes = {"local": {"lr": 1e-6}, "model": {"name": "mlp", "hidden": 32}, "rounds": 1}
    task, clients = deployed(tmp_path / "fed", small(**changes, privacy={"trust": "local", "noise_multiplier": 2.0}))
    serve(grid_of(task, clients), task, settings(tmp_path / "fed"))
    moved = final_shared(tmp_path / "fed" / "run") - clients[0].job.initial_weights
    std = 2.0 * 0.1 * np.sqrt(4) / 4  # σC·√n / m
    assert moved.std().item() == pytest.approx(std, rel=0.1)


def restarting(folder: Path, task: Task, clients: list[Client]) -> Grid:
    """Honest clients, each of them started anew for every message."""
    grid = grid_of(task, clients)
    for number in grid.handlers:
        grid.handlers[number] = lambda message, number=number: honest(client_at(folder, task, number))(message)
    return grid


def test_personal_parts_stay_and_survive_a_restart(tmp_path: Path) -> None:
    recipe = small(algorithm="dp2-fedsam", rounds=3)
    task, clients = deployed(tmp_path / "fed", recipe)
    grid = restarting(tmp_path / "fed", task, clients)
    serve(grid, task, settings(tmp_path / "fed"))
    simulated = simulation.run(task.recipe, out=tmp_path / "sim")
    shared = clients[0].job.parts.layout.dimension
    for client in clients:
        head = client.store.personal(client.job.initial_weights[shared:], recipe.rounds)[0]
        torch.testing.assert_close(head, simulated.heads[client.number], rtol=1e-5, atol=1e-6)
    assert {array.shape[0] for message in grid.pushed for array in message.content["arrays"].values()} == {shared}
    stored = checkpoint.newest(tmp_path / "fed" / "run" / "checkpoints")
    assert stored is not None and stored[1].kept == {}


@pytest.mark.parametrize("method", ["dp-scaffold", "fed-normec"])
def test_states_stay_and_survive_a_restart(method: str, tmp_path: Path) -> None:
    """Each client's own disk has the state that the simulation keeps; the server, and the wire, have none of it."""
    task, clients = deployed(tmp_path / "fed", small(algorithm=method, rounds=3))
    grid = restarting(tmp_path / "fed", task, clients)
    serve(grid, task, settings(tmp_path / "fed"))
    simulation.run(task.recipe, out=tmp_path / "sim")
    half = load_file(tmp_path / "sim" / "private" / "heads" / "round-000003.safetensors")
    (name,) = clients[0].store.personal(torch.zeros(0), 3)[1]
    assert half[f"state.{name}.ids"].tolist() == [client.number for client in clients]
    for client, wanted in zip(clients, half[f"state.{name}.values"]):
        assert float(wanted.norm()) > 1e-3
        torch.testing.assert_close(client.store.personal(torch.zeros(0), 3)[1][name], wanted, rtol=1e-4, atol=1e-6)
    assert not (tmp_path / "fed" / "run" / "private" / "heads").exists()
    carried = {name for message in grid.pushed for name in message.content["arrays"]}
    assert carried == ({"shared", "vector.control"} if method == "dp-scaffold" else {"shared"})


@pytest.mark.parametrize("method", ["dp2-fedsam", "dp-scaffold", "fed-normec"])
def test_a_round_asked_again_starts_from_the_same_head_and_state(method: str, tmp_path: Path) -> None:
    _, clients = deployed(tmp_path / "fed", small(algorithm=method))
    job, store = clients[0].job, clients[0].store
    shared, start = job.initial_weights.tensor_split([job.parts.layout.dimension])
    ask = broadcast_of(job.parts, job.parts.first_state(shared, job.threshold), job.seed)
    once, (head, states) = clients[0].update(ask)[0], store.personal(start, 1)
    twice, (_, again) = clients[0].update(ask)[0], store.personal(start, 1)
    assert torch.equal(once, twice) and len(once) == job.parts.message_length
    assert all(torch.equal(value, again[name]) for name, value in states.items())
    assert states if method != "dp2-fedsam" else not torch.equal(head, start)
