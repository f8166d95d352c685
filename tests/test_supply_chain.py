"""What may be installed: every pin has hashes, every requirement of the set-up commands has a pin in its range."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fedflat

ROOT = Path(fedflat.__file__).parents[1]
LOCK = ROOT / "constraints.txt"
EXTRAS = ("dev", "docs", "language", "federation", "scale", "onnx", "vision", "excel")
"""What the Makefile installs."""

if not LOCK.is_file():
    pytest.skip("not a checkout", allow_module_level=True)


def pins(text: str) -> dict[str, tuple[str, list[str]]]:
    """name -> (version, hashes); the last of several versions that have different markers."""
    found = {}
    for entry in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines():
        need, *hashes = entry.split("--hash=")
        parsed = Requirement(need.strip())
        found[parsed.name] = (str(parsed.specifier), [h.strip() for h in hashes])
    return found


PINNED, CPU = pins(LOCK.read_text()), pins((ROOT / "constraints-cpu.txt").read_text())


def test_every_pin_is_exact_and_has_hashes() -> None:
    for name, (version, hashes) in [*PINNED.items(), *CPU.items()]:
        assert version.startswith("==") and "*" not in version, name
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), name
        assert len(set(hashes)) == len(hashes), name


def test_every_requirement_has_a_pin_in_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needs += [line for extra in EXTRAS for line in project["project"]["optional-dependencies"][extra]]
    needs += [line for group in project["dependency-groups"].values() for line in group]
    for line in needs:
        need = Requirement(line)
        assert need.specifier.contains(PINNED[need.name.lower()][0].removeprefix("==")), line


def test_the_processors_wheel_is_the_pinned_version() -> None:
    assert {name: version.partition("+")[0] for name, (version, _) in CPU.items()} == {"torch": PINNED["torch"][0]}


def test_what_doctor_compares_with_is_what_is_pinned() -> None:
    tested = (ROOT / "fedflat" / "tested.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in tested} >= {"torch", "numpy", "dp-accounting", "flwr"}
    assert all(PINNED[name][0] == f"=={version}" for name, version in (line.split("==") for line in tested))
