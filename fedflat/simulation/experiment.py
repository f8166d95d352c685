"""Experiments: several recipes or values over several seeds, in parallel, kept in one folder and gone on with."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedflat.config.recipe import Recipe, RecipeLike
from fedflat.core import durable, stopping
from fedflat.core.checks import RunError, whole
from fedflat.data.clients import FederatedData
from fedflat.report import metrics, tables
from fedflat.report.groups import Group
from fedflat.report.html import write_report
from fedflat.report.progress import ASKED, RunEvent, State
from fedflat.simulation import experiment_worker as worker
from fedflat.simulation.experiment_settings import Setting, Task, check_folders, claim, expand, tasks

Update = Callable[[RunEvent], None]
KILLED = "its worker process was killed (out of memory?); the same command goes on with it"
FILES = {"md": "markdown", "csv": "csv", "json": "json", "tex": "latex"}


@dataclass(frozen=True)
class Comparison:
    """What an experiment found.

    Attributes:
        folder: where everything is. page: its report, or None while no run is done.
        table: one row per setting over the seeds that are done, differences against the first; None without any.
        notes: what the table's columns cannot say (an ε that differs between seeds, runs that are missing).
        failed: name and one-line error of the runs that failed.
        left: runs that were stopped or not begun. total: all runs.
    """

    folder: Path
    page: Path | None
    table: tables.Comparison | None
    notes: tuple[str, ...]
    failed: dict[str, str]
    left: int
    total: int

    @property
    def complete(self) -> bool:
        """Whether every run is done."""
        return not self.failed and not self.left

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; None for what is absent or infinite."""
        return {
            "folder": str(self.folder),
            "report": None if self.page is None else str(self.page),
            "rows": [] if self.table is None else tables.to_records(self.table),
            "equal": None if self.table is None else tables.equal_record(self.table),
            "together": [] if self.table is None else tables.together_record(self.table),
            "notes": [*([] if self.table is None else tables.notes(self.table)), *self.notes],
            "runs": self.total,
            "failed": self.failed,
            "left": self.left,
        }


