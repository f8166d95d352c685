"""``fedflat plan``: what a recipe will cost and what can come of it, before anything is trained on anybody's data.

Of the data only what the guarantee takes for public is used: the form of an example, the number of clients, n̄ and the
number of classes. The module, the method and the back ends are tried on made-up examples of that form.

At best every client of a round sends the same update of norm C. Their mean has norm C, its noise σ·C·√d/m: the
signal-to-noise ratio of a round is at most m/(σ√d), whatever the data. If all T rounds went the same way, that of the
whole run would be √T times as large.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedflat.assembly.inputs import data_of
from fedflat.assembly.jobs import prepare
from fedflat.assembly.plans import public_examples, steps_of
from fedflat.assembly.tasks import suited
from fedflat.backends.choose import sum_of
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import Fixed, InputError, MinSeparation, Poisson, RunError, stream, using_threads
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.round import broadcast_of, mean_view
from fedflat.methods import noise as noising
from fedflat.privacy.accounting.factorisation import MOST_BANDED_ROUNDS, noise_in_model
from fedflat.privacy.correlated import scheduled_plan
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import FALSE_POSITIVES, true_positives
from fedflat.privacy.trust import default_min_cohort

TRIED = 16
"""Clients of a trial at most."""
STEPS, TRIES = 4, 2
"""Local steps of a trial whose cost grows in proportion to them, and how often it is timed: the best counts."""
SHOWN = 8
"""Rounds whose ε is listed, the last one included."""
DROWNED = 1.0
"""Best signal-to-noise ratio of the whole run under which the noise drowns the signal."""

Noise = Callable[[Plan], float]
"""Std of the noise in one coordinate of a round's mean, over the clip; inf where none is known."""


def best(plan: Plan, coordinates: int, noise: Noise) -> dict[str, float]:
    """Return the signal-to-noise ratio at best, m/(σ√d) over ``coordinates`` d that carry noise, of one ``round`` and
    of the whole ``run``; nothing where nothing is noised. noise: see :data:`Noise`.
    """
    std = noise(plan)
    if std == 0 or not math.isfinite(std):
        return {}
    one = 1 / (std * math.sqrt(coordinates))
    return {"round": one, "run": one * math.sqrt(plan.rounds)}


def drowning(ratio: dict[str, float]) -> str:
    """Return what to say of a run before it starts, empty where its noise leaves something to learn from."""
    if not ratio or ratio["run"] >= DROWNED:
        return ""
    return (
        f"The noise drowns the signal, and only an easy task is learnt: at best it is {1 / ratio['round']:.3g} times "
        f"as long as a round's mean update, and {1 / ratio['run']:.3g} times as long as all rounds together."
    )


FEATURES = 1280
"""Of EfficientNet-Lite, with whose linear head other models of images are compared."""
Change = tuple[str, Callable[[], Plan], int, str]
"""A change's name, what makes the plan with it before calibration, its coordinates, and what else it costs."""


def changes(plan: Plan, coordinates: int, classes: int | None) -> Iterator[Change]:
    """Yield what may help, where it applies. classes: of images whose model has no public body; None of others."""
    sampler, half, head = plan.sampler, plan.rounds // 2, (FEATURES + 1) * (classes or 0)
    apart = int(sampler.clients / sampler.size)
    if 0 < head < coordinates:
        cost = "model: {name: image-encoder, body: efficientnet-lite0}, fedflat[vision]"
        yield "a linear head on a public network", lambda: plan, head, cost
    if sampler.q < 1:
        cost = f"{1 / sampler.q:.3g} times the training and the traffic of a round"
        yield "full participation", lambda: _with(plan, _everybody(sampler)), coordinates, cost
    if sampler.q < 0.5:  # from half of the clients on, full participation is as much
        larger = "twice the training of a round"
        yield "twice the cohort", lambda: _with(plan, _times(sampler, cohort=2)), coordinates, larger
    more = "twice the clients, twice the cohort"
    yield more, lambda: _with(plan, _times(sampler, 2, 2)), coordinates, "δ stays; 0.1/M would be half of it"
    if coordinates >= 100:
        fewer = "fewer features, or a linear head on public ones"
        yield "a tenth of the parameters", lambda: plan, coordinates // 10, fewer
    if half:
        yield "half the rounds", lambda: replace(plan, rounds=half), coordinates, "half the steps"
    if plan.trust == "central" and plan.count_std is None and apart >= 2 and sampler.size == int(sampler.size):
        cost = f"no secret sampling; a client comes every {apart} rounds at most"
        yield "correlated noise, clients in turns", lambda: _in_turns(plan, apart), coordinates, cost


