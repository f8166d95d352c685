"""What a worker process of an experiment does: one run at a time, telling the parent of each round."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError, one_line
from fedflat.core.stopping import leave_to_parent
from fedflat.data.clients import FederatedData
from fedflat.records.folder import METRICS, RECIPE, STATEMENT, read_lines
from fedflat.simulation.experiment_settings import Task

# Set once in each worker process by ``begin``: the queue, the flag, and what gives a recipe its federation.
_SHARED: dict[str, Any] = {}
_DATA: dict[str, FederatedData] = {}  # at most one federation, the last one used

PAUSE = 0.2  # seconds between looks at the flags


def begin(queue: Any, stop: Any, abort: Any, threads: int, data: Callable[[Recipe], FederatedData]) -> None:
    """Start of a worker. Signals are the parent's to handle; a worker ends at once when its parent is gone."""
    import torch

    leave_to_parent()
    torch.set_num_threads(threads)
    _SHARED.update(queue=queue, stop=stop, data=data)
    threading.Thread(target=_watch, args=(abort,), daemon=True).start()


def _watch(abort: Any) -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive() and not abort.is_set():
        time.sleep(PAUSE)
    os._exit(1)  # no clean-up: a run killed at any point can be gone on with


def data_for(recipe: Recipe) -> FederatedData:
    """The recipe's federation; kept until another data section or seed is asked for, one at a time in memory."""
    from fedflat.assembly.inputs import data_of

    key = json.dumps([recipe.data.model_dump(mode="json"), recipe.seed], sort_keys=True)
    if key not in _DATA:
        _DATA.clear()
        _DATA[key] = data_of(recipe, None, None)
    return _DATA[key]


def check(recipe: Recipe) -> None:
    """Build everything that a run of the recipe needs, and no more. Raises InputError for what is wrong in it."""
    from fedflat.assembly.jobs import prepare

    prepare(recipe, data=_SHARED["data"](recipe))


def work(task: Task) -> str:
    """Run or go on with one task; returns why it stopped early, or the empty string.

    Raises RunError with one line for a run that fails, whatever the cause.
    """
    from fedflat.report.html import write_report
    from fedflat.simulation import run as simulation

    def tell(released: dict[str, Any], state: object) -> None:
        _SHARED["queue"].put((task.name, int(released["round"]) + 1, released.get("test_accuracy")))

    if _SHARED["stop"].is_set():
        return "stopped before it began, as asked"
    _SHARED["queue"].put((task.name, len(read_lines(task.folder / METRICS)), None))
    try:
        result = simulation.run(
            task.recipe,
            out=task.folder,
            data=_SHARED["data"](task.recipe),
            resume=(task.folder / RECIPE).is_file(),
            on_round=tell,
            should_stop=_SHARED["stop"].is_set,
        )
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
    """Whether the run is done: its statement, which is written last, is there, and all its rounds are."""
    if not (task.folder / STATEMENT).is_file():
        return False
    try:
        rounds = json.loads((task.folder / STATEMENT).read_text(encoding="utf-8"))["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(rounds == task.recipe.rounds == len(read_lines(task.folder / METRICS)))
