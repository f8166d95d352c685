"""Contract 2b, exactly and without sampling: what one client can change, and what it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.audit.bench import ENTRIES, Bench, World, prepare_job
from fedflat.audit.canaries import canaries_for
from fedflat.audit.releases import Neighbours, coupled_difference, run_key
from fedflat.core.types import ServerView, SummingMechanism
from fedflat.engine.round import accumulator_of, broadcast_of
from fedflat.engine.train import Job, final_module, train

KEYS = 3
ROUNDING = 1e-5
"""What float32 arithmetic may add, relative to the sensitivity and absolutely."""


def contract_violations(bench: Bench, name: str = "", options: Mapping[str, Any] | None = None,
                        sections: Mapping[str, Any] | None = None) -> tuple[str, ...]:  # fmt: skip
    """Every way in which adversarial neighbours break contract 2b; empty if it holds.

    name, options, sections: as for ``bench_of``; with a name the whole released module is checked as well.
    """
    found: list[str] = []
    for canary in canaries_for(bench):
        others, client = canary.make(bench, bench.state.clip if math.isfinite(bench.state.clip) else 1.0)
        found += [f"{canary.name}: {fault}" for fault in _differences(Neighbours(bench, others, client))]
    found += [f"{label}: {fault}" for label, fault in _hostile_messages(bench)]
    if name:
        found += outside_faults(lambda inputs: prepare_job(name, options, sections, inputs))
    return tuple(found)


def _allowed(bench: Bench, broadcast_clip: float) -> float:
    plan = bench.parts.plan
    return plan.sensitivity(bench.parts.clip.bound(broadcast_clip)) if plan.private else math.inf


def _differences(neighbours: Neighbours) -> list[str]:
    """Sum, noisy mean and noise of two worlds under the same keys."""
    bench, faults = neighbours.bench, []
    key = run_key(0, "exact", 0)
    zero, one = neighbours.world(False, key), neighbours.world(True, key)
    limit = _allowed(bench, zero.broadcast.clip)
    again = neighbours.world(True, run_key(1, "exact", 0)).aggregate.total
    random = zero.aggregate.exact is not None or not torch.equal(one.aggregate.total, again)
    moved = float(torch.linalg.vector_norm(one.aggregate.total - zero.aggregate.total))
    if moved > limit * (1 + ROUNDING) and not random:
        faults.append(f"the noiseless sum moves by {moved:.4g}, more than the sensitivity {limit:.4g}")
    if random:  # messages rounded or noised by their clients: worlds cannot be coupled, the sampled audit remains
        return faults
    plain = replace(bench.parts.algorithm, server=(_Show(bench.parts.broadcast),))
    bare = Neighbours(bench.changed(algorithm=plain), neighbours.others, neighbours.canary)
    start, width = bench.state.shared.numel(), bench.parts.message_length
    # Behind the mean, an adaptive clip's next threshold, from a count with its own noise.
    shifts = [coupled_difference(bare, number)[start : start + width] for number in range(KEYS)]
    mean_limit = limit / bench.parts.plan.divisor
    longest = max(float(torch.linalg.vector_norm(shift)) for shift in shifts)
    if longest > mean_limit * (1 + ROUNDING) + ROUNDING:
        faults.append(f"the released mean moves by {longest:.4g}, more than sensitivity/m = {mean_limit:.4g}")
    spread = max(float((shift - shifts[0]).abs().max()) for shift in shifts)
    if spread > 4 * ROUNDING or not _same_noise(bench, zero, one):
        faults.append("the noise is not the same with and without the client")
    return faults


def _same_noise(bench: Bench, zero: World, one: World) -> bool:
    """Whether the mechanism draws bit for bit the same noise in both worlds, key by key."""
    bound = bench.parts.clip.bound(zero.broadcast.clip)
    draws = []
    for world in (zero, one):
        for number in range(KEYS):
            key = run_key(number, "exact noise", 0)
            draws.append(bench.parts.mechanism.noise(key, 0, world.broadcast, world.aggregate, bound))
    return all(torch.equal(a, b) for a, b in zip(draws[:KEYS], draws[KEYS:]))


@dataclass(frozen=True)
class _Show:
    """A server step that shows the mean, in the first of the slots, and hands on nothing; clients receive as ever."""

    broadcast: tuple[str, ...]

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        """No slots."""
        return {}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros_like(mean[: view.tensors[-1].stop]), {"": mean}


def _hostile_messages(bench: Bench) -> list[tuple[str, str]]:
    """Messages that no honest client sends, straight into the accumulator beside an ordinary one."""
    key, width = run_key(0, "hostile", 0), bench.parts.message_length
    broadcast = broadcast_of(bench.parts, bench.state, bench.seed)
    ordinary = bench.random("ordinary").repeat(bench.parts.algorithm.vectors)[None]
    limit, found = _allowed(bench, broadcast.clip), []
    if not bench.parts.plan.private:
        return []
    hostile = {
        "NaN": torch.full((1, width), math.nan),
        "one infinite entry": torch.eye(1, width) * math.inf,
        "huge": torch.full((1, width), 3e38),
        "wrong length": torch.ones(1, width + 1),
        "whole numbers": torch.ones(1, width, dtype=torch.int64),
    }
    for label, message in hostile.items():
        totals = []
        for extra in ([], [message]):
            accumulator = accumulator_of(bench.parts, broadcast, key)
            for sent in [ordinary, *extra]:
                accumulator.add(sent, [1])
            totals.append(accumulator.result().total)
        moved = float(torch.linalg.vector_norm((totals[1] - totals[0]).double()))
        random = isinstance(bench.parts.mechanism, SummingMechanism)
        if not math.isfinite(moved) or (moved > limit * (1 + ROUNDING) and not random):
            found.append((label, f"a message moves the sum by {moved:.4g}, more than {limit:.4g}"))
    return found


def outside_faults(make: Callable[[Tensor | None], Job]) -> list[str]:
    """Tensors of the released module, besides the shared vector, that are not w^0's bit for bit after a real round.

    make: inputs ``(12,)`` of the last client -> a fresh job.
    """
    job = make(torch.full((ENTRIES,), 1e6))
    before = {name: value.clone() for name, value in job.problem.module.state_dict().items()}
    after = final_module(job, train(job)).state_dict()
    shared = job.parts.layout.names[: job.parts.layout.shared]
    return [
        f"{name} is released and is not w^0's: it depends on clients' data outside the clipped sum"
        for name, value in after.items()
        if name not in shared and not (name in before and torch.equal(value, before[name]))
    ]
