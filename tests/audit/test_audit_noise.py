"""The noise audit: sound noise passes, and each mechanism that an outsider broke without being noticed is found."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from fedflat.assembly.jobs import prepare
from fedflat.audit import audit_noise
from fedflat.config.recipe import Recipe
from fedflat.core.rng import stream
from fedflat.engine import train as loop
from fedflat.pieces.mechanisms import GaussianNoise

REAL = GaussianNoise.unit
SMALL = ["model={name: mlp, hidden: 128}"]


def audited(*changes: str) -> Any:
    return audit_noise(Recipe.load("quick-start", [*SMALL, *changes]))


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("privacy.secure_rng=true",),
        ("privacy.noise=banded", "cohort.sampling=min-separation", "cohort.separation=2"),
        ("algorithm.name=fed-smp-randk",),
        ("algorithm.name=dp-scaffold",),
        ("privacy.trust=distributed", "cohort.min=60"),
        ("privacy.trust=local", "cohort.max_participations=20"),
    ],
    ids=lambda changes: changes[0] if changes else "plain",
)
def test_sound_noise_is_as_planned(changes: tuple[str, ...]) -> None:
    found = audited(*changes)
    assert found.violations == ()
    assert found.details["ratio"] == pytest.approx(1, abs=0.02)


def test_a_run_without_noise_says_why_nothing_was_measured() -> None:
    found = audited("privacy.noise_multiplier=0", "privacy.epsilon=null")
    assert found.runs == 0 and "not private" in found.details["reason"] and not found.exceeds_proven


def half(self: Any, key: bytes, round: int, size: int) -> torch.Tensor:
    return REAL(self, key, round, size) * (torch.arange(size) % 2)


def same(self: Any, key: bytes, round: int, size: int) -> torch.Tensor:
    return REAL(self, key, 0, size)


def shared(self: Any, key: bytes, round: int, size: int) -> torch.Tensor:
    return REAL(self, b"k" * 32, round, size)


def repeated(self: Any, key: bytes, round: int, size: int) -> torch.Tensor:
    first = REAL(self, key, round, size - size // 2)
    return torch.cat([first, first[: size // 2]])


def flat(self: Any, key: bytes, round: int, size: int) -> torch.Tensor:
    return torch.from_numpy(stream(key, "noise", round).uniform(-np.sqrt(3), np.sqrt(3), size)).float()


def scaled(by: float) -> Callable[..., torch.Tensor]:
    return lambda self, key, round, size: REAL(self, key, round, size) * by


BROKEN: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "half of the coordinates": (half, "coordinates have too little noise"),
    "the same noise in each round": (same, "rounds 0 and 1: correlation 1.00"),
    "a key that everybody has": (shared, "different keys share"),
    "one half repeats the other": (repeated, "apart have correlation"), "uniform noise": (flat, "not Gaussian"),
    "std × 0.7": (scaled(0.7), "0.70"), "std × 0.95": (scaled(0.95), "0.9"),
    "std × 1.1": (scaled(1.1), "times the planned one"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_noise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = BROKEN[name]
    monkeypatch.setattr(GaussianNoise, "unit", change)
    found = audited()
    assert found.exceeds_proven
    assert any(words in sentence for sentence in found.violations), found.violations


def test_a_std_below_the_accounted_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedflat.privacy.plan import Plan

    real = Plan.std
    monkeypatch.setattr(Plan, "std", lambda self, clip: 0.9 * real(self, clip))
    assert any("below σ" in sentence for sentence in audited().violations)


def public(parts: Any, key: bytes, draw: int) -> np.ndarray:
    return parts.plan.sampler.select_at(0, stream(0, "cohort", draw))


def once(parts: Any, key: bytes, draw: int) -> np.ndarray:
    return parts.plan.sampler.select_at(0, stream(key, "cohort", 0))


def few(parts: Any, key: bytes, draw: int) -> np.ndarray:
    return parts.plan.sampler.select_at(0, stream(key, "cohort", draw))[::2]


BROKEN_DRAWS = (public, once, few)


def cohorts_of(key: bytes, select: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The cohorts that a run of 6 rounds draws under a key, each client with chance one half."""
    drawn: list[tuple[int, ...]] = []

    def watched(parts: Any, key: bytes, draw: int) -> np.ndarray:
        drawn.append(tuple(cohort := select(parts, key, draw)))
        return cohort

    monkeypatch.setattr(loop, "select_cohort", watched)
    changes = ["rounds=6", "data.clients=40", "cohort.size=20", "local.steps=1", "engine.backend=sequential"]
    job = prepare(Recipe.load("quick-start", changes))
    job.key = key
    loop.train(job)
    return drawn


@pytest.mark.parametrize("select", [loop.select_cohort, public, once, few])
def test_cohorts_follow_key_and_round_and_law(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the broken draws fails one of the three."""
    one, other = (cohorts_of(bytes([number]) * 32, select, monkeypatch) for number in (1, 2))
    same = {public: any(a == b for a, b in zip(one, other)), once: len(set(one)) < 6}
    uneven = binomtest(sum(map(len, [*one, *other])), 2 * 6 * 40, 0.5).pvalue < 1e-7
    assert [select for select, broken in {**same, few: uneven}.items() if broken] == [select] * (select in BROKEN_DRAWS)


def test_a_secret_run_that_draws_the_same_noise_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianNoise, "unit", shared)
    assert any("second start" in sentence for sentence in audited("privacy.randomness=secret").violations)
