"""Guard: charged first, noise once, no vector longer than C, no round twice; broken twins are found out."""

import copy
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedflat
from fedflat.core.checks import InputError, RunError
from fedflat.core.rng import stream
from fedflat.core.rounding import ROUNDING
from fedflat.guard import SOURCE, Guard
from fedflat.pieces.mechanisms import GridNoise, gaussian
from fedflat.privacy.ledger import Ledger, read
from fedflat.privacy.verify import recompute, verify
from fedflat.simulation.inspection import inspect_run

D = 20_000
NUMBERS: dict[str, Any] = {"clients": 20, "rounds": 5, "noise_multiplier": 1.5}


def made(path: Path, kind: type[Guard] = Guard, **change: Any) -> Guard:
    return kind(path / "ledger.jsonl", **{"clip": 0.5, **NUMBERS, **change})


def zeros(guard: Guard, round: int, size: int = D) -> dict[int, Any]:
    return {int(i): np.zeros(size) for i in guard.cohort(round)}


# Twins, each with one fault.


class ChargesAfter(Guard):
    """Releases, then charges."""

    def release(self, round: int, vectors: Mapping[int, Any]) -> Any:
        kept: list[Any] = []
        ledger, self._ledger = self._ledger, _Later(kept)  # type: ignore[assignment]
        try:
            found = super().release(round, vectors)
        finally:
            self._ledger = ledger
        for line in kept:
            ledger.append(line)
        return found


class _Later:
    def __init__(self, kept: list[Any]) -> None:
        self.append = kept.append


class NoiseTwice(Guard):
    """Adds a second draw to what was noised already."""

    def release(self, round: int, vectors: Mapping[int, Any]) -> Any:
        found = super().release(round, vectors)
        more = gaussian(len(found), self.plan.std(self.clip.threshold), stream(self._key, "again", round))
        return found + more.numpy() / np.float32(self.plan.divisor)


class NoNoise(Guard):
    """Forgets the noise."""

    def release(self, round: int, vectors: Mapping[int, Any]) -> Any:
        super().release(round, vectors)
        return (sum(np.asarray(v, dtype=np.float64) for v in vectors.values()) / self.plan.divisor).astype(np.float32)


class NoClip(Guard):
    """Adds what it is given."""

    def release(self, round: int, vectors: Mapping[int, Any]) -> Any:
        found = super().release(round, vectors)
        return found + (sum(np.asarray(v) for v in vectors.values()) / self.plan.divisor).astype(np.float32)


class Again(Guard):
    """Lets a round be released as often as one likes."""

    def _check_round(self, round: int) -> None:
        pass


def draws_before_it_charges(path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Guard]) -> bool:
    """Whether noise is drawn although the ledger cannot be written."""
    drawn: list[int] = []
    real = GridNoise.release

    def seen(self: GridNoise, *given: Any) -> Any:
        drawn.append(1)
        return real(self, *given)

    def refuses(self: Ledger, payload: Any) -> Any:
        raise RunError("ledger.jsonl: the event could not be written (No space left on device)")

    with made(path, kind) as guard, monkeypatch.context() as patch:
        patch.setattr(GridNoise, "release", seen)
        patch.setattr(Ledger, "append", refuses)
        with pytest.raises(RunError, match="No space left"):
            guard.release(0, zeros(guard, 0, 50))
        with pytest.raises(InputError, match="Each round is released once"):
            guard.release(0, zeros(guard, 0, 50))
    return bool(drawn)


def test_a_round_is_charged_before_anything_of_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draws_before_it_charges(tmp_path / "sound", monkeypatch, Guard)
    assert draws_before_it_charges(tmp_path / "twin", monkeypatch, ChargesAfter)


def has_the_plans_noise(path: Path, kind: type[Guard], secure: bool) -> bool:
    with made(path, kind, secure=secure) as guard:
        noise = guard.release(0, zeros(guard, 0)).astype(np.float64) * guard.plan.divisor
        std = guard.plan.std(0.5)
    assert std == pytest.approx(1.5 * 0.5 * (1 + ROUNDING))
    return bool(abs(noise.std() / std - 1) < 0.03 and stats.kstest(noise, "norm", args=(0, std)).pvalue > 1e-6)


