"""Public schedules: who takes part when, and that no two rounds of a client come too close."""

import numpy as np
import pytest

from fedflat.core.checks import InputError
from fedflat.core.cohorts import NEVER, CyclicPoisson, Full, MinSeparation, make_sampler, separated
from fedflat.core.rng import stream
from fedflat.core.types import Sampler

SECRET = stream(b"\1" * 32, "cohort", 0)


def rounds_of(sampler: Sampler, client: int, rounds: int) -> np.ndarray:
    drawn = (sampler.select_at(t, stream(b"\2" * 32, "cohort", t)) for t in range(rounds))
    return np.flatnonzero([client in cohort for cohort in drawn])


@pytest.mark.parametrize(("clients", "size", "separation"), [(20, 4, 5), (23, 4, 5), (23, 4, 3), (9, 9, 1)])
def test_round_robin_keeps_rounds_apart(clients: int, size: int, separation: int) -> None:
    sampler = MinSeparation(clients, size, separation)
    rounds = 40
    taken = [rounds_of(sampler, client, rounds) for client in range(clients)]
    assert all((np.diff(mine) >= separation).all() for mine in taken)
    assert min(map(len, taken)) > 0
    for t in range(rounds):
        cohort = sampler.select_at(t, SECRET)
        assert len(set(cohort.tolist())) == size
        assert (np.diff(cohort) > 0).all()
    assert sampler.q == size / clients


def test_nobody_hides_and_no_key_moves_the_turns() -> None:
    turns = [MinSeparation(30, 5, 6).select_at(3, stream(key, "cohort", 3)).tolist() for key in (b"a" * 32, b"b" * 32)]
    assert turns[0] == turns[1]


def test_groups_take_turns_and_coins_are_secret() -> None:
    sampler = CyclicPoisson(4000, 100, 5)
    assert sampler.chance == pytest.approx(0.125)
    sizes = []
    for t in range(50):
        cohort = sampler.select_at(t, stream(b"\3" * 32, "cohort", t))
        assert (sampler.groups[cohort] == t % 5).all()
        sizes.append(len(cohort))
    assert np.mean(sizes) == pytest.approx(100, rel=0.1)
    same = [sampler.select_at(0, stream(key, "cohort", 0)).tolist() for key in (b"a" * 32, b"b" * 32)]
    assert same[0] != same[1]
    assert (
        CyclicPoisson(50, 5, 5).groups.tolist()
        == CyclicPoisson(40, 5, 5).groups.tolist() + CyclicPoisson(50, 5, 5).groups.tolist()[40:]
    )  # whoever else there is
    assert sampler.select_at(0, SECRET) is not None
    assert sampler.q == 0.025


def test_everybody() -> None:
    sampler = Full(7, 7)
    assert sampler.select_at(3, SECRET).tolist() == list(range(7))
    assert (sampler.q, sampler.separation, sampler.event(2.0).noise_multiplier) == (1.0, 1, 2.0)
    assert MinSeparation(10, 2, 5).event(3.0).noise_multiplier == 3.0
    assert CyclicPoisson(10, 2, 5).event(3.0).noise_multiplier == 3.0
    assert CyclicPoisson(10, 1, 5).event(3.0).sampling_probability == 0.5


def test_check_ins_come_in_turn_and_not_too_early() -> None:
    sampler = MinSeparation(12, 3, 3)
    last = np.full(12, NEVER, dtype=np.int64)
    rng = np.random.default_rng(0)
    seen: dict[int, list[int]] = {}
    for t in range(60):
        present = np.flatnonzero(rng.random(12) < 0.7)
        cohort = sampler.next_of(present, last, t)
        assert len(cohort) <= 3
        assert set(cohort) <= set(present)
        last[cohort] = t
        for client in cohort.tolist():
            seen.setdefault(client, []).append(t)
    assert len(seen) == 12
    assert min(np.diff(mine).min() for mine in seen.values()) >= 3
    assert separated(last, np.arange(12), 60, 3).tolist() == [c for c in range(12) if 60 - last[c] >= 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("min-separation", 10, 2, None, 6), "cohort.separation: found 6; allowed: a whole number ≥ 1 and ≤ 5"),
        (("min-separation", 10, 2.5), "a whole number"),
        (("min-separation", 10, 0), "cohort.size"),
        (("cyclic-poisson", 10, 2, None, 0), "cohort.separation"),
        (("poisson", 10, 2, None, 3), "min-separation or cyclic-poisson"),
        (("full", 10, 2), "10, all clients"),
        (("full", 10, 10, 10), "cohort.max"),
        (("min-separation", 10, 2, 3), "cohort.max"),
    ],
)
def test_what_is_refused(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_sampler(*arguments)  # type: ignore[arg-type]


def test_the_widest_separation_is_the_default() -> None:
    made = make_sampler("min-separation", 23, 4)
    assert isinstance(made, MinSeparation)
    assert made.separation == 5
    assert isinstance(make_sampler("cyclic-poisson", 23, 4), CyclicPoisson)
    assert isinstance(make_sampler("full", 4, 4), Full)