def _everybody(sampler: Any) -> Any:
    everybody = float(sampler.clients)
    return replace(sampler, size=everybody) if isinstance(sampler, Fixed) else Poisson(sampler.clients, everybody)


def _in_turns(plan: Plan, apart: int) -> Plan:
    """Return a public round-robin with banded noise, in place of secret coins."""
    law = MinSeparation(plan.sampler.clients, int(plan.sampler.size), apart)
    kind = "banded" if plan.rounds <= MOST_BANDED_ROUNDS else "toeplitz"
    return replace(plan, sampler=law, mechanism=scheduled_plan(law, plan.rounds, kind))


CLIP = (
    "A larger clip changes no figure here: σ and the best ratio are relative to it. It helps while most updates are "
    "clipped, and only adds noise once they are not."
)


def alternatives(plan: Plan, coordinates: int, noise: Noise, classes: int | None = None) -> list[dict[str, Any]]:
    """Return what each change would give at the plan's own ε and δ; nothing for laws other than the Gaussian sum.

    classes: of a recipe that trains another model on images than a head on a public network; None for others.
    A change that is not possible has no noise_multiplier, and the reason as its note.
    """
    target = plan.epsilon()
    if not plan.private or plan.mechanism or plan.noise_cohort or not 0 < target < math.inf:
        return []
    rows = []
    for name, make, changed, note in changes(plan, coordinates, classes):
        sigma, ratio = None, dict[str, float]()
        try:
            # Fewer parameters need no other noise.
            calibrated = plan if changed != coordinates else make().calibrated(target)
            sigma, ratio = calibrated.noise_multiplier, best(calibrated, changed, noise)
        except InputError as error:
            note = f"not possible: {error}"
        rows.append({"what": name, "noise_multiplier": sigma, "note": note, "signal_to_noise_at_best": ratio})
    return rows


def _times(sampler: Any, clients: int = 1, cohort: int = 1) -> Any:
    """Return the same law for so many times the clients, and a cohort as many times as large."""
    changed = {"clients": sampler.clients * clients, "size": sampler.size * cohort}
    if sampler.maximum is not None:
        changed["maximum"] = min(sampler.maximum * cohort, sampler.clients * clients)
    return replace(sampler, **changed)


def _with(plan: Plan, sampler: Any) -> Plan:
    """Return the plan for another cohort law, with what follows: n_min, and the adaptive clip's count noise m/20."""
    count = None if plan.count_noise is None else plan.count_noise * sampler.size / plan.sampler.size
    plan = replace(plan, sampler=sampler, count_noise=count)
    if plan.trust != "distributed":
        return plan
    return replace(plan, min_cohort=default_min_cohort(sampler, plan.rounds, plan.delta, plan.colluders))


def forecast(recipe: Recipe, trial: bool = True) -> tuple[dict[str, Any], Plan]:
    """Return what ``recipe`` will cost and what can come of it, in plain values as ``--json`` shows them, and its plan.

    why_not: why it cannot be sound; empty where it can. rounds_within_budget: before the run stops. noise_over_clip:
    expected norm of the noise in a round's mean, over C. seconds_a_round: None without a trial. memory_bytes,
    traffic_bytes: by what they are for. read: what was read of the data. says: sentences to look at first.

    trial: time local training on made-up examples.
    Raises InputError for whatever a run of it would refuse.
    """
    real = data_of(recipe, None, None)
    names, public = ("classes", "clients", "vocabulary"), public_examples(recipe, real)
    read = {"data": real.name, "input_shape": list(real.input_shape)} | {name: getattr(real, name) for name in names}
    read["examples_per_client"] = public
    method = algorithm_of(recipe)
    steps = steps_of(recipe, method, real)
    rows = public or steps * recipe.local.batch_size  # how many rows one's own clients have is private
    held = rows * real.clients * sum(t[:1].numel() * t.element_size() for t in (real.inputs, real.targets))
    data = suited(made_up(real, recipe.task, rows), recipe.task)
    del real
    few = min(steps, STEPS) if trial else steps
    short = recipe.local.model_copy(update={"steps": few, "epochs": None})
    engine = (
        recipe.engine if trial or method.kind == "votes" else recipe.engine.model_copy(update={"backend": "sequential"})
    )
    job = prepare(recipe.model_copy(update={"engine": engine, "local": short}), data=data)
    seconds, basis = _timed(job, steps, few) if trial else (None, "not measured (--no-trial)")
    plan, (outlook, says) = job.parts.plan, _outlook(recipe, job, data)
    total = None if seconds is None else seconds * plan.rounds_within_budget()
    costs = {
        "seconds_a_round": seconds, "trial": basis, "seconds": total, "memory_bytes": _memory(job, held),
        "traffic_bytes": _traffic(job.parts), "read": read, "says": says,
    }  # fmt: skip
    return outlook | costs, plan


