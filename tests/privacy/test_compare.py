"""Where a statement differs from the one that was found, and whether only words do."""

from __future__ import annotations

from fedflat.privacy.compare import differences, unsaid, worded


def test_every_difference_is_named_and_words_are_told_from_figures() -> None:
    stated = {
        "epsilon": 1.0,
        "same": [1, {"a": 2.0}],
        "reasons": ["x"],
        "noise_source": "y" * 80,
        "extra": True,
        "run": 1,
    }
    found = {"epsilon": 2.0, "same": [1, {"a": 2.0 + 1e-9}], "reasons": [], "noise_source": "z", "lost": "w"}
    said = {each.field: each for each in differences(stated, found)}
    assert set(said) == {"epsilon", "reasons", "noise_source", "extra", "lost"}
    assert [name for name in said if worded(said[name])] == ["reasons", "noise_source"]
    assert [name for name in said if unsaid(said[name])] == ["lost"]
    assert str(said["epsilon"]) == "epsilon says 1, and the run gives 2"
    assert "1 entries" in str(said["reasons"]) and "…" in str(said["noise_source"])
    assert "True" in str(said["extra"]) and differences(found, found) == []
