"""Follow runs while they go on: in the terminal (at most 80 columns), and in TensorBoard and MLflow where asked.

What a round released goes to a tracker as it goes to metrics.jsonl. What is private to the simulation goes only where
it is asked for, under names that say so. A claimed ε is never sent: a chart could show it without the proven one.
"""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedflat.core.checks import RunError, wrong
from fedflat.core.imports import missing
from fedflat.core.process import listening_to_progress
from fedflat.report import metrics, wording
from fedflat.report.groups import flatten
from fedflat.report.metrics import number, own_metrics

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


LINES = 18
"""Lines of a whole run where stdout is no terminal."""
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


class _View:
    """A live area on a terminal that can draw one (TERM is not dumb), plain lines elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool, stderr: bool = False) -> None:
        self._console, self._quiet = console_now(stderr), quiet
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._live: Live | None = None

    def _draw(self) -> RenderableType:
        raise NotImplementedError

    def _open(self) -> None:
        """Start drawing, four times a second."""
        if self._draws and self._live is None:
            from rich.live import Live

            # What a user's own code prints to a file or a pipe goes on to go there.
            self._live = Live(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Stop drawing and clear the area."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        """Print plain text of at most 80 columns, unless quiet or on a terminal that is being drawn on."""
        if not self._quiet and not self._draws:
            lines = textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            print(lines, file=sys.stderr if self._console.stderr else sys.stdout, flush=True)


@dataclass
class _Facts:
    """What is known of a run so far."""

    rounds: int
    last_round: int
    round: int = 0
    done_here: int = 0
    began: float = field(default_factory=time.monotonic)
    budget: float | None = None
    shows_epsilon: bool = True
    epsilon_name: str = "ε"
    released: dict[str, float] = field(default_factory=dict)
    """The newest of each number that is shown."""
    personal: float | None = None
    work: tuple[str, int, int] | None = None
    """Long work before the first round: what, how much of it is done, and of how much."""
    spoke: float = 0.0
    rate: float | None = None

    def seconds_left(self) -> float | None:
        """Return the time for the rounds that are left at this session's pace; None before its first round."""
        if not self.done_here:
            return None
        return (time.monotonic() - self.began) / self.done_here * max(0, self.last_round - self.round)


