"""The page in a real browser: no console message, figures, hover, keyboard, axis switch, data tables, no overflow."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_many, write_run

from fedflat.report.html import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--v=0",
]  # fmt: skip

PROBE = """
const found = {}, plot = document.querySelector("#f-accuracy .plot"), tip = plot.querySelector(".tip");
const key = (name) => plot.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const drawn = (svg) => getComputedStyle(svg).display !== "none";
const visible = () => [...plot.querySelectorAll("svg")].filter(drawn).map((svg) => svg.dataset.axis);
found.figures = document.querySelectorAll("figure.card svg path.line, figure.card svg .bar").length;
found.shown = [...document.querySelectorAll(".plot")].every((p) => p.getBoundingClientRect().height > 80);
found.before = tip.hidden;
key("End"); found.last = tip.innerText; key("Home"); found.first = tip.innerText;
key("ArrowRight"); found.second = tip.innerText; key("Escape"); found.closed = tip.hidden;
const box = plot.getBoundingClientRect();
const right = box.left + box.width * 468 / 480;
plot.dispatchEvent(new PointerEvent("pointermove", { clientX: right, clientY: box.top + 40 }));
found.hover = tip.innerText;
found.axes = [visible()];
const radio = document.querySelector("#axis-epsilon");
if (radio) { radio.click(); found.axes.push(visible()); key("End"); found.byEpsilon = tip.innerText; }
const chip = document.querySelector(".chips button");
if (chip) {
  chip.click(); found.pressed = chip.getAttribute("aria-pressed"); key("End"); found.without = tip.innerText;
}
document.querySelectorAll("details").forEach((each) => { each.open = true; });
setTimeout(() => {
  found.rows = document.querySelectorAll("#f-accuracy table tbody tr").length;
  const cells = document.querySelectorAll("#f-accuracy table tr:last-child td");
  found.lastRow = [...cells].map((cell) => cell.textContent);
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const named = (svg) => svg.querySelector("title") && svg.querySelector("desc");
  found.unnamed = [...document.querySelectorAll("figure svg[role=img]")].filter((svg) => !named(svg)).length;
  const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify(found);
  document.body.append(out);
}, 50);
"""


def browse(page: Path, scratch: Path, *more: str) -> tuple[str, list[str]]:
    """The page's final DOM and its console messages."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=2000", *more]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def scripted(page: Path, script: str) -> Path:
    """A copy of a page with this script; the page's policy lets no other script in, so the copy goes without it."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    copy = page.with_name("scripted.html")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def probe(page: Path, scratch: Path, script: str = PROBE) -> dict[str, Any]:
    """Use the page as a reader would; return what the script found."""
    dom, messages = browse(scripted(page, script), scratch)
    assert messages == []
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    return loaded


def test_single_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    page = write_report([folder], tmp_path / "report.html")
    _, messages = browse(page, tmp_path)
    assert messages == []  # the page's own policy blocks nothing that it needs
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (f"{100 * records[place]['test_accuracy']:.2f}" for place in (0, -1))
    found = probe(page, tmp_path)
    assert found["figures"] >= 14 and found["shown"] and found["before"] and found["closed"]
    assert "round 300" in found["last"] and f"{last} %" in found["last"] and found["hover"] == found["last"]
    assert "round 1\n" in found["first"] and f"{first} %" in found["first"] and "round 2" in found["second"]
    assert found["axes"] == [["round"], ["epsilon"]]
    assert "ε spent 9.37" in found["byEpsilon"] and f"{last} %" in found["byEpsilon"]
    assert found["rows"] == 300 and found["lastRow"] == ["300", "9.37", last]
    assert found["unnamed"] == 0


def test_comparison(tmp_path: Path) -> None:
    write_many(tmp_path / "runs", 3, 3, rounds=40)
    found = probe(write_report([tmp_path / "runs"], tmp_path / "report.html"), tmp_path)
    assert "±" in found["last"] and found["rows"] == 40
    assert "dp-fedavg" in found["last"] and found["pressed"] == "false"
    assert "dp-fedsam-topk" in found["without"] and "dp-fedavg\n" not in found["without"]


@pytest.mark.parametrize("kind", ["single", "published", "comparison"])
def test_a_phone_scrolls_one_way_only(tmp_path: Path, kind: str) -> None:
    if kind == "comparison":
        write_many(tmp_path / "runs", 4, 2, rounds=8)
    else:
        none = {"proven_epsilon": None, "reasons": ["A" * 90]} if kind == "published" else {}
        write_run(tmp_path / "runs" / ("a-long-name-of-a-run-" * 4), rounds=8, statement=none)
    page = write_report([tmp_path / "runs"], tmp_path / "report.html")
    framed = scripted(page, "document.title = 'x'")
    # Headless windows are never narrower than 500 px: a frame of 360 px stands for the phone.
    measure = "const d = f.contentDocument.documentElement; document.title = d.scrollWidth + '/' + d.clientWidth"
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe id="f" src="{framed.name}" width="360" height="900" onload="{measure}"></iframe>')
    dom, _ = browse(outer, tmp_path, "--allow-file-access-from-files")
    width = re.search(r"<title>(\d+)/(\d+)</title>", dom)
    assert width is not None and int(width[1]) <= int(width[2]) <= 360
