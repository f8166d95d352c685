"""Run pairs of worlds through the real path, one client present or absent, and measure how far the release moves.

``prepare`` and ``engine.train.train`` run a recipe's own model, method, clip, server and back ends on a few clients,
without noise (or with the same noise) and with everybody in the cohort. Their data are finite and made to break a
bound, in the shape and classes of the recipe's examples. The released mean may then move by C/m at most: that is what
the noise is made for, in the arithmetic that ran.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.config.method import algorithm_of, server_of
from fedflat.config.recipe import Recipe
from fedflat.core import InputError, RunError, last_linear, stream, using_threads, zero
from fedflat.core.types import Algorithm, RoundState, ServerView
from fedflat.data.clients import FederatedData
from fedflat.engine.isolated import packaged
from fedflat.engine.job import Job, Outcome, RoundParts
from fedflat.engine.train import train
from fedflat.simulation import run as simulation

Pair = tuple[Tensor, Tensor]
"""One client's inputs ``(n, …)`` and targets ``(n,)`` or ``(n, T)``."""
ROWS = 4
"""Examples of a client, at most: rounding is found with few of them, and many worlds are run."""
PIXELS = 255


@dataclass(frozen=True)
class Case:
    """What the client whose data is present in one world only has, and what the others have: names of ``kinds``.

    start: the released state before the round; ``w0``, ``even`` (the last linear layer is zero, so that every class is
    as likely, and there is one local step on everything, so that gradients cancel) or ``later`` (after a round of
    ordinary data: memory, momentum).
    noise: whether both worlds add the same noise. last: whether the client is the last of the cohort, not the first.
    """

    client: str
    others: str = "ordinary"
    start: str = "w0"
    noise: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        """The case's name in a table of movements."""
        label = self.client if self.others == "ordinary" else f"{self.client} | {self.others}"
        label += {"w0": "", "even": ", even", "later": ", round 2"}[self.start]
        return label + (", last" if self.last else "") + (", same noise" if self.noise else "")