class Progress(_View):
    """Progress of one run, as a context manager: ``start`` when the job is known, ``round`` after each round.

    On a terminal a live view of three lines; elsewhere about ``LINES`` plain lines in a run, or one every ``PATIENCE``
    seconds; nothing when ``quiet``. stderr: shown there instead of on stdout.
    """

    def __init__(
        self, recipe: Any, quiet: bool = False, what: str = "preparing data and privacy plan", stderr: bool = False
    ) -> None:
        super().__init__(quiet, stderr)
        self._recipe = recipe
        self._facts = _Facts(rounds=recipe.rounds, last_round=recipe.rounds)
        self._title = f"{recipe.name}: {what}"

    def __enter__(self) -> Progress:
        self._open()
        self._listening = listening_to_progress(self.waiting)
        self._listening.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._listening.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def waiting(self, what: str, done: int, total: int) -> None:
        """Show work before the first round (``core.process``): a bar on a terminal, else a line in ten seconds at most.

        How long it will take is not told: its first steps are no measure of the others.
        """
        facts, now = self._facts, time.monotonic()
        if facts.work is None or facts.work[0] != what:
            facts.spoke = now
        facts.work, facts.began = (what, done, total), now
        if now - facts.spoke >= PATIENCE:
            facts.spoke = now
            self._line(waiting_text(what, done, total))

    def start(self, job: Any) -> None:
        """Take the ``engine.train.Job`` that is about to run, and show its first line."""
        plan, facts = job.parts.plan, self._facts
        facts.work, facts.last_round, facts.budget, facts.began = None, job.last_round, plan.budget, time.monotonic()
        facts.epsilon_name = "ε of the mechanism" if self._recipe.privacy.randomness == "seeded" else "ε"
        # A claimed ε is never shown without the proven one.
        facts.shows_epsilon = plan.private and plan.protocol != "published"
        privacy = "no privacy" if not plan.private else f"δ {plan.delta:.2g}"
        cohort = f"about {self._recipe.cohort.size:g} of {job.data.clients} clients a round"
        self._title = f"{self._recipe.name} · {job.parts.algorithm.name} · {cohort} · {privacy}"
        self._line(self._title)

    def round(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """Take a round's two records, as they are written to metrics.jsonl and private/private.jsonl."""
        facts = self._facts
        facts.round, facts.done_here = int(released["round"]) + 1, facts.done_here + 1
        facts.released.pop("epsilon", None)
        keys = ("epsilon", "test_accuracy", "test_loss", *own_metrics([released]))
        facts.released |= {key: value for key in keys if (value := number(released.get(key))) is not None}
        personal, seconds, cohort = (number(private.get(key)) for key in ("personal_accuracy", "seconds", "cohort"))
        facts.personal = facts.personal if personal is None else personal
        # The pace is smoothed: single rounds differ with the cohort that was drawn.
        if seconds and cohort is not None:
            now = cohort / seconds
            facts.rate = now if facts.rate is None else 0.8 * facts.rate + 0.2 * now
        every = math.ceil(facts.last_round / LINES)
        due = time.monotonic() - facts.spoke >= PATIENCE
        if facts.done_here == 1 or facts.round % every == 0 or facts.round == facts.last_round or due:
            facts.spoke = time.monotonic()
            self._line(self._round_text())

    def _round_text(self) -> str:
        facts, digits = self._facts, len(str(self._facts.rounds))
        turn, left = f"round {facts.round:>{digits}}/{facts.rounds}", _left(facts.seconds_left())
        text = "  ".join([turn, *_numbers(facts), left])
        # Where the line is too long, the clients per second are left out.
        return text if len(text) <= WIDTH else "  ".join([turn, *_numbers(facts)[:-1], left])

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        facts = self._facts
        title = Text(self._title, style="bold", overflow="ellipsis", no_wrap=True)
        if facts.work and not facts.round:
            return Group(title, _bar(waiting_text(*facts.work), *facts.work[1:], None))
        bar = _bar(f"round {facts.round} of {facts.rounds}", facts.round, facts.last_round, facts.seconds_left())
        return Group(title, bar, Text("  ".join(_numbers(facts)), no_wrap=True, overflow="ellipsis"))


def _numbers(facts: _Facts) -> list[str]:
    """Return the facts that are known, each a few words."""
    others = dict(facts.released)
    epsilon, accuracy = others.pop("epsilon", None), others.pop("test_accuracy", None)
    if accuracy is not None:
        others.pop("test_loss", None)
    found = [] if accuracy is None else [f"accuracy {wording.percent(accuracy)} %"]
    found += [f"{name.removeprefix('test_')} {value:.4g}" for name, value in others.items()]
    if facts.personal is not None:
        found.append(f"personal {wording.percent(facts.personal)} %")
    if facts.shows_epsilon and facts.round:
        limit = "" if facts.budget is None or epsilon is None else f" of {metrics.epsilon_text(facts.budget)}"
        found.append(f"{facts.epsilon_name} {metrics.epsilon_text(epsilon, '∞')}{limit}")
    if facts.rate is not None:
        found.append(f"{facts.rate:,.0f} clients/s" if facts.rate >= 10 else f"{facts.rate:.2g} clients/s")
    return found


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{wording.clock(seconds)} left"


def waiting_text(what: str, done: int, total: int) -> str:
    """Return how far long work is: ``making features, client 120 of 500``."""
    return f"{what} {done:,} of {total:,}"


def _bar(label: str, done: float, total: float, seconds: float | None) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=max(total, 1), completed=done, width=36 if len(label) < 36 else 20)
    grid = Table.grid(padding=(0, 1))
    for wrapped in (True, False, True):
        grid.add_column(no_wrap=wrapped)
    grid.add_row(label, bar, _left(seconds))
    return grid


# ------------------------------------------------------------------------------------------------- experiments


