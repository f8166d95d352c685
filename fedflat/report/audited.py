"""What audits of a run found (``audit.json``), beside what is claimed and what is proven."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedflat.report import tables
from fedflat.report.metrics import Record, Run, number

AUDIT = "audit.json"  # written by ``fedflat audit RUN``
ABOUT = {
    "mechanism": "one round of the method, in the audit's fixed configuration",
    "one-run": "the whole run, trained once more with canary clients",
    "canaries": "the whole run, trained once more with canary clients",
    "defect": "a planted defect",
}
RULE = (
    "A lower bound is what leaks at least, except with the probability left by its confidence; it proves no guarantee. "
    "An estimate bounds nothing. The claimed and proven ε of a row are those of what that audit looked at."
)


def audited_text(audit: Record) -> str:
    """``≥ 1.23`` for a lower bound, ``≈ 1.23`` for an estimate, a dash where there is neither."""
    bound, estimate = number(audit.get("lower_bound")), number(audit.get("estimate"))
    if bound is not None:
        return f"≥ {tables.epsilon_text(bound)}"
    return "–" if estimate is None else f"≈ {tables.epsilon_text(estimate)}"


def confidence_text(audit: Record) -> str:
    """``95 %``; an estimate has none."""
    found = number(audit.get("confidence"))
    return "none (estimate)" if found is None else f"{100 * found:.10g} %"


def exceeded(audit: Record) -> bool:
    """The audit found more than is proven, or the contract on sensitivity broken."""
    return audit.get("exceeds_proven") is True


def verdict(audit: Record) -> str:
    """One reading of the numbers, in a few words."""
    bound, proven = number(audit.get("lower_bound")), number(audit.get("proven"))
    if audit.get("kind") == "defect":
        return "found: over the claim" if audit.get("exceeds_claimed") is True else "missed"
    if exceeded(audit):
        over = bound is not None and proven is not None and bound > proven
        return "over the proven ε" if over else "contract 2b broken"
    if bound is None:
        return "an estimate, no bound"
    return "within the proof" if proven is not None else "nothing is proven"


def of_whole_run(run: Run) -> list[Record]:
    """The audits that look at the whole run: the only ones that compare with the run's own ε."""
    return [audit for audit in run.audits if audit.get("kind") in ("one-run", "canaries")]


def short(run: Run) -> str:
    """The run's audited ε in a few words: the largest lower bound, otherwise the largest estimate; empty without."""
    found = of_whole_run(run)
    bounds = [audit for audit in found if number(audit.get("lower_bound")) is not None]
    if bounds:
        best = max(bounds, key=lambda audit: number(audit.get("lower_bound")) or 0.0)
        return f"{audited_text(best)} at {confidence_text(best)} confidence"
    guesses = [audit for audit in found if number(audit.get("estimate")) is not None]
    if guesses:
        return f"{audited_text(max(guesses, key=lambda audit: number(audit.get('estimate')) or 0.0))} (estimate)"
    return ""


def cells(audit: Record) -> list[str]:
    """An audit as a table row: what was audited, claimed, proven, audited, confidence, verdict."""
    claimed, proven = (tables.epsilon_text(number(audit.get(key))) for key in ("claimed", "proven"))
    return [str(audit.get("kind")), claimed, proven, audited_text(audit), confidence_text(audit), verdict(audit)]


HEADS = ("Audit", "ε claimed", "ε proven", "ε audited", "confidence", "verdict")


def notes_html(audits: Sequence[Record]) -> str:
    """What each kind looked at and rests on, as lists; a broken contract comes first."""
    parts = [f'<p class="rule">{escape(RULE)}</p>']
    for audit in audits:
        kind = str(audit.get("kind"))
        facts = [ABOUT.get(kind, ""), f"canary: {audit.get('canary')}", f"statistic: {audit.get('statistic')}"]
        lines = [f"Contract 2b broken: {text}" for text in _texts(audit, "violations")] + _texts(audit, "assumptions")
        listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
        head = f"{kind}, {audit.get('method')}: what it rests on"
        about = escape("; ".join(fact for fact in facts if fact and not fact.endswith(": None")))
        parts.append(
            f'<details class="fold"><summary>{escape(head)}</summary><p>{about}.</p><ul>{listed}</ul></details>'
        )
    return "".join(parts)


def _texts(audit: Record, key: str) -> list[str]:
    found = audit.get(key)
    return [str(item) for item in found] if isinstance(found, list) else []
