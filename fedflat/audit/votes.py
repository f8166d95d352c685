"""Releases of noisy votes (ae-dpfl): the real sum of one-hot votes and its real noise, one call per run."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedflat.audit.bench import CLIENTS, Bench
from fedflat.audit.releases import run_key
from fedflat.engine.round import accumulator_of, broadcast_of, noisy_sum, select_cohort

Floats = NDArray[np.float64]


def vote_releases(bench: Bench, present: bool, runs: int) -> Floats:
    """Noisy votes ``(runs, draws·Q·V)``: others vote for the last class, the canary, if ``present``, for the first."""
    parts, state = bench.parts, bench.state
    broadcast, size = broadcast_of(parts, state, bench.seed), parts.mechanism.size  # type: ignore[attr-defined]
    votes = torch.zeros(CLIENTS, size)
    votes[:-1, -1] = votes[-1, 0] = 1.0
    released = []
    for number in range(runs):
        key = run_key(number, f"votes {present}", 0)
        accumulator = accumulator_of(parts, broadcast, key)
        for draw in parts.plan.draws(state.round):
            cohort = select_cohort(parts, key, draw)
            chosen = cohort if present else cohort[cohort != CLIENTS - 1]
            accumulator.of(draw).add(votes[torch.from_numpy(chosen)], [1] * len(chosen))
        released.append(noisy_sum(parts, broadcast, accumulator.result(), key))
    return torch.stack(released).double().numpy()
