"""``trust: distributed`` end to end on the stand-in grid: ddgauss sums under secure aggregation, dropouts, refusals."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_in import client_at, deployed, final_shared, grid_of, honest, rows, settings, small

from fedflat.core.types import Broadcast
from fedflat.federation import wire
from fedflat.federation.client import Client, Refused
from fedflat.federation.replies import PendingReply
from fedflat.federation.secagg import client as secure_client
from fedflat.federation.secagg import dealing
from fedflat.federation.secagg import protocol as secagg
from fedflat.federation.secagg.client import threshold_of
from fedflat.federation.server import serve
from fedflat.federation.task import Task
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import keys
from fedflat.simulation import run as simulation

STEPS = (dealing.KEYS, dealing.SHARES, dealing.CHECK, dealing.VECTOR, dealing.CONSENT, dealing.REVEAL)


def ddgauss(noise: float = 1.0, rounds: int = 1, minimum: int = 2, **changes: Any) -> Any:
    usual = {"cohort": {"min": minimum}, "privacy": {"noise_multiplier": noise}}
    return small(algorithm="ddgauss", rounds=rounds, **{**usual, **changes})


def silent_from(client: Client, stage: str) -> Callable[[Any], Any]:
    """A client that drops out before a step."""

    def handle(message: Any) -> Any:
        asked = message.content["facts"].get("stage")
        return None if (asked in STEPS and STEPS.index(asked) >= STEPS.index(stage)) else honest(client)(message)

    return handle


def run(folder: Path, recipe: Any, gone: dict[int, str] | None = None) -> tuple[Task, list[Client], Any]:
    task, clients = deployed(folder, recipe)
    grid = grid_of(task, clients)
    for number, stage in (gone or {}).items():
        grid.handlers[number] = silent_from(clients[number], stage)
    serve(grid, task, settings(folder))
    return task, clients, grid


def test_the_sum_is_that_of_the_simulation_up_to_its_noise(tmp_path: Path) -> None:
    """Little noise, a fine grid: the movement of w agrees with the simulation's to a few noise stds."""
    task, clients, _ = run(tmp_path / "fed", ddgauss(noise=0.05, local={"steps": 5, "lr": 0.5}))
    simulated = simulation.run(task.recipe, out=tmp_path / "sim")
    first = clients[0].job.initial_weights
    found, wanted = final_shared(tmp_path / "fed" / "run") - first, final_shared(tmp_path / "sim") - first
    mechanism = clients[0].job.parts.mechanism.mechanism
    n_max = clients[0].job.parts.mechanism.shares
    std = mechanism.granularity * math.sqrt(float(mechanism.share_variance) * n_max + 4 / 4) / 4
    assert float((found - wanted).std()) < 3 * std < float(wanted.norm())
    assert (
        simulated.privacy["epsilon"] == json.loads((tmp_path / "fed" / "run" / "privacy.json").read_text())["epsilon"]
    )
    lines = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("fed/run", "sim")]
    chain = ("previous", "checksum", "key_id", "run")
    plain = [[{k: v for k, v in line.items() if k not in chain} for line in found] for found in lines]
    assert plain[0] == plain[1]


def test_the_noise_in_a_sum_is_n_max_shares(tmp_path: Path) -> None:
    """Clients' own shares and the server's top-up together, measured; also with a client gone."""
    recipe = ddgauss(noise=2.0, local={"lr": 1e-7}, model={"name": "mlp", "hidden": 30})
    for name, gone in (("all", {}), ("three", {2: dealing.VECTOR})):
        _, clients, _ = run(tmp_path / name, recipe, gone)
        moved = final_shared(tmp_path / name / "run") - clients[0].job.initial_weights
        mechanism, n_max = clients[0].job.parts.mechanism.mechanism, clients[0].job.parts.mechanism.shares
        std = mechanism.granularity * math.sqrt(float(mechanism.share_variance) * n_max) / 4
        assert float(moved.std()) == pytest.approx(std, rel=0.08)


