"""Records of the papers' tables and figures: kept, shown again, and what would run now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import reproduced
from fedflat.papers.figures import Drawn, find_figure
from fedflat.papers.rows import dry, fill
from fedflat.papers.tables import find, load
from fedflat.report.figures import Figure, Series


@pytest.mark.parametrize("file", sorted(reproduced.FOLDER.glob("*figure*.json")), ids=lambda file: file.stem)
def test_every_record_of_a_figure_can_be_shown(file: Path) -> None:
    """Records of older versions have fields that a figure has no more."""
    found = reproduced.drawings(find_figure(*file.stem.split("-", 1)))
    assert found and all(drawn.figures or drawn.landscapes for _, drawn in found)


@pytest.mark.parametrize("path", sorted(reproduced.FOLDER.glob("*-table-*.json")), ids=lambda path: path.stem)
def test_what_is_kept_is_what_would_run_now(path: Path) -> None:
    """A result whose settings have moved since must be measured again."""
    for source, found, _ in reproduced.outcomes(load(path.stem)):
        assert any(row.ours for row in found.rows) and source.commit
        record = next(r for r in json.loads(path.read_text())["records"] if r["command"] == source.command)
        part = replace(find(found.table.paper, found.table.table), cells=tuple(row.cell for row in found.rows))
        assert dry(part, record["scale"], record["protocol"], record["overrides"]).changed == found.changed
        assert all(row["published"] == cell.cell.published for row, cell in zip(record["rows"], found.rows))


def test_a_figure_kept_and_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = find_figure("000", "figure-4")
    line = Series("DP-FedSAM", {"round": (0.1, 0.3)}, (0.5, 0.6))
    drawing = Figure("axis-0", figure.panels[0].title, (line,), "%", percent=True, kind="points")
    found = Drawn(figure, "small", (drawing,), remarks=("Changed: all.",))
    monkeypatch.setattr(reproduced, "FOLDER", tmp_path)
    for _ in range(2):  # the same command's record is replaced
        reproduced.keep(tmp_path / "000-figure-4.json", "python …", found, [], 60.0)
    [(source, again)] = reproduced.drawings(figure)
    assert (again.figures, again.remarks) == (found.figures, found.remarks)
    assert "1 minutes of rounds" in source.sentence()
    with pytest.raises(reproduced.InputError, match="none of these cells of 000-figure-4; allowed: with --keep"):
        reproduced.drawings(figure.only(["Local epochs"]))


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.long
def test_a_table_kept_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg", "DP-FedSAM"])
    given = ["data.dataset=digits", "data.max_examples=500", "data.clients=25"]
    found = fill(dry(chosen, "smoke", overrides=given), tmp_path / "runs", processes=1)
    monkeypatch.setattr(reproduced, "FOLDER", tmp_path)
    file = tmp_path / "000-table-1.json"
    reproduced.keep(file, "python …", found, given, found.seconds)
    [(source, again, _)] = reproduced.outcomes(find("000", "1"))
    assert again.changed == found.changed and source.seconds == round(found.seconds, 1)  # 0.0 on a fast machine
    for row, kept in zip(found.rows, again.rows):
        assert kept.ours == pytest.approx(dict(row.ours), abs=1e-4) and kept.cell == row.cell
        assert kept.proven == pytest.approx(row.proven, rel=1e-4)
    reproduced.main(["000", "table-1"])
    assert "Measured " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reproduced.main(["000", "table-2"])
    before = file.read_bytes()
    less = replace(found, rows=(found.rows[0], replace(found.rows[1], ours={})))
    nothing = replace(found, rows=tuple(replace(row, ours={}) for row in found.rows))
    for worse, why in ((less, "1 were measured now"), (nothing, "Nothing was measured")):
        assert why in reproduced.keep(file, "python …", worse, given, 1.0) and file.read_bytes() == before
