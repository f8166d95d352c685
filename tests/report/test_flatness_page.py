"""The page of landscapes in a real browser: no console message, keys turn the surfaces."""

import re
from pathlib import Path

import numpy as np
import pytest
from bowls import SIDE, found, group
from test_report_browser import CHROMIUM, browse, probe

from fedflat.report import plates
from fedflat.report.flatness import difference_notes, pair_text, render


def test_a_flat_surface_has_no_lines_and_a_shallow_one_has() -> None:
    flat, shallow = group("a", 0), group("b", 0)
    flat["surface"]["loss"] = np.ones((SIDE, SIDE)).tolist()
    shallow["surface"]["loss"] = (1 + np.array(shallow["surface"]["loss"]) / 1000).tolist()
    for drawn, lines in ((flat, 0), (shallow, 1)):
        assert len(plates.contours([drawn]).axes[0].collections) == lines


def test_names_and_numbers_are_inside_the_picture() -> None:
    sheet = plates.contours([group("dp-fedsam (local.lr=0.1, privacy.clip=0.3)", style=style) for style in range(3)])
    sheet.draw_without_rendering()
    inside, drawn = sheet.axes[0].bbox, [text.get_window_extent() for text in sheet.axes[0].texts]
    assert drawn and all(inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 for box in drawn)
    assert sheet.bbox.x0 <= sheet.legends[0].get_window_extent().x0


def test_numbers_in_words() -> None:
    assert pair_text({"mean": 2.8234, "sd": 0.2764}) == ("2.82", "0.28")
    assert pair_text({"mean": 0.01583, "sd": 0.0028}) == ("0.0158", "0.0028")
    assert pair_text({"mean": 0.93871, "sd": None}, percent=True) == ("93.87", None)
    notes = difference_notes(found(group("a", 0), group("b", 1)))
    assert notes[0].startswith("b − a: top eigenvalue −0.5 [−0.8, −0.2]") and "none is corrected" in notes[1]
    assert difference_notes(found(group("a", 0))) == []


def test_the_page_is_whole_escaped_and_small() -> None:
    text = render(found(group("<a>", 0), group("b", 1), group("b", 1, "client 3")))
    assert "<a>" not in text.replace("<a href", "") and "&lt;note&gt;" in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text) and "http" not in re.sub(r"http-equiv", "", text)
    assert len(text.encode()) < 500_000
    assert text.count("<canvas") == 3 and "Private to the simulation" in text
    assert 'alt="Contours of the loss: &lt;a&gt;, b, b, client 3" src="data:image/svg+xml;base64,' in text
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
    page = tmp_path / "landscape.html"
    page.write_text(render(found(group("a", 0), group("b", 1), group("b", 1, "client 3"))), encoding="utf-8")
    _, messages = browse(page, tmp_path, f"--screenshot={(tmp_path / 'page.png')}")
    assert messages == []  # under the page's own policy
    # Without a screen frames come when they like: let timers stand for them.
    frames = "<script>window.requestAnimationFrame = (paint) => setTimeout(paint, 1);</script></head>"
    page.write_text(page.read_text(encoding="utf-8").replace("</head>", frames), encoding="utf-8")
    state = probe(page, tmp_path, PROBE)
    assert state["turned"] and state["home"] and state["linear"] and state["colours"] > 100 and state["overflow"] <= 0
