"""What is kept on this machine, and for how long."""

import os
from pathlib import Path

import pytest
import torch

from fedflat.core import durable


def test_what_was_used_longest_ago_goes_and_the_newest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path))
    monkeypatch.setattr(durable, "KEPT", 2500)
    for age, name in enumerate(["old", "mid"]):
        durable.keep("features", name, {"x": torch.zeros(200)})
        os.utime(tmp_path / f"features-{name}.safetensors", (age, age))
    assert durable.read_tensors(tmp_path / "features-old.safetensors") is not None, "and now it is used"
    durable.keep("features", "new", {"x": torch.zeros(200)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["features-new.safetensors", "features-old.safetensors"]
    durable.keep("features", "big", {"x": torch.zeros(2000)})
    assert [p.name for p in tmp_path.iterdir()] == ["features-big.safetensors"]