def _outlook(recipe: Recipe, job: Job, data: FederatedData) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a recipe's public numbers tell, and sentences to look at first."""
    parts, plan = job.parts, job.parts.plan
    coordinates, noise, why = noised(job), _noise_of(recipe, job), _why_not(plan)
    ratio = best(plan, coordinates, noise)
    drowned = drowning(ratio)
    scratch = drowned and len(data.input_shape) == 3 and not getattr(job.problem.pristine, "frozen", False)
    turns = [] if plan.protocol == "published" or not plan.private else _by_round(plan)
    epsilon = None if why else turns[-1]["epsilon"]
    seeded = recipe.privacy.randomness == "seeded"  # whoever has the seed can take the noise off again
    facts = {
        "recipe": recipe.name, "algorithm": parts.algorithm.name, "sound": not why, "why_not": why,
        "clients": plan.sampler.clients, "cohort": plan.sampler.size, "q": plan.sampler.q,
        "sampling": plan.sampler.name, "rounds": plan.rounds, "rounds_within_budget": plan.rounds_within_budget(),
        "dimension": parts.layout.dimension, "noise_multiplier": plan.noise_multiplier, "trust": plan.trust,
        "epsilon": epsilon, "delta": plan.delta, "epsilon_by_round": turns,
        "true_positives": None if epsilon is None or seeded else true_positives(epsilon, plan.delta),
        "false_positives": FALSE_POSITIVES, "noise_over_clip": 1 / ratio["round"] if ratio else None,
        "signal_to_noise_at_best": ratio or None,
        "alternatives": alternatives(plan, coordinates, noise, data.classes if scratch else None),
    }  # fmt: skip
    return facts, tuple(filter(None, [*why, drowned, *plan.warnings, CLIP if drowned else ""]))


def drowned(recipe: Recipe, job: Job) -> list[str]:
    """Return what to say of a job's noise before it starts, at most one sentence."""
    sentence = drowning(best(job.parts.plan, noised(job), _noise_of(recipe, job)))
    return [f"{sentence} fedflat plan says what would help."] if sentence else []


