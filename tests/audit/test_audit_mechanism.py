"""Contract test 7: the audit stays under the proven ε on every method, and over the claimed one on every defect."""

import dataclasses
import math

import pytest
import torch
from defects import DEFECTS, caught, changed, pairs_at, plant

from fedflat.algorithms import ALGORITHMS
from fedflat.audit import audit_method, mechanism, movements
from fedflat.audit.bench import (
    CLIENTS,
    Bench,
    Neighbours,
    bench_of,
    coupled_difference,
    must_loop,
    run_key,
    side_by_side,
    single,
)
from fedflat.audit.mechanism import audit_bench, audit_votes, contract_violations, epsilons, pairs_of
from fedflat.audit.worlds import Case, Engine, world_recipe
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.types import Mechanism
from fedflat.engine.reduce import Accumulator
from fedflat.methods import rounds
from fedflat.pieces import clipping, mechanisms
from fedflat.privacy.accounting.curves import gaussian_epsilon

CLAIMED = gaussian_epsilon(1 / 3, 1e-5)
PRIVATE = [name for name, factory in ALGORITHMS.items() if (a := factory()).private and a.kind == "update"]
FEW = (
    "dp-fedavg", "dp-fedsam-topk", "fed-smp-randk", "fed-smp-topk", "dp-fedpgn-ls", "centaur", "dp-fedadam",
    "fed-normec",
)  # fmt: skip


def neighbours_of(name: str, canary: int = 1) -> Neighbours:
    return [*pairs_of(bench_of(name)).values()][canary]


@pytest.mark.parametrize("name", FEW)
def test_audit_stays_under_the_proven_epsilon(name):
    found = audit_method(name, runs=4000)
    assert found.claimed == found.proven == pytest.approx(1.27, abs=0.005)
    assert found.proven == pytest.approx(CLAIMED, rel=1e-3)
    assert found.lower_bound is not None
    assert 0 <= found.lower_bound <= found.proven
    assert found.violations == ()
    assert not found.exceeds_proven


def test_two_vectors_in_one_clip_with_as_many_runs_as_a_users():
    """So many that the bound is more than 0; the other forms are above, with fewer runs."""
    bench = bench_of("dp-scaffold")
    assert 0.1 < audit_bench(bench, mechanism.RUNS, mechanism.CONFIDENCE, pairs_at(bench, 2)).lower_bound <= CLAIMED


@pytest.mark.long
def test_full_configuration():
    found = audit_method("dp-scaffold")
    assert 0.1 < found.lower_bound <= found.proven  # about 0.3 is reachable
    assert found.violations == ()


@pytest.mark.parametrize("name", PRIVATE)
def test_contract_2b_holds_exactly(name):
    assert contract_violations(bench_of(name)) == ()


@pytest.mark.parametrize("name", DEFECTS)
def test_every_planted_defect_is_found_out(name):
    found = caught(name, runs=8000)
    assert found.lower_bound > found.claimed
    assert found.lower_bound <= found.proven
    assert found.violations, "contract 2b must see it too"


def test_a_defect_is_needed_for_the_bound_to_exceed():
    """The same canaries, confidence and runs without the defect stay under the claim."""
    assert audit_bench(bench_of("dp-fedavg"), 8000, 1 - 1e-6).lower_bound < CLAIMED


def _per_tensor(self, messages, threshold, tensors):
    norms = clipping.norms_of(messages)
    pieces = torch.stack([clipping.norms_of(messages[:, where]) for where in tensors], 1)
    return norms, (threshold / pieces.clamp_min(1e-30)).clamp(max=1.0)


def _unclipped(self, messages, threshold, tensors):
    norms = clipping.norms_of(messages)
    return norms, torch.ones_like(norms)


def _times(share):
    real = mechanisms.GaussianNoise.noise

    def noise(self, key, round, broadcast, aggregate, bound):
        return real(self, key, round, broadcast, aggregate, bound) * share(aggregate.total)

    return noise


def _realised(real):
    return lambda self: dataclasses.replace(real(self), divisor=float(max(1, len(self._present))))


