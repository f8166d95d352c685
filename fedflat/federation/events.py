"""Log lines of the two apps, as text or as JSON: what happened, in which round, and the facts that may be told.

A fact gets into a JSON line, or into the metrics (``fedflat.federation.server.monitor``), only where the code names it
in ``told``: figures that were released, or that say how the service does. A traceback is reduced to its type and place,
for an exception's own words may quote data.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

from fedflat.core.checks import one_of
from fedflat.records.folder import plain

FORMATS = ("text", "json")


def told(event: str, **facts: Any) -> dict[str, Any]:
    """The ``extra`` of a log call: the event's name and its facts, all of which may be published."""
    return {"event": event, "facts": facts}


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, event, message and the event's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "message"),
            **plain(getattr(record, "facts", {})),
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            line["at"] = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames]
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False)


def log_to_stderr(form: str) -> None:
    """fedflat's own log lines, once, where Flower shows an app's output. form: one of ``FORMATS``.

    Raises:
        InputError: another form.
    """
    one_of("log", form, FORMATS)
    logger = logging.getLogger("fedflat")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # the metrics hear of more
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
