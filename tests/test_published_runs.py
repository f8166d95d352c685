"""Published procedures through the one server path: what they do, and that no output shows their claim alone."""

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.assembly.records import resolved
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.cohorts import FromRound
from fedflat.core.types import Broadcast, Local
from fedflat.engine.job import Job
from fedflat.engine.reduce import PlainSum
from fedflat.engine.round import accumulator_of, finish_round, noisy_sum, select_cohort
from fedflat.methods.shares import NoiseShares
from fedflat.pieces.clipping import PublishedMedian, PublishedPerTensor
from fedflat.pieces.transforms import TopK, top_k
from fedflat.simulation.recomputed import Records, second_account

pytestmark = pytest.mark.usefixtures("noise_of_any_engine")

KEY = bytes(range(32))
TENSORS = (slice(0, 6), slice(6, 8), slice(8, 20))


def recipe(algorithm: str = "dp-fedsam", **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "small", "rounds": 3,
        "data": {"dataset": "digits", "clients": 40, "max_examples": 400,
                 "partition": {"kind": "dirichlet", "alpha": 0.6}},
        "model": {"name": "linear"}, "algorithm": {"name": algorithm}, "cohort": {"size": 8},
        "local": {"epochs": 2, "batch_size": 8, "lr": 0.2},
        "privacy": {"clip": 0.2, "noise_multiplier": 0.95, "delta": 0.025, "protocol": "published",
                    "randomness": "seeded"},
        "engine": {"backend": "sequential"},
    }  # fmt: skip
    for key, value in changes.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    return made


def job(algorithm: str = "dp-fedsam", **changes: Any) -> Job:
    return prepare(Recipe.of(recipe(algorithm, **changes)))


def shares(**changes: Any) -> NoiseShares:
    return replace(NoiseShares(std=lambda clip: 0.95 * clip, clients=8.0), **changes)


def summed(
    made: NoiseShares, messages: torch.Tensor, sizes: list[int], clip: Any = None, round: int = 0, **cast: Any
) -> Any:
    broadcast = Broadcast(round, torch.zeros(20), 0.3, 1.0, **cast)
    accumulator = made.accumulator(clip or PublishedPerTensor(3), broadcast, TENSORS, KEY)
    accumulator.add(messages, sizes)
    return accumulator


def messages(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 20, generator=torch.Generator().manual_seed(3))


def test_every_share_of_noise_has_its_own_std_whatever_the_tensors() -> None:
    found = [summed(shares(), messages(8), [5] * 8, round=r).result().noise for r in range(300)]
    drawn = torch.stack(found)
    assert float(drawn.std()) == pytest.approx(0.95 * 0.3, rel=0.03)  # eight shares of σ²C²/8
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert torch.equal(summed(shares(), messages(8), [5] * 8, round=7).result().noise, found[7])


def test_weights_multiply_signal_and_noise_and_divide_by_the_realised_sum() -> None:
    given, sizes = messages(2), [1, 9]
    plain = [summed(shares(), given[i : i + 1], [5]) for i in range(2)]
    both = summed(shares(weighted=True), given, sizes)
    assert both.result().divisor == 10 and plain[0].result().divisor is None
    assert torch.allclose(both.total, plain[0].total + 9 * plain[1].total)
    assert torch.allclose(summed(shares(weighted=True), given[:1], [4]).noise, 4 * plain[0].noise)


def test_a_client_without_data_sends_nothing_and_moves_no_others_noise() -> None:
    given = messages(3)
    with_empty = summed(shares(), torch.cat([given, torch.zeros(1, 20)])[[0, 3, 1, 2]], [5, 0, 5, 5])
    without = summed(shares(), given, [5] * 3)
    assert torch.equal(with_empty.noise, without.noise) and torch.equal(with_empty.total, without.total)


def test_the_mask_follows_the_noise() -> None:
    made = summed(shares(mask=top_k(0.3)), messages(1), [5])
    plain = summed(shares(), messages(1), [5])
    expected = TopK(0.3)((plain.total + plain.noise), type("View", (), {"tensors": TENSORS})())
    assert torch.equal(made.total + made.noise, expected)
    assert int((made.noise != 0).sum()) == 2 + 1 + 4  # ⌈0.3·6⌉, ⌈0.3·2⌉, ⌈0.3·12⌉


