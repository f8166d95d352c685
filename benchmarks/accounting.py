"""ε per round and calibration, against dp-accounting called naively: seconds of processor time in one process.

    python -m benchmarks.accounting

Naively: each round composes everything so far anew, and calibration hands ``calibrate_dp_mechanism`` an event.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CLIENTS, COHORT, ROUNDS, SIGMA, DELTA, EPSILON = 500, 50, 300, 0.95, 2e-3, 8.0
EVERY = 10
"""The naive way is measured at every tenth round only, and multiplied."""


def measure() -> dict[str, Any]:
    """Rows of what was asked, naive and ours, in seconds; and both answers."""
    import dp_accounting
    from dp_accounting import mechanism_calibration, pld, rdp

    import fedflat
    from fedflat.privacy.accounting.curves import compose_epsilon

    calibrate = fedflat.noise_multiplier  # imported here, not while timed
    event = dp_accounting.PoissonSampledDpEvent(COHORT / CLIENTS, dp_accounting.GaussianDpEvent(SIGMA))
    logging.disable(logging.WARNING)  # the library warns of each order it leaves out, every time
    rows = []
    for name, make in (("pld", pld.PLDAccountant), ("rdp", rdp.RdpAccountant)):
        make().compose(event, 1).get_epsilon(DELTA)  # imports and first-use tables of the library

        def naive(make: Callable[[], Any] = make) -> float:
            return [float(make().compose(event, t).get_epsilon(DELTA)) for t in range(EVERY, ROUNDS + 1, EVERY)][-1]

        def ours(name: str = name) -> float:
            return [compose_epsilon(event, t, DELTA, name) for t in range(1, ROUNDS + 1)][-1]

        rows.append(_row(f"ε after each of {ROUNDS} rounds, {name}", naive, ours, EVERY))

    def calibrated() -> float:
        def at(sigma: float) -> Any:
            inner = dp_accounting.PoissonSampledDpEvent(COHORT / CLIENTS, dp_accounting.GaussianDpEvent(sigma))
            return dp_accounting.SelfComposedDpEvent(inner, ROUNDS)

        return float(mechanism_calibration.calibrate_dp_mechanism(pld.PLDAccountant, at, EPSILON, DELTA, tol=1e-4))

    def found() -> float:
        return calibrate(epsilon=EPSILON, clients=CLIENTS, cohort=COHORT, rounds=ROUNDS, delta=DELTA)

    rows.append(_row(f"noise multiplier for ε = {EPSILON:g}, pld", calibrated, found))
    setting = f"q = {COHORT / CLIENTS:g}, σ = {SIGMA:g}, {ROUNDS} rounds, δ = {DELTA:g}, Poisson"
    return {"setting": setting, "rows": rows}


def _row(what: str, naive: Callable[[], float], ours: Callable[[], float], times: int = 1) -> dict[str, Any]:
    slow, theirs = _cpu(naive)
    fast, mine = _cpu(ours)
    return {"what": what, "naive": slow * times, "ours": fast, "naive_answer": theirs, "our_answer": mine}


def _cpu(work: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    answer = work()
    return time.process_time() - began, answer


def markdown(report: dict[str, Any]) -> str:
    """The table."""
    lines = ["# Accounting", "", f"{report['setting']}; seconds of processor time.", ""]
    lines += ["| what | naive | fedflat | faster by | answers |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['what']} | {r['naive']:.2f} | {r['ours']:.2f} | {r['naive'] / r['ours']:.0f} | "
        f"{r['naive_answer']:.4f}, {r['our_answer']:.4f} |"
        for r in report["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    report = measure()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "accounting.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "accounting.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
