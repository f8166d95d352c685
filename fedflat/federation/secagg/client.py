"""The client's side of secure aggregation: an answer to each step, its secrets between them on its own disk.

A step is answered once, in order, in one session; at most one masked vector leaves a client in a round, so that a
server that starts a round again learns no second sum of it. The client counts for itself: it reveals shares only for
sums that hold the minimum cohort's honest vectors, and only after enough others signed that they were told the same.
A step that it cannot answer, or the server's word that the session is over, deletes the secrets at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from fedflat.core.checks import insist, reading, require, turning, wrong
from fedflat.core.discrete import SecureBits
from fedflat.core.rng import fresh_key, stream
from fedflat.federation import wire
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.protocol import Aborted, PublicKeys, Secrets, Shares
from fedflat.methods.ddgauss import DistributedDiscreteGaussian
from fedflat.privacy.plan import Plan

# federation.client.Client, whose module imports this one: naming the class here would close a circle of files.
Client = Any

_BEFORE = {
    dealing.SHARES: (dealing.KEYS,), dealing.CHECK: (dealing.SHARES,), dealing.ANSWER: (dealing.CHECK,),
    dealing.VECTOR: (dealing.CHECK, dealing.ANSWER), dealing.CONSENT: (dealing.VECTOR,),
    dealing.REVEAL: (dealing.CONSENT,),
}  # fmt: skip
"""What a client must have answered last, before each step but the first."""


_Reply = tuple[dict[str, bytes], np.ndarray | None]
"""What a step answers: facts, and the one vector."""


@dataclass(config=ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", hide_input_in_errors=True))
class Session:
    """What a client keeps on its disk from one step to the next.

    stage: the step it answered last. keys: everybody's, as it was told. shares: client -> what this one holds of its
    secrets. survivors: those whose sum it signed.
    """

    session: bytes
    round: int
    secrets: Secrets
    stage: str = ""
    threshold: int = 1 << 32  # until all keys are known: no number of clients is enough
    keys: dict[int, PublicKeys] = field(default_factory=dict)
    shares: dict[int, Shares] = field(default_factory=dict)
    survivors: set[int] = field(default_factory=set)

    @property
    def seen(self) -> bytes:
        """The hash of what this client was told."""
        return dealing.transcript(self.secrets.context, self.keys, self.shares, self.survivors)


def threshold_of(plan: Plan, clients: int) -> int:
    """Return how many clients must be there at every step: a majority of the honest ones, and the minimum cohort."""
    return max(dealing.enough_for_lies(clients, plan.colluders), (plan.min_cohort or 1) + plan.colluders)


def context_of(pin: str, round: int, session: bytes) -> bytes:
    """Return what signatures, secrets and masks are bound to: deployment (recipe, form, roster), round, session.

    SHA-256; without the pin, two deployments of one roster's keys could be mixed.
    """
    parts = pin.encode() + round.to_bytes(8, "big") + session  # only the pin's length is open
    return hashlib.sha256(b"fedflat secure aggregation: session" + parts).digest()


def signing_key(path: Path) -> EllipticCurvePrivateKey:
    """Return the client's authentication key, which signs its session keys."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    with reading("node config: key", str(path), "the client's auth.key"):
        key = load_ssh_private_key(path.read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise wrong("node config: key", str(path), "an elliptic-curve private key in OpenSSH form")
    return key


def answer_stage(client: Client, content: Any, round: int, nonce: bytes) -> Any:
    """Return the reply's content to one step; raises Malformed or Refused."""
    facts = content[wire.FACTS]
    try:
        stage, session = str(facts["stage"]), wire.sixteen(facts, "session")
        insist(stage in _STEPS or stage == dealing.END, wire.Malformed("form"))
        if client.job.parts.plan.trust != "distributed":
            raise wire.Refused("the recipe's trust model is not distributed")
        if stage == dealing.END:
            if client.store.session().get("session") != session.hex():
                client.store.end_session()
            return wire.write_answer(wire.Answer(round, nonce))
        state = _opened(client, stage, round, session)
        try:
            reply, vector = _STEPS[stage](client, content, state)
        except BaseException:  # the session is over for this client, and so are its secrets
            client.store.end_session()
            raise
    except Aborted as fault:
        raise wire.Refused(f"secure aggregation: {fault}") from fault
    # On disk before the answer leaves: each step is answered once.
    if stage == dealing.REVEAL:
        client.store.end_session()
    else:
        state.stage = stage
        client.store.keep_session(to_jsonable_python(state))
    return wire.write_answer(wire.Answer(round, nonce, vector, facts=reply))


def _opened(client: Client, stage: str, round: int, session: bytes) -> Session:
    """Return the session so far, if this step is its next; step 0 opens a new one and forgets any other."""
    left = wire.Refused(f"this client's vector of round {round} has left already")
    if stage == dealing.KEYS:
        insist(round not in client.store.answered(), left)
        client.store.end_session()
        return Session(session, round, Secrets.fresh(client.number, context_of(client.task.pin, round, session)))
    state, closed = client.store.session(), wire.Refused("a step of a session that is not open")
    insist(state.get("session") == session.hex() and state.get("round") == round, closed)
    insist(state.get("stage") in _BEFORE[stage], wire.Refused(f"step {stage} after step {state.get('stage')}"))
    # Killed after it noted that the vector leaves.
    insist(stage != dealing.VECTOR or round not in client.store.answered(), left)
    with turning((TypeError, ValueError), closed):  # a damaged file
        return Session(**state)


def _give_keys(client: Client, content: Any, state: Session) -> _Reply:
    require(client.key is not None, "node config", "no key", 'key="…/auth.key" under trust: distributed')
    keys = {client.number: state.secrets.public(signing_key(client.key))}
    return {"keys": dealing.write_keys(keys)}, None


def _give_shares(client: Client, content: Any, state: Session) -> _Reply:
    keys = dealing.read_keys(content[wire.FACTS].get("keys"))
    secagg.verify(keys, client.task.roster.loaded, state.secrets.context)
    if client.number not in keys or keys[client.number].halves != state.secrets.halves:
        raise Aborted("other keys of this client than it gave")
    state.keys, state.threshold = keys, threshold_of(client.job.parts.plan, len(keys))
    dealt, state.shares[client.number] = dealing.deal(state.secrets, keys, state.threshold)
    return {"commitments": dealt.commitments, "boxes": wire.write_map(dealt.boxes)}, None


def _complain(client: Client, content: Any, state: Session) -> _Reply:
    """Return signed complaints about those who dealt this client no true shares.

    A box that its dealer did not sign is the server's doing: no complaint, no further step.
    """
    secrets, keys = state.secrets, state.keys
    boxes = wire.read_map(content[wire.FACTS].get("boxes"), dealing.SIGNED_BOX_BYTES)
    commitments = wire.read_map(content[wire.FACTS].get("commitments"))
    insist(set(commitments) == set(boxes) <= set(keys) - {client.number}, Aborted("boxes that cannot be"))
    insist(len(boxes) + 1 >= state.threshold, Aborted("too few clients"))
    seen, complaints = dealing.keys_seen(secrets.context, keys), {}
    for sender, box in boxes.items():
        if not dealing.is_dealt(keys[sender], seen, sender, client.number, commitments[sender], box):
            raise Aborted("a box that its sender did not sign")
        try:
            points = dealing.points_of(keys[sender], commitments[sender], state.threshold)
            state.shares[sender] = dealing.open_box(secrets, sender, box, points)
        except Aborted:
            complaints[sender] = dealing.signed(secrets, dealing.COMPLAINT, seen, sender)
    return {"complaints": wire.write_map(complaints)}, None


def _answer_complaints(client: Client, content: Any, state: Session) -> _Reply:
    """Return the keys of those boxes that their receivers complain about, with their signatures; of no other."""
    secrets, keys = state.secrets, state.keys
    complaints = wire.read_map(content[wire.FACTS].get("complaints"), dealing.SIGNATURE_BYTES)
    seen = dealing.keys_seen(secrets.context, keys)
    for receiver, signature in complaints.items():
        insist(receiver in set(keys) - {client.number}, Aborted("a complaint that cannot be"))
        if not dealing.is_signed(receiver, keys[receiver], signature, dealing.COMPLAINT, seen, client.number):
            raise Aborted("a complaint without its client's signature")
    keys_of_boxes = {receiver: dealing.key_of_box(secrets, receiver) for receiver in complaints}
    return {"keys": wire.write_map(keys_of_boxes)}, None


def _give_vector(client: Client, content: Any, state: Session) -> _Reply:
    """Give the masked vector, for those that the server still counts: all their secrets can be put together."""
    # A server that names fewer clients than dealt shares would learn the sum of the few: each client counts for itself.
    shared = set(wire.read_map(content[wire.FACTS].get("shared"), 0))
    if not shared <= set(state.shares) or client.number not in shared or len(shared) < state.threshold:
        raise Aborted("too few clients, or others than dealt true shares")
    broadcast = wire.read_broadcast(content, client.job.parts.layout.dimension, client.job.parts.broadcast)
    client.check(broadcast)
    vector = _encoded(client, broadcast)
    # Noted before the vector leaves: a kill in between costs this round's answer, and never a second vector.
    client.store.note_participation(state.round)
    state.shares = {other: state.shares[other] for other in shared}
    return {}, secagg.masked(state.secrets, state.keys, shared, vector, _mechanism(client).bits)


def _mechanism(client: Client) -> DistributedDiscreteGaussian:
    mechanism: DistributedDiscreteGaussian = client.job.parts.mechanism.mechanism  # type: ignore[attr-defined]
    return mechanism


def _encoded(client: Client, broadcast: Any) -> np.ndarray:
    """Return the clipped update as whole numbers with the client's share of noise; its bits are never used again."""
    update, _ = client.update(broadcast)
    mechanism, key = _mechanism(client), fresh_key()
    signs = mechanism.signs(stream(client.job.seed, "rotation", broadcast.round))
    bits = (SecureBits(key, purpose) for purpose in ("rounding", "noise share"))
    return mechanism.encode(update.to(torch.float64), signs, *bits)


def _consent(client: Client, content: Any, state: Session) -> _Reply:
    state.survivors = set(wire.read_map(content[wire.FACTS].get("survivors"), 0))
    secagg.check_survivors(client.number, state.survivors, set(state.shares), state.threshold)
    return {"signature": dealing.signed(state.secrets, dealing.CONSENT, state.seen)}, None


def _reveal(client: Client, content: Any, state: Session) -> _Reply:
    """Give shares for the survivors that this client signed, and for no others; once."""
    signatures = wire.read_map(content[wire.FACTS].get("signatures"), dealing.SIGNATURE_BYTES)
    dealing.require_consent(signatures, state.keys, state.survivors, state.seen, state.threshold)
    seeds, masks = secagg.reveal(state.shares, state.survivors, set(state.shares))
    return {"seeds": dealing.write_numbers(seeds), "masks": dealing.write_numbers(masks)}, None


_STEPS: dict[str, Any] = {
    dealing.KEYS: _give_keys, dealing.SHARES: _give_shares, dealing.CHECK: _complain,
    dealing.ANSWER: _answer_complaints, dealing.VECTOR: _give_vector, dealing.CONSENT: _consent,
    dealing.REVEAL: _reveal,
}  # fmt: skip