@pytest.mark.parametrize("secure", [True, False], ids=["grid", "float"])
def test_noise_is_added_once(tmp_path: Path, secure: bool) -> None:
    assert has_the_plans_noise(tmp_path / "sound", Guard, secure)
    assert not has_the_plans_noise(tmp_path / "twice", NoiseTwice, secure)
    assert not has_the_plans_noise(tmp_path / "none", NoNoise, secure)


def test_rounds_and_guards_share_no_noise(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        with made(tmp_path / name) as guard:
            found += [guard.release(turn, zeros(guard, turn)) for turn in range(2)]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(D)


def test_it_is_the_engines_arithmetic(tmp_path: Path) -> None:
    draw = stream(1, "vectors")
    with made(tmp_path, secure=False, cohort=10) as guard:
        vectors = {int(i): draw.standard_normal(40) for i in guard.cohort(0)}
        found = guard.release(0, vectors)
        clipped = sum(v * min(1.0, 0.5 / float(np.linalg.norm(v))) for v in vectors.values())
        noise = gaussian(40, guard.plan.std(0.5), stream(guard._key, "noise", 0)).numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, (clipped + noise) / 10, rtol=1e-5, atol=1e-7)


HOSTILE = {
    "long": np.full(30, 1e30), "longest": np.full(30, 3e38, dtype=np.float32), "nan": np.full(30, np.nan),
    "inf": np.full(30, np.inf), "tiny": np.full(30, 1e-300), "plain": np.linspace(-1, 1, 30),
    "tensor": torch.linspace(-9, 9, 30),
}  # fmt: skip


def moves(path: Path, kind: type[Guard], hostile: Any) -> float:
    """m times what one client moves the release, over C."""
    sums = []
    for there in (True, False):
        with made(path / str(there), kind, noise_multiplier=0.0) as guard:
            vectors = {i: stream(i, "others").standard_normal(30) for i in range(1, 20)}
            sums.append(guard.release(0, vectors | ({0: hostile} if there else {})).astype(np.float64))
    return float(np.linalg.norm(sums[0] - sums[1]) * 20 / 0.5)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_client_moves_the_sum_by_more_than_the_clip(tmp_path: Path, name: str) -> None:
    assert moves(tmp_path / "sound", Guard, HOSTILE[name]) <= 1.002
    if name == "plain":
        assert moves(tmp_path / "twin", NoClip, HOSTILE[name]) > 1.5


def same_noise_twice(path: Path, kind: type[Guard]) -> bool:
    with made(path, kind, secure=False) as guard:
        first = guard.release(0, zeros(guard, 0, 50))
        try:
            second = guard.release(0, {0: np.full(50, 0.01)})
        except InputError:
            return False
    return float(np.abs(second - first - np.float32(0.01 / 20)).max()) < 1e-6


def test_numpys_whole_numbers_are_rounds(tmp_path: Path) -> None:
    with made(tmp_path) as guard:
        turn = np.int64(0)
        guard.release(turn, zeros(guard, turn, 3))  # type: ignore[arg-type]
        assert guard.next_round == 1


def test_a_round_is_released_once(tmp_path: Path) -> None:
    assert not same_noise_twice(tmp_path / "sound", Guard)
    assert same_noise_twice(tmp_path / "twin", Again)


def test_a_guards_ledger_is_no_run_and_is_checked_by_its_entries(tmp_path: Path) -> None:
    with made(tmp_path) as guard:
        guard.release(0, zeros(guard, 0, 50))
        assert verify(read(tmp_path / "ledger.jsonl"), guard.epsilon).ok
    with pytest.raises(InputError, match=r"a Guard; allowed: a run's folder"):
        inspect_run(tmp_path)


def test_rounds_go_forwards_to_the_planned_end(tmp_path: Path) -> None:
    with made(tmp_path) as guard:
        guard.release(2, zeros(guard, 2, 3))
        assert guard.next_round == 3
        for turn in (1, 2, 5):
            with pytest.raises(InputError, match="round: found"):
                guard.release(turn, {})
        with pytest.raises(InputError, match="whole number"):
            guard.release(True, {})
        assert len(read(tmp_path / "ledger.jsonl")) == 1


