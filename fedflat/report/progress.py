"""Follow runs in the terminal, in at most 80 columns, while they go on."""

import contextlib
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from rich import progress as bars
from rich.console import Console, RenderableType
from rich.text import Text

from fedflat.core import listening_to_progress
from fedflat.report import metrics, wording
from fedflat.report.metrics import number, own_metrics

WIDTH = 80
PATIENCE = 10.0
"""Seconds without news at most, where stdout is no terminal."""
ASKED = "as asked"
"""How a run stopped by Ctrl-C says why it stopped."""

State = Literal["waiting", "running", "done", "skipped", "stopped", "failed"]


@dataclass(frozen=True)
class RunEvent:
    """News of one run of an experiment.

    Attributes:
        run: the run's name, unique in the experiment.
        state: what it is doing now; ``skipped`` is a run that was done before.
        round, rounds: rounds finished, and planned.
        accuracy: test accuracy (0 to 1) at the last evaluation, if any.
        note: why it failed, in one line; of a run before its first round, the long work that it does.
    """

    run: str
    state: State
    round: int
    rounds: int
    accuracy: float | None = None
    note: str = ""

    @property
    def busy(self) -> bool:
        """Whether it runs, or does long work before its first round."""
        return self.state == "running" or (self.state == "waiting" and bool(self.note))


