"""What clients keep between rounds: moved by what was added of their messages, theirs alone, never released."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_federation import after, beginning, clients, module, recipe, trained_sum
from torch import Tensor

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.cohorts import Poisson
from fedflat.core.params import PersonalState
from fedflat.core.types import Algorithm, ClientState, ClientView, Phase, ServerView
from fedflat.engine import reduce
from fedflat.engine.client import LocalResult
from fedflat.engine.job import Job
from fedflat.engine.reduce import RoundSum, Trained
from fedflat.engine.round import accumulator_of, broadcast_of
from fedflat.engine.train import train

pytestmark = pytest.mark.usefixtures("noise_of_any_engine")

KEEPING = ["dp-scaffold", "fed-normec"]
ENGINES: list[dict[str, Any]] = [
    {"backend": "sequential"}, {"backend": "vectorized", "block": 2}, {"backend": "vectorized", "block": 5},
]  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """A state that is all a client ever sent."""

    def __call__(self, sent: Tensor, view: ClientView) -> Tensor:
        return view.state["sent"] + sent


def remembering(method: str = "dp-fedavg") -> Algorithm:
    return replace(ALGORITHMS[method](), client_state=(ClientState("sent", Sum()),))


def everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "select_at", lambda self, round, generator: np.arange(5))


def made(method: Algorithm | str, changes: dict[str, Any] | None = None, data: Any = None) -> Job:
    named = method if isinstance(method, str) else method.name
    given = None if isinstance(method, str) else method
    return prepare(Recipe.of(recipe(named, changes)), module(), data or clients(), algorithm=given)


def one_round(job: Job) -> tuple[Tensor, PersonalState]:
    """The noiseless sum of a round, and what clients keep after it."""
    added, heads = trained_sum(job, np.arange(5))
    return added.result().total, heads


ADAPTIVE = {"kind": "adaptive", "initial": 0.05, "count_noise": 5.0}
CLIPS: list[Any] = [0.05, ADAPTIVE, {"kind": "per-tensor", "values": 0.02}]


def remembered_is_added(engine: dict[str, Any], clip: Any) -> None:
    total, heads = one_round(made(remembering(), {"engine": engine, "privacy": {"clip": clip}}))
    found = sum(state.double() for state in heads.states["sent"].values())
    torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("clip", CLIPS, ids=["constant", "adaptive", "per tensor"])
@pytest.mark.parametrize("engine", ENGINES, ids=["sequential", "blocks of 2", "one block"])
def test_what_is_remembered_is_what_was_added(engine: dict[str, Any], clip: Any) -> None:
    remembered_is_added(engine, clip)


def test_a_memory_of_the_unclipped_message_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "as_added", lambda message, factors, tensors: message)
    with pytest.raises(AssertionError):
        remembered_is_added(ENGINES[0], 0.05)


def same(one: PersonalState, other: PersonalState) -> None:
    assert one.states.keys() == other.states.keys() and one.states
    for name, states in one.states.items():
        assert states.keys() == other.states[name].keys()
        assert all(torch.equal(state, other.states[name][client]) for client, state in states.items())


def test_a_message_that_is_not_finite_moves_no_state() -> None:
    job, heads, zero = made(remembering()), PersonalState(torch.zeros(0)), torch.zeros(())
    parts, (_, broadcast) = job.parts, beginning(job)
    accumulator = accumulator_of(parts, broadcast, bytes(32))
    for client, number in enumerate((torch.nan, torch.inf, 1e38)):
        message = torch.full((parts.message_length,), 1.0)
        message[3] = number
        result = LocalResult(message, torch.zeros(0), zero, zero)
        RoundSum(parts.algorithm, parts.local, broadcast, accumulator, heads).add(Trained.of([client], [5], result))
    states = heads.states["sent"]
    assert not bool(states[0].any()) and not bool(states[1].any())
    torch.testing.assert_close(states[2].double(), accumulator.result().total)
    assert float(states[2].norm()) == pytest.approx(0.2)


@dataclass(frozen=True)
class Broken:
    def __call__(self, sent: Tensor, view: ClientView) -> Tensor:
        return sent / 0


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    method = replace(ALGORITHMS["dp-fedavg"](), client_state=(ClientState("broken", Broken()),))
    assert one_round(made(method))[1].states == {}


@pytest.mark.parametrize("method", KEEPING)
def test_the_others_states_do_not_see_a_client(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds whose releases are the same: whatever is in one client's data, the others keep the same bits."""
    everybody(monkeypatch)
    poisoned = clients()
    poisoned[2] = (poisoned[2][0] * 1e3, poisoned[2][1])
    kept_by = []
    for data in (clients(), poisoned):
        job = made(method, {"engine": {"backend": "vectorized", "block": 3}}, data)
        heads = PersonalState(job.initial_weights[job.parts.layout.dimension :])
        state, _ = beginning(job)
        for round in range(2):
            broadcast = broadcast_of(job.parts, replace(state, round=round), job.seed)
            total = accumulator_of(job.parts, broadcast, job.key)
            method, local = job.parts.algorithm, job.parts.local
            RoundSum(method, local, broadcast, total, heads).add_cohort(job.backend, np.arange(5))
        kept_by.append(heads)
    for name, states in kept_by[0].states.items():
        assert all(torch.equal(states[i], kept_by[1].states[name][i]) for i in (0, 1, 3, 4))
        assert not torch.equal(states[2], kept_by[1].states[name][2])


