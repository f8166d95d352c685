"""The two Flower apps. A project that ``fedflat deploy`` made holds two lines for each; everything else is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedflat.federation.launch.flower import draw_apart


def server_app(folder: str | Path) -> Any:
    """A ``flwr.serverapp.ServerApp`` for the task (recipe.yaml, task.json, roster.json) in ``folder``."""
    from flwr.serverapp import ServerApp

    draw_apart()
    app = ServerApp()

    def main(grid: Any, context: Any) -> None:
        from fedflat.federation.events import log_to_stderr
        from fedflat.federation.server.session import Settings, serve
        from fedflat.federation.task import Task

        log_to_stderr(str(context.run_config.get("log", "text")))
        serve(grid, Task.read(Path(folder)), Settings.of(context.run_config))

    app.main()(main)
    return app


def client_app(folder: str | Path) -> Any:
    """A ``flwr.clientapp.ClientApp`` for the same task; the SuperNode's node config names client, data and state."""
    from flwr.clientapp import ClientApp

    draw_apart()
    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        from fedflat.federation.client.session import reply_to
        from fedflat.federation.events import log_to_stderr

        log_to_stderr(str(context.node_config.get("log", "text")))
        return reply_to(message, context.node_config, Path(folder))

    app.train()(answer)
    return app
