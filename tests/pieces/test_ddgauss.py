"""The distributed discrete Gaussian: what clients may send, what the server may learn, and how well."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import linalg

from fedflat.core.checks import InputError
from fedflat.core.discrete import SecureBits, default_granularity, exact_square
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast
from fedflat.methods.ddgauss import DistributedDiscreteGaussian, SharedDiscreteNoise, hadamard

torch.set_num_threads(1)


def mechanism(**changes) -> DistributedDiscreteGaussian:
    numbers = {"dimension": 100, "clip": 1.0, "noise_multiplier": 1.0, "min_cohort": 8, "bits": 16} | changes
    messages = numbers.pop("messages", 10)
    if numbers.get("granularity") is None:
        names = ("clip", "noise_multiplier", "dimension", "min_cohort")
        numbers["granularity"] = default_granularity(*map(numbers.get, names), messages, numbers["bits"])
    return DistributedDiscreteGaussian(**numbers)


def updates(n: int, d: int, norm: float = 1.0) -> torch.Tensor:
    raw = torch.from_numpy(stream(1, "updates").standard_normal((n, d)).astype(np.float32))
    return raw / raw.norm(dim=1, keepdim=True) * norm


def run(mech: DistributedDiscreteGaussian, rows: torch.Tensor) -> torch.Tensor:
    """One round: every client encodes, the messages are added modulo 2^b, the server decodes."""
    signs = mech.signs(stream(0, "rotation"))
    messages = [
        mech.encode(row, signs, stream(0, "rounding", i), SecureBits(bytes(32), "noise", i))
        for i, row in enumerate(rows)
    ]
    return mech.decode(sum(messages), signs)


@pytest.mark.parametrize("size", [1, 2, 8, 256])
def test_hadamard_is_the_orthonormal_transform(size):
    x = stream(2, "x").standard_normal(size)
    assert np.allclose(hadamard(x), linalg.hadamard(size) @ x / math.sqrt(size))
    assert np.allclose(hadamard(hadamard(x)), x)


@pytest.mark.parametrize("dimension", [1, 100, 128, 129])
def test_without_noise_the_sum_comes_back_up_to_rounding(dimension):
    mech = mechanism(dimension=dimension, noise_multiplier=0.0)
    rows = updates(10, dimension, 0.7)
    assert (run(mech, rows) - rows.sum(0)).abs().max() < 5 * mech.granularity * math.sqrt(10 / 4) + 1e-6


def test_rounding_is_unbiased():
    mech = mechanism(dimension=16, granularity=0.05, noise_multiplier=0.2)
    row = updates(1, 16, 0.5)[0]
    signs = mech.signs(stream(0, "rotation"))
    grids = np.stack([mech.round_to_grid(row, signs, stream(0, "rounding", i)) for i in range(1500)])
    exact = hadamard(row.numpy().astype(np.float64) * signs) / mech.granularity
    assert np.abs(grids.mean(0) - exact).max() < 5 * 0.5 / math.sqrt(1500)


ADVERSARIAL = {
    "huge": torch.full((100,), 3e38), "one huge": torch.cat([torch.tensor([1e38]), torch.zeros(99)]),
    "nan": torch.cat([torch.tensor([float("nan")]), torch.ones(99)]), "inf": torch.full((100,), float("inf")),
    "at the clip": torch.full((100,), 0.1), "just above": torch.full((100,), 0.1000001), "zero": torch.zeros(100),
    "denormal": torch.full((100,), 1e-45),
}  # fmt: skip


@pytest.mark.parametrize("granularity", [None, 0.05])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_update_exceeds_the_accounted_norm(name, granularity):
    mech = mechanism(granularity=granularity, beta=0.9)
    signs = mech.signs(stream(0, "rotation"))
    grids = [mech.round_to_grid(ADVERSARIAL[name], signs, stream(0, "rounding", i)) for i in range(50)]
    assert max(exact_square(grid) for grid in grids) <= mech.norm_limit
    if name in ("nan", "inf", "zero"):
        assert not np.any(grids)


def test_broken_twin_unconditional_rounding_exceeds_the_accounted_norm():
    mech = mechanism(dimension=128, granularity=0.05, beta=0.9)
    x = hadamard(np.full(128, 1 / math.sqrt(128)) * mech.signs(stream(0, "rotation"))) / mech.granularity
    norms = []
    for i in range(200):
        norms.append(exact_square(np.floor(x + stream(0, "twin", i).random(128)).astype(np.int64)))
    assert max(norms) > mech.norm_limit


def test_a_non_finite_update_is_still_noised():
    mech = mechanism()
    signs = mech.signs(stream(0, "rotation"))
    assert len(np.unique(mech.encode(ADVERSARIAL["nan"], signs, stream(0, "rounding"), stream(0, "noise")))) > 20


def test_messages_are_reduced_and_their_sum_is_modular():
    mech = mechanism(bits=12)
    signs = mech.signs(stream(0, "rotation"))
    rows = [mech.encode(u, signs, stream(0, "r", i), stream(0, "n", i)) for i, u in enumerate(updates(10, 100))]
    assert min(r.min() for r in rows) >= 0 and max(r.max() for r in rows) < 2**12
    assert (np.concatenate(rows) > 2**11).any()
    total = mech.wrap(sum(rows))
    assert np.array_equal(total, sum(rows) % 2**12)
    assert np.array_equal(total, mech.wrap(mech.wrap(sum(rows[:3])) + mech.wrap(sum(rows[3:]))))
    assert np.array_equal(mech.decode(total, signs), mech.decode(total + 5 * 2**12, signs))


def test_noise_is_on_every_rotated_coordinate_when_nobody_has_data():
    mech = mechanism(dimension=100)
    shares = np.stack([mech.shares(1, stream(0, "noise", i)) for i in range(400)])
    assert shares.shape == (400, 128)
    assert np.allclose(shares.std(0), math.sqrt(mech.share_variance), rtol=0.2)


def test_default_granularity_leaves_four_standard_deviations():
    """Equal updates at the clip, the worst case of the formula: the sum does not wrap; at an eighth of it, it does."""
    d, n = 1024, 50
    one = updates(1, d)[0]
    for bits in (10, 16):
        mech = mechanism(dimension=d, min_cohort=20, messages=n, bits=bits)
        error = (run(mech, one.repeat(n, 1)) - n * one).numpy()
        assert error.std() == pytest.approx(math.sqrt(n / 20 + n * mech.granularity**2 / 4), rel=0.15)
    signal, noise = (n * 1.0) ** 2 / d, n / 20
    assert (2**15 * mech.granularity / math.sqrt(signal + noise + n * mech.granularity**2 / 4)) == pytest.approx(4.0)
    silent = mechanism(dimension=d, min_cohort=20, messages=n, noise_multiplier=0.0)
    tight = mechanism(dimension=d, min_cohort=20, messages=n, noise_multiplier=0.0, granularity=silent.granularity / 8)
    fits, wraps = ((run(mech, one.repeat(n, 1)) - n * one).std() for mech in (silent, tight))
    assert wraps > 100 * fits


def rounded(*rows: torch.Tensor) -> np.ndarray:
    """The sum of these messages as one round encodes it, modulo 2^8, before its noise."""
    noise = SharedDiscreteNoise(mechanism(bits=8), seed=0, shares=10)
    encode, _ = noise.encoder(bytes(32), Broadcast(0, torch.zeros(100), 1.0, 1.0), 1.0, 100)
    return noise.mechanism.wrap(sum(encode(row[None]) for row in rows))


def test_a_message_rounds_alike_whoever_else_is_there(monkeypatch):
    a, b, c = updates(3, 100, 0.3).double()

    def alike() -> bool:
        return np.array_equal((rounded(a, b, b, c) - rounded(b, b, c)) % 2**8, rounded(a))

    assert alike() and not np.array_equal((rounded(b, b) - rounded(b)) % 2**8, rounded(b)), "equal ones round apart"
    same = SimpleNamespace(sha256=lambda text: SimpleNamespace(digest=bytes))
    monkeypatch.setattr("fedflat.methods.ddgauss.hashlib", same)
    assert not alike(), "the twin: bits that follow a message's place among all"


def test_the_rotation_is_public_and_shared():
    mech = mechanism()
    assert np.array_equal(mech.signs(stream(3, "rotation", 1)), mech.signs(stream(3, "rotation", 1)))
    assert not np.array_equal(mech.signs(stream(3, "rotation", 1)), mech.signs(stream(3, "rotation", 2)))
    assert set(np.unique(mech.signs(stream(3, "rotation", 1)))) == {-1.0, 1.0}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"bits": 1, "granularity": 0.05}, "bits: found 1; allowed: a whole number ≥ 2"),
        ({"clip": 0.0}, "clip: found 0;"),
        ({"beta": 1.0}, "beta: found 1;"),
        ({"granularity": 1.0}, "One share has std 0.35 grid steps"),
        ({"bits": 5, "dimension": 10**6, "messages": 50}, "One share has std|at least"),
        ({"granularity": 1e-20}, "clip/granularity"),
    ],
)
def test_error_sentences(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        mechanism(**changes)


def test_shapes_are_checked():
    mech = mechanism()
    signs = mech.signs(stream(0, "rotation"))
    with pytest.raises(InputError, match=r"shape of the update: found \[99\]; allowed: \[100\]"):
        mech.round_to_grid(torch.zeros(99), signs, stream(0, "r"))
    with pytest.raises(InputError, match="bits: found 2; allowed: at least 6"):
        default_granularity(1.0, 1.0, 10, 8, 50, 2)


def test_the_norm_limit_holds_even_if_rounding_gives_up(monkeypatch):
    from fedflat.methods import ddgauss

    monkeypatch.setattr(ddgauss, "MAX_TRIES", 0)
    mech = mechanism(granularity=0.05)
    signs = mech.signs(stream(0, "rotation"))
    for update in (torch.full((100,), 0.1), torch.full((100,), 3e38)):
        steps = mech.round_to_grid(update, signs, stream(0, "rounding"))
        assert steps.any() and exact_square(steps) <= mech.norm_limit


def test_a_rounded_message_is_hardly_longer_than_the_clip():
    assert 1.0 <= SharedDiscreteNoise(mechanism(granularity=0.001), seed=0, shares=1).longest(1.0) <= 1.5


def test_a_clients_message_carries_its_own_noise():
    noise, broadcast = SharedDiscreteNoise(mechanism(), seed=0, shares=8), Broadcast(0, torch.zeros(100), 1.0, 1.0)
    first, same, other = (noise.message(updates(1, 100)[0], broadcast, bytes([key]) * 32) for key in (1, 1, 2))
    assert np.array_equal(first, same) and not np.array_equal(first, other)
