"""``fedflat deploy``: a ready Flower project from a recipe, with everything a test on this machine needs."""

import shlex
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import fedflat
from fedflat.assembly.inputs import data_of
from fedflat.assembly.jobs import prepare
from fedflat.assembly.plans import plan_of
from fedflat.assembly.records import DataSpec, settled
from fedflat.config.method import algorithm_of
from fedflat.config.reading import dumped
from fedflat.config.recipe import Recipe
from fedflat.core import InputError, making, require, turning, wrong
from fedflat.engine.job import Job
from fedflat.federation import lock
from fedflat.federation.bounds import Limits
from fedflat.federation.processes import QUIET
from fedflat.federation.store import write_examples
from fedflat.federation.task import RECIPE, Roster, Task, check_deployable
from fedflat.privacy.accounting.factorisation import MOST_BANDED_ROUNDS

PACKAGE = "fedflat_app"
HERE, PORT = "127.0.0.1", 8443
DATA = "data.safetensors"
STATUS, REASON = "status.json", ": why"
"""A file in the project's ``server/`` in which the SuperLink notes for its operator how it does, and what stands after
a run's name there for the reason of its end."""
CONTROL_CERTIFICATE = "flower/control/ca.crt"


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
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    require(not taken, "--out", f"{out}, which {'is not empty' if out.is_dir() else 'is no folder'}", "a new folder")
    with turning(UnicodeError, wrong("--host", host, "a host name or an IP address")):
        host = host.encode("idna").decode()  # as an international name stands in a certificate
    lock.address_of("--host", f"{host}:{port}")
    require(not set(host) & set("[]") and host.count(":") != 1, "--host", host, "no port, no brackets")
    require(not set(str(out)) & set('"\\\n'), "--out", str(out), "a path without quotes, backslashes and line ends")
    recipe, note = _taking_turns(_for_nodes(recipe, nodes), "sampling" not in recipe.cohort.model_fields_set)
    check_deployable(recipe)
    if recipe.data.client_test_fraction:
        unused = "a deployment measures no personal accuracy, and what is held back of a client's examples stays unused"
        warnings.warn(f"data.client_test_fraction: {unused}; 0 trains on all", stacklevel=2)
    job = prepare(recipe, features=False)  # each client computes its own
    plan = job.parts.plan
    epsilon = plan.epsilon() if plan.private else float("inf")
    project = Project(out, job.data.clients, plan.rounds, epsilon if epsilon < float("inf") else None, plan.delta, note)
    with making("--out", out):
        (out / "app" / PACKAGE).mkdir(parents=True)  # refused where another project has come here meanwhile
        try:
            _write(recipe, job, project, port, host)
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)  # half a project would look like one
            raise
    return project


def _for_nodes(recipe: Recipe, nodes: int | None) -> Recipe:
    """Return the recipe with M = ``nodes``; the cohort must fit, since q is a promise that nothing here may change."""
    dump = recipe.dump()
    dump["engine"] |= {"backend": "sequential", "processes": None, "compile": None}
    if dump["engine"]["device"] == "auto":  # clients on one machine would share its GPU
        dump["engine"]["device"] = "cpu"
    dump["privacy"] |= {"randomness": "secret", "benchmark": False}  # real clients, whatever the simulation was for
    if nodes is not None:
        size, hint = recipe.cohort.size, f"With M = {nodes}, name the cohort: -o cohort.size=…"
        require(size <= nodes, "--nodes", nodes, f"at least cohort.size = {size:g}", hint=hint)
        dump["data"]["clients"] = nodes
    return Recipe.of(dump)


def _taking_turns(recipe: Recipe, unnamed: bool) -> tuple[Recipe, str]:
    """Return the recipe to deploy, and a sentence to say. unnamed: whether the recipe names no sampling.

    A schedule takes the place of secret coins where it is proven, and where σ follows from a target ε: a given σ is
    that of a round, which it would not be.
    """
    method = algorithm_of(recipe)
    if not unnamed or not method.private:
        return recipe, ""
    size, privacy = recipe.cohort.size, recipe.privacy
    clients = recipe.data.clients or data_of(recipe, None, None).clients  # a table's are its own
    apart, kind = int(clients / size), "banded" if recipe.rounds <= MOST_BANDED_ROUNDS else "toeplitz"
    dump = recipe.dump()
    dump["cohort"] |= {"sampling": "min-separation", "separation": apart}
    dump["privacy"]["noise"] = {"kind": kind}
    try:
        require(privacy.epsilon is not None, "privacy.epsilon", "nothing", "a target (a given σ is that of a round)")
        require(privacy.noise.kind == "independent", "privacy.noise", privacy.noise.kind, "none of the recipe's own")
        require(apart > 1, "cohort.size", f"{size:g} of {clients} clients", "at most half of them")
        turned = Recipe.of(dump)
        plan_of(turned, method, clients)
    except InputError as why:
        return recipe, f"No cohort.sampling is named: secret coins (poisson) are kept. A schedule does not fit: {why}"
    return turned, " ".join(_template("turns.txt").format(apart=apart, kind=kind).split())


