"""Print the tables that end a run or an experiment, with cautions: what a reader of the result should look at twice."""

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedflat.report import metrics, tables, wording
from fedflat.report.metrics import FATES, Record, Run, first_lost, guess, number, own_metrics, tested_classes, values
from fedflat.report.progress import ASKED, WIDTH, console_now

PRIVATE = "(private to the simulation, not covered by the guarantee)"
CLIPPED = 0.99
"""Mean share of clipped updates from which everything counts as clipped."""
SIGNAL = 0.1
"""Median signal-to-noise ratio under which the noise is ten times the signal."""
LEARNT = 0.15
"""Share of the way from guessing to no error that a model which learnt has gone."""
RISEN, TURNS = 3.0, 3
"""A test loss so many times the least so far, in so many evaluations one after the other, has left for good."""


def cautions(privacy: Mapping[str, Any], released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    """Return the rounds whose line was lost, the statement's warnings, then what the rounds show: losses that are not
    finite, accuracy at chance, everything clipped, noise ten times the signal. privacy: the statement; released,
    private: the rounds' records.
    """
    stated = map(str, metrics.listed(privacy, "warnings"))
    gone = metrics.lost_rounds(privacy.get("rounds"), released)
    lost = f"metrics.jsonl is damaged: it has no line for round {', '.join(map(str, gone))}, counted from 0."
    seen = [*_loss(released, private), *_chance(released), *_clipped(private), *_drowned(released, private)]
    return [*([lost] if gone else []), *stated, *seen]


class DivergenceWatch:
    """Looks at a run while it goes on: ``round`` says once, in a sentence, that training diverges."""

    def __init__(self) -> None:
        self._least, self._high, self._warned = math.inf, 0, False

    def round(self, released: Record, private: Record) -> str:
        """Return what a round's two records give reason to say; empty otherwise, and after it was said."""
        if self._warned:
            return ""
        sentences = [text.rstrip() for text in _loss([released], [private])] or self._risen(released)
        self._warned = bool(sentences)
        return sentences[0] if sentences else ""

    def _risen(self, released: Record) -> list[str]:
        loss = number(released.get("test_loss"))
        if loss is None:
            return []
        self._least = min(self._least, loss)
        # One bad evaluation is noise; several in a row are divergence.
        self._high = self._high + 1 if loss > RISEN * self._least else 0
        if self._high < TURNS:
            return []
        return [
            f"The test loss is {loss:.3g} after round {released.get('round')}, {loss / self._least:.3g} times the "
            "least so far: training diverges. A lower local.lr or server.lr, less noise, or inputs scaled to about 1 "
            "(data.scale) may help."
        ]


def _loss(released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    lost = first_lost(released)
    if lost is not None:
        return [f"The test loss is not finite from round {lost.get('round')} on: training diverged."]
    for record in private:
        if "train_loss" in record and number(record["train_loss"]) is None and record.get("cohort"):
            return [
                f"A training loss is not finite in round {record.get('round')}: lower local.lr, or scale the inputs to "
                f"about 1 (data.scale). {PRIVATE}"
            ]
    return []


def _chance(released: Sequence[Record]) -> list[str]:
    guessed = guess(released)
    if guessed is None:
        single = released and len(tested_classes(released[-1])) == 1
        return ["The test data are of one class alone: their accuracy says nothing of the others."] if single else []
    accuracy = wording.percent(guessed.accuracy)
    if guessed.one_class:
        return [f"The model gives every test example the same class (accuracy {accuracy} %)."]
    alike = ", each class counted alike," if guessed.accuracy * guessed.classes > metrics.CHANCE else ""
    return [f"Test accuracy {accuracy} %{alike} is no better than guessing among {guessed.classes} classes."]


def _clipped(private: Sequence[Record]) -> list[str]:
    taken = [record for record in private if record.get("cohort")]
    clipped, lengths = (values(taken, key) for key in ("clipped_fraction", "update_norm_mean"))
    if not clipped or fmean(clipped) < CLIPPED:
        return []
    length = f" (their mean length was {fmean(lengths):.3g})" if lengths else ""
    return [f"Nearly every update was clipped{length}: privacy.clip or local.lr may be far off. {PRIVATE}"]


def _drowned(released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    times = _times(private)
    if not times or learnt(released):
        return []
    return [
        f"The noise is {times} times the signal in the median round, and the model learnt little: more clients in "
        f"a cohort, fewer parameters or a larger ε would help. {PRIVATE}"
    ]


def remarks(released: Sequence[Record], private: Sequence[Record]) -> list[str]:
    """Return what a reader may want to know of a run that went well, a sentence each; nothing is wrong with these."""
    times = _times(private)
    # A model without a mistake leaves next to no signal, which says nothing of the noise.
    if times in ("", VAST) or not learnt(released):
        return []
    return [
        f"One round's noise is {times} times as long as its signal, and still the model learnt: noise of many "
        f"rounds and coordinates cancels, what clients agree on adds up. {PRIVATE}"
    ]


VAST = "more than 10,000"


def _times(private: Sequence[Record]) -> str:
    """Return how many times the signal the noise is in the median round; empty where it is less than ten times, or
    unknown.
    """
    ratios = values(private, "signal_to_noise")
    if not ratios or median(ratios) >= SIGNAL:
        return ""
    return VAST if median(ratios) < 1e-4 else f"{1 / median(ratios):.0f}"


def learnt(released: Sequence[Record]) -> bool:
    """Return whether the last evaluated model is clearly better than guessing, or without classes than the first."""
    tested = [record for record in released if number(record.get("test_accuracy")) is not None]
    if tested and first_lost(released) is None:
        classes = tested_classes(tested[-1])
        accuracy, start = float(tested[-1]["test_accuracy"]), float(tested[0]["test_accuracy"])
        least = 1 / len(classes) if len(classes) > 1 else start
        return guess(released) is None and accuracy >= least + LEARNT * (1 - least)
    losses = values(released, "test_loss")
    return bool(losses) and losses[-1] <= (1 - LEARNT) * losses[0]


def print_summary(result: Any, folder: Path, page: Path) -> None:
    """Print a run's final table, the path of its report and, if it stopped early, why and how to go on."""
    rows, width = summary_rows(result), min(console_now().width, 100)
    left = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        print(textwrap.fill(text, width, initial_indent=f"{label:{left}}", subsequent_indent=" " * left))
    warned = [f"Warning: {text}" for text in cautions(result.privacy, result.history, result.private_history)]
    for text in [*warned, *(f"Note: {text}" for text in remarks(result.history, result.private_history))]:
        print(textwrap.fill(text, width, subsequent_indent="  "))
    # Not wrapped, so that a path or a command can be copied.
    print(f"Report: {page}")
    if result.stopped:
        print(f"{result.stopped[:1].upper()}{result.stopped[1:]}.")
    if ASKED in result.stopped:
        print(f"Go on with: fedflat run --resume {shlex.quote(str(folder))}")


def summary_rows(result: Any) -> list[tuple[str, str]]:
    """Return the label and text of each line of the final table; accuracy and personal accuracy in their own rows."""
    recipe, privacy = result.recipe, result.privacy
    run = Run(Path(), recipe.name, {}, result.history, result.private_history, privacy)
    numbers = metrics.summary(run)
    fields = metrics.stated(run) | {
        "recipe": recipe,
        "numbers": numbers,
        # A task without an accuracy has a loss.
        "tested_by_loss": numbers["final_accuracy"] is None and numbers["final_loss"] is not None,
        "fate": FATES.get(metrics.fate(run), ""),
        "malformed": [count for count in values(run.private, "malformed") if count],
        "trust": privacy.get("trust", "–"),
        "not_covered": PRIVATE[1:-1],
    }
    rows = list(wording.texts("summary.yaml", fields).items())
    # Below the accuracy.
    rows[3:3] = [(key.replace("_", " "), _final(run, key)) for key in own_metrics(run.metrics)]
    return rows


def _final(run: Run, key: str) -> str:
    value = metrics.last(run.metrics, key)
    spread = metrics.last(run.metrics, f"{key}_sd")
    if value is not None and spread is not None:
        return f"{wording.percent(value)} ± {wording.percent(spread)} %, of the model that the last round begins with"
    return "never a finite number" if value is None else f"{wording.measured(value)} final"


def print_comparison(result: Any, seconds: float) -> None:
    """Print what went wrong in an experiment, then its table with at most eight lines beneath it."""
    for note in result.notes:
        print(textwrap.fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    for name, why in result.failed.items():
        print(f"Failed: {name}: {why}")
    if result.left:
        print(f"Stopped with {result.left} of {result.total} runs unfinished; the same command goes on with them.")
    done = result.total - result.left - len(result.failed)
    ended = f"{done} run{'' if done == 1 else 's'} done, {wording.duration(seconds)}"
    if result.table is None:
        print(ended)
        return
    print(tables.to_terminal(result.table, WIDTH), end="")
    print(f"Report: {result.page}")
    print(f"{ended}; every run in {result.folder}/runs.csv, a figure (PDF) and tables beside it")