class ExperimentProgress(_View):
    """Progress of an experiment, as a context manager: ``update`` takes each ``RunEvent``.

    On a terminal a live view with a line for each running run; elsewhere one for each run that ends, and of one that
    runs where ``PATIENCE`` seconds pass without.
    """

    SHOWN = 8
    """Running runs with a line of their own."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._runs: dict[str, RunEvent] = {}
        self._first: dict[str, int] = {}
        self._began = self._spoke = time.monotonic()
        self._besides = ""

    def __enter__(self) -> ExperimentProgress:
        return self

    def update(self, event: RunEvent) -> None:
        """Take one event; the live view starts with the first that runs, plain lines tell of those that end."""
        self._besides = ""
        busy = event.state == "running" or (event.state == "waiting" and event.note)
        if busy and event.note and self.seconds_left() is None:
            # The pace is that of rounds, so work before the first round does not count.
            self._began = time.monotonic()
        if busy:
            self._open()
            self._first.setdefault(event.run, event.round)
        self._runs[event.run] = event
        said = ""
        if event.state in ("done", "stopped", "failed"):
            said = self._ended(event)
        elif event.state == "skipped":
            said = f"{event.run}: done before, kept"
        elif busy and time.monotonic() - self._spoke >= PATIENCE:
            left = _left(self.seconds_left())
            said = f"{event.run}: {_turn(event)}" + (f"; all {left}" if left else "")
        if said:
            self._spoke = time.monotonic()
            self._line(said)

    def say(self, what: str) -> None:
        """Tell what is done now besides training: below the runs of the live view, or as a plain line."""
        self._besides = what
        self._open()
        self._line(what)

    def _ended(self, event: RunEvent) -> str:
        head = f"[{self._count('done', 'skipped', 'failed', 'stopped')}/{len(self._runs)}] {event.run}"
        if event.state == "failed":
            return f"{head}: failed. {event.note}"
        if event.state == "stopped":
            return f"{head}: stopped after {event.round} of {event.rounds} rounds"
        accuracy = "" if event.accuracy is None else f", accuracy {wording.percent(event.accuracy)} %"
        left = _left(self.seconds_left())
        return f"{head}: done{accuracy}" + (f"; {left}" if left else "")

    def _count(self, *states: State) -> int:
        return sum(event.state in states for event in self._runs.values())

    def seconds_left(self) -> float | None:
        """Return the time for all rounds that are left at the pace since the start; None before the first round."""
        here = sum(event.round - self._first[name] for name, event in self._runs.items() if name in self._first)
        if here <= 0:
            return None
        left = sum(e.rounds - e.round for e in self._runs.values() if e.state in ("waiting", "running"))
        return (time.monotonic() - self._began) / here * left

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        total, ended = len(self._runs), self._count("done", "skipped", "failed", "stopped")
        rounds = max(1, sum(event.rounds for event in self._runs.values()))
        done = sum(e.rounds if e.state in ("done", "skipped", "failed") else e.round for e in self._runs.values())
        # The time left is known for rounds only.
        left = None if self._besides else self.seconds_left()
        lines: list[RenderableType] = [_bar(f"{ended} of {total} runs", done, rounds, left)]
        running = [event for event in self._runs.values() if event.state == "running" or _turn(event) == event.note]
        lines += [_running(event, self._console.width) for event in running[: self.SHOWN]]
        if len(running) > self.SHOWN:
            lines.append(Text(f"and {len(running) - self.SHOWN} more", style="dim"))
        counts = [(self._count(state), state) for state in ("skipped", "failed", "stopped", "waiting")]  # type: ignore[arg-type]
        lines.append(Text(", ".join(f"{count} {state}" for count, state in counts if count), style="dim"))
        if self._besides:
            lines.append(Text(f"  {self._besides}"))
        return Group(*lines)


def _turn(event: RunEvent) -> str:
    """Return what a run does now: its round, or the work before its first."""
    before = event.note if event.state in ("running", "waiting") else ""
    return before or f"round {event.round} of {event.rounds}"


def _running(event: RunEvent, width: int) -> RenderableType:
    """Return a run and its round on one line: a name that is too long loses its middle."""
    from rich.text import Text

    accuracy = "" if event.accuracy is None else f"  accuracy {wording.percent(event.accuracy)} %"
    rest = f"  {_turn(event)}{accuracy}"
    room = max(8, min(width, 100) - len(rest) - 3)
    return Text(f"  {wording.shortened(event.run, room)}{rest}", no_wrap=True, overflow="crop")


def console_now(stderr: bool = False) -> Console:
    """Return a console for stdout or stderr as it is now; 80 columns where that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH, stderr=stderr)


