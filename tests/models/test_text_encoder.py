"""The text encoder on tiny folders: features by hand, sentence pairs apart, vmap, what is trained, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import check_gradients
from torch import nn
from torch.nn import functional as F

from fedflat.core.checks import InputError
from fedflat.models import build, refuse_unclipped_state

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "Bert": {"pad_token_id": 0, "type_vocab_size": 2, "max_position_embeddings": 12},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 14},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("peft")  # seconds of imports: not for a process that only collects


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved body of each kind, with large initial weights so that every token is seen."""
    found = {}
    for kind, own in KINDS.items():
        config = getattr(transformers, f"{kind}Config")(vocab_size=30, initializer_range=0.5, **SIZES, **own)
        found[kind] = tmp_path_factory.mktemp(kind)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            getattr(transformers, f"{kind}Model")(config).save_pretrained(found[kind])
    return found


def encoder(folder: Path, seed: int = 0, length: int = 10, **options: Any) -> Any:
    return build("text-encoder", (length,), 3, seed, path=str(folder), **options)


def padded(kind: str, *texts: list[int], length: int = 10) -> torch.Tensor:
    padding = KINDS[kind]["pad_token_id"]
    return torch.tensor([text + [padding] * (length - len(text)) for text in texts])


# 2 begins a text and 3 ends a sentence, as [CLS] and [SEP] do
SINGLE = [[2, 7, 8, 9, 3], [2, 11, 3], [2, 5, 6, 7, 8, 9, 10, 11, 12, 3]]
PAIRS = {"Bert": [2, 7, 8, 3, 9, 10, 3], "Roberta": [2, 7, 8, 3, 3, 9, 10, 3]}


@pytest.mark.parametrize("kind", KINDS)
def test_features_equal_transformers_own_on_each_text_alone(folders: dict[str, Path], kind: str) -> None:
    """One text at a time without padding, mask, positions or token types given: what a user would call."""
    module, body = encoder(folders[kind]), transformers.AutoModel.from_pretrained(folders[kind]).eval()
    for row, text in zip(module.features(padded(kind, *SINGLE)), SINGLE, strict=True):
        mean = body(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, (mean - mean.mean()) / mean.var(correction=0).add(1e-5).sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_as_one_text_has_the_encoders_own_sentence_types(folders: dict[str, Path], kind: str) -> None:
    module, body = encoder(folders[kind]), transformers.AutoModel.from_pretrained(folders[kind]).eval()
    types = [0, 0, 0, 0, 1, 1, 1] if kind == "Bert" else [0] * 8
    states = body(input_ids=torch.tensor([PAIRS[kind]]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
    torch.testing.assert_close(module.features(padded(kind, PAIRS[kind]))[0], F.layer_norm(states.mean(0), (16,)))


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_of_a_pair_do_not_see_each_other(folders: dict[str, Path], kind: str) -> None:
    near, body = (
        encoder(folders[kind], pooling="distance"),
        transformers.AutoModel.from_pretrained(folders[kind]).eval(),
    )
    text = PAIRS[kind]
    cut = text.index(3) + 1
    means = [body(input_ids=torch.tensor([part])).last_hidden_state[0].mean(0) for part in (text[:cut], text[cut:])]
    u, v = (F.layer_norm(mean, (16,)) for mean in means)
    torch.testing.assert_close(near.features(padded(kind, text))[0, 0], torch.log((u - v).square().mean() / 2 + 0.01))
    assert sum(p.numel() for p in near.parameters() if p.requires_grad) == 2 * 3
    whole = encoder(folders[kind]).features(padded(kind, text, [*text[:cut], 20, 3]))
    assert not torch.allclose(whole[0], whole[1]), "as one text, they do"
    assert near(padded(kind, text)).shape == (1, 3) and near.classifier.in_features == 1


@pytest.mark.parametrize("pooling", ["mean", "distance"])
def test_padding_and_an_empty_text(folders: dict[str, Path], pooling: str) -> None:
    module = encoder(folders["Bert"], pooling=pooling)
    long, short = (padded("Bert", *SINGLE[:2], PAIRS["Bert"], length=n) for n in (10, 7))
    torch.testing.assert_close(module(long), module(short))
    assert bool(torch.isfinite(module(torch.zeros(1, 10, dtype=torch.int64))).all())


@pytest.mark.parametrize("pooling", ["mean", "distance"])
@pytest.mark.parametrize("train", ["head", "lora", "all"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_clients_under_vmap_equal_single_calls(folders: dict[str, Path], train: str, pooling: str) -> None:
    module = encoder(folders["Bert"], train=train, rank=2, pooling=pooling)
    check_gradients(padded("Bert", *SINGLE, PAIRS["Bert"]).reshape(2, 2, 10), torch.tensor([[0, 1], [2, 0]]), module)


def test_what_is_trained_and_what_is_frozen(folders: dict[str, Path]) -> None:
    def trained(module: nn.Module) -> set[str]:
        return {name for name, p in module.named_parameters() if p.requires_grad}

    head, lora, whole = (encoder(folders["Bert"], train=how, rank=2) for how in ("head", "lora", "all"))
    assert trained(head) == {"classifier.weight", "classifier.bias"} and head.frozen
    assert not lora.frozen and len(trained(lora)) == 2 + 2 * 2 * 2 and not whole.frozen
    head.body.encoder.layer[0].output.dropout.p = 0.1
    assert not head.frozen, "dropout draws other features at every step"
    refuse_unclipped_state(lora, padded("Bert", *SINGLE))
    again, other = encoder(folders["Bert"], 1), encoder(folders["Bert"], 2)
    assert torch.equal(
        again.body.state_dict()["embeddings.word_embeddings.weight"], head.body.get_input_embeddings().weight
    )
    assert not torch.equal(again.classifier.weight, other.classifier.weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, "model.path: found nothing"),
        ({"path": "no/such/folder"}, "model.path: found no/such/folder"),
        ({"pooling": "men"}, "Did you mean mean?"),
        ({"train": "heads"}, "Did you mean head?"),
        ({"vocabulary": 31}, "at most 30 ids"),
        ({"padding": 1}, "padding 0"),
    ],
)
def test_errors(folders: dict[str, Path], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        build("text-encoder", (10,), 3, 0, **{"path": str(folders["Bert"]), **options})
    assert words in str(error.value)


def test_long_texts_other_kinds_and_empty_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 12 ids"):
        encoder(folders["Bert"], length=13)
    with pytest.raises(InputError, match="at most 12 ids"):
        encoder(folders["Roberta"], length=13)
    with pytest.raises(InputError, match="no readable weights at"):
        encoder(tmp_path)
    transformers.DistilBertConfig(vocab_size=30).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="a distilbert at"):
        encoder(tmp_path)


def test_a_bert_is_no_roberta(folders: dict[str, Path]) -> None:
    """It would load, and count its positions from the wrong one."""
    with pytest.raises(InputError, match=r"found a bert at .*text-encoder"):
        build("roberta-base", (10,), 3, 0, path=str(folders["Bert"]))
    assert build("roberta-base", (10,), 3, 0, path=str(folders["Roberta"])) is not None
