"""The Markdown table of a report on a GPU: examples a second, beside the fastest central model's."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import LIMITS

TARGETS = (("G1", 0.7), ("G1", 0.9), ("G1-bf16", 0.7), ("G1-bf16", 0.9))
"""(part, fedflat's share of the limit's examples a second)."""
STAGE = "local training, clip and sum"


def speed(entry: dict[str, Any], which: str = "median") -> float | None:
    """Examples a second of a system; None where it was not measured."""
    return entry["facts"]["samples"] / entry[which] if entry.get(which) else None


def limit(found: dict[str, Any]) -> float | None:
    """The fastest central model's examples a second, by medians."""
    speeds = [s for name in LIMITS if (s := speed(found["systems"].get(name, {}))) is not None]
    return max(speeds, default=None)


def share(report: dict[str, Any], part: str, system: str = "fedflat") -> float | None:
    """A system's examples a second over the limit's."""
    found = report["workloads"].get(part, {"systems": {}})
    ours, most = speed(found["systems"].get(system, {})), limit(found)
    return ours / most if ours and most else None


def markdown_gpu(report: dict[str, Any]) -> str:
    """GPU, equality, examples a second and the targets."""
    gpu, machine = report["gpu"], report["machine"]
    lines = [
        "# On a GPU",
        "",
        f"{report['date']}, {gpu['name']} ({gpu['memory_gib']:.0f} GiB, power limit {gpu['power_limit']}), driver "
        f"{gpu['driver']}, torch {gpu['torch']}, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}; {machine['cpu']}, "
        f"{machine['cores']} cores. Systems take turns, {report['rounds']} rounds each; "
        "a clock is read when the GPU is done.",
        "",
        "fedflat: whole rounds, with clip, noise, ledger and ε, in deterministic kernels. limit: forward, backward and "
        "SGD of one central model at its best batch size, channels-last, in whatever kernels are fastest; *of the "
        "limit* is beside the fastest of them. TF32 is off in both.",
    ]
    for part, found in report["workloads"].items():
        lines += _part(part, found)
    return "\n".join(lines + _targets(report) + _check(report.get("check", []))) + "\n"


def _part(part: str, found: dict[str, Any]) -> list[str]:
    most = limit(found)
    lines = ["", f"## {part}: {found['workload']['text']}, {found['precision']}", ""]
    lines += ["| system | examples/s, median | best | of the limit | s a round, median | min | how |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [_row(system, entry, most) for system, entry in found["systems"].items()]
    for system, entry in found["systems"].items():
        rates = entry.get("facts", {}).get("rates")
        if rates:
            listed = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
            lines += ["", f"{system}, examples/s by batch size: {listed}."]
    return lines


def _row(system: str, entry: dict[str, Any], most: float | None) -> str:
    middle, top = speed(entry), speed(entry, "min")
    if middle is None or top is None:
        return f"| {system} | – | – | – | – | – | failed: {entry.get('error', '')[-60:]!r} |"
    part = "" if most is None else f"{middle / most:.2f}"
    numbers = f"{middle:,.0f} | {top:,.0f} | {part} | {entry['median']:.4f} | {entry['min']:.4f}"
    return f"| {system} | {numbers} | {_how(entry['facts'])} |"


def _how(facts: dict[str, Any]) -> str:
    if "batch" in facts:
        return f"batch {facts['batch']}"
    words = [str(facts["backend"])]
    words += [f"blocks of {facts['block']}"] if (facts.get("block") or 1) > 1 else []
    stages = facts.get("stages", {})
    if STAGE in stages:
        words += [f"local training {stages[STAGE] / sum(stages.values()):.0%} of the round"]
    return ", ".join(words)


def _targets(report: dict[str, Any]) -> list[str]:
    found = [(part, least, share(report, part)) for part, least in TARGETS]
    rows = [
        f"| {part}: fedflat of the limit | {least:g} | {value:.2f} | {'yes' if value >= least else 'no'} |"
        for part, least, value in found
        if value is not None
    ]
    return ["", "## Targets", "", "| what | target | found | met |", "|---|---|---|---|", *rows] if rows else []


def _check(rows: list[dict[str, Any]]) -> list[str]:
    """Each method's largest differences from the processor's sums."""
    if not rows:
        return []
    ways = list(dict.fromkeys(way for row in rows for way in row["apart"]))
    wrong = [row["method"] for row in rows if not row["same"]]
    verdict = f"**Not the processor's: {', '.join(wrong)}.**" if wrong else "All agree."
    lines = ["", "## The GPU's sums beside the processor's", ""]
    lines += [f"Clipped sums of three rounds, small models; largest difference over the sum's norm. {verdict}", ""]
    lines += [f"| method | {' | '.join(ways)} | at most |", "|---" * (len(ways) + 2) + "|"]
    for row in rows:
        cells = [_apart(row["apart"].get(way)) for way in ways]
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {row['tolerance']:g} |")
    return lines


def _apart(value: float | str | None) -> str:
    if isinstance(value, str):
        return "failed: " + " ".join(value.split())[-80:].replace("|", "/")
    return "" if value is None else f"{value:.1e}"
