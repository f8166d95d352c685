"""Serve a page on 127.0.0.1 that follows runs while they go on (``fedflat watch``), and list a folder's runs.

It reads the records that runs write, so it follows a run, an experiment or a federation's folder alike, and nothing
that it shows is kept. Whoever has the address with its token sees what a recipient of the model may see; ``private``
adds what only the simulation knows. Without a script the page loads itself again every few seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedflat.core import InputError, RunError, gather, reading, require, turning
from fedflat.privacy.ledger import is_open
from fedflat.privacy.statement import is_whole
from fedflat.report import metrics, pages, wording
from fedflat.report.html import figures_of
from fedflat.report.metrics import Run, section
from fedflat.report.summary import cautions

if TYPE_CHECKING:
    from starlette.applications import Starlette

RECORDS = ("metrics.jsonl", "privacy.json", "status.json")
"""Files whose change is one of the page; the last is a SuperLink's, for its operator."""
PAUSE = 1.0
"""Seconds between two looks at the records."""
RECENT = 10
"""Rounds whose mean time is the pace."""
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class Live:
    """What is watched, and the token that its readers must know."""

    folder: Path
    private: bool = False
    operator: Path | None = None
    """Where a deployment's operator has files of his own, of which ``private`` shows the refused replies."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def runs(self) -> tuple[list[Run], list[InputError]]:
        """Return the runs as their records are now, none before the first has begun, and what is damaged."""
        runs, faults = read_each(self.folder)
        return runs if self.private else [replace(run, private=_paces(run), audits=[]) for run in runs], faults

    def stamp(self) -> str:
        """Return what changes whenever a record of the runs does."""
        try:
            files = [path.stat() for name in RECORDS for path in self.folder.rglob(name)]
        except OSError:
            return ""
        return f"{len(files)} {sum(stat.st_size for stat in files)} {max((f.st_mtime_ns for f in files), default=0)}"

    def body(self) -> Markup:
        """Return the part of the page that changes: a table of the runs, their charts and their warnings."""
        runs, faults = self.runs()
        warned = [f"{run.name}: {text}" for run in runs for text in cautions(run.privacy, run.metrics, run.private)]
        figures = [figure for figure in figures_of(runs) if self.private or not figure.private] if runs else []
        spent = "ε of the mechanism" if any(map(metrics.seeded, runs)) else "ε spent"
        heads = ["Run", "Method", "Rounds", "Accuracy %", "Loss", spent, "Time left"]
        table = pages.Table("Runs", heads, [_row(run) for run in runs], left=2)
        replies = status = None
        if self.private:
            # A damaged record is said, and takes nothing else from the page.
            with gather(faults):
                replies = self._replies(runs)
                status = self._status()
        return wording.filled(
            "live_body.html", table=table, warnings=warned + [str(fault) for fault in faults], replies=replies,
            status=status, cards=pages.cards(figures, pages.PRIVATE if self.private else ""),
        )  # fmt: skip

    def _replies(self, runs: list[Run]) -> pages.Table:
        """Return how many clients' replies each run of a deployment has not added, and why: not covered by ε."""
        rows, folder = [], self.operator or self.folder
        for run in runs:
            counts: Counter[str] = Counter()
            for line in metrics.read_records(folder / f"{section(run.recipe, 'versions').get('run')}.jsonl"):
                counts.update({str(why): int(number) for why, number in line.items() if why != "round"})
            rows += [[run.name, why, str(number)] for why, number in sorted(counts.items())]
        return pages.Table("Replies that were not added: the operator's own record", ["Run", "Why", "Replies"], rows, 2)

    def _status(self) -> pages.Table:
        """Return how the SuperLink of a deployment does, as it wrote last."""
        rows = [[*row] for line in metrics.read_records(self.folder / "server" / RECORDS[-1]) for row in line.items()]
        return pages.Table("The SuperLink: its operator's own record", ["What", "Now"], rows, 2)

    def page(self) -> str:
        """Return the whole page."""
        script = wording.asset("live.js")
        return wording.filled(
            "live.html", title=self.folder.resolve().name, body=self.body(), style=Markup(wording.asset("page.css")),
            script=Markup(script), script_hash=pages.digest(script),
        )  # fmt: skip


def _paces(run: Run) -> list[metrics.Record]:
    """Return what rounds took: whoever watches the page sees when each ends anyway."""
    return [{key: line[key] for key in ("round", "seconds") if key in line} for line in run.private]


def _row(run: Run) -> list[str]:
    planned, done = metrics.number(run.recipe.get("rounds")), metrics.finished_rounds(run)
    loss, spent = (metrics.last(run.metrics, key) for key in ("test_loss", "epsilon"))
    privacy = metrics.section(run.recipe, "privacy")
    budget = None if privacy.get("noise_cohort") else metrics.number(privacy.get("budget"))
    limit = "" if budget is None else f" of {metrics.epsilon_text(budget)}"
    # A claimed ε is never shown without the proven one.
    claims = privacy.get("protocol") == "published"
    return [
        run.name, run.algorithm, f"{done} of {planned:g}" if planned is not None else str(done),
        wording.percent(metrics.final_accuracy(run)), "–" if loss is None else wording.measured(loss),
        "–" if spent is None or claims else f"{metrics.epsilon_text(spent)}{limit}", _left(run, planned),
    ]  # fmt: skip


