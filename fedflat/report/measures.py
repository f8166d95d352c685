"""What else is read off a run's records: rounds to a target, training accuracy, the generalisation gap."""

from __future__ import annotations

from fedflat.report import metrics
from fedflat.report.metrics import Run


def rounds_to(run: Run, target: float) -> int | None:
    """Rounds until the shared model's test accuracy (0 to 1) was first at least ``target``; None if it never was.

    Read at the rounds that were evaluated (Liu et al. 2025, Tables II and III).
    """
    return next((turn + 1 for turn, value in metrics.column(run.metrics, "test_accuracy") if value >= target), None)


def shown_round(run: Run, measure: str = "final") -> tuple[int, float] | None:
    """(round, test accuracy) of the ``best`` or the ``final`` evaluated round; the last one of a run with a fate."""
    points = metrics.column(run.metrics, "test_accuracy")
    if not points:
        return None
    return metrics.best_point(run) if measure == "best" else points[-1]


def train_accuracy(run: Run, round: int | None = None) -> float | None:
    """Mean accuracy of the cohort's minibatches while they were trained on; private to the simulation.

    round: of that round (of the last before it in which somebody took part); None: of the last one.
    """
    points = metrics.column(run.private, "train_accuracy")
    kept = [value for turn, value in points if round is None or turn <= round]
    return kept[-1] if kept else None


def generalisation_gap(run: Run, measure: str = "final") -> float | None:
    """Training minus test accuracy at the ``best`` or ``final`` round (Shi et al. 2023a, Table 3); private."""
    shown = shown_round(run, measure)
    trained = None if shown is None else train_accuracy(run, shown[0])
    return None if shown is None or trained is None else trained - shown[1]
