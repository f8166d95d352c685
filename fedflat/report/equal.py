"""Methods compared at equal accuracy and at equal ε, read off their curves of released and public numbers.

Only the shared model's accuracy on public test data is used; clients' own models have no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedflat.core.checks import in_range
from fedflat.report import metrics
from fedflat.report.groups import Group
from fedflat.report.metrics import Run

SAME = 1e-3  # relative: two ε closer than this are one ε (calibration stops at about 1e-4)


@dataclass(frozen=True)
class Targets:
    """What a comparison is read at.

    Attributes:
        accuracy: the lowest final accuracy (0 to 1) of any private run, so that every private run reaches it.
        epsilon: the smallest final ε of any private run, so that no private run stops short of it.
        one_epsilon: all private runs end at that ε; then the final accuracy is the accuracy at equal ε.
    """

    accuracy: float
    epsilon: float
    one_epsilon: bool


def targets(groups: Sequence[Group]) -> Targets | None:
    """The targets of a comparison, or ``None`` where fewer than two of its settings have a proven ε and an accuracy."""
    private = [group for group in groups if all(map(_private, group.runs))]
    if len(private) < 2:
        return None
    runs = [run for group in private for run in group.runs]
    ends = [metrics.spent(run)[-1][1] for run in runs]
    finals = [value for value in map(metrics.final_accuracy, runs) if value is not None]
    least = min(ends)
    return Targets(min(finals), least, max(ends) <= least * (1 + SAME))


def _private(run: Run) -> bool:
    return bool(metrics.spent(run)) and metrics.final_accuracy(run) is not None


def epsilon_at_accuracy(run: Run, target: float) -> float | None:
    """The ε spent when the test accuracy first reached ``target`` (0 to 1): methods compared at equal accuracy.

    ``None`` where the target was not reached or no ε is proven. It is read off the run's own test curve, so stopping
    there would be a choice made on test data.

    Raises:
        InputError: a target outside 0 to 1.
    """
    in_range("accuracy target", target, 0.0, 1.0)
    reached = next((turn for turn, value in metrics.column(run.metrics, "test_accuracy") if value >= target), None)
    return dict(metrics.spent(run)).get(reached) if reached is not None else None


def accuracy_at_epsilon(run: Run, target: float) -> float | None:
    """Test accuracy (0 to 1) at the last evaluation at which the run had spent at most ``target``.

    ``None`` where nothing was evaluated that early or no ε is proven.

    Raises:
        InputError: a negative or infinite target.
    """
    in_range("ε target", target, 0.0)
    spent = dict(metrics.spent(run))
    within = [
        value
        for turn, value in metrics.column(run.metrics, "test_accuracy")
        if turn in spent and spent[turn] <= target * (1 + SAME)
    ]
    return within[-1] if within else None