@pytest.mark.parametrize("stage", [dealing.VECTOR, dealing.REVEAL])
def test_a_client_that_drops_out_before_or_after_its_vector(stage: str, tmp_path: Path) -> None:
    _, clients, _ = run(tmp_path / "fed", ddgauss(noise=0.05, local={"steps": 5, "lr": 0.5}), {1: stage})
    assert rows(tmp_path / "fed" / "run" / "metrics.jsonl")[0]["aborted"] is False
    first = clients[0].job.initial_weights
    moved = (final_shared(tmp_path / "fed" / "run") - first) * 4
    there = [c for c in range(4) if c != 1 or stage in (dealing.CONSENT, dealing.REVEAL)]
    fresh = {c: client_at(tmp_path / "fed", clients[0].task, c) for c in there}
    wanted = torch.stack([fresh[c].update(Broadcast(0, first, 0.1, 1.0))[0] for c in there]).sum(0)
    mechanism, n_max = clients[0].job.parts.mechanism.mechanism, clients[0].job.parts.mechanism.shares
    variance = float(mechanism.share_variance) * n_max + len(there) / 6  # of rounding: f(1 − f) on average
    noise = mechanism.granularity * math.sqrt(variance * first.numel())
    assert float((moved - wanted).norm()) == pytest.approx(noise, rel=0.15)  # one client more or less is 0.1 away
    assert noise < 0.15
    assert rows(next((keys.folder().parent / "operator").glob("*.jsonl"))) == [{"round": 0, "missing": 1}]


@pytest.mark.parametrize("stage", [dealing.KEYS, dealing.VECTOR, dealing.REVEAL])
def test_too_few_clients_release_nothing_and_stay_charged(stage: str, tmp_path: Path) -> None:
    _, clients, _ = run(tmp_path / "fed", ddgauss(rounds=2), {0: stage, 1: stage})  # of 4, 3 are needed
    shown = rows(tmp_path / "fed" / "run" / "metrics.jsonl")
    few = stage != dealing.KEYS  # two that never began are a small cohort, enough for a minimum of 2
    assert [row["aborted"] for row in shown] == [few, few]
    if few:
        assert torch.equal(final_shared(tmp_path / "fed" / "run"), clients[0].job.initial_weights)
    assert [entry["round"] for entry in read_ledger(tmp_path / "fed" / "run" / "ledger.jsonl")] == [0, 1]


def test_what_the_server_gets_is_masked(tmp_path: Path) -> None:
    """No vector that arrives is the client's own: each is uniform, and two of one client's input differ."""
    task, clients = deployed(tmp_path / "fed", ddgauss(noise=0.05, rounds=2))
    grid = grid_of(task, clients)
    arrived: list[np.ndarray] = []
    pull = grid.pull_messages

    def noted(numbers: Any) -> Any:
        found = pull(numbers)
        updates = [m.content["arrays"]["update"] for m in found if "update" in m.content["arrays"]]
        arrived.extend(np.frombuffer(update.data, np.int64) for update in updates)
        return found

    grid.pull_messages = noted  # type: ignore[method-assign]
    serve(grid, task, settings(tmp_path / "fed"))
    mechanism = clients[0].job.parts.mechanism.mechanism
    assert len(arrived) == 8
    for vector in arrived:
        spread = np.abs(((vector + (1 << 15)) % (1 << 16)) - (1 << 15)).mean()
        assert spread == pytest.approx(1 << 14, rel=0.15)  # uniform modulo 2^16; an update alone is far smaller
    assert math.sqrt(mechanism.norm_limit / mechanism.padded) < (1 << 12)


def question(client: Client, /, stage: str, session: bytes = b"s" * 16, round: int = 0, **changes: Any) -> Any:
    facts = changes.pop("facts", {})
    broadcast = None
    if stage == dealing.VECTOR:
        broadcast = Broadcast(round, client.job.initial_weights, client.job.threshold, 1.0)
    pending = PendingReply(changes.get("client", client.number), 7, b"n" * 16)
    common = wire.records({}, {"round": round}) if broadcast is None else wire.write_broadcast(broadcast)
    more = {"stage": stage, "session": session, **facts}
    return wire.write_request(common, pending.client, pending.nonce, changes.get("pin", client.task.pin), **more)