def test_a_start_over_goes_on_with_fresh_noise(tmp_path: Path) -> None:
    with made(tmp_path) as guard:
        first = guard.release(0, zeros(guard, 0))
    with made(tmp_path) as guard:
        assert guard.next_round == 1
        with pytest.raises(InputError, match="from 1 to"):
            guard.release(0, zeros(guard, 0))
        second = guard.release(1, zeros(guard, 1))
        assert guard.epsilon == guard.plan.epsilon(2)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(D)
    assert len({line["key_id"] for line in read(tmp_path / "ledger.jsonl")}) == 2


def test_no_copies(tmp_path: Path) -> None:
    with made(tmp_path) as guard:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InputError, match="same noise"):
                copied(guard)
        guard._process -= 1
        with pytest.raises(RunError, match="another process"):
            guard.release(0, {})
        guard._process += 1
        with pytest.raises(RunError, match="another process"):
            made(tmp_path)
    with pytest.raises(RunError, match="not open for writing"):
        guard.release(0, zeros(guard, 0, 3))


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        ([np.zeros(3)], "a mapping"),
        ({99: np.zeros(3)}, "guard.cohort"),
        ({"a": np.zeros(3)}, "guard.cohort"),
        ({True: np.zeros(3)}, "guard.cohort"),
        ({np.True_: np.zeros(3)}, "guard.cohort"),
        ({1.0: np.zeros(3)}, "guard.cohort"),
        ({0: np.zeros((3, 1))}, "one flat, dense vector"),
        ({0: np.zeros(3, dtype=np.int64)}, "one flat, dense vector"),
        ({0: object()}, "one vector of numbers"),
        ({0: np.zeros(3), 1: np.zeros(4)}, "4 entries"),
        ({0: np.zeros(0)}, "one flat, dense vector"),
        ({0: torch.zeros(3).to_sparse()}, "dense"),
        ({0: torch.zeros(3, device="meta")}, "float32, on meta"),
        ({0: torch.zeros(3, dtype=torch.float8_e4m3fn)}, "16 to 64 bits"),
        ({}, "dimension"),
    ],
)
def test_wrong_vectors_are_refused_before_anything_is_charged(tmp_path: Path, vectors: Any, said: str) -> None:
    with made(tmp_path) as guard:
        with pytest.raises(InputError, match=said):
            guard.release(0, vectors)
        assert read(tmp_path / "ledger.jsonl") == []
        guard.release(0, {0: np.zeros(3)})
        with pytest.raises(InputError, match="2 entries"):
            guard.release(1, {0: np.zeros(2)})


def test_only_those_drawn(tmp_path: Path) -> None:
    with made(tmp_path, cohort=5, dimension=3) as guard:
        cohorts = [guard.cohort(turn).tolist() for turn in range(5)]
        assert cohorts == [guard.cohort(turn).tolist() for turn in range(5)]
        assert len(set(map(tuple, cohorts))) > 1
        stranger = next(i for i in range(20) if i not in cohorts[0])
        with pytest.raises(InputError, match=r"guard\.cohort"):
            guard.release(0, {stranger: np.zeros(3)})
        assert guard.release(0, {}).shape == (3,)
        assert any("Cohorts other than" in text for text in guard.statement()["not_covered"])


