"""Every mechanism's noise, drawn through the engine's one release: the law that the plan accounts, and no other."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats

from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.rng import stream
from fedflat.core.types import Aggregate, Broadcast
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.reduce import GridAccumulator, PlainSum
from fedflat.engine.round import accumulator_of, broadcast_of, noisy_sum

KEY = b"\5" * 32
D = 4000
CLIENTS, COHORT = 60, 30


def job(name: str = "dp-fedavg", *, sampling: str = "poisson", **privacy: object) -> Job:
    """A federation whose model has D parameters."""
    inputs = torch.zeros(2, D // 2 - 1)
    recipe = {
        "rounds": 20, "seed": 3, "algorithm": name if isinstance(name, dict) else {"name": name},
        "data": {"classes": 2}, "model": {"name": "linear"}, "local": {"steps": 1, "batch_size": 2},
        "cohort": {"size": COHORT, "sampling": sampling},
        "privacy": {"clip": 0.5, "noise_multiplier": 0.8, "delta": 1e-3, **privacy},
    }  # fmt: skip
    return prepare(Recipe.of(recipe), None, [(inputs, torch.tensor([0, 1]))] * CLIENTS)


def drawn(made: Job, messages: torch.Tensor, round: int = 0, key: bytes = KEY) -> torch.Tensor:
    """Released minus exact clipped sum, for given messages ``(n, d)``."""
    parts = made.parts
    broadcast, aggregate = held(made, messages, round, key)
    clipped = messages.double() * (0.5 / messages.double().norm(dim=1, keepdim=True)).clamp(max=1)
    return (noisy_sum(parts, broadcast, aggregate, key).double() - clipped.sum(0)).float()


def held(made: Job, messages: torch.Tensor, round: int = 0, key: bytes = KEY) -> tuple[Broadcast, Aggregate]:
    """What the server holds before the noise."""
    parts = made.parts
    state = replace(parts.first_state(made.initial_weights[: parts.layout.dimension], made.threshold), round=round)
    broadcast = broadcast_of(parts, state, made.seed)
    accumulator = accumulator_of(parts, broadcast, key)
    for block in messages.split(7):
        accumulator.add(block, [2] * len(block))
    return broadcast, accumulator.result()


def updates(n: int, norm: float = 0.4) -> torch.Tensor:
    raw = torch.from_numpy(stream(1, "updates").standard_normal((n, dimension()))).float()
    return raw / raw.norm(dim=1, keepdim=True) * norm


def dimension() -> int:
    return 2 * (D // 2 - 1) + 2


def shares_of(parts: RoundParts, n: int) -> float:
    """How many times the plan's std² the released sum must hold."""
    plan = parts.plan
    return {
        "central": 1.0,
        "distributed": (getattr(plan.mechanism, "most", None) or n) / (plan.min_cohort or 1),
        "local": float(n),
    }[plan.trust]


CASES = {
    "central": ("dp-fedavg", {}), "central secure": ("dp-fedavg", {"secure_rng": True}),
    "distributed": ("dp-fedavg", {"trust": "distributed"}), "local": ("dp-fedavg", {"trust": "local"}),
    "local secure": ("dp-fedavg", {"trust": "local", "secure_rng": True}), "ddgauss": ("ddgauss", {}),
    "ddgauss secure": ("ddgauss", {"secure_rng": True}),
}  # fmt: skip
MIN_P = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_drawn_noise_has_the_stated_std_and_not_two_thirds_or_three_halves_of_it(case):
    name, privacy = CASES[case]
    made, n = job(name, **privacy), 25
    std = made.parts.plan.std(0.5) * math.sqrt(shares_of(made.parts, n))
    noise = drawn(made, updates(n)).numpy()
    assert stats.kstest(noise / std, "norm").pvalue > MIN_P
    for twin in (2 / 3, 3 / 2):
        assert stats.kstest(noise / (std * twin), "norm").pvalue < MIN_P


