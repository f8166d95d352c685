"""The client's side of secure aggregation: an answer to each step, its secrets between them on its own disk.

A step is answered once, in order, in one session; at most one masked vector leaves a client in a round, so that a
server that starts a round again learns no second sum of it. The client counts for itself: it reveals shares only for
sums that hold the minimum cohort's honest vectors, and only after enough others signed that they were told the same.
A step that it cannot answer, or the server's word that the session is over, deletes the secrets at once.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fedflat.core import fresh_key, insist, reading, require, wrong
from fedflat.federation import wire
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.protocol import Aborted, PublicKeys, Secrets, Shares
from fedflat.privacy.plan import Plan

# federation.client.Client, whose module imports this one: naming the class here would close a circle of files.
Client = Any

_SECRETS = ("seal", "mask", "seed", "sign")


@dataclass(frozen=True)
class _Reply:
    """What a step answers, and what the session keeps for the next one; None: it is over, and forgotten."""

    facts: Mapping[str, bytes]
    saved: Mapping[str, Any] | None
    vector: np.ndarray | None = None


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
    try:
        stage, session = str(content[wire.FACTS]["stage"]), wire.sixteen(content[wire.FACTS], "session")
        insist(stage in _STEPS or stage == dealing.END, wire.Malformed("form"))
        if stage == dealing.END:
            if client.store.session().get("session") != session.hex():
                client.store.end_session()
            return wire.write_answer(wire.Answer(round, nonce))
        state = _opened(client, stage, round, session)
        try:
            reply: _Reply = _STEPS[stage][0](client, content, state)
        except BaseException:  # the session is over for this client, and so are its secrets
            client.store.end_session()
            raise
    except Aborted as fault:
        raise wire.Refused(f"secure aggregation: {fault}") from fault
    # On disk before the answer leaves: each step is answered once.
    if reply.saved is None:
        client.store.end_session()
    else:
        client.store.keep_session({**state, "stage": stage, **reply.saved})
    return wire.write_answer(wire.Answer(round, nonce, reply.vector, facts=reply.facts))


def _opened(client: Client, stage: str, round: int, session: bytes) -> dict[str, Any]:
    """Return the session so far, if this step is its next; step 0 opens a new one and forgets any other."""
    left = wire.Refused(f"this client's vector of round {round} has left already")
    if stage == dealing.KEYS:
        insist(round not in client.store.answered(), left)
        client.store.end_session()
        return {"session": session.hex(), "round": round}
    state: dict[str, Any] = client.store.session()
    if state.get("session") != session.hex() or state.get("round") != round:
        raise wire.Refused("a step of a session that is not open")
    insist(state.get("stage") in _STEPS[stage][1], wire.Refused(f"step {stage} after step {state.get('stage')}"))
    # Killed after it noted that the vector leaves.
    insist(stage != dealing.VECTOR or round not in client.store.answered(), left)
    return state


def _context(client: Client, state: Mapping[str, Any]) -> bytes:
    return context_of(client.task.pin, state["round"], bytes.fromhex(state["session"]))


def _secrets(client: Client, state: Mapping[str, Any]) -> Secrets:
    return Secrets(client.number, _context(client, state), *(bytes.fromhex(state[name]) for name in _SECRETS))


def _keys(state: Mapping[str, Any]) -> dict[int, PublicKeys]:
    return dealing.read_keys(bytes.fromhex(state["keys"]))


def _shares(state: Mapping[str, Any]) -> dict[int, Shares]:
    return {int(i): Shares(*map(int, pair)) for i, pair in state["shares"].items()}


def _written(shares: Mapping[int, Shares]) -> dict[str, list[str]]:
    """Return shares as values for JSON, whose numbers are not read as large as these everywhere."""
    return {str(i): [str(share.seed), str(share.mask)] for i, share in shares.items()}


def _give_keys(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    require(client.key is not None, "node config", "no key", 'key="…/auth.key" under trust: distributed')
    secrets = Secrets.fresh(client.number, _context(client, state))
    keys = dealing.write_keys({client.number: secrets.public(signing_key(client.key))})
    return _Reply({"keys": keys}, {name: getattr(secrets, name).hex() for name in _SECRETS})


def _give_shares(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    secrets, keys = _secrets(client, state), dealing.read_keys(content[wire.FACTS].get("keys"))
    secagg.verify(keys, client.task.roster.loaded, secrets.context)
    if client.number not in keys or keys[client.number].halves != secrets.halves:
        raise Aborted("other keys of this client than it gave")
    threshold = threshold_of(client.job.parts.plan, len(keys))
    dealt, shares = dealing.deal(secrets, keys, threshold)
    more = {"keys": dealing.write_keys(keys).hex(), "threshold": threshold, "shares": _written({client.number: shares})}
    return _Reply({"commitments": dealt.commitments, "boxes": wire.write_map(dealt.boxes)}, more)


def _complain(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    """Return signed complaints about those who dealt this client no true shares.

    A box that its dealer did not sign is the server's doing: no complaint, no further step.
    """
    secrets, keys = _secrets(client, state), _keys(state)
    boxes = wire.read_map(content[wire.FACTS].get("boxes"), dealing.SIGNED_BOX_BYTES)
    commitments = wire.read_map(content[wire.FACTS].get("commitments"))
    insist(set(commitments) == set(boxes) <= set(keys) - {client.number}, Aborted("boxes that cannot be"))
    insist(len(boxes) + 1 >= state["threshold"], Aborted("too few clients"))
    seen = dealing.keys_seen(secrets.context, keys)
    shares, complaints = _shares(state), {}
    for sender, box in boxes.items():
        if not dealing.is_dealt(keys[sender], seen, sender, client.number, commitments[sender], box):
            raise Aborted("a box that its sender did not sign")
        try:
            points = dealing.points_of(keys[sender], commitments[sender], state["threshold"])
            shares[sender] = dealing.open_box(secrets, sender, box, points)
        except Aborted:
            complaints[sender] = dealing.signed(secrets, dealing.COMPLAINT, seen, sender)
    return _Reply({"complaints": wire.write_map(complaints)}, {"shares": _written(shares)})


def _answer_complaints(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    """Return the keys of those boxes that their receivers complain about, with their signatures; of no other."""
    secrets, keys = _secrets(client, state), _keys(state)
    complaints = wire.read_map(content[wire.FACTS].get("complaints"), dealing.SIGNATURE_BYTES)
    seen = dealing.keys_seen(secrets.context, keys)
    for receiver, signature in complaints.items():
        insist(receiver in set(keys) - {client.number}, Aborted("a complaint that cannot be"))
        if not dealing.is_signed(receiver, keys[receiver], signature, dealing.COMPLAINT, seen, client.number):
            raise Aborted("a complaint without its client's signature")
    keys_of_boxes = {receiver: dealing.key_of_box(secrets, receiver) for receiver in complaints}
    return _Reply({"keys": wire.write_map(keys_of_boxes)}, {})


def _give_vector(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    """Give the masked vector, for those that the server still counts: all their secrets can be put together."""
    # A server that names fewer clients than dealt shares would learn the sum of the few: each client counts for itself.
    shared = set(wire.read_map(content[wire.FACTS].get("shared"), 0))
    if not shared <= set(_shares(state)) or client.number not in shared or len(shared) < state["threshold"]:
        raise Aborted("too few clients, or others than dealt true shares")
    vector = _encoded(client, client.read_broadcast(content))
    bits = client.job.parts.mechanism.mechanism.bits
    # Noted before the vector leaves: a kill in between costs this round's answer, and never a second vector.
    client.store.note_participation(state["round"])
    masked = secagg.masked(_secrets(client, state), _keys(state), shared, vector, bits)
    return _Reply({}, {"shares": {str(i): state["shares"][str(i)] for i in shared}}, masked)


def _encoded(client: Client, broadcast: Any) -> np.ndarray:
    """Return the clipped update as whole numbers with the client's share of noise; its bits are never used again."""
    update, _ = client.update(broadcast)
    vector: np.ndarray = client.job.parts.mechanism.message(update, broadcast, fresh_key())
    return vector


