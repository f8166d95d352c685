"""Named image models: the papers' sizes, layouts, vmap, seeds."""

import pytest
import torch
from blocks import check_gradients
from torch import nn
from torch.nn import functional as F

from fedflat.core.checks import InputError
from fedflat.models import NAMES, build, refuse_unclipped_state

torch.set_num_threads(1)

IMAGES = {
    "linear": ((1, 8, 8), {}), "mlp": ((1, 8, 8), {"hidden": [12, 7]}), "cnn": ((1, 18, 16), {"hidden": 8}),
    "cnn-2-layers": ((1, 9, 8), {"hidden": 8}), "cnn-3": ((3, 22, 24), {}),
    "resnet10": ((3, 8, 8), {"width": 8, "groups": 4}), "resnet18": ((3, 8, 8), {"width": 4, "groups": 2}),
}  # fmt: skip
COUNTS = [
    ("linear", (1, 28, 28), 10, 7_850, 2), ("mlp", (1, 28, 28), 10, 50_890, 4), ("cnn", (1, 28, 28), 62, 608_702, 8),
    ("cnn-2-layers", (1, 28, 28), 62, 1_206_590, 8), ("cnn-3", (3, 32, 32), 10, 667_402, 12),
    ("resnet10", (3, 32, 32), 10, 4_903_242, 38), ("resnet18", (3, 32, 32), 10, 11_173_962, 62),
]  # fmt: skip


def small(name: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    shape, options = IMAGES[name]
    return build(name, shape, 5, seed, **options), torch.randn(4, *shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("name", "shape", "classes", "count", "tensors"), COUNTS)
def test_the_stated_number_of_parameters_and_tensors(
    name: str, shape: tuple[int, ...], classes: int, count: int, tensors: int
) -> None:
    module = build(name, shape, classes, 0)
    assert sum(p.numel() for p in module.parameters()) == count
    assert len(list(module.parameters())) == tensors
    assert not list(module.buffers())
    assert f"{count:,}" in NAMES[name]


def test_cnn_3_computes_the_layers_of_the_paper() -> None:
    module, x = small("cnn-3")
    p = list(module.parameters())
    y = x
    for w, b in zip(p[0:6:2], p[1:6:2]):
        y = F.max_pool2d(F.relu(F.conv2d(y, w, b)), 2)
    y = y.reshape(len(x), -1)
    for w, b in zip(p[6:10:2], p[7:10:2]):
        y = F.relu(y @ w.T + b)
    torch.testing.assert_close(module(x), y @ p[10].T + p[11], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", [22, 23, 27, 32, 33])
def test_what_no_pooling_keeps_is_not_looked_at_and_nothing_else(side: int) -> None:
    module = build("cnn-3", (3, side, side + 3), 5, 0)
    x = torch.randn(2, 3, side, side + 3, generator=torch.Generator().manual_seed(1))
    found, seen = module(x), module.seen
    module.seen = (side, side + 3)
    torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-6)
    module.seen = (seen[0] - 1, seen[1])  # the twin: one row more left out changes sizes, or numbers
    with pytest.raises((RuntimeError, AssertionError)):
        torch.testing.assert_close(found, module(x))


@pytest.mark.parametrize("name", IMAGES)
def test_memory_formats_agree(name: str) -> None:
    module, x = small(name)
    strided = x.to(memory_format=torch.channels_last)
    expected = module(x)
    torch.testing.assert_close(module(strided), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.to(memory_format=torch.channels_last)(strided), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", IMAGES)
def test_three_clients_under_vmap_equal_three_calls(name: str) -> None:
    shape, _ = IMAGES[name]
    x = torch.randn(3, 2, *shape, generator=torch.Generator().manual_seed(1))
    check_gradients(x, torch.tensor([[0, 1], [2, 3], [4, 0]]), *(small(name, seed)[0] for seed in range(3)))


@pytest.mark.parametrize("name", IMAGES)
def test_weights_come_from_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    one = nn.utils.parameters_to_vector(small(name, 3)[0].parameters())
    torch.rand(5)
    again = nn.utils.parameters_to_vector(small(name, 3)[0].parameters())
    other = nn.utils.parameters_to_vector(small(name, 4)[0].parameters())
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.set_rng_state(before)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    build("mlp", (4,), 2, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", IMAGES)
def test_named_models_hold_no_unclipped_state(name: str) -> None:
    refuse_unclipped_state(*small(name))


def test_linear_may_end_in_one_output_and_takes_any_shape() -> None:
    assert build("linear", (2, 3, 4, 5), 1, 0)(torch.zeros(2, 2, 3, 4, 5)).shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("cnn", (1, 8, 8), {}, "8 × 8; allowed: at least 16 × 16"),
        ("cnn-2-layers", (1, 5, 9), {}, "at least 6 × 6"),
        ("cnn-3", (3, 21, 32), {}, "at least 22 × 22"),
        ("resnet18", (3, 4, 4), {}, "at least 8 × 8"),
        ("resnet18", (3, 32), {}, "allowed: images (channels, height, width)"),
        ("resnet10", (3, 8, 8), {"groups": 7}, "a divisor of the first stage's 64 channels"),
        ("mlp", (4,), {"hidden": 0}, "model.hidden: found 0"),
        ("mlp", (4,), {"hidden": None}, "model.hidden: found None"),
        ("mlp", (0,), {}, "model: input shape: found 0"),
    ],
)
def test_impossible_sizes_are_one_clear_sentence(
    name: str, shape: tuple[int, ...], options: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as error:
        build(name, shape, 10, 0, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "side"), [("cnn", 16), ("cnn-2-layers", 6), ("cnn-3", 22)])
def test_the_smallest_stated_image_works(name: str, side: int) -> None:
    assert build(name, (1, side, side), 3, 0)(torch.zeros(2, 1, side, side)).shape == (2, 3)
