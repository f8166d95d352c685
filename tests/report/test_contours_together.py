"""Level lines of several surfaces in one square."""

import re

from fedflat.report import plates


def test_each_long_line_has_its_loss_on_it_and_its_surface_in_its_title() -> None:
    steps = [-1.0, 0.0, 1.0]
    bowl = [[0.1 + a * a + b * b for b in steps] for a in steps]
    wide = [[0.1 + (a * a + b * b) / 2 for b in steps] for a in steps]
    drawn = plates.overlay([("narrow", 0, bowl), ("w<ide", 1, wide)], steps, [0.3, 0.6])
    assert re.findall(r"<title>(.*?)</title>", drawn) == [
        "narrow, loss 0.3", "narrow, loss 0.6", "w&lt;ide, loss 0.3", "w&lt;ide, loss 0.6",
    ]  # fmt: skip
    assert (
        len(re.findall(r'<text class="level c0 d0"', drawn)) == 2 and "Contours of the loss: narrow, w&lt;ide" in drawn
    )
    corner = [[0.1 if (a, b) != (1.0, 1.0) else 0.4 for b in steps] for a in steps]
    assert '<text class="level' not in plates.overlay([("corner", 0, corner)], steps, [0.39])