class Yields(Mapping[int, Any]):
    """A mapping with one client's vector, which it yields as often as it likes."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = list(turns)

    def __iter__(self) -> Iterator[int]:
        return iter(self.turns.pop(0) if len(self.turns) > 1 else self.turns[0])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, client: int) -> Any:
        return np.full(50, 100.0)


class ReadsTwice(Guard):
    """Takes the mapping for a dict."""

    def _checked(self, round: int, vectors: Mapping[int, Any]) -> list[torch.Tensor]:
        return [torch.from_numpy(vectors[client]) for client in sorted(vectors)]


@pytest.mark.parametrize(("kind", "counted"), [(Guard, 1), (ReadsTwice, 4)])
def test_a_client_counts_once_whatever_the_mapping_yields(tmp_path: Path, kind: type[Guard], counted: int) -> None:
    with made(tmp_path, kind, noise_multiplier=1e-4, dimension=50) as guard:
        assert np.linalg.norm(guard.release(0, Yields([0, 0, 0, 0]))) * 20 == pytest.approx(0.5 * counted, rel=0.01)


def test_what_a_mapping_yields_later_is_not_looked_at(tmp_path: Path) -> None:
    with made(tmp_path, noise_multiplier=1e-4, dimension=50) as guard:
        assert np.linalg.norm(guard.release(0, Yields([0], [0, 77, 78, 79]))) * 20 == pytest.approx(0.5, rel=0.01)


def test_a_vector_cannot_be_written_to_between_norm_and_sum(tmp_path: Path) -> None:
    """Without the copy, what a clip measures in the plain sum would be the caller's own memory."""
    with made(tmp_path, secure=False) as guard:
        mine = torch.ones(3)
        (row,) = guard._checked(0, {0: mine})
        mine.fill_(1e6)
        assert row.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"clip": 5e-324}, "clip"), ({"clip": 1e300}, "clip"), ({"noise_multiplier": 1e-7}, "secure noise"),
     ({"noise_multiplier": 1e7}, "secure noise"), ({"clients": None}, "clients"), ({"rounds": None}, "rounds")],
)  # fmt: skip
def test_what_no_round_could_be_released_with_is_refused_at_the_start(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        made(tmp_path, **change)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_the_statement_and_the_ledger(tmp_path: Path) -> None:
    with made(tmp_path, epsilon=4, noise_multiplier=None, cohort=10) as guard:
        assert guard.epsilon == 0
        for turn in range(5):
            guard.release(turn, zeros(guard, turn, 3))
        found, lines = guard.statement("mine"), read(tmp_path / "ledger.jsonl")
        assert guard.epsilon == found["proven_epsilon"] == pytest.approx(4, rel=1e-3)
        assert (found["algorithm"], found["rounds"], found["noise_source"]) == ("mine", 5, SOURCE)
        assert recompute(lines).epsilon == pytest.approx(4, rel=1e-3)
        assert "withstands floating-point attacks" in found["floating_point"]
        assert json.dumps(found)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_statement_is_of_every_start(tmp_path: Path, order: tuple[int, int]) -> None:
    """One start with float noise is enough: its rounds are in the statement too."""
    for turn, kind in enumerate(order):
        with made(tmp_path, secure=not kind) as guard:
            guard.release(turn, zeros(guard, turn, 3))
            found = guard.statement()
    assert "withstands floating-point" not in found["floating_point"]


def test_a_ledger_is_of_one_plan(tmp_path: Path) -> None:
    for clip in (0, math.inf, "a"):
        with pytest.raises(InputError, match="clip"):
            made(tmp_path, clip=clip)
    with made(tmp_path / "d") as guard:
        guard.release(0, zeros(guard, 0, 3))
    with pytest.raises(InputError, match=r"noise_multiplier: found 1\.5"):
        made(tmp_path / "d", noise_multiplier=2.0)
    made(tmp_path / "d", clip=0.7).close()
    with made(tmp_path / "e") as guard:  # as 0.2 wrote it for a caller's key
        guard._ledger.describe({"secure": True, "given_key": True})
        guard.release(0, zeros(guard, 0, 3))
    with pytest.raises(InputError, match="drawn with a key of the caller's"):
        made(tmp_path / "e")


@pytest.mark.parametrize("sampling", ["min-separation", "cyclic-poisson"])
def test_rounds_left_out_bring_turns_no_closer(sampling: str, tmp_path: Path) -> None:
    """Every second round only: the clients of one group have all their turns in half as many rounds."""
    taken = np.zeros(20, dtype=int)
    with made(tmp_path, cohort=10, rounds=8, sampling=sampling, dimension=3) as guard:
        for round in range(0, 8, 2):
            taken[guard.cohort(round)] += 1
            guard.release(round, {})
        truth = fedflat.epsilon(clients=20, cohort=20, rounds=int(taken.max()), noise_multiplier=1.5)
        assert taken.max() == 4
        assert guard.epsilon >= truth * (1 - 1e-6)
        assert guard.statement()["epsilon"] >= guard.epsilon
