"""What travels between server and clients: named arrays and a few public numbers, in Flower's records, without pickle.

An array's bytes must be exactly a ``.npy`` of the expected type and shape: the header is compared, not interpreted, so
a header that claims another size, or asks for a pickle, is refused before anything is allocated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fedflat.core.checks import RunError
from fedflat.core.types import Broadcast

PROTOCOL = 3
NONCE_BYTES = 16
ARRAYS, FACTS = "arrays", "facts"
NPY = "numpy.ndarray"
VECTOR = "vector."
"""Before the name of a vector that the method broadcasts."""


class Malformed(ValueError):
    """A message that is not what the protocol says; ``reason`` is one of a few fixed words, never its content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Refused(RunError):
    """The client does not answer this ask."""


@dataclass(frozen=True)
class Request:
    """What the server sends one client. nonce: 16 random bytes, to be answered once. pin: hash of recipe and task."""

    client: int
    nonce: bytes
    pin: str
    broadcast: Broadcast


@dataclass(frozen=True)
class Answer:
    """What a client sends back: float32 ``(d,)``. examples: only for sample-weighted, non-private means, else 0."""

    round: int
    nonce: bytes
    update: np.ndarray
    examples: int = 0


@lru_cache(maxsize=32)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes before the data in a ``.npy`` of this type and shape."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def pack(array: np.ndarray) -> Any:
    """Return a Flower ``Array`` of a numpy array."""
    from flwr.app import Array

    held = np.ascontiguousarray(array)
    return Array(str(held.dtype), tuple(held.shape), NPY, npy_header(str(held.dtype), held.shape) + held.tobytes())


def unpack(array: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in a Flower ``Array``, if it is exactly of this type and shape; otherwise ``Malformed``."""
    header = npy_header(dtype, shape)
    if array.stype != NPY or array.dtype != dtype:
        raise Malformed("dtype")
    if tuple(array.shape) != shape or len(array.data) != len(header) + np.dtype(dtype).itemsize * math.prod(shape):
        raise Malformed("shape")
    if bytes(array.data[: len(header)]) != header:
        raise Malformed("dtype")
    return np.frombuffer(array.data, dtype=dtype, offset=len(header)).reshape(shape).copy()


def _records(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> Any:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    packed = ArrayRecord({name: pack(value) for name, value in arrays.items()})
    return RecordDict({ARRAYS: packed, FACTS: ConfigRecord({"protocol": PROTOCOL, **facts})})


def parts_of(content: Any) -> tuple[Any, Any]:
    """Return the arrays and the facts of a message's content, or ``Malformed``."""
    from flwr.app import ArrayRecord, ConfigRecord

    arrays, facts = content.get(ARRAYS), content.get(FACTS)
    if set(content) != {ARRAYS, FACTS} or not isinstance(arrays, ArrayRecord) or not isinstance(facts, ConfigRecord):
        raise Malformed("form")
    if facts.get("protocol") != PROTOCOL:
        raise Malformed("protocol")
    return arrays, facts


def write_request(ask: Request, shared: Any = None) -> Any:
    """Return a server's message. shared: ``write_broadcast``'s result, packed once for the whole cohort."""
    from flwr.app import ConfigRecord, RecordDict

    common = write_broadcast(ask.broadcast) if shared is None else shared
    facts = {**common[FACTS], "client": ask.client, "nonce": ask.nonce, "pin": ask.pin}
    return RecordDict({ARRAYS: common[ARRAYS], FACTS: ConfigRecord(facts)})


def write_broadcast(broadcast: Broadcast) -> Any:
    """Return everything in an ask that is the same for all clients of the round."""
    arrays = {"shared": broadcast.shared.detach().cpu().numpy()}
    arrays |= {VECTOR + name: vector.detach().cpu().numpy() for name, vector in broadcast.vectors.items()}
    if broadcast.mask is not None:
        arrays["mask"] = broadcast.mask.detach().cpu().numpy().astype(np.uint8)
    numbers = {"clip": float(broadcast.clip).hex(), "rate": float(broadcast.rate).hex()}
    return _records(arrays, {"round": broadcast.round, "draw": broadcast.draw, **numbers})


def read_request(content: Any, dimension: int, vectors: Sequence[str] = ()) -> Request:
    """Return a checked ask for a model with d = ``dimension`` shared parameters, or ``Malformed``.

    vectors: the names of the vectors ``(d,)`` that the method broadcasts; all of them must be there, and no other.
    """
    arrays, facts = parts_of(content)
    if set(arrays) - {"mask"} != {"shared", *(VECTOR + name for name in vectors)}:
        raise Malformed("form")
    found = {
        name: unpack(value, "uint8" if name == "mask" else "float32", (dimension,)) for name, value in arrays.items()
    }
    mask = found.get("mask")
    broadcast = Broadcast(
        round=number(facts, "round"),
        shared=torch.from_numpy(found["shared"]),
        clip=_hex(facts, "clip"),
        rate=_hex(facts, "rate"),
        vectors={name: torch.from_numpy(found[VECTOR + name]) for name in vectors},
        mask=None if mask is None else torch.from_numpy(mask.astype(bool)),
        draw=number(facts, "draw"),
    )
    if not all(np.isfinite(value).all() for value in found.values()):
        raise Malformed("not finite")
    pin = facts.get("pin")
    if not isinstance(pin, str):
        raise Malformed("form")
    return Request(number(facts, "client"), nonce_of(facts), pin, broadcast)


def write_answer(answer: Answer) -> Any:
    """Return the content of a client's reply."""
    facts = {"round": answer.round, "nonce": answer.nonce, "examples": answer.examples}
    return _records({"update": answer.update}, facts)


def read_answer(content: Any, dimension: int) -> Answer:
    """Return a checked reply: type, shape and finite values, or ``Malformed``."""
    arrays, facts = parts_of(content)
    if set(arrays) != {"update"}:
        raise Malformed("form")
    update = unpack(arrays["update"], "float32", (dimension,))
    answer = Answer(number(facts, "round"), nonce_of(facts), update, number(facts, "examples"))
    if not np.isfinite(update).all():
        raise Malformed("not finite")
    return answer


def number(facts: Any, name: str) -> int:
    """Return a whole number ≥ 0 among the facts, or ``Malformed``."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Malformed("form")
    return value


def nonce_of(facts: Any) -> bytes:
    """Return the nonce among the facts, or ``Malformed``."""
    value = facts.get("nonce")
    if not isinstance(value, bytes) or len(value) != NONCE_BYTES:
        raise Malformed("form")
    return value


def _hex(facts: Any, name: str) -> float:
    try:
        value = float.fromhex(facts.get(name))
    except (TypeError, ValueError, OverflowError):
        raise Malformed("form") from None
    if math.isnan(value) or value <= 0:
        raise Malformed("form")
    return value
