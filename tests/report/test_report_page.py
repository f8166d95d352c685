"""The page itself: self-contained, small, escaped, honest about ε, with every figure and its numbers."""

import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from safetensors.numpy import save_file
from synthetic_runs import NONE, write_many, write_run

from fedflat.cli import catalogue
from fedflat.privacy.statement import SEEDED
from fedflat.report import groups, pages, tables
from fedflat.report.figures import MAX_POINTS, figures_of_run, thin
from fedflat.report.html import render, write_report
from fedflat.report.metrics import read_run, read_runs
from fedflat.report.pages import PRIVATE
from fedflat.report.tables import PLAINLY

RELEASED = {"accuracy", "loss", "epsilon", "classes"}
SIMULATED = {
    "norms", "clipped", "signal", "alpha", "errors", "train-accuracy", "train-loss", "personal", "spread", "cohort",
}  # fmt: skip
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Balance(HTMLParser):
    """Raises where an element is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open, self.getpos())


def figures_in(page: str) -> dict[str, dict[str, Any]]:
    pattern = r'<figure class="card[^"]*" id="f-([a-z-]+)">.*?<script type="application/json">(.*?)</script>'
    return {key: json.loads(found) for key, found in re.findall(pattern, page, re.DOTALL)}


def page_of(folders: list[Path], out: Path) -> str:
    """The page of these runs, whole and self-contained as every page must be."""
    page = write_report(folders, out / "report.html").read_text(encoding="utf-8")
    assert "://" not in page and "url(" not in page and "@import" not in page
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    return page


def test_full_run(tmp_path: Path) -> None:
    page = page_of([write_run(tmp_path / "run")], tmp_path)
    assert len(page.encode()) < 300_000
    assert set(figures_in(page)) == RELEASED
    assert str(tmp_path) not in page and PRIVATE not in page
    path = tmp_path / "private" / "report.html"
    hidden = path.read_text("utf-8")
    assert path.stat().st_mode & 0o077 == 0
    cards = {key: style for style, key in re.findall(r'<figure class="(card[^"]*)" id="f-([a-z-]+)">', hidden)}
    assert set(cards) == set(figures_in(hidden)) == RELEASED | SIMULATED
    assert {key for key, style in cards.items() if "private" in style} == SIMULATED and PRIVATE in hidden


def test_numbers_equal_the_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    records = read_run(folder).metrics
    page = page_of([folder], tmp_path)
    shown = figures_in(page)["accuracy"]["series"][0]
    assert shown["x"]["round"] == [record["round"] + 1 for record in records]
    assert shown["y"] == pytest.approx([record["test_accuracy"] for record in records], rel=1e-5)
    assert shown["x"]["epsilon"] == pytest.approx([record["epsilon"] for record in records], rel=1e-5)
    assert f"<b>{100 * records[-1]['test_accuracy']:.2f} %</b>" in page
    assert "<b>9.37</b>" in page and "δ = 0.002" in page


def test_line_passes_through_its_points(tmp_path: Path) -> None:
    """Relative path steps must not drift: the last point of the line is the last record."""
    run = read_run(write_run(tmp_path / "run"))
    drawn = pages.draw(figures_of_run(run)[0], "round")
    path = re.search(r'<path class="line [^"]*" d="M([^"]*)"', drawn)
    assert path is not None
    numbers = [float(found) for found in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", path[1])]
    x, y = sum(numbers[0::2]), sum(numbers[1::2])
    low, high = (float(found) for found in re.search(r'data-y0="([^"]*)" data-y1="([^"]*)"', drawn).groups())  # type: ignore[union-attr]
    value = low + (pages.BOTTOM - y) / (pages.BOTTOM - pages.TOP) * (high - low)
    assert x == pytest.approx(pages.RIGHT, abs=0.06)
    assert value == pytest.approx(run.metrics[-1]["test_accuracy"], abs=0.1 / (pages.BOTTOM - pages.TOP) * (high - low))


def test_deployment_has_nothing_private(tmp_path: Path) -> None:
    page = page_of([write_run(tmp_path / "run", private=False, rounds=12)], tmp_path)
    assert set(figures_in(page)) == RELEASED
    assert PRIVATE not in page and "Personal accuracy" not in page


def test_no_epsilon_shows_infinity_and_reason(tmp_path: Path) -> None:
    none = NONE | {"reasons": ["No noise was added."]}
    page = page_of([write_run(tmp_path / "run", "fedavg", rounds=12, statement=none)], tmp_path)
    assert "<b>∞ (none)</b><span>No noise was added.</span>" in page
    assert "epsilon" not in figures_in(page) and 'name="axis"' not in page


def test_a_claim_is_never_alone(tmp_path: Path) -> None:
    published = NONE | {"claimed_epsilon": 9.37, "protocol": "published", "reasons": ["Clipped per tensor."]}
    page = page_of([write_run(tmp_path / "run", rounds=12, statement=published)], tmp_path)
    claims = [found.start() for found in re.finditer("claims 9.37|formula: 9.37|<dd>9.37", page)]
    assert len(claims) == 4  # tile, notice, card, statement
    assert all("∞ (none)" in page[max(0, place - 200) : place] for place in claims)
    assert "Clipped per tensor." in page
    assert "epsilon" not in figures_in(page)["accuracy"]["series"][0]["x"]


def test_statement_without_a_proven_figure_says_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    (folder / "privacy.json").write_text('{"claimed_epsilon": 9.37, "delta": 0.002, "adversary": {"epsilon": null}}')
    page = page_of([folder], tmp_path)
    assert "<dt>Proven ε</dt><dd>∞ (none)</dd>" in page and "<dt>ε</dt><dd>∞ (none)</dd>" in page
    (folder / "privacy.json").unlink()
    assert "nothing is proven" in page_of([folder], tmp_path)


def test_unknown_statement_keys_are_shown(tmp_path: Path) -> None:
    extra = {"some_new_key": {"inner_list": [1, {"deep": ["x"]}]}, "flag": True, "empty": {}}
    page = page_of([write_run(tmp_path / "run", rounds=3, statement=extra)], tmp_path)
    assert "<dt>Some new key</dt>" in page and "<dt>Inner list</dt>" in page and "<dd>yes</dd>" in page


def test_user_text_is_escaped(tmp_path: Path) -> None:
    evil = "</script></style><img src=x onerror=alert(1)>\"'&"
    statement = {"unit": evil, evil: [evil, {evil: evil}], "reasons": [evil], "proven_epsilon": None}
    named = {"name": evil, "model": {"name": evil}, "versions": {evil: evil}}
    one = write_run(tmp_path / "run", evil, rounds=3, statement=statement, **named)
    other = write_run(tmp_path / "other", rounds=3)
    for page in (page_of([one], tmp_path), page_of([one, other], tmp_path)):
        assert "<img" not in page and str(escape(evil)) in page


def test_torn_and_empty_folders(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=5)
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-30])
    page = page_of([folder], tmp_path)
    assert "<b>4</b><span>of 5 planned</span>" in page
    for name in ("metrics.jsonl", "private/private.jsonl"):
        (folder / name).write_text("")
    page = page_of([folder], tmp_path)
    assert "never evaluated" in page and figures_in(page) == {}


@pytest.mark.parametrize(
    "values", [[0.5], [0.5, 0.5], [1e-9, 1e9], [-3.0, 2.0], [0.0, 0.0], [1e300, 1.0], [1e-300, 2e-300]]
)
def test_any_values_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    keys = ("test_loss", "test_accuracy", "epsilon")
    lines = [json.dumps({"round": place, **dict.fromkeys(keys, value)}) for place, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "privacy.json").write_text('{"proven_epsilon": 1.0}')
    page = page_of([folder], tmp_path)
    assert not re.search(r"\b(nan|inf)\b", "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL)))


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    places = thin(10_001)
    assert len(places) <= MAX_POINTS + 1 and places[0] == 0 and places[-1] == 10_000
    assert thin(1) == [0] and thin(0) == []
    assert len(page_of([write_run(tmp_path / "run", rounds=3000)], tmp_path).encode()) < 600_000


def test_a_run_that_ended_at_guessing_has_no_best_round(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "learnt", rounds=15))
    best = max(record["test_accuracy"] for record in run.metrics)
    assert f"best {100 * best:.2f} % after round" in render([run])
    lost = read_run(write_run(tmp_path / "lost", rounds=5, private=False))
    lost.metrics[-1] |= {"test_accuracy": 0.1, "class_accuracy": [0.0] * 9 + [1.0]}
    page = render([lost])
    assert "ended at the accuracy of guessing" in page and "after round" not in page


def test_fifteen_methods_overlaid(tmp_path: Path) -> None:
    page = page_of([*write_many(tmp_path / "runs", 15, 1)], tmp_path)
    assert len(page.encode()) < 700_000
    assert len(figures_in(page)["accuracy"]["series"]) == 15
    styles = re.findall(r'<button type="button" aria-pressed="true" data-group="\d+">.*?class="line (c\d d\d)', page)
    assert len(styles) == len(set(styles)) == 15  # no two methods share colour and dash


def test_comparison_shows_mean_and_sd(tmp_path: Path) -> None:
    write_many(tmp_path / "runs", 2, 4, rounds=30)
    page = page_of([tmp_path / "runs"], tmp_path)
    assert "norms" not in figures_in(page)
    assert "norms" in figures_in((tmp_path / "private" / "report.html").read_text(encoding="utf-8"))
    series = figures_in(page)["accuracy"]["series"]
    runs = [read_run(tmp_path / "runs" / f"dp-fedsam-{seed}") for seed in range(4)]
    finals = [run.metrics[-1]["test_accuracy"] for run in runs]
    mean, sd = statistics.fmean(finals), statistics.stdev(finals)
    assert series[1]["label"] == "dp-fedsam"
    assert series[1]["y"][-1] == pytest.approx(mean, rel=1e-5)
    assert series[1]["sd"][-1] == pytest.approx(sd, rel=1e-2)
    assert f"{100 * mean:.2f} ± {100 * sd:.2f}" in page


def test_a_method_without_epsilon_stays_off_that_axis(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "f", "fedavg", rounds=9, statement=NONE), write_run(tmp_path / "d", rounds=9)]
    page = page_of(folders, tmp_path)
    assert "so by round only: fedavg." in page
    series = figures_in(page)["accuracy"]["series"]
    assert "epsilon" not in series[0]["x"] and "epsilon" in series[1]["x"]


def test_a_page_beside_its_run_leaves_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    assert write_report([folder], folder) == folder / "report.html"
    assert not list(folder.glob("*.part")) and not list(folder.glob(".*.part"))


def test_the_guarantee_stands_first_then_how_to_use_the_model(tmp_path: Path) -> None:
    data = {"dataset": "given", "clients": 50, "inputs": ["age"], "target": "bought", "by": "user"}
    data["categories"] = {"bought": [False, True]}
    folder = write_run(tmp_path / "visits", rounds=6, data=data)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records[-1]["class_accuracy"] = [0.9, 0.8]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = page_of([folder], tmp_path)
    sections = re.findall(r'<section id="([a-z]+)">', page)
    assert sections == ["summary", "use", "data", "curves", "guarantee", "recipe", "reproduce"]
    assert page.index("<dt>Proven ε</dt>") < page.index("<dt>Test accuracy</dt>")
    assert "run = fedflat.load(&#34;visits&#34;)" in page and "run.predict(table)" in page
    assert "<dt>Classes</dt><dd>2: no, yes</dd>" in page and ">yes</text>" in page
    assert re.search(r"· \d+ [A-Z][a-z]+ 20\d\d</p>", page)  # the date
    assert "Claimed" not in page  # this run claims nothing but what is proven
    embedded = re.search(r'<script type="application/json" id="privacy">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1]) == [{"run": "visits", "seed": 0, "privacy": read_run(folder).privacy}]
    hidden = (tmp_path / "private" / "report.html").read_text("utf-8")
    charts = hidden[hidden.index('<section id="simulation">') :]
    assert charts.index("<details") < charts.index("<figure")  # what is private is folded
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("categories", "elsewhere"))
    assert "<dt>Classes</dt><dd>2</dd>" in page_of([folder], tmp_path)
    state = {"made_for": {"preparation": {"kind": "table", "names": ["stays", "leaves"]}}}
    (folder / "checkpoints").mkdir(exist_ok=True)
    save_file({"w": np.zeros(1)}, folder / "checkpoints" / "round-000006.safetensors", {"state": json.dumps(state)})
    page = page_of([folder], tmp_path)
    assert "<dt>Classes</dt><dd>2: stays, leaves</dd>" in page and ">leaves</text>" in page


def test_the_epsilon_of_a_seeded_run_is_called_that_of_the_mechanism_wherever_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caution = {"caution": SEEDED, "randomness": "seeded"}
    for seed, method in enumerate(("dp-fedavg", "dp-fedsam")):
        for name, statement in (("seeded", caution), ("secret", {})):
            write_run(tmp_path / name / method, method, rounds=6, seed=seed, statement=statement)
    for name, mechanism in (("seeded", True), ("secret", False)):
        page = page_of([tmp_path / name / "dp-fedsam"], tmp_path / name / "page")
        together = page_of([tmp_path / name / "dp-fedavg", tmp_path / name / "dp-fedsam"], tmp_path / name / "both")
        table = tables.comparison_table(groups.group_runs(read_runs([tmp_path / name])))
        catalogue.runs(tmp_path / name)
        said = {
            "page": page, "comparison": together, "terminal": tables.to_terminal(table),
            "table": tables.files(table)["table.md"], "runs": capsys.readouterr().out,
        }  # fmt: skip
        for what, text in said.items():
            assert ("of the mechanism" in text or PLAINLY in text) == mechanism, what
        for text in (page, together):
            assert ('<div class="mark"' in text) == mechanism and ("<dt>Proven ε</dt>" in text) != mechanism
