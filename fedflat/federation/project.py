"""``fedflat deploy``: a ready Flower project from a recipe, with everything a test on this machine needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml

import fedflat
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, wrong
from fedflat.core.types import Algorithm
from fedflat.data.clients import FederatedData
from fedflat.engine.job import Job
from fedflat.federation.bounds import Limits
from fedflat.federation.certificates import write_authority_and_server, write_client_keys
from fedflat.federation.lock import ADDRESSES_FILE, LOCK, write_lock
from fedflat.federation.store import write_examples
from fedflat.federation.task import RECIPE, DataSpec, Roster, Task, check_deployable
from fedflat.privacy.accounting.factorisation import MOST_BANDED_ROUNDS

PACKAGE = "fedflat_app"
HERE, PORT = "127.0.0.1", 8443
DATA, HELD = "data.safetensors", "held.safetensors"
CONTROL_CERTIFICATE = "flower/control/ca.crt"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""No telemetry, no look for updates."""


WHY = (
    "No cohort.sampling is named: a deployment's cohorts are seen by who runs the SuperLink or watches the network, "
    "and ε by secret coins does not hold towards them. So clients take turns by a public schedule (min-separation, "
    "{apart} rounds apart) with correlated noise ({kind}), whose ε hides nobody. For secret coins: "
    "-o cohort.sampling=poisson."
)
KEPT = "No cohort.sampling is named: secret coins (poisson) are kept, since {why}."


@dataclass(frozen=True)
class Project:
    """What was made. epsilon: proven ε of the whole run, None without a finite one. note: what was chosen, and why."""

    folder: Path
    clients: int
    rounds: int
    epsilon: float | None
    delta: float
    note: str = ""


def write_project(recipe: Recipe, out: Path, nodes: int | None = None, port: int = PORT, host: str = HERE) -> Project:
    """Write the project of a recipe for ``nodes`` clients (default: the recipe's) into the new folder ``out``.

    The recipe's own data set is partitioned as in a simulation; each client's examples go into that client's folder.

    Raises:
        InputError: the recipe cannot be deployed, or ``out`` holds something already.
    """
    if out.exists() and any(out.iterdir()):
        raise wrong("--out", f"{out}, which is not empty", "a new folder")
    unnamed = "sampling" not in recipe.cohort.model_fields_set
    recipe, note = _taking_turns(_for_nodes(recipe, nodes), unnamed)
    job = _job(recipe)
    try:
        _write(recipe, job, out, port, host)
    except OSError as error:
        raise InputError(f"--out: found {out} ({error.strerror}); allowed: a folder you may write to.") from error
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    plan = job.parts.plan
    epsilon = plan.epsilon() if plan.private else float("inf")
    return Project(out, job.data.clients, plan.rounds, epsilon if epsilon < float("inf") else None, plan.delta, note)


def _for_nodes(recipe: Recipe, nodes: int | None) -> Recipe:
    """The recipe with M = ``nodes``; the cohort must fit, since q is a promise and not to be changed behind one's
    back.
    """
    dump = recipe.dump()
    dump["engine"] |= {"backend": "sequential", "processes": None, "compile": None}
    if dump["engine"]["device"] == "auto":  # clients on one machine would share its GPU
        dump["engine"]["device"] = "cpu"
    dump["privacy"] |= {"randomness": "secret", "benchmark": False}  # real clients, whatever the simulation was for
    if nodes is not None:
        if recipe.cohort.size > nodes:
            hint = f"With M = {nodes}, name the cohort: -o cohort.size=…"
            raise wrong("--nodes", nodes, f"at least cohort.size = {recipe.cohort.size:g}", hint=hint)
        dump["data"]["clients"] = nodes
    return Recipe.of(dump)


def _taking_turns(recipe: Recipe, unnamed: bool) -> tuple[Recipe, str]:
    """Return the recipe with a schedule where it names no sampling and a schedule is proven, and what to say of it."""
    from fedflat.assembly.plans import algorithm_of
    from fedflat.methods.noise import trust_of

    if not unnamed:
        return recipe, ""
    method = algorithm_of(recipe)
    return scheduled(recipe, method, trust_of(recipe, method))


