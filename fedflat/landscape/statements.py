"""Evaluate what the papers prove or state for one setting (``fedflat bounds``), and what a round costs a client."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.types import Algorithm, ClientView, Phase, broadcast_by
from fedflat.landscape import bounds
from fedflat.landscape.bounds import Facts, Terms

FLOAT = 4
"""Bytes of a coordinate of what is sent and received."""
_SMALL = 8
"""Length of the vector on which pieces are tried out."""


@dataclass(frozen=True)
class Cost:
    """One round of one client.

    per_step: gradient passes of a local step of the shared part: 1 for SGD, 2 for SAM. passes: minibatch gradients in
    all, phases and transforms together. up, down: bytes of dense float32 vectors: the message, and the shared weights
    with what the server's steps broadcast. Compression, encryption and votes are not in it.
    """

    per_step: int
    passes: int
    up: int
    down: int


def cost_of(method: Algorithm, dimension: int, steps: int, batches: int = 1) -> Cost:
    """Return the cost of a round of ``method`` with d = ``dimension`` shared parameters and K = ``steps``.

    batches: minibatches in a client's data; a transform that asks for the gradient of the full local loss (LUS) costs
    as many passes. Pieces are tried on a vector of ones, so those that pass more often on some data count as on that.
    """
    phases = [(count_passes(phase, method), steps if phase.steps is None else phase.steps) for phase in method.phases]
    gradient, update = _Counter(), torch.ones(_SMALL)
    view = replace(_view(method), gradient=gradient, examples=lambda: torch.ones(1))
    for transform in method.transforms:
        update = transform(update, view)
    sent = len(broadcast_by((*method.server, method.optimizer)))
    return Cost(
        per_step=count_passes(method.shared_phase, method),
        passes=sum(passes * count for passes, count in phases) + batches * gradient.asked,
        up=FLOAT * dimension * method.vectors,
        down=FLOAT * dimension * (1 + sent) + (math.ceil(dimension / 8) if method.mask is not None else 0),
    )


def count_passes(phase: Phase, method: Algorithm) -> int:
    """Return how often one local step of a phase asks for the minibatch's gradient."""
    if phase.rule is None:
        return 1
    gradient = _Counter()
    phase.rule(gradient, _view(method))(torch.ones(_SMALL))
    return gradient.asked


class _Counter:
    """A gradient of ones that counts how often it is asked for, at given weights or at the view's own."""

    asked = 0

    def __call__(self, weights: Tensor | None = None) -> Tensor:
        self.asked += 1
        return torch.ones(_SMALL) if weights is None else torch.ones_like(weights)


