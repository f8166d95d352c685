"""The only server path: choose a cohort, broadcast, add clipped messages, finish the round.

A simulation and a federation call the same functions; only the transport differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rng import stream
from fedflat.core.types import (
    Aggregate,
    Algorithm,
    Broadcast,
    Clip,
    Local,
    MaskView,
    RoundInfo,
    RoundState,
    ServerView,
)
from fedflat.engine.client import rate_of, steps_of
from fedflat.engine.parts import Parts

QUANTILES = {"min": 0.0, "0.05": 0.05, "0.25": 0.25, "0.5": 0.5, "0.75": 0.75, "0.95": 0.95, "max": 1.0}


def select_cohort(parts: Parts, key: bytes, round: int) -> np.ndarray:
    """The secret cohort of a round: sorted client ids, drawn from the noise key's own stream."""
    return parts.plan.sampler.select(stream(key, "cohort", round))


def broadcast_of(
    parts: Parts, state: RoundState, seed: int, public_update: Callable[[], Tensor] | None = None
) -> Broadcast:
    """What every client of the round receives; the common mask, if any, comes from public randomness only."""
    mask = None
    if parts.algorithm.mask is not None:
        initial = state.slots.get("initial", state.shared)
        view = MaskView(state.shared, initial, stream(seed, "common mask", state.round), public_update)
        mask = parts.algorithm.mask(view)
    return Broadcast(
        round=state.round,
        shared=state.shared,
        clip=state.clip,
        rate=parts.local.rate(state.round),
        memory=state.slots.get("memory"),
        mask=mask,
    )


class Accumulator:
    """Adds messages as they come: clip, then running float64 sum. Memory is O(d), not O(cohort)."""

    def __init__(
        self, clip: Clip, threshold: float, tensors: tuple[slice, ...], dimension: int, weighted: bool = False
    ) -> None:
        self.clip, self.threshold, self.tensors, self.dimension = clip, threshold, tensors, dimension
        self.weighted = weighted
        self.total = torch.zeros(dimension, dtype=torch.float64)
        self._norms: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._stats: dict[str, list[Tensor]] = {}
        self.weight = 0.0

    @property
    def divisor(self) -> float | None:
        """Σ n_i of the sample-weighted mean; None where the plan's public constant m divides."""
        return max(self.weight, 1.0) if self.weighted else None

    def add(self, messages: Tensor, sizes: Sequence[int], stats: Mapping[str, Tensor] | None = None) -> None:
        """Clip messages ``(n, d)`` and add them. A message that is not finite, or of the wrong length, counts as zero.

        stats: named facts ``(n,)`` of the clients, private to the simulation.
        sizes: the clients' numbers of examples ``(n,)``, used only by the sample-weighted mean of the non-private
        twins and of published procedures.
        """
        messages = torch.atleast_2d(messages.detach())
        if messages.shape[-1] != self.dimension or not messages.is_floating_point():
            messages = torch.full((messages.shape[0], self.dimension), math.nan)
        norms, factors = self.clip.factors(messages, self.threshold, self.tensors)
        finite = torch.isfinite(norms)
        self._norms.append(norms.cpu())
        self._factors.append((factors if factors.dim() == 1 else factors.amin(1)).cpu())
        self._note(stats)
        if self.weighted:
            weights = torch.as_tensor(sizes, dtype=factors.dtype, device=factors.device)
            self.weight += float(weights.sum())
            factors = factors * (weights if factors.dim() == 1 else weights[:, None])
        if not bool(finite.all()):
            messages = torch.where(finite[:, None], messages, torch.zeros_like(messages))
        self._sum(messages, factors)

    def _note(self, stats: Mapping[str, Tensor] | None) -> None:
        for name, values in (stats or {}).items():
            self._stats.setdefault(name, []).append(torch.atleast_1d(values).double().cpu())

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        """total += Σ factor·message, each product and sum in float64."""
        if factors.dim() == 1:
            if len(messages) == 1:
                self.total.add_(messages[0].to(self.total.device), alpha=float(factors[0]))
            else:
                self.total += (factors @ messages.double()).to(self.total.device)
            return
        for where, part in zip(self.tensors, factors.T):
            self.total[where] += (part @ messages[:, where].double()).to(self.total.device)

    def add_sum(self, total: Tensor, norms: Tensor, factors: Tensor, stats: Mapping[str, Tensor] | None = None) -> None:
        """Add a block whose clipped sum a back end already formed (low-rank form, worker processes)."""
        self.total += total.to(self.total)
        self._norms.append(norms.cpu())
        self._factors.append(factors.cpu())
        self._note(stats)

    def result(self) -> Aggregate:
        """The aggregate so far."""
        norms = torch.cat(self._norms) if self._norms else torch.zeros(0, dtype=torch.float64)
        factors = torch.cat(self._factors) if self._factors else torch.zeros(0, dtype=torch.float64)
        bits = float((norms <= self.threshold).double().sum() - 0.5 * norms.numel())
        means = {name: float(torch.cat(values).mean()) for name, values in self._stats.items()}
        return Aggregate(self.total.clone(), norms.numel(), bits, norms, factors, means)


