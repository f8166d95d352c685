"""Experiments: several recipes or values over several seeds, in parallel, kept in one folder and gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from fedflat.config.recipe import Recipe, RecipeLike
from fedflat.core import durable
from fedflat.core import process as stopping
from fedflat.core.checks import InputError, RunError, one_line, whole
from fedflat.core.process import leave_to_parent, listening_to_progress, write_errors_to
from fedflat.data.clients import FederatedData
from fedflat.records.folder import METRICS, RECIPE, STATEMENT, read_lines
from fedflat.report import (
    ASKED,
    Group,
    RunEvent,
    State,
    figures_of_groups,
    metrics,
    styles,
    tables,
    write_figure,
    write_report,
)
from fedflat.simulation.experiment_settings import Setting, Task, check_folders, claim, expand, tasks, unused_folder

Update = Callable[[RunEvent], None]
GONE = "its worker process is gone: {}; the same command goes on with it"
FILES = {"md": "markdown", "csv": "csv", "json": "json", "tex": "latex"}


# Set once in each worker process by ``begin_worker``: the queue, the flag, and what gives a recipe its federation.
_SHARED: dict[str, Any] = {}
_DATA: dict[str, FederatedData] = {}  # at most one federation, the last one used

PAUSE = 0.2  # seconds between looks at the flags


def begin_worker(
    parent: int, errors: int, queue: Any, stop: Any, abort: Any, threads: int, data: Callable[[Recipe], FederatedData]
) -> None:
    """Start of a worker. Signals are the parent's to handle; a worker ends at once when its parent is gone.

    errors: the file of process ``parent`` that keeps what workers write to their standard error.
    """
    import torch

    write_errors_to(parent, errors)
    leave_to_parent()
    torch.set_num_threads(threads)
    _SHARED.update(queue=queue, stop=stop, data=data)
    threading.Thread(target=_watch, args=(abort,), daemon=True).start()


def _watch(abort: Any) -> None:
    parent = parent_process()
    while parent is not None and parent.is_alive() and not abort.is_set():
        time.sleep(PAUSE)
    # os._exit: an exception in this thread would end only the thread.
    os._exit(1)  # no clean-up: a run killed at any point can be gone on with


def data_for(recipe: Recipe) -> FederatedData:
    """Return the recipe's federation; kept until another data section or seed is asked for, one at a time in memory."""
    from fedflat.assembly.inputs import data_of

    key = json.dumps([recipe.data.model_dump(mode="json"), recipe.seed], sort_keys=True)
    if key not in _DATA:
        _DATA.clear()
        _DATA[key] = data_of(recipe, None, None)
    return _DATA[key]


class _Waiting:
    """A listener that tells the parent of a run's long work, twice a second at most."""

    def __init__(self, name: str, turn: int) -> None:
        self.name, self.turn, self.spoke = name, turn, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        from fedflat.report import waiting_text

        if time.monotonic() - self.spoke >= 0.5:
            self.spoke = time.monotonic()
            _SHARED["queue"].put((self.name, self.turn, None, waiting_text(what, done, total)))


def check_in_worker(recipe: Recipe, name: str) -> None:
    """Build everything that run ``name`` of the recipe needs, and no more. Raises InputError for what is wrong."""
    from fedflat.assembly.jobs import prepare

    with listening_to_progress(_Waiting(name, 0)):
        prepare(recipe, data=_SHARED["data"](recipe))


def work_in_worker(task: Task) -> str:
    """Run or go on with one task; returns why it stopped early, or the empty string.

    Raises RunError with one line for a run that fails, whatever the cause.
    """
    from fedflat.report import write_report
    from fedflat.simulation import run as simulation

    def tell(released: dict[str, Any], state: object) -> None:
        _SHARED["queue"].put((task.name, int(released["round"]) + 1, released.get("test_accuracy"), ""))

    if _SHARED["stop"].is_set():
        return "stopped before it began, as asked"
    turn = len(read_lines(task.folder / METRICS))
    _SHARED["queue"].put((task.name, turn, None, ""))
    try:
        with listening_to_progress(_Waiting(task.name, turn)):
            result = simulation.run(
                task.recipe, out=task.folder, data=_SHARED["data"](task.recipe), on_round=tell, progress=False,
                resume=(task.folder / RECIPE).is_file(), should_stop=_SHARED["stop"].is_set,
            )  # fmt: skip
        write_report([task.folder], task.folder / "report.html")
    except (InputError, RunError) as error:
        raise RunError(str(error)) from None
    except Exception as error:  # a failed run must not end the others; its kind and place are told in one line
        raise RunError(_with_place(error)) from None
    return result.stopped


