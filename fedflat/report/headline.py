"""What a comparison found, in a sentence: the best private method with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from fedflat.report import metrics
from fedflat.report.groups import Group, Spread, paired_difference, spread


def best_private(groups: Sequence[Group]) -> list[tuple[Group, Spread]]:
    """The groups whose every run has a proven ε and an accuracy, with their final accuracy, the best mean first."""
    private = [group for group in groups if all(map(_private, group.runs))]
    finals = [(group, spread(map(metrics.final_accuracy, group.runs))) for group in private]
    return sorted([(group, final) for group, final in finals if final], key=lambda each: -each[1].mean)


def headline(groups: Sequence[Group]) -> str:
    """The best private method, its accuracy and interval, its ε, and whether the next one is told apart from it.

    Empty where fewer than two settings are compared or none is private.
    """
    from fedflat.report import tables  # which shows this sentence

    private = best_private(groups)
    if len(groups) < 2 or not private:
        return ""
    best, final = private[0]
    epsilon = max(found for run in best.runs if (found := metrics.proven_epsilon(run)) is not None)
    shown = tables.epsilon_text(epsilon)
    said = f"Best private method: {best.label}, {100 * final.mean:.2f} % at proven ε = {shown}{_interval(final)}."
    if len(private) > 1:
        chosen = f"chosen among {len(private)} by this very test data"
        return f"{said} It was {chosen}; {_next(best, private[1][0])}."
    return said


def _private(run: metrics.Run) -> bool:
    return metrics.proven_epsilon(run) is not None and metrics.final_accuracy(run) is not None


def _interval(final: Spread) -> str:
    """The 95 % t interval of the mean over seeds, in per cent."""
    half = final.half
    if half is None:
        return ", one seed, so without an interval"
    low, high = max(0.0, final.mean - half), min(1.0, final.mean + half)
    return f" (95 % interval over {final.count} seeds: {100 * low:.2f} to {100 * high:.2f})"


def _next(best: Group, other: Group) -> str:
    gap = paired_difference(other, best, metrics.final_accuracy)
    if gap is None or gap.low is None:
        return f"{'no' if gap is None else 'one'} common seed cannot tell it apart from {other.label}"
    shown = "show it ahead of" if gap.low > 0 else "do not tell it apart from"
    return f"these {gap.pairs} seeds {shown} {other.label}"
