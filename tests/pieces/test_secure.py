"""Grid noise: exact sensitivity, exact law, and no trace of floating point in what is released."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fedflat.core.checks import InputError
from fedflat.core.discrete import SecureBits, exact_square
from fedflat.core.rng import stream
from fedflat.pieces.mechanisms import GridGaussian

torch.set_num_threads(1)
KEY = bytes(32)

ROWS = {
    "at the clip": torch.full((64,), 0.125), "just above": torch.full((64,), 0.12500002),
    "uneven": torch.linspace(-1, 1, 64) / torch.linspace(-1, 1, 64).norm(), "huge": torch.full((64,), 3e38),
    "one huge": torch.cat([torch.tensor([-3e38]), torch.ones(63)]),
    "nan": torch.cat([torch.tensor([float("nan")]), torch.ones(63)]), "inf": torch.full((64,), -float("inf")),
    "denormal": torch.full((64,), 1e-45), "zero": torch.zeros(64),
}  # fmt: skip


@pytest.mark.parametrize("bits", [None, 0, 3, 30])
@pytest.mark.parametrize("std", [0.3, 1.0, 7.7])
def test_quantised_norms_never_exceed_the_clip(bits, std):
    grid = GridGaussian(1.0, std, 64, bits)
    limit = (Fraction(1.0) / Fraction(grid.pitch)) ** 2
    for name, row in ROWS.items():
        steps = grid.quantize(row)
        assert exact_square(steps) <= limit, name
        if name in ("nan", "inf", "zero"):
            assert not steps.any()


def test_broken_twin_rounding_alone_exceeds_the_clip():
    grid = GridGaussian(1.0, 1.0, 10_000, 7)  # C/g = 128, each entry 1.28 steps... at 1.6 they round up to 2
    row = torch.zeros(10_000)
    row[: 80**2] = 1.0 / 80
    assert exact_square(np.rint(row.double().numpy() / grid.pitch).astype(np.int64)) > grid.norm_limit
    assert exact_square(grid.quantize(row)) <= grid.norm_limit


@pytest.mark.parametrize("dimension, std", [(10, 1.0), (10_000, 1.0), (200_000, 5.0)])
def test_the_default_grid_hardly_changes_an_update(dimension, std):
    grid = GridGaussian(2.0, std * 2.0, dimension)
    row = torch.from_numpy(stream(1, "row").standard_normal(dimension).astype(np.float32))
    row = row / row.norm() * 2.0
    back = grid.to_float(grid.quantize(row))
    assert (back - row).norm() / 2.0 < 0.07
    assert abs(float(torch.dot(back, row) / torch.dot(row, row)) - 1) < 0.003


def test_blocks_and_single_vectors_agree():
    grid = GridGaussian(1.0, 1.0, 64)
    steps = grid.quantize(torch.stack(list(ROWS.values())))
    assert steps.shape == (len(ROWS), 64) and steps.dtype == np.int64
    assert all(np.array_equal(steps[i], grid.quantize(row)) for i, row in enumerate(ROWS.values()))
    assert grid.quantize(torch.zeros(0, 64)).shape == (0, 64)


def test_release_is_the_rounded_continuous_mechanism():
    """On a coarse grid the law of the release equals that of ⌊s + N(0, σ²)⌉, which carries the plain Gaussian's ε."""
    released = GridGaussian(1.0, 1.0, 200_000, 1).perturb(np.full(200_000, 3), SecureBits(KEY, "law"))
    x = np.arange(-3, 10)
    expected = stats.norm.cdf((x - 3 + 0.5) / 2) - stats.norm.cdf((x - 3 - 0.5) / 2)
    seen = np.array([(released == v).sum() for v in x])
    assert (
        stats.chisquare(np.append(seen, released.size - seen.sum()), _with_rest(expected) * released.size).pvalue > 1e-4
    )
    # The discrete Gaussian of the same parameter is another law, to which the continuous one's ε does not apply.
    twin = np.exp(-((x - 3) ** 2) / 8) / math.sqrt(8 * math.pi)
    assert stats.chisquare(np.append(seen, released.size - seen.sum()), _with_rest(twin) * released.size).pvalue < 1e-4


def _with_rest(probabilities: np.ndarray) -> np.ndarray:
    return np.append(probabilities, 1 - probabilities.sum())


def test_the_noise_is_the_same_whatever_the_sum():
    grid = GridGaussian(1.0, 1.0, 50)
    zero, other = np.zeros(50, dtype=np.int64), stream(1, "sum").integers(-(2**40), 2**40, 50)
    first, second = (grid.perturb(total, SecureBits(KEY, "noise")) - total for total in (zero, other))
    assert np.array_equal(first, second)


def test_low_bits_tell_nothing_where_floating_point_noise_tells_all():
    """Mironov's attack: the set of reachable outputs depends on the sum under float noise, not on the grid."""
    n = 2000
    gauss = stream(1, "float").standard_normal(n, dtype=np.float32)
    reachable = [np.mean((np.float32(s) + gauss) * 2.0**16 % 1 == 0) for s in (0.0, 1024.0)]
    assert reachable[1] - reachable[0] > 0.8  # one look at the low bits names the world
    grid = GridGaussian(1.0, 1.0, n)
    for total in (np.zeros(n, dtype=np.int64), np.full(n, round(1024 / grid.pitch))):
        counts = np.bincount(grid.perturb(total, SecureBits(KEY, "attack")) & 7, minlength=8)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_the_pitch_is_an_exact_fraction_of_the_std():
    grid = GridGaussian(1.0, 0.95, 1000)
    assert Fraction(grid.pitch) * 2**grid.log2_std == Fraction(0.95)
    assert GridGaussian(1.0, 1.0, 10**7).log2_std > GridGaussian(1.0, 1.0, 10).log2_std == 12


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((0.0, 1.0, 3), "clip: found 0;"),
        ((1.0, 0.0, 3), "std/clip on the noise grid: found 0;"),
        ((1.0, float("nan"), 3), "std/clip on the noise grid: found nan"),
        ((1.0, 2.0**30, 3), "std/clip on the noise grid"),
    ],
)
def test_error_sentences(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        GridGaussian(*arguments)


@pytest.mark.parametrize("attempts", [0, 1])
def test_the_norm_limit_holds_even_if_rounding_gives_up(monkeypatch, attempts):
    from fedflat.pieces import mechanisms

    monkeypatch.setattr(mechanisms, "ATTEMPTS", attempts)
    grid = GridGaussian(1.0, 1.0, 10_000, 7)
    row = torch.zeros(10_000)
    row[: 80**2] = 1.0 / 80
    assert exact_square(grid.quantize(row)) <= grid.norm_limit
    tiny = GridGaussian(1.0, 1.0, 4, 0)  # limit 1: half of (1, 1, 1, 1)·C cut towards zero is the zero vector
    assert exact_square(tiny.quantize(torch.ones(4))) <= tiny.norm_limit
