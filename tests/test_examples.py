"""The examples: the guard inside other people's server loops, each on its own package; and the readable twin computes
what the engine computes. (That the others run: ``documented``.)"""

import ast
import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.privacy.ledger import read

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["own_loop", "flower_strategy", "nvflare_aggregator"])
def test_under_twenty_lines(name: str) -> None:
    """Statements of the class, or of the loop: what embedding costs."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, (ast.ClassDef, ast.With)))
    assert len({node.lineno for node in ast.walk(body) if isinstance(node, ast.stmt)}) < 20


def test_a_loop_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    monkeypatch.setattr(sys, "argv", ["own_loop.py", str(ledger)])
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "proven ε = 4 at δ = 0.000333" in said or "proven ε = 3.99" in said
    assert float(said.split("truth ")[1].split(";")[0]) < 1.0
    assert len(read(ledger)) == 30


def test_a_flower_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr.serverapp")
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # as the process of a server app has them
        monkeypatch.setattr(identity, name, 1)
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    plan = {"clients": 6, "cohort": 3, "rounds": 4, "noise_multiplier": 1e-6, "dimension": 8}  # cohorts may be empty
    guard = fedflat.Guard(tmp_path / "l.jsonl", clip=0.5, **plan)
    strategy = runpy.run_path(str(EXAMPLES / "flower_strategy.py"))["Guarded"](guard)
    connected = [900 + 7 * i for i in (5, 3, 1, 0, 2, 4)]
    grid: Any = SimpleNamespace(get_node_ids=lambda: connected)
    arrays = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "b": Array(np.ones(2, np.float32))})
    for turn in (1, 2):
        drawn = [900 + 7 * int(i) for i in guard.cohort(turn - 1)]
        messages = list(strategy.configure_train(turn, arrays, ConfigRecord({"lr": 0.1}), grid))
        assert [message.metadata.dst_node_id for message in messages] == drawn
        replies = []
        for message in messages:
            old = message.content["arrays"].to_numpy_ndarrays()
            new = [old[0] + 0.1, old[1] + 100.0]
            sent = RecordDict({"arrays": ArrayRecord({"w": Array(new[0]), "b": Array(new[1])})})
            replies.append(Message(sent, reply_to=message))
        found, metrics = strategy.aggregate_train(turn, replies)
        assert metrics is None and list(found.keys()) == ["w", "b"]
        moved = np.concatenate([(b - a).ravel() for a, b in zip(arrays.to_numpy_ndarrays(), found.to_numpy_ndarrays())])
        assert np.linalg.norm(moved) == pytest.approx(0.5 * len(replies) / 3, rel=1e-3, abs=1e-3)
        arrays = found
    with pytest.raises(InputError, match="released once"):
        strategy.aggregate_train(2, [])
    assert len(read(tmp_path / "l.jsonl")) == 2
    guard.close()


def test_an_nvflare_aggregator(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    sites = [f"site-{i}" for i in range(1, 5)]
    path = str(tmp_path / "l.jsonl")
    model = {"w": np.zeros((2, 3)), "b": np.zeros(2)}
    settings = {"ledger": path, "clip": 0.5, "rounds": 3, "noise_multiplier": 1e-6}
    aggregator = runpy.run_path(str(EXAMPLES / "nvflare_aggregator.py"))["Guarded"](sites, model, **settings)
    context = FLContext()
    for turn in range(2):
        aggregator.reset(context)
        for i, site in enumerate(sites):
            update = {"w": np.full((2, 3), 50.0, np.float32), "b": np.zeros(2, np.float32)}
            shareable: Shareable = DXO(DataKind.WEIGHT_DIFF, update, {"client_name": site}).to_shareable()
            assert aggregator.accept(shareable, context), i
        released = FLModelUtils.from_shareable(aggregator.aggregate(context))
        assert released.params_type == "DIFF"
        assert {k: v.shape for k, v in released.params.items()} == {"w": (2, 3), "b": (2,)}
        assert float(np.sqrt(sum((v**2).sum() for v in released.params.values()))) == pytest.approx(0.5, rel=1e-3)
        assert len(read(path)) == turn + 1
    aggregator.guard.close()


def test_the_readable_twin_equals_the_engine() -> None:
    one_round = runpy.run_path(str(EXAMPLES / "one_round.py"))["one_round"]
    generator = torch.Generator().manual_seed(3)
    sizes = range(6, 13)
    clients = [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    settings = {"steps": 3, "lr": 0.2, "momentum": 0.5, "rho": 0.1, "threshold": 0.05}
    w = start
    for _ in range(4):
        w = one_round(model, w, clients, q=1.0, noise_multiplier=0.0, generator=generator, **settings)
    nn.utils.vector_to_parameters(start, model.parameters())
    recipe = {
        "rounds": 4, "algorithm": {"name": "dp-fedsam", "rho": 0.1}, "cohort": {"size": 7},
        "local": {"steps": 3, "batch_size": 100, "lr": 0.2, "momentum": 0.5},
        "privacy": {"clip": 0.05, "noise_multiplier": 0},
    }  # fmt: skip
    result = fedflat.run(recipe, model=model, clients=clients)
    ours = nn.utils.parameters_to_vector(result.model.parameters())
    assert torch.linalg.vector_norm(ours - start) > 0.02
    torch.testing.assert_close(ours, w, rtol=1e-5, atol=1e-6)


def test_a_new_method_is_under_thirty_lines() -> None:
    assert len((EXAMPLES / "new_method.py").read_text(encoding="utf-8").splitlines()) < 30
