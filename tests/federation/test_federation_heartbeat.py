"""Flower's signs of life, sent from a thread while a client trains, draw from no generator that training is held to."""

import random
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.supercore import heartbeat
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.retry import retry_invoker
from flwr.supernode import fleet_http_connection
from stand_in import deployed, small

from fedflat.core.checks import InputError
from fedflat.core.types import Broadcast
from fedflat.engine.batches import ClientBatches
from fedflat.federation import client_app, server_app
from fedflat.federation.client import Client
from fedflat.federation.supernode import EACH_SECOND, mend_connection

PARTS: tuple[Any, ...] = (heartbeat, inflatable_utils, retry_invoker)
BEATS = threading.Event()


@pytest.fixture(autouse=True)
def as_flower_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in PARTS:
        monkeypatch.setattr(part, "random", random)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", heartbeat.HEARTBEAT_CALL_TIMEOUT + 1e-3)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """One whose every batch waits for three signs of life, as in training that takes minutes."""
    _, clients = deployed(tmp_path / "fed", small())
    real = ClientBatches._take

    def later(self: ClientBatches, *given: Any) -> Any:
        for _ in range(3):
            BEATS.clear()
            assert BEATS.wait(60)
        return real(self, *given)

    monkeypatch.setattr(ClientBatches, "_take", later)
    return clients[0]


def beaten(client: Client) -> Any:
    """The client's update while signs of life are sent."""
    sender = heartbeat.HeartbeatSender(lambda: BEATS.set() or True)
    sender.start()
    try:
        job = client.job
        return client.update(
            Broadcast(0, job.initial_weights[: job.parts.layout.dimension].clone(), job.threshold, 1.0)
        )
    finally:
        sender.stop()


@pytest.mark.parametrize("app", [client_app, server_app])
def test_training_outlasts_signs_of_life(app: Any, client: Client, tmp_path: Path) -> None:
    app(tmp_path)
    assert all(not isinstance(part.random, ModuleType) for part in PARTS)
    assert np.isfinite(np.asarray(beaten(client)[0])).all()


def test_twin_with_flowers_own_draws_is_refused(client: Client) -> None:
    with pytest.raises(InputError, match="global generator"):
        beaten(client)


def test_many_clients_ask_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and signs of life of all clients together stay within what a SuperLink's core has time for."""
    monkeypatch.setattr(fleet_http_connection, "HEARTBEAT_DEFAULT_INTERVAL", 30)
    for name in ("make_simple_http_retry_invoker", "NodeAuthHttpInterceptor", "flwr_exit"):  # put back after the test
        monkeypatch.setattr(fleet_http_connection, name, getattr(fleet_http_connection, name))
    for clients, pause, interval in ((10, 3.0, 30), (200, 8.0, 30), (10_000, 400.0, 400)):
        assert mend_connection("", clients) == pause and interval == heartbeat.HEARTBEAT_DEFAULT_INTERVAL
        assert interval == fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL and clients / pause <= EACH_SECOND
