"""The SuperLink's doors: who is heard, for how long, and how much they may say.

Flower reads a request's whole body before it asks whose it is, and keeps a connection that says nothing for as long as
it likes. So each address has a door before Flower: a stranger's connection is closed when it has not shown a credential
in time, or when there are too many; and no byte of a body is read without one.
"""

import base64
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from fedflat.federation.bounds import FACTS, Limit

log = logging.getLogger("fedflat.doors")

FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
STRANGERS, EACH, SECONDS = 128, 32, 15.0
"""Connections without a credential so far (each takes 256 KiB for TLS), connections of one key, and seconds until a
credential must be shown."""
ROOM = 1 << 20
"""Bytes beyond one reply that a key's requests may hold at a time: their frames, and what else it asks meanwhile."""
PIECE = 1 << 16
"""Bytes of an answer that are handed to a connection at a time."""
SILENCE = 60.0
"""Seconds between two log lines on one limit: whoever floods a door does not fill the disk."""
ALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Options of an accepted connection: one whose other end has vanished is closed after half a minute."""
Door = Callable[[Any, Any, Any], Awaitable[None]]


class Guest(socket.socket):
    """An accepted connection. gone: called when it is closed. key: whose it is, once that was shown."""

    gone: Callable[[], object] | None = None
    key: Any = None
    since = 0.0

    def close(self) -> None:
        """Close the connection; tell the gate once."""
        if self.gone is not None:
            self.gone()
            self.gone = None
        super().close()


class Gate(socket.socket):
    """A listening socket that keeps few strangers, and each for a short time.

    A connection is a stranger's until ``welcome`` is told whose it is. One too many takes the place of the oldest of
    the host that has most.
    """

    def __init__(self, name: str, host: str, port: int, strangers: int = STRANGERS, seconds: float = SECONDS) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.name, self.most, self.seconds = name, strangers, seconds
        self._open: dict[Any, Guest] = {}
        self._logged: dict[str, float] = {}
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and make room for it."""
        connection, address = super().accept()
        # asyncio keeps this object and closes it: a subclass is the one way to hear of that.
        guest = Guest(self.family, self.type, self.proto, fileno=connection.detach())
        for option in ALIVE.keys() & vars(socket).keys():  # not every system has them all
            level = socket.SOL_SOCKET if option.startswith("SO_") else socket.IPPROTO_TCP
            guest.setsockopt(level, getattr(socket, option), ALIVE[option])
        place = address[:2]
        guest.gone, guest.since = partial(self._forget, place, guest), time.monotonic()
        strangers = [place for place, other in self._open.items() if other.key is None]
        if len(strangers) >= self.most:
            self.say("connections", f"{self.most} connections have shown no credential; the oldest are closed")
            # Of the host that has most: one flooding machine closes its own connections, not a new client's.
            hosts = Counter(host for host, _ in strangers)
            self._close(max(strangers, key=lambda place: hosts[place[0]]))
        self._open[place] = guest
        return guest, address

    def _forget(self, place: Any, guest: Guest) -> None:
        # Whoever resets a connection may come again from the same port before the first one is closed here.
        if self._open.get(place) is guest:
            del self._open[place]

    def welcome(self, place: Any, key: Any) -> None:
        """Take the connection from ``place`` (host, port) for one of ``key``, which it has shown."""
        guest = self._open.get(tuple(place))
        if guest is None or guest.key is not None:
            return
        keyed = [place for place, other in self._open.items() if other.key == key]
        if len(keyed) >= EACH:
            self.say("key", f"one key has {EACH} connections; its oldest are closed")
            self._close(keyed[0])
        guest.key = key

    async def sweep(self) -> None:
        """Close strangers who have said nothing for too long; to be called every second."""
        late = time.monotonic() - self.seconds
        for place in [place for place, one in self._open.items() if one.key is None and one.since < late]:
            self.say("time", f"connections without a credential are closed after {self.seconds:g} seconds")
            self._close(place)

    def say(self, limit: str, message: str) -> None:
        """Log that a limit was met, once a minute."""
        now = time.monotonic()
        if now - self._logged.get(limit, -SILENCE) >= SILENCE:
            self._logged[limit] = now
            log.warning("%s: %s", self.name, message)

    def _close(self, place: Any) -> None:
        with suppress(OSError):
            self._open.pop(place).shutdown(socket.SHUT_RDWR)  # its owner, asyncio, sees an end and closes it


