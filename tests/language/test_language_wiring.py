"""Ids from the data to the model: vocabulary, padding, pairs of sentences, and the sentences of errors."""

from pathlib import Path
from typing import Any

import pytest
import tiny_texts as tiny
import torch
from torch import nn

from fedflat.assembly.inputs import data_of, module_of
from fedflat.config.recipe import Recipe
from fedflat.core import imports
from fedflat.core.checks import InputError
from fedflat.data.clients import FederatedData
from fedflat.data.decoding import SEPARATOR, tokenize
from fedflat.models import build

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody answers at the hub, and its cache is empty."""
    from huggingface_hub import constants

    monkeypatch.setattr(imports, "_reachable", lambda *_: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))
    monkeypatch.delenv("FEDFLAT_DATA", raising=False)


@pytest.fixture
def own(tmp_path: Path) -> str:
    return str(tiny.tokenizer(tmp_path / "tokenizer"))


def made(dataset: Path, model: dict[str, Any] | None = None, **data: Any) -> tuple[FederatedData, nn.Module]:
    """The federation and the module of a run."""
    section = {"dataset": str(dataset), "clients": 6, "max_length": 10, **data}
    recipe = Recipe.of(tiny.recipe(dataset, data=section, model=model or tiny.TINY))
    found = data_of(recipe, None, None)
    return found, module_of(recipe, None, found)[0]


def pad_longer(ids: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([ids, torch.full((len(ids), 4), padding)], 1)


def test_hashed_ids_make_a_model_of_their_size_that_skips_their_padding(tmp_path: Path) -> None:
    data, module = made(tiny.reviews(tmp_path), vocabulary=50)
    embeddings = module.body.roberta.embeddings.word_embeddings
    assert embeddings.num_embeddings == data.vocabulary == 50 and embeddings.padding_idx == data.padding == 0
    x = data.inputs[:5]
    assert (x == 0).any(), "there is padding to skip"
    torch.testing.assert_close(module(pad_longer(x, 0)), module(x))
    assert not torch.allclose(module(pad_longer(x, 5)), module(x), atol=1e-6), "a word is not skipped"


def test_a_pairs_separator_is_read_and_not_taken_for_padding(tmp_path: Path) -> None:
    """Hashing's separator has RoBERTa's own padding id: without the wiring it and its position would be masked."""
    data, module = made(tiny.pairs(tmp_path))
    x = data.inputs[:5]
    assert (x == SEPARATOR).sum(1).tolist() == [1] * 5
    other = x.clone()
    other[x == SEPARATOR] = 7
    assert not torch.allclose(module(other), module(x), atol=1e-6)
    unwired = build("roberta-base", (10,), 2, 0, pretrained=False, config=tiny.TINY["config"])
    torch.testing.assert_close(unwired(pad_longer(x, 1)), unwired(x))  # the broken twin: the separator is its padding


def test_the_tokenizers_own_ids(tmp_path: Path, own: str) -> None:
    data, module = made(tiny.reviews(tmp_path), tokenizer=own)
    body = module.body.config
    assert (data.vocabulary, data.padding) == (14, 1) == (body.vocab_size, body.pad_token_id)
    assert set(data.inputs[:, 0].tolist()) == {0} and (data.inputs[:, -1] == 1).all()
    torch.testing.assert_close(module(pad_longer(data.inputs[:5], 1)), module(data.inputs[:5]))


def test_a_bag_skips_the_tokenizers_padding(tmp_path: Path, own: str) -> None:
    data, module = made(tiny.reviews(tmp_path), {"name": "bow-linear"}, tokenizer=own)
    assert module.classifier.in_features == 14
    torch.testing.assert_close(module(pad_longer(data.inputs, 1)), module(data.inputs))


def test_pairs_are_joined_in_order(tmp_path: Path, own: str) -> None:
    """<s> first </s></s> second </s>, as RoBERTa was trained; by hashing: first, separator, second."""
    import pyarrow.parquet as pq

    folder = tiny.pairs(tmp_path)
    row = pq.read_table(folder / "validation.parquet").to_pylist()[0]
    known = {word: i for i, word in enumerate(tiny.MARKS + tiny.WORDS)}
    a, b = ([known[word] for word in row[f"sentence{i}"].split()] for i in (1, 2))
    both = made(folder, tokenizer=own)[0]
    assert both.test_inputs is not None and both.test_inputs[0].tolist() == [0, *a, 2, 2, *b, 2]
    hashed = made(folder)[0]
    assert hashed.test_inputs is not None
    alone = [tokenize([row[f"sentence{i}"]], 3)[0].tolist() for i in (1, 2)]
    assert hashed.test_inputs[0].tolist() == [*alone[0], SEPARATOR, *alone[1], 0, 0, 0]


def test_a_long_pair_keeps_both_sentences(own: str) -> None:
    from fedflat.data.decoding import pretrained

    ids = pretrained([("a film " * 20, "dull")], own, 10)[0][0].tolist()
    assert ids[-2:] == [tiny.WORDS.index("dull") + 4, 2], "the longer one is cut"


def saved(folder: Path, **config: Any) -> str:
    """Random weights in RoBERTa's form, as save_pretrained writes them."""
    sizes = {**tiny.TINY["config"], "vocab_size": 14, "pad_token_id": 1, **config}
    build("roberta-base", (10,), 2, 0, pretrained=False, config=sizes).body.save_pretrained(folder)
    return str(folder)


