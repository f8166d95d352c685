"""What the terminal shows while runs go on: at most 80 columns, and few lines where stdout is no terminal."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from fedflat.core.waiting import listening
from fedflat.report import tables
from fedflat.report.metrics import number, own_metrics

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

LINES = 18  # lines of a whole run where stdout is no terminal
WIDTH = 80
PATIENCE = 10.0  # seconds without news at most, where stdout is no terminal
ASKED = "as asked"  # how a run stopped by Ctrl-C says why it stopped

State = Literal["waiting", "running", "done", "skipped", "stopped", "failed"]


@dataclass(frozen=True)
class RunEvent:
    """News of one run of an experiment.

    Attributes:
        run: the run's name, unique in the experiment.
        state: what it is doing now; ``skipped`` is a run that was done before.
        round, rounds: rounds finished, and planned.
        accuracy: test accuracy (0 to 1) at the last evaluation, if any.
        note: why it failed, in one line.
    """

    run: str
    state: State
    round: int
    rounds: int
    accuracy: float | None = None
    note: str = ""


class _Screen:
    """A live area on a terminal that can draw one (TERM is not dumb); nothing there when quiet, or elsewhere."""

    def __init__(self, quiet: bool, draw: Callable[[], RenderableType]) -> None:
        self.console: Console = console_now()
        self.quiet = quiet
        self.terminal = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._draw = draw
        self._live: Live | None = None

    def open(self) -> None:
        """Start drawing, four times a second."""
        if self.terminal and self._live is None:
            from rich.live import Live

            self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4, transient=True)
            self._live.start()

    def close(self) -> None:
        """Stop drawing and clear the area."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        """Plain text of at most 80 columns, unless quiet or on a terminal that is being drawn on."""
        if not self.quiet and not self.terminal:
            print(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False), flush=True)


@dataclass
class _Facts:
    """What is known of a run so far."""

    rounds: int = 0
    last_round: int = 0
    round: int = 0
    done_here: int = 0
    began: float = field(default_factory=time.monotonic)
    budget: float | None = None
    shows_epsilon: bool = True
    accuracy: float | None = None
    tested: dict[str, float] = field(default_factory=dict)
    personal: float | None = None
    waits_for: str = ""
    waited: tuple[int, int] = (0, 0)
    spoke: float = 0.0
    epsilon: float | None = None
    rate: float | None = None

    def seconds_left(self) -> float | None:
        """Time for the rounds that are left at this session's pace; None before its first round."""
        if not self.done_here:
            return None
        return (time.monotonic() - self.began) / self.done_here * max(0, self.last_round - self.round)


