"""What a worker process finds in its environment, and that the parent's own is as it was."""

import json
import os
import subprocess
import sys

import pytest

from fedflat.backends.workers import _worker_environment

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLIBC_TUNABLES")
LARGE = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, LARGE),
        ("", LARGE),
        ("glibc.malloc.arena_max=1", f"glibc.malloc.arena_max=1:{LARGE}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=1", "glibc.malloc.hugetlb=2:glibc.malloc.arena_max=1"),
    ],
)
def test_one_thread_and_large_pages_unless_the_user_says_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    before = {name: os.environ.get(name) for name in NAMES}
    with pytest.raises(KeyError), _worker_environment():
        child = subprocess.run(
            [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"], capture_output=True,
            check=True, text=True,
        )  # fmt: skip
        raise KeyError
    assert [json.loads(child.stdout).get(name) for name in NAMES] == ["1", "1", found]
    assert {name: os.environ.get(name) for name in NAMES} == before