def fleet_only(
    app: Any, roster: Container[bytes], limit: Limit, gate: Gate, blame: Callable[[bytes], object] = bool
) -> Door:
    """Return the SuperLink's ASGI application as the network sees it: the SuperNodes' own interface and nothing else.

    Nothing is read of a request without the signature of a key of the ``roster`` (PEM), of one that is longer than a
    reply's ``limit`` allows, or of one key's beyond what a reply comes to. blame: is called with the key of a request
    that was too long by itself. Requests that are too long together may be one that was cut off and its repetition,
    which an honest client sends: they are put off, and nobody is blamed. An object that is asked for counts as the
    longest until it was read.
    """
    held: Counter[bytes] = Counter()

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return  # websockets, and the lifespan, which the operator's door starts once for both
        headers, path = Headers(scope=scope), scope["path"]
        if not path.startswith(FLEET):
            return await _refuse(404, scope, receive, send)
        if (key := _signed_by(headers, roster)) is None:
            return await _refuse(401, scope, receive, send)
        gate.welcome(scope["client"], key)
        most = limit.object + FACTS if path == FLEET + "push-object" else FACTS + 128 * limit.objects
        if (length := _length(headers)) is None:
            return await _refuse(411, scope, receive, send)
        if length > most:
            gate.say("length", "a client's request was longer than a reply can be, and was not read")
            blame(key)
            return await _refuse(413, scope, receive, send)
        length += limit.object if path.endswith(("/pull-object", "/get-fab")) else 0
        if held[key] + length > limit.total + ROOM:
            gate.say("sum", "a client's requests at one time were longer than a reply can be; one has to wait")
            # Flower's client sends it again; after a 429 it would give up.
            return await _refuse(503, scope, receive, send)
        held[key] += length
        try:
            await app(scope, receive, partial(_piecewise, send))
        finally:
            held[key] -= length

    return door


def this_machine_only(app: Any, allowed: Callable[[str, Mapping[str, str]], bool], gate: Gate) -> Door:
    """Return an ASGI application as accounts of this machine see it: no path to SuperNodes' interface, and of a request
    without a credential nothing is read. allowed: whether path and headers show one."""

    async def door(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if not scope["path"].startswith((CONTROL, RUNTIME)):
                return await _refuse(404, scope, receive, send)
            if not allowed(scope["path"], Headers(scope=scope)):
                return await _refuse(401, scope, receive, send)
            gate.welcome(scope["client"], "operator")
        if scope["type"] in ("http", "lifespan"):
            await app(scope, receive, send)

    return door


async def _piecewise(send: Any, message: Any) -> None:
    """Send a part of an answer as its reader takes it: uvicorn waits between two pieces, and keeps one."""
    body = message.get("body", b"")
    for start in range(0, len(body) - PIECE, PIECE):
        await send({**message, "body": body[start : start + PIECE], "more_body": True})
    await send({**message, "body": body[-(len(body) % PIECE or PIECE) :]} if body else message)


async def _refuse(status: int, *connection: Any) -> None:
    await Response(status_code=status, headers={"connection": "close"})(*connection)


def _length(headers: Headers) -> int | None:
    """Return the length that a request says its body has; None without one."""
    # Both headers together are how a request is smuggled past a proxy: that length is not believed.
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 16 and "transfer-encoding" not in headers else None


def _signed_by(headers: Headers, roster: Container[bytes]) -> bytes | None:
    """Return the roster's key that signed a request's time, if that is now. Flower checks whose node sent it."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        key, signature = (base64.b64decode(headers[name], validate=True) for name in names)
        time_said = headers[TIMESTAMP_HEADER]
        age = (datetime.now(UTC) - datetime.fromisoformat(time_said)).total_seconds()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        fits = recent and key in roster and verify_signature(bytes_to_public_key(key), time_said.encode(), signature)
    except (KeyError, ValueError, TypeError):  # TypeError: a time without a zone
        return None
    return key if fits else None