class Bars(bars.Progress):
    """Bars with lines of text above and below on a terminal that can draw; else plain lines, and nothing when quiet.

    A task's field ``says`` stands behind its bar.
    """

    above = below = ""
    spoke = 0.0
    """When a line was last printed, or the silence began that is not to last."""

    def __init__(self, quiet: bool = False, stderr: bool = False) -> None:
        console = console_now(stderr)
        draws = console.is_terminal and not console.is_dumb_terminal and not quiet
        behind = bars.TextColumn("{task.fields[says]}", markup=False)
        # What a user's own code prints to a file or a pipe goes on to go there.
        super().__init__(
            bars.TextColumn("{task.description}", markup=False), bars.BarColumn(20), behind, console=console,
            disable=not draws, transient=True, refresh_per_second=4, speed_estimate_period=math.inf,
            redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip
        self._plain = not quiet and not draws

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what is drawn."""
        if self.above:
            yield Text(self.above, style="bold", overflow="ellipsis", no_wrap=True)
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(self.below, overflow="ellipsis", no_wrap=True)

    def line(self, text: str, due: bool = True) -> None:
        """Print plain text of at most 80 columns, unless quiet or on a terminal that is being drawn on. due: now, not
        only after ``PATIENCE`` seconds without a line."""
        if not due and time.monotonic() - self.spoke < PATIENCE:
            return
        self.spoke = time.monotonic()
        if self._plain:
            lines = textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            print(lines, file=sys.stderr if self.console.stderr else sys.stdout, flush=True)

    def left(self) -> str:
        """Return the time left of the first task, at the pace so far; the empty string where none is known."""
        seconds = self.tasks[0].time_remaining
        return "" if seconds is None else f"{wording.duration(seconds)} left"


class Progress(contextlib.ExitStack):
    """Progress of one run, as a context manager: ``start`` when the job is known, ``round`` after each round.

    On a terminal a bar between two lines; elsewhere a plain line for the first round and the last one, and every
    ``PATIENCE`` seconds; nothing when ``quiet``. stderr: shown there instead of on stdout.
    """

    def __init__(
        self, recipe: Any, quiet: bool = False, what: str = "preparing data and privacy plan", stderr: bool = False
    ) -> None:
        super().__init__()
        self._recipe, self._last_round, self._epsilon, self._limit = recipe, recipe.rounds, "ε", ""
        self._newest: dict[str, str] = {}
        self._bars = Bars(quiet, stderr)
        self._bars.above = f"{recipe.name}: {what}"
        self._task = self._bars.add_task("", total=None, says="")

    def __enter__(self) -> Self:
        self.enter_context(self._bars)
        self.enter_context(listening_to_progress(self.waiting))
        return self

    def waiting(self, work: str, done: int, total: int) -> None:
        """Show work before the first round (``core.process``): a bar on a terminal, else a line in ten seconds at most.

        How long it will take is not told: its first steps are no measure of the others.
        """
        if work != self._bars.tasks[0].description:
            self._bars.spoke = time.monotonic()
        self._bars.update(self._task, description=work, completed=done, total=total, says=f"{done:,} of {total:,}")
        self._bars.line(waiting_text(work, done, total), due=False)

    def start(self, job: Any) -> None:
        """Take the ``engine.train.Job`` that is about to run, and show its first line."""
        plan, recipe, self._last_round = job.parts.plan, self._recipe, job.last_round
        # A claimed ε is never shown without the proven one.
        shows = plan.private and plan.protocol != "published"
        self._epsilon = "" if not shows else "ε of the mechanism" if recipe.privacy.randomness == "seeded" else "ε"
        # With noise_cohort the budget is another system's.
        self._limit = "" if plan.budget is None or plan.noise_cohort else f" of {metrics.epsilon_text(plan.budget)}"
        privacy = "no privacy" if not plan.private else f"δ {plan.delta:.2g}"
        size, clients = recipe.cohort.size, job.data.clients
        cohort = f"{f'about {size:g} of' if size < clients else 'all'} {clients} clients a round"
        self._bars.reset(self._task, description="", says="")
        self._bars.above = f"{recipe.name} · {job.parts.algorithm.name} · {cohort} · {privacy}"
        self._bars.line(self._bars.above)

    def round(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """Take a round's two records, as they are written to metrics.jsonl and private/private.jsonl."""
        done, first = int(released["round"]) + 1, not self._bars.tasks[0].completed
        self._note(released, private)
        self._bars.update(self._task, completed=done, total=max(self._last_round, 1))
        turn, left = f"round {done:>{len(str(self._recipe.rounds))}}/{self._recipe.rounds}", self._bars.left()
        self._bars.update(self._task, says=f"{turn}  {left}")
        self._bars.below = "  ".join(self._newest.values())
        text = "  ".join([turn, self._bars.below, left])
        # Where the line is too long, the clients per second are left out.
        short = [turn, *(words for name, words in self._newest.items() if name != "rate"), left]
        self._bars.line(text if len(text) <= WIDTH else "  ".join(short), due=first or done == self._last_round)

    def _note(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """Keep the newest of each number that is shown, each as a few words."""
        newest = self._newest
        for key in ("test_accuracy", *own_metrics([released]), "test_loss"):
            if (value := number(released.get(key))) is not None:
                text = f"{wording.percent(value)} %" if key == "test_accuracy" else wording.measured(value)
                newest[key] = f"{key.removeprefix('test_')} {text}"
        if "test_accuracy" in newest:
            newest.pop("test_loss", None)
        personal, seconds, cohort = (number(private.get(key)) for key in ("personal_accuracy", "seconds", "cohort"))
        if personal is not None:
            newest["personal"] = f"personal {wording.percent(personal)} %"
        if self._epsilon:
            epsilon = number(released.get("epsilon"))
            limit = "" if epsilon is None else self._limit
            newest["epsilon"] = f"{self._epsilon} {metrics.epsilon_text(epsilon, '∞')}{limit}"
        if seconds and cohort is not None:
            rate = cohort / seconds
            newest["rate"] = f"{rate:,.0f} clients/s" if rate >= 10 else f"{rate:.2g} clients/s"


def waiting_text(work: str, done: int, total: int) -> str:
    """Return how far long work is: ``making features, client 120 of 500``."""
    return f"{work} {done:,} of {total:,}"


# ------------------------------------------------------------------------------------------------- experiments

ENDED = ("done", "skipped", "failed", "stopped")


class ExperimentProgress(contextlib.AbstractContextManager["ExperimentProgress"]):
    """Progress of an experiment, as a context manager: ``update`` takes each ``RunEvent``.

    On a terminal a bar for all runs, and below it those that run; elsewhere a line for each run that ends, and of one
    that runs where ``PATIENCE`` seconds pass without.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._bars = Bars(quiet)
        self._all = self._bars.add_task("", total=None, says="")
        self._runs: dict[str, RunEvent] = {}
        self._first: dict[str, int] = {}
        self._bars.spoke = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._bars.stop()

    def update(self, event: RunEvent) -> None:
        """Take one event; the live view starts with the first that runs, plain lines tell of those that end."""
        self._runs[event.run] = event
        self._draw(event)
        ended, left = f"[{self._count(*ENDED)}/{len(self._runs)}] {event.run}", self._bars.left()
        line = {
            "failed": f"{ended}: failed. {event.note}",
            "stopped": f"{ended}: stopped after {event.round} of {event.rounds} rounds",
            "done": f"{ended}: done{_accuracy(event)}" + (f"; {left}" if left else ""),
            "skipped": f"{event.run}: done before, kept",
        }.get(event.state, "")
        if event.busy:
            line = f"{event.run}: {_turn(event)}" + (f"; all {left}" if left else "")
        if line:
            self._bars.line(line, due=not event.busy)

    def say(self, text: str) -> None:
        """Tell what is done now besides training: below the runs of the live view, or as a plain line."""
        # The time left is known for rounds only.
        self._bars.update(self._all, says="")
        self._bars.below = text
        self._bars.start()
        self._bars.line(text)

    def _draw(self, event: RunEvent) -> None:
        """Bring the bar and the line below it up to date with a run's event."""
        every, view = self._runs.values(), self._bars
        if event.busy:
            view.start()
            # Rounds of an earlier session say nothing of the pace.
            self._first.setdefault(event.run, event.round)
        done = sum(latest.round - self._first[latest.run] for latest in every if latest.run in self._first)
        left = sum(latest.rounds - latest.round for latest in every if latest.state in ("waiting", "running"))
        counts = [f"{count} {state}" for state in ("skipped", "failed", "stopped") if (count := self._count(state))]
        ended = ", ".join([f"{self._count(*ENDED)} of {len(every)} runs", *counts])
        view.update(self._all, description=ended, completed=done, total=max(1, done + left))
        view.update(self._all, says=view.left())
        running = [f"{wording.shortened(latest.run, 24)}: {_turn(latest)}" for latest in every if latest.busy]
        view.below = "; ".join(running)

    def _count(self, *states: str) -> int:
        return sum(event.state in states for event in self._runs.values())


def _turn(event: RunEvent) -> str:
    """Return what a run does now: its round, or the work before its first."""
    return event.note or f"round {event.round} of {event.rounds}{_accuracy(event)}"


def _accuracy(event: RunEvent) -> str:
    return "" if event.accuracy is None else f", accuracy {wording.percent(event.accuracy)} %"


def console_now(stderr: bool = False) -> Console:
    """Return a console for stdout or stderr as it is now; 80 columns where that is no terminal."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH, stderr=stderr)