def scheduled(recipe: Recipe, method: Algorithm, trust: str) -> tuple[Recipe, str]:
    """The recipe to deploy, given one that names no sampling, and a sentence to say; none for a method without privacy.

    A schedule takes the place of secret coins where it is proven, and where σ follows from a target ε: a given σ is
    that of a round, which it would not be.
    """
    if not method.private:
        return recipe, ""
    why = _unfit(recipe, method, trust)
    if why:
        return recipe, KEPT.format(why=why)
    kind = "banded" if recipe.rounds <= MOST_BANDED_ROUNDS else "toeplitz"
    apart = int((recipe.data.clients or 0) / recipe.cohort.size)
    dump = recipe.dump()
    dump["cohort"] |= {"sampling": "min-separation", "separation": apart}
    dump["privacy"]["noise"] = {"kind": kind}
    return Recipe.of(dump), WHY.format(apart=apart, kind=kind)


def _unfit(recipe: Recipe, method: Algorithm, trust: str) -> str:
    """Return why a schedule with correlated noise cannot stand in; empty where it can."""
    privacy, cohort = recipe.privacy, recipe.cohort
    if privacy.epsilon is None:
        return "privacy.noise_multiplier is that of a round, and no privacy.epsilon is given"
    if trust != "central" or method.kind != "update":
        return f"a schedule is proven for trust: central and plain Gaussian noise, not for {method.name}, {trust}"
    if recipe.start is not None:
        return "correlated noise has no account beside a start's own noise"
    if privacy.clipping.kind == "adaptive":
        return "correlated noise needs one constant clip"
    if privacy.noise.kind != "independent" or privacy.noise_cohort is not None or cohort.min or cohort.max:
        return "other keys of the recipe belong to secret coins"
    if cohort.size != int(cohort.size) or 2 * cohort.size > (recipe.data.clients or 0):
        return "the cohort is no whole number of at most half of the clients"
    return ""


def _job(recipe: Recipe) -> Job:
    from fedflat.assembly.jobs import prepare
    from fedflat.assembly.plans import algorithm_of
    from fedflat.methods.noise import trust_of

    method = algorithm_of(recipe)
    check_deployable(recipe, method, trust_of(recipe, method))
    return prepare(recipe, features=False)  # each client computes its own


def _write(recipe: Recipe, job: Job, out: Path, port: int, host: str) -> None:
    data, app = job.data, out / "app" / PACKAGE
    app.mkdir(parents=True)
    out.chmod(0o700)
    hosts = list(dict.fromkeys([host, HERE, "localhost"]))
    write_authority_and_server(out / "certificates", hosts)
    keys = [_write_client(client_folder(out, client), data, client) for client in range(data.clients)]
    (app / RECIPE).write_text(_recipe_text(recipe, job), encoding="utf-8")
    Task(recipe, DataSpec.of(data), Roster(tuple(keys)), Limits.of(job)).write(app)
    test = None
    (out / "server").mkdir(mode=0o700)
    if data.test_inputs is not None and data.test_targets is not None:
        test = (out / "server" / "test.safetensors").absolute()
        write_examples(test, data.test_inputs, data.test_targets)
    _write_app(out, app, data.clients, test)
    _write_addresses(out, f"{host}:{port}", f"{HERE}:{port + 1}")
    pin = Task.read(app).pin
    (out / "README.md").write_text(_readme(recipe, out, job, pin, host, port), encoding="utf-8")


def client_folder(out: Path, client: int) -> Path:
    """Return where a client's key, data and state are in the test set-up; on real machines each lives on its own."""
    return out / "clients" / f"{client:05d}"


def _write_client(folder: Path, data: FederatedData, client: int) -> str:
    public = write_client_keys(folder)
    inputs, targets = data.client(client)
    write_examples(folder / DATA, inputs.contiguous(), targets)
    rows = torch.from_numpy(data.held_back[client])
    if len(rows):
        write_examples(folder / HELD, data.inputs[rows], data.targets[rows])
    return public


def _recipe_text(recipe: Recipe, job: Job) -> str:
    """Return the recipe with all that depends on data or calibration as numbers: every party has the same."""
    from fedflat.assembly.records import settled

    found = settled(recipe, job.parts, job.data.clients, job.problem.pristine)
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)


def _write_app(out: Path, app: Path, clients: int, test: Path | None) -> None:
    """pyproject.toml and the two modules that Flower loads."""
    facts = {"version": fedflat.__version__, "package": PACKAGE, "out": (out / "run").absolute(), "nodes": clients}
    text = _text("pyproject.txt", **facts, test="" if test is None else test)
    (out / "app" / "pyproject.toml").write_text(text, encoding="utf-8")
    (app / "__init__.py").write_text('"""Made by fedflat deploy."""\n', encoding="utf-8")
    for side in ("server", "client"):
        (app / f"{side}_app.py").write_text(_text("app.txt", side=side, title=side.capitalize()), encoding="utf-8")


