"""The public records of a selection: what it was to be, and its charge; written before the first trial starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedflat.core.checks import wrong
from fedflat.privacy.ledger import LedgerError, read
from fedflat.privacy.plan import Plan

PUBLIC, CHARGE, WINNER = "selection.yaml", "charge.jsonl", "winner"


def charge(plan: Plan, public: Mapping[str, Any]) -> dict[str, Any]:
    """The one line of ``charge.jsonl``: the whole selection, and the digest of what is public of it."""
    told = ("sampling", "relation", "trust", "clients", "delta", "accountant", "epsilon", "selection")
    line = plan.record(0, 1.0)
    return {
        "round": 0,
        "mechanism": "selection",
        **{name: line[name] for name in told},
        "rounds": public["rounds"],
        "public": public_digest(public),
    }


def public_digest(public: Mapping[str, Any]) -> str:
    """SHA-256 of what ``selection.yaml`` says."""
    return hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()


def read_public(folder: Path) -> dict[str, Any]:
    """What ``selection.yaml`` says.

    Raises:
        InputError: it cannot be read.
    """
    path = folder / PUBLIC
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise wrong(str(path), "a file that cannot be read", "the file that fedflat tune wrote") from error
    return dict(found) if isinstance(found, dict) else {}


def faults(folder: Path) -> list[str]:
    """What is wrong with a selection's public records and, where there is a winner, with what it states.

    Raises:
        InputError: ``selection.yaml`` cannot be read.
    """
    try:
        entries = read(folder / CHARGE)
    except LedgerError as error:
        return [str(error)]
    if len(entries) != 1:
        return [f"{CHARGE}: {len(entries)} lines where one charge belongs"]
    line, found = entries[0], []
    if line.get("public") != public_digest(read_public(folder)):
        found.append(f"{PUBLIC} is not what was charged")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stated = json.loads((folder / WINNER / "privacy.json").read_bytes())["proven_epsilon"]
        first = read(folder / WINNER / "ledger.jsonl")[0]
        if stated is None or stated > line["epsilon"]:
            found.append(f"the winner states ε = {stated}, but {line['epsilon']:.6g} was charged")
        if first.get("selection") != line["selection"]:
            found.append("the winner's ledger names another selection")
    return found
