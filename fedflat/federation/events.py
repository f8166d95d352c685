"""Log lines of the two apps, as text or as JSON, and a server's metrics for Prometheus, which are made from the lines.

A fact gets into a JSON line, or into the metrics, only where the code names it in ``log_fields``: figures that were
released, or that say how the service does. A traceback is reduced to its type and place, for an exception's own words
may quote data.

``/metrics``, ``/ready`` and ``/live`` are served on this machine. What reveals who or how many took part in a round is
no event and has no metric: cohort sizes, replies, missing, failed or non-finite answers. For the same reason the
library's metrics of the process are left out: processor time and memory grow with every reply, and ε counts on nobody
knowing the cohort. Refused replies are those that no honest client causes, the same counts as in the log.
"""

import json
import logging
import math
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedflat.core import missing, one_of, plain, turning, wrong
from fedflat.federation.lock import address_of, is_loopback


def log_fields(event: str, **facts: Any) -> dict[str, Any]:
    """Return the ``extra`` of a log call: the event's name and its facts, all of which may be published."""
    return {"event": event, "facts": facts}


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, event, message and the event's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "event": getattr(record, "event", "message"),
            **plain(getattr(record, "facts", {})), "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            line["at"] = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames]
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False)


def log_to_stderr(form: str) -> None:
    """Write fedflat's own log lines, once, where Flower shows an app's output. form: text or json.

    Raises:
        InputError: another form.
    """
    one_of("log", form, ("text", "json"))
    logger = logging.getLogger("fedflat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # the metrics hear of more
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class Monitor(logging.Handler):
    """Turns the server's events into metrics. ready: clients enough are connected, and rounds are being run."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        super().__init__(logging.DEBUG)
        self.registry = CollectorRegistry()
        self.ready = False
        self._last = time.monotonic()

        def gauge(name: str, description: str) -> Any:
            return Gauge(f"fedflat_{name}", description, registry=self.registry)

        self._gauges = {
            "finished": gauge("rounds_finished", "Rounds finished, of the whole run."),
            "rounds": gauge("rounds_planned", "Rounds planned; a budget may end the run before."),
            "epsilon": gauge("epsilon", "Proven epsilon spent so far."),
            "budget": gauge("epsilon_budget", "Epsilon at which the run stops; +Inf without a budget."),
            "delta": gauge("delta", "Delta of the guarantee."),
            "connected": gauge("connected_clients", "Clients of the roster that were connected at the last ask."),
        }
        self._gauges["epsilon"].set(math.nan)
        self._gauges["budget"].set(math.inf)
        since = gauge("seconds_since_round", "Seconds since the last round ended, or since the start.")
        since.set_function(lambda: time.monotonic() - self._last)
        gauge("ready", "1 while rounds are being run.").set_function(lambda: float(self.ready))
        self._aborted = Counter("fedflat_aborted_rounds", "Rounds that released nothing.", registry=self.registry)
        description = "Replies that no honest client causes, by kind, since this server started."
        self._refused = Counter("fedflat_refused_replies", description, ["kind"], registry=self.registry)

    def emit(self, record: logging.LogRecord) -> None:
        """Take the facts of one event."""
        event, facts = getattr(record, "event", ""), getattr(record, "facts", {})
        for name in self._gauges.keys() & facts.keys():
            if facts[name] is not None:
                self._gauges[name].set(facts[name])
        if event == "round":
            self._last = time.monotonic()
            self._aborted.inc(bool(facts.get("aborted")))
        if event == "refused":
            for kind, count in facts["counts"].items():
                self._refused.labels(kind).inc(count)
        if event in ("ready", "complete"):
            self.ready = event == "ready"


@contextmanager
def serve_metrics(address: str, beyond: bool) -> Iterator[None]:
    """While the block runs, a page about the server at ``address`` (``HOST:PORT``); nothing for an empty one.

    beyond: whether an address that other machines reach is meant.

    An address that is taken is said, and the run goes on without its page.

    Raises:
        InputError: the address is none, or not on this machine and not meant to be elsewhere.
    """
    if not address:
        yield
        return
    host, port = address_of("metrics", address)
    if not (beyond or host == "localhost" or is_loopback(host)):
        raise wrong("metrics", address, "127.0.0.1:PORT; or metrics-beyond-this-machine = true, if that is meant")
    with turning(ImportError, missing("metrics", "prometheus-client", "federation")):
        monitor, logger = Monitor(), logging.getLogger("fedflat.server")
    try:
        server = ThreadingHTTPServer((host, port), page_of(monitor))
    except OSError as error:
        logger.warning("metrics: %s cannot be served (%s); the run goes on without", address, error.strerror)
        yield
        return
    server.daemon_threads = True
    before = logger.level
    logger.addHandler(monitor)
    logger.setLevel(logging.DEBUG)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        logger.removeHandler(monitor)
        logger.setLevel(before)
        server.shutdown()
        server.server_close()


def page_of(monitor: Monitor) -> type[BaseHTTPRequestHandler]:
    """Return what answers for ``/metrics``, ``/ready`` and ``/live``."""
    from prometheus_client import MetricsHandler

    class Page(MetricsHandler):  # type: ignore[misc]
        registry = monitor.registry
        timeout = 10.0  # a client that says nothing holds no thread for longer

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                return super().do_GET()
            ready = (200, "ready") if monitor.ready else (503, "waiting for clients, or ended")
            status, text = {"/ready": ready, "/live": (200, "alive")}.get(path, (404, "/metrics, /ready or /live"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text) + 1))
            self.end_headers()
            self.wfile.write(f"{text}\n".encode())

    return Page
