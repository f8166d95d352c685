"""Run the only server path: choose a cohort, broadcast, add clipped messages, finish the round.

A simulation and a federation call the same functions; only the transport differs.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import NEVER, MinSeparation, rounding, separated, stream
from fedflat.core.types import AVERAGE, Aggregate, Broadcast, MaskView, MeanView, RoundInfo, RoundState, ServerView
from fedflat.engine.client import rate_of, steps_of
from fedflat.engine.job import RoundParts
from fedflat.engine.reduce import GridAccumulator, PlainSum
from fedflat.privacy.plan import Plan

QUANTILES = {"min": 0.0, "0.05": 0.05, "0.25": 0.25, "0.5": 0.5, "0.75": 0.75, "0.95": 0.95, "max": 1.0}
"""What is shown of a distribution over clients: its ends, its middle, and the bands that the report draws."""
MALFORMED = "malformed"
"""Name of a round's private figure: messages that were not finite, or of another shape, and counted as zero."""
LAST_ROUND, COUNTS = "last_round", "participations"
"""Names of the server's slots with the round in which each client last took part, where rounds must lie apart, and
with how often it did, where that is capped."""


def select_cohort(parts: RoundParts, key: bytes, draw: int) -> np.ndarray:
    """Return the cohort of a draw (usually the round's number): sorted client ids, secret ones from the noise key."""
    return parts.plan.sampler.select_at(draw, stream(key, "cohort", draw))


def broadcast_of(
    parts: RoundParts, state: RoundState, seed: int, public_update: Callable[[], Tensor] | None = None
) -> Broadcast:
    """Return what every client of the round receives; the common mask, if any, comes from public randomness only."""
    mask = None
    if parts.algorithm.mask is not None:
        initial = state.slots.get("initial", state.shared)
        view = MaskView(state.shared, initial, stream(seed, "common mask", state.round), public_update)
        mask = parts.algorithm.mask(view)
    vectors = {name: state.slots.get(name, torch.zeros_like(state.shared)) for name in parts.broadcast}
    return Broadcast(state.round, state.shared, state.clip, parts.local.rate(state.round), vectors, mask)


def accumulator_of(parts: RoundParts, broadcast: Broadcast, key: bytes) -> Any:
    """Return what adds up the round's messages: the plain clipped sum, unless the mechanism has its own."""
    tensors, size = parts.message_tensors, parts.message_length
    if (accumulator := parts.mechanism.accumulator(parts.clip, broadcast, tensors, key)) is not None:
        return accumulator
    encoder = parts.mechanism.encoder(key, broadcast, parts.clip.bound(broadcast.clip), size)
    if encoder is not None:
        return GridAccumulator(encoder, parts.clip, broadcast.clip, tensors, size)
    return PlainSum(parts.clip, broadcast.clip, tensors, size, parts.weighted)


def within_cap(parts: RoundParts, state: RoundState, cohort: np.ndarray) -> tuple[np.ndarray, RoundState]:
    """Return the cohort without clients that took part too often (trust: local) or come back too early.

    Also the new counts, or each client's last round. The server of a local run sees who takes part, and a schedule is
    public, so neither is secret; a client left out counts as zero.
    """
    sampler, cap = parts.plan.sampler, parts.plan.max_participations
    apart = parts.plan.private and isinstance(sampler, MinSeparation)
    if not apart and cap is None:
        return cohort, state
    name, before = (LAST_ROUND, NEVER) if apart else (COUNTS, 0)
    past = state.slots.get(name)
    past = torch.full((sampler.clients,), before, dtype=torch.int64) if past is None else past.clone()
    if isinstance(sampler, MinSeparation) and apart:
        allowed = separated(past.numpy(), cohort, state.round, sampler.separation)
        past[torch.from_numpy(allowed)] = state.round
    else:
        allowed = cohort[past.numpy()[cohort] < (cap or 0)]
        past[torch.from_numpy(allowed)] += 1
    return allowed, replace(state, slots={**state.slots, name: past})


def finish_round(
    parts: RoundParts, state: RoundState, broadcast: Broadcast, aggregate: Aggregate, key: bytes,
    charge: Callable[[dict[str, Any]], object], *, scores: np.ndarray | None = None,
) -> tuple[RoundState, RoundInfo]:  # fmt: skip
    """Charge the ledger, add noise to the sum, divide by the constant, run the server steps; return the new state.

    charge: writes the round's privacy event durably; it is called before anything that leaves the server exists.
    scores: the cohort's sums of a private evaluation (``engine.evaluate.cohort_scores``).
    """
    plan, round = parts.plan, state.round
    bound = parts.clip.bound(broadcast.clip)
    if plan.private:
        for line in plan.records(round, bound):
            charge(line)
    # After the charge: that a round was aborted tells something of who came.
    if not plan.releases(aggregate.count):
        return _aborted(parts, state, broadcast, aggregate)
    released = noisy_sum(parts, broadcast, aggregate, key)
    constant = plan.divisor if aggregate.divisor is None else aggregate.divisor
    # A copy: ``released`` is still needed for the private figures.
    mean = released.to(state.shared.dtype, copy=True).div_(constant)
    slots = dict(state.slots)
    phase = parts.algorithm.shared_phase
    steps, rate = steps_of(phase, parts.local), rate_of(phase, parts.local, broadcast)
    view = ServerView(round, steps, rate, parts.layout.tensors("shared"), slots, plan.divisor, plan.sampler.clients)
    for step in parts.algorithm.server:
        mean, changed = step(mean, replace(view, slots=slots))
        slots.update(changed)
    shared, changed = parts.optimizer(mean_view(parts, bound, constant, round))(state.shared, mean, slots)
    slots.update(changed)
    clip = broadcast.clip
    if parts.clip.moves:  # an adaptive clip's count is noised with the plan's own σ_b
        clip = float(parts.clip.next(clip, parts.mechanism.noisy_count(key, round, aggregate), plan.divisor))
    public = {"round": round, "clip": broadcast.clip if math.isfinite(broadcast.clip) else None}
    if plan.min_cohort is not None:
        public["aborted"] = False
    if scores is not None:
        public |= private_accuracy(plan, scores, key, round)
    info = RoundInfo(released=public, private=_private_facts(aggregate, rounding.distance(released, aggregate.total)))
    return _averaged(parts, RoundState(round + 1, shared, clip, slots)), info