def _write_addresses(out: Path, listen: str, control: str) -> None:
    """Write the SuperLink's two addresses, its lock, and where ``flwr`` finds it and the token (FLWR_HOME)."""
    (out / "flower").mkdir(mode=0o700)
    text = f'[superlink]\ndefault = "fedflat"\n\n[superlink.fedflat]\naddress = "{control}"\n'
    text += f'root-certificates = "{(out / CONTROL_CERTIFICATE).absolute()}"\n'
    (out / "flower" / "config.toml").write_text(text, encoding="utf-8")
    (out / ADDRESSES_FILE).write_text(_text("superlink.toml", listen=listen, control=control), encoding="utf-8")
    write_lock(out / "server" / LOCK, out / "flower" / "credentials.yaml", control)


def environment(out: Path) -> dict[str, str]:
    """Return what Flower's programs are started with: this project's connection, no telemetry, no look for updates."""
    return {"FLWR_HOME": str((out / "flower").absolute()), **QUIET}


def superlink_command(out: Path) -> list[str]:
    """Return the command of the SuperLink: TLS, the roster's SuperNodes only, orders from here with the token."""
    return ["python", "-m", "fedflat.federation.superlink", str(out.absolute())]


def supernode_command(out: Path, client: int, host: str, port: int, pin: str) -> list[str]:
    """Return the command of one client's SuperNode: TLS to the SuperLink, its own key, data, state and app."""
    held, own = (out / "certificates").absolute(), client_folder(out, client).absolute()
    config = f'client={client} data="{own}/{DATA}" state="{own}/state" key="{own}/auth.key" pin="{pin}"'
    if (own / HELD).exists():
        config += f' held="{own}/{HELD}"'
    return [
        "python", "-m", "fedflat.federation.supernode", "--app", str((out / "app" / PACKAGE).absolute()),
        "--superlink", f"{host}:{port}", "--root-certificates", f"{held}/ca.crt",
        "--auth-supernode-private-key", f"{own}/auth.key", "--port", str(node_port(port, client)),
        "--node-config", config,
    ]  # fmt: skip


def node_port(port: int, client: int) -> int:
    """Return a port on 127.0.0.1 for each client of a test on one machine, after the SuperLink's two."""
    return port + 2 + client


def rejoin_command(out: Path, client: int, host: str, port: int) -> list[str]:
    """Return what lets a killed SuperNode of one client back in at once."""
    held, own = (out / "certificates").absolute(), client_folder(out, client).absolute()
    return [
        "python", "-m", "fedflat.federation.rejoin", "--superlink", f"{host}:{port}",
        "--root-certificates", f"{held}/ca.crt", "--auth-supernode-private-key", f"{own}/auth.key",
        "--state", f"{own}/state",
    ]  # fmt: skip


def _shell(command: list[str], root: str) -> str:
    """Return a command as one would type it in the project's folder, a flag to a line, less than 80 columns wide."""
    shown, line = [], ""
    for word in (word.replace(root + "/", "").replace(root, ".") for word in command):
        text = f"'{word}'".replace('" ', '"\n        ') if " " in word else word
        if word.startswith("--"):
            shown.append(line)
            line = "   "
        line = f"{line} {text}".lstrip() if not shown else f"{line} {text}"
    return " \\\n    ".join([*shown, line])


def _readme(recipe: Recipe, out: Path, job: Job, pin: str, host: str, port: int) -> str:
    root, clients, plan = str(out.absolute()), job.data.clients, job.parts.plan
    exports = "\n    ".join(f"export {k}={v.replace(root, '$PWD')}" for k, v in environment(out).items())
    show: Callable[[list[str]], str] = lambda command: _shell(command, root)  # noqa: E731
    epsilon = plan.epsilon() if plan.private else float("inf")
    facts: dict[str, Any] = {
        "name": recipe.name, "clients": clients, "last": clients - 1, "pin": pin, "exports": exports,
        "epsilon": f"{epsilon:.4g}" if epsilon < float("inf") else "infinite", "delta": f"{plan.delta:g}",
        "trust": plan.trust, "cohort": f"{plan.sampler.size:g}", "rounds": plan.rounds,
        "method": job.parts.algorithm.name,
        "superlink": show(superlink_command(out)), "node": show(supernode_command(out, 0, host, port, pin)),
        "rejoin": show(rejoin_command(out, 0, host, port)), "package": PACKAGE,
    }  # fmt: skip
    return _text("README.md", **facts)


def _text(name: str, /, **facts: Any) -> str:
    """Return a file of the project, from its template."""
    template = resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
    return template.format(**facts)