def keys_shown(clients: Iterable[Client], session: bytes = b"s" * 16, round: int = 0) -> dict[int, Any]:
    """The first step of all clients: the keys that they show each other."""
    found: dict[int, Any] = {}
    for client in clients:
        found |= dealing.read_keys(client.answer(question(client, dealing.KEYS, session, round))["facts"]["keys"])
    return found


def through_shares(
    clients: list[Client], session: bytes = b"s" * 16, round: int = 0, dealt: dict[int, Any] | None = None
) -> dict[int, dict[str, bytes]]:
    """The steps of all clients up to the vector; what each is sent for that. dealt: gets what they dealt."""
    dealt = {} if dealt is None else dealt
    found = keys_shown(clients, session, round)
    held = {"keys": dealing.write_keys(found)}
    for client in clients:
        dealt[client.number] = client.answer(question(client, dealing.SHARES, session, round, facts=held))["facts"]
    for to in clients:
        reply = to.answer(question(to, dealing.CHECK, session, round, facts=for_check(dealt, to.number)))
        assert reply["facts"]["complaints"] == b""
    return {to.number: {"shared": set_of(found)} for to in clients}


def for_check(dealt: dict[int, Any], to: int) -> dict[str, bytes]:
    """What one client is sent of others' deals."""
    others = {i: facts for i, facts in dealt.items() if i != to}
    return {
        "boxes": wire.write_map({i: wire.read_map(facts["boxes"])[to] for i, facts in others.items()}),
        "commitments": wire.write_map({i: facts["commitments"] for i, facts in others.items()}),
    }


def refused(client: Client, content: Any, why: str) -> None:
    """The client refuses and forgets; then it is put back to where it was."""
    before = client.store.session()
    with pytest.raises(Refused, match=why or None):
        client.answer(content)
    assert client.store.session() == {}
    client.store.keep_session(before)


def set_of(clients: Iterable[int]) -> bytes:
    return wire.write_map(dict.fromkeys(clients, b""))


def test_a_step_is_answered_once_in_order_in_its_session(tmp_path: Path) -> None:
    _, clients = deployed(tmp_path / "fed", ddgauss(rounds=3))
    one = clients[0]
    with pytest.raises(Refused, match="not open"):
        one.answer(question(one, dealing.REVEAL))
    facts = through_shares(clients)
    with pytest.raises(Refused, match="step shares after step check"):
        one.answer(question(one, dealing.SHARES))
    with pytest.raises(Refused, match="not open"):
        one.answer(question(one, dealing.VECTOR, b"t" * 16, facts=facts[0]))
    with pytest.raises(Refused, match="step consent after step check"):
        one.answer(question(one, dealing.CONSENT, facts={"survivors": b""}))
    for client in clients[:3]:
        client.answer(question(client, dealing.VECTOR, facts=facts[client.number]))
    with pytest.raises(Refused, match="step vector after step vector"):
        one.answer(question(one, dealing.VECTOR, facts=facts[0]))
    with pytest.raises(Refused, match="step reveal after step vector"):
        one.answer(question(one, dealing.REVEAL, facts={"signatures": b""}))
    for few in ((0, 1), (1, 2, 3), (0, 1, 9)):
        refused(one, question(one, dealing.CONSENT, facts={"survivors": set_of(few)}), "survivors that cannot be")
    signed = {
        client.number: client.answer(question(client, dealing.CONSENT, facts={"survivors": set_of((0, 1, 2))}))
        for client in clients[:3]
    }
    with pytest.raises(Refused, match="step consent after step consent"):  # it signs one set, once
        one.answer(question(one, dealing.CONSENT, facts={"survivors": set_of((0, 1, 3))}))
    signatures = {"signatures": wire.write_map({i: reply["facts"]["signature"] for i, reply in signed.items()})}
    reply = one.answer(question(one, dealing.REVEAL, facts=signatures))
    assert set(dealing.read_numbers(reply["facts"]["seeds"])) == {0, 1, 2}
    assert set(dealing.read_numbers(reply["facts"]["masks"])) == {3}
    with pytest.raises(Refused, match="not open"):
        one.answer(question(one, dealing.REVEAL, facts=signatures))
    with pytest.raises(Refused, match="has left already"):  # a restarted server learns no second sum of the round
        one.answer(question(one, dealing.KEYS, b"u" * 16))
    again = client_at(tmp_path / "fed", one.task, 0)
    with pytest.raises(Refused, match="has left already"):
        again.answer(question(again, dealing.KEYS, b"u" * 16))
    assert one.store.session() == {}