@dataclass(frozen=True)
class Maker:
    """Makes clients' data for the examples ``template`` has: their shape, kind, classes and vocabulary."""

    template: FederatedData

    def make(self, kind: str, client: int) -> Pair:
        """Return the data of ``kind`` for a client; clients other than 0 have fewer examples, one of them a single
        one."""
        x, y = self.ordinary(client)
        inputs, targets = self._hostile(kind, client, x, y)
        return inputs.to(x.dtype), targets

    def _hostile(self, kind: str, client: int, x: Tensor, y: Tensor) -> Pair:
        """Return inputs and targets of a kind, which may end with a scale; x, y: the client's ordinary ones."""
        name, _, number = kind.rpartition(" ")
        name, scale = (name, float(number)) if number[0].isdigit() else (kind, 1.0)
        draw = stream(0, "audit: hostile example", client).standard_normal(self.template.input_shape)
        u = torch.from_numpy(draw).float()
        match name:
            case "ordinary":
                return x, y
            case "empty":
                # A client without data is the world in which it is absent.
                return x[:0], y[:0]
            case "cancelling":
                return self._cancelling(u, scale, y)
            case "opposite":
                return self.opposite(u * scale, u * scale * (1 + 1e-6), y)
            case "huge":
                return (u / u.abs().max().clamp_min(1e-30) * scale).expand(len(x), *u.shape).clone(), y
            case "tiny":
                return u.expand(x.shape) * scale, y
            case "pixels":
                return self._pixels(client, y)
            case "duplicated":
                return x[:1].expand(x.shape).clone(), y[:1].expand(y.shape).clone()
            case "one class":
                return x, self.label(0, y)
            case "constant":
                return torch.ones_like(x), self.label(0, y)
            case "no gradient" if x.is_floating_point():
                # From a head of zeros its rows cancel; with powers of two all products are exact.
                return self.with_all_labels(u.sign() * 2.0**46, y)
            case "no gradient" | "one text, all labels":
                return self.with_all_labels(x[0], y)
            case "one token":
                return torch.full_like(x, min(5, max(self.template.vocabulary - 1, 0))), y
            case "padding":
                return torch.full_like(x, self.template.padding), y
        raise ValueError(kind)

    def _cancelling(self, u: Tensor, scale: float, y: Tensor) -> Pair:
        """Return nearly equal inputs, one of each class: where classes are about as likely, large rows of the
        gradient cancel."""
        same, labels = self.with_all_labels(u * scale, y)
        return same + scale * 1e-6 * torch.arange(len(same)).reshape(-1, *(1 for _ in u.shape)) * u.flip(0), labels

    def _pixels(self, client: int, y: Tensor) -> Pair:
        """Return two raw images, whole numbers to 255, that differ in one pixel by 1, of opposite classes."""
        draw = stream(0, "audit: pixels", client).integers(0, PIXELS, self.template.input_shape)
        image = torch.from_numpy(draw).float()
        other = image.clone()
        other.view(-1)[0] += 1
        return self.opposite(image, other, y)

    def everybody(self, kind: str, clients: int) -> FederatedData:
        """Return a federation whose clients all have data of one kind."""
        return self.federation([self.make(kind, client) for client in range(clients)])

    def federation(self, pairs: Sequence[Pair]) -> FederatedData:
        """Return the template's federation with other clients: one pair each."""
        inputs, targets = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        ends = np.cumsum([0, *(len(x) for x, _ in pairs)], dtype=np.int64)
        parts = tuple(np.arange(a, b, dtype=np.int64) for a, b in pairwise(ends))
        empty = tuple(np.empty(0, dtype=np.int64) for _ in parts)
        # A few test examples, the last of the last class: it says how many classes there are.
        test, labels = (torch.cat([tensor, tensor, tensor])[:8] for tensor in self.ordinary(0))
        labels[-1] = self.template.classes - 1
        return replace(
            self.template, inputs=inputs, targets=targets, parts=parts, held_back=empty, test_inputs=test,
            test_targets=labels, name="worlds",
        )  # fmt: skip

    def ordinary(self, client: int) -> Pair:
        """Return the examples of the recipe's own training data, different ones for each client."""
        held = np.concatenate(self.template.parts)
        count = max(1, ROWS - client % ROWS)
        rows = torch.from_numpy(held[np.arange(client * ROWS, client * ROWS + count) % len(held)])
        return self.template.inputs[rows], self.template.targets[rows]

    def label(self, number: int, like: Tensor) -> Tensor:
        """Return the targets of the form of ``like`` ``(n, …)``, all of class ``number`` (counted round)."""
        return torch.full_like(like, number % self.template.classes)

    def with_all_labels(self, example: Tensor, y: Tensor) -> Pair:
        """Return one example once for each class (at most 64 of them)."""
        count = min(self.template.classes, 64)
        targets = torch.arange(count).reshape(-1, *(1 for _ in y.shape[1:])).expand(count, *y.shape[1:])
        return example.expand(count, *example.shape).clone(), targets.clone()

    def opposite(self, first: Tensor, second: Tensor, y: Tensor) -> Pair:
        """Return two examples of the first and the last class."""
        return torch.stack([first, second]), torch.cat([self.label(0, y[:1]), self.label(-1, y[:1])])


SLACK = 0.002
"""What rounding may add to C, relatively."""
CLIENTS = 6
STEPS, BATCH = 3, 3
"""Local steps and batch size, at most: clients have up to four examples, so minibatches are short, and padded."""
KEY = bytes(range(32))
HALF_ULP = 2.0**-24
ALIKE = {"randomness": "seeded", "benchmark": True}
"""Made-up clients, whose runs are compared: whatever the recipe says, both worlds draw the same."""


@dataclass(frozen=True)
class Engine:
    """A back end as a recipe's ``engine`` section asks for it. most: cases it is tried with (it is slow to start)."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None


@dataclass(frozen=True)
class Movement:
    """How far one pair of worlds is apart, in units of the bound that accounting uses for a message.

    total: m·‖difference‖ of the noiseless means. weights: the same of the released weights, None where the server's
    optimiser is not linear or a server step is a user's own. floor: what the rounding of float32 weights may add to it.
    stopped: why there is no number. refused: whether the combination was refused beforehand, by one sentence, which is
    no fault. neither: whether no world came to an end.
    """

    engine: str
    case: str
    total: float = math.nan
    weights: float | None = None
    floor: float = 0.0
    stopped: str = ""
    refused: bool = False
    neither: bool = False

    @property
    def value(self) -> float:
        """The larger of both, the weights' without their rounding; infinite where a world comes to no end."""
        if self.stopped:
            return math.nan if self.refused else math.inf
        return max(self.total, (self.weights or 0.0) - self.floor)

    @property
    def over(self) -> bool:
        """More than a message's bound, rounding included."""
        return self.value > 1 + SLACK


