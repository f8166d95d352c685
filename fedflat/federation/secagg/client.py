"""The client's side of secure aggregation: an answer to each step, its secrets between them on its own disk.

A step is answered once, in order, in one session; at most one masked vector leaves a client in a round, so that a
server that starts a round again learns no second sum of it. The client counts for itself: it reveals shares only for
sums that hold the minimum cohort's honest vectors, and only after enough others signed that they were told the same.
A step that it cannot answer, or the server's word that the session is over, deletes the secrets at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

from fedflat.core.checks import InputError, wrong
from fedflat.core.discrete import SecureBits
from fedflat.core.rng import fresh_key, stream
from fedflat.federation.secagg import dealing, stages
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.protocol import PublicKeys, Secrets, Shares
from fedflat.federation.task import Task
from fedflat.federation.wire import FACTS, Malformed, Refused, nonce_of, number, read_request
from fedflat.methods.ddgauss import DistributedDiscreteGaussian
from fedflat.privacy.plan import Plan

# federation.client.Client, whose module imports this one: naming the class here would close a circle of files.
Client = Any

_SECRETS = ("seal", "mask", "seed", "sign")


def threshold_of(plan: Plan, clients: int) -> int:
    """Return how many clients must be there at every step: a majority of the honest ones, and the minimum cohort."""
    return max(dealing.enough_for_lies(clients, plan.colluders), (plan.min_cohort or 1) + plan.colluders)


def context_of(pin: str, round: int, session: bytes) -> bytes:
    """Return what signatures, secrets and masks are bound to: deployment (recipe, form, roster), round, session.

    SHA-256; without the pin, two deployments of one roster's keys could be mixed.
    """
    told = pin.encode() + round.to_bytes(8, "big") + session  # only the pin's length is open
    return hashlib.sha256(b"fedflat secure aggregation: session" + told).digest()


def known_keys(task: Task) -> dict[int, EllipticCurvePublicKey]:
    """Return the roster's keys, which sign."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    return {i: load_ssh_public_key(key.encode()) for i, key in enumerate(task.roster.keys)}  # type: ignore[misc]


def signing_key(path: Path) -> EllipticCurvePrivateKey:
    """Return the client's authentication key, which signs its session keys."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        found = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise InputError(f"node config: key: found {path} ({error}); allowed: the client's auth.key.") from error
    if not isinstance(found, EllipticCurvePrivateKey):
        raise wrong("node config: key", str(path), "an elliptic-curve private key in OpenSSH form")
    return found


def answer_stage(client: Client, content: Any) -> Any:
    """Return the reply's content to one step; raises Refused."""
    facts = content[FACTS]
    try:
        stage, round, nonce = facts.get("stage"), number(facts, "round"), nonce_of(facts)
        session = stages.session_of(facts)
        if stage not in _STEPS and stage != stages.END:
            raise Malformed("form")
        _check(client, facts, round)
        if stage == stages.END:
            if client.store.session().get("session") != session.hex():
                client.store.end_session()
            return stages.write_reply(round, nonce, {})
        state = _opened(client, str(stage), round, session)
        try:
            done, vector = _STEPS[str(stage)](client, content, state)
        except BaseException:  # the session is over for this client, and so are its secrets
            client.store.end_session()
            raise
    except Malformed as fault:
        raise Refused(f"the server's message is malformed: {fault.reason}") from fault
    except secagg.Aborted as fault:
        raise Refused(f"secure aggregation: {fault}") from fault
    return stages.write_reply(round, nonce, done, vector)


def _check(client: Client, facts: Any, round: int) -> None:
    if facts.get("client") != client.number or facts.get("pin") != client.task.pin:
        raise Refused("the server asks another client, or runs another recipe, task or roster")
    if round >= client.job.parts.plan.rounds:
        raise Refused(f"the server asks for round {round} of {client.job.parts.plan.rounds}")
    if client.job.parts.plan.trust != "distributed":
        raise Refused("the recipe's trust model is not distributed")