def made_up(real: FederatedData, task: str, count: int) -> FederatedData:
    """Return random examples of the same form: every client has the same ``count`` rows, and none is anybody's."""
    tokens = real.vocabulary
    if not real.inputs.is_floating_point():
        tokens = tokens or int(real.inputs.max()) + 1
    inputs, targets = made_rows(replace(real, vocabulary=tokens), count, stream(0, "made-up examples"))
    if task == "multilabel":
        targets = (targets > 0.5).to(real.targets.dtype)
    held = max(1, count // 5) if any(map(len, real.held_back)) else 0
    rows = np.arange(count, dtype=np.int64)
    tested = real.test_inputs is not None
    return replace(
        real, inputs=inputs, targets=targets, parts=(rows,) * real.clients, held_back=(rows[:held],) * real.clients,
        test_inputs=inputs[:2] if tested else None, test_targets=targets[:2] if tested else None, names=(), most=None,
    )  # fmt: skip


def noised(job: Job) -> int:
    """Return how many coordinates of a message carry noise: all of them, or those of the round's common mask."""
    parts = job.parts
    if parts.algorithm.mask is None:
        return parts.message_length
    weights = job.initial_weights[: parts.layout.dimension]

    def update() -> torch.Tensor:
        # In place of an update of public data, whose place in a mask changes no count.
        return torch.from_numpy(stream(0, "made-up update").standard_normal(weights.numel())).to(weights.dtype)

    mask = broadcast_of(parts, parts.first_state(weights, job.threshold), job.seed, update).mask
    return parts.message_length if mask is None else max(1, int(mask.sum()))


def _noise_of(recipe: Recipe, job: Job) -> Any:
    """Return the noise of a plan: its std in a coordinate of the mean, over the clip."""
    bound = job.parts.clip.bound(job.threshold)

    def noise(plan: Plan) -> float:
        if not plan.private or job.parts.algorithm.kind == "votes" or not math.isfinite(bound):
            return math.inf
        if plan.protocol == "published":
            return plan.std(bound) / plan.divisor / bound
        if (mixing := noising.mixing_of(plan)) is not None:
            # As much in the model, over all rounds, as independent noise of this std in each of them.
            alike = noise_in_model(mixing.factor)[0] / math.sqrt((plan.rounds + 1) / 2)
            return plan.std(bound) / plan.divisor / bound * alike
        parts = replace(job.parts, plan=plan, mechanism=noising.mechanism_of(recipe, plan))
        return mean_view(parts, bound, plan.divisor, 0).std / bound

    return noise


def _why_not(plan: Plan) -> tuple[str, ...]:
    if not plan.private:
        return ("This method neither clips nor adds noise: it gives no differential privacy.",)
    if plan.protocol == "published":
        return ("privacy.protocol is published: no finite ε is proven of the procedure that runs.",)
    if not math.isfinite(plan.epsilon()):
        return ("No ε is finite: there is no noise, or too little for the accountant.",)
    return ()


def _by_round(plan: Plan) -> list[dict[str, float]]:
    turns = sorted({max(1, math.ceil(plan.rounds * k / SHOWN)) for k in range(1, SHOWN + 1)} | {min(1, plan.rounds)})
    return [{"round": turn, "epsilon": plan.epsilon(turn)} for turn in turns]


def _timed(job: Job, steps: int, few: int) -> tuple[float | None, str]:
    """Return seconds of a round, and what was measured."""
    parts = job.parts
    if parts.algorithm.kind == "votes":
        return None, "not measured: a round of votes trains each client once"
    count = max(1, min(math.ceil(parts.plan.sampler.size), TRIED))
    with using_threads(1):
        seconds = seconds_per_client(job, count)
    if not math.isfinite(seconds):
        return None, "not measured: the trial failed"
    fixed = sum(phase.steps or 0 for phase in parts.algorithm.phases)
    free = sum(phase.steps is None for phase in parts.algorithm.phases)
    per_client = seconds * (fixed + free * steps) / max(1, fixed + free * few)
    basis = f"{count} clients, {few} of {steps} local steps on made-up examples, {job.backend.name}; no noise, no test"
    basis += ", nor the body's features before round 0" if getattr(job.problem.pristine, "frozen", False) else ""
    return per_client * parts.plan.sampler.size, basis


def seconds_per_client(job: Job, clients: int) -> float:
    """Return the seconds of a client's training, clip and addition, by the job's first clients; inf if it fails."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        try:
            sum_of(job.backend, job.parts, job.initial_weights, np.arange(clients))
        except (RunError, RuntimeError, MemoryError):
            return math.inf
        times.append((time.perf_counter() - began) / clients)
    return min(times)


def _memory(job: Job, data: int) -> dict[str, int]:
    """Return bytes that are surely needed; activations, which follow the back end, are not among them."""
    parts = job.parts
    state = parts.first_state(job.initial_weights, job.threshold)
    slots = sum(slot.numel() * slot.element_size() for slot in state.slots.values())
    return {
        "data": data, "model": 4 * parts.layout.size, "server's sum": 8 * parts.message_length, "server's state": slots,
        "one client's weights, gradient and momentum": 3 * 4 * parts.layout.size,
    }  # fmt: skip


def _traffic(parts: RoundParts) -> dict[str, int]:
    """Return bytes of the vectors that a deployment sends, without headers: a round is the expected cohort's."""
    down = 4 * parts.layout.dimension * (1 + len(parts.broadcast))
    up = parts.message_length * int(getattr(parts.plan.mechanism, "bits", 32)) // 8
    return {"to a client": down, "from a client": up, "a round": round(parts.plan.sampler.size * (down + up))}
