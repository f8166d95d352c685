"""Experiments: several recipes or values over several seeds, in parallel, kept in one folder and gone on with."""

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from fedflat.config.recipe import Recipe, RecipeLike
from fedflat.core import InputError, RunError, becoming, durable, one_line, whole
from fedflat.core import process as stopping
from fedflat.core.process import leave_to_parent, listening_to_progress, warn_in_a_line, write_errors_to
from fedflat.data.clients import FederatedData
from fedflat.records.folder import METRICS, RECIPE, STATEMENT, read_lines
from fedflat.report import metrics, tables
from fedflat.report.figures import figures_of_groups
from fedflat.report.groups import Group
from fedflat.report.html import public, write_report
from fedflat.report.plates import write_figure
from fedflat.report.progress import ASKED, RunEvent, State, waiting_text
from fedflat.simulation.settings import Setting, Task, check_folders, claim, expand, tasks, unused_folder

Update = Callable[[RunEvent], None]
Loader = Callable[[Recipe], FederatedData]
GONE = "its worker process is gone: {}; the same command goes on with it"


# Set once in each worker process by ``begin_worker``: the queue, the flag, and what gives a recipe its federation.
_SHARED: dict[str, Any] = {}
_DATA: dict[str, FederatedData] = {}  # at most one federation, the last one used

PAUSE = 0.2  # seconds between looks at the flags


def begin_worker(parent: int, errors: int, queue: Any, stop: Any, abort: Any, threads: int, data: Loader) -> None:
    """Start of a worker. Signals are the parent's to handle; a worker ends at once when its parent is gone.

    errors: the file of process ``parent`` that keeps what workers write to their standard error.
    """
    import torch

    write_errors_to(parent, errors)
    leave_to_parent()
    warn_in_a_line()
    torch.set_num_threads(threads)
    _SHARED.update(queue=queue, stop=stop, data=data)
    threading.Thread(target=_watch, args=(abort,), daemon=True).start()


def _watch(abort: Any) -> None:
    parent = parent_process()
    while parent is not None and parent.is_alive() and not abort.is_set():
        time.sleep(PAUSE)
    # An exception would end only this thread; without clean-up, as a run killed at any point can be gone on with.
    os._exit(1)


def data_for(recipe: Recipe) -> FederatedData:
    """Return the recipe's federation; kept until another data section or seed is asked for, one at a time in memory."""
    from fedflat.assembly.inputs import data_of

    key = json.dumps([recipe.data.model_dump(mode="json"), recipe.seed], sort_keys=True)
    if key not in _DATA:
        _DATA.clear()
        _DATA[key] = data_of(recipe, None, None)
    return _DATA[key]


def _listen(name: str, turn: int) -> AbstractContextManager[None]:
    """Tell the parent of a run's long work inside the block, twice a second at most."""
    spoke = 0.0

    def hear(stage: str, done: int, total: int) -> None:
        nonlocal spoke
        if time.monotonic() - spoke >= 0.5:
            spoke = time.monotonic()
            _SHARED["queue"].put((name, turn, None, waiting_text(stage, done, total)))

    return listening_to_progress(hear)


def check_in_worker(task: Task) -> str:
    """Build everything that a run needs, and no more; returns the empty string. Raises InputError for what is wrong."""
    from fedflat.assembly.jobs import prepare

    with _listen(task.name, 0):
        if not _SHARED["stop"].is_set():
            prepare(task.recipe, data=_SHARED["data"](task.recipe))
    return ""


def work_in_worker(task: Task) -> str:
    """Run or go on with one task; returns why it stopped early, or the empty string.

    Raises RunError with one line for a run that fails, whatever the cause.
    """
    from fedflat.simulation.run import run

    def tell(released: dict[str, Any], state: object) -> None:
        _SHARED["queue"].put((task.name, int(released["round"]) + 1, released.get("test_accuracy"), ""))

    if _SHARED["stop"].is_set():
        return "stopped before it began, as asked"
    turn = len(read_lines(task.folder / METRICS))
    _SHARED["queue"].put((task.name, turn, None, ""))
    try:
        with _listen(task.name, turn):
            result = run(
                task.recipe, out=task.folder, data=_SHARED["data"](task.recipe), on_round=tell, progress=False,
                resume=(task.folder / RECIPE).is_file(), should_stop=_SHARED["stop"].is_set,
            )  # fmt: skip
        write_report([task.folder], task.folder / "report.html")
    except (InputError, RunError) as error:
        raise RunError(str(error)) from None
    except Exception as error:
        # A failed run must not end the others; its kind and place are told in one line.
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(f"{one_line(error, None)} ({Path(place.filename).name}:{place.lineno})") from None
    return result.stopped


