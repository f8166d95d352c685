"""C of correlated noise: its sensitivity against exhaustive search and pinned values of another library."""

import itertools
import math

import numpy as np
import pytest

from fedflat.core.checks import InputError
from fedflat.core.factors import Factor, cut, identity, on_grid, spaced_maximum, tree
from fedflat.privacy.accounting.factorisation import KINDS, factor_for, noise_in_model, workload

COEFFICIENTS = (1.0, 0.5, 0.375, 0.3125, 0.2734375)


def toeplitz(rounds: int, coefficients: tuple[float, ...] = COEFFICIENTS) -> Factor:
    return Factor(on_grid(cut(np.tile(np.array(coefficients), (rounds, 1)))))


def patterns(rounds: int, separation: int) -> list[tuple[int, ...]]:
    every = (p for n in range(1, rounds + 1) for p in itertools.combinations(range(rounds), n))
    return [p for p in every if all(b - a >= separation for a, b in itertools.pairwise(p))]


def moved_most(factor: Factor, separation: int, first: int = 0, last: int | None = None) -> float:
    """The largest ‖Σ c_t u_tᵀ‖ over patterns, for aligned u_t: the truth where CᵀC ≥ 0."""
    shown = [p for p in patterns(factor.rounds, separation) if first <= p[0] and p[-1] < (last or factor.rounds)]
    return max(float(np.linalg.norm(factor.matrix[:, p].sum(axis=1))) for p in shown)


@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_no_pattern_moves_more(kind: str, separation: int) -> None:
    """Every allowed pattern for small T; exact but for the tree, whose figure is a bound."""
    for rounds in (1, 6, 9):
        factor = factor_for(kind, rounds, separation)
        assert (factor.matrix.T @ factor.matrix >= 0).all()
        found, truth = factor.sensitivity(separation), moved_most(factor, separation)
        assert truth <= found
        assert found <= truth * (1.06 if kind == "tree" and separation > 1 else 1 + 1e-8)


def test_no_span_moves_more() -> None:
    for kind, first, last in itertools.product(KINDS, (0, 2, 5), (6, 9)):
        factor = factor_for(kind, 9, 3)
        assert moved_most(factor, 3, first, last) <= factor.sensitivity(3, first, last) <= factor.sensitivity(3)
        assert factor.sensitivity(3, last, first) == 0


def test_no_directions_move_more() -> None:
    """Signs and angles of the clients' vectors: columns of mixed signs are bounded by their absolute products."""
    rng = np.random.default_rng(0)
    factor = Factor(on_grid(cut(np.concatenate([np.ones((8, 1)), rng.normal(size=(8, 3))], axis=1))))
    for pattern in patterns(8, 2):
        for _ in range(5):
            u = rng.normal(size=(len(pattern), 3))
            u /= np.linalg.norm(u, axis=1, keepdims=True)
            assert np.linalg.norm(factor.matrix[:, pattern] @ u) <= factor.sensitivity(2)


@pytest.mark.parametrize(
    ("rounds", "separation", "known"),
    [
        (12, 5, 2.0919126733237454), (20, 5, 2.5004394145079782), (12, 2, 4.160623873366228),
        (20, 3, 4.002364413498289), (12, 1, 7.745998210769868),
    ],
)  # fmt: skip
def test_another_library_finds_the_same(rounds: int, separation: int, known: float) -> None:
    """jax-privacy's minsep_sensitivity_squared of the same coefficients, in float64."""
    assert toeplitz(rounds).sensitivity(separation) == pytest.approx(known, rel=3e-9)


def test_another_library_optimises_no_better() -> None:
    """jax-privacy's optimize_banded_toeplitz and banded.optimize at T = 40, b = 8; errors times sensitivities."""
    for kind, error in {"toeplitz": 5.113083444094182, "banded": 5.010581293810507}.items():
        factor = factor_for(kind, 40, 8)
        assert noise_in_model(factor)[0] * factor.sensitivity(8) == pytest.approx(error, rel=1e-4)


def test_inverse_and_rows() -> None:
    for kind in KINDS:
        factor = factor_for(kind, 12, 4)
        assert factor.matrix @ factor.inverse == pytest.approx(np.eye(12), abs=1e-12)
        assert factor.row_norms == pytest.approx(np.linalg.norm(factor.inverse, axis=1))
        assert np.triu(factor.inverse, 1).max() == 0
    assert noise_in_model(identity(5)) == (pytest.approx(math.sqrt(3)), pytest.approx(math.sqrt(5)))
    assert toeplitz(4).digest == toeplitz(4).digest != toeplitz(5).digest


def test_tree_is_the_tree_with_estimates_from_below() -> None:
    """A·C⁻¹Z has the covariance of the tree's prefix estimates: 1 node, 2 in one, 2 + 1, 4 in one."""
    prefixes = np.tril(np.ones((4, 4))) @ tree(4).inverse
    assert (prefixes**2).sum(axis=1) == pytest.approx([1, 2 / 3, 2 / 3 + 1, 4 / 7], rel=1e-3)
    shared = float(prefixes[1] @ prefixes[3])  # the first half, of which 1 − w = 3/7 is in the whole
    assert shared == pytest.approx(3 / 7 * 2 / 3, rel=1e-3)


def test_momentum_is_the_workload() -> None:
    assert workload(4, 0.5) == pytest.approx([1, 1.5, 1.75, 1.875])
    heavy, plain = factor_for("toeplitz", 30, 6, None, 0.9), factor_for("toeplitz", 30, 6)
    assert noise_in_model(heavy, 0.9)[0] * heavy.sensitivity(6) < noise_in_model(plain, 0.9)[0] * plain.sensitivity(6)


def test_auto_takes_the_bands_with_the_least_error() -> None:
    def error(bands: int | None) -> float:
        factor = factor_for("toeplitz", 40, 8, bands)
        return noise_in_model(factor)[0] * factor.sensitivity(8)

    assert error(None) <= min(error(bands) for bands in (1, 2, 4, 8, 16)) * (1 + 1e-9)
    assert factor_for("toeplitz", 6, 100, None).bands == 6
    assert factor_for("toeplitz", 100, 90, None).bands == 64
    assert factor_for("banded", 10, 3, 1).columns == pytest.approx(np.ones((10, 1)))


def test_spaced_maximum() -> None:
    values = np.random.default_rng(1).random(9)
    for separation in (1, 2, 4):
        assert spaced_maximum(values, separation) == pytest.approx(
            max(sum(values[list(p)]) for p in patterns(9, separation))
        )


def test_what_is_refused() -> None:
    for arguments, said in (
        (("other", 4, 1), "privacy.noise.kind"),
        (("tree", 4, 1, 2), "privacy.noise.bands"),
        (("independent", 4, 1, 2), "privacy.noise.bands"),
        (("banded", 10, 4, 5), "at most 4"),
        (("toeplitz", 100, 4, 65), "at most 64"),
        (("toeplitz", 2049, 4), "at most 2048"),
        (("banded", 513, 4), "toeplitz has nearly"),
        (("tree", 1025, 4), "at most 1024"),
    ):
        with pytest.raises(InputError, match=said):
            factor_for(*arguments)
    with pytest.raises(InputError, match="at most 5"):
        factor_for("toeplitz", 40, 5, 6, once=True)
    with pytest.raises(InputError, match="at most 2048"):
        identity(3000)
    for columns in (np.array([[0.0]]), np.array([[1 / 3]])):
        with pytest.raises(ValueError, match="diagonal"):
            Factor(columns)
    assert factor_for("toeplitz", 0, 4).rounds == 0
