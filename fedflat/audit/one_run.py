"""A lower bound on ε from one training run (Steinke et al. 2023, "Privacy auditing with one (1) training
run", Theorem 5.2): each canary client is in or out by its own fair coin, and the adversary guesses which."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from fedflat.audit.bounds import one_run_bound
from fedflat.audit.injection import LOUD, Directions, observe, with_canaries
from fedflat.audit.result import AuditResult
from fedflat.core.rng import stream
from fedflat.engine.train import Job

GUESSED = 0.2
"""Share of the canaries guessed at, fixed beforehand: half of it highest scores "in", half lowest "out", the rest
abstained from."""
CONFIDENCE = 0.95
ASSUMPTIONS = (
    "A valid lower bound for add-remove (ε, δ)-DP of the run with the canaries in it, whatever the distribution.",
    f"Canaries are additional clients, their updates {LOUD:g} C long, at the recipe's q, σ, C, T and δ; m grows with "
    "them, an adaptive C follows them too; the run is another one than the recipe's, evaluated at its end only.",
    "The coins are independent of everything else, and the number of guesses was fixed beforehand.",
    "The adversary sees every released model; random directions in one run, which hide each other where canaries are "
    "many against d, make the bound valid, not tight.",
)


def one_run(job: Job, canaries: int, confidence: float = CONFIDENCE) -> AuditResult:
    """Lower bound on ε of a run at its δ, from ``canaries`` clients that are included by fair coins."""
    began, plan = time.perf_counter(), job.parts.plan
    included = stream(job.seed, "audit: coins").random(canaries) < 0.5
    directions = Directions(job.seed, canaries, job.parts.layout.dimension)
    seen = observe(with_canaries(job, directions, included))
    guesses, correct = guess(seen.total, included, GUESSED)
    proven = plan.epsilon(seen.rounds)
    return AuditResult(
        kind="one-run",
        method=job.parts.algorithm.name,
        claimed=proven,
        proven=proven,
        lower_bound=one_run_bound(canaries, guesses, correct, plan.delta, 1 - confidence),
        confidence=confidence,
        canary="random direction at C, in or out",
        statistic="sum of cosines over rounds",
        runs=1,
        seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS,
        details={
            "canaries": canaries,
            "included": int(included.sum()),
            "canary_messages": seen.drawn,
            "guesses": guesses,
            "correct": correct,
            "rounds": seen.rounds,
            "delta": plan.delta,
            "largest_possible": one_run_bound(canaries, guesses, guesses, plan.delta, 1 - confidence),
        },
    )


def guess(scores: NDArray[np.float64], included: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """(guesses, correct ones): the highest scores are guessed in, the lowest out, as many of each.

    scores, included: ``(m,)``. share: guesses / m in (0, 1]; the number does not depend on the scores.
    """
    each = max(1, int(share * len(scores) / 2)) if len(scores) > 1 else 0
    order = np.argsort(scores, kind="stable")
    correct = int(included[order[len(order) - each :]].sum()) + int((~included[order[:each]]).sum())
    return 2 * each, correct