def _opened(client: Client, stage: str, round: int, session: bytes) -> dict[str, Any]:
    """Return the session so far, if this step is its next; step 0 opens a new one and forgets any other."""
    if stage == stages.KEYS:
        if client.store.took_part(round):
            raise Refused(f"this client's vector of round {round} has left already")
        client.store.end_session()
        return {"session": session.hex(), "round": round}
    state: dict[str, Any] = client.store.session()
    if state.get("session") != session.hex() or state.get("round") != round:
        raise Refused("a step of a session that is not open")
    if state.get("stage") not in stages.BEFORE[stage]:
        raise Refused(f"step {stage} after step {state.get('stage')}")
    if stage == stages.VECTOR and client.store.took_part(round):  # killed after it noted that the vector leaves
        raise Refused(f"this client's vector of round {round} has left already")
    return state


def _context(client: Client, state: Mapping[str, Any]) -> bytes:
    return context_of(client.task.pin, state["round"], bytes.fromhex(state["session"]))


def _own(client: Client, state: Mapping[str, Any]) -> Secrets:
    return Secrets(client.number, _context(client, state), *(bytes.fromhex(state[name]) for name in _SECRETS))


def _keys(state: Mapping[str, Any]) -> dict[int, PublicKeys]:
    return stages.read_keys(bytes.fromhex(state["keys"]))