@dataclass(frozen=True)
class Scenario:
    """What worlds are made of: a recipe, a module and a federation whose examples give shape, classes and values.

    algorithm: instead of the recipe's, for methods under test. change: alters a prepared job before it is run; that is
    how a defect is planted.
    """

    recipe: Recipe
    module: nn.Module
    template: FederatedData
    algorithm: Algorithm | None = None
    change: Callable[[Job], None] | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases of ``cases.yaml`` that mean something for its examples and its model."""
        text = Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8")
        every = yaml.safe_load(text)["numbers" if self.template.inputs.is_floating_point() else "tokens"]
        linear = any(isinstance(layer, nn.Linear) for layer in self.module.modules())
        return tuple(Case(**fields) for fields in every if linear or fields.get("start") != "even")

    @property
    def method(self) -> Algorithm:
        """The algorithm that runs: the given one, or the recipe's."""
        return self.algorithm or algorithm_of(self.recipe)


@dataclass
class Recorder:
    """A server step that keeps the means it is given: all that leaves of the clients' messages."""

    means: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> Tensor | None:
        """The last mean; None where nothing was released."""
        return self.means[-1] if self.means else None

    def in_front_of(self, parts: RoundParts) -> RoundParts:
        """Return the parts with this step before the method's own."""
        method = parts.algorithm
        return replace(parts, algorithm=replace(method, server=(self, *method.server)))

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        """Return no slot: it only records the mean."""
        return {}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean as it is."""
        self.means.append(mean.detach().clone())
        return mean, {}


def recorded_run(recipe: Recipe, module: nn.Module, stage: Scenario | None = None, **inputs: Any) -> Recorder:
    """Return the means of a run as a user's own has them, with the key that ``simulation.run`` takes. stage: whose
    change is made in its job."""
    recorder = Recorder()

    def start(job: Job) -> None:
        if stage is not None and stage.change is not None:
            stage.change(job)
        job.parts = recorder.in_front_of(job.parts)

    simulation.run(recipe, module, on_start=start, progress=False, **inputs)
    return recorder


@dataclass(frozen=True)
class _Continued(RoundParts):
    """Parts of a run that goes on from a released state."""

    state: RoundState | None = None

    def first_state(self, shared: Tensor, threshold: float) -> RoundState:
        """Return the state to go on from, in place of round 0's."""
        return super().first_state(shared, threshold) if self.state is None else self.state


@dataclass(frozen=True)
class _Release:
    """What one world releases. scale: m over the bound of a message."""

    mean: Tensor
    shared: Tensor
    scale: float


class Aborted(RunError):
    """A round that released nothing."""