def _left(run: Run, planned: float | None) -> str:
    """Return the time for the rounds that are left at the pace of the last ones."""
    if run.privacy:
        return "ended"
    seconds = metrics.values([*run.metrics, *run.private], "seconds")[-RECENT:]
    with suppress(OSError):  # a deployment times no round, and the oldest checkpoint may just be deleted
        seconds = seconds or [
            b - a for a, b in pairwise(sorted(f.stat().st_mtime for f in run.path.glob("checkpoints/round-*")))
        ]
    if not seconds or planned is None:
        return "–"
    return wording.duration(fmean(seconds) * max(0.0, planned - len(run.metrics)))


def app_of(live: Live) -> Starlette:
    """Return the server: the page, its changing part, and a stream that says when that has changed."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def stream(request: Request) -> AsyncIterator[str]:
        before = ""
        while not await request.is_disconnected():
            now = await asyncio.to_thread(live.stamp)
            yield f"data: {now}\n\n" if now != before else ": nothing new\n\n"
            before = now
            await asyncio.sleep(PAUSE)

    async def answer(request: Request) -> Response:
        token = request.query_params.get("token", "")
        # The time that the comparison takes must not tell the token.
        if not hmac.compare_digest(token.encode(), live.token.encode()):
            return PlainTextResponse("403: the address has no token, or another one.\n", 403, HEADERS)
        if request.url.path == "/events":
            return StreamingResponse(stream(request), media_type="text/event-stream", headers=HEADERS)
        make = live.body if request.url.path == "/body" else live.page
        return HTMLResponse(await asyncio.to_thread(make), headers=HEADERS)

    return Starlette(routes=[Route(path, answer) for path in ("/", "/body", "/events")])


@contextmanager
def served(live: Live) -> Iterator[str]:
    """Serve the page of ``live`` on 127.0.0.1 by a thread inside the block; yield its address, with the token.

    Raises RunError where starlette and uvicorn are not installed.
    """
    with turning(ImportError, RunError("watch needs a small server: pip install 'fedflat[watch]'")):
        import uvicorn

        app = app_of(live)
    # A reader who connects before the thread serves has to wait.
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    settings = uvicorn.Config(
        app, log_level="critical", access_log=False, timeout_graceful_shutdown=1, limit_concurrency=64
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/?token={live.token}"
    finally:
        server.should_exit = True
        thread.join(timeout=5)


def read_each(folder: Path) -> tuple[list[Run], list[InputError]]:
    """Return the runs under ``folder``, and what is wrong with damaged ones."""
    runs, faults = list[Run](), list[InputError]()
    # A folder may go while it is searched: that of a candidate that lost.
    with gather(faults), reading(folder, "a folder that cannot be searched", "a folder with runs in it"):
        for path in metrics.run_folders(folder):
            with gather(faults), reading(path, "records that cannot be read", "those that the run wrote"):
                runs.append(metrics.read_run(path))
    return runs, faults


def listed(folder: Path) -> tuple[list[dict[str, Any]], list[InputError]]:
    """Return a record for each run under ``folder``, the newest first, and what is wrong with damaged ones.

    Raises InputError: no such folder, or no run in it.
    """
    runs, faults = read_each(folder)
    state = "without runs" if folder.is_dir() else "no such folder"
    require(bool(runs or faults), "runs", f"{folder}, {state}", "a folder with runs in it")
    return sorted(map(_record, runs), key=lambda record: float(record["age"])), faults


def _record(run: Run) -> dict[str, Any]:
    files = [file for name in ("metrics.jsonl", "recipe.yaml") if (file := run.path / name).is_file()]
    intact = "checksum" not in run.privacy or is_whole(run.path / "privacy.json")
    return {
        "run": str(run.path), "method": run.algorithm, "data": section(run.recipe, "data").get("dataset"),
        "accuracy": metrics.final_accuracy(run), "epsilon": metrics.proven_epsilon(run) if intact else None,
        "randomness": "seeded" if metrics.seeded(run) else "secret", "planned": run.recipe.get("rounds"),
        "rounds": metrics.finished_rounds(run), "state": state_of(run) if intact else "damaged",
        "age": max(0.0, time.time() - max(file.stat().st_mtime for file in files)),
    }  # fmt: skip


def state_of(run: Run) -> str:
    """Return ``done``, ``stopped`` (with a statement, before its last round), ``running`` or ``killed``."""
    # The statement is written at the end of a run, so without one the lock decides.
    if run.privacy:
        return "done" if metrics.finished_rounds(run) == run.recipe.get("rounds") else "stopped"
    return "running" if is_open(run.path / "ledger.jsonl") else "killed"