def test_a_client_killed_after_it_noted_a_vector_sends_no_other(tmp_path: Path) -> None:
    """Noted, and killed before the session says so: the same step of the same session is refused."""
    _, clients = deployed(tmp_path / "fed", ddgauss())
    facts = through_shares(clients)
    clients[0].store.note_participation(0)
    with pytest.raises(Refused, match="has left already"):
        clients[0].answer(question(clients[0], dealing.VECTOR, facts=facts[0]))


def test_a_session_belongs_to_one_deployment(tmp_path: Path) -> None:
    """The same keys in two deployments, the same round and session: what one signed is not believed in the other."""
    _, clients = deployed(tmp_path / "fed", ddgauss())
    one, session = clients[0], b"s" * 16
    keys_of_one = keys_shown([one], session)
    known = one.task.roster.loaded
    secagg.verify(keys_of_one, known, secure_client.context_of(one.task.pin, 0, session))
    for other in (("another", 0, session), (one.task.pin, 1, session), (one.task.pin, 0, b"t" * 16)):
        with pytest.raises(secagg.Aborted):
            secagg.verify(keys_of_one, known, secure_client.context_of(*other))


def test_what_a_client_refuses_of_a_server(tmp_path: Path) -> None:
    _, clients = deployed(tmp_path / "fed", ddgauss())
    one = clients[0]
    from test_federation_clients import ask_of

    with pytest.raises(Refused, match="without secure aggregation"):
        one.answer(ask_of(one))
    for changes in ({"client": 1}, {"pin": "another"}, {"round": 9}):
        with pytest.raises(Refused):
            one.answer(question(one, dealing.KEYS, **changes))
    own = keys_shown([one])
    servers = secagg.Secrets.fresh(1, b"").public(__import__("test_federation_secagg").SIGNERS[1])
    refused(one, question(one, dealing.SHARES, facts={"keys": dealing.write_keys({**own, 1: servers})}), "signature")
    refused(one, question(one, dealing.SHARES, facts={"keys": dealing.write_keys(own)}), "too few")
    for bad in (b"", b"x" * 9, wire.write_map({0: b"x" * 64})):
        refused(one, question(one, dealing.SHARES, facts={"keys": bad}), "")
    _, others = deployed(tmp_path / "plain", small())
    with pytest.raises(Refused, match="not distributed"):
        others[0].answer(question(others[0], dealing.KEYS))


def test_the_statement_says_what_a_server_that_chooses_cohorts_learns(tmp_path: Path) -> None:
    """Beside its own figure, which counts on its drawing them: T sums with it, of the minimum cohort's shares."""
    folder = tmp_path / "fed"
    recipe = ddgauss(noise=3.0, rounds=2, cohort={"size": 3, "min": 1}, privacy={"noise_multiplier": 3.0, "delta": 0.1})
    _, clients, _ = run(folder, recipe)
    facts = json.loads((folder / "run" / "privacy.json").read_text())
    chosen = facts["facts"]["epsilon_cohort_chosen"]
    plan = clients[0].job.parts.plan
    assert chosen == plan.mechanism.account(plan).epsilon(2, "server", amplification=False)
    assert chosen > facts["epsilon"] > 0 and facts["facts"]["epsilon_cohort_known"] is None
    assert f"ε = {chosen:.4g}" in " ".join(facts["warnings"])


def test_the_threshold_is_a_majority_and_the_minimum_cohort(tmp_path: Path) -> None:
    _, clients = deployed(tmp_path / "fed", ddgauss())
    plan = clients[0].job.parts.plan
    assert plan.min_cohort == 2
    assert [threshold_of(plan, n) for n in (1, 2, 3, 4, 10)] == [2, 2, 2, 3, 6]
    others: Any = SimpleNamespace(min_cohort=plan.min_cohort, colluders=3)
    assert [threshold_of(others, n) for n in (1, 4, 10, 11)] == [5, 5, 7, 8]
