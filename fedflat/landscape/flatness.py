"""Measure how flat finished runs' models are, global and local ones, with statistics over seeds."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.in_process import Sequential
from fedflat.config.recipe import Recipe
from fedflat.core import PersonalState, RoundState, in_range, one_of, require, stream, whole, wrong
from fedflat.engine.job import Job
from fedflat.engine.reduce import states_of
from fedflat.engine.round import broadcast_of
from fedflat.landscape import surfaces
from fedflat.landscape.objective import Objective
from fedflat.records import checkpoint
from fedflat.records.folder import OPENING
from fedflat.records.opening import Opening
from fedflat.report.groups import Group, group_runs, paired_difference, spread
from fedflat.report.metrics import Run, proven_epsilon, read_runs, seeded

Numbers = dict[str, Any]
CHANGED = "A checkpoint's fingerprint is not its recipe's: data, model or fedflat changed since that run."


@dataclass(frozen=True)
class Settings:
    """What is measured. examples: of the chosen data (None: all). clients: whose local models are measured as well.

    on: ``test`` (public data) or ``train`` (all clients' data for the global model, the client's own for a local one;
    private to the simulation). noise: sizes relative to the weights; the tables show the middle one. Raises
    InputError for a setting that is impossible.
    """

    points: int = 41
    span: float = 1.0
    directions: int = 2
    examples: int | None = None
    curvature_examples: int = 500
    on: str = "test"
    clients: tuple[int, ...] = ()
    rho: float = 0.05
    noise: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5)
    draws: int = 10
    eigenvalues: int = 5
    trace_draws: int = 30
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        surfaces.steps_of(self.points, self.span)
        whole("--directions", self.directions, 1, 2)
        one_of("--on", self.on, ("test", "train"))
        in_range("--rho", self.rho, 0, open_low=True)
        for name in ("examples", "curvature_examples", "draws", "eigenvalues", "trace_draws"):
            if (count := getattr(self, name)) is not None:
                whole(f"--{name.replace('_', '-')}", count, 1)
        require(bool(self.noise), "--noise", "nothing", "one or more sizes, for example 0.1,0.2")
        for size in self.noise:
            in_range("--noise", size, 0, open_low=True)


def measure(
    folders: Iterable[Path | str], settings: Settings = Settings(), on_stage: Callable[[str, int], None] | None = None,
    on_points: Callable[[int], None] | None = None,
) -> Numbers:  # fmt: skip
    """Measure every run's models; surfaces for the first run of each setting, everything else for every run.

    folders: run folders, or folders that hold some. on_stage: told the model's name and the surface's points (0: none)
    before each; on_points: points finished. Returns what surfaces.json holds. Raises InputError.
    """
    groups, notes = group_runs(read_runs(folders)), list[str]()
    measured: list[Numbers] = []
    for group in groups:
        for place, run in enumerate(group.runs):
            job, state, heads = _loaded(run, notes)
            drawn = place == 0 and settings.directions == 2
            for client in (None, *settings.clients):
                name = "global" if client is None else f"client {client}"
                if on_stage is not None:
                    on_stage(f"{group.label}, seed {run.seed}, {name}", settings.points**2 if drawn else 0)
                weights = weights_of(job, state, heads, client)
                measurement = {"model": name, **of_model(job, weights, client, settings, drawn, on_points)}
                if client is None:
                    _compare_with_record(measurement, run, state.round, settings, notes)
                measured.append({"group": group.label, "run": str(run.path), "seed": run.seed, **measurement})
    return {
        "settings": asdict(settings), "groups": _grouped(groups, measured, settings), "models": measured,
        "notes": list(dict.fromkeys(notes)),
    }  # fmt: skip


def _loaded(run: Run, notes: list[str]) -> tuple[Job, RoundState, PersonalState]:
    """Return a run's live parts and its newest checkpoint."""
    from fedflat.assembly.jobs import prepare
    from fedflat.assembly.tasks import refuse_other_tasks

    require(bool(run.recipe), f"run folder {run.path}", "no recipe.yaml in it", "a folder written by fedflat run")
    if (newest := checkpoint.newest(run.path / "checkpoints")) is None:
        raise wrong(f"run folder {run.path}", "no readable checkpoint in it", "a run that has finished a round")
    state, heads, _ = newest
    # A model can be measured on a machine without the run's own device.
    here = ["engine.backend=sequential", "engine.device=cpu", "engine.compile=null"]
    recipe = Recipe.of(run.recipe, here, where=str(run.path / "recipe.yaml"))
    refuse_other_tasks("landscape", recipe)
    job = prepare(recipe)
    layout = job.parts.layout
    same = (state.shared.numel(), heads.first.numel()) == (layout.dimension, layout.size - layout.dimension)
    allowed = "a run whose recipe alone gives its model and data"
    require(same, f"run folder {run.path}", "weights of another model", allowed)
    if not (run.path / OPENING).is_file() or Opening.read(run.path).differing(job.identity):
        notes.append(CHANGED)
    if layout.shared < len(layout.names):
        notes.append(f"{run.algorithm}: the global model has w^0's personal head; a client's local model has its own.")
    return job, state, heads


