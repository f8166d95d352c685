"""A server's metrics for Prometheus, and where the two apps' log lines go.

A fact gets into the metrics only where the code names it in ``note``: figures that were released, or that say how the
service does.

``/metrics``, ``/ready`` and ``/live`` are served on this machine. What reveals who or how many took part in a round is
no event and has no metric: cohort sizes, replies, missing, failed or non-finite answers. For the same reason the
library's metrics of the process are left out: processor time and memory grow with every reply, and ε counts on nobody
knowing the cohort. Refused replies are those that no honest client causes, the same counts as in the log.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedflat.core.checks import turning, wrong
from fedflat.core.imports import missing
from fedflat.federation.lock import address_of, is_loopback

log = logging.getLogger("fedflat.server")


def log_to_stderr() -> None:
    """Write fedflat's own log lines, once, where Flower shows an app's output."""
    logger = logging.getLogger("fedflat")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class Monitor:
    """Turns the server's events into metrics. ready: clients enough are connected, and rounds are being run."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

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

    def take(self, event: str, facts: dict[str, Any]) -> None:
        """Take the facts of one event."""
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


_monitors: list[Monitor] = []


def note(event: str, **facts: Any) -> None:
    """Tell the metrics of an event; all its facts may be published."""
    for monitor in _monitors:
        monitor.take(event, facts)


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
        monitor = Monitor()
    try:
        server = ThreadingHTTPServer((host, port), page_of(monitor))
    except OSError as error:
        log.warning("metrics: %s cannot be served (%s); the run goes on without", address, error.strerror)
        yield
        return
    server.daemon_threads = True
    _monitors.append(monitor)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        _monitors.remove(monitor)
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