def compare(
    recipes: Sequence[RecipeLike],
    overrides: Sequence[str] = (),
    seeds: int = 3,
    folder: str | Path = "runs/compare",
    processes: int | None = None,
    update: Update | None = None,
    data: Callable[[Recipe], FederatedData] = worker.data_for,
) -> Comparison:
    """Run every setting with every seed and compare them; what is done in ``folder`` already is kept.

    recipes: names, paths, dicts or Recipes. overrides: ``key=value`` strings; ``key=a,b`` makes settings of both.
    seeds: runs of each setting, with the recipe's seed and the numbers after it. processes: runs at a time (default:
    the number of cores). update: called with a RunEvent for all that happens. data: gives a recipe its federation,
    called in the processes that run. Ctrl-C lets running rounds finish.
    Raises InputError before any training for what is wrong in any setting, or when ``folder`` holds other runs.
    """
    whole("seeds", seeds, 1)
    place, tell = Path(folder), update or (lambda event: None)
    cores = _cores()
    settings = expand(recipes, overrides, seeds)
    wide = _at_a_time(settings, cores) if processes is None else whole("processes", processes, 1)
    check_folders(place, settings)
    todo = _announce(tasks(place, settings), tell)
    crew = _WorkerCrew(todo, tell, lambda: claim(place, settings), data)
    if todo:
        # Threads by what was asked for, not by what is left: a resumed run adds its numbers up in the same order.
        crew.work(_unchecked(settings, todo), min(wide, len(todo)), max(1, cores // wide))
    return _collect(place, settings, crew)


def _at_a_time(settings: list[Setting], cores: int) -> int:
    """As many runs as there are cores, but one where runs may take the GPU: they would only wait for each other."""
    engines = [setting.recipe.engine for setting in settings]
    import torch

    from fedflat.engine.device import PROCESSES

    if all(engine.device == "cpu" or (engine.device == "auto" and engine.backend in PROCESSES) for engine in engines):
        return cores
    return 1 if torch.cuda.is_available() else cores


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _announce(every: list[Task], tell: Update) -> list[Task]:
    """Tell of every run; return those that are not done."""
    left = []
    for task in every:
        done = worker.finished(task)
        rounds = task.recipe.rounds
        tell(RunEvent(task.name, "skipped" if done else "waiting", rounds if done else 0, rounds))
        left += [] if done else [task]
    return left


def _unchecked(settings: list[Setting], todo: list[Task]) -> list[Setting]:
    """The settings of which no run has begun: nobody has built their data, model and plan yet."""
    begun = {task.name.rpartition("/")[0] for task in todo if (task.folder / "recipe.yaml").is_file()}
    waiting = {task.name.rpartition("/")[0] for task in todo}
    return [setting for setting in settings if setting.slug in waiting - begun]


@dataclass
class _WorkerCrew:
    """The worker processes of one experiment and what became of its runs.

    ended: runs that are done, with why if it was before the last round. failed: with the error. stopped: as asked.
    """

    todo: list[Task]
    tell: Update
    checked: Callable[[], None]  # called when all settings have been found good, before any run
    data: Callable[[Recipe], FederatedData]
    ended: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    seen: dict[str, RunEvent] = field(default_factory=dict)

    def work(self, unchecked: list[Setting], processes: int, threads: int) -> None:
        """Check the settings, then run what is to do; returns when all ended or were stopped."""
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        left = self.todo
        with stopping.on_request("the running rounds", stop.set):
            while left:
                before = len(left)
                left = self._pool(context, stop, unchecked, left, processes, threads)
                unchecked = []
                if len(left) == before:  # a new pool would meet the same end
                    for task in left:
                        self._fail(task, KILLED)
                    left = []

    def _pool(
        self, context: Any, stop: Any, unchecked: list[Setting], todo: list[Task], processes: int, threads: int
    ) -> list[Task]:
        """Work in one pool of processes; returns the tasks that had not begun when it broke."""
        queue, abort = context.Queue(), context.Event()
        pool = ProcessPoolExecutor(processes, context, worker.begin, (queue, stop, abort, threads, self.data))
        try:
            with stopping.ignored():  # workers inherit that, so Ctrl-C in their first second cannot end them
                checks = [pool.submit(worker.check, setting.recipe) for setting in unchecked]
            self._check(checks, stop)
            self.checked()
            with stopping.ignored():
                futures = {pool.submit(worker.work, task): task for task in todo}
            return self._watch(futures, queue)
        except BaseException:
            abort.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            queue.close()

    def _check(self, checks: list[Future[None]], stop: Any) -> None:
        """Raise the first mistake of any setting; after Ctrl-C the checks that have not begun are left out."""
        for future in checks:
            while not future.done():  # short waits: a signal is handled between them
                wait([future], timeout=0.2)
                if stop.is_set():
                    future.cancel()
            if not future.cancelled():
                try:
                    future.result()
                except BrokenProcessPool:
                    raise RunError(f"compare: while the settings were checked, {KILLED}") from None

    def _watch(self, futures: dict[Future[str], Task], queue: Any) -> list[Task]:
        pending, again = set(futures), []
        while pending:
            ended, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            self._hear(queue)
            for future in ended:
                again += self._take(futures[future], future)
        self._hear(queue)
        return again

    def _hear(self, queue: Any) -> None:
        """Pass on what workers have told since the last time."""
        rounds = {task.name: task.recipe.rounds for task in self.todo}
        while not queue.empty():
            name, turn, accuracy = queue.get()
            before = self.seen.get(name)
            if before is not None and before.state != "running":
                continue
            kept = accuracy if accuracy is not None else before.accuracy if before else None
            self.seen[name] = RunEvent(name, "running", turn, rounds[name], kept)
            self.tell(self.seen[name])

    def _take(self, task: Task, future: Future[str]) -> list[Task]:
        """Note how a task ended; returns it if its pool broke before it began."""
        try:
            why = future.result()
        except BrokenProcessPool:
            if task.name not in self.seen:
                return [task]
            self._fail(task, KILLED)
        except RunError as error:
            self._fail(task, str(error))
        else:
            if ASKED in why:
                self.stopped.append(task.name)
                self._end(task, "stopped")
            else:
                self.ended[task.name] = why
                self._end(task, "done")
        return []

    def _fail(self, task: Task, why: str) -> None:
        self.failed[task.name] = why
        self._end(task, "failed", why)

    def _end(self, task: Task, state: State, note: str = "") -> None:
        last = self.seen.get(task.name) or RunEvent(task.name, "waiting", 0, task.recipe.rounds)
        turn = last.rounds if state == "done" else last.round
        self.seen[task.name] = RunEvent(task.name, state, turn, last.rounds, last.accuracy, note)
        self.tell(self.seen[task.name])


def _collect(folder: Path, settings: list[Setting], crew: _WorkerCrew) -> Comparison:
    """Read the runs that are done back from their files, and write the tables and the page."""
    every = tasks(folder, settings)
    groups, paths, notes, missing = [], [], [], []
    for setting in settings:
        mine = [task for task in every if task.folder.parent.name == setting.slug]
        done = [task.folder for task in mine if task.name in crew.ended or worker.finished(task)]
        if done:
            group = Group(setting.label, tuple(metrics.read_run(path) for path in done))
            groups.append(group)
            paths += done
            notes += _epsilon_note(group)
        if len(done) < len(mine):
            missing.append(f"{setting.label} ({len(mine) - len(done)} of {len(mine)})")
    notes += [f"{name}: {why}." for name, why in crew.ended.items() if why]
    notes += [f"Missing runs: {', '.join(missing)}."] if missing else []
    left, total = len(crew.stopped), len(every)
    if not groups:
        return Comparison(folder, None, None, tuple(notes), crew.failed, left, total)
    table = tables.comparison_table(groups)
    for ending, kind in FILES.items():
        durable.replace(folder / f"table.{ending}", tables.RENDERERS[kind](table), mode=0o644)
    page = write_report(paths, folder / "report.html")
    return Comparison(folder, page, table, tuple(notes), crew.failed, left, total)


def _epsilon_note(group: Group) -> list[str]:
    """A sentence where the seeds of a setting do not share one ε (the table shows the largest)."""
    found = [metrics.proven_epsilon(run) for run in group.runs]
    if len(set(found)) <= 1:
        return []
    low = min((value for value in found if value is not None), default=None)
    high = None if None in found else max(value for value in found if value is not None)
    return [f"{group.label}: ε differs between seeds, {tables.epsilon_text(low)} to {tables.epsilon_text(high)}."]


__all__ = ["Comparison", "compare"]