def _consent(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    survivors = set(wire.read_map(content[wire.FACTS].get("survivors"), 0))
    secagg.check_survivors(client.number, survivors, set(_shares(state)), state["threshold"])
    signature = dealing.signed(_secrets(client, state), dealing.CONSENT, _seen(client, state, survivors))
    return _Reply({"signature": signature}, {"survivors": sorted(survivors)})


def _seen(client: Client, state: Mapping[str, Any], survivors: set[int]) -> bytes:
    """Return the hash of what this client was told in the session."""
    return dealing.transcript(_context(client, state), _keys(state), set(_shares(state)), survivors)


def _reveal(client: Client, content: Any, state: dict[str, Any]) -> _Reply:
    """Give shares for the survivors that this client signed, and for no others; once."""
    survivors = set(state["survivors"])
    signatures = wire.read_map(content[wire.FACTS].get("signatures"), dealing.SIGNATURE_BYTES)
    dealing.require_consent(signatures, _keys(state), survivors, _seen(client, state, survivors), state["threshold"])
    seeds, masks = secagg.reveal(_shares(state), survivors, set(_shares(state)))
    return _Reply({"seeds": dealing.write_numbers(seeds), "masks": dealing.write_numbers(masks)}, None)


_STEPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    dealing.KEYS: (_give_keys, ()),
    dealing.SHARES: (_give_shares, (dealing.KEYS,)),
    dealing.CHECK: (_complain, (dealing.SHARES,)),
    dealing.ANSWER: (_answer_complaints, (dealing.CHECK,)),
    dealing.VECTOR: (_give_vector, (dealing.CHECK, dealing.ANSWER)),
    dealing.CONSENT: (_consent, (dealing.VECTOR,)),
    dealing.REVEAL: (_reveal, (dealing.CONSENT,)),
}
"""Each step's answer, and what a client must have answered last, before each but the first."""