class Progress:
    """Progress of one run, as a context manager: ``start`` when the job is known, ``round`` after each round.

    On a terminal a live view of three lines; elsewhere about ``LINES`` plain lines in a run, or one every ``PATIENCE``
    seconds; nothing when ``quiet``.
    """

    def __init__(self, recipe: Any, quiet: bool = False, what: str = "preparing data and privacy plan") -> None:
        self._recipe = recipe
        self._facts = _Facts(rounds=recipe.rounds, last_round=recipe.rounds)
        self._title = f"{recipe.name}: {what}"
        self._screen = _Screen(quiet, self._draw)

    def __enter__(self) -> Progress:
        self._screen.open()
        self._listening = listening(self.waiting)
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(kind, error, trace)
        self._screen.close()

    def waiting(self, what: str, done: int, total: int) -> None:
        """Work before round 0 (``core.waiting``): a bar on a terminal, elsewhere a line every ten seconds at most."""
        facts, now = self._facts, time.monotonic()
        if what != facts.waits_for:
            facts.waits_for, facts.began, facts.spoke = what, now, now
        facts.waited = done, total
        if now - facts.spoke >= PATIENCE:
            facts.spoke = now
            left = (now - facts.began) * (total - done) / max(done, 1)
            self._screen.line(f"{what}: {100 * done // max(total, 1)} %  {_left(left)}")

    def start(self, job: Any) -> None:
        """The ``engine.train.Job`` that is about to run."""
        plan, facts = job.parts.plan, self._facts
        facts.waits_for = ""
        facts.last_round, facts.budget, facts.began = job.last_round, plan.budget, time.monotonic()
        facts.shows_epsilon = plan.private and plan.protocol != "published"  # a claimed ε is never shown alone
        privacy = "no privacy" if not plan.private else f"δ {plan.delta:.2g}"
        cohort = f"about {self._recipe.cohort.size:g} of {job.data.clients} clients a round"
        self._title = f"{self._recipe.name} · {job.parts.algorithm.name} · {cohort} · {privacy}"
        self._screen.line(self._title)

    def round(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """A round's two records, as they are written to metrics.jsonl and private/private.jsonl."""
        facts = self._facts
        facts.round, facts.done_here = int(released["round"]) + 1, facts.done_here + 1
        facts.epsilon = number(released.get("epsilon"))
        facts.accuracy = _newer(released.get("test_accuracy"), facts.accuracy)
        keys = [*([] if facts.accuracy is not None else ["test_loss"]), *own_metrics([released])]
        facts.tested |= {key[5:]: value for key in keys if (value := number(released.get(key))) is not None}
        facts.personal = _newer(private.get("personal_accuracy"), facts.personal)
        seconds, cohort = number(released.get("seconds")), number(private.get("cohort"))
        if seconds and cohort is not None:
            now = cohort / seconds
            facts.rate = now if facts.rate is None else 0.8 * facts.rate + 0.2 * now
        every = math.ceil(facts.last_round / LINES)
        due = time.monotonic() - facts.spoke >= PATIENCE
        if facts.done_here == 1 or facts.round % every == 0 or facts.round == facts.last_round or due:
            facts.spoke = time.monotonic()
            self._screen.line(self._line())

    def _line(self) -> str:
        facts, digits = self._facts, len(str(self._facts.rounds))
        turn, left = f"round {facts.round:>{digits}}/{facts.rounds}", _left(facts.seconds_left())
        text = "  ".join([turn, *_numbers(facts), left])
        return text if len(text) <= WIDTH else "  ".join([turn, *_numbers(facts)[:-1], left])  # the pace goes first

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        facts = self._facts
        if facts.waits_for and not facts.round:
            done, total = facts.waited
            left = (time.monotonic() - facts.began) * (total - done) / done if done else None
            return Group(Text(self._title, style="bold", no_wrap=True), _bar(facts.waits_for, done, total, left))
        title = Text(self._title, style="bold", overflow="ellipsis", no_wrap=True)
        bar = _bar(f"round {facts.round} of {facts.rounds}", facts.round, facts.last_round, facts.seconds_left())
        return Group(title, bar, Text("  ".join(_numbers(facts)), no_wrap=True, overflow="ellipsis"))


def _newer(value: Any, old: float | None) -> float | None:
    found = number(value)
    return old if found is None else found


def _numbers(facts: _Facts) -> list[str]:
    """The facts that are known, each a few words."""
    found = []
    if facts.accuracy is not None:
        found.append(f"accuracy {tables.percent(facts.accuracy)} %")
    found += [f"{name} {value:.4g}" for name, value in facts.tested.items()]
    if facts.personal is not None:
        found.append(f"personal {tables.percent(facts.personal)} %")
    if facts.shows_epsilon and facts.epsilon is not None:
        limit = "" if facts.budget is None else f" of {tables.epsilon_text(facts.budget)}"
        found.append(f"ε {tables.epsilon_text(facts.epsilon)}{limit}")
    elif facts.shows_epsilon and facts.round:
        found.append("ε ∞")
    if facts.rate is not None:
        found.append(f"{facts.rate:,.0f} clients/s" if facts.rate >= 10 else f"{facts.rate:.2g} clients/s")
    return found


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{tables.clock(seconds)} left"


def _bar(label: str, done: float, total: float, seconds: float | None) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(label, ProgressBar(total=max(total, 1), completed=done, width=36), _left(seconds))
    return grid


# ------------------------------------------------------------------------------------------------- experiments


class ExperimentProgress:
    """Progress of an experiment, as a context manager: ``update`` takes each ``RunEvent``.

    On a terminal a live view with a line for each running run; elsewhere one for each run that ends, and of one that
    runs where ``PATIENCE`` seconds pass without.
    """

    SHOWN = 8  # running runs with a line of their own

    def __init__(self, quiet: bool = False) -> None:
        self._runs: dict[str, RunEvent] = {}
        self._first: dict[str, int] = {}
        self._began = self._spoke = time.monotonic()
        self._besides = ""
        self._screen = _Screen(quiet, self._draw)

    def __enter__(self) -> ExperimentProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.close()

    def update(self, event: RunEvent) -> None:
        """Take one event; the live view starts with the first that runs, plain lines tell of those that end."""
        self._besides = ""
        if event.state == "running":
            self._screen.open()
            self._first.setdefault(event.run, event.round)
        self._runs[event.run] = event
        said = ""
        if event.state in ("done", "stopped", "failed"):
            said = self._line(event)
        elif event.state == "skipped":
            said = f"{event.run}: done before, kept"
        elif event.state == "running" and time.monotonic() - self._spoke >= PATIENCE:
            left = _left(self.seconds_left())
            said = f"{event.run}: round {event.round} of {event.rounds}" + (f"; all {left}" if left else "")
        if said:
            self._spoke = time.monotonic()
            self._screen.line(said)

    def say(self, what: str) -> None:
        """Tell what is done now besides training: below the runs of the live view, or as a plain line."""
        self._besides = what
        self._screen.open()
        self._screen.line(what)

    def _line(self, event: RunEvent) -> str:
        accuracy = "" if event.accuracy is None else f", accuracy {tables.percent(event.accuracy)} %"
        ended = self._count("done", "skipped", "failed", "stopped")
        if event.state == "failed":
            return f"[{ended}/{len(self._runs)}] {event.run}: failed. {event.note}"
        if event.state == "stopped":
            return f"[{ended}/{len(self._runs)}] {event.run}: stopped after {event.round} of {event.rounds} rounds"
        left = _left(self.seconds_left())
        return f"[{ended}/{len(self._runs)}] {event.run}: done{accuracy}" + (f"; {left}" if left else "")

    def _count(self, *states: State) -> int:
        return sum(event.state in states for event in self._runs.values())

    def seconds_left(self) -> float | None:
        """Time for all rounds that are left at the pace since the start; None before the first round."""
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
        left = None if self._besides else self.seconds_left()  # which knows of rounds alone
        lines: list[RenderableType] = [_bar(f"{ended} of {total} runs", done, rounds, left)]
        running = [event for event in self._runs.values() if event.state == "running"]
        for event in running[: self.SHOWN]:
            accuracy = "" if event.accuracy is None else f"  accuracy {tables.percent(event.accuracy)} %"
            lines.append(
                _clipped(event.run, f"  round {event.round} of {event.rounds}{accuracy}", self._screen.console.width)
            )
        if len(running) > self.SHOWN:
            lines.append(Text(f"and {len(running) - self.SHOWN} more", style="dim"))
        counts = [(self._count(state), state) for state in ("skipped", "failed", "stopped", "waiting")]  # type: ignore[arg-type]
        lines.append(Text(", ".join(f"{count} {state}" for count, state in counts if count), style="dim"))
        if self._besides:
            lines.append(Text(f"  {self._besides}"))
        return Group(*lines)


def _clipped(name: str, rest: str, width: int) -> RenderableType:
    """``name`` and ``rest`` on one line: a name that is too long loses its middle."""
    from rich.text import Text

    room = max(8, min(width, 100) - len(rest) - 3)
    if len(name) > room:
        name = name[: room // 2] + "…" + name[-(room - room // 2 - 1) :]
    return Text(f"  {name}{rest}", no_wrap=True, overflow="crop")


def console_now() -> Console:
    """A console for stdout as it is now; 80 columns where stdout is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
