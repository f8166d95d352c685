"""The same recipe on a real Flower federation: a ServerApp and a ClientApp that call the simulation's own functions."""

from __future__ import annotations

from fedflat.federation.apps import client_app, server_app

__all__ = ["client_app", "server_app"]
