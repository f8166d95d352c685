"""The only server path: choose a cohort, broadcast, add clipped messages, finish the round.

A simulation and a federation call the same functions; only the transport differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import wide
from fedflat.core.rng import stream
from fedflat.core.schedules import NEVER, MinSeparation, Scheduled, separated
from fedflat.core.types import (
    AVERAGE,
    Aggregate,
    Broadcast,
    Correlated,
    GridMechanism,
    MaskView,
    MeanView,
    MovingClip,
    PublicSampler,
    RoundInfo,
    RoundState,
    ScaledMechanism,
    ServerView,
    SharedNoise,
    SummingMechanism,
)
from fedflat.engine.accumulate import GridAccumulator, PlainSum
from fedflat.engine.client import rate_of, steps_of
from fedflat.engine.evaluate import QUANTILES
from fedflat.engine.parts import Parts

MALFORMED = "malformed"
"""Name of a round's private figure: messages that were not finite, or of another shape, and counted as zero."""
LAST_ROUND = "last_round"
"""Name of the server's slot with the round in which each client last took part, where rounds must lie apart."""


def select_cohort(parts: Parts, key: bytes, draw: int) -> np.ndarray:
    """The cohort of a draw (usually the round's number): sorted client ids, secret ones from the noise key."""
    sampler, secret = parts.plan.sampler, stream(key, "cohort", draw)
    if isinstance(sampler, Scheduled):
        return sampler.select_at(draw, secret)
    return sampler.select(sampler.public_generator(draw) if isinstance(sampler, PublicSampler) else secret)


def broadcast_of(
    parts: Parts, state: RoundState, seed: int, public_update: Callable[[], Tensor] | None = None
) -> Broadcast:
    """What every client of the round receives; the common mask, if any, comes from public randomness only."""
    mask, now = None, parts.of(state.round)
    if now.algorithm.mask is not None:
        initial = state.slots.get("initial", state.shared)
        view = MaskView(state.shared, initial, stream(seed, "common mask", state.round), public_update)
        mask = now.algorithm.mask(view)
    return Broadcast(
        round=state.round,
        shared=state.shared,
        clip=state.clip if now.threshold is None else now.threshold,
        rate=parts.local.rate(state.round),
        vectors={name: state.slots.get(name, torch.zeros_like(state.shared)) for name in parts.broadcast},
        mask=mask,
    )


def accumulator_of(parts: Parts, broadcast: Broadcast, key: bytes) -> Any:
    """What adds up the round's messages: the plain clipped sum, unless the mechanism brings its own."""
    parts = parts.of(broadcast.round)
    tensors, size = parts.message_tensors, parts.message_length
    if isinstance(parts.mechanism, SummingMechanism):
        return parts.mechanism.accumulator(parts.clip, broadcast, tensors, key)
    if isinstance(parts.mechanism, GridMechanism):
        encoder = parts.mechanism.encoder(key, broadcast, parts.clip.bound(broadcast.clip), size)
        return GridAccumulator(encoder, parts.clip, broadcast.clip, tensors, size)
    return PlainSum(parts.clip, broadcast.clip, tensors, size, parts.weighted)


def within_cap(parts: Parts, state: RoundState, cohort: np.ndarray) -> tuple[np.ndarray, RoundState]:
    """The cohort without clients that took part ``max_participations`` times (trust: local) or come back too early.

    Also the new counts, or each client's last round. The server of a local run sees who takes part, and a schedule is
    public, so neither is secret; a client left out counts as zero.
    """
    if parts.plan.private and isinstance(parts.plan.sampler, MinSeparation):
        return _apart(state, cohort, parts.plan.sampler)
    cap = parts.plan.max_participations
    if cap is None:
        return cohort, state
    counts = state.slots.get("participations")
    counts = torch.zeros(parts.plan.sampler.clients, dtype=torch.int64) if counts is None else counts.clone()
    allowed = cohort[counts.numpy()[cohort] < cap]
    counts[torch.from_numpy(allowed)] += 1
    return allowed, dataclasses.replace(state, slots={**state.slots, "participations": counts})


