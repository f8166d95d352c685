"""Everything the papers prove or state, evaluated for one setting: what ``fedflat bounds`` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedflat.analysis import bounds, convergence
from fedflat.analysis.convergence import Facts, Terms
from fedflat.core.checks import InputError
from fedflat.engine.cost import Cost


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
    """Every statement of the papers that has a value at this setting, in the order of the sections."""
    parts = (_sensitivity, _noise, _per_sample, _drift, _convergence, _cost)
    return [found for part in parts for found in part(setting)]


def _tried(section: str, reference: str, what: str, value: Callable[[], float], said: str = "") -> Statement:
    """The statement, void where its own condition fails."""
    try:
        return Statement(section, reference, what, value(), said)
    except InputError as error:
        return Statement(section, reference, what, None, f"void: {error}")


def _sensitivity(setting: Setting) -> Iterator[Statement]:
    facts, name = setting.facts, "Sensitivity"
    twice = setting.relation == "replace-one"
    said = "2C: a client's data are replaced" if twice else "C: a client's slot contributes nothing"
    whole = facts.clip * (2 if twice else 1)
    yield Statement(name, "Zhang et al. 2024, Lemma 6", "of the sum of clipped updates", whole, said)
    yield Statement(name, "Shi et al. 2023a, 2023b, Liu et al. 2025, Lemma 1", "of the mean, ÷ m", whole / facts.cohort)
    before = "of an unclipped update, one sample changed: no client-level claim"
    if setting.rho is not None:
        rho = setting.rho

        def sam() -> float:
            return math.sqrt(
                bounds.squared_sensitivity_sam(lr=facts.lr, steps=facts.steps, smoothness=facts.smoothness, rho=rho)
            )

        yield _tried(name, "Shi et al. 2023a, Eq. 10, Shi et al. 2023b, Eq. 13", "√E S² with SAM", sam, before)

    def sgd() -> float:
        squared = bounds.squared_sensitivity_sgd(
            lr=facts.lr, steps=facts.steps, smoothness=facts.smoothness, gradient_std=facts.local_std
        )
        return math.sqrt(squared)

    yield _tried(name, "Shi et al. 2023a, under Eq. 11", "√E S² with SGD", sgd, before)


def _noise(setting: Setting) -> Iterator[Statement]:
    facts, name = setting.facts, "Noise"
    private = facts.noise_multiplier > 0

    def claimed() -> float:
        return bounds.renyi_epsilon(
            q=setting.q, rounds=facts.rounds, noise_multiplier=facts.noise_multiplier, delta=setting.delta
        )[0]

    if private:
        yield _tried(
            name,
            "Shi et al. 2023a, 2023b, Eq. 13–14, Liu et al. 2025, Eq. 24",
            "ε of the formula, Poisson and one C",
            claimed,
        )
    if not math.isfinite(setting.epsilon):
        yield Statement(
            name,
            "Zhang et al. 2024, Theorem 2, Cheng et al. 2022, Theorem 1",
            "σ for a finite ε",
            None,
            "void: no finite ε is proven",
        )
        return
    at = f"at the proven ε = {setting.epsilon:.4g}"
    known = {"q": setting.q, "rounds": facts.rounds, "epsilon": setting.epsilon, "delta": setting.delta}
    try:
        found = bounds.noise_condition_001(**known)  # type: ignore[arg-type]
    except InputError as error:
        yield Statement(name, "Zhang et al. 2024, Theorem 2", f"σ that it asks for {at}", None, f"void: {error}")
    else:
        limit = f"α = {found.order:.4g} ≤ {found.limit:.4g}"
        holds = f"Lemma 4's condition holds: {limit}" if found.holds else f"Lemma 4's condition FAILS: not {limit}"
        yield Statement(name, "Zhang et al. 2024, Theorem 2", f"σ that it asks for {at}", found.noise_multiplier, holds)
    yield _tried(
        name, "Cheng et al. 2022, Theorem 1", f"σ with c₂ = 1 {at}", lambda: bounds.noise_multiplier_004(**known),  # type: ignore[arg-type]
        "the theorem says only that c₁ and c₂ exist",
    )  # fmt: skip
    if private:
        yield _tried(
            name, "Cheng et al. 2022, Theorem 1", "c₂ that the proven σ amounts to",
            lambda: bounds.constant_004(facts.noise_multiplier, **known),  # type: ignore[arg-type]
        )  # fmt: skip


def _per_sample(setting: Setting) -> Iterator[Statement]:
    facts, name = setting.facts, "Per sample"
    if setting.rho is None:
        return
    if setting.samples is None:
        why = "void: N, the number of training examples, is not known; data.max_examples or no --dimension gives it"
        yield Statement(name, "Shi et al. 2023b, Theorems 4, 5", "generalisation", None, why)
        return
    samples, cohort = setting.samples, min(setting.samples, max(1, round(facts.cohort)))
    common = {"samples": samples, "cohort": cohort, "rounds": facts.rounds, "delta_tilde": setting.delta_tilde}
    try:
        step = bounds.sample_round_privacy(
            smoothness=facts.smoothness, rho=setting.rho, noise_multiplier=facts.noise_multiplier, clip=facts.clip,
            dimension=facts.dimension, **common,  # type: ignore[arg-type]
        )  # fmt: skip
        yield Statement(
            name, "Shi et al. 2023b, Theorem 4", "ε̃ of one round", step.epsilon, f"δ = {step.delta:.3g}, δ̃ given"
        )
        found = bounds.generalization_bound(step, **common)  # type: ignore[arg-type]
    except InputError as error:
        yield Statement(name, "Shi et al. 2023b, Theorems 4, 5", "generalisation", None, f"void: {error}")
        return
    sure = f"with probability > {found.probability:.3g}" if found.probability > 0 else "void: no positive probability"
    yield Statement(
        name, "Shi et al. 2023b, Theorem 5", "risk gap under", found.gap if found.probability > 0 else None, sure
    )


def _drift(setting: Setting) -> Iterator[Statement]:
    if setting.lam is None:
        return
    facts, lam, name = setting.facts, setting.lam, "BLUR"

    def first(which: int) -> Callable[[], float]:
        far = [True] * facts.steps
        return lambda: float(bounds.discounts_004(far, lam=lam, lr=facts.lr)[which][0 if which else -1])

    yield _tried(
        name, "Cheng et al. 2022, Lemma 2", "discount of the last step, all far, as printed", first(0), "(1 − λη)^(Q−1)"
    )
    yield _tried(
        name, "Cheng et al. 2022, Lemma 2", "discount of the first step, all far, exact", first(1),
        "by unrolling the steps: the first, not the last, is discounted most",
    )  # fmt: skip


def _convergence(setting: Setting) -> Iterator[Statement]:
    facts = setting.facts
    yield from _terms("Shi et al. 2023a, Theorem 3 (DP-FedSAM)", convergence.dp_fedsam(facts, rho=setting.rho or 0.0))
    if setting.keep is not None:
        found = convergence.dp_fedsam(facts, rho=setting.rho or 0.0, keep=setting.keep)
        yield from _terms(
            "Shi et al. 2023b, Theorem 3 (top_k)", found, "noise on a client's own mask only, which is not sound"
        )
    yield Statement("Convergence", "Zhang et al. 2024, Theorem 1 (DP2-FedSAM)", "lost in the text", None)
    yield from _terms("Liu et al. 2025, Theorem 1 (DP-FedPGN)", convergence.dp_fedpgn(facts, beta=setting.beta))
    yield from _terms("Cheng et al. 2022, Theorem 2 (BLUR, LUS)", convergence.blur_lus(facts))
    if math.isfinite(setting.epsilon):
        found = convergence.blur_lus_at(facts, epsilon=setting.epsilon, delta=setting.delta)
        yield from _terms("Cheng et al. 2022, Corollary 1", found, "with Theorem 1's σ at the proven ε")


def _cost(setting: Setting) -> Iterator[Statement]:
    if setting.cost is None:
        return
    name, table = "Cost of a round, for each client", "Liu et al. 2025, Table I"
    yield Statement(name, table, "gradient passes of a local step", setting.cost.per_step)
    yield Statement(name, table, "gradient passes in all", setting.cost.passes)
    yield Statement(name, "dense float32, before encryption", "bytes sent", setting.cost.up)
    yield Statement(name, "dense float32, before encryption", "bytes received", setting.cost.down)


def _terms(reference: str, found: Terms, said: str = "") -> Iterator[Statement]:
    for term, value in found.terms.items():
        yield Statement("Convergence", reference, term, value)
    yield Statement("Convergence", reference, "sum", found.total, said)
    for ratio, value in found.ratios.items():
        yield Statement("Convergence", reference, f"asked for: {ratio}; here", value)
