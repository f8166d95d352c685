"""Reading run folders: torn lines, missing files, nearest names, headline numbers."""

import json
import math
from pathlib import Path

import pytest
from synthetic_runs import write_many, write_run

from fedflat.core.checks import InputError
from fedflat.report import metrics


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "one", rounds=20)


def test_reads_every_file(run_folder: Path) -> None:
    run = metrics.read_run(run_folder)
    assert (run.name, run.algorithm, run.seed) == ("one", "dp-fedsam", 0)
    assert len(run.metrics) == len(run.private) == 20
    assert run.privacy["proven_epsilon"] == 9.37


@pytest.mark.parametrize(
    ("cut", "added", "whole"),
    [(2, b"", 19), (8, b"", 19), (61, b"", 19), (1, b"", 20), (1, '\n{"round": 20, "note": "ε'.encode()[:-1], 20)],
    ids=["brace", "value", "key", "newline alone", "inside a character"],
)
def test_a_torn_last_line_is_left_out(run_folder: Path, cut: int, added: bytes, whole: int) -> None:
    for name in ("metrics.jsonl", "private/private.jsonl"):
        (run_folder / name).write_bytes((run_folder / name).read_bytes()[:-cut] + added)
    run = metrics.read_run(run_folder)
    assert len(run.metrics) == len(run.private) == whole


@pytest.mark.parametrize("content", [b"\x89PNG\x00\xff", b'{"round": 0}\n{"round": 1\n', b"[1]\n"])
def test_what_no_kill_can_leave_is_damage_and_no_torn_line(run_folder: Path, content: bytes) -> None:
    (run_folder / "metrics.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="allowed: one JSON object per line"):
        metrics.read_run(run_folder)


def test_a_bad_line_in_the_middle_names_its_place(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], "{oops", *lines[5:]]))
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 5: found a damaged line"):
        metrics.read_run(run_folder)


def test_a_round_written_twice_counts_once(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 19, "test_accuracy": 0.5, "seconds": 1.0}) + "\n")
    run = metrics.read_run(run_folder)
    assert len(run.metrics) == 20
    assert metrics.final_accuracy(run) == 0.5


@pytest.mark.parametrize(
    ("name", "said"), [("zzzzzzzzzz", "alpha"), ("alpa", r"Did you mean alpha\?"), ("no/where", "no such folder")]
)
def test_a_missing_folder_names_what_is_beside_it_and_no_deeper(tmp_path: Path, name: str, said: str) -> None:
    """Its parent may be the root of everything."""
    write_run(tmp_path / "alpha", rounds=2)
    write_run(tmp_path / "deep" / "er" / "run", rounds=2)
    with pytest.raises(InputError, match=said) as refused:
        metrics.read_run(tmp_path / name)
    assert "er/run" not in str(refused.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no metrics\.jsonl or recipe\.yaml"):
        metrics.read_run(tmp_path)


def test_a_folder_of_runs_stands_for_all(tmp_path: Path) -> None:
    write_many(tmp_path / "compare", 2, 2, rounds=2)
    assert len(metrics.read_runs([tmp_path / "compare"])) == 4
    with pytest.raises(InputError, match="one or more run folders"):
        metrics.read_runs([])


def test_unreadable_yaml_and_json(run_folder: Path) -> None:
    (run_folder / "privacy.json").write_text("[1]")
    with pytest.raises(InputError, match=r"privacy\.json"):
        metrics.read_run(run_folder)
    (run_folder / "recipe.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        metrics.read_run(run_folder)


def test_killed_before_the_first_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "early", rounds=3)
    for name in ("metrics.jsonl", "private/private.jsonl", "ledger.jsonl", "privacy.json"):
        (folder / name).unlink()
    found = metrics.summary(metrics.read_run(folder))
    assert found["rounds"] == 0 and found["final_accuracy"] is None and found["seconds"] == 0
    assert found["proven_epsilon"] is None and found["reasons"] == [metrics.NO_STATEMENT]


def test_summary_equals_the_records(run_folder: Path) -> None:
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    secret = [json.loads(line) for line in (run_folder / "private/private.jsonl").read_text().splitlines()]
    found = metrics.summary(metrics.read_run(run_folder))
    best = max(records, key=lambda record: record["test_accuracy"])
    assert found["final_accuracy"] == records[-1]["test_accuracy"]
    assert (found["best_accuracy"], found["best_round"]) == (best["test_accuracy"], best["round"])
    assert found["personal_accuracy"] == secret[-1]["personal_accuracy"] != found["final_accuracy"]
    assert math.isclose(found["seconds"], sum(record["seconds"] for record in secret))


def test_sparse_and_broken_values(tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    folder.mkdir()
    lines = [
        '{"round": 0, "test_accuracy": 0.1}', '{"round": 1, "test_accuracy": NaN}',
        '{"round": 2, "test_loss": Infinity}',
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = metrics.read_run(folder)
    assert run.metrics[1]["test_accuracy"] is None and run.metrics[2]["test_loss"] is None
    assert metrics.final_accuracy(run) == 0.1
    assert run.algorithm == "sparse"


def test_claimed_epsilon_only_where_it_differs(tmp_path: Path) -> None:
    same = metrics.read_run(write_run(tmp_path / "same", rounds=2))
    other = metrics.read_run(
        write_run(tmp_path / "other", rounds=2, statement={"proven_epsilon": 1466.0, "epsilon": 1466.0})
    )
    assert metrics.claimed_epsilon(same) is None
    assert metrics.claimed_epsilon(other) == 9.37
    # What was recorded round by round may then be the claimed figure: it is no axis to plot proven privacy on.
    assert metrics.spent(same) and not metrics.spent(other)
