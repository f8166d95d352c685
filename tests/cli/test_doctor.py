"""``fedflat doctor`` and ``fedflat --version``: what they say, in what form, and what counts as broken."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

import fedflat
from fedflat.cli import doctor
from fedflat.cli import main as cli


@pytest.fixture
def said(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call a command with state of its own: (status, stdout)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return lambda *words: command(*words)[:2]


def findings(said: Any, status: int = 0) -> dict[str, dict[str, str]]:
    found, text = said("doctor", "--json")
    assert found == status, text
    facts = json.loads(text)
    assert facts["ok"] is (status == 0)
    worst: dict[str, dict[str, str]] = {}
    for one in facts["findings"]:
        if one["what"] not in worst or one["state"] != "ok":
            worst[one["what"]] = one
    return worst


def test_a_working_installation(said: Any) -> None:
    status, text = said("doctor")
    assert status == 0 and text.endswith("Nothing that a run needs is broken.\n")
    assert max(map(cell_len, text.splitlines())) <= 80 and "[federation]" in text
    found = findings(said)
    assert {"python", "fedflat", "torch", "numpy", "dp-accounting", "cores", "GPU", "noise keys"} <= set(found)
    assert all(one["state"] != "broken" for one in found.values())
    assert list(Path().iterdir()) == []  # it looked, and left nothing


def test_a_missing_and_a_wrong_package(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name in ("scipy", "onnxscript"):
            raise metadata.PackageNotFoundError(name)
        return "0.4.1" if name == "dp-accounting" else known(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = findings(said, 1)
    assert found["scipy"]["state"] == found["dp-accounting"]["state"] == "broken"
    assert "needs >=0.6" in found["dp-accounting"]["found"] and "pip install '" in found["scipy"]["remedy"]
    assert found["[onnx]"]["state"] == "note" and "[onnx]'" in found["[onnx]"]["remedy"]
    status, text = said("doctor")
    assert status == 1 and "2 broken" in text and max(map(cell_len, text.splitlines())) <= 80


def test_a_torch_that_does_not_load(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = findings(said, 1)
    assert found["torch"]["state"] == "broken" and "new environment" in found["torch"]["remedy"]


def test_keys_that_others_may_see(said: Any, tmp_path: Path) -> None:
    keys = tmp_path / "state" / "fedflat" / "keys"
    keys.mkdir(parents=True)
    keys.chmod(0o755)
    assert findings(said, 1)["noise keys"]["remedy"] == f"chmod 700 '{keys}'"
    keys.chmod(0o700)
    assert findings(said)["noise keys"]["state"] == "ok"


def test_a_full_disk(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert findings(said, 1)["disk"]["state"] == "broken"


def test_a_folder_one_may_not_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**where: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    found = doctor._writable("runs", tmp_path / "x", "another")
    assert found.state == "broken" and "Permission denied" in found.found and found.remedy == "another"


def test_an_encoding_without_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.locale, "getpreferredencoding", lambda do: "ANSI_X3.4-1968")
    assert next(doctor._text()).state == "note"


def test_the_version_is_fast(said: Any) -> None:
    assert said("--version") == (0, f"fedflat {fedflat.__version__}\n")
    code = "import sys; from fedflat.cli.main import main; sys.argv[1:] = ['--version']\n"
    code += "try: main()\nexcept SystemExit: pass"
    code += "\nprint([m for m in ('torch', 'scipy', 'numpy') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(fedflat.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert found.stdout.splitlines()[1:] == ["[]"]


def test_no_command_shows_the_help_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fedflat"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    found = capsys.readouterr()
    assert end.value.code == 2 and "Usage" in found.out and found.err == ""
