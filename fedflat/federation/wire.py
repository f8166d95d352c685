"""What travels between server and clients: named arrays and a few public facts, in Flower's records, without pickle.

An array is its numbers' bytes and nothing else. Type, shape and length must be exactly the expected ones, so that what
claims another size, or asks for a pickle, is refused before anything is allocated. A step of secure aggregation is a
question and an answer like any other, with facts of its own (``secagg``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedflat.core import Broadcast, RunError, insist

PROTOCOL = 4
NONCE_BYTES = 16
ARRAYS, FACTS = "arrays", "facts"
RAW = "fedflat.raw"
"""How an array is written: the bytes of its numbers in C order, as its type (like ``<f4``) says."""
VECTOR = "vector."
"""Before the name of a vector that the method broadcasts."""


class Malformed(ValueError):
    """A message that is not what the protocol says; what it says itself is one of a few fixed words, never content."""


class Refused(RunError):
    """The client does not answer this ask."""


class Answered(Refused):
    """It has answered already: this round, or as often as its guarantee allows. The run may go on without it."""


@dataclass(frozen=True)
class Answer:
    """What a client sends back.

    update: float32 ``(d,)``; in secure aggregation int64, and None in the steps without a vector.
    examples: only for sample-weighted, non-private means, else 0. facts: everything else that was sent.
    """

    round: int
    nonce: bytes
    update: np.ndarray | None = None
    examples: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


def pack(array: np.ndarray) -> Any:
    """Return a Flower ``Array`` of a numpy array."""
    from flwr.app import Array

    return Array(array.dtype.str, array.shape, RAW, array.tobytes())


def unpack(array: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in a Flower ``Array``, if it is exactly of this type and shape; otherwise ``Malformed``."""
    wanted = np.dtype(dtype)
    insist(array.stype == RAW and array.dtype == wanted.str, Malformed("dtype"))
    insist(tuple(array.shape) == shape and len(array.data) == wanted.itemsize * math.prod(shape), Malformed("shape"))
    return np.frombuffer(array.data, wanted).reshape(shape).copy()


