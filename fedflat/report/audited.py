"""What audits of a run found (``audit.json``), beside what is claimed and what is proven."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fedflat.report import tables
from fedflat.report.metrics import Record, Run, number

AUDIT = "audit.json"  # written by ``fedflat audit RUN``
NARROW = 11
ABOUT = {
    "worlds": "a few clients, one of them with hostile data or none, on every back end that applies",
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
    """``≥ 1.23`` for a lower bound, ``≈ 1.23`` for an estimate, ``1.000 C`` for a movement, a dash for nothing."""
    if "movement" in _details(audit):
        return "–" if audit.get("runs") == 0 else _times(_details(audit)["movement"])
    bound, estimate = number(audit.get("lower_bound")), number(audit.get("estimate"))
    if bound is not None:
        return f"≥ {tables.epsilon_text(bound)}"
    return "–" if estimate is None else f"≈ {tables.epsilon_text(estimate)}"


def confidence_text(audit: Record) -> str:
    """``95 %``; an estimate has none, and a movement needs none."""
    if "movement" in _details(audit):
        return "–"
    found = number(audit.get("confidence"))
    return "none (estimate)" if found is None else f"{100 * found:.10g} %"


def exceeded(audit: Record) -> bool:
    """The audit found more than is proven, or the contract on sensitivity broken."""
    return audit.get("exceeds_proven") is True


def verdict(audit: Record) -> str:
    """One reading of the numbers, in a few words."""
    bound, proven = number(audit.get("lower_bound")), number(audit.get("proven"))
    moved = "movement" in _details(audit)
    if audit.get("kind") == "defect":
        return "missed" if not seen(audit) else "found: over C" if moved else "found: over the claim"
    if moved:
        return "over C" if exceeded(audit) else "not run" if audit.get("runs") == 0 else "within C"
    if exceeded(audit):
        over = bound is not None and proven is not None and bound > proven
        return "over the proven ε" if over else "contract 2b broken"
    if bound is None:
        return "an estimate, no bound"
    return "within the proof" if proven is not None else "nothing is proven"


def seen(audit: Record) -> bool:
    """Whether the audit of a planted defect found it out."""
    return bool(audit.get("violations")) if "movement" in _details(audit) else audit.get("exceeds_claimed") is True


def greatest(run: Run) -> str:
    """The greatest movement over C of the run's worlds, in a few words; empty where nobody audited them."""
    found = [audit for audit in run.audits if audit.get("kind") == "worlds" and audit.get("runs")]
    if not found:
        return ""
    facts = _details(found[-1])
    return f"{audited_text(found[-1])} at most, {facts.get('back_end')}, {facts.get('data')}"


def matrix(audit: Record) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of a worlds audit: data by back end, each cell a movement over C; both empty for other kinds."""
    table = _details(audit).get("table")
    if not isinstance(table, dict) or not table:
        return [], []
    engines = list(dict.fromkeys(engine for row in table.values() for engine in row))
    rows = [[str(data), *(_number_text(row, engine) for engine in engines)] for data, row in table.items()]
    return ["Data (client | others)", *engines], rows


def remarks(audit: Record) -> list[str]:
    """What a worlds audit did not do, and why, one sentence each."""
    facts = _details(audit)
    refused = facts.get("refused")
    said = [f"{engine}: {reason}" for engine, reason in refused.items()] if isinstance(refused, dict) else []
    if left := facts.get("left_out"):
        said.append(f"{left} pairs were left out to end in time; fedflat audit --kind worlds runs all.")
    return said


def matrix_text(audit: Record) -> list[str]:
    """The matrix in at most 80 columns, and the remarks."""
    heads, rows = matrix(audit)
    if not heads:
        return []
    wide = 78 - (NARROW + 1) * min(len(heads) - 1, 4)
    lines = []
    for start in range(1, len(heads), 4):
        for row in [heads, *rows]:
            numbers = "".join(f" {cell.replace('vectorized', 'vect.'):>{NARROW}}" for cell in row[start : start + 4])
            lines.append(f"  {row[0]:{wide}.{wide}}{numbers}".rstrip())
    for text in remarks(audit):
        lines += textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="    ")
    return ["", *lines, ""]


def _number_text(row: Record, engine: str) -> str:
    if engine not in row:
        return "–"
    return _times(row[engine]).removesuffix(" C")


def _times(value: object) -> str:
    """``1.000 C``; JSON's null is no finite number: only one of both worlds came to an end."""
    found = number(value)
    if found is None:
        return "∞ C"
    return f"{found:.3f} C" if found < 100 else f"{found:.1e} C"


def _details(audit: Record) -> Record:
    found = audit.get("details")
    return found if isinstance(found, dict) else {}


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


HEADS = ("Audit", "ε claimed", "ε proven", "audited", "confidence", "verdict")


def notes(audits: Sequence[Record]) -> list[dict[str, Any]]:
    """What each kind looked at and rests on: head, about, lines; a broken contract comes first."""
    found = []
    for audit in audits:
        kind = str(audit.get("kind"))
        facts = [ABOUT.get(kind, ""), f"canary: {audit.get('canary')}", f"statistic: {audit.get('statistic')}"]
        broken = "" if "movement" in _details(audit) else "Contract 2b broken: "
        lines = [broken + text for text in _texts(audit, "violations")] + remarks(audit) + _texts(audit, "assumptions")
        about = "; ".join(fact for fact in facts if fact and not fact.endswith(": None"))
        found.append({"head": f"{kind}, {audit.get('method')}: what it rests on", "about": about, "lines": lines})
    return found


def _texts(audit: Record, key: str) -> list[str]:
    found = audit.get(key)
    return [str(item) for item in found] if isinstance(found, list) else []
