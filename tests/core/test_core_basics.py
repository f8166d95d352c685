"""Flat layouts, named streams and error sentences."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedflat.core import checks, rng
from fedflat.core.checks import InputError
from fedflat.core.loss import CROSS_ENTROPY, IGNORE, weighted_mean
from fedflat.core.params import flatten, layout_of, put
from fedflat.pieces.transforms import count_of


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 5))


def test_everything_is_shared_without_a_head() -> None:
    layout = layout_of(network())
    assert layout.names == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    assert layout.size == layout.dimension == 12 + 4 + 8 + 2 + 10 + 5
    assert layout.span("personal") == slice(41, 41)
    assert layout.tensors("shared") == layout.tensors("all")


@pytest.mark.parametrize(
    ("head", "personal"),
    [
        ((), ("4.weight", "4.bias")),
        (("2",), ("2.weight", "2.bias")),
        (("*.bias",), ("0.bias", "2.bias", "4.bias")),
        (("0.weight", "4"), ("0.weight", "4.weight", "4.bias")),
    ],
)
def test_the_head_comes_last(head: tuple[str, ...], personal: tuple[str, ...]) -> None:
    layout = layout_of(network(), head)
    assert layout.names[layout.shared :] == personal
    assert layout.span("shared").stop == layout.span("personal").start == layout.dimension
    assert layout.tensors("personal")[0].start == layout.dimension
    assert layout.tensors("all") == layout.tensors("shared") + layout.tensors("personal")


def test_flatten_and_views_are_inverse() -> None:
    module, other = network(), network()
    layout = layout_of(module, ())
    vector = flatten(module, layout)
    assert vector.shape == (layout.size,) and vector.dtype == torch.float32
    put(other, dict(layout.views(vector)), "a module", "another")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))
    vector.zero_()
    assert bool(flatten(module, layout).any())  # a copy
    assert bool(other[0].weight.any())  # copies too


def test_views_are_the_parameters_shapes_for_blocks_too() -> None:
    layout = layout_of(network())
    for name, view in layout.views(flatten(network(), layout).repeat(3, 1)):
        assert view.shape == (3, *dict(network().named_parameters())[name].shape)


def test_frozen_parameters_are_not_in_the_vector() -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    assert "0.weight" not in layout_of(module).names


@pytest.mark.parametrize(
    ("module", "head", "sentence"),
    [
        (network(), ("4.wieght",), r"algorithm\.head: found 4\.wieght; .*Did you mean 4\.weight\?"),
        (network(), ("*",), "leave at least one shared"),
        (nn.Tanh(), None, "no trainable parameter"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), (), "without a linear layer"),
    ],
)
def test_impossible_layouts_are_refused(module: nn.Module, head: tuple[str, ...] | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        layout_of(module, head)


def test_streams_depend_on_every_part_of_their_name() -> None:
    names = [(0, "a", 1, 2), (1, "a", 1, 2), (0, "b", 1, 2), (0, "a", 2, 2), (0, "a", 1, 3), (0, "a", 12), (0, "a1", 2)]
    names += [(b"0", "a", 1, 2), (bytes(32), "a", 1, 2)]
    drawn = [rng.stream(key, purpose, *index).integers(2**63) for key, purpose, *index in names]
    assert len(set(drawn)) == len(names)
    assert [rng.stream(key, purpose, *index).integers(2**63) for key, purpose, *index in names] == drawn


def test_a_stream_is_pinned() -> None:
    """Old runs can be resumed: the streams never change."""
    assert rng.stream(0, "batches", 3, 4).integers(10**9, size=2).tolist() == PINNED


PINNED = [642002548, 133330584]


def test_streams_are_uniform_and_uncorrelated() -> None:
    first = np.concatenate([rng.stream(9, "x", i).random(4) for i in range(3000)])
    assert stats.kstest(first, "uniform").pvalue > 1e-6
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


def test_keys() -> None:
    assert len(rng.fresh_key()) == rng.KEY_BYTES
    assert rng.fresh_key() != rng.fresh_key()
    key = rng.noise_key(1, "recipe", "data")
    assert key == rng.noise_key(1, "recipe", "data") and len(key) == rng.KEY_BYTES
    others = [rng.noise_key(2, "recipe", "data"), rng.noise_key(1, "recipe", "other")]
    others += [
        rng.noise_key(1, "recipeda", "ta"), rng.noise_key(1, "recipe", "data", attempt=2),
        rng.noise_key(key, "recipe", "data"),
    ]  # fmt: skip
    assert len({key, *others}) == 6


def test_torchs_generator_is_put_back() -> None:
    before = torch.get_rng_state()
    with rng.seeded_torch(3, "init"):
        first = torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    with rng.seeded_torch(3, "init"):
        assert torch.equal(first, torch.rand(3))
    with pytest.raises(ValueError, match="inside"), rng.seeded_torch(3, "init"):
        raise ValueError("inside")
    assert torch.equal(before, torch.get_rng_state())


def test_the_error_sentence() -> None:
    error = checks.wrong("local.lr", -1, "a number > 0", hint="Try 0.1.")
    assert str(error) == "local.lr: found -1; allowed: a number > 0. Try 0.1."
    assert str(checks.wrong("a", "two\nlines", "b")) == "a: found two lines; allowed: b."
    assert checks.nearest("momentun", ["lr", "momentum"]) == "Did you mean momentum?"
    assert checks.nearest("xyz", ["lr", "momentum"]) == ""


@pytest.mark.parametrize("value", [0.5, 1, 0])
def test_numbers_in_range(value: float) -> None:
    assert checks.in_range("x", value, 0, 1) == value


@pytest.mark.parametrize(
    ("value", "options", "allowed"),
    [
        (0, {"low": 0, "open_low": True}, "a number > 0"),
        (1, {"low": 0, "high": 1, "open_high": True}, "a number ≥ 0 and < 1"),
        (math.nan, {}, "a number"),
        (math.inf, {}, "a number"),
        (True, {}, "a number"),
        ("1", {"high": 3}, "a number ≤ 3"),
        (None, {}, "a number"),
    ],
)
def test_numbers_out_of_range(value: object, options: dict[str, float], allowed: str) -> None:
    with pytest.raises(InputError, match=f"^x: found .*; allowed: {allowed}[.]$"):
        checks.in_range("x", value, **options)  # type: ignore[arg-type]


def test_whole_numbers_and_names() -> None:
    assert checks.whole("x", 3, 1, 3) == 3
    assert checks.one_of("x", "b", iter(["a", "b"])) == "b"
    for value in (2.0, True, -1, "1", None):
        with pytest.raises(InputError, match="a whole number ≥ 0"):
            checks.whole("x", value)
    with pytest.raises(InputError, match="≥ 1 and ≤ 3"):
        checks.whole("x", 4, 1, 3)
    with pytest.raises(InputError, match=r"allowed: sgd, adam[.] Did you mean adam[?]"):
        checks.one_of("x", "adm", ["sgd", "adam"])


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [
        (0.3, 10, 3), (1 - 0.7, 10, 3), (1 / 3, 3, 1), (2 / 3, 3, 2), (0.4, 7, 3), (1 - 0.7, 10**8, 3 * 10**7),
        (1, 5, 5), (0.0, 5, 0), (0.5, 0, 0), (1e-15, 5, 1),
    ],
)  # fmt: skip
def test_shares_count_what_was_meant(share: float, size: int, count: int) -> None:
    assert count_of(share, size) == count


def test_sequence_loss_counts_only_marked_tokens() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, IGNORE], [IGNORE, IGNORE, IGNORE]])
    loss, accuracy = CROSS_ENTROPY(logits, targets)
    expected = nn.functional.cross_entropy(logits[0, :2], targets[0, :2])
    torch.testing.assert_close(loss, torch.stack([expected, torch.tensor(0.0)]))
    assert float(accuracy[1]) == 0
    plain, right = CROSS_ENTROPY(logits[:, 0], torch.tensor([1, 3]))
    torch.testing.assert_close(plain, nn.functional.cross_entropy(logits[:, 0], torch.tensor([1, 3]), reduction="none"))
    assert right.tolist() == (logits[:, 0].argmax(-1) == torch.tensor([1, 3])).float().tolist()


def test_weighted_means() -> None:
    values = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    assert weighted_mean(values, None).tolist() == [2, 5]
    assert weighted_mean(values, torch.tensor([[1.0, 1, 0], [0, 0, 0]])).tolist() == [1.5, 0]


def test_many_streams_are_each_bit_for_bit_the_stream_of_that_name() -> None:
    names = [(0, 0), (5, 1), (10**9, 0), (5, 0)]
    drawn = [g.integers(0, 2**63, 4) for g in rng.Streams(3, "batches", 7).each(iter(names))]
    for name, found in zip(names, drawn, strict=True):
        assert np.array_equal(found, rng.stream(3, "batches", 7, *name).integers(0, 2**63, 4))
    assert list(rng.Streams(3, "batches").each([])) == []
