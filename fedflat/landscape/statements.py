"""Evaluate what the papers prove or state for one setting (``fedflat bounds``)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fedflat.core import InputError
from fedflat.landscape import bounds


@dataclass(frozen=True)
class Setting:
    """What the statements are evaluated at, besides the theorems' constants.

    q, delta, relation: of the plan; epsilon: proven at delta, inf where nothing is. rho, keep: the method's,
    None where it has none of them. samples: N of Shi et al. 2023b. delta_tilde: δ̃ of these.
    """

    facts: bounds.Facts
    q: float
    delta: float
    epsilon: float
    relation: str = "add-remove"
    rho: float | None = None
    keep: float | None = None
    samples: int | None = None
    delta_tilde: float = 0.001


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
        "Sensitivity": _sensitivity, "Noise": _noise, "Per sample": _per_sample, "Convergence": _convergence,
    }  # fmt: skip
    return [_evaluated(name, *line) for name, section in sections.items() for line in section(setting)]


Line = tuple[str, str, float | Callable[[], float | None] | None, str | Callable[[], str]]
"""A statement without its section, and not evaluated yet: where its own condition fails, it is void."""


def _evaluated(section: str, reference: str, quantity: str, value: Any, remark: Any) -> Statement:
    try:
        value, remark = (item() if callable(item) else item for item in (value, remark))
    except InputError as error:
        value, remark = None, f"void: {error}"
    return Statement(section, reference, quantity, value, remark)


def _sensitivity(setting: Setting) -> Iterator[Line]:
    facts, rho = setting.facts, setting.rho
    twice = setting.relation == "replace-one"
    remark = "2C: a client's data are replaced" if twice else "C: a client's slot contributes nothing"
    sensitivity = facts.clip * (2 if twice else 1)
    yield "Zhang et al. 2024, Lemma 6", "of the sum of clipped updates", sensitivity, remark
    yield "Shi et al. 2023a, 2023b, Liu et al. 2025, Lemma 1", "of the mean, ÷ m", sensitivity / facts.cohort, ""
    before = "of an unclipped update, one sample changed: no client-level claim"
    if rho is not None:
        papers = "Shi et al. 2023a, Eq. 10, Shi et al. 2023b, Eq. 13"
        sam = partial(bounds.squared_sensitivity_sam, facts, rho=rho)
        yield papers, "√E S² with SAM", lambda: math.sqrt(sam()), before
    sgd = partial(bounds.squared_sensitivity_sgd, facts)
    yield "Shi et al. 2023a, under Eq. 11", "√E S² with SGD", lambda: math.sqrt(sgd()), before


def _noise(setting: Setting) -> Iterator[Line]:
    sigma = setting.facts.noise_multiplier
    parameters: dict[str, Any] = {"q": setting.q, "rounds": setting.facts.rounds, "delta": setting.delta}
    if sigma > 0:
        papers = "Shi et al. 2023a, 2023b, Eq. 13–14, Liu et al. 2025, Eq. 24"
        claimed = partial(bounds.renyi_epsilon, **parameters, noise_multiplier=sigma)
        yield papers, "ε of the formula, Poisson and one C", lambda: claimed()[0], ""
    zhang = "Zhang et al. 2024, Theorem 2"
    if not math.isfinite(setting.epsilon):
        yield zhang, "σ for a finite ε", None, "void: no finite ε is proven"
        return
    condition = cache(partial(bounds.noise_condition_001, **parameters, epsilon=setting.epsilon))
    asked = f"σ that it asks for at the proven ε = {setting.epsilon:.4g}"
    yield zhang, asked, lambda: condition().noise_multiplier, lambda: _lemma_4(condition())


def _lemma_4(condition: bounds.NoiseCondition) -> str:
    limit = f"α = {condition.order:.4g} ≤ {condition.limit:.4g}"
    holds = condition.order <= condition.limit
    return f"Lemma 4's condition holds: {limit}" if holds else f"Lemma 4's condition FAILS: not {limit}"


def _per_sample(setting: Setting) -> Iterator[Line]:
    facts = setting.facts
    if setting.rho is None:
        return
    if setting.samples is None:
        why = "void: N, the number of training examples, is not known; data.max_examples or no --dimension gives it"
        yield "Shi et al. 2023b, Theorems 4, 5", "generalisation", None, why
        return
    cohort = min(setting.samples, max(1, round(facts.cohort)))
    parameters: dict[str, Any] = {"samples": setting.samples, "cohort": cohort, "delta_tilde": setting.delta_tilde}
    step = cache(partial(bounds.sample_round_privacy, facts, rho=setting.rho, **parameters))
    risk = cache(lambda: bounds.generalization_bound(step(), rounds=facts.rounds, **parameters))

    def probability() -> str:
        return f"with probability > {risk()[1]:.3g}" if risk()[1] > 0 else "void: no positive probability"

    paper = "Shi et al. 2023b, Theorem"
    yield f"{paper} 4", "ε̃ of one round", lambda: step().epsilon, lambda: f"δ = {step().delta:.3g}, δ̃ given"
    yield f"{paper} 5", "risk gap under", lambda: risk()[0] if risk()[1] > 0 else None, probability


def _convergence(setting: Setting) -> Iterator[Line]:
    sam = partial(bounds.dp_fedsam, setting.facts, rho=setting.rho or 0.0)
    papers = {"Shi et al. 2023a, Theorem 3 (DP-FedSAM)": (sam(), "")}
    if setting.keep is not None:
        unsound = "noise on a client's own mask only, which is not sound"
        papers["Shi et al. 2023b, Theorem 3 (top_k)"] = sam(keep=setting.keep), unsound
    for reference, ((terms, ratios), remark) in papers.items():
        yield from ((reference, term, value, "") for term, value in terms.items())
        yield reference, "sum", math.fsum(terms.values()), remark
        yield from ((reference, f"asked for: {ratio}; here", value, "") for ratio, value in ratios.items())
    yield from ((reference, "its terms, not computed", None, terms) for reference, terms in NOT_COMPUTED.items())


NOT_COMPUTED = {
    "Zhang et al. 2024, Theorem 1 (DP2-FedSAM)": "lost in the text",
    "Liu et al. 2025, Theorem 1 (DP-FedPGN)": "√(LΔσ_l²/(mKT)) + LΔ/T + σ²C²/m², Δ = f(w¹) − f*",
    "Cheng et al. 2022, Theorem 2 (BLUR, LUS)": "1/(η_gη_lQT) + η_l²Q² + η_gη_l/P + η_gσ²S²d/(η_lQP²)",
}
