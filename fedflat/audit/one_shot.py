"""One-shot estimate of ε with canary clients (Andrew et al. 2023, "One-shot empirical privacy estimation for
federated learning", Algorithms 1 and 2): cosines of random canaries with what was released, against unseen ones."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from fedflat.audit.bounds import gaussian_pair_epsilon
from fedflat.audit.injection import LOUD, Directions, observe, with_canaries
from fedflat.audit.result import AuditResult
from fedflat.core.rng import stream
from fedflat.engine.train import Job

Floats = NDArray[np.float64]

BOOTSTRAPS = 200
ASSUMPTIONS = (
    "An estimate, not a bound: it has no confidence level and may lie on either side of the true ε.",
    f"Canaries are additional clients, their updates {LOUD:g} C long, at the recipe's q, σ, C, T and δ; m grows with "
    "them, an adaptive C follows them too; the run is another one than the recipe's, evaluated at its end only.",
    "The adversary sees every released model and knows the directions, but chooses random ones, not the worst.",
    "Cosines are taken as Gaussian in both worlds; canaries as independent of each other (d large).",
)


def one_shot(job: Job, canaries: int) -> AuditResult:
    """Estimate ε at the run's δ from ``canaries`` clients that train and as many directions that do not."""
    began, plan = time.perf_counter(), job.parts.plan
    directions = Directions(job.seed, 2 * canaries, job.parts.layout.dimension)
    included = np.ones(canaries, dtype=np.bool_)
    seen = observe(with_canaries(job, directions, included))
    proven = plan.epsilon(seen.rounds)
    # Algorithm 1 looks at w^T − w^0, Algorithm 2 at the largest cosine over the rounds; the rest was never included.
    found = {
        name: (scores[:canaries], scores[canaries:])
        for name, scores in {"final model": seen.final, "all rounds": seen.largest}.items()
    }
    scored = {name: estimate(*pair, plan.delta) for name, pair in found.items()}
    best = max(scored, key=lambda name: scored[name])
    return AuditResult(
        kind="canaries",
        method=job.parts.algorithm.name,
        claimed=proven,
        proven=proven,
        lower_bound=None,
        confidence=None,
        canary="random direction at C",
        statistic=f"cosine, {best}",
        runs=1,
        seconds=time.perf_counter() - began,
        assumptions=ASSUMPTIONS,
        estimate=scored[best],
        details={
            "canaries": canaries,
            "canary_messages": seen.drawn,
            "rounds": seen.rounds,
            "delta": plan.delta,
            "estimates": scored,
            "interval_95": spread(*found[best], plan.delta, job.seed),
        },
    )


def estimate(observed: Floats, unseen: Floats, delta: float) -> float:
    """ε at ``delta`` between Gaussians fitted to the statistic of canaries and of unseen directions."""
    stds = [max(float(x.std(ddof=1)), 1e-12) for x in (unseen, observed)]
    return gaussian_pair_epsilon(float(unseen.mean()), stds[0], float(observed.mean()), stds[1], delta)


def spread(observed: Floats, unseen: Floats, delta: float, seed: int) -> tuple[float, float]:
    """2.5 % and 97.5 % points of the estimate over resampled canaries (bootstrap)."""
    generator = stream(seed, "audit: bootstrap")
    found = []
    for _ in range(BOOTSTRAPS):
        draws = [x[generator.integers(0, len(x), len(x))] for x in (observed, unseen)]
        found.append(estimate(draws[0], draws[1], delta))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)
