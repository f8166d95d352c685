"""Rows of C⁻¹Z: their law, drawn again in any order, and exact on a grid."""

import numpy as np
import pytest
import torch

from fedflat.core.checks import InputError
from fedflat.core.discrete import SecureBits, rounded_gaussian
from fedflat.core.factors import PLACES
from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Broadcast
from fedflat.methods.noise import CHUNK, MOST_BITS, CorrelatedGridNoise, CorrelatedNoise
from fedflat.privacy.accounting.factorisation import factor_for

KEY, SIZE, ROUNDS = bytes(range(32)), 70_000, 9
FACTOR = factor_for("toeplitz", ROUNDS, 3)


def broadcast(round: int = 0, mask: torch.Tensor | None = None, size: int = SIZE) -> Broadcast:
    return Broadcast(round, torch.zeros(size), 1.0, 1.0, mask=mask)


def aggregate(size: int = SIZE, exact: np.ndarray | None = None) -> Aggregate:
    return Aggregate(torch.zeros(size), 4, 0.0, torch.zeros(4), torch.ones(4), exact=exact)


def twice(bound: float) -> float:
    return 2 * bound


def nothing(bound: float) -> float:
    return 0.0


def test_rows_are_those_of_one_z() -> None:
    noise = CorrelatedNoise(twice, factor=FACTOR)
    assert noise.encoder(KEY, broadcast(), 0.5, SIZE) is None
    rows = torch.stack([noise.noise(KEY, t, broadcast(t), aggregate(), 0.5) for t in range(ROUNDS)])
    z = torch.from_numpy(FACTOR.matrix) @ rows.double()
    drawn = [stream(KEY, "noise", t).standard_normal(SIZE, dtype=np.float32) for t in range(ROUNDS)]
    np.testing.assert_allclose(z.numpy(), np.stack(drawn), atol=2e-5)
    for t in range(ROUNDS):
        assert float(rows[t].std()) == pytest.approx(noise.row_norm(t) * noise.total_std(0.5, 3), rel=0.02)


def test_a_row_depends_on_nothing_but_key_and_round() -> None:
    """Whatever was drawn before it, and whichever rows come first: a run that was killed gets the same bits."""
    noise = CorrelatedNoise(twice, factor=FACTOR)
    forwards = [noise.unit(KEY, t, 100) for t in range(ROUNDS)]
    backwards = [CorrelatedNoise(twice, factor=FACTOR).unit(KEY, t, 100) for t in reversed(range(ROUNDS))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards))
    assert torch.equal(noise.unit(KEY, 4, SIZE)[:100], forwards[4])
    assert not torch.equal(noise.unit(bytes(32), 4, 100), forwards[4])
    drawn = noise.drawn_ahead(KEY, 4, SIZE).noise(KEY, 4, broadcast(4), aggregate(), 0.5)
    assert torch.equal(drawn, noise.noise(KEY, 4, broadcast(4), aggregate(), 0.5))


def test_masks_and_no_noise() -> None:
    noise, mask = CorrelatedNoise(twice, factor=FACTOR), torch.arange(SIZE) % 2 == 0
    masked = noise.noise(KEY, 2, broadcast(2, mask), aggregate(), 0.5)
    assert torch.equal(masked, torch.where(mask, noise.noise(KEY, 2, broadcast(2), aggregate(), 0.5), 0.0))
    assert not CorrelatedNoise(nothing, factor=FACTOR).noise(KEY, 2, broadcast(2), aggregate(), 0.5).any()
    with pytest.raises(InputError, match="one constant clip"):
        noise.noisy_count(KEY, 0, aggregate())


@pytest.mark.parametrize("kind", ["toeplitz", "banded", "tree"])
def test_grid_release_is_a_function_of_the_continuous_mechanism(kind: str) -> None:
    """R from X and the draws is R from ⌊2¹⁶(CX + Z)⌉ alone, in whole numbers, over several chunks."""
    factor = factor_for(kind, ROUNDS, 3)
    noise, size = CorrelatedGridNoise(twice, factor=factor), CHUNK + 5
    grid = noise.grid(0.5, size)
    assert grid.log2_std <= MOST_BITS
    x = np.random.default_rng(0).integers(-(10**6), 10**6, size=(ROUNDS, size))
    sums = [aggregate(size, exact) for exact in x]
    released = [noise.release(KEY, broadcast(t, size=size), sums[t], 0.5).double().numpy() for t in range(ROUNDS)]
    bits = grid.log2_std + PLACES
    z = np.stack(
        [
            np.concatenate(
                [rounded_gaussian(bits, n, SecureBits(KEY, "correlated noise", t, c)) for c, n in ((0, CHUNK), (1, 5))]
            )
            for t in range(ROUNDS)
        ]
    )
    c = np.rint(factor.matrix * 2.0**PLACES).astype(object)
    seen = c @ x.astype(object) + z.astype(object)
    r: list[np.ndarray] = []
    for t in range(ROUNDS):
        left = seen[t] - sum((c[t, u] * r[u] for u in range(t)), start=np.zeros(size, dtype=object))
        r.append((2 * left + c[t, t]) // (2 * c[t, t]))
        np.testing.assert_allclose(released[t], np.array(r[t], dtype=np.float64) * grid.pitch, rtol=1e-6)
    rows = np.stack([noise.release(KEY, broadcast(t, size=size), aggregate(size), 0.5).numpy() for t in range(ROUNDS)])
    assert rows.std(axis=1) == pytest.approx(np.array([noise.row_norm(t) * 1.0 for t in range(ROUNDS)]), rel=0.05)


def test_grid_masks() -> None:
    noise, mask = CorrelatedGridNoise(twice, factor=FACTOR), torch.arange(50) % 2 == 0
    drawn = noise.release(KEY, broadcast(3, mask, 50), aggregate(50), 0.5)
    assert torch.equal(drawn, torch.where(mask, noise.release(KEY, broadcast(3, None, 50), aggregate(50), 0.5), 0.0))