def _with_place(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""
    return one_line(error, None) + place


def finished(task: Task) -> bool:
    """Return whether the run is done: its statement, which is written last, is there, and all its rounds are."""
    if not (task.folder / STATEMENT).is_file():
        return False
    try:
        rounds = json.loads((task.folder / STATEMENT).read_text(encoding="utf-8"))["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(rounds == task.recipe.rounds == len(read_lines(task.folder / METRICS)))


@dataclass(frozen=True)
class Comparison:
    """What an experiment found.

    Attributes:
        folder: where everything is. page: its report, or None while no run is done.
        table: one row per setting over the seeds that are done, differences within one ε; None without any.
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
        """Return plain values, ready for JSON; None for what is absent or infinite."""
        none: dict[str, Any] = {"rows": [], "equal": None, "together": [], "notes": []}
        found = none if self.table is None else tables.record_of(self.table)
        return {
            "folder": str(self.folder),
            "report": None if self.page is None else str(self.page),
            **found,
            "notes": [*found["notes"], *self.notes],
            "runs": self.total,
            "failed": self.failed,
            "left": self.left,
        }


def compare(
    recipes: Sequence[RecipeLike],
    overrides: Sequence[str] = (),
    seeds: int = 3,
    folder: str | Path | None = None,
    processes: int | None = None,
    update: Update | None = None,
    data: Callable[[Recipe], FederatedData] = data_for,
) -> Comparison:
    """Run every setting with every seed and compare them; what is done in ``folder`` already is kept.

    recipes: names, paths, dicts or Recipes. overrides: ``key=value`` strings; ``key=a,b`` makes settings of both.
    folder: default runs/compare, or runs/compare-2 … where that holds another comparison.
    seeds: runs of each setting, with the recipe's seed and the numbers after it. processes: runs at a time (default:
    the number of cores). update: called with a RunEvent for all that happens. data: gives a recipe its federation,
    called in the processes that run. Ctrl-C lets running rounds finish.
    Raises InputError before any training for what is wrong in any setting, or when ``folder`` holds other runs.
    """
    whole("seeds", seeds, 1)
    tell = update or (lambda event: None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = expand(recipes, overrides, seeds)
    wide = _at_a_time(settings, cores) if processes is None else whole("processes", processes, 1)
    place = unused_folder(settings) if folder is None else Path(folder)
    check_folders(place, settings)
    todo = _announce(tasks(place, settings), tell)
    crew = _WorkerCrew(todo, tell, lambda: claim(place, settings), data)
    if todo:
        # Threads by what was asked for, not by what is left: a resumed run adds its numbers up in the same order.
        crew.work(_unchecked(settings, todo), min(wide, len(todo)), max(1, cores // wide))
    return _collect(place, settings, crew)


def _at_a_time(settings: list[Setting], cores: int) -> int:
    """Return as many runs as there are cores, one where runs may take the GPU: they would only wait for each other."""
    engines = [setting.recipe.engine for setting in settings]
    import torch

    from fedflat.engine.device import PROCESSES

    if all(engine.device == "cpu" or (engine.device == "auto" and engine.backend in PROCESSES) for engine in engines):
        return cores
    return 1 if torch.cuda.is_available() else cores


def _announce(every: list[Task], tell: Update) -> list[Task]:
    """Tell of every run; return those that are not done."""
    left = []
    for task in every:
        done = finished(task)
        rounds = task.recipe.rounds
        tell(RunEvent(task.name, "skipped" if done else "waiting", rounds if done else 0, rounds))
        left += [] if done else [task]
    return left


def _unchecked(settings: list[Setting], todo: list[Task]) -> list[Setting]:
    """Return the settings of which no run has begun: nobody has built their data, model and plan yet."""
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
    gone: str = ""  # how the last worker process that died did so

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
                        self._fail(task, self.gone)
                    left = []

    def _pool(
        self, context: Any, stop: Any, unchecked: list[Setting], todo: list[Task], processes: int, threads: int
    ) -> list[Task]:
        """Work in one pool of processes; returns the tasks that had not begun when it broke."""
        queue, abort = context.Queue(), context.Event()
        errors = stopping.own_stderr()
        given = (os.getpid(), errors, queue, stop, abort, threads, self.data)
        pool = ProcessPoolExecutor(processes, context, begin_worker, given)
        crew = pool._processes  # only they know how they ended
        try:
            with stopping.ignored():  # workers inherit that, so Ctrl-C in their first second cannot end them
                checks = [pool.submit(check_in_worker, s.recipe, f"{s.slug}/seed-{s.seeds[0]}") for s in unchecked]
            self._check(checks, stop, queue, lambda: _gone(crew, errors))
            self.checked()
            with stopping.ignored():
                futures = {pool.submit(work_in_worker, task): task for task in todo}
            return self._watch(futures, queue, lambda: _gone(crew, errors))
        except BaseException:
            abort.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            queue.close()
            if not self.gone and (words := stopping.text_of(errors)):
                print(words, file=sys.stderr)
            os.close(errors)

    def _check(self, checks: list[Future[None]], stop: Any, queue: Any, gone: Callable[[], str]) -> None:
        """Raise the first mistake of any setting; after Ctrl-C the checks that have not begun are left out."""
        for future in checks:
            while not future.done():  # short waits: a signal is handled between them
                wait([future], timeout=0.2)
                self._hear(queue)
                if stop.is_set():
                    future.cancel()
            if not future.cancelled():
                try:
                    future.result()
                except BrokenProcessPool:
                    self.gone = gone()
                    raise RunError(f"compare: while the settings were checked, {self.gone}") from None

    def _watch(self, futures: dict[Future[str], Task], queue: Any, gone: Callable[[], str]) -> list[Task]:
        pending, again = set(futures), []
        while pending:
            ended, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            self._hear(queue)
            if any(isinstance(future.exception(), BrokenProcessPool) for future in ended):
                self.gone = gone()
            for future in ended:
                again += self._take(futures[future], future)
        self._hear(queue)
        return again

    def _hear(self, queue: Any) -> None:
        """Pass on what workers have told since the last time."""
        rounds = {task.name: task.recipe.rounds for task in self.todo}
        while not queue.empty():
            name, turn, accuracy, note = queue.get()
            before = self.seen.get(name)
            if before is None and note:
                self.tell(RunEvent(name, "waiting", turn, rounds[name], None, note))
                continue
            if before is not None and before.state != "running":
                continue
            kept = accuracy if accuracy is not None else before.accuracy if before else None
            self.seen[name] = RunEvent(name, "running", turn, rounds[name], kept, note)
            self.tell(self.seen[name])

    def _take(self, task: Task, future: Future[str]) -> list[Task]:
        """Note how a task ended; return it if its pool broke before it began."""
        try:
            why = future.result()
        except BrokenProcessPool:
            if task.name not in self.seen:
                return [task]
            self._fail(task, self.gone)
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


def _gone(crew: Any, errors: int) -> str:
    """Return how a process of the crew came to its end, in words."""
    statuses = [process.exitcode for process in crew.values() if process.exitcode]
    return GONE.format(stopping.how_it_ended(statuses[0] if statuses else None, stopping.text_of(errors)))


def _collect(folder: Path, settings: list[Setting], crew: _WorkerCrew) -> Comparison:
    """Read the runs that are done back from their files, and write the tables and the page."""
    every = tasks(folder, settings)
    groups, paths, notes, missing = [], [], [], []
    for setting in settings:
        mine = [task for task in every if task.folder.parent.name == setting.slug]
        done = [task.folder for task in mine if task.name in crew.ended or finished(task)]
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
    numbers = styles([group.runs[0].algorithm for group in groups])
    groups = [replace(group, style=style) for group, style in zip(groups, numbers)]
    table = tables.comparison_table(groups)
    for ending, kind in FILES.items():
        durable.replace(folder / f"table.{ending}", tables.RENDERERS[kind](table), mode=0o644)
    durable.replace(folder / "runs.csv", tables.runs_csv(groups), mode=0o644)
    figures = {figure.key: figure for figure in figures_of_groups(groups)}
    drawn = [figures[key] for key in ("by-epsilon", "accuracy", "loss") if key in figures][:1]
    for figure in drawn:
        write_figure(figure, folder, ("pdf",))
    page = write_report(paths, folder / "report.html")
    return Comparison(folder, page, table, tuple(notes), crew.failed, left, total)


def _epsilon_note(group: Group) -> list[str]:
    """Return a sentence where the seeds of a setting do not share one ε (the table shows the largest)."""
    found = [metrics.proven_epsilon(run) for run in group.runs]
    if len(set(found)) <= 1:
        return []
    low = min((value for value in found if value is not None), default=None)
    high = None if None in found else max(value for value in found if value is not None)
    return [f"{group.label}: ε differs between seeds, {metrics.epsilon_text(low)} to {metrics.epsilon_text(high)}."]


__all__ = ["Comparison", "compare"]