def test_saved_weights_with_their_tokenizer(tmp_path: Path, own: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "weights")
    folder = tiny.reviews(tmp_path)
    capfd.readouterr()
    data, module = made(folder, {"name": "roberta-base", "path": path, "train": "lora"}, tokenizer=own)
    assert module(data.inputs[:3]).shape == (3, 2)
    assert capfd.readouterr().err == "", "no progress bars, no table of missing weights"


def test_saved_weights_are_refused_for_other_ids(tmp_path: Path) -> None:
    path = saved(tmp_path / "weights")
    with pytest.raises(InputError) as error:
        made(tiny.reviews(tmp_path), {"name": "roberta-base", "path": path})
    text = str(error.value)
    assert "data.tokenizer: found 8192 ids with padding 0" in text and f"data.tokenizer={path}" in text


@pytest.mark.parametrize("config", [{"vocab_size": 40}, {"pad_token_id": 1}])
def test_a_configuration_of_other_ids_is_refused(tmp_path: Path, config: dict[str, int]) -> None:
    model = {**tiny.TINY, "config": {**tiny.TINY["config"], **config}}
    with pytest.raises(InputError, match=r"model\.config: found at most"):
        made(tiny.reviews(tmp_path), model, vocabulary=50)


@pytest.mark.parametrize("name", ["roberta-base", "vit-base"])
def test_weights_that_cannot_be_had_are_one_line_with_the_remedy(name: str) -> None:
    shape = (10,) if name == "roberta-base" else (3, 32, 32)
    with pytest.raises(InputError) as error:
        build(name, shape, 2, 0)
    text = str(error.value)
    assert "model.path" in text and "HF_HOME" in text and "\n" not in text
    assert ("FacebookAI/roberta-base" if name == "roberta-base" else "google/vit-base-patch16-224-in21k") in text


@pytest.mark.parametrize("kept", ["nothing", "no weights at all", "a pickle"])
def test_missing_broken_and_pickled_weights_are_one_line(tmp_path: Path, kept: str) -> None:
    path = Path(saved(tmp_path / "weights"))
    weights = (path / "model.safetensors").rename(path / "pytorch_model.bin")
    if kept != "a pickle":
        weights.unlink()
    if kept == "no weights at all":
        (path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(InputError, match="no readable weights at") as error:
        build("roberta-base", (10,), 2, 0, path=str(path))
    assert "\n" not in str(error.value)


def test_the_hub_is_left_as_it_was() -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with pytest.raises(ValueError), imports.hub():
        assert constants.HF_HUB_OFFLINE
        raise ValueError
    assert before == constants.HF_HUB_OFFLINE
