"""ViT and RoBERTa wrappers with tiny random configurations; nothing is downloaded."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import check_gradients
from torch import nn
from torch.nn import functional as F

from fedflat.core.checks import InputError
from fedflat.models import NAMES, build, refuse_unclipped_state

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TINY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "vit-base": ((3, 8, 8), {**LAYERS, "image_size": 16, "patch_size": 8}),
    "roberta-base": ((7,), {**LAYERS, "vocab_size": 30, "max_position_embeddings": 12}),
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("peft")  # seconds of imports: not for a process that only collects


def tiny(name: str, seed: int = 0, **options: Any) -> nn.Module:
    shape, config = TINY[name]
    return build(name, shape, 3, seed, pretrained=False, config=config, **options)


def example(name: str, *batch: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit-base":
        return torch.randn(*batch, 3, 8, 8, generator=generator)
    ids = torch.randint(3, 30, (*batch, 7), generator=generator)
    ids[..., 5:] = 1
    return ids


@pytest.mark.parametrize(("name", "shape", "classes", "count"), [
    ("vit-base", (3, 32, 32), 10, "85,806,346"),
    ("roberta-base", (64,), 2, "124,647,170"),
])  # fmt: skip
def test_the_published_sizes(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...], classes: int, count: str
) -> None:
    monkeypatch.setattr("fedflat.models.PortableDraws", lambda *_: nullcontext())  # a hundred million, drawn for nobody
    with torch.device("meta"):
        module = build(name, shape, classes, 0, pretrained=False)
    assert f"{sum(p.numel() for p in module.parameters()):,}" == count
    assert count in NAMES[name]


@pytest.mark.parametrize("name", TINY)
def test_no_dropout_no_state_and_seeds(name: str) -> None:
    module = tiny(name, 1)
    x = example(name, 4)
    assert all(m.p == 0 for m in module.modules() if isinstance(m, nn.Dropout))
    assert torch.equal(module.train()(x), module.train()(x))
    torch.testing.assert_close(module.train()(x), module.eval()(x))
    refuse_unclipped_state(module, x)
    vectors = [nn.utils.parameters_to_vector(tiny(name, s).parameters()) for s in (1, 1, 2)]
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_the_text_wrapper_equals_transformers_own_mask_and_positions() -> None:
    module = tiny("roberta-base")
    ids = example("roberta-base", 4)
    expected = module.body(input_ids=ids, attention_mask=(ids != 1).long()).logits
    torch.testing.assert_close(module(ids), expected)
    torch.testing.assert_close(module(ids[:, :5]), expected)


def test_the_image_wrapper_resizes_and_repeats_a_grey_channel() -> None:
    module = tiny("vit-base")
    x = example("vit-base", 2)
    assert torch.equal(module(x), module(F.interpolate(x, size=(16, 16), mode="bilinear", align_corners=False)))
    grey = x[:, :1]
    assert torch.equal(module(grey), module(grey.repeat(1, 3, 1, 1)))
    torch.testing.assert_close(module(x.to(memory_format=torch.channels_last)), module(x))


@pytest.mark.parametrize("train", ["all", "lora"])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_clients_under_vmap_equal_single_calls(name: str, train: str) -> None:
    module = tiny(name, train=train)
    check_gradients(example(name, 3, 2), torch.tensor([[0, 1], [2, 0], [1, 1]]), module)


@pytest.mark.parametrize("name", TINY)
def test_what_is_trained(name: str) -> None:
    def trained(**options: Any) -> list[str]:
        return [key for key, p in tiny(name, **options).named_parameters() if p.requires_grad]

    assert len(trained()) == len(list(tiny(name).parameters()))
    head = trained(train="head")
    assert head and all("classifier" in key for key in head)
    lora = trained(train="lora", rank=2)
    adapters = [key for key in lora if "lora_" in key]
    assert set(lora) == {*head, *adapters}
    assert len(adapters) == 2 * 2 * 2  # layers x (query, value) x (A, B)
    torch.testing.assert_close(tiny(name, train="lora")(example(name, 2)).shape, torch.Size([2, 3]))


@pytest.mark.parametrize("name", TINY)
def test_a_local_folder_round_trip(name: str, tmp_path: Path) -> None:
    module = tiny(name)
    module.body.save_pretrained(tmp_path)
    shape, _ = TINY[name]
    again = build(name, shape, 3, 99, path=str(tmp_path))
    assert again.training
    x = example(name, 2)
    torch.testing.assert_close(again(x), module(x))
    other = [build(name, shape, 5, seed, path=str(tmp_path)) for seed in (1, 1, 2)]
    assert other[0](x).shape == (2, 5)
    assert torch.equal(other[0](x), other[1](x))
    assert not torch.equal(other[0](x), other[2](x))


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("vit-base", (3, 8, 8), {"config": {"hiden_size": 4}}, "Did you mean hidden_size?"),
        ("vit-base", (3, 8, 8), {"train": "heads"}, "Did you mean head?"),
        ("vit-base", (4, 8, 8), {}, "1 or 3 channels"),
        ("vit-base", (3, 8, 8), {"pretrained": True}, "model.config"),
        ("vit-base", (3, 8, 8), {"path": "no/such/folder"}, "model.path: found no/such/folder"),
        ("roberta-base", (11,), {}, "at most 10 ids"),
        ("roberta-base", (3, 8, 8), {}, "sequences of ids"),
    ],
)
def test_errors(name: str, shape: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        build(name, shape, 3, 0, **{"pretrained": False, "config": TINY[name][1], **options})
    assert words in str(error.value)


def test_an_empty_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no readable weights at"):
        build("vit-base", (3, 8, 8), 3, 0, path=str(tmp_path))