def test_noise_stays_on_a_common_mask() -> None:
    common = torch.arange(20) % 2 == 0
    made = summed(shares(), messages(2) * common, [5, 5], mask=common)
    assert bool((made.noise[~common] == 0).all()) and bool((made.noise[common] != 0).all())


def test_median_noise_follows_each_clients_own_median() -> None:
    small = summed(shares(), messages(1), [5], PublishedMedian())
    large = summed(shares(), messages(1) * 10, [5], PublishedMedian())
    assert torch.allclose(large.noise, 10 * small.noise, rtol=1e-5)


def test_pgn_clients_subtract_their_own_steps() -> None:
    local = Local(steps=4, batch_size=8, lr=0.5, epochs=2)
    direction = torch.randn(20)
    made = shares(local=local, beta=0.3)
    with_direction = summed(made, messages(1), [40], vectors={"direction": direction})  # K_i = 2·5 = 10
    without = summed(shares(), messages(1), [40])
    assert torch.allclose(with_direction.total - without.total, (0.7 * (4 - 10) * 0.5 * direction).double())
    as_planned = summed(made, messages(1), [16], vectors={"direction": direction})  # K_i = 2·2 = K
    assert torch.equal(as_planned.total, summed(shares(), messages(1), [16]).total)
    first = summed(made, messages(1), [40])  # before there is any g̃
    assert torch.equal(first.total, without.total)


def test_published_parts_of_each_paper() -> None:
    made = {name: job(name).parts for name in ("dp-fedsam", "dp-fedsam-topk", "dp-fedpgn", "dp-fedavg-blurs")}
    assert [p.plan.mechanism.paper for p in made.values()] == ["000", "003", "002", "004"]  # type: ignore[union-attr]
    clips = "PublishedPerTensor PublishedPerTensor PublishedMedian WholeVector"
    assert [type(p.clip).__name__ for p in made.values()] == clips.split()
    assert isinstance(made["dp-fedsam-topk"].mechanism.mask, TopK) and not made["dp-fedsam-topk"].algorithm.transforms  # type: ignore[attr-defined]
    assert made["dp-fedpgn"].mechanism.beta == 0.3 and not made["dp-fedpgn"].mechanism.weighted  # type: ignore[attr-defined]
    assert made["dp-fedsam"].mechanism.weighted and made["dp-fedsam"].plan.mechanism.tensors == 2  # type: ignore[attr-defined,union-attr]
    for parts in made.values():
        with pytest.raises(InputError, match="one constant clip"):
            parts.mechanism.noisy_count(KEY, 0, None)  # type: ignore[arg-type]


def test_the_sound_run_has_none_of_it() -> None:
    parts = job(privacy={"protocol": "sound", "published": "000"}).parts
    assert parts.plan.mechanism is None and parts.plan.sampler.name == "poisson" and parts.local.epochs is None
    assert type(accumulator_of(parts, Broadcast(0, torch.zeros(parts.layout.dimension), 0.2, 1.0), KEY)) is PlainSum


def test_cohorts_are_public_and_local_epochs_follow_the_data() -> None:
    made = job()
    assert isinstance(made.parts.plan.sampler, FromRound)
    assert np.array_equal(select_cohort(made.parts, KEY, 5), select_cohort(made.parts, b"another key", 5))
    local = made.parts.local
    assert (local.epochs, local.steps) == (2, 2 * math.ceil(10 / 8))
    assert local.of(33).steps == 2 * 5 and local.of(8).steps == 2
    plain = Local(steps=3, batch_size=8, lr=0.1)
    assert plain.of(33) == plain


@lru_cache(maxsize=1)
def client_by_client(algorithm: str) -> list[torch.Tensor]:
    """The weights of three steps each round without blocks."""
    made = recipe(algorithm, local={"epochs": None, "steps": 3})
    return list(fedflat.run(made).model.parameters())