def finished(task: Task) -> bool:
    """Return whether the run is done: its statement, which is written last, is there, and all its rounds are."""
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
        notes: what the table's columns cannot say (why runs ended early, which are missing).
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
        record = {"rows": [], "together": [], "notes": []} if self.table is None else tables.record_of(self.table)
        return record | {
            "folder": str(self.folder), "report": None if self.page is None else str(self.page),
            "notes": [*record["notes"], *self.notes], "runs": self.total, "failed": self.failed, "left": self.left,
        }  # fmt: skip


def compare(
    recipes: Sequence[RecipeLike], overrides: Sequence[str] = (), seeds: int = 3, folder: str | Path | None = None,
    processes: int | None = None, update: Update | None = None, data: Loader = data_for,
) -> Comparison:  # fmt: skip
    """Run every setting with every seed and compare them; what is done in ``folder`` already is kept.

    recipes: names, paths, dicts or Recipes. overrides: ``key=value`` strings; ``key=a,b`` makes settings of both.
    folder: default runs/compare, or runs/compare-2 … where that holds another comparison.
    seeds: runs of each setting, with the recipe's seed and the numbers after it. processes: runs at a time (default:
    the number of cores). update: called with a RunEvent for all that happens. data: gives a recipe its federation,
    called in the processes that run. Ctrl-C lets running rounds finish.
    Raises InputError before any training for what is wrong in any setting, or when ``folder`` holds other runs.
    """
    whole("seeds", seeds, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = expand(recipes, overrides, seeds)
    wide = _at_a_time(settings, cores) if processes is None else whole("processes", processes, 1)
    place = unused_folder(settings) if folder is None else Path(folder)
    check_folders(place, settings)
    crew = _WorkerCrew(place, settings, update or (lambda event: None))
    if crew.todo:
        # Threads by what was asked for, not by what is left: a resumed run adds its numbers up in the same order.
        crew.work(min(wide, len(crew.todo)), max(1, cores // wide), data)
    return _collect(crew)


def _at_a_time(settings: list[Setting], cores: int) -> int:
    """Return as many runs as there are cores, one where runs may take the GPU: they would only wait for each other."""
    import torch

    from fedflat.engine.device import PROCESSES

    engines = [setting.recipe.engine for setting in settings]
    cpu = all(engine.device == "cpu" or (engine.device == "auto" and engine.backend in PROCESSES) for engine in engines)
    return cores if cpu or not torch.cuda.is_available() else 1


class _WorkerCrew:
    """The worker processes of one experiment and what became of its runs.

    seen: the last event of each run that was not done before; its note says why it ended before its last round. gone:
    how a worker process that died did so.
    """

    def __init__(self, place: Path, settings: list[Setting], tell: Update) -> None:
        self.place, self.settings, self.tell = place, settings, tell
        self.every = tasks(place, settings)
        self.todo = [task for task in self.every if not finished(task)]
        self.seen = {task.name: RunEvent(task.name, "waiting", 0, task.recipe.rounds) for task in self.todo}
        self.gone = ""
        for task in self.every:
            rounds = task.recipe.rounds
            tell(self.seen.get(task.name) or RunEvent(task.name, "skipped", rounds, rounds))

    def work(self, processes: int, threads: int, data: Loader) -> None:
        """Check the settings, then run what is to do; returns when all ended or were stopped.

        When one of the processes dies, what has not ended has failed.
        """
        context = multiprocessing.get_context("spawn")
        stop, abort, self.queue = context.Event(), context.Event(), context.Queue()
        self.errors = stopping.own_stderr()
        initargs = (os.getpid(), self.errors, self.queue, stop, abort, threads, data)
        self.pool = ProcessPoolExecutor(processes, context, begin_worker, initargs)
        with stopping.on_request("the running rounds", stop.set):
            try:
                self._check_and_run()
            except BaseException:
                abort.set()
                raise
            finally:
                self.pool.shutdown(wait=True, cancel_futures=True)
                self.queue.close()
                if not self.gone and (words := stopping.text_of(self.errors)):
                    print(words, file=sys.stderr)
                os.close(self.errors)

    def _check_and_run(self) -> None:
        first = {task.folder.parent: task for task in reversed(self.todo)}  # of each setting
        died = "compare: while the settings were checked, {}"
        with becoming(lambda _: RunError(died.format(self._gone())), BrokenProcessPool):
            for _, future in self._ended(check_in_worker, [*reversed(first.values())]):
                future.result()
        # All settings have been found good, and nothing has run.
        claim(self.place, self.settings)
        for task, future in self._ended(work_in_worker, self.todo):
            self._take(task, future)

    def _ended(self, work: Callable[[Task], str], todo: Sequence[Task]) -> Iterator[tuple[Task, Future[str]]]:
        """Give tasks to the processes and yield each when it ended; pass on what workers tell in the meantime."""
        # Workers inherit that, so Ctrl-C in their first second cannot end them.
        with stopping.ignored():
            futures = {self.pool.submit(work, task): task for task in todo}
        pending = set(futures)
        while pending:
            # Short waits: a signal is handled between them.
            ended, pending = wait(pending, timeout=PAUSE, return_when=FIRST_COMPLETED)
            while not self.queue.empty():
                self._hear(*self.queue.get())
            yield from ((task, future) for future, task in futures.items() if future in ended)

    def _hear(self, name: str, turn: int, accuracy: float | None, note: str) -> None:
        before = self.seen[name]
        if before.state in ("waiting", "running"):
            state = "waiting" if before.state == "waiting" and note else "running"
            last = before.accuracy if accuracy is None else accuracy
            self._tell(name, state=state, round=turn, accuracy=last, note=note)

    def _tell(self, name: str, **news: Any) -> None:
        self.seen[name] = replace(self.seen[name], **news)
        self.tell(self.seen[name])

    def _take(self, task: Task, future: Future[str]) -> None:
        """Note and tell how a task ended."""
        state: State = "failed"
        try:
            why = future.result()  # "", or why it ended before its last round
            state = "stopped" if ASKED in why else "done"
        except (BrokenProcessPool, RunError) as error:
            why = self._gone() if isinstance(error, BrokenProcessPool) else str(error)
        turn = task.recipe.rounds if state == "done" else self.seen[task.name].round
        self._tell(task.name, state=state, round=turn, note=why)

    def _gone(self) -> str:
        """Return how a process of the crew came to its end, in words; only the processes know."""
        if not self.gone:
            statuses = [process.exitcode for process in self.pool._processes.values() if process.exitcode]
            status = statuses[0] if statuses else None
            self.gone = GONE.format(stopping.how_it_ended(status, stopping.text_of(self.errors)))
        return self.gone


def _collect(crew: _WorkerCrew) -> Comparison:
    """Read the runs that are done back from their files, and write the tables and the page."""
    folder = crew.place
    groups, paths, notes, missing = [], [], [], []
    done_now, failed, stopped = (
        {event.run: event.note for event in crew.seen.values() if event.state == state}
        for state in ("done", "failed", "stopped")
    )
    for setting in crew.settings:
        mine = [task for task in crew.every if task.folder.parent.name == setting.slug]
        done = [task.folder for task in mine if task.name in done_now or finished(task)]
        if done:
            groups.append(Group(setting.label, tuple(metrics.read_run(path) for path in done)))
            paths += done
        if len(done) < len(mine):
            missing.append(f"{setting.label} ({len(mine) - len(done)} of {len(mine)})")
    notes += [f"{name}: {why}." for name, why in done_now.items() if why]
    notes += [f"Missing runs: {', '.join(missing)}."] if missing else []
    page = table = None
    if groups:
        groups = [replace(group, style=style) for style, group in enumerate(groups)]
        table = tables.comparison_table(groups)
        _write_tables(folder, groups)
        page = write_report(paths, folder / "report.html")
    return Comparison(folder, page, table, tuple(notes), failed, len(stopped), len(crew.every))


def _write_tables(folder: Path, groups: list[Group]) -> None:
    """Write the table in every form, every run in one file, and the first figure that there is.

    With what is private to the simulation (times, personal accuracies, gaps) they lie in ``private``.
    """
    released = [replace(group, runs=tuple(map(public, group.runs))) for group in groups]
    places = [(folder, released, 0o644)]
    if any(run.private for group in groups for run in group.runs):
        (folder / "private").mkdir(mode=0o700, exist_ok=True)
        places.append((folder / "private", groups, 0o600))
    for place, shown, mode in places:
        texts = tables.files(tables.comparison_table(shown)) | {"runs.csv": tables.runs_csv(shown)}
        for name, text in texts.items():
            durable.replace(place / name, text, mode=mode)
    figures = {figure.key: figure for figure in figures_of_groups(released)}
    for key in [key for key in ("by-epsilon", "accuracy", "loss") if key in figures][:1]:
        write_figure(figures[key], folder, ("pdf",))