@pytest.mark.parametrize("case", CASES)
def test_noise_is_independent_between_rounds_keys_and_neighbouring_coordinates(case):
    name, privacy = CASES[case]
    made, messages = job(name, **privacy), updates(25)
    first = drawn(made, messages)
    assert torch.equal(first, drawn(made, messages))
    others = [drawn(made, messages, round=1), drawn(made, messages, key=b"\6" * 32), first.roll(1)]
    limit = 4.5 / math.sqrt(first.numel())
    assert all(abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < limit for other in others)
    stuck = drawn(made, messages, round=0)  # a twin that forgets the round draws the same noise again
    assert abs(float(torch.corrcoef(torch.stack([first, stuck]))[0, 1])) > limit


def test_ddgauss_noise_does_not_follow_the_cohort_and_gaussian_shares_do():
    """Recipients of ddgauss are granted amplification because every released sum holds n_max shares."""
    made = job("ddgauss")
    few, many = (float(drawn(made, updates(n)).std()) for n in (20, 45))
    assert few == pytest.approx(many, rel=0.05)
    plain = job("dp-fedavg", trust="distributed")
    few, many = (float(drawn(plain, updates(n)).std()) for n in (20, 45))
    assert many / few == pytest.approx(math.sqrt(45 / 20), rel=0.05)


@pytest.mark.parametrize("case", ["central secure", "local secure"])
def test_a_secure_release_is_whole_steps_of_the_grid_whatever_was_sent(case):
    name, privacy = CASES[case]
    made = job(name, **privacy)
    hostile = torch.cat([updates(3), torch.full((1, dimension()), 3e38), torch.full((1, dimension()), math.nan)])
    broadcast, aggregate = held(made, hostile)
    released = noisy_sum(made.parts, broadcast, aggregate, KEY).double()
    steps = released / made.parts.mechanism.grid(0.5, dimension()).pitch
    assert float((steps - steps.round()).abs().max()) < 1e-3 * float(steps.abs().max().log2())
    assert float(aggregate.total.norm()) <= 5 * 0.5


def test_secure_noise_stays_on_the_common_mask():
    made = job({"name": "fed-smp-randk", "keep": 0.3}, secure_rng=True)
    broadcast, aggregate = held(made, updates(4))
    released = noisy_sum(made.parts, broadcast, aggregate, KEY)
    assert broadcast.mask is not None
    assert not released[~broadcast.mask].any() and bool((released[broadcast.mask] != 0).float().mean() > 0.99)
    alone = made.parts.mechanism.release(KEY, broadcast, replace(aggregate, exact=None), 0.5)
    assert torch.allclose(released.double(), (aggregate.total + alone).where(broadcast.mask, 0.0), atol=1e-6)


def test_ddgauss_noise_alone_is_what_a_release_adds():
    made = job("ddgauss")
    broadcast, aggregate = held(made, updates(25))
    alone = made.parts.mechanism.release(KEY, broadcast, replace(aggregate, exact=None), 0.5)
    error = noisy_sum(made.parts, broadcast, aggregate, KEY) - aggregate.total - alone
    assert float(error.abs().max()) < 5 * made.parts.mechanism.mechanism.granularity * math.sqrt(25)
    assert float(alone.std()) > 20 * float(error.std())


@pytest.mark.parametrize("name, privacy", [("ddgauss", {}), ("dp-fedavg", {"secure_rng": True})])
def test_blocks_and_single_messages_give_the_same_whole_numbers(name, privacy):
    made, messages = job(name, **privacy), updates(9, norm=0.9)
    messages[4] = 0  # an empty client may come anywhere
    broadcast, blocks = held(made, messages)
    single = accumulator_of(made.parts, broadcast, KEY)
    for message in torch.cat([messages[4:5], messages[:4], messages[5:]]):
        single.add(message, [2])
    assert (single.result().exact == blocks.exact).all()
    assert single.result().count == blocks.count == 9