def records(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Any:
    """Return the content of a message."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    packed = ArrayRecord({name: pack(value) for name, value in arrays.items()})
    return RecordDict({ARRAYS: packed, FACTS: ConfigRecord({"protocol": PROTOCOL, **facts})})


def parts_of(content: Any) -> tuple[Any, Any]:
    """Return the arrays and the facts of a message's content, or ``Malformed``."""
    from flwr.app import ArrayRecord, ConfigRecord

    arrays, facts = content.get(ARRAYS), content.get(FACTS)
    if set(content) != {ARRAYS, FACTS} or not isinstance(arrays, ArrayRecord) or not isinstance(facts, ConfigRecord):
        raise Malformed("form")
    insist(facts.get("protocol") == PROTOCOL, Malformed("protocol"))
    return arrays, facts


def write_request(common: Any, client: int, nonce: bytes, pin: str, **facts: Any) -> Any:
    """Return the server's message to one client.

    common: what all of the cohort get, packed once for all of them. nonce: 16 random bytes, to be answered once. pin:
    the hash of recipe, task and roster.
    """
    from flwr.app import ConfigRecord, RecordDict

    question = {"client": client, "nonce": nonce, "pin": pin, **facts}
    return RecordDict({ARRAYS: common[ARRAYS], FACTS: ConfigRecord({**common[FACTS], **question})})


def write_broadcast(broadcast: Broadcast) -> Any:
    """Return everything in an ask that is the same for all clients of the round."""
    arrays = {"shared": broadcast.shared.detach().cpu().numpy()}
    arrays |= {VECTOR + name: vector.detach().cpu().numpy() for name, vector in broadcast.vectors.items()}
    if broadcast.mask is not None:
        arrays["mask"] = broadcast.mask.detach().cpu().numpy().astype(np.uint8)
    numbers = {"clip": float(broadcast.clip), "rate": float(broadcast.rate)}
    return records(arrays, {"round": broadcast.round, "draw": broadcast.draw, **numbers})


def read_broadcast(content: Any, dimension: int, vectors: Sequence[str] = ()) -> Broadcast:
    """Return a checked broadcast of a model with d = ``dimension`` shared parameters, or ``Malformed``.

    vectors: the names of the vectors ``(d,)`` that the method broadcasts; all of them must be there, and no other.
    """
    arrays, facts = parts_of(content)
    insist(set(arrays) - {"mask"} == {"shared", *(VECTOR + name for name in vectors)}, Malformed("form"))
    kinds = {"mask": "uint8"}
    unpacked = {name: unpack(value, kinds.get(name, "float32"), (dimension,)) for name, value in arrays.items()}
    mask = unpacked.get("mask")
    insist(all(np.isfinite(value).all() for value in unpacked.values()), Malformed("not finite"))
    return Broadcast(
        round=number(facts, "round"), shared=torch.from_numpy(unpacked["shared"]), clip=_positive(facts, "clip"),
        rate=_positive(facts, "rate"), vectors={name: torch.from_numpy(unpacked[VECTOR + name]) for name in vectors},
        mask=None if mask is None else torch.from_numpy(mask.astype(bool)), draw=number(facts, "draw"),
    )  # fmt: skip


def write_answer(answer: Answer) -> Any:
    """Return the content of a client's reply."""
    facts = {"round": answer.round, "nonce": answer.nonce, "examples": answer.examples, **answer.facts}
    return records({} if answer.update is None else {"update": answer.update}, facts)


def read_answer(content: Any, size: int | None, dtype: str = "float32") -> Answer:
    """Return a checked reply with a finite vector ``(size,)``, or with none if ``size`` is None; else ``Malformed``."""
    arrays, facts = parts_of(content)
    insist(set(arrays) == (set() if size is None else {"update"}), Malformed("form"))
    update = None if size is None else unpack(arrays["update"], dtype, (size,))
    answer = Answer(number(facts, "round"), sixteen(facts, "nonce"), update, number(facts, "examples"), facts)
    insist(update is None or bool(np.isfinite(update).all()), Malformed("not finite"))
    return answer


def write_map(values: Mapping[int, bytes]) -> bytes:
    """Return client numbers and values as one byte string: number (8), length (4), value."""
    pairs = sorted(values.items())
    return b"".join(client.to_bytes(8, "big") + len(value).to_bytes(4, "big") + value for client, value in pairs)


def read_map(data: Any, size: int | None = None) -> dict[int, bytes]:
    """Return the map in a byte string, or ``Malformed``. size: the length that every value must have."""
    insist(isinstance(data, bytes), Malformed("form"))
    values: dict[int, bytes] = {}
    place, last = 0, -1
    while place < len(data):
        client, length = (int.from_bytes(data[place + a : place + b], "big") for a, b in ((0, 8), (8, 12)))
        value = data[place + 12 : place + 12 + length]
        complete = place + 12 <= len(data) and len(value) == length
        insist(client > last and complete and size in (None, length), Malformed("form"))
        values[client], last, place = value, client, place + 12 + length
    return values


def number(facts: Any, name: str) -> int:
    """Return a whole number ≥ 0 among the facts, or ``Malformed``."""
    value: int = facts.get(name)
    insist(type(value) is int and value >= 0, Malformed("form"))  # True is none
    return value


def sixteen(facts: Any, name: str) -> bytes:
    """Return 16 bytes among the facts (a nonce, a session), or ``Malformed``."""
    value: bytes = facts.get(name)
    insist(isinstance(value, bytes) and len(value) == NONCE_BYTES, Malformed("form"))
    return value


def _positive(facts: Any, name: str) -> float:
    value: float = facts.get(name)
    insist(type(value) is float and value > 0, Malformed("form"))  # which is no NaN; a clip may be infinite
    return value