def _view(method: Algorithm) -> ClientView:
    ones = torch.ones(_SMALL)
    names = broadcast_by((*method.server, method.optimizer))
    return ClientView(
        start=torch.zeros(_SMALL), clip=1.0, steps=1, lr=0.1,
        broadcast=dict.fromkeys(names, ones), state={state.name: ones for state in method.client_state},
        tensors=(slice(0, _SMALL - 1), slice(_SMALL - 1, _SMALL)), shares=lambda k: torch.full((k,), 1 / k),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What the statements are evaluated at, besides the theorems' constants.

    q, delta, relation: of the plan; epsilon: proven at delta, inf where nothing is. rho, lam, beta, keep: the method's,
    None where it has none of them. samples: N of Shi et al. 2023b. delta_tilde: δ̃ of these. cost: of a round.
    """

    facts: Facts
    q: float
    delta: float
    epsilon: float
    relation: str = "add-remove"
    rho: float | None = None
    lam: float | None = None
    beta: float | None = None
    keep: float | None = None
    samples: int | None = None
    delta_tilde: float = 0.001
    cost: Cost | None = None


@dataclass(frozen=True)
class Statement:
    """One value. reference: paper and number. value: None where the statement is void; said: why, or what it means."""

    section: str
    reference: str
    what: str
    value: float | None
    said: str = ""


def statements(setting: Setting) -> list[Statement]:
    """Return every statement of the papers that has a value at this setting, in the order of the sections."""
    sections = {
        "Sensitivity": _sensitivity, "Noise": _noise, "Per sample": _per_sample, "BLUR": _drift,
        "Convergence": _convergence, "Cost of a round, for each client": _cost,
    }  # fmt: skip
    return [Statement(name, *each) for name, section in sections.items() for each in section(setting)]


Line = tuple[str, str, float | None, str]
"""A statement without its section."""


def _tried(reference: str, what: str, value: Callable[[], float], said: str = "") -> Line:
    """Return the statement, void where its own condition fails."""
    try:
        return reference, what, value(), said
    except InputError as error:
        return reference, what, None, f"void: {error}"


def _sensitivity(setting: Setting) -> Iterator[Line]:
    facts, rho = setting.facts, setting.rho
    twice = setting.relation == "replace-one"
    said = "2C: a client's data are replaced" if twice else "C: a client's slot contributes nothing"
    whole = facts.clip * (2 if twice else 1)
    yield "Zhang et al. 2024, Lemma 6", "of the sum of clipped updates", whole, said
    yield "Shi et al. 2023a, 2023b, Liu et al. 2025, Lemma 1", "of the mean, ÷ m", whole / facts.cohort, ""
    before = "of an unclipped update, one sample changed: no client-level claim"
    if rho is not None:
        papers = "Shi et al. 2023a, Eq. 10, Shi et al. 2023b, Eq. 13"
        sam = partial(bounds.squared_sensitivity_sam, facts, rho=rho)
        yield _tried(papers, "√E S² with SAM", lambda: math.sqrt(sam()), before)
    sgd = partial(bounds.squared_sensitivity_sgd, facts)
    yield _tried("Shi et al. 2023a, under Eq. 11", "√E S² with SGD", lambda: math.sqrt(sgd()), before)


def _noise(setting: Setting) -> Iterator[Line]:
    sigma = setting.facts.noise_multiplier
    known: dict[str, Any] = {"q": setting.q, "rounds": setting.facts.rounds, "delta": setting.delta}
    if sigma > 0:
        papers = "Shi et al. 2023a, 2023b, Eq. 13–14, Liu et al. 2025, Eq. 24"
        claimed = partial(bounds.renyi_epsilon, **known, noise_multiplier=sigma)
        yield _tried(papers, "ε of the formula, Poisson and one C", lambda: claimed()[0])
    zhang, cheng = "Zhang et al. 2024, Theorem 2", "Cheng et al. 2022, Theorem 1"
    if not math.isfinite(setting.epsilon):
        yield f"{zhang}, {cheng}", "σ for a finite ε", None, "void: no finite ε is proven"
        return
    known["epsilon"] = setting.epsilon
    at = f"at the proven ε = {setting.epsilon:.4g}"
    try:
        found = bounds.noise_condition_001(**known)
    except InputError as error:
        yield zhang, f"σ that it asks for {at}", None, f"void: {error}"
    else:
        limit = f"α = {found.order:.4g} ≤ {found.limit:.4g}"
        holds = f"Lemma 4's condition holds: {limit}" if found.holds else f"Lemma 4's condition FAILS: not {limit}"
        yield zhang, f"σ that it asks for {at}", found.noise_multiplier, holds
    least = partial(bounds.noise_multiplier_004, **known)
    yield _tried(cheng, f"σ with c₂ = 1 {at}", least, "the theorem says only that c₁ and c₂ exist")
    if sigma > 0:
        yield _tried(cheng, "c₂ that the proven σ amounts to", lambda: sigma / least())


def _per_sample(setting: Setting) -> Iterator[Line]:
    facts, both = setting.facts, "Shi et al. 2023b, Theorems 4, 5"
    if setting.rho is None:
        return
    if setting.samples is None:
        why = "void: N, the number of training examples, is not known; data.max_examples or no --dimension gives it"
        yield both, "generalisation", None, why
        return
    cohort = min(setting.samples, max(1, round(facts.cohort)))
    known: dict[str, Any] = {"samples": setting.samples, "cohort": cohort, "delta_tilde": setting.delta_tilde}
    try:
        step = bounds.sample_round_privacy(facts, rho=setting.rho, **known)
        given = f"δ = {step.delta:.3g}, δ̃ given"
        yield "Shi et al. 2023b, Theorem 4", "ε̃ of one round", step.epsilon, given
        gap, probability = bounds.generalization_bound(step, rounds=facts.rounds, **known)
    except InputError as error:
        yield both, "generalisation", None, f"void: {error}"
        return
    sure = f"with probability > {probability:.3g}" if probability > 0 else "void: no positive probability"
    yield "Shi et al. 2023b, Theorem 5", "risk gap under", gap if probability > 0 else None, sure


def _drift(setting: Setting) -> Iterator[Line]:
    if setting.lam is None:
        return
    far = partial(bounds.discounts_004, [True] * setting.facts.steps, lam=setting.lam, lr=setting.facts.lr)
    lemma, exact = "Cheng et al. 2022, Lemma 2", "by unrolling the steps: the first, not the last, is discounted most"
    last = "discount of the last step, all far, as printed"
    yield _tried(lemma, last, lambda: float(far()[0][-1]), "(1 − λη)^(Q−1)")
    yield _tried(lemma, "discount of the first step, all far, exact", lambda: float(far()[1][0]), exact)


def _convergence(setting: Setting) -> Iterator[Line]:
    facts, sam = setting.facts, partial(bounds.dp_fedsam, setting.facts, rho=setting.rho or 0.0)
    yield from _terms("Shi et al. 2023a, Theorem 3 (DP-FedSAM)", sam())
    if setting.keep is not None:
        unsound = "noise on a client's own mask only, which is not sound"
        yield from _terms("Shi et al. 2023b, Theorem 3 (top_k)", sam(keep=setting.keep), unsound)
    yield "Zhang et al. 2024, Theorem 1 (DP2-FedSAM)", "lost in the text", None, ""
    yield from _terms("Liu et al. 2025, Theorem 1 (DP-FedPGN)", bounds.dp_fedpgn(facts, beta=setting.beta))
    yield from _terms("Cheng et al. 2022, Theorem 2 (BLUR, LUS)", bounds.blur_lus(facts))
    if math.isfinite(setting.epsilon):
        found = bounds.blur_lus_at(facts, epsilon=setting.epsilon, delta=setting.delta)
        yield from _terms("Cheng et al. 2022, Corollary 1", found, "with Theorem 1's σ at the proven ε")


def _terms(reference: str, found: Terms, said: str = "") -> Iterator[Line]:
    for term, value in found.terms.items():
        yield reference, term, value, ""
    yield reference, "sum", found.total, said
    for ratio, value in found.ratios.items():
        yield reference, f"asked for: {ratio}; here", value, ""


def _cost(setting: Setting) -> Iterator[Line]:
    if setting.cost is not None:
        table, dense = "Liu et al. 2025, Table I", "dense float32, before encryption"
        yield table, "gradient passes of a local step", setting.cost.per_step, ""
        yield table, "gradient passes in all", setting.cost.passes, ""
        yield dense, "bytes sent", setting.cost.up, ""
        yield dense, "bytes received", setting.cost.down, ""