@pytest.mark.parametrize("backend", ["vectorized", "lowrank", "auto"])
@pytest.mark.parametrize("algorithm", ["dp-fedsam", "dp-fedsam-topk", "dp-fedpgn"])
def test_blocks_carry_every_clients_noise_share(algorithm: str, backend: str, tmp_path: Path) -> None:
    """The twin is a part that clips and adds as the plain sum does: its release would carry no noise at all."""
    local = {"epochs": None, "steps": 3}
    other = fedflat.run(recipe(algorithm, local=local, engine={"backend": backend}), out=tmp_path / "run")
    for a, b in zip(client_by_client(algorithm), other.model.parameters()):
        assert torch.allclose(a, b, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "private/private.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["noise_norm"] > 0.1 for line in lines)


def test_back_ends_agree() -> None:
    one = fedflat.run(recipe())
    for a, b in zip(one.model.parameters(), fedflat.run(recipe(engine={"backend": "vectorized"})).model.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


def test_the_realised_denominator_of_004() -> None:
    made = job("dp-fedavg")
    shared = made.initial_weights.clone()
    broadcast = Broadcast(0, shared, 0.2, 1.0)
    accumulator = accumulator_of(made.parts, broadcast, KEY)
    assert accumulator.result().divisor == 1.0
    accumulator.add(torch.zeros(3, shared.numel()), [5, 5, 0])
    aggregate = accumulator.result()
    assert aggregate.divisor == 3.0
    noise = noisy_sum(made.parts, broadcast, aggregate, KEY)
    assert float(noise.std()) == pytest.approx(0.95 * 0.2, rel=0.1)
    state = made.parts.first_state(shared, 0.2)
    new, _ = finish_round(made.parts, state, broadcast, aggregate, KEY, lambda line: None)
    assert torch.allclose(new.shared - shared, (noise / 3).float(), atol=1e-6)


@pytest.mark.parametrize("algorithm", ["dp-fedsam", "dp-fedsam-topk", "dp-fedpgn", "dp-fedpgn-ls", "dp-fedavg-blurs"])
def test_a_run_states_claim_and_proof_side_by_side(algorithm: str, tmp_path: Path) -> None:
    result = fedflat.run(recipe(algorithm), out=tmp_path / "run")
    found = result.privacy
    assert found["protocol"] == "published" and found["claimed_epsilon"] > 0
    proven = found["proven_epsilon"]
    assert proven is None if "pgn" in algorithm else proven > found["claimed_epsilon"]
    assert found["epsilon"] == proven and found["reasons"] and found["paper_items"]
    # A ledger line is about one message: read as the plan's, its multiplier told an ε many times the proven one here.
    assert [adversary["epsilon"] for adversary in found["adversaries"]] == ([] if proven is None else [proven])
    last = result.history[-1]
    assert last["claimed_epsilon"] == pytest.approx(found["claimed_epsilon"])
    assert last["epsilon"] == (math.inf if proven is None else pytest.approx(proven))
    assert list(last)[:3] == ["round", "epsilon", "claimed_epsilon"]
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    account = second_account(Records(tmp_path / "run"))
    assert account.ok, account.notes
    assert account.epsilon_recomputed == (math.inf if proven is None else pytest.approx(proven, rel=1e-6))


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("algorithm", ["dp-fedsam", pytest.param("dp-fedpgn", marks=pytest.mark.long)])
def test_no_output_of_any_kind_shows_the_claim_alone(
    tmp_path: Path, algorithm: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "small.yaml").write_text(json.dumps(recipe(algorithm)), encoding="utf-8")
    comparison = ("compare", "small.yaml", "--seeds", "1", "--processes", "1", "--out")
    texts = {
        "terminal": command("run", "small.yaml", "--out", "run").out,
        "json": command("run", "small.yaml", "--out", "other", "--json").out,
        "comparison": command(*comparison, "all").out,
        "comparison.json": command(*comparison, "all", "--json").out,  # all done: said again
    }
    for file in tmp_path.rglob("*"):
        if (
            file.is_file()
            and file.name != "private.jsonl"
            and file.suffix not in (".safetensors", ".yaml", ".lock", ".pdf")
        ):
            texts[file.relative_to(tmp_path).as_posix()] = file.read_text(encoding="utf-8")
    claim = json.loads(texts["run/privacy.json"])["claimed_epsilon"]
    shown = {name for name, text in texts.items() if f"{claim:.2f}" in text or str(claim) in text}
    assert {"terminal", "json", "run/privacy.json", "run/metrics.jsonl", "run/report.html"} <= shown
    for name in shown:
        for part in texts[name].splitlines() if name.endswith(".jsonl") else [texts[name]]:
            assert "claim" in part.lower(), name
            if name.endswith((".json", ".jsonl")) or name == "json":
                assert '"proven_epsilon"' in part or '"epsilon"' in part, name
            else:
                assert any(word in part.lower() for word in ("proven", "mechanism", "∞", "ε none")), name


def test_a_resumed_folder_is_the_same_recipe(tmp_path: Path) -> None:
    result = fedflat.run(recipe(), out=tmp_path / "run")
    again = Recipe.load(tmp_path / "run")
    assert (again.local.epochs, again.local.steps, again.privacy.published) == (2, None, "000")
    assert again.cohort.sampling == "fixed"
    first, second = prepare(Recipe.of(recipe())), prepare(again)
    assert replace(first.identity, engine="") == replace(second.identity, engine="")
    assert resolved(again, second) == resolved(Recipe.of(recipe()), first)
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[-1]["epsilon"] == pytest.approx(result.privacy["proven_epsilon"])
    resumed = fedflat.run(again, out=tmp_path / "run", resume=True)
    assert resumed.privacy["claimed_epsilon"] == result.privacy["claimed_epsilon"]


@pytest.mark.parametrize(
    ("algorithm", "changes", "sentence"),
    [
        ("dp2-fedsam", {}, "privacy.protocol: found published for dp2-fedsam"),
        ("dp-fedsam", {"privacy": {"trust": "local"}}, "privacy.trust: found local"),
        ("dp-fedsam", {"privacy": {"secure_rng": True}}, "privacy.secure_rng: found True"),
        ("dp-fedsam", {"privacy": {"noise_cohort": 20}}, "privacy.noise_cohort: found 20"),
        ("dp-fedsam", {"cohort": {"size": 8, "sampling": "truncated", "max": 9}}, "cohort.max: found 9"),
        ("dp-fedsam", {"cohort": {"size": 8, "sampling": "truncated"}}, "sampling: found truncated; allowed: fixed"),
        ("dp-fedavg", {"cohort": {"size": 8, "sampling": "fixed"}}, "cohort.sampling: found fixed; allowed: poisson"),
        ("dp-fedsam", {"privacy": {"clip": {"kind": "adaptive", "initial": 1}}}, "found adaptive; allowed: one number"),
        ("dp-fedsam", {"privacy": {"published": "001"}}, "privacy.published: found 001"),
        ("ddgauss", {"privacy": {"published": "004"}}, "privacy.protocol: found published for ddgauss"),
    ],
)
def test_what_no_paper_released_is_refused(algorithm: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        job(algorithm, **changes)


def test_accepted_spellings() -> None:
    assert job(privacy={"clip": {"kind": "constant", "value": 0.4}}).threshold == 0.4
    assert job("dp-fedpgn", privacy={"clip": {"kind": "median"}}).threshold == math.inf
    assert job(privacy={"budget": 1.0}).last_round == 0  # a budget is one for what is proven
    assert Recipe.of(recipe(), ["privacy.published=003"]).privacy.published == "003"
    assert Recipe.of(recipe(), ["privacy.published=000"]).privacy.published == "000"


def test_a_method_without_privacy_has_no_published_protocol() -> None:
    found = fedflat.run(recipe("fedavg", rounds=1)).privacy
    assert found["protocol"] == "sound" and found["proven_epsilon"] is None and found["claimed_epsilon"] is None