def accumulator_of(parts: Parts, broadcast: Broadcast, key: bytes) -> Any:
    """What adds up the round's messages: the plain clipped sum, unless the mechanism brings its own (ddgauss, grid noise)."""
    tensors, size = parts.layout.tensors("shared"), parts.layout.dimension
    make = getattr(parts.mechanism, "accumulator", None)
    if make is not None:
        return make(parts.clip, broadcast, tensors, key)
    return Accumulator(parts.clip, broadcast.clip, tensors, size, parts.weighted)


def finish_round(
    parts: Parts,
    state: RoundState,
    broadcast: Broadcast,
    aggregate: Aggregate,
    key: bytes,
    charge: Callable[[dict[str, Any]], None],
    *,
    divisor: float | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Noise on the sum, the constant divisor, the ledger, then the server step (algorithms.md, the round, steps 6–9).

    charge: writes the round's privacy event durably; it is called before anything that leaves the server exists.
    divisor: only for the non-private sample-weighted mean; the plan's public constant m otherwise.
    """
    plan, round = parts.plan, state.round
    bound = parts.clip.bound(broadcast.clip)
    noise = parts.mechanism.noise(key, round, broadcast, aggregate, bound)
    total = aggregate.total
    if broadcast.mask is not None:  # noise lives on the mask, so nothing else may leave, whatever a client sent
        total = torch.where(broadcast.mask, total, torch.zeros_like(total))
    noisy = (total + noise).to(state.shared.dtype)
    if plan.private:
        charge(plan.record(round, bound))
    mean = noisy / (plan.divisor if divisor is None else divisor)
    slots = dict(state.slots)
    phase = parts.algorithm.shared_phase
    view = ServerView(
        round, steps_of(phase, parts.local), rate_of(phase, parts.local, broadcast), parts.layout.tensors("shared"), slots
    )
    for step in parts.algorithm.server:
        mean, changed = step(mean, dataclasses.replace(view, slots=slots))
        slots.update(changed)
    shared, changed = parts.optimizer(state.shared, mean, slots)
    slots.update(changed)
    clip = _next_clip(parts, broadcast.clip, aggregate, key, round)
    info = RoundInfo(
        released={"round": round, "clip": broadcast.clip if math.isfinite(broadcast.clip) else None},
        private=_private_facts(aggregate, noise, bound),
    )
    return RoundState(round + 1, shared, clip, slots), info


def _next_clip(parts: Parts, threshold: float, aggregate: Aggregate, key: bytes, round: int) -> float:
    """C_{t+1}: the same unless the clip is adaptive, whose count is noised with the plan's own σ_b."""
    follow = getattr(parts.clip, "next", None)
    if follow is None:
        return threshold
    noisy = aggregate.bits + parts.mechanism.count_noise(key, round)
    return float(follow(threshold, noisy, parts.plan.divisor))


def _private_facts(aggregate: Aggregate, noise: Tensor, bound: float) -> dict[str, Any]:
    """Norms against the clip, ᾱ and α̃ (000 Eq. 15), clip bias (004 Eq. 2, first term) and signal-to-noise."""
    norms, factors = aggregate.norms, aggregate.factors
    facts: dict[str, Any] = {"cohort": aggregate.count, **aggregate.stats}
    noise_norm = float(torch.linalg.vector_norm(noise, dtype=torch.float64))
    signal = float(torch.linalg.vector_norm(aggregate.total))
    facts["noise_norm"] = noise_norm
    facts["signal_to_noise"] = signal / noise_norm if noise_norm > 0 else None
    finite = norms[torch.isfinite(norms)]
    if finite.numel():
        points = torch.quantile(finite, torch.tensor(list(QUANTILES.values()), dtype=finite.dtype))
        alpha = factors.mean()
        excess = (finite - bound).clamp_min(0) if math.isfinite(bound) else torch.zeros_like(finite)
        facts |= {
            "update_norm_mean": float(finite.mean()),
            "update_norm_sd": float(finite.std(correction=0)),
            "update_norm_quantiles": dict(zip(QUANTILES, points.tolist())),
            "clipped_fraction": float((factors < 1).double().mean()),
            "alpha_mean": float(alpha),
            "alpha_spread": float((factors - alpha).abs().mean()),
            "clip_bias": float((excess**2).mean()) / aggregate.total.numel(),
        }
    return facts