@pytest.mark.parametrize("method", KEEPING)
def test_a_run_goes_on_bit_for_bit_with_what_clients_keep(method: str, tmp_path: Path) -> None:
    changes = {"rounds": 4, "cohort": {"size": 3}}
    whole = fedflat.run(recipe(method, changes), model=module(), clients=clients(), out=tmp_path / "whole")
    left = tmp_path / "left"
    given = {"model": module(), "clients": clients(), "out": left}
    fedflat.run(recipe(method, changes), **given, should_stop=after(2))
    fedflat.run(recipe(method, changes), **{**given, "model": module()}, resume=True)
    names = [folder / "checkpoints" / "round-000004.safetensors" for folder in (tmp_path / "whole", left)]
    halves = [folder / "private" / "heads" / "round-000004.safetensors" for folder in (tmp_path / "whole", left)]
    for one, other in (names, halves):
        first, second = load_file(one), load_file(other)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    state = ALGORITHMS[method]().client_state[0].name
    assert {f"state.{state}.ids", f"state.{state}.values"} == set(load_file(halves[0]))
    assert not any("state." in name for name in load_file(names[0]))  # the half that may be published
    facts = json.loads((tmp_path / "whole" / "privacy.json").read_text())
    assert any(line.startswith("Clients' states") for line in facts["not_covered"])
    assert "tells nothing about another's" in facts["sampling"] and whole.privacy["facts"]["client_state"] == [state]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dp-scaffold", {"cohort": {"sampling": "fixed"}}, r"cohort\.sampling: found fixed; allowed: poisson"),
    ("fed-normec", {"cohort": {"sampling": "truncated", "max": 5}}, r"found truncated; .*independent coins only"),
    ("dp2-fedsam", {"cohort": {"sampling": "fixed"}}, r"keep personal heads between rounds"),
    ("dp-scaffold", {"privacy": {"trust": "distributed"}}, r"privacy\.trust: found distributed; .*aborted"),
    ("dp-scaffold", {"privacy": {"protocol": "published", "published": "000"}}, r"privacy\.protocol: found published"),
    ("dp-scaffold", {"engine": {"backend": "lowrank"}}, r"engine\.backend: found lowrank with clients' state"),
    ("fed-normec", {"privacy": {"clip": ADAPTIVE}}, r"one number for fed-normec"),
]


@pytest.mark.parametrize(("method", "changes", "line"), REFUSED)
def test_what_is_not_proven_is_refused(method: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(fedflat.InputError, match=line):
        made(method, changes)


@pytest.mark.parametrize("method", ["dp-scaffold", "dp2-fedsam"])
def test_local_trust_claims_no_amplification_and_may_have_any_cohort(method: str) -> None:
    job = made(method, {"privacy": {"trust": "local"}, "cohort": {"sampling": "fixed", "size": 3}})
    assert job.parts.plan.epsilon() > 0
    assert train(job).complete


def test_heads_and_fixed_cohorts_go_where_nothing_is_claimed() -> None:
    assert made("dp2-fedsam", {"cohort": {"sampling": "fixed"}, "privacy": {"noise_multiplier": 0}}) is not None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vectors": 0}, r"algorithm\.vectors"), ({"vectors": 2}, r"algorithm\.vectors"),
    ({"vectors": 2, "transforms": (lambda u, v: u,)}, r"algorithm\.transforms\[0\].*shape"),
    ({"vectors": 2, "transforms": (lambda u, v: torch.cat([u, u], -1),)}, r"algorithm\.server: found nothing"),
    ({"client_state": (ClientState("a.b", Sum()),)}, r"algorithm\.client_state: found 'a\.b'"),
    ({"client_state": (ClientState("sent", Sum()), ClientState("sent", Sum()))}, r"allowed: different names"),
    ({"scale": lambda norms, c: norms, "private": False}, r"algorithm\.scale"),
    ({"client_state": (ClientState("s", lambda sent, view: sent[:-1]),)}, r"client_state \(s\).*shape"),
    ({"client_state": (ClientState("s", lambda sent, view: torch.randn_like(sent)),)}, r"client_state \(s\).*draws"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "line"), WRONG)
