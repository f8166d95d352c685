"""The packaged text recipes, run on tiny files of the same columns; on the real sets where FEDFLAT_DATA has them."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_texts as tiny
import torch

import fedflat
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.imports import _reachable
from fedflat.data.sources import load

pytest.importorskip("transformers")
REAL = Path(os.environ.get("FEDFLAT_DATA", "/nonexistent"))
SMALL = ["rounds=2", "local.steps=2", "cohort.size=3", "evaluation.every=2", "engine.backend=sequential"]
SIZES = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64"
SCRATCH = f"model={{name: roberta-base, pretrained: false, config: {{{SIZES}, max_position_embeddings: 66}}}}"
"""A small transformer from random weights."""
LARGE = ["sst2-roberta-base", "mrpc-roberta-base", "cifar10-vit-base"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for write in (tiny.reviews, tiny.pairs, tiny.plays):
        write(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changed"),
    [("sst2-bow", []), ("mrpc-bow", []), ("sst2-bow", [SCRATCH, "algorithm.name=dp-fedavg", "server.lr=1"])],
)
def test_sentences_end_to_end(folder: Path, name: str, changed: list[str]) -> None:
    result = fedflat.run(Recipe.load(name, [*SMALL, *changed, "data.clients=6"]))
    last = result.history[-1]
    assert len(result.history) == 2 and 0 <= last["test_accuracy"] <= 1 and result.privacy["proven_epsilon"] <= 8


@pytest.mark.parametrize("name", ["shakespeare-dp-fedavg", "shakespeare-fedavg"])
def test_every_speaker_is_a_client(folder: Path, name: str) -> None:
    recipe = Recipe.load(name, [*SMALL, "data.test_fraction=0.1"])
    assert load(recipe.data).clients == 6
    result = fedflat.run(recipe)
    assert len(list(result.model.parameters())[-1]) == 81 and len(result.history) == 2
    assert (result.privacy["proven_epsilon"] is None) == (name == "shakespeare-fedavg")


def test_a_character_model_learns_which_letters_there_are(folder: Path) -> None:
    options = ["rounds=4", "cohort.size=6", "cohort.sampling=fixed", "local.steps=5", "model.hidden=8"]
    last = ["data.max_length=20", "evaluation.every=4", "engine.backend=sequential"]
    result = fedflat.run(Recipe.load("shakespeare-fedavg", [*options, *last]))
    assert result.history[-1]["test_loss"] < 3.0 < math.log(81), "six of 81 characters occur"


@pytest.mark.parametrize("name", LARGE)
def test_table_v_has_the_papers_settings(name: str) -> None:
    recipe = Recipe.load(name)
    assert (recipe.local.lr, recipe.local.lr_decay, recipe.local.batch_size, recipe.rounds) == (0.1, 0.98, 16, 100)
    assert recipe.data.partition.alpha == 0.1 and recipe.data.clients == 500
    assert recipe.data.tokenizer == (None if name == "cifar10-vit-base" else "FacebookAI/roberta-base")


@pytest.mark.parametrize("name", LARGE[:2])
def test_table_v_on_local_folders(folder: Path, name: str) -> None:
    """The whole recipe with other weights: a folder with a tiny random model and its tokenizer."""
    from fedflat.models import build

    weights = tiny.tokenizer(folder / "weights")
    sizes = {**tiny.TINY["config"], "vocab_size": 14, "pad_token_id": 1}
    build("roberta-base", (10,), 2, 0, pretrained=False, config=sizes).body.save_pretrained(weights)
    local = [f"model.path={weights}", f"data.tokenizer={weights}", "data.max_length=12", "data.clients=6"]
    small = [option for option in SMALL if "steps" not in option]
    result = fedflat.run(Recipe.load(name, [*small, *local, "local.epochs=1"]))
    trained = [n for n, p in result.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n or n.startswith("body.classifier.") for n in trained)


def encoder(folder: Path) -> list[str]:
    """Options that name a folder with a tiny random encoder and its tokenizer."""
    import transformers

    weights = tiny.tokenizer(folder / "encoder")
    config = transformers.RobertaConfig(vocab_size=14, pad_token_id=1, **{**tiny.SIZES, "hidden_size": 16})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.RobertaModel(config, add_pooling_layer=False).save_pretrained(weights)
    return [f"model.path={weights}", f"data.tokenizer={weights}", "data.max_length=14", "data.clients=6"]


@pytest.mark.parametrize("train", ["head", "lora"])
@pytest.mark.parametrize("name", ["sst2-encoder", "mrpc-encoder"])
def test_encoders_on_local_folders(folder: Path, name: str, train: str) -> None:
    result = fedflat.run(Recipe.load(name, [*SMALL, *encoder(folder), f"model.train={train}"]))
    trained = [n for n, p in result.model.named_parameters() if p.requires_grad]
    assert all("lora_" in n or n.startswith("classifier.") for n in trained) and result.privacy["proven_epsilon"] <= 8
    assert ("lora_" in " ".join(trained)) == (train == "lora")


def test_a_head_learns_what_a_frozen_encoder_tells_apart(folder: Path) -> None:
    """One of six adjectives decides; without noise the head on a random encoder's features finds it."""
    options = ["algorithm.name=fedavg", "privacy={}", "rounds=60", "cohort.size=6", "local.lr=0.5", *SMALL[3:]]
    result = fedflat.run(Recipe.load("sst2-encoder", [*encoder(folder), *options]))
    assert result.history[-1]["test_accuracy"] >= 0.75 and result.private_history[-1]["train_accuracy"] > 0.9


def test_an_encoder_recipe_names_the_folder_it_needs(folder: Path) -> None:
    with pytest.raises(InputError, match=r"model\.path: found nothing; allowed: a folder"):
        fedflat.run(Recipe.load("sst2-encoder", ["data.clients=6", *SMALL]))


def test_without_the_hub_a_table_v_recipe_names_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.core.imports._reachable", lambda *_: False)
    monkeypatch.setenv("HF_HOME", str(folder / "empty"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "empty"))
    with pytest.raises(InputError, match=r"^data\.tokenizer: found FacebookAI/roberta-base.*HF_HOME[^\n]*$"):
        fedflat.run(Recipe.load("sst2-roberta-base", ["data.clients=6", *SMALL[2:]]))


def test_nobody_answers_at_a_closed_port() -> None:
    assert not _reachable("http://127.0.0.1:9", 1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shakespeare-dp-fedavg", ["data.max_test=50", "cohort.size=5"]),
        ("sst2-bow", ["data.max_examples=2000"]),
        ("mrpc-bow", []),
        ("sst2-bow", [SCRATCH, "algorithm.name=dp-fedavg", "data.max_examples=2000", "data.max_test=100"]),
    ],
)
def test_on_the_real_sets(name: str, options: list[str], request: Any) -> None:
    recipe = Recipe.load(name, [*SMALL, *options])
    if not (REAL / recipe.data.dataset).is_dir():
        pytest.skip(f"FEDFLAT_DATA has no {recipe.data.dataset}")
    assert torch.isfinite(torch.tensor(fedflat.run(recipe).history[-1]["test_loss"]))