def _give_keys(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    if client.key is None:
        raise wrong("node config", "no key", 'key="…/auth.key" under trust: distributed')
    own = Secrets.fresh(client.number, _context(client, state))
    public = own.public(signing_key(client.key))
    secret = {name: getattr(own, name).hex() for name in _SECRETS}
    client.store.keep_session({**state, "stage": stages.KEYS, **secret})
    return {"keys": stages.write_keys({client.number: public})}, None


def _give_shares(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    own, keys = _own(client, state), stages.read_keys(content[FACTS].get("keys"))
    secagg.verify(keys, known_keys(client.task), own.context)
    if client.number not in keys or keys[client.number].halves != own.halves:
        raise secagg.Aborted("other keys of this client than it gave")
    threshold = threshold_of(client.job.parts.plan, len(keys))
    dealt, kept = dealing.deal(own, keys, threshold)
    more = {"keys": stages.write_keys(keys).hex(), "threshold": threshold, "own": [str(kept.seed), str(kept.mask)]}
    client.store.keep_session({**state, "stage": stages.SHARES, **more})
    return {"commitments": dealt.commitments, "boxes": stages.write_map(dealt.boxes)}, None


def _complain(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    """Signed complaints about those who dealt this client no true shares.

    A box that its dealer did not sign is the server's doing: no complaint, no further step.
    """
    own, keys = _own(client, state), _keys(state)
    boxes = stages.read_map(content[FACTS].get("boxes"), stages.SIGNED_BOX_BYTES)
    commitments = stages.read_map(content[FACTS].get("commitments"))
    if set(commitments) != set(boxes) or not set(boxes) <= set(keys) - {client.number}:
        raise secagg.Aborted("boxes that cannot be")
    if len(boxes) + 1 < state["threshold"]:
        raise secagg.Aborted("too few clients")
    seen = dealing.keys_seen(own.context, keys)
    shares, complaints = {client.number: Shares(*(int(text) for text in state["own"]))}, {}
    for sender, box in boxes.items():
        told = commitments[sender]
        if not dealing.is_dealt(keys[sender], seen, sender, client.number, told, box):
            raise secagg.Aborted("a box that its sender did not sign")
        try:
            points = dealing.points_of(keys[sender], told, state["threshold"])
            shares[sender] = dealing.open_box(own, sender, box, points)
        except secagg.Aborted:
            complaints[sender] = dealing.complaint(own, seen, sender)
    held = {str(i): [str(found.seed), str(found.mask)] for i, found in shares.items()}
    client.store.keep_session({**state, "stage": stages.CHECK, "shares": held})
    return {"complaints": stages.write_map(complaints)}, None


def _answer_complaints(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    """Return the keys of those boxes that their receivers complain about, with their signatures; of no other."""
    own, keys = _own(client, state), _keys(state)
    complaints = stages.read_map(content[FACTS].get("complaints"), dealing.SIGNATURE_BYTES)
    seen = dealing.keys_seen(own.context, keys)
    for receiver, signature in complaints.items():
        if receiver not in keys or receiver == client.number:
            raise secagg.Aborted("a complaint that cannot be")
        if not dealing.is_complaint(keys[receiver], seen, receiver, client.number, signature):
            raise secagg.Aborted("a complaint without its client's signature")
    client.store.keep_session({**state, "stage": stages.ANSWER})
    return {"keys": stages.write_map({receiver: dealing.key_of_box(own, receiver) for receiver in complaints})}, None


def _give_vector(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], np.ndarray]:
    """Give the masked vector, for those that the server still counts: all their secrets can be put together."""
    own, keys = _own(client, state), _keys(state)
    # A server that names fewer clients than dealt shares would learn the sum of the few: each client counts for itself.
    shared = set(stages.read_map(content[FACTS].get("shared"), 0))
    if not shared <= _shared(state) or client.number not in shared or len(shared) < state["threshold"]:
        raise secagg.Aborted("too few clients, or others than dealt true shares")
    ask = read_request(content, client.job.parts.layout.dimension, client.job.parts.broadcast)
    client.check(ask)
    held = {str(i): state["shares"][str(i)] for i in shared}
    vector = _encoded(client, ask.broadcast)
    # Noted before the vector leaves: a kill in between costs this round's answer, and never a second vector.
    client.store.note_participation(state["round"])
    client.store.keep_session({**state, "stage": stages.VECTOR, "shares": held})
    return {}, secagg.masked(own, keys, shared, vector, _mechanism(client).bits)


def _mechanism(client: Client) -> DistributedDiscreteGaussian:
    found: DistributedDiscreteGaussian = client.job.parts.mechanism.mechanism  # type: ignore[attr-defined]
    return found


def _encoded(client: Client, broadcast: Any) -> np.ndarray:
    """Return the clipped update as whole numbers with the client's share of noise; its bits are never used again."""
    update, _ = client.update(broadcast)
    mechanism, key = _mechanism(client), fresh_key()
    signs = mechanism.signs(stream(client.job.seed, "rotation", broadcast.round))
    bits = (SecureBits(key, purpose) for purpose in ("rounding", "noise share"))
    return mechanism.encode(update.to(torch.float64), signs, *bits)


def _consent(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    survivors = set(stages.read_map(content[FACTS].get("survivors"), 0))
    secagg.check_survivors(client.number, survivors, _shared(state), state["threshold"])
    client.store.keep_session({**state, "stage": stages.CONSENT, "survivors": sorted(survivors)})
    signature = dealing.consent(_own(client, state), _seen(client, state, survivors))
    return {"signature": signature}, None


def _shared(state: Mapping[str, Any]) -> set[int]:
    return {int(i) for i in state["shares"]}


def _seen(client: Client, state: Mapping[str, Any], survivors: set[int]) -> bytes:
    """Return the hash of what this client was told in the session."""
    return dealing.transcript(_context(client, state), _keys(state), _shared(state), survivors)


def _reveal(client: Client, content: Any, state: dict[str, Any]) -> tuple[dict[str, bytes], None]:
    """Give shares for the survivors that this client signed, and for no others; once."""
    survivors = set(state["survivors"])
    signatures = stages.read_map(content[FACTS].get("signatures"), dealing.SIGNATURE_BYTES)
    seen = _seen(client, state, survivors)
    dealing.require_consent(signatures, _keys(state), survivors, seen, state["threshold"])
    shares = {int(i): Shares(*(int(text) for text in found)) for i, found in state["shares"].items()}
    seeds, masks = secagg.reveal(shares, survivors, set(shares))
    client.store.end_session()  # before the answer leaves: it is given once
    return {"seeds": stages.write_numbers(seeds), "masks": stages.write_numbers(masks)}, None


_STEPS: dict[str, Any] = {
    stages.KEYS: _give_keys,
    stages.SHARES: _give_shares,
    stages.CHECK: _complain,
    stages.ANSWER: _answer_complaints,
    stages.VECTOR: _give_vector,
    stages.CONSENT: _consent,
    stages.REVEAL: _reveal,
}
