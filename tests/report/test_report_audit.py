"""What an audit found, on the run's page beside the claimed and the proven ε."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_run

from fedflat.audit.bounds import AuditResult
from fedflat.core.checks import InputError
from fedflat.report import html, metrics


def result(**changes: Any) -> AuditResult:
    facts: dict[str, Any] = {
        "kind": "mechanism", "method": "dp-fedsam", "claimed": 9.37, "proven": 9.37, "lower_bound": 1.234,
        "confidence": 0.95, "canary": "sphere", "statistic": "dot product", "runs": 500, "seconds": 3.0,
        "assumptions": ("Canaries join <independently>.",),
    }  # fmt: skip
    return AuditResult(**(facts | changes))


OLDER = {"kind": "canaries", "lower_bound": None, "confidence": None}
"""A kind that older files have: an estimate, which bounds nothing."""


def run_with(folder: Path, *results: AuditResult, **statement: Any) -> metrics.Run:
    path = write_run(folder, rounds=3, statement=statement)
    (path / "audit.json").write_text(json.dumps({"audits": [each.as_dict() for each in results]}))
    return metrics.read_run(path)


def test_bounds_stand_beside_claimed_and_proven(tmp_path: Path) -> None:
    page = html.render([run_with(tmp_path / "a", result(), result(**OLDER))])
    assert '<section id="audit">' in page
    for cell in ("≥ 1.23", "95 %", "within the proof", "no bound"):
        assert f">{cell}</td>" in page, cell
    assert len(re.findall("<td[^>]*>9.37</td>", page)) == 4  # claimed and proven, of both
    assert "Canaries join &lt;independently&gt;." in page
    assert "An audit found more" not in page


def test_without_an_audit_the_page_has_no_such_section(tmp_path: Path) -> None:
    assert 'id="audit"' not in html.render([metrics.read_run(write_run(tmp_path / "a", rounds=3))])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lower_bound": 12.0}, "over the proven ε"),
        ({"violations": ("slot 3 moved the sum by 2.0 C",)}, "contract 2b broken"),
    ],
)
def test_more_than_proven_is_a_notice(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    page = html.render([run_with(tmp_path / "a", result(**changes))])
    assert "An audit found more than is proven" in page and f"{words}</li>" in page
    assert all(text in page for text in changes.get("violations", ()))


def test_a_published_procedure_with_nothing_proven(tmp_path: Path) -> None:
    """Infinite ε is null in the file: the page says none, and the bound is within no proof."""
    found = result(proven=float("inf"), claimed=2.0, lower_bound=4.0)
    page = html.render([run_with(tmp_path / "a", found, proven_epsilon=None, epsilon=None, claimed_epsilon=2.0)])
    assert "nothing is proven</td>" in page and "An audit found more" not in page


@pytest.mark.parametrize("text", ["{", '{"audits": 3}', '{"audits": ["x"]}'])
def test_a_broken_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = write_run(tmp_path / "a", rounds=3)
    (path / "audit.json").write_text(text)
    with pytest.raises(InputError, match="fedflat audit"):
        metrics.read_run(path)
