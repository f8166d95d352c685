"""The texts of the files in a project that ``fedflat deploy`` makes."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "fedflat-app"
version = "1.0.0"
description = "A fedflat recipe as a Flower app"
license = "Apache-2.0"
dependencies = ["fedflat[federation]=={version}"]

[tool.setuptools]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedflat"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
# The server's side: the run's folder, the public test set, and how long it waits.
out = "{out}"
test = "{test}"
answer-seconds = 600.0
start-seconds = 600.0
wait-for-nodes = {nodes}
# Secure aggregation: stop after so many charged rounds in a row without a result; ask a client no more that was
# excluded for a lie so many times.
abort-limit = 3
exclusion-limit = 3
# Log lines: text, or json. Metrics for Prometheus, /ready and /live: "127.0.0.1:9464", or "" for none.
log = "text"
metrics = ""
"""

ADDRESSES = """\
# What the network sees: SuperNodes' messages and nothing else. 0.0.0.0 for every address of this machine.
listen = "{listen}"
# Orders (flwr run, stop, ls, log) and the ServerApp. This machine alone; anything else is refused at the start.
# flower/config.toml and flower/credentials.yaml name the same address.
control = "{control}"
"""

APP = '''\
"""The {side}'s app: everything is in fedflat.federation."""

from pathlib import Path

from fedflat.federation import {side}_app

app = {side}_app(Path(__file__).parent)
'''

README = """\
# {name} on a Flower federation

{method}, {rounds} rounds, {clients} clients, cohorts of {cohort} expected, trust: {trust}.
Proven ε = {epsilon} at δ = {delta} for the whole run. Made by `fedflat deploy`; what is promised to whom is in
`run/privacy.json` after a run, and docs/deploy.md of fedflat says how to run this on machines of one's own.

## All of it on this machine

    python -m fedflat.federation.local .

starts the SuperLink and {clients} SuperNodes, runs `flwr run`, waits for the end
and stops everything. So do Ctrl-C, SIGTERM and a closed terminal.

## Step by step (in this folder, each long-running program in a terminal of its own)

    {exports}

The SuperLink. `server/superlink.toml` holds its two addresses: the one for the
clients passes SuperNodes' messages only; the one for orders (`flwr`) is on this
machine alone and wants the operator's token from `flower/credentials.yaml`. The
SuperNodes that it lets in are those of `app/{package}/roster.json`.

    {superlink}

One SuperNode for each client (another `client=`, folder and `--port` each). It
runs the fedflat that is installed, on its owner's copy of the app, and refuses
every other app:

    {node}

A SuperNode that was killed is refused for up to a minute; before it is started again, this lets it in at once:

    {rejoin}

Start the run, and start it again after a failure (it goes on from its last round):

    flwr run app fedflat --stream

Stop a run: `flwr stop RUN_ID fedflat`. Afterwards: `fedflat report run`. To end one for good before its last round:
`python -m fedflat.federation.close app/{package} run`.

## What lies where

| path | what | who may have it |
|---|---|---|
| app/ | the Flower app: recipe, form of the data, roster of public keys | everybody |
| flower/ | where `flwr` finds the SuperLink; **credentials.yaml is the operator's token** | operator |
| server/operator.sha256 | the lock to that token | the SuperLink's account |
| certificates/ | test authority and the SuperLink's certificate; ca.key signs new ones | operator; clients get ca.crt |
| clients/NNNNN/ | key, examples and state of one client, held-back examples if the recipe has any | that client only |
| server/test.safetensors | public test set | everybody |
| run/ | released metrics, ledger, checkpoints, statement | as the statement says |

The clients' `pin` is the hash of recipe, data form and roster: a client with it refuses any other, whatever the
server asks.
"""
