"""Character models and bags of words, against torch's own recurrent layer."""

import inspect

import pytest
import torch
from blocks import check_gradients
from torch import nn
from torch.nn import functional as F

from fedflat.core.checks import InputError
from fedflat.data.decoding import SEPARATOR
from fedflat.models import NAMES, build, refuse_unclipped_state, text

torch.set_num_threads(1)


def ids(*shape: int, high: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "classes", "options", "count"),
    [
        ("char-gru", 90, {}, 64_938),
        ("char-linear", 90, {}, 24_660),
        ("bow-linear", 2, {"vocabulary": 5000}, 10_002),
        ("bow-overlap", 2, {}, 4),
    ],
)
def test_the_stated_number_of_parameters(name: str, classes: int, options: dict[str, int], count: int) -> None:
    assert sum(p.numel() for p in build(name, (80,), classes, 0, **options).parameters()) == count
    assert f"{count:,}" in NAMES[name]


def test_a_recurrent_layer_is_torchs_layer() -> None:
    module = build("char-gru", (9,), 11, 0, hidden=6, embedding=4, layers=2)
    torchs = nn.GRU(4, 6, num_layers=2, batch_first=True)
    with torch.no_grad():
        for i, layer in enumerate(module.layers):
            getattr(torchs, f"weight_ih_l{i}").copy_(layer.weight_ih)
            getattr(torchs, f"weight_hh_l{i}").copy_(layer.weight_hh)
            getattr(torchs, f"bias_ih_l{i}").copy_(layer.bias)
            getattr(torchs, f"bias_hh_l{i}").zero_()
    x = ids(3, 9)
    expected = module.head(torchs(module.embedding(x))[0])
    assert module(x).shape == (3, 9, 11)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", ["char-gru", "char-linear"])
def test_a_prediction_does_not_see_the_future(name: str) -> None:
    module = build(name, (9,), 11, 0, **({} if name == "char-linear" else {"hidden": 6}))
    with torch.no_grad():
        for p in module.parameters():  # scores are 0 at the start
            p.add_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    x = ids(2, 9)
    later = x.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 11
    assert torch.equal(module(x)[:, :5], module(later)[:, :5])
    assert not torch.equal(module(x)[:, 5:], module(later)[:, 5:])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("char-gru", {"hidden": 6}),
        ("char-linear", {}),
        ("bow-linear", {"vocabulary": 11}),
        ("bow-overlap", {}),
    ],
)
def test_three_clients_under_vmap_equal_three_calls(name: str, options: dict[str, int]) -> None:
    modules = [build(name, (7,), 11, seed, **options) for seed in range(3)]

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), y.flatten() if logits.ndim == 3 else y[:, 0])

    check_gradients(ids(3, 2, 7), ids(3, 2, 7, seed=1), *modules, loss=loss, rtol=1e-4, atol=1e-6)


def test_text_models_hold_no_unclipped_state_and_follow_the_seed() -> None:
    for name, options in {"char-gru": {"hidden": 5}, "bow-linear": {"vocabulary": 11}}.items():
        refuse_unclipped_state(build(name, (5,), 11, 0, **options), ids(2, 5))
        vectors = [nn.utils.parameters_to_vector(build(name, (5,), 11, s, **options).parameters()) for s in (1, 1, 2)]
        assert torch.equal(vectors[0], vectors[1])
        assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("char-gru", (1, 8), {}, "sequences of ids (length,)"),
        ("char-gru", (8,), {"layers": 0}, "model.layers: found 0"),
        ("bow-linear", (8,), {}, "model.vocabulary: found nothing"),
        ("bow-linear", (8,), {"vocabulary": 1}, "model.vocabulary: found 1"),
        ("bow-overlap", (8,), {"padding": 1}, "model.separator: found 1"),
        ("char-linear", (8,), {"context": 0}, "model.context: found 0"),
        ("char-linear", (8,), {"context": 9}, "model.context: found 9; allowed: a whole number ≥ 1 and ≤ 8"),
    ],
)
def test_impossible_options(name: str, shape: tuple[int, ...], options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError) as error:
        build(name, shape, 4, 0, **options)
    assert words in str(error.value)


def test_logistic_regression_on_words_has_counts_of_length_one() -> None:
    module = build("bow-linear", (6,), 3, 0, vocabulary=11)
    x = torch.tensor([[3, 5, 7, 4, 0, 0], [5, 0, 5, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    features = module.features(x)
    torch.testing.assert_close(features.norm(dim=1), torch.tensor([1.0, 2**0.5, 0.0]))
    assert torch.equal(features[0].nonzero().flatten(), torch.tensor([3, 4, 5, 7]))
    assert features[1, 5] == 2 / 2**0.5
    torch.testing.assert_close(module(x), module(features))
    assert module.frozen


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ([3, 4, 1, 4, 3, 0], -1.0),  # the same words
        ([3, 4, 1, 5, 6, 0], 1.0),  # none of them
        ([3, 4, 5, 1, 4, 0], 0.0),  # 3 and 5 of four words are alone
        ([3, 3, 1, 3, 0, 0], -1.0),  # a word that is there twice is not alone
        ([3, 4, 0, 0, 0, 0], 1.0),  # no second sentence
        ([0, 0, 0, 0, 0, 0], -1.0),
    ],
)
def test_the_share_of_words_that_one_sentence_has_alone(text: list[int], share: float) -> None:
    assert build("bow-overlap", (6,), 2, 0).features(torch.tensor([text])).item() == share


def test_the_hashed_separator_is_the_one_that_sentences_end_at() -> None:
    assert inspect.signature(text.WordOverlap).parameters["separator"].default == SEPARATOR


def test_a_character_model_without_layers_adds_a_score_for_each_of_the_last_characters() -> None:
    module = build("char-linear", (4,), 5, 0, context=2)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    last, before = module.scores[:6], module.scores[6:]  # row 5: before the text's beginning
    logits = module(torch.tensor([[2, 0, 4, 1]]))[0]
    torch.testing.assert_close(logits[0], last[2] + before[5] + module.bias)
    torch.testing.assert_close(logits[3], last[1] + before[4] + module.bias)
    assert [name for name, _ in module.named_parameters()][-1] == "bias"


@pytest.mark.parametrize(
    ("name", "options"), [("bow-linear", {"vocabulary": 5}), ("bow-overlap", {}), ("char-linear", {})]
)
def test_an_exported_program_takes_any_number_of_texts(name: str, options: dict[str, int]) -> None:
    module = build(name, (8,), 5, 0, **options)
    program = torch.export.export(module, (ids(3, 8, high=5),), dynamic_shapes=({0: torch.export.Dim("texts")},))
    x = ids(2, 8, high=5, seed=1)
    torch.testing.assert_close(program.module()(x), module(x))