def test_a_method_that_does_not_fit_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(fedflat.InputError, match=line):
        made(Algorithm("own", **fields))


def test_a_common_mask_and_several_vectors_are_refused() -> None:
    method = replace(ALGORITHMS["dp-scaffold"](), mask=ALGORITHMS["fed-smp-randk"]().mask)
    with pytest.raises(fedflat.InputError, match=r"algorithm\.mask"):
        made(method)


@dataclass(frozen=True)
class First:
    """The first vector of the mean, and the second in a slot."""

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {"second": torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return mean.chunk(2)[0], {"second": mean.chunk(2)[1]}


NOISY: list[dict[str, Any]] = [
    {}, {"privacy": {"secure_rng": True}}, {"privacy": {"clip": {"kind": "per-tensor", "values": 0.1}}},
    {"privacy": {"trust": "local"}}, {"privacy": {"trust": "distributed"}, "cohort": {"min": 4}},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["update", "ddgauss"])
@pytest.mark.parametrize("changes", NOISY, ids=["float", "grid", "per tensor", "local", "distributed"])
def test_a_message_of_two_vectors_is_clipped_and_noised_as_one(kind: Any, changes: dict[str, Any]) -> None:
    """(Δ, −2Δ): both halves of the sum are as they should be, and there is noise on both."""
    two = Algorithm(
        "own", transforms=(lambda u, v: torch.cat([u, -2 * u], -1),), server=(First(),), vectors=2, kind=kind
    )
    if kind == "ddgauss" and changes != NOISY[4]:
        return
    job = made(two, changes)
    parts = job.parts
    total = one_round(job)[0]
    d = parts.layout.dimension
    assert total.shape == (2 * d,) == (parts.message_length,) and parts.message_tensors[-1].stop == 2 * d
    if "per-tensor" not in str(changes):
        near = 2e-3 if "secure_rng" in str(changes) else 1e-6
        torch.testing.assert_close(total[d:], -2 * total[:d], rtol=1e-3, atol=near)
    outcome = train(replace(job, parts=replace(parts, plan=replace(parts.plan, rounds=1))))
    noise = outcome.state.slots["second"] * parts.plan.divisor - total[d:]
    spread = parts.plan.std(parts.clip.bound(job.threshold)) * (1.0 if parts.plan.trust != "local" else 5**0.5)
    assert 0.5 * spread < float(noise.std()) < 2 * spread


@dataclass(frozen=True)
class Jitter:
    """A rule and a transform that draw from the client's own generator."""

    seen: tuple[list[float], ...] = ()

    def __call__(self, given: Any, view: ClientView) -> Any:
        if view.start is not None:  # a gradient rule
            return lambda w: given(w) + 0.01 * torch.from_numpy(view.generator.standard_normal(w.shape)).to(w)
        return given * (1 + 0.01 * float(view.generator.standard_normal()))


def drawing(rule: bool) -> Algorithm:
    return Algorithm("own", phases=(Phase(rule=Jitter()),)) if rule else Algorithm("own", transforms=(Jitter(),))


@pytest.mark.parametrize("rule", [True, False])
def test_a_clients_generator_is_its_own_on_every_back_end(rule: bool) -> None:
    wide = {"privacy": {"clip": 10.0}}
    alone = [engine for engine in ENGINES if engine["backend"] not in ("vectorized", "lowrank")]
    with pytest.warns(UserWarning, match=r"draws from view\.generator, so clients train one by one"):
        sums: Sequence[Tensor] = [one_round(made(drawing(rule), {"engine": engine, **wide}))[0] for engine in alone]
    plain = one_round(made("dp-fedavg", wide))[0]
    for found in sums[1:]:
        torch.testing.assert_close(found, sums[0], rtol=1e-6, atol=1e-9)
    assert float((sums[0] - plain).abs().max()) > 1e-5


def test_a_block_has_no_generator() -> None:
    job = made("dp-fedavg", {"engine": {"backend": "vectorized", "block": 3}})
    alone = replace(job.backend.inner, algorithm=drawing(False))  # type: ignore[attr-defined]
    job.backend = replace(job.backend, inner=alone)  # type: ignore[type-var]
    with pytest.raises(fedflat.RunError, match=r"view\.generator is for clients that train alone"):
        one_round(job)
