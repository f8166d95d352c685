"""Audit one round at σ = 3 through the real server path: exactly what one client can change in it, and a bound on ε.

A canary is a pair of neighbours. Contract 2b is held against each of them exactly; then many releases of both worlds
bound ε from below.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedflat.audit import bench as room
from fedflat.audit.bench import DELTA, Bench, Client, Neighbours, World
from fedflat.audit.bounds import AuditResult, Floats, assumptions, choose_event
from fedflat.audit.worlds import Recorder
from fedflat.core import in_range, whole
from fedflat.engine.job import Job
from fedflat.engine.reduce import GridAccumulator, PlainSum
from fedflat.engine.round import accumulator_of, broadcast_of
from fedflat.engine.train import final_module, train
from fedflat.privacy.plan import Plan

LOUD = 100.0
"""Norms before the clip, in units of C: whatever a transform keeps of such an update is still clipped."""
MANY = 1_000_000
"""Examples that a greedy client claims, where the others have one."""


def pairs_of(bench: Bench) -> dict[str, Neighbours]:
    """Return the pairs of neighbours that a method is audited with, by what the canary does."""
    clip = bench.state.clip if math.isfinite(bench.state.clip) else 1.0
    silent, layout = Client(torch.zeros_like(bench.state.shared)), bench.parts.layout.tensors("shared")

    def even(purpose: str) -> Tensor:
        """Return a random vector with the same norm in every tensor."""
        vector = bench.random(purpose)
        for where in layout:
            vector[where] /= torch.linalg.vector_norm(vector[where])
        return vector * clip * LOUD

    def along(vector: Tensor) -> Tensor:
        return vector.div(torch.linalg.vector_norm(vector)) * clip * LOUD

    opposed, first, second = even("opposed"), even("apart"), even("apart too")
    for where in layout:
        middle = (where.start + where.stop + 1) // 2
        second[where.start : middle] = 0
        first[middle : where.stop] = 0
    # A top-k or LUS mask keeps all of a message with one entry in each tensor.
    sparse = torch.zeros_like(bench.state.shared)
    sparse[[where.start for where in layout]] = clip * LOUD
    pairs = {
        "random direction at C": (silent, Client(along(bench.random("direction")))),
        "every tensor at C": (silent, Client(even("every tensor"))),
        "against the others, far more data": (Client(opposed), Client(-opposed, MANY)),
        "where no other mask is": (Client(first), Client(second)),
        "silent client": (silent, silent),
        "one entry per tensor": (silent, Client(sparse)),
    }
    if "direction" in bench.state.slots:
        # PGN's clients add the broadcast direction back: the canary pulls against it, the others along it.
        pull = along(bench.state.slots["direction"])
        pairs["against the re-added direction"] = Client(pull), Client(-pull)
    return {name: Neighbours(bench, *pair) for name, pair in pairs.items()}


KEYS = 3
ROUNDING = 1e-5
"""What float32 arithmetic may add, relative to the sensitivity and absolutely."""


def contract_violations(bench: Bench) -> tuple[str, ...]:
    """Return every way in which adversarial neighbours, or the whole released module, break contract 2b."""
    violations = [f"{name}: {fault}" for name, pair in pairs_of(bench).items() for fault in _differences(pair)]
    return (*violations, *_hostile_messages(bench), *outside_faults(bench.make))


def _differences(neighbours: Neighbours) -> list[str]:
    """Return how sum, noisy mean and noise of two worlds differ under the same keys beyond what is allowed."""
    bench, faults = neighbours.bench, []
    key = room.run_key(0, "exact", 0)
    zero, one = neighbours.world(False, key), neighbours.world(True, key)
    limit = bench.parts.plan.sensitivity(bench.parts.clip.bound(zero.broadcast.clip))
    # Another key gives another sum only if the messages are random.
    again = neighbours.world(True, room.run_key(1, "exact", 0)).aggregate.total
    random = zero.aggregate.exact is not None or not torch.equal(one.aggregate.total, again)
    moved = float(torch.linalg.vector_norm(one.aggregate.total - zero.aggregate.total))
    if moved > limit * (1 + ROUNDING) and not random:
        faults.append(f"the noiseless sum moves by {moved:.4g}, more than the sensitivity {limit:.4g}")
    # Where clients round or add noise, worlds cannot be coupled; only the sampled audit is left.
    if random:
        return faults
    shifts = [_mean_shift(neighbours, number) for number in range(KEYS)]
    mean_limit = limit / bench.parts.plan.divisor
    longest = max(float(torch.linalg.vector_norm(shift)) for shift in shifts)
    if longest > mean_limit * (1 + ROUNDING) + ROUNDING:
        faults.append(f"the released mean moves by {longest:.4g}, more than sensitivity/m = {mean_limit:.4g}")
    spread = max(float((shift - shifts[0]).abs().max()) for shift in shifts)
    if spread > 4 * ROUNDING or not _same_noise(bench, zero, one):
        faults.append("the noise is not the same with and without the client")
    return faults


def _mean_shift(neighbours: Neighbours, number: int) -> Tensor:
    """Return how far the mean that is released moves under one key; server steps come behind it."""
    recorder = Recorder()
    bench = replace(neighbours.bench, parts=recorder.in_front_of(neighbours.bench.parts))
    for present in (True, False):
        room.single(replace(neighbours, bench=bench), present, room.run_key(number, "coupled", 0))
    return recorder.means[0] - recorder.means[1]


def _same_noise(bench: Bench, zero: World, one: World) -> bool:
    """Return whether the mechanism draws bit for bit the same noise in both worlds, key by key."""
    bound, noise = bench.parts.clip.bound(zero.broadcast.clip), bench.parts.mechanism.noise
    keys = [room.run_key(number, "exact noise", 0) for number in range(KEYS)]
    draws = ([noise(key, 0, world.broadcast, world.aggregate, bound) for world in (zero, one)] for key in keys)
    return all(torch.equal(*pair) for pair in draws)


def _hostile_messages(bench: Bench) -> list[str]:
    """Return which messages that no honest client sends move the sum too far, each added beside an ordinary one."""
    key, width = room.run_key(0, "hostile", 0), bench.parts.message_length
    broadcast = broadcast_of(bench.parts, bench.state, 0)
    ordinary = bench.random("ordinary").repeat(bench.parts.algorithm.vectors)[None]
    limit, faults = bench.parts.plan.sensitivity(bench.parts.clip.bound(broadcast.clip)), []
    hostile = {
        "NaN": torch.full((1, width), math.nan), "one infinite entry": torch.eye(1, width) * math.inf,
        "huge": torch.full((1, width), 3e38), "wrong length": torch.ones(1, width + 1),
        "whole numbers": torch.ones(1, width, dtype=torch.int64),
    }  # fmt: skip
    for label, message in hostile.items():
        totals = []
        for extra in ([], [message]):
            accumulator = accumulator_of(bench.parts, broadcast, key)
            for sent in [ordinary, *extra]:
                accumulator.add(sent, [1])
            totals.append(accumulator.result().total)
        moved = float(torch.linalg.vector_norm((totals[1] - totals[0]).double()))
        random = not isinstance(accumulator, (PlainSum, GridAccumulator))
        if not math.isfinite(moved) or (moved > limit * (1 + ROUNDING) and not random):
            faults.append(f"{label}: a message moves the sum by {moved:.4g}, more than {limit:.4g}")
    return faults


def outside_faults(make: Callable[[Tensor | None], Job]) -> list[str]:
    """Return the tensors of the released module, besides the shared vector, that are not w^0's bit for bit after a real
    round.

    make: inputs ``(12,)`` of the last client -> a fresh job.
    """
    job = make(torch.full((room.ENTRIES,), 1e6))
    before = {name: value.clone() for name, value in job.problem.module.state_dict().items()}
    after = final_module(job, train(job)).state_dict()
    shared = job.parts.layout.names[: job.parts.layout.shared]
    return [
        f"{name} is released and is not w^0's: it depends on clients' data outside the clipped sum"
        for name, value in after.items()
        if name not in shared and not (name in before and torch.equal(value, before[name]))
    ]


RUNS = 20_000
LOOPED_RUNS = 300
"""Runs per world where each must be a call of its own (adaptive clip, clients that draw noise themselves)."""
VOTE_RUNS = 5_000
GRID_CANARIES = 3
"""Canaries where runs are slow: exact noise on whole numbers (secure grid noise, ddgauss)."""
CONFIDENCE = 1 - 1e-6
ASSUMPTIONS = assumptions(
    "mechanism", sigma=room.SIGMA, delta=DELTA, clip=room.CLIP, clients=room.CLIENTS, tensors=room.TENSORS,
    entries=room.ENTRIES,
)  # fmt: skip
LEARNED = "projection on the learned change"
ALONE = "Every run is a call of the real path of its own."
TOGETHER = "Runs are copies side by side in one call of the real path; single calls agree."


def audit_method(
    name: str, *, options: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None,
    runs: int = RUNS, confidence: float = CONFIDENCE,
) -> AuditResult:  # fmt: skip
    """Return the lower bound on ε of one round of a method, beside the claimed and the proven ε.

    name: a packaged method (or path.py:function). options: its keys. sections: recipe sections ``privacy`` and
    ``server`` to audit with (a clip of another kind, an optimiser). runs: per world and canary.
    Raises InputError for an unknown name, fewer than 200 runs, a confidence outside (0.5, 1).
    """
    whole("runs", runs, 200)
    in_range("confidence", confidence, 0.5, 1, open_low=True, open_high=True)
    began = time.perf_counter()
    bench = room.bench_of(name, options, sections)
    plan, votes = bench.parts.plan, bench.parts.algorithm.kind == "votes"
    best = audit_votes(bench, runs, confidence) if votes else audit_bench(bench, runs, confidence)
    claimed, proven = epsilons(plan)
    exact = plan.private and claimed == proven and not votes
    return replace(
        best, method=name, claimed=claimed, proven=proven, confidence=confidence, seconds=time.perf_counter() - began,
        assumptions=(*ASSUMPTIONS, *best.assumptions),
        violations=contract_violations(bench) if exact else (),
    )  # fmt: skip


def epsilons(plan: Plan) -> tuple[float, float]:
    """Return (claimed, proven) ε of one round with the client in it; they differ for published procedures only."""
    proven, claimed = plan.epsilon(1), plan.account.claimed(plan, 1)
    return proven if claimed is None else claimed, proven


def audit_bench(
    bench: Bench, runs: int, confidence: float, pairs: Mapping[str, Neighbours] | None = None
) -> AuditResult:
    """Return the best bound over pairs of neighbours (default: all), which share the failure probability evenly."""
    pairs = pairs_of(bench) if pairs is None else pairs
    failure, (first, *_) = (1 - confidence) / len(pairs), pairs.values()
    looped = any(map(room.must_loop, pairs.values()))
    if looped and first.world(True, room.run_key(0, "grid", 0)).aggregate.exact is not None:
        pairs = dict(islice(pairs.items(), GRID_CANARIES))
    count = min(runs, LOOPED_RUNS) if looped else runs
    results = [audit_canary(name, pair, count, failure, looped) for name, pair in pairs.items()]
    return max(results, key=lambda result: result.lower_bound or 0.0)


def audit_votes(bench: Bench, runs: int, confidence: float) -> AuditResult:
    """Return the bound of one cohort draw of noisy votes; what the server makes of them is post-processing.

    The canary votes for what nobody else votes for; world 0 lacks its votes.
    """
    runs = min(runs, VOTE_RUNS)
    zero, one = (room.vote_releases(bench, present, runs) for present in (False, True))
    change = one[: runs // 2].mean(0) - zero[: runs // 2].mean(0)
    way = "One cohort draw; every run is a call of the real sum and its noise."
    result = _bounded({LEARNED: zero @ change}, {LEARNED: one @ change}, 1 - confidence)
    return replace(result, canary="a vote that nobody else casts", assumptions=(way,))


def audit_canary(name: str, neighbours: Neighbours, runs: int, failure: float, looped: bool) -> AuditResult:
    """Return the bound from one pair of neighbours."""
    absent, present = (room.releases(neighbours, world, runs, name, looped) for world in (False, True))
    learned = present[: runs // 2].mean(0) - absent[: runs // 2].mean(0)
    change = room.coupled_difference(neighbours)
    zero, one = (statistics(states, change, learned, neighbours.bench) for states in (absent, present))
    return replace(_bounded(zero, one, failure), canary=name, assumptions=(ALONE if looped else TOGETHER,))


def _bounded(absent: Mapping[str, Floats], present: Mapping[str, Floats], failure: float) -> AuditResult:
    """Return what the second halves of the runs show, by the statistic that tells the first halves apart best."""
    runs = len(next(iter(absent.values())))
    half = runs // 2  # counts on the runs that chose the statistic would give too high a bound
    tried = {name: choose_event(absent[name][:half], present[name][:half], DELTA, failure) for name in absent}
    chosen = max(tried, key=lambda name: tried[name][1])
    bound = tried[chosen][0].bound(absent[chosen][half:], present[chosen][half:], DELTA, failure)
    return AuditResult("mechanism", "", lower_bound=bound, statistic=chosen, runs=runs)


def statistics(states: Tensor, difference: Tensor, learned: Tensor, bench: Bench) -> dict[str, Floats]:
    """Return the statistics ``(runs,)`` of released states ``(runs, width)``; a value that is not finite counts as
    huge.
    """
    width = bench.state.shared.numel()
    safe = torch.nan_to_num(states, nan=1e12, posinf=1e12, neginf=-1e12)
    moved = safe[:, :width]
    tensors = {
        "projection on the change": safe @ torch.nan_to_num(difference),
        LEARNED: safe @ torch.nan_to_num(learned),
        "energy": moved.square().sum(1, dtype=torch.float64),
        "support": (moved != 0).sum(1),
    }
    if safe.shape[1] % width:
        tensors["next clip"] = safe[:, -1]
    return {name: values.double().numpy() for name, values in tensors.items()}