def test_a_per_tensor_clip_reaches_the_grid_message_by_message():
    made = job(secure_rng=True, clip={"kind": "per-tensor", "values": [0.3, 0.4]})
    weight, bias = made.parts.layout.tensors("shared")
    messages = updates(6, norm=30.0)
    _, aggregate = held(made, messages)
    clipped = torch.zeros(dimension(), dtype=torch.float64)
    for row in messages.double():
        for where, limit in ((weight, 0.3), (bias, 0.4)):
            clipped[where] += row[where] * min(1.0, limit / float(row[where].norm()))
    assert torch.allclose(aggregate.total, clipped, atol=6 * made.parts.mechanism.grid(0.5, dimension()).pitch)


def test_no_back_end_may_form_sums_for_a_grid():
    made = job(secure_rng=True)
    broadcast, _ = held(made, updates(1))
    accumulator = accumulator_of(made.parts, broadcast, KEY)
    assert isinstance(accumulator, GridAccumulator)
    assert not isinstance(accumulator, PlainSum)


def in_its_own_way(kind: type[PlainSum]) -> bool:
    """Whether a sum that back ends may form in parts adds otherwise than its parts, which are plain."""
    return any(getattr(kind, name) is not getattr(PlainSum, name) for name in ("add", "_sum", "_add", "part"))


def test_sums_formed_in_parts_add_as_their_parts_do():
    """Every one of the package's; a twin that adds twice what the plain sum adds is found out."""
    from fedflat.methods import shares

    assert {shares.RealisedSum} <= set(PlainSum.__subclasses__())
    assert not any(in_its_own_way(kind) for kind in PlainSum.__subclasses__())
    twice = {"_sum": lambda self, messages, factors: PlainSum._sum(self, messages, 2 * factors)}
    assert in_its_own_way(type("Twice", (shares.RealisedSum,), twice))


@dataclass(frozen=True)
class FloatCount:
    """The broken twin of the secure count: float noise on half-integers."""

    std: float

    def noisy_count(self, number: int, bits: float) -> float:
        return bits + float(stream(KEY, "twin", number).standard_normal() * self.std)


def test_the_secure_count_has_its_law_and_no_telling_low_bits():
    made = job(secure_rng=True, clip={"kind": "adaptive", "initial": 0.5, "count_noise": 3.0})
    mechanism = made.parts.mechanism
    _, aggregate = held(made, updates(9))
    counts = [aggregate.bits - shift for shift in (0.0, 0.5)]
    pitch = 3.0 / 2**12
    for bits in counts:
        seen = [mechanism.noisy_count(KEY, r, replace(aggregate, bits=bits)) for r in range(400)]
        assert stats.kstest([(x - bits) / 3.0 for x in seen], "norm").pvalue > MIN_P
        assert max(abs(x / pitch - round(x / pitch)) for x in seen) == 0.0
    twin = FloatCount(3.0).noisy_count(0, counts[0])
    assert twin / pitch != round(twin / pitch)
    assert replace(mechanism, count_std=0.0).noisy_count(KEY, 0, aggregate) == aggregate.bits


def test_count_noise_of_shares_follows_the_shares():
    made = job(trust="distributed", clip={"kind": "adaptive", "initial": 0.5, "count_noise": 3.0})
    _, aggregate = held(made, updates(25))
    ratio = aggregate.count / made.parts.plan.min_cohort
    seen = [made.parts.mechanism.noisy_count(KEY, r, aggregate) - aggregate.bits for r in range(1000)]
    assert stats.kstest([x / (3.0 * math.sqrt(ratio)) for x in seen], "norm").pvalue > MIN_P


def test_ddgauss_has_no_count():
    with pytest.raises(ValueError, match=r"privacy\.clip: found adaptive"):
        job("ddgauss").parts.mechanism.noisy_count(KEY, 0, None)