PRIVATE = "private_not_covered"
"""First part of every private name."""
MLFLOW_LIMIT = 500
"""Characters of a parameter's value."""


def scalars(released: Mapping[str, Any], private: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Return the finite numbers of a round by name; lists and mappings by place or key (``class_accuracy/3``).

    private: that record's numbers too, under ``private_not_covered/``; None leaves it out.
    """
    found = dict(_finite_numbers("", {key: value for key, value in released.items() if key != "claimed_epsilon"}))
    if private is not None:
        found |= dict(_finite_numbers(f"{PRIVATE}/", private))
    return found


def _finite_numbers(prefix: str, record: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _finite_numbers(f"{prefix}{key}/", value)
        elif (found := number(value)) is not None and (prefix + str(key)) not in ("round", f"{PRIVATE}/round"):
            yield prefix + str(key), found


class TensorBoard:
    """Event files in a folder. Raises InputError where tensorboard is not installed or the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("--tensorboard", "tensorboard", "trackers") from error
        try:
            self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise wrong("--tensorboard", f"{folder} ({error.strerror})", "a folder to write") from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write one scalar for each name; it is on disk when this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self, done: bool) -> None:
        """Write what is buffered and close the event file."""
        self._writer.close()  # type: ignore[no-untyped-call]


class MLflow:
    """One MLflow run in the experiment ``fedflat``; the recipe's keys are its parameters.

    Raises InputError where mlflow is not installed or the server does not answer.
    """

    EXPERIMENT = "fedflat"

    def __init__(self, uri: str, name: str, recipe: Mapping[str, Any], private: bool) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing("--mlflow", "mlflow", "trackers") from error
        try:
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(self.EXPERIMENT)
            place = self._client.create_experiment(self.EXPERIMENT) if found is None else found.experiment_id
            tags = {f"fedflat.{PRIVATE}": "written: not covered by the guarantee" if private else "not written"}
            self._run = self._client.create_run(place, run_name=name, tags=tags).info.run_id
            for key, value in (flatten(recipe) | {"seed": recipe.get("seed")}).items():
                self._client.log_param(self._run, key, str(value)[:MLFLOW_LIMIT])
        except Exception as error:
            # MLflow's stores raise errors of many libraries.
            raise wrong("--mlflow", f"{uri} ({_first_line(error)})", "the URI of an MLflow store") from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        """One metric for each name."""
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, done: bool) -> None:
        """End the MLflow run: finished, or failed."""
        self._client.set_terminated(self._run, "FINISHED" if done else "FAILED")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Trackers:
    """The trackers asked for, as a context manager and a callback of each round; does nothing without any.

    Raises RunError where a tracker stops taking numbers: the run can be resumed.
    """

    def __init__(
        self, recipe: Any, *, tensorboard: Path | None = None, mlflow: str | None = None, private: bool = False
    ) -> None:
        if private and tensorboard is None and mlflow is None:
            raise wrong("--track-private", "no tracker", "with --tensorboard DIR or --mlflow URI")
        self._private = private
        self._all: list[TensorBoard | MLflow] = [] if tensorboard is None else [TensorBoard(tensorboard)]
        if mlflow is not None:
            self._all.append(MLflow(mlflow, recipe.name, recipe.dump(), private))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for tracker in self._all:
            try:
                tracker.close(done=error is None)
            except Exception as fault:
                # A tracker that cannot be closed must not hide why the run ended.
                if error is None:
                    raise RunError(f"the tracker could not be closed: {_first_line(fault)}") from fault

    def round(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """Take a round's two records, as they are written to metrics.jsonl and private/private.jsonl."""
        if not self._all:
            return
        values = scalars(released, private if self._private else None)
        for tracker in self._all:
            try:
                tracker.write(values, int(released["round"]))
            except Exception as error:
                # The tracker's library may raise anything.
                fault = f"{type(tracker).__name__} could not record the numbers: {_first_line(error)}"
                raise RunError(f"{fault}. The run's files are whole.") from error
