"""Noise in the released model, by cohort law and kind of noise: ``python -m benchmarks.noise`` prints docs' table.

The std of a coordinate's noise in the sum of the rounds' means, root mean square over the rounds, in units of the clip,
for M = 500 clients at δ = 1/500 and 50 clients a round (everybody under ``full``): what the run's own plan adds.
Accuracies that ``benchmarks.noise_accuracy`` measured stand beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError
from fedflat.privacy.accounting.factorisation import KINDS, noise_in_model
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.plan import Plan, build_plan

CLIENTS, COHORT, DELTA = 500, 50, 1 / 500
LAWS = ("poisson", "full", "min-separation", "cyclic-poisson")
EPSILONS, ROUNDS = (2.0, 8.0), (60, 300)
RESULTS = {
    name: Path(__file__).parent / "results" / f"noise-{name.lower().replace('-', '_')}.json"
    for name in ("MNIST", "Fashion-MNIST")
}


def noise(plan: Plan) -> float:
    """Root mean square, over the rounds, of the std of a coordinate of the model's noise; clip 1."""
    own = plan.mechanism.factor if isinstance(plan.mechanism, ScheduledPlan) else None
    each = math.sqrt((plan.rounds + 1) / 2) if own is None else noise_in_model(own)[0]
    return plan.std(1.0) / plan.divisor * each


@functools.cache
def best(law: str, kind: str, rounds: int, epsilon: float) -> Plan | None:
    """The plan of one figure of the table; None where the combination is refused."""
    size, found = CLIENTS if law == "full" else COHORT, []
    # What amplification gives grows with fewer groups, what bands give with more: the best of the divisors.
    for apart in (1, 2, 5, 10) if law == "cyclic-poisson" else (None,):
        try:
            plan = build_plan(
                clients=CLIENTS, cohort=size, rounds=rounds, epsilon=epsilon, delta=DELTA, sampling=law,
                noise=kind, separation=apart,
            )  # fmt: skip
        except InputError:
            return None
        found.append(plan)
    return min(found, key=noise)


def key(law: str, kind: str, epsilon: float, rounds: int, *more: float) -> str:
    """The name of a figure in the files of accuracies."""
    return " ".join([law, kind, *(f"{number:g}" for number in (epsilon, rounds, *more))])


def accuracies(found: dict[str, Any], name: str) -> str:
    """``96.1 ± 0.2`` over the seeds of one cell; a dash where it was not measured."""
    values = [found["accuracy"].get(f"{name} {seed}") for seed in found["settings"]["seeds"]]
    return "–" if None in values else f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def cell(law: str, kind: str, rounds: int, epsilon: float) -> str:
    """Noise and accuracies of one cell of the table, or a dash where the combination is refused."""
    plan = best(law, kind, rounds, epsilon)
    if plan is None:
        return "–"
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.values() if path.is_file()]
    return " · ".join(
        [f"{noise(plan):.3f}", *(accuracies(found, key(law, kind, epsilon, rounds)) for found in measured)]
    )


def table(targets: list[float], runs: list[int]) -> str:
    """The table in Markdown."""
    heads = [f"ε = {epsilon:g}, T = {rounds}" for epsilon in targets for rounds in runs]
    lines = ["| `cohort.sampling` | `privacy.noise` | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for law in LAWS:
        for kind in KINDS:
            cells = [cell(law, kind, rounds, epsilon) for epsilon in targets for rounds in runs]
            if cells != ["–"] * len(cells):
                lines.append(f"| {law} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, nargs="*", default=[*EPSILONS])
    parser.add_argument("--rounds", type=int, nargs="*", default=[*ROUNDS])
    given = parser.parse_args()
    print(table(given.epsilon, given.rounds))
