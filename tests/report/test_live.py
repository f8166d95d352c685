"""The live page: only with its token, nothing private unless asked, it follows a run, also without a script."""

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from synthetic_runs import write_run
from test_report_browser import CHROMIUM, FLAGS

from fedflat.core.checks import InputError
from fedflat.report.live import Live, listed, served

pytest.importorskip("starlette")


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        return str(answer.read().decode())


def begun(folder: Path, rounds: int) -> Path:
    """A run that is going on: some of its rounds are recorded, and there is no statement."""
    write_run(folder, rounds=20)
    for name in ("metrics.jsonl", "private/private.jsonl"):
        (folder / name).write_text("".join((folder / name).read_text().splitlines(keepends=True)[:rounds]))
    (folder / "privacy.json").unlink()
    return folder


def test_only_with_the_token_and_nothing_private(tmp_path: Path) -> None:
    live = Live(begun(tmp_path / "run", 8))
    with served(live) as address:
        page = fetched(address)
        for bad in ("", "?token=", "?token=é", f"?token={live.token[:-1]}", f"?token={live.token}x"):
            for path in ("", "body", "events"):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    fetched(f"{address.partition('?')[0]}{path}{urllib.parse.quote(bad, safe='?=')}")
    assert "127.0.0.1" in address and live.token not in repr(live) and live.token not in page
    assert "8 of 20" in page and 'id="f-accuracy"' in page and "49 s" in page
    assert '<noscript><meta http-equiv="refresh"' in page
    assert 'id="f-cohort"' not in page and "private" not in page.split("</style>")[1].lower()
    shown = Live(tmp_path / "run", private=True).page()
    assert 'id="f-cohort"' in shown and "not covered by the guarantee" in shown


def test_an_operator_sees_how_the_superlink_does_in_private_alone(tmp_path: Path) -> None:
    begun(tmp_path / "fed" / "run", 8)
    (tmp_path / "fed" / "server").mkdir()
    (tmp_path / "fed" / "server" / "status.json").write_text('{"SuperNodes online": "3 of 4"}\n')
    pages = [Live(tmp_path / "fed", private, tmp_path).page() for private in (False, True)]
    assert ['id="status"' in page for page in pages] == ["3 of 4" in page for page in pages] == [False, True]
    (tmp_path / "fed" / "server" / "status.json").write_text("[1]\n")  # damaged: said, beside all the rest
    page = Live(tmp_path / "fed", True, tmp_path).page()
    assert "8 of 20" in page and "status.json, line 1: found a damaged line" in page


def test_an_operator_sees_refused_replies_in_private_alone(tmp_path: Path) -> None:
    with (begun(tmp_path / "run", 8) / "recipe.yaml").open("a") as recipe:
        recipe.write("versions: {run: abc}\n")
    (tmp_path / "abc.jsonl").write_text('{"round": 0, "missing": 1, "size": 2}\n{"round": 2, "size": 1}\n')
    pages = [Live(tmp_path / "run", private, tmp_path).page() for private in (False, True)]
    assert ['id="replies"' in page for page in pages] == [False, True]
    assert re.search(r"size</t[dh]>\s*<td[^>]*>3<", pages[1]) and "missing" not in pages[0]


def test_before_the_first_round_and_while_a_record_is_written(tmp_path: Path) -> None:
    assert "No round is recorded yet" in Live(tmp_path).page()
    folder = begun(tmp_path / "run", 3)
    with (folder / "metrics.jsonl").open("a") as records:
        records.write('{"round": 3, "test_acc')
    assert "3 of 20" in Live(tmp_path).page()
    for name in ("metrics.jsonl", "private/private.jsonl"):  # damaged: said, here and by fedflat runs
        (folder / name).write_text('{"round": 0}\n"SECRET"\n')
        page, (sound, faults) = Live(tmp_path).page(), listed(tmp_path)
        said = f"{folder.name}/{name}, line 2: found a damaged line"
        assert said in page and "No round" not in page and "SECRET" not in page
        assert not sound and said in str(faults[0])
        (folder / name).unlink()


def test_the_stream_tells_of_a_new_round(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", 4)
    more = write_run(tmp_path / "whole", rounds=20) / "metrics.jsonl"
    with served(Live(folder)) as address:
        with urllib.request.urlopen(address.replace("/?", "/events?"), timeout=20) as events:
            first = next(line for line in events if line.startswith(b"data:"))
            (folder / "metrics.jsonl").write_text("".join(more.read_text().splitlines(keepends=True)[:9]))
            assert next(line for line in events if line.startswith(b"data:")) != first
        assert "9 of 20" in fetched(address.replace("/?", "/body?"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_run(tmp_path: Path) -> None:
    """Its policy blocks nothing that the page needs; the axes' buttons, which need a script, are there with one."""
    live = Live(write_run(tmp_path / "run", rounds=20))
    with served(live) as address:
        assert CHROMIUM is not None and '<fieldset class="axis" hidden>' in live.page()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "20 of 20" in done.stdout and "CONSOLE" not in done.stderr and '<fieldset class="axis">' in done.stdout
    assert "<summary>Data" not in done.stdout  # a table of numbers that nothing fills


def test_the_runs_of_a_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "done", rounds=3)
    begun(tmp_path / "b", 2)
    write_run(tmp_path / "c", rounds=1)
    (tmp_path / "c" / "recipe.yaml").write_text("{broken", encoding="utf-8")
    write_run(tmp_path / "forged", rounds=3, statement={"checksum": "0" * 64})
    sound, damaged = listed(tmp_path)
    assert len(sound) == 3 and len(damaged) == 1 and "recipe.yaml: found what cannot be read" in str(damaged[0])
    found = {Path(each["run"]).name: each for each in sound}
    assert found["done"]["state"] == "done" and found["done"]["epsilon"] == 9.37 and found["done"]["data"] == "cifar10"
    assert found["b"]["state"] == "killed" and found["b"]["epsilon"] is None and found["b"]["rounds"] == 2
    assert found["forged"]["state"] == "damaged" and found["forged"]["epsilon"] is None
    assert json.dumps(list(found.values()))
    with pytest.raises(InputError, match="no such folder"):
        listed(tmp_path / "nothing")
