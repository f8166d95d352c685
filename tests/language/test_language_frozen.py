"""Head-only and low-rank training: what is not trained stays w^0's bit for bit and is never sent, clipped or noised."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_texts as tiny
import torch
from safetensors.torch import load_file
from torch import nn

import fedflat
from fedflat.core.params import flatten, layout_of
from fedflat.models import build

pytest.importorskip("transformers")

# by transformers' RoBERTa: dense 8×8+8 and projection 8×2+2; adapters 2·(r·8) on query and value of one layer
HEAD, ADAPTERS = 8 * 8 + 8 + 8 * 2 + 2, 2 * 2 * (2 * 8)
TRAINED = {"head": HEAD, "lora": HEAD + ADAPTERS}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("peft")  # seconds of imports: not for a process that only collects


@pytest.fixture(scope="module")
def sst2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.reviews(tmp_path_factory.mktemp("data"))


def options(train: str) -> dict[str, Any]:
    return {**tiny.TINY, "train": train, **({"rank": 2} if train == "lora" else {})}


def first(train: str) -> nn.Module:
    """w^0 of the run, built apart from it."""
    given = {key: value for key, value in options(train).items() if key != "name"}
    return build("roberta-base", (10,), 2, 0, vocabulary=8192, padding=0, **given)


def moved(before: nn.Module, after: nn.Module) -> set[str]:
    """Names of the parameters and buffers of which one bit differs."""
    a, b = before.state_dict(), after.state_dict()
    assert list(a) == list(b)
    return {name for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize(
    ("train", "backend"),
    [
        ("head", "sequential"),
        ("head", "vectorized"),
        ("lora", "sequential"),
        ("lora", "vectorized"),
        pytest.param("lora", "workers", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_only_what_is_trained_moves(sst2: Path, train: str, backend: str, tmp_path: Path) -> None:
    before = first(train)
    engine = {"backend": backend, "processes": 2}
    result = fedflat.run(tiny.recipe(sst2, model=options(train), engine=engine), out=tmp_path / "run")
    trained = {name for name, p in before.named_parameters() if p.requires_grad}
    assert moved(before, result.model) == trained
    assert {name for name, p in result.model.named_parameters() if p.requires_grad} == trained
    last = sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1]
    assert load_file(last)["shared"].numel() == TRAINED[train], "nothing else is released"


def test_the_check_fails_for_a_model_that_is_trained_whole(sst2: Path) -> None:
    """The broken twin: with train: all the body moves."""
    before = first("head")
    result = fedflat.run(tiny.recipe(sst2, model=options("all")))
    assert not moved(before, result.model) <= {n for n, p in before.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("train", TRAINED)
def test_the_clip_counts_trained_parameters_only(sst2: Path, train: str) -> None:
    """One round without noise and a small clip: the released step is at most the clip, measured on the whole model."""
    before, clip = first(train), 0.01
    recipe = tiny.recipe(sst2, model=options(train), privacy={"clip": clip, "noise_multiplier": 0}, rounds=1)
    after = fedflat.run(recipe).model
    steps = [(after.state_dict()[name] - value).double().square().sum() for name, value in before.state_dict().items()]
    assert 0 < math.sqrt(float(sum(steps))) <= clip * (1 + 1e-4)
    assert layout_of(before).size == TRAINED[train] == flatten(before, layout_of(before)).numel()


def test_a_resumed_run_is_the_run(sst2: Path, tmp_path: Path, noise_of_the_seed: None) -> None:
    """A checkpoint holds the trained part alone; the body comes back from the recipe."""
    recipe = tiny.recipe(sst2, model=options("lora"))
    whole = fedflat.run(recipe, out=tmp_path / "run")
    for path in sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[1:]:
        path.unlink()
    assert not moved(whole.model, fedflat.run(recipe, out=tmp_path / "run", resume=True).model)
