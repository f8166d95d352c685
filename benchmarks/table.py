"""The Markdown table of a report."""

from __future__ import annotations

from typing import Any

TARGETS = [
    ("W1", "fedflat", "pfl", 1.7),
    ("W1", "fedflat", "pfl-tuned", 1.1),
    ("W1", "fedflat-bf16", "pfl", 2.5),
    ("W2", "fedflat", "pfl", 12.0),
    ("W2", "fedflat", "limit", 0.3),
    ("W3", "fedflat", "limit", 0.9),
    ("W4", "fedflat", "pfl-tuned", 12.0),
    ("W4", "fedflat", "limit", 0.3),
]
"""(workload, ours, other, how many times as fast as the other ours should be)."""


def markdown(report: dict[str, Any]) -> str:
    """Seconds per round, ratios to fedflat, and the targets."""
    machine = report["machine"]
    lines = ["# Seconds per round", ""]
    lines.append(
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores; load before: "
        f"{machine['load_before']:.1f}. "
        f"Systems take turns, {report['rounds']} rounds each; "
        "only ratios within one table mean anything."
    )
    lines += ["", report["note"]] if report.get("note") else []
    for name, found in report["workloads"].items():
        lines += [
            "",
            f"## {name}: {found['workload']['text']}",
            "",
            "| system | min | median | ours is faster by | how |",
        ]
        lines += ["|---|---|---|---|---|"]
        ours = found["systems"].get("fedflat", {}).get("median")
        for system, entry in found["systems"].items():
            lines.append(_row(system, entry, ours))
        skipped = found["workload"]["without"]
        if skipped:
            lines += ["", f"Not run: {', '.join(skipped)}."]
    lines += _targets(report) + _extras(report)
    return "\n".join(lines) + "\n"


def _row(system: str, entry: dict[str, Any], ours: float | None) -> str:
    if "median" not in entry:
        return f"| {system} | – | – | – | failed: {entry.get('error', '')[-60:]!r} |"
    facts, ratio = entry.get("facts", {}), "" if ours is None else f"{entry['median'] / ours:.2f}"
    how = facts.get("backend", "")
    if facts.get("block"):
        how += f", blocks of {facts['block']}"
    how = how or f"threads: {facts.get('threads', '?')}"
    return f"| {system} | {entry['min']:.4f} | {entry['median']:.4f} | {ratio} | {how} |"


def ratio(report: dict[str, Any], workload: str, ours: str, other: str) -> float | None:
    """How many times as fast as ``other`` ours is, by medians; None where one is missing."""
    systems = report["workloads"].get(workload, {}).get("systems", {})
    mine, theirs = systems.get(ours, {}).get("median"), systems.get(other, {}).get("median")
    return theirs / mine if mine and theirs else None


def _targets(report: dict[str, Any]) -> list[str]:
    rows = []
    for workload, ours, other, least in TARGETS:
        found = ratio(report, workload, ours, other)
        if found is not None:
            met = "yes" if found >= least else "no"
            rows.append(f"| {workload}: {ours} against {other} | {least:g} | {found:.2f} | {met} |")
    for plain, sam in (("W1", "W5"), ("W3", "W6")):
        times = [
            report["workloads"].get(w, {}).get("systems", {}).get("fedflat", {}).get("median") for w in (plain, sam)
        ]
        if all(times):
            cost = times[1] / times[0]
            rows.append(
                f"| SAM against SGD ({sam}/{plain}) | ≤ 2.05 | {cost:.2f} | {'yes' if cost <= 2.05 else 'no'} |"
            )
    stages = report["workloads"].get("W4", {}).get("systems", {}).get("fedflat", {}).get("facts", {}).get("stages")
    if stages:
        other = 1 - stages["local training, clip and sum"] / sum(stages.values())
        rows.append(f"| W4: share outside local training | ≤ 20 % | {other:.1%} | {'yes' if other <= 0.2 else 'no'} |")
    return ["", "## Targets", "", "| what | target | found | met |", "|---|---|---|---|", *rows] if rows else []


def _extras(report: dict[str, Any]) -> list[str]:
    lines = []
    if "start_up" in report:
        lines += [
            "",
            f"Command to first finished round of the quick start: {report['start_up']['median']:.1f} s (target: 5).",
        ]
    if "server" in report:
        lines += [
            "",
            "## Server cost of a round, in seconds, one thread",
            "",
            "Beside memory bandwidth: the time to copy as many floats. Noise and checkpoint run while clients train.",
            "",
            "| d | noise | rest of the round's end | one update: norm, clip, add | checkpoint | copy of d floats |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['d']:,} | {r['noise']:.3f} | {r['rest']:.3f} | {r['add']:.3f} | {r['checkpoint']:.3f} "
            f"| {r['copy']:.4f} |"
            for r in report["server"]
        ]
    return lines
