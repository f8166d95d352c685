"""What publishing all runs of a comparison costs stands beside every table, from the runs' own ledgers."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from synthetic_runs import NONE, grouped, write_run

from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.together import Total
from fedflat.report import metrics, tables
from fedflat.report.html import write_report
from fedflat.report.metrics import Cost, costs
from fedflat.report.tables import cost_sentences


def plan_of(sigma: float = 0.95) -> Plan:
    return build_plan(clients=500, cohort=50, rounds=10, noise_multiplier=sigma, delta=0.002)


def ledgered(folder: Path, algorithm: str, seed: int = 0, sigma: float = 0.95, key: str = "", **changes: Any) -> Path:
    """A synthetic run with a real ledger of 10 rounds."""
    found = write_run(folder, algorithm, seed, rounds=10, **changes)
    (found / "ledger.jsonl").unlink()
    with Ledger.open(found / "ledger.jsonl", key_id=key or folder.name) as ledger:
        for turn in range(10):
            ledger.append(plan_of(sigma).record(turn, 0.2))
    return found


def table_of(folders: list[Path]) -> tables.Comparison:
    return tables.comparison_table(grouped(folders))


def test_the_total_is_that_of_all_rounds_in_every_format(tmp_path: Path) -> None:
    folders = [ledgered(tmp_path / name, name) for name in ("dp-fedavg", "dp-fedsam", "dp-fedpgn")]
    table = table_of(folders)
    (cost,) = table.together
    assert cost.total.epsilon == pytest.approx(3 * 9.37) and cost.same_clients
    sentence = "All 3 private runs published together: ε = 28.11 at δ = 0.006 (add-remove)."
    assert tables.notes(table)[:2] == [table.headline, sentence]
    files = tables.files(table)
    for text in (tables.to_terminal(table), *files.values()):
        assert "private runs published together" in " ".join(text.split())
    assert json.loads(files["table.json"])["together"][0]["epsilon"] == cost.total.epsilon
    page = write_report(folders, tmp_path / "page.html").read_text(encoding="utf-8")
    statements = page[page.index('<section id="guarantee"') :]
    assert sentence in page[: page.index('<section id="guarantee"')] and sentence in statements


def test_a_run_without_a_guarantee_and_other_splits_are_said(tmp_path: Path) -> None:
    folders = [ledgered(tmp_path / f"a{seed}", "dp-fedavg", seed) for seed in range(2)]
    folders.append(write_run(tmp_path / "fedavg", "fedavg", rounds=10, statement=NONE))
    table = table_of(folders)
    found = " ".join(tables.notes(table))
    assert f"All 2 private runs published together: ε = {2 * 9.37:.2f}" in found
    assert "With fedavg published too, there is no guarantee." in found
    assert "split the data into clients differently" in found and not table.together[0].same_clients
    assert all(cell_len(line) <= 80 for line in tables.to_terminal(table).splitlines())
    data = {"dataset": "femnist", "partition": {"kind": "natural", "by": "writer_id"}, "clients": 500}
    natural = [ledgered(tmp_path / f"n{seed}", "dp-fedavg", seed, data=data) for seed in range(2)]
    assert table_of(natural).together[0].same_clients
    assert "differently" not in " ".join(tables.notes(table_of(natural)))


def test_each_data_set_has_a_total_of_its_own(tmp_path: Path) -> None:
    other = {"dataset": "digits", "clients": 500}
    folders = [ledgered(tmp_path / "a", "dp-fedavg"), ledgered(tmp_path / "b", "dp-fedsam")]
    folders.append(ledgered(tmp_path / "c", "dp-fedavg", data=other))
    table = table_of(folders)
    assert [cost.dataset for cost in table.together] == ["cifar10", "digits"]
    found = cost_sentences(table.together)
    assert found[0].startswith("All 2 private runs on cifar10 published together: ε = ")
    assert found[1].startswith("ε and δ of the runs are added")
    assert found[2].startswith("The one private run on digits: ε = ")


def test_noise_used_twice_has_no_total(tmp_path: Path) -> None:
    folders = [ledgered(tmp_path / name, name, key="same") for name in ("dp-fedavg", "dp-fedsam")]
    found = cost_sentences(table_of(folders).together)
    assert found[0] == "All 2 private runs published together: no finite ε."
    assert "dp-fedavg and dp-fedsam share a noise key" in found[1] and len(found) == 2


def test_a_ledger_that_goes_beyond_its_statement_has_no_total(tmp_path: Path) -> None:
    """A run that was resumed after its end, and killed: what it states is too little."""
    folders = [ledgered(tmp_path / name, name) for name in ("dp-fedavg", "dp-fedsam")]
    facts = json.loads((folders[1] / "privacy.json").read_text())
    (folders[1] / "privacy.json").write_text(json.dumps(facts | {"rounds_charged": 9}))
    (cost,) = table_of(folders).together
    assert cost.total.unbounded == ("dp-fedsam",) and cost.total.runs == ("dp-fedavg",)


def test_one_run_has_no_total_and_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one = ledgered(tmp_path / "x" / "run", "dp-fedavg")
    assert costs([metrics.read_run(one)]) == () == table_of([one]).together
    twin = ledgered(tmp_path / "y" / "run", "dp-fedsam", key="other")
    third = ledgered(tmp_path / "z" / "run", "dp-fedsam", key="third")
    (cost,) = table_of([one, twin, third]).together
    assert cost.total.runs == ("run #1", "run #2", "run #3")
    bare = [write_run(tmp_path / name, "fedavg", rounds=3, statement=NONE) for name in "cd"]
    assert cost_sentences(table_of(bare).together) == []


@pytest.mark.parametrize(("epsilon", "text"), [(0.1234, "ε = 0.124 at"), (12345.6, "ε = 12,346 at")])
def test_small_and_large_totals(epsilon: float, text: str) -> None:
    found = cost_sentences([Cost("digits", Total(("a", "b"), tuple("cdefg"), epsilon, 1e-5, "add-remove"), True)])
    assert text in found[0] and found[1] == "With 5 runs without a finite ε published too, there is no guarantee."