MOST_WHERE_THE_SUM_IS = _times(lambda total: torch.where(total != 0, 1.0, 0.1))
CHANGES = {
    "per-tensor clip": (clipping.WholeVector, "factors", _per_tensor),
    "no clip": (clipping.WholeVector, "factors", _unclipped),
    "noise follows the data": (mechanisms.GaussianNoise, "noise", MOST_WHERE_THE_SUM_IS),
    "too little noise": (mechanisms.GaussianNoise, "noise", _times(lambda total: 0.1)),
    "weighted mean": (rounds, "weighted", lambda recipe, method: True),
    "realised denominator": (Accumulator, "result", _realised(Accumulator.result)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_audit_notices_a_change_of_the_real_path(change, monkeypatch):
    """The real clip, mechanism or accumulator is changed, not a copy in the audit: the bound must exceed the claim."""
    monkeypatch.setattr(*CHANGES[change])
    found = audit_method("dp-fedsam", runs=6000)
    assert found.lower_bound > CLAIMED
    assert found.exceeds_proven


def test_transforms_are_really_run(monkeypatch):
    """A mask that multiplies what it keeps after the clip would be seen; before the clip it is clipped away."""
    loud = dataclasses.replace(ALGORITHMS["dp-fedsam-topk"](), transforms=(lambda update, view: update * 1e6,))
    bench = changed(bench_of("dp-fedsam-topk"), algorithm=loud)
    world = [*pairs_of(bench).values()][1].world(True, run_key(0, "test", 0))
    assert float(world.aggregate.norms.max()) > 1e6
    assert float(torch.linalg.vector_norm(world.aggregate.total)) <= 1 + 1e-9


@pytest.mark.parametrize("name", ["dp-fedavg", "fed-smp-topk", "dp-fedavg-ls", "dp-fedpgn-ls", "dp-fedadam"])
@pytest.mark.parametrize("present", [False, True])
def test_copies_side_by_side_equal_single_runs(name, present):
    """The first copy is the single run of the same key, and each has noise of its own (see must_loop)."""
    neighbours, key = neighbours_of(name, 2), run_key(3, "test", 0)
    copies = side_by_side(neighbours, neighbours.world(present, key), key, 50)
    assert torch.allclose(copies[0], single(neighbours, present, key), rtol=1e-5, atol=1e-6)
    assert float((copies[0] - copies[1]).abs().max()) > 1e-3
    assert not must_loop(neighbours)


def test_copies_are_not_used_where_they_would_differ():
    neighbours = neighbours_of("dp-fedavg")
    real = neighbours.bench.parts.mechanism

    class Shared(Mechanism):
        """The same noise in every copy: no longer independent runs."""

        def noise(self, key, round, broadcast, aggregate, bound):
            size = neighbours.bench.state.shared.numel()
            one = dataclasses.replace(aggregate, total=aggregate.total[:size])
            return real.noise(key, round, broadcast, one, bound).repeat(aggregate.total.numel() // size)

    assert must_loop(dataclasses.replace(neighbours, bench=changed(neighbours.bench, mechanism=Shared())))


@pytest.mark.long
def test_adaptive_clip_is_audited_run_by_run():
    sections = {"privacy": {"clip": {"kind": "adaptive", "initial": 1.0, "count_noise": 3.0}}}
    found = audit_method("dp-fedavg", sections=sections, runs=200)
    assert found.runs == 200
    assert "of its own" in found.assumptions[-1]
    assert found.lower_bound <= found.proven
    assert found.violations == ()


def test_per_tensor_clip_that_is_accounted_is_no_defect():
    found = audit_method("dp-fedavg", sections={"privacy": {"clip": {"kind": "per-tensor", "values": 0.3}}}, runs=4000)
    assert found.lower_bound <= found.proven == pytest.approx(CLAIMED, rel=1e-3)
    assert found.violations == ()


PUBLISHED = {
    "000": ("dp-fedsam", 2), "003": ("dp-fedsam-topk", 0), "002": ("dp-fedpgn", 0), "004": ("dp-fedavg-lus", 4),
}  # fmt: skip


@pytest.mark.parametrize("paper", PUBLISHED)
def test_published_procedures_exceed_what_they_claim(paper):
    """The real ``privacy.protocol: published``, not a twin: more than its paper's formula, within what is proven."""
    name, canary = PUBLISHED[paper]
    bench = bench_of(name, sections={"privacy": {"protocol": "published", "published": paper}})
    claimed, proven = epsilons(bench.parts.plan)
    assert claimed < audit_bench(bench, 100, 0.999, pairs_at(bench, canary)).lower_bound <= proven


def test_distributed_discrete_gaussian_is_audited_run_by_run():
    bench = bench_of("ddgauss")
    claimed, proven = epsilons(bench.parts.plan)
    assert 1.0 < claimed == proven < 3.0
    found = audit_bench(bench, 50, 0.999, pairs_at(bench, 1))
    assert "of its own" in found.assumptions[0]
    assert found.lower_bound <= proven
    assert contract_violations(bench) == ()


def test_votes_are_audited_as_votes():
    found = audit_method("ae-dpfl", runs=300)
    assert found.proven == pytest.approx(CLAIMED, rel=1e-3)
    assert found.lower_bound <= found.proven
    bench = bench_of("ae-dpfl")
    silent = changed(bench, mechanism=dataclasses.replace(bench.parts.mechanism, std=lambda count: 0.1))
    assert audit_votes(silent, 300, 1 - 1e-6).lower_bound > CLAIMED


def test_methods_without_privacy_show_the_cap():
    found = audit_method("fedavg", runs=1000)
    assert found.proven == math.inf
    assert found.lower_bound > 3
    assert not found.exceeds_proven


def test_same_noise_in_both_worlds_and_difference_at_the_sensitivity():
    difference = coupled_difference(neighbours_of("dp-fedavg"))
    assert float(torch.linalg.vector_norm(difference)) == pytest.approx(1 / CLIENTS, rel=1e-4)


def test_memory_gives_one_more_canary():
    *usual, one_more = pairs_of(bench_of("dp-fedpgn")).values()
    assert len(usual) == len(pairs_of(bench_of("dp-fedavg")))
    assert torch.allclose(one_more.others.update, -one_more.canary.update)
    assert float(one_more.others.update @ one_more.bench.state.slots["direction"]) > 0


def test_planted_benches_differ_from_the_real_one_in_one_part():
    bench = bench_of("dp-fedavg")
    for defect in DEFECTS:
        if defect == "unclipped buffer":
            continue
        planted: Bench = plant(defect, bench)
        others = [f.name for f in dataclasses.fields(bench.parts)
                  if getattr(planted.parts, f.name) is not getattr(bench.parts, f.name)]  # fmt: skip
        assert len(others) == 1, defect


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "dp-fedsan"}, "Did you mean dp-fedsam"),
        ({"name": "dp-fedavg", "runs": 10}, "runs: found 10"),
        ({"name": "dp-fedavg", "confidence": 1.0}, "confidence: found 1;"),
        ({"name": "dp-fedsam", "options": {"rhoo": 1}}, "Did you mean rho"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words):
    with pytest.raises(InputError, match=words):
        audit_method(**arguments)


def test_what_is_assumed_is_what_the_audits_change():
    """The clip is the recipe's own; of a recipe, the worlds change these sections and no others."""
    assert bench_of("dp-fedavg", sections={"privacy": {"clip": 0.3}}).parts.clip.bound(0.3) == 0.3
    assert "C as given" in mechanism.ASSUMPTIONS[0] and "secure_rng and server" in mechanism.ASSUMPTIONS[1]
    recipe = Recipe.load("quick-start")
    before, after = recipe.dump(), world_recipe(recipe, 6, Engine("sequential"), 1, Case("ordinary")).dump()
    changed = {(s, k) for s in before for k in (before[s] if isinstance(before[s], dict) else ())
               if before[s][k] != after[s].get(k)}  # fmt: skip
    named = {"clients": "of at most", "size": "cohorts of everybody", "steps": "local steps", "batch_size": "batches",
             "epsilon": "noise", "noise_multiplier": "noise", "delta": "noise", "backend": "", "device": "",
             "processes": "", "precision": "", "budget": "budget",
             "benchmark": ""}  # fmt: skip
    text = " ".join(movements.ASSUMPTIONS)
    assert {key for _, key in changed} <= set(named) and all(named[key] in text for _, key in changed)