def private_accuracy(plan: Plan, scores: np.ndarray, key: bytes, round: int) -> dict[str, float]:
    """Return the cohort's accuracy from Σ(a_i − ½, ½) with noise, and the std that the noise gives it.

    One client moves the two sums together by at most 1/√2, and σ_b is made for ½: the noise has √2 times as much.
    """
    std = math.sqrt(2) * (plan.count_std or 0.0)
    centred, halves = scores + std * stream(key, "evaluation noise", round).standard_normal(2)
    # The divisor is floored by a public number, so that noise near zero cannot blow the ratio up.
    accuracy = 0.5 + centred / (2 * max(halves, plan.divisor / 8))
    return {"private_accuracy": float(np.clip(accuracy, 0, 1)), "private_accuracy_sd": std / plan.divisor}


def noisy_sum(parts: RoundParts, broadcast: Broadcast, aggregate: Aggregate, key: bytes) -> Tensor:
    """Return the sum of clipped messages ``(d,)`` with the round's noise: all that leaves of the clients' messages."""
    noisy = parts.mechanism.release(key, broadcast, aggregate, parts.clip.bound(broadcast.clip))
    # Noise lives on the common mask, so nothing else may leave, whatever a client sent.
    return noisy if broadcast.mask is None else torch.where(broadcast.mask, noisy, torch.zeros_like(noisy))


def mean_view(parts: RoundParts, bound: float, divisor: float, round: int) -> MeanView:
    """Return the public noise in a mean of messages with L2 norm ≤ ``bound``, for the expected cohort."""
    plan, source = parts.plan, parts.mechanism
    total_std = source.total_std(bound, plan.divisor)
    std = (plan.std(bound) if total_std is None else total_std) * source.row_norm(round)
    return MeanView(std / divisor, bound, divisor)


def _averaged(parts: RoundParts, state: RoundState) -> RoundState:
    """Return the state with the average of iterates that is released instead of the last one, if there is to be one."""
    if parts.average is None:
        return state
    average = parts.average(state.round, state.shared, state.slots.get(AVERAGE))
    return state if average is None else replace(state, slots={**state.slots, AVERAGE: average})


def _aborted(
    parts: RoundParts, state: RoundState, broadcast: Broadcast, aggregate: Aggregate
) -> tuple[RoundState, RoundInfo]:
    """Release nothing: too few honest shares, or more than the top-up has room for; the charge stays."""
    public = {"round": state.round, "clip": broadcast.clip, "aborted": True}
    after = _averaged(parts, replace(state, round=state.round + 1))
    return after, RoundInfo(released=public, private=_of_the_cohort(aggregate))


def _of_the_cohort(aggregate: Aggregate) -> dict[str, Any]:
    """Return the cohort's size and figures, and how many messages were not finite, or of another shape, if any were."""
    malformed = int((~torch.isfinite(aggregate.norms)).sum())
    return {"cohort": aggregate.count, **aggregate.stats, **({MALFORMED: malformed} if malformed else {})}


def _private_facts(aggregate: Aggregate, noise_norm: float) -> dict[str, Any]:
    """Return norms against the clip, ᾱ and α̃ (Shi et al. 2023a, Eq. 15), signal-to-noise and both errors.

    noise_norm is the L2 norm of what the noise added to the sum; clip_bias = Σ‖Δ_i‖·|1 − α_i| is at least the norm of
    what the clip took from it (Cheng et al. 2022, Eq. 2 has the mean square of each for one client, per coordinate).
    """
    norms, factors = aggregate.norms, aggregate.factors
    ratio = float(rounding.norm(aggregate.total)) / noise_norm if noise_norm > 0 else None
    facts = _of_the_cohort(aggregate) | {"noise_norm": noise_norm, "signal_to_noise": ratio}
    finite = norms[torch.isfinite(norms)]
    if finite.numel():
        points = torch.quantile(finite, torch.tensor(list(QUANTILES.values()), dtype=finite.dtype))
        alpha = factors.mean()
        lost = finite * (1 - factors[torch.isfinite(norms)]).abs()
        facts |= {
            "update_norm_mean": float(finite.mean()), "update_norm_sd": float(finite.std(correction=0)),
            "update_norm_quantiles": dict(zip(QUANTILES, points.tolist())),
            "clipped_fraction": float((factors < 1).double().mean()), "alpha_mean": float(alpha),
            "alpha_spread": float((factors - alpha).abs().mean()), "clip_bias": float(lost.sum()),
        }  # fmt: skip
    return facts