def _apart(state: RoundState, cohort: np.ndarray, sampler: MinSeparation) -> tuple[np.ndarray, RoundState]:
    last = last_rounds(state, sampler.clients)
    allowed = separated(last.numpy(), cohort, state.round, sampler.separation)
    last[torch.from_numpy(allowed)] = state.round
    return allowed, dataclasses.replace(state, slots={**state.slots, LAST_ROUND: last})


def last_rounds(state: RoundState, clients: int) -> Tensor:
    """The round in which each client last took part, int64 ``(M,)``, ``NEVER`` at first; a copy."""
    found = state.slots.get(LAST_ROUND)
    return torch.full((clients,), NEVER, dtype=torch.int64) if found is None else found.clone()


def finish_round(
    parts: Parts,
    state: RoundState,
    broadcast: Broadcast,
    aggregate: Aggregate,
    key: bytes,
    charge: Callable[[dict[str, Any]], object],
    *,
    divisor: float | None = None,
    unit: Callable[[], Tensor] | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Ledger, noise on the sum, constant divisor, server step (docs/specification.md, "The round", steps 6–9).

    charge: writes the round's privacy event durably; it is called before anything that leaves the server exists.
    divisor: only for the non-private sample-weighted mean; the plan's public constant m otherwise.
    unit: the mechanism's own N(0, I) of this round, where it was drawn while clients trained.
    """
    parts = parts.of(state.round)
    plan, round = parts.plan, state.round
    bound = parts.clip.bound(broadcast.clip)
    if plan.private:
        for line in plan.records(round, bound):
            charge(line)
    if not plan.releases(aggregate.count):
        return _aborted(parts, state, broadcast, aggregate)
    released = noisy_sum(parts, broadcast, aggregate, key, unit)
    constant = plan.divisor if divisor is None else divisor
    mean = released.to(state.shared.dtype, copy=True).div_(constant)
    slots = dict(state.slots)
    phase = parts.algorithm.shared_phase
    steps, rate = steps_of(phase, parts.local), rate_of(phase, parts.local, broadcast)
    tensors = parts.layout.tensors("shared")
    view = ServerView(round, steps, rate, tensors, slots, plan.divisor, plan.sampler.clients)
    for step in parts.algorithm.server:
        mean, changed = step(mean, dataclasses.replace(view, slots=slots))
        slots.update(changed)
    shared, changed = parts.optimizer(mean_view(parts, bound, constant, round))(state.shared, mean, slots)
    slots.update(changed)
    clip = state.clip if parts.threshold is not None else _next_clip(parts, broadcast.clip, aggregate, key, round)
    shown = {"round": round, "clip": broadcast.clip if math.isfinite(broadcast.clip) else None}
    if plan.min_cohort is not None:
        shown["aborted"] = False
    info = RoundInfo(released=shown, private=_private_facts(aggregate, wide.distance(released, aggregate.total)))
    return _averaged(parts, RoundState(round + 1, shared, clip, slots)), info


def noisy_sum(
    parts: Parts, broadcast: Broadcast, aggregate: Aggregate, key: bytes, unit: Callable[[], Tensor] | None = None
) -> Tensor:
    """The sum of clipped messages ``(d,)`` with the round's noise: all that leaves of the clients' messages."""
    bound = parts.clip.bound(broadcast.clip)
    if isinstance(parts.mechanism, GridMechanism):
        noisy = parts.mechanism.release(key, broadcast, aggregate, bound)
    elif unit is not None and isinstance(parts.mechanism, ScaledMechanism):
        noisy = wide.plus(aggregate.total, parts.mechanism.scaled(unit(), broadcast, aggregate, bound))
    else:
        noisy = wide.plus(aggregate.total, parts.mechanism.noise(key, broadcast.round, broadcast, aggregate, bound))
    # Noise lives on the common mask, so nothing else may leave, whatever a client sent.
    return noisy if broadcast.mask is None else torch.where(broadcast.mask, noisy, torch.zeros_like(noisy))


def mean_view(parts: Parts, bound: float, divisor: float, round: int) -> MeanView:
    """What is public of the noise in a mean of messages with L2 norm ≤ ``bound``: that of the expected cohort."""
    plan, source = parts.plan, parts.mechanism
    std = source.total_std(bound, plan.divisor) if isinstance(source, SharedNoise) else plan.std(bound)
    std *= source.row_norm(round) if isinstance(source, Correlated) else 1.0
    return MeanView(std / divisor, bound, divisor)


def _averaged(parts: Parts, state: RoundState) -> RoundState:
    """The state with the average of iterates that is released instead of the last one, if there is to be one."""
    if parts.average is None:
        return state
    found = parts.average(state.round, state.shared, state.slots.get(AVERAGE))
    return state if found is None else dataclasses.replace(state, slots={**state.slots, AVERAGE: found})


def _aborted(
    parts: Parts, state: RoundState, broadcast: Broadcast, aggregate: Aggregate
) -> tuple[RoundState, RoundInfo]:
    """Too few honest shares, or more than the top-up has room for: nothing is released, the charge stays."""
    shown = {"round": state.round, "clip": broadcast.clip, "aborted": True}
    hidden = {"cohort": aggregate.count, **aggregate.stats, **_malformed(aggregate)}
    after = _averaged(parts, dataclasses.replace(state, round=state.round + 1))
    return after, RoundInfo(released=shown, private=hidden)


def _next_clip(parts: Parts, threshold: float, aggregate: Aggregate, key: bytes, round: int) -> float:
    """C_{t+1}: the same unless the clip is adaptive, whose count is noised with the plan's own σ_b."""
    if not isinstance(parts.clip, MovingClip):
        return threshold
    return float(parts.clip.next(threshold, parts.mechanism.noisy_count(key, round, aggregate), parts.plan.divisor))


def _malformed(aggregate: Aggregate) -> dict[str, int]:
    """How many messages counted as zero because they were not finite, or of another shape; nothing if none."""
    found = int((~torch.isfinite(aggregate.norms)).sum())
    return {MALFORMED: found} if found else {}


def _private_facts(aggregate: Aggregate, noise_norm: float) -> dict[str, Any]:
    """Norms against the clip, ᾱ and α̃ (Shi et al. 2023a, Eq. 15), signal-to-noise, and both errors as norms of the sum.

    noise_norm is the L2 norm of what the noise added to the sum; clip_bias = Σ‖Δ_i‖·|1 − α_i| is at least the norm of
    what the clip took from it (Cheng et al. 2022, Eq. 2 has the mean square of each for one client, per coordinate).
    """
    norms, factors = aggregate.norms, aggregate.factors
    facts: dict[str, Any] = {"cohort": aggregate.count, **aggregate.stats, **_malformed(aggregate)}
    signal = float(wide.norm(aggregate.total))
    facts["noise_norm"] = noise_norm
    facts["signal_to_noise"] = signal / noise_norm if noise_norm > 0 else None
    finite = norms[torch.isfinite(norms)]
    if finite.numel():
        points = torch.quantile(finite, torch.tensor(list(QUANTILES.values()), dtype=finite.dtype))
        alpha = factors.mean()
        lost = finite * (1 - factors[torch.isfinite(norms)]).abs()
        facts |= {
            "update_norm_mean": float(finite.mean()),
            "update_norm_sd": float(finite.std(correction=0)),
            "update_norm_quantiles": dict(zip(QUANTILES, points.tolist())),
            "clipped_fraction": float((factors < 1).double().mean()),
            "alpha_mean": float(alpha),
            "alpha_spread": float((factors - alpha).abs().mean()),
            "clip_bias": float(lost.sum()),
        }
    return facts