def _write(recipe: Recipe, job: Job, project: Project, port: int, host: str) -> None:
    data, plan, out, app = job.data, job.parts.plan, project.folder, project.folder / "app" / PACKAGE
    out.chmod(0o700)
    lock.write_authority_and_server(out / "certificates", list(dict.fromkeys([host, HERE, "localhost"])))
    folders = [client_folder(out, client) for client in range(data.clients)]
    keys = [lock.write_client_keys(folder) for folder in folders]
    for client, folder in enumerate(folders):
        write_examples(folder / DATA, *data.client(client))
    # With all that depends on data or calibration as numbers: every party has the same.
    (app / RECIPE).write_text(dumped(settled(recipe, job.parts, data.clients, job.problem.pristine)), encoding="utf-8")
    Task(recipe, DataSpec.of(data), Roster(tuple(keys)), Limits.of(job)).write(app)
    for name in ("server", "flower"):
        (out / name).mkdir(mode=0o700)
    test = ""
    if data.test_inputs is not None and data.test_targets is not None:
        test = str((out / "server" / "test.safetensors").absolute())
        write_examples(test, data.test_inputs, data.test_targets)
    control = f"{HERE}:{port + 1}"
    lock.write_lock(out / "server" / lock.LOCK, out / "flower" / "credentials.yaml", control)
    facts = {
        "version": fedflat.__version__, "package": PACKAGE, "out": (out / "run").absolute(), "nodes": data.clients,
        "test": test, "listen": lock.address_text((host, port)), "control": control,
        "ca": (out / CONTROL_CERTIFICATE).absolute(),
    }  # fmt: skip
    (app / "__init__.py").write_text('"""Made by fedflat deploy."""\n', encoding="utf-8")
    _fill(out / "app" / "pyproject.toml", "pyproject.txt", facts)
    for side in ("server", "client"):
        _fill(app / f"{side}_app.py", "app.txt", {"side": side, "title": side.capitalize()})
    _fill(out / lock.ADDRESSES_FILE, "superlink.toml", facts)
    _fill(out / "flower" / "config.toml", "flower.toml", facts)
    places = _places("", 0, str(facts["listen"]), Task.read(app).pin)
    typed = _template("supernode.txt").strip().replace("\n    --", " \\\n    --")  # a line for each option
    exports = (f"export {k}={v.replace(str(out.absolute()), '$PWD')}" for k, v in environment(out).items())
    readme = {
        **places, "name": recipe.name, "clients": data.clients, "exports": "\n    ".join(exports), "trust": plan.trust,
        "epsilon": "infinite" if project.epsilon is None else f"{project.epsilon:.4g}", "delta": f"{plan.delta:g}",
        "cohort": f"{plan.sampler.size:g}", "rounds": plan.rounds, "method": job.parts.algorithm.name,
        "node": typed.replace("\n", "\n    ").format_map(places),
    }  # fmt: skip
    _fill(out / "README.md", "README.md", readme)


def client_folder(out: Path, client: int) -> Path:
    """Return where a client's key, data and state are in the test set-up; on real machines each lives on its own."""
    return out / "clients" / f"{client:05d}"


def environment(out: Path) -> dict[str, str]:
    """Return what Flower's programs are started with: this project's connection, no telemetry, no look for updates."""
    return {"FLWR_HOME": str((out / "flower").absolute()), **QUIET}


def superlink_command(out: Path) -> list[str]:
    """Return the command of the SuperLink: TLS, the roster's SuperNodes only, orders from here with the token."""
    return ["python", "-m", "fedflat.federation.superlink", str(out.absolute())]


def supernode_command(out: Path, client: int, host: str, port: int, pin: str) -> list[str]:
    """Return the command of one client's SuperNode: TLS to the SuperLink, its own key, data, state and app."""
    return words_of("supernode.txt", _places(f"{out.absolute()}/", client, lock.address_text((host, port)), pin))


def _places(at: str, client: int, superlink: str, pin: str) -> dict[str, Any]:
    """Return what the command of one client's SuperNode names. at: the project's folder, as it stands before a path."""
    folder = f"{at}{client_folder(Path(), client)}"
    return {"at": at, "folder": folder, "client": client, "superlink": superlink, "pin": pin, "package": PACKAGE}


def words_of(template: str, places: Mapping[str, Any]) -> list[str]:
    """Return a command's words; split before the places are filled in, whose names may have blanks."""
    return [" ".join(word.split()).format_map(places) for word in shlex.split(_template(template))]


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _fill(path: Path, template: str, facts: dict[str, Any]) -> None:
    """Write a file of the project, from its template."""
    path.write_text(_template(template).format_map(facts), encoding="utf-8")