def weights_of(job: Job, state: RoundState, heads: PersonalState, client: int | None) -> Tensor:
    """Return the global weights ``(D,)``, or those that a client has after its local phases from them, before any clip.

    Simulation only: a deployment never shows a client's to anyone else.
    """
    parts, data = job.parts, job.data
    if client is None:
        return torch.cat([state.released, heads.first])
    if parts.algorithm.kind == "votes":
        raise wrong("--clients", client, f"no clients for {parts.algorithm.name}, whose clients send votes, not models")
    whole("--clients", client, 0, data.clients - 1)
    weights = heads.whole(state.released, client)
    if len(data.parts[client]) == 0:
        return weights
    public = None if job.public_update is None else lambda: job.public_update(state)  # type: ignore[misc]
    broadcast = broadcast_of(parts, state, job.seed, public)
    states = states_of(parts.algorithm, heads, client, state.shared)
    Sequential(parts.algorithm, job.problem, parts.local, data, job.seed).one(client, broadcast, weights, states)
    return weights


def _data(job: Job, client: int | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets to evaluate on, cut to the examples asked for (the same ones for every run)."""
    data = job.data
    if settings.on == "test":
        if data.test_inputs is None or data.test_targets is None:
            raise wrong("--on", "test for a run without public test data", "train")
        inputs, targets = data.test_inputs, data.test_targets
    else:
        rows = np.concatenate(data.parts) if client is None else data.parts[client]
        require(len(rows) > 0, "--clients", client, "with --on train, clients that have data")
        inputs, targets = data.inputs[torch.from_numpy(rows)], data.targets[torch.from_numpy(rows)]
    return _subset(inputs, targets, settings.examples, settings.seed)


def _subset(inputs: Tensor, targets: Tensor, count: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` examples at random, in stored order and memory layout."""
    if count is None or count >= len(inputs):
        return inputs, targets
    rows = torch.from_numpy(np.sort(stream(seed, "landscape examples").choice(len(inputs), count, replace=False)))
    # Indexing returns another memory layout, which would change the last bits.
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    chosen = inputs[rows]
    return chosen.contiguous(memory_format=torch.channels_last) if last else chosen, targets[rows]


def of_model(
    job: Job, weights: Tensor, client: int | None, settings: Settings, with_surface: bool,
    on_points: Callable[[int], None] | None,
) -> Numbers:  # fmt: skip
    """Return everything that is measured of weights ``(D,)``, ready for JSON: of the global model (client None), or of
    a client's local one."""
    began, module, layout = time.perf_counter(), job.problem.module, job.parts.layout
    examples = _data(job, client, settings)
    objective = Objective(module, layout, *examples, threads=settings.threads)
    fewer = _subset(*examples, settings.curvature_examples, settings.seed)
    part = Objective(module, layout, *fewer, threads=settings.threads)
    loss, accuracy = objective.value(weights)
    require(math.isfinite(loss), "landscape", f"a model whose loss is {loss}", "a run that has not diverged")
    pair = surfaces.directions(weights, layout, settings.seed, settings.directions)
    steps = surfaces.steps_of(settings.points, settings.span)
    line = surfaces.surface(objective, weights, pair[:1], steps)
    noisy = surfaces.robustness(objective, weights, layout, settings.seed, settings.noise, settings.draws)
    middle = len(settings.noise) // 2
    noise_loss, noise_accuracy = (float(np.mean(noisy[key][middle])) for key in ("loss", "accuracy"))
    product = part.product(weights)
    spectrum = surfaces.lanczos(product, layout.size, settings.seed, count=settings.eigenvalues)
    trace = surfaces.trace(product, layout.size, settings.seed, settings.trace_draws)
    sharp = surfaces.sharpness(part, weights, settings.rho)
    # ``one_step`` and ``ascent`` are SAM's sharpness.
    numbers = {
        "loss": loss, "accuracy": accuracy, "eigenvalue": spectrum["top"][0], "trace": trace["mean"],
        "one_step": sharp["one_step"], "ascent": sharp["ascent"], "noise_loss": noise_loss - loss,
        "noise_accuracy": noise_accuracy, "norm": float(torch.linalg.vector_norm(weights)),
    }  # fmt: skip
    drawn = {"surface": surfaces.surface(objective, weights, pair, steps, on_points)} if with_surface else {}
    return {
        "client": client, "private": client is not None or settings.on == "train",
        "examples": len(examples[0]), "curvature_examples": len(fewer[0]), "line": line, "noise": noisy,
        "numbers": numbers, "spectrum": spectrum, "trace": trace, "sharpness": sharp, **drawn,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _compare_with_record(measurement: Numbers, run: Run, rounds: int, settings: Settings, notes: list[str]) -> None:
    """Add a note where the accuracy measured here is not the one that the run recorded of the same round."""
    last, fresh = [row for row in run.metrics if row["round"] == rounds - 1], measurement["numbers"]["accuracy"]
    recorded = last[0].get("test_accuracy") if last else None
    comparable = settings.on == "test" and settings.examples is None
    if comparable and recorded is not None and abs(recorded - fresh) > 1e-3:
        notes.append(f"{run.path}: recorded a test accuracy of {100 * recorded:.2f} %, found {100 * fresh:.2f} % here.")


def _grouped(groups: Sequence[Group], measured: Sequence[Numbers], settings: Settings) -> list[Numbers]:
    """Return each setting's models over its seeds: mean and sd of numbers and curves, and the difference from the
    first.
    """
    listed: list[Numbers] = []
    for name in dict.fromkeys(row["model"] for row in measured):
        first: Mapping[str, Any] = {}
        for group in groups:
            rows = [row for row in measured if (row["model"], row["group"]) == (name, group.label)]
            values = {key: {row["seed"]: row["numbers"][key] for row in rows} for key in rows[0]["numbers"]}
            gaps = {key: _plain(paired_difference(first[key], values[key])) for key in first}
            first = first or values
            listed.append({
                "label": group.label, "model": name, "style": group.style, "seeds": [row["seed"] for row in rows],
                "epsilon": _plain(spread(proven_epsilon(run) for run in group.runs)), "private": rows[0]["private"],
                "seeded": any(map(seeded, group.runs)),
                "numbers": {key: _plain(spread(row["numbers"][key] for row in rows)) for key in values},
                "differences": gaps,
                "line": {"steps": rows[0]["line"]["steps"]} | _curves([row["line"] for row in rows]),
                "noise": {"levels": list(settings.noise)} | _curves([row["noise"] for row in rows]),
                "surface": rows[0].get("surface"),
            })  # fmt: skip
    return listed


def _plain(value: Any) -> Numbers | None:
    return None if value is None else asdict(value)


def _curves(curves: Sequence[Numbers]) -> Numbers:
    """Return the mean and sd over seeds at each abscissa (sd None for one seed); where values have draws, of the mean
    over them."""
    result: Numbers = {}
    for key in ("loss", "accuracy"):
        values = np.array([curve[key] for curve in curves])
        stacked = values.mean(axis=2) if values.ndim > 2 else values
        result[key] = stacked.mean(0).tolist()
        result[f"{key}_sd"] = stacked.std(0, ddof=1).tolist() if len(stacked) > 1 else None
    return result
