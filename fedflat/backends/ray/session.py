"""The Ray session of this process: the cluster that ``RAY_ADDRESS`` names, or one started for this process alone."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from fedflat.core.checks import RunError
from fedflat.core.extras import missing

_STARTED: dict[str, int] = {}
"""Sessions started here, not joined: their number of CPUs."""


def require_ray() -> None:
    """Raise InputError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise missing("engine.backend", "ray", "scale")


def connect(processes: int) -> str:
    """Name of the session in use: one the caller has opened, the cluster at ``RAY_ADDRESS``, or a local one.

    processes: CPUs of a local session; one started here for another number is closed and started again. Recent versions
    of Ray guard it with a token (``~/.ray/auth_token``). Raises RunError, one line, where no session comes about.
    """
    ray = _imported()
    if ray.is_initialized():
        name = _name(ray)
        if _STARTED.get(name, processes) == processes:
            return name
        del _STARTED[name]
        ray.shutdown()
    address = os.environ.get("RAY_ADDRESS", "")
    place: dict[str, Any] = {"address": address}
    if address in ("", "local"):
        place = {"address": "local", "num_cpus": processes, "include_dashboard": False}
    try:
        with _signals_kept():
            ray.init(**place, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds
        where = f"RAY_ADDRESS={address} (RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE')})" if address else "a local Ray"
        raise RunError(f"engine.backend=ray: {where} could not be used: {one_line(error)}") from error
    name = _name(ray)
    if place["address"] == "local":
        _STARTED[name] = processes
    return name


def workers() -> int:
    """CPUs of the whole session now, at least 1: as many tasks run at a time."""
    return max(1, int(_imported().cluster_resources().get("CPU", 1)))


def one_line(error: BaseException, width: int = 300) -> str:
    """An error's kind and the beginning of what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:width]


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts: it would report to its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a warning about GPUs, which no task asks for
    import ray

    return ray


def _name(ray: Any) -> str:
    """A session's name: another one after every ``ray.init``, whoever called it."""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes signals over when it starts; what the caller had set is put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
