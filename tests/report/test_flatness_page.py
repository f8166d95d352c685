"""Contours against a known surface; the page in a real browser: no console message, keys turn the surfaces."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_browser import CHROMIUM, browse

from fedflat.report import plates
from fedflat.report.flatness import difference_notes, pair_text, render, spread_text, write_page

SIDE = 11


def bowl(steepness: float) -> dict[str, Any]:
    """A surface that rises with the squared distance from its middle."""
    steps = np.linspace(-1, 1, SIDE)
    loss = 0.1 + steepness * (steps[:, None] ** 2 + steps[None] ** 2)
    return {"steps": steps.tolist(), "loss": loss.tolist(), "accuracy": (1 / (1 + loss)).tolist()} | {
        "precision": "float32",
        "deviation": None,
    }


def value(mean: float, sd: float | None = 0.1) -> dict[str, Any]:
    return {"mean": mean, "sd": sd, "count": 2}


def group(label: str, style: int, model: str = "global", surface: bool = True) -> dict[str, Any]:
    grid = bowl(1.0 + style)
    middle = [row[SIDE // 2] for row in grid["loss"]]
    curve = {"loss": middle, "loss_sd": [0.1] * SIDE, "accuracy": [0.9] * SIDE, "accuracy_sd": [0.01] * SIDE}
    names = ("loss", "accuracy", "eigenvalue", "trace", "one_step", "ascent", "noise_loss", "noise_accuracy", "norm")
    gap = {"mean": -0.5, "low": -0.8, "high": -0.2, "pairs": 2}
    return {
        "label": label, "model": model, "style": style, "seeds": [0, 1],
        "epsilon": value(8.0), "private": model != "global",
        "numbers": {name: value(0.5) for name in names}, "differences": dict.fromkeys(names, gap) if style else {},
        "line": {"steps": grid["steps"]} | curve, "noise": {"levels": grid["steps"]} | curve,
        "surface": grid if surface else None,
    }  # fmt: skip


def found(*groups: dict[str, Any]) -> dict[str, Any]:
    model = {"run": "a", "examples": 100, "curvature_examples": 50}
    settings = {"on": "test", "seed": 0, "noise": [0.1, 0.2, 0.3], "rho": 0.05}
    cost = {"seconds": 12.0, "cpu_seconds": 20.0, "threads": 2, "peak_memory_mib": 300.0}
    return {"settings": settings, "groups": list(groups), "models": [model], "notes": ["<note>"], "cost": cost}


def level_lines(values: list[list[float]], level: float) -> list[list[tuple[float, float]]]:
    """What is drawn of a level, in grid coordinates (row, column)."""
    drawn = plates.draw(values, [-1.0, 1.0], [level], 0.1, 2.0, "x<y")
    found = re.search(r'class="iso"[^>]* d="M([^"]*)"', drawn)
    cell = plates.SIDE / (len(values) - 1)
    lines = [re.findall(r"([\d.]+),([\d.]+)", line) for line in (found[1].split("M") if found else [])]
    side = plates.TOP + plates.SIDE
    return [[((float(x) - plates.LEFT) / cell, (side - float(y)) / cell) for x, y in line] for line in lines]


def test_level_lines_of_a_bowl_are_circles() -> None:
    middle = (SIDE - 1) / 2
    radius = math.sqrt(0.5) * middle
    (circle,) = level_lines(bowl(1.0)["loss"], 0.6)
    assert len(circle) > 12 and max(abs(math.dist(point, (middle, middle)) - radius) for point in circle) < 0.3
    assert circle[0] == circle[-1]  # a closed curve


def test_rows_run_to_the_right_and_columns_upwards() -> None:
    (line,) = level_lines([[0.0, 0.0, 1.0]] * 2 + [[0.0, 0.0, 0.0]], 0.5)  # high where rows are few, columns many
    assert all(row < 2 and column >= 1.4 for row, column in line)
    assert level_lines([[1.0, 1.0], [1.0, 1.0]], 0.4) == []
    assert "x&lt;y" in plates.draw([[1.0, 1.0], [1.0, 1.0]], [-1.0, 1.0], [], 0.1, 2.0, "x<y")


def test_levels_and_colours() -> None:
    lines = plates.levels(0.1, 10.0)
    assert lines == sorted(lines) and lines[0] > 0.1 and lines[-1] < 10.0 and len(lines) == 9
    assert plates.levels(1.0, 1.0) == [] and plates.levels(0.0, 1.0) == []
    assert len(plates.levels(1.0, 1.01)) >= 5
    ends = [plates.colours(level, 0.1, 10.0) for level in (0.1, 10.0, 70.0)]
    assert ends == [("#440154", "#966ed7"), ("#5f8c14", "#fde725"), ("#5f8c14", "#fde725")]


@pytest.mark.parametrize(("ramp", "paper"), [(0, (255, 255, 255)), (1, (0x1C, 0x1F, 0x23))])
def test_contours_stand_out_from_their_paper(ramp: int, paper: tuple[int, int, int]) -> None:
    """WCAG 2.1, 1.4.11: at least 3 : 1, on light and on dark paper, all along both ramps."""

    def luminance(colour: Sequence[int]) -> float:
        linear = [v / 3294.6 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    drawn = [plates.colours(level, 1.0, 2.0)[ramp] for level in (1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0)]
    shades = [luminance(bytes.fromhex(each[1:])) for each in drawn]
    contrasts = [(max(shade, luminance(paper)) + 0.05) / (min(shade, luminance(paper)) + 0.05) for shade in shades]
    assert min(contrasts) > 3 and shades == sorted(shades)


def test_numbers_in_words() -> None:
    assert pair_text({"mean": 2.8234, "sd": 0.2764}) == ("2.82", "0.28")
    assert spread_text({"mean": 0.01583, "sd": 0.0028}) == "0.0158 ± 0.0028" and spread_text(None) == "–"
    assert spread_text({"mean": 0.93871, "sd": None}, percent=True) == "93.87"
    notes = difference_notes(found(group("a", 0), group("b", 1)))
    assert notes[0].startswith("b − a: top eigenvalue −0.5 [−0.8, −0.2]") and "none is corrected" in notes[1]
    assert difference_notes(found(group("a", 0))) == []


def test_the_page_is_whole_escaped_and_small() -> None:
    text = render(found(group("<a>", 0), group("b", 1), group("b", 1, "client 3")))
    assert "<a>" not in text.replace("<a href", "") and "&lt;note&gt;" in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text) and "http" not in re.sub(r"http-equiv", "", text)
    assert len(text.encode()) < 500_000
    assert text.count("<canvas") == 3 and "Private to the simulation" in text
    assert "<canvas" not in render(found(group("a", 0, surface=False)))


PROBE = """
const at = {}, canvas = document.querySelector("canvas[data-surface]");
const picture = () => canvas.toDataURL();
const later = (next) => setTimeout(next, 60);
const press = (name) => new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true });
const key = (name) => canvas.dispatchEvent(press(name));
key("Home");
later(() => {
  at.start = picture();
  key("ArrowLeft");
  later(() => {
    at.turned = picture(); key("Home");
    later(() => {
      at.home = picture();
      document.querySelector('input[name="height"][value="linear"]').click();
      later(() => {
        at.linear = picture();
        const out = document.createElement("pre"), pen = canvas.getContext("2d");
        const seen = new Set();
        const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let k = 0; k < pixels.length; k += 4) if (pixels[k + 3]) seen.add(pixels.slice(k, k + 3).join());
        out.id = "probe";
        out.textContent = JSON.stringify({
          turned: at.turned !== at.start, home: at.home === at.start, linear: at.linear !== at.start,
          colours: seen.size,
          overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        });
        document.body.append(out);
      });
    });
  });
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_a_browser(tmp_path: Path) -> None:
    page = write_page(found(group("a", 0), group("b", 1), group("b", 1, "client 3")), tmp_path / "landscape.html")
    picture = tmp_path / "page.png"
    _, messages = browse(page, tmp_path, f"--screenshot={picture}")
    assert messages == []  # under the page's own policy
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    # Without a screen frames come when they like: let timers stand for them.
    frames = "<script>window.requestAnimationFrame = (paint) => setTimeout(paint, 1);</script></head>"
    text = text.replace("</head>", frames)
    copy = tmp_path / "probe.html"
    copy.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    dom, messages = browse(copy, tmp_path)
    assert messages == []
    seen = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert seen is not None
    state = json.loads(seen[1])
    assert state["turned"] and state["home"] and state["linear"] and state["colours"] > 100 and state["overflow"] <= 0
