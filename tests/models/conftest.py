"""For every test of this folder: a cache of its own, and no features remembered."""

from pathlib import Path

import pytest

from fedflat.backends import features


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDFLAT_CACHE", str(folder))
    features._LAST.clear()
    return folder
