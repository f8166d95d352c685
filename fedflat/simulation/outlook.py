"""What a plan's noise leaves of the signal, and what would help: from public numbers, each with its own calibration.

At best every client of a round sends the same update of norm C. Their mean has norm C, its noise σ·C·√d/m: the
signal-to-noise ratio of a round is at most m/(σ√d), whatever the data. If all T rounds went the same way, that of the
whole run would be √T times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedflat.core.checks import InputError
from fedflat.core.cohorts import Fixed, MinSeparation, Poisson
from fedflat.privacy.accounting.factorisation import MOST_BANDED_ROUNDS
from fedflat.privacy.correlated import scheduled_plan
from fedflat.privacy.plan import Plan
from fedflat.privacy.trust import default_min_cohort

DROWNED = 1.0
"""Best signal-to-noise ratio of the whole run under which the noise drowns the signal."""

Noise = Callable[[Plan], float]
"""Std of the noise in one coordinate of a round's mean, over the clip; inf where none is known."""


@dataclass(frozen=True)
class Best:
    """The best that a plan can do. round: signal-to-noise ratio of one round. run: of all its rounds together."""

    round: float
    run: float

    @property
    def drowned(self) -> bool:
        """Whether even the best signal is shorter than the noise after all rounds."""
        return self.run < DROWNED


def best(plan: Plan, coordinates: int, noise: Noise) -> Best | None:
    """Return at best m/(σ√d) over ``coordinates`` d that carry noise; None where nothing is noised.

    noise: see :data:`Noise`.
    """
    std = noise(plan)
    if std == 0 or not math.isfinite(std):
        return None
    one = 1 / (std * math.sqrt(coordinates))
    return Best(one, one * math.sqrt(plan.rounds - 1 + plan.first**-2))


def drowning(found: Best | None) -> str:
    """Return what to say of a run before it starts, empty where its noise leaves something to learn from."""
    if found is None or not found.drowned:
        return ""
    return (
        f"The noise drowns the signal: at best it is {1 / found.round:.3g} times as long as a round's mean update, and "
        f"{1 / found.run:.3g} times as long as all rounds together."
    )


@dataclass(frozen=True)
class Changed:
    """A setting with something changed: its plan before calibration, its coordinates, and what else it costs."""

    plan: Plan
    coordinates: int
    cost: str = ""


@dataclass(frozen=True)
class Alternative:
    """One thing that would change the outlook at the same ε and δ. noise_multiplier and best: None where impossible."""

    what: str
    noise_multiplier: float | None
    best: Best | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        ratio = {} if self.best is None else {"round": self.best.round, "run": self.best.run}
        found = {"what": self.what, "noise_multiplier": self.noise_multiplier}
        return found | {"signal_to_noise_at_best": ratio, "note": self.note}


def _full(plan: Plan, coordinates: int) -> Changed | None:
    sampler = plan.sampler
    if sampler.q >= 1:
        return None
    everybody = float(sampler.clients)
    whole = replace(sampler, size=everybody) if isinstance(sampler, Fixed) else Poisson(sampler.clients, everybody)
    more = f"{1 / sampler.q:.3g} times the training and the traffic of a round"
    return Changed(_with(plan, whole), coordinates, more)


def _larger_cohort(plan: Plan, coordinates: int) -> Changed | None:
    if plan.sampler.q >= 0.5:  # full participation is as much
        return None
    return Changed(_with(plan, _times(plan.sampler, cohort=2)), coordinates, "twice the training of a round")


def _fewer_rounds(plan: Plan, coordinates: int) -> Changed | None:
    half = plan.rounds // 2
    if half < (1 if plan.first == 1 else 2):
        return None
    first = plan.first if plan.first == 1 else plan.first * math.sqrt((plan.rounds - 1) / (half - 1))  # the same share
    return Changed(replace(plan, rounds=half, first=first), coordinates, "half the steps")


def _bands(plan: Plan, coordinates: int) -> Changed | None:
    """Return a public round-robin with banded noise, in place of secret coins."""
    sampler = plan.sampler
    apart, size = int(sampler.clients / sampler.size), int(sampler.size)
    if plan.trust != "central" or plan.count_std is not None or plan.first != 1 or apart < 2 or size != sampler.size:
        return None
    law = MinSeparation(sampler.clients, size, apart)
    kind = "banded" if plan.rounds <= MOST_BANDED_ROUNDS else "toeplitz"
    made = replace(plan, sampler=law, mechanism=scheduled_plan(law, plan.rounds, kind))
    return Changed(made, coordinates, f"no secret sampling; a client comes every {apart} rounds at most")


Maker = Callable[[Plan, int], Changed | None]
ALTERNATIVES: tuple[tuple[str, Maker], ...] = (
    ("full participation", _full),
    ("twice the cohort", _larger_cohort),
    (
        "twice the clients, twice the cohort",
        lambda plan, n: Changed(_with(plan, _times(plan.sampler, 2, 2)), n, "δ stays; 0.1/M would be half of it"),
    ),
    (
        "a tenth of the parameters",
        lambda plan, n: Changed(plan, max(1, n // 10), "for example a linear head on a public representation"),
    ),
    ("half the rounds", _fewer_rounds),
    ("correlated noise, clients in turns", _bands),
)
"""What is tried, and how the setting changes; None where it does not apply."""

PUBLIC_BODY = "a linear head on a public network"
FEATURES = 1280
"""Of EfficientNet-Lite, whose linear head is what ``on_public_body`` compares with."""


def on_public_body(classes: int) -> tuple[str, Maker]:
    """Return the change to a frozen public image network, for a recipe that trains another model on images."""

    def make(plan: Plan, coordinates: int) -> Changed | None:
        own, cost = (FEATURES + 1) * classes, "model: {name: image-encoder, body: efficientnet-lite0}, fedflat[vision]"
        return Changed(plan, own, cost) if own < coordinates else None

    return PUBLIC_BODY, make


CLIP = (
    "A larger clip changes no figure here: σ and the best ratio are relative to it. It helps while most updates are "
    "clipped, and only adds noise once they are not."
)


def alternatives(
    plan: Plan, coordinates: int, noise: Noise, makers: Sequence[tuple[str, Maker]] = ALTERNATIVES
) -> list[Alternative]:
    """Return what each change would give at the plan's own ε and δ; nothing for laws other than the Gaussian sum."""
    target = plan.epsilon()
    if not plan.private or plan.mechanism or plan.noise_cohort or not 0 < target < math.inf:
        return []
    found = []
    for what, make in makers:
        try:
            changed = make(plan, coordinates)
            if changed is None:
                continue
            same = changed.plan is plan  # fewer parameters need no other noise
            made = plan if same else changed.plan.calibrated(target)
            ratio = best(made, changed.coordinates, noise)
        except InputError as error:
            found.append(Alternative(what, None, None, f"not possible: {error}"))
            continue
        found.append(Alternative(what, made.noise_multiplier, ratio, changed.cost))
    return found


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
