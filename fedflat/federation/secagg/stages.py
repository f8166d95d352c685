"""What travels in the steps of secure aggregation: public facts, and maps from client numbers to bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedflat.core.types import Broadcast
from fedflat.federation import wire
from fedflat.federation.replies import PendingReply
from fedflat.federation.secagg.dealing import BOX_BYTES, SIGNATURE_BYTES
from fedflat.federation.secagg.protocol import PublicKeys
from fedflat.federation.secagg.sharing import POINT_BYTES, SHARE_BYTES
from fedflat.federation.wire import FACTS, Malformed, nonce_of, number

KEYS, SHARES, CHECK, ANSWER = "keys", "shares", "check", "answer"
VECTOR, CONSENT, REVEAL, END = "vector", "consent", "reveal", "end"
BEFORE = {SHARES: (KEYS,), CHECK: (SHARES,), ANSWER: (CHECK,), VECTOR: (CHECK, ANSWER), CONSENT: (VECTOR,),
          REVEAL: (CONSENT,)}  # fmt: skip
"""What a client must have answered last. ANSWER is asked of accused dealers only; END, at any time, makes it forget
every session but the one that is named."""
SESSION_BYTES = 16
KEY_BYTES = 64 + POINT_BYTES
SIGNED_BOX_BYTES = BOX_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class StageAnswer:
    """A client's answer to a step: its round and nonce as everywhere, its facts, and for ``vector`` the masked
    vector.
    """

    round: int
    nonce: bytes
    facts: Mapping[str, Any]
    vector: np.ndarray | None = None


def write_map(values: Mapping[int, bytes]) -> bytes:
    """Return client numbers and values as one byte string: number (8), length (4), value."""
    parts = []
    for client, value in sorted(values.items()):
        parts += [client.to_bytes(8, "big"), len(value).to_bytes(4, "big"), value]
    return b"".join(parts)


def read_map(data: Any, size: int | None = None) -> dict[int, bytes]:
    """Return the map in a byte string, or ``Malformed``; ``size``: the length that every value must have."""
    if not isinstance(data, bytes):
        raise Malformed("form")
    found: dict[int, bytes] = {}
    place, last = 0, -1
    while place < len(data):
        client, length = (int.from_bytes(data[place + a : place + b], "big") for a, b in ((0, 8), (8, 12)))
        value = data[place + 12 : place + 12 + length]
        if client <= last or len(value) != length or (size is not None and length != size):
            raise Malformed("form")
        found[client], last, place = value, client, place + 12 + length
    return found


def write_keys(keys: Mapping[int, PublicKeys]) -> bytes:
    """Return the clients' public keys as bytes for a message."""
    return write_map({client: key.halves + key.signature for client, key in keys.items()})


def read_keys(data: Any) -> dict[int, PublicKeys]:
    """Return public keys of clients, or ``Malformed``."""
    found = read_map(data)
    if any(len(value) <= KEY_BYTES for value in found.values()):
        raise Malformed("form")
    return {i: PublicKeys.of(value[:KEY_BYTES], value[KEY_BYTES:]) for i, value in found.items()}


def write_numbers(values: Mapping[int, int]) -> bytes:
    """Return shares of clients' secrets as bytes for a message."""
    return write_map({client: value.to_bytes(SHARE_BYTES, "big") for client, value in values.items()})


def read_numbers(data: Any) -> dict[int, int]:
    """Return shares of clients' secrets, or ``Malformed``."""
    return {client: int.from_bytes(value, "big") for client, value in read_map(data, SHARE_BYTES).items()}


def write_question(
    stage: str,
    pending: PendingReply,
    round: int,
    session: bytes,
    pin: str,
    facts: Mapping[str, bytes],
    broadcast: Broadcast | None = None,
) -> Any:
    """Return the server's message of a step; step ``vector`` carries the broadcast."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    common = {"protocol": wire.PROTOCOL, "round": round} if broadcast is None else None
    arrays = ArrayRecord({})
    if broadcast is not None:
        packed = wire.write_broadcast(broadcast)
        common, arrays = dict(packed[FACTS]), packed[wire.ARRAYS]
    own = {"stage": stage, "client": pending.client, "nonce": pending.nonce, "pin": pin, "session": session}
    return RecordDict({wire.ARRAYS: arrays, FACTS: ConfigRecord({**(common or {}), **own, **facts})})


def stage_of(content: Any) -> str | None:
    """Return the step a message is about; None for an ordinary ask."""
    facts = content.get(FACTS)
    stage = facts.get("stage") if facts is not None else None
    return stage if isinstance(stage, str) else None


def session_of(facts: Any) -> bytes:
    """Return the session among the facts, or ``Malformed``."""
    value = facts.get("session")
    if not isinstance(value, bytes) or len(value) != SESSION_BYTES:
        raise Malformed("form")
    return value


def write_reply(round: int, nonce: bytes, facts: Mapping[str, bytes], vector: np.ndarray | None = None) -> Any:
    """Return a client's message of a step."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    arrays = ArrayRecord({} if vector is None else {"update": wire.pack(vector)})
    common = {"protocol": wire.PROTOCOL, "round": round, "nonce": nonce}
    return RecordDict({wire.ARRAYS: arrays, FACTS: ConfigRecord({**common, **facts})})


def read_reply(content: Any, size: int | None = None) -> StageAnswer:
    """Return a checked reply to a step, or ``Malformed``. size: d' of the masked vector, None where there is none."""
    arrays, facts = wire.parts_of(content)
    if set(arrays) != (set() if size is None else {"update"}):
        raise Malformed("form")
    vector = None if size is None else wire.unpack(arrays["update"], "int64", (size,))
    return StageAnswer(number(facts, "round"), nonce_of(facts), facts, vector)