class Worlds:
    """Runs pairs of worlds of one stage, and keeps what they have in common."""

    def __init__(self, stage: Scenario) -> None:
        self.stage, self.maker = stage, Maker(stage.template)
        self._absent: dict[tuple[object, ...], _Release] = {}

    def movement(self, engine: Engine, case: Case) -> Movement:
        """Return the pair of worlds of a case, on a back end."""
        movement, absent = Movement(engine.name, case.name), None
        try:
            absent = self._without(engine, case)
            present = self._release(engine, case, self.maker.make(case.client, 0))
        except (InputError, RunError) as error:
            # A back end that dies is a fault, not a refusal.
            refused = absent is None and isinstance(error, InputError | Aborted)
            stopped = str(error).splitlines()[0]
            return replace(movement, stopped=stopped, refused=refused, neither=absent is None and not refused)
        total = present.scale * _distance(present.mean, absent.mean)
        method = self.stage.method
        server = server_of(self.stage.recipe, method)
        # A user's own server step may scale the mean, which spends nothing.
        if server.optimizer != "sgd" or server.lr is None or method.kind == "votes" or not packaged(*method.server):
            return replace(movement, total=total)
        scale = present.scale / server.lr
        lengths = sum(float(torch.linalg.vector_norm(r.shared.double())) for r in (present, absent))
        weights = scale * _distance(present.shared, absent.shared)
        return replace(movement, total=total, weights=weights, floor=scale * HALF_ULP * lengths)

    def _without(self, engine: Engine, case: Case) -> _Release:
        """Return the world in which the client has no data; the same for every kind of data it might have."""
        key = (engine.name, str(engine.settings), case.others, case.start, case.noise, case.last)
        if key not in self._absent:
            self._absent[key] = self._release(engine, case, self.maker.make("empty", 0))
        return self._absent[key]

    def _release(self, engine: Engine, case: Case, mine: Pair) -> _Release:
        state = self._later if case.start == "later" else None
        others = [self.maker.make(case.others, client) for client in range(1, CLIENTS)]
        recorder = Recorder()
        data = self.maker.federation([*others, mine] if case.last else [mine, *others])
        outcome, parts = self._run(engine, data, recorder, case, state)
        if recorder.mean is None:
            raise Aborted("the round was aborted, so nothing was released")
        # What accounting takes for the longest message, the rounding to a grid included.
        longest = parts.mechanism.longest(parts.clip.bound(outcome.state.clip))
        return _Release(recorder.mean, outcome.state.shared, parts.plan.divisor / longest)

    @functools.cached_property
    def _later(self) -> RoundState:
        """The released state after a round of ordinary data."""
        data = self.maker.everybody("ordinary", CLIENTS)
        outcome, _ = self._run(Engine("sequential"), data, Recorder(), Case("ordinary"), None, planted=False)
        return outcome.state

    def _run(
        self, engine: Engine, data: FederatedData, recorder: Recorder, case: Case, state: RoundState | None, *,
        planted: bool = True,
    ) -> tuple[Outcome, RoundParts]:  # fmt: skip
        stage = self.stage
        recipe = world_recipe(stage.recipe, CLIENTS, engine, 1 if state is None else state.round + 1, case)
        module = headless(stage.module) if case.start == "even" else stage.module
        job = prepare(recipe, module, algorithm=stage.algorithm, data=data)
        # Both worlds draw with one key, so only the client's data differ.
        job.key = KEY
        if stage.change is not None and planted:
            stage.change(job)
        job.parts = _Continued(**vars(recorder.in_front_of(job.parts)), state=state)
        try:
            with using_threads(1):
                return train(job), job.parts
        finally:
            getattr(job.backend, "close", lambda: None)()


def world_recipe(recipe: Recipe, clients: int, engine: Engine, rounds: int, case: Case) -> Recipe:
    """Return the recipe for a few clients that all take part: no noise (or σ = 1) and few local steps."""
    dump = recipe.dump()
    trust, method = dump["privacy"]["trust"], algorithm_of(recipe) if ":" not in recipe.algorithm.name else None
    cohort: dict[str, Any] = {"size": clients}
    if trust == "distributed" or (method is not None and method.kind == "ddgauss"):
        cohort["min"] = clients - 1
    if trust == "local":
        cohort["max_participations"] = rounds
    nothing: dict[str, Any] = dict.fromkeys(("epsilon", "budget", "noise_cohort", "published")) | {"protocol": "sound"}
    if (kind := dump["privacy"]["noise"]["kind"]) != "independent":
        cohort["sampling"], nothing["noise"] = "full", {"kind": kind}
    local = dump["local"]
    steps, batch = min(local["steps"] or STEPS, STEPS), min(local["batch_size"], BATCH)
    if case.start == "even":
        steps, batch = 1, 64
    changes: dict[str, Any] = {
        "rounds": rounds, "data": dump["data"] | {"clients": None, "client_test_fraction": 0.0}, "cohort": cohort,
        "local": local | {"steps": steps, "epochs": None, "batch_size": batch},
        "privacy": dump["privacy"] | nothing | ALIKE | {"noise_multiplier": 1.0 if case.noise else 0.0, "delta": 1e-5},
        "engine": {"backend": engine.name, "device": "cpu", "processes": 2, **engine.settings,
                   "precision": dump["engine"]["precision"]},
        "algorithm": _without_public_examples(dump["algorithm"], rounds),
    }  # fmt: skip
    return Recipe.of(dump | changes)


def _without_public_examples(options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return a method's options without public examples taken from clients, which would move two clients."""
    if options["name"] in ("ae-dpfl", "ae-fl"):
        queries = rounds * int(options.get("labels_per_draw", 1))
        return options | {"public": "test", "queries": queries, "student_epochs": 1}
    return options | {"public": None} if "public" in options else options


def headless(module: nn.Module) -> nn.Module:
    """Return a copy whose last linear layer is zero: every class is as likely, whatever the input."""
    copied = copy.deepcopy(module)
    zero(copied, last_linear(copied))
    return copied


def _distance(a: Tensor, b: Tensor) -> float:
    distance = float(torch.linalg.vector_norm(a.double() - b.double()))
    return distance if math.isfinite(distance) else math.inf
