"""The private quantile clip (Andrew et al. 2021): where it goes, what it costs, and who follows it."""

import logging
import math

import pytest
import small_runs
import torch

from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.rng import stream
from fedflat.core.rounding import ROUNDING
from fedflat.core.types import Algorithm, Phase
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round
from fedflat.privacy.ledger import read
from fedflat.simulation import run as simulation
from fedflat.simulation.recomputed import Records, second_account

KEY = b"\3" * 32
CLIENTS = 400
LOG = logging.getLogger(__name__)


def job(initial: float, quantile: float = 0.5, secure: bool = False, trust: str = "central"):
    clip = {"kind": "adaptive", "initial": initial, "quantile": quantile}
    made = small_runs.recipe(
        rounds=200, data={"classes": 2}, model={"name": "linear"}, cohort={"size": CLIENTS / 2},
        privacy={"clip": clip, "secure_rng": secure, "trust": trust},
    )  # fmt: skip
    return prepare(Recipe.of(made), None, [(torch.zeros(1, 2), torch.tensor([i % 2])) for i in range(CLIENTS)])


def clips(made, rounds: int) -> list[float]:
    """C_t while every round's norms are log-normal with median 1."""
    parts, state, seen = made.parts, made.parts.first_state(made.initial_weights, made.threshold), []
    for t in range(rounds):
        draw = stream(1, "norms", t)
        norms = torch.from_numpy(draw.lognormal(0.0, 0.5, int(draw.binomial(CLIENTS, 0.5))))
        direction = torch.ones(len(norms), parts.layout.dimension, dtype=torch.float64)
        messages = (direction / direction.norm(dim=1, keepdim=True) * norms[:, None]).float()
        broadcast = broadcast_of(parts, state, 0)
        accumulator = accumulator_of(parts, broadcast, KEY)
        accumulator.add(messages, [1] * len(messages))
        state, _ = finish_round(parts, state, broadcast, accumulator.result(), KEY, lambda line: None)
        seen.append(state.clip)
    return seen


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("initial", [0.01, 100.0])
def test_the_clip_converges_to_the_quantile_from_far_away(initial, quantile):
    found = clips(job(initial, quantile), 140)
    target = math.exp(0.5 * 2**0.5 * float(torch.erfinv(torch.tensor(2 * quantile - 1))))
    assert float(torch.tensor(found[-40:]).log().mean().exp()) == pytest.approx(target, rel=0.08)
    assert (found[0] > initial) == (initial < 1)


@pytest.mark.parametrize("secure, trust", [(True, "central"), (False, "distributed")])
def test_it_converges_with_secure_noise_and_with_shares(secure, trust):
    late = torch.tensor(clips(job(0.05, 0.5, secure, trust), 120)[-40:]).log().mean().exp()
    assert float(late) == pytest.approx(1.0, rel=0.08)


def test_broken_twin_a_count_that_is_not_centred_goes_elsewhere():
    step = job(1.0).parts.clip.next
    clip, twin = 1.0, 1.0
    for _ in range(60):  # a cohort of 150 instead of m = 200, half of its norms inside
        clip = step(clip, 0.0, 200)
        twin = step(twin, 75 - 200 / 2, 200)
    assert clip == pytest.approx(1.0) and twin > 2


def recipe(initial: float, **privacy: object) -> dict:
    return {
        "name": "adaptive", "rounds": 50, "data": {"dataset": "digits", "clients": 50, "max_examples": 500},
        "model": {"name": "linear"}, "algorithm": {"name": "dp-fedavg"},
        "local": {"steps": 2, "batch_size": 10, "lr": 0.1}, "cohort": {"size": 25},
        "privacy": {"clip": {"kind": "adaptive", "quantile": 0.5, "initial": initial}, **privacy},
        "evaluation": {"every": 50},
    }  # fmt: skip


@pytest.mark.parametrize("initial", [0.02, 4.0])
def test_a_run_reaches_the_median_of_its_own_norms(initial, tmp_path):
    result = simulation.run(recipe(initial, noise_multiplier=0.4), out=tmp_path / "run")
    assert 0.3 < sum([line["clipped_fraction"] for line in result.private_history[-10:]]) / 10 < 0.7
    entries = read(tmp_path / "run" / "ledger.jsonl")
    assert [e["clip"] for e in entries] == [line["clip"] for line in result.history]
    assert entries[0]["clip"] == initial and len({e["clip"] for e in entries}) == 50
    for entry in entries:
        assert entry["sensitivity"] == pytest.approx(entry["clip"] * (1 + ROUNDING), rel=1e-12)
        assert entry["std"] == pytest.approx(entry["update_multiplier"] * entry["sensitivity"], rel=1e-12)
        both = (entry["std"] / entry["sensitivity"]) ** -2 + (2 * entry["count_std"]) ** -2
        assert both**-0.5 == pytest.approx(0.4)
    assert entries[0]["count_std"] == 25 / 20
    assert second_account(Records(tmp_path / "run")).ok
    assert simulation.run(Recipe.load(tmp_path / "run"), out=tmp_path / "run", resume=True).history == result.history


def test_blur_follows_the_round_s_clip(caplog):
    """BLUR's threshold S is C_t, not the initial clip (004 Eq. 5)."""
    caplog.set_level(logging.INFO, __name__)

    def rule(gradient, view):
        LOG.info("clip", extra={"clip": float(view.clip)})  # a list of its own would be a memory, and refused
        return gradient

    method = Algorithm("watching", phases=(Phase(rule=rule),))
    made = {**recipe(0.1, noise_multiplier=0.4), "rounds": 4, "engine": {"backend": "sequential"}}
    result = simulation.run(made, algorithm=method, on_start=lambda job: caplog.clear())
    seen = [record.clip for record in caplog.records if record.name == __name__]
    assert len(seen) >= 4
    assert list(dict.fromkeys(seen)) == [line["clip"] for line in result.history]
