"""The same recipe on a real Flower federation: its programs, and the two apps, which call the simulation's functions.

Example, a federation of real processes on this machine::

    fedflat deploy dp-fedsam --nodes 4 --out fed     # the recipe as a Flower project: keys, certificates, README.md
    python -m fedflat.federation.local fed           # start all programs, run, stop them

On real machines the programs are started one by one: ``superlink`` by the operator, ``supernode`` by each client,
``close`` to end a run for good, ``lock`` for a new operator's token, ``task`` for a client's new key.

The ServerApp is ``server`` (the simulation's loop) with ``transport`` as its back end; ``replies`` checks what comes
in, ``secagg`` adds under masks where the server is not trusted. The ClientApp is ``client`` with its disk, ``store``.
``wire`` and ``bounds`` say what a message looks like and how large it may be, ``doors`` who is heard at all.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["Project", "check_flower", "client_app", "server_app", "write_examples", "write_project"]

_PLACES = {"check_flower": "processes", "write_examples": "store", "Project": "project", "write_project": "project"}


def __getattr__(name: str) -> Any:
    # These modules import torch and flwr, which take seconds: only who asks for one of them waits.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def server_app(folder: str | Path) -> Any:
    """Return the ``flwr.serverapp.ServerApp`` for the task (recipe.yaml, task.json, roster.json) in ``folder``."""
    from flwr.serverapp import ServerApp

    from fedflat.federation.processes import draw_apart

    draw_apart()
    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        from fedflat.federation.events import log_to_stderr
        from fedflat.federation.server import Settings, serve
        from fedflat.federation.task import Task

        log_to_stderr(str(context.run_config.get("log", "text")))
        serve(grid, Task.read(Path(folder)), Settings.of(context.run_config))

    app.main()(main)
    return app


def client_app(folder: str | Path) -> Any:
    """Return the ``flwr.clientapp.ClientApp`` for the same task; the node config names client, data and state."""
    from flwr.clientapp import ClientApp

    from fedflat.federation.processes import draw_apart

    draw_apart()
    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        from fedflat.federation.client import reply_to
        from fedflat.federation.events import log_to_stderr

        log_to_stderr(str(context.node_config.get("log", "text")))
        return reply_to(message, context.node_config, Path(folder))

    app.train()(answer)
    return app
