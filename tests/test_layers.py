"""Who may import whom, and what may not appear in the package at all: read from the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import fedflat

ROOT = Path(fedflat.__file__).parent

_LOW = {"core"}
_LIVE = _LOW | {"privacy", "pieces", "data", "models", "records", "engine", "algorithms", "config"}
"""What the rooms see that turn a recipe into live objects."""

MAY_IMPORT = {
    "core": set(), "privacy": _LOW, "pieces": _LOW, "algorithms": _LOW | {"pieces"}, "config": _LOW | {"algorithms"},
    "data": _LOW | {"config"}, "models": _LOW, "records": _LOW | {"privacy"},
    "engine": _LOW | {"privacy", "data", "records", "config"}, "guard": _LOW | {"privacy", "pieces", "engine"},
    "backends": _LOW | {"data", "records", "engine"},
    "methods": _LOW | {"privacy", "pieces", "data", "engine", "backends", "config"},
    "assembly": _LIVE - {"pieces", "records", "algorithms"} | {"backends", "methods"}, "report": _LOW | {"privacy"},
    "simulation": _LIVE - {"pieces", "models", "algorithms"} | {"assembly", "report"},
    "estimator": {"core", "data", "simulation"},
    "landscape": {"core", "records", "engine", "backends", "config", "assembly", "report"},
    "papers": {"core", "privacy", "config", "methods", "assembly", "report", "simulation", "landscape"},
    "audit": {"core", "privacy", "data", "records", "engine", "config", "assembly", "simulation"},
    "federation": _LIVE - {"models", "algorithms", "pieces", "data"} | {"methods", "assembly", "report"},
}  # fmt: skip
"""Every room but the command line: it imports rooms above it in this table, and itself."""

MOST_ROOMS = 8
TOP = {"cli", "__init__", "__main__"}
"""They may import everything, and nothing imports them but one another."""
NAMES_NOT_TO_USE = {"utils", "helpers", "common", "base", "manager"}


def room(path: Path) -> str:
    """The room of a file: the folder, or the module's own name at the top."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.AST, path: Path) -> Iterator[list[str]]:
    """Every import of the package in a file, those inside functions too, as the parts of the module's name."""
    package = ["fedflat", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".") for name in node.names if name.name.split(".")[0] == "fedflat")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                module = package[: len(package) - node.level + 1] + module
            if module[:1] == ["fedflat"]:
                yield from ([*module, name.name] for name in node.names)


def layer_faults(sources: dict[Path, str]) -> list[str]:
    """Imports that the table forbids, imports of the top, and pieces that import their siblings."""
    faults = []
    for path, text in sources.items():
        mine = room(path)
        if mine not in MAY_IMPORT.keys() | TOP:
            faults.append(f"{path.relative_to(ROOT)} is in no room of the table")
            continue
        for parts in imported(ast.parse(text), path):
            other = parts[1] if len(parts) > 1 else ""
            if mine not in TOP and other and other != mine and other not in MAY_IMPORT[mine]:
                faults.append(f"{path.relative_to(ROOT)} imports {'.'.join(parts)}")
            if mine == "pieces" and other == "pieces":
                faults.append(f"{path.relative_to(ROOT)} imports its sibling {'.'.join(parts)}")
    return faults


def doors(sources: dict[Path, str]) -> dict[str, set[str]]:
    """What each room's ``__init__`` says that others may import, by room; core's finds any name of its files."""
    found: dict[str, set[str]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body if path.name == "__init__.py" and room(path) in MAY_IMPORT else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                found[room(path)] = set(ast.literal_eval(node.value))
    return found


def door_faults(sources: dict[Path, str], open_doors: dict[str, set[str]]) -> list[str]:
    """Imports of what another room does not open."""
    return [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}, which {parts[1]}/__init__.py does not name"
        for path, text in sources.items() if room(path) not in TOP
        for parts in imported(ast.parse(text), path)
        if len(parts) > 2 and parts[1] in open_doors and parts[1] != room(path)
        and parts[2] not in open_doors[parts[1]]
    ]  # fmt: skip


def habit_faults(sources: dict[Path, str]) -> list[str]:
    """Global random generators, pickled data, asserts, and names that say nothing."""
    faults = []
    for path, text in sources.items():
        where = str(path.relative_to(ROOT))
        if path.stem in NAMES_NOT_TO_USE:
            faults.append(f"{where}: a name that says nothing")
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Assert):
                faults.append(f"{where}:{node.lineno}: assert")
            pinned = where == "models/networks.py" and "weights_only=True" in ast.unparse(node)  # its digest is checked
            # A user's own file is code to be run, and this is the one place that runs it.
            pinned |= where == "core/imports.py" and ast.unparse(node).startswith("exec(compile(text, place, 'exec'")
            if not pinned and called in {"torch.load", "torch.save", "pickle.load", "pickle.loads", "eval", "exec"}:
                faults.append(f"{where}:{node.lineno}: {called}")
            seeds = {"np.random.seed", "numpy.random.seed", "random.seed", "torch.manual_seed", "np.random.default_rng"}
            if called in seeds and where != "core/rng.py":
                faults.append(f"{where}:{node.lineno}: {called}; use fedflat.core.rng.stream")
    return faults


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def test_imports_point_downwards(sources: dict[Path, str]) -> None:
    assert layer_faults(sources) == []
    assert max(map(len, MAY_IMPORT.values())) <= MOST_ROOMS


def test_rooms_are_entered_by_their_doors(sources: dict[Path, str]) -> None:
    open_doors = doors(sources)
    rooms = {name for name in MAY_IMPORT if (ROOT / name).is_dir()}
    assert rooms - {"core", "federation"} == open_doors.keys()  # core's door is lazy; nobody enters a federation
    for name, files in open_doors.items():
        here = {path.stem for path in (ROOT / name).iterdir()}
        assert all(hasattr(import_module(f"fedflat.{name}"), file) for file in files - here)
    assert door_faults(sources, open_doors) == []
    through_a_wall = {ROOT / "simulation" / "new.py": "from fedflat.engine.measured import add_clipped"}
    assert len(door_faults(through_a_wall, open_doors)) == 1


def test_no_bad_habits(sources: dict[Path, str]) -> None:
    assert habit_faults(sources) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/new.py", "from fedflat.privacy import plan"),
        ("newroom/new.py", "X = 1"),
        ("core/new.py", "def f():\n    import fedflat.engine.round"),
        ("privacy/new.py", "from fedflat.pieces import clipping"),
        ("pieces/new.py", "from fedflat.pieces.clipping import norms_of"),
        ("pieces/new.py", "from .clipping import norms_of"),
        ("engine/new.py", "from fedflat.pieces import clipping"),
        ("algorithms.py", "from fedflat.engine import round"),
        ("report/new.py", "from fedflat import engine"),
        ("models/new.py", "from ..data import clients"),
        ("simulation/run.py", "from fedflat.commands import training"),
    ],
)
def test_a_forbidden_import_is_found(file: str, text: str) -> None:
    assert len(layer_faults({ROOT / file: text})) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("engine/new.py", "import numpy as np\nnp.random.seed(0)"),
        ("engine/new.py", "import torch\ntorch.manual_seed(0)"),
        ("engine/new.py", "import torch\ntorch.load('x')"),
        ("engine/new.py", "def f(x):\n    assert x"),
        ("engine/utils.py", ""),
    ],
)
def test_a_bad_habit_is_found(file: str, text: str) -> None:
    assert len(habit_faults({ROOT / file: text})) == 1


def test_the_design_page_has_every_room() -> None:
    page = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("## Rooms")[2].partition("##")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines() if row.startswith("| `")]
    shown = {room.strip("`").rstrip("/").removesuffix(".py"): allowed for room, _, allowed in rows}
    assert list(shown) == [*MAY_IMPORT, "cli"]
    assert shown.pop("core") == "nothing of ours" and shown.pop("cli") == "everything"
    assert {room: set(allowed.split(", ")) for room, allowed in shown.items()} == {
        room: allowed for room, allowed in MAY_IMPORT.items() if allowed
    }


def test_import_fedflat_is_light() -> None:
    """Neither the package nor its simulation pulls in libraries that only some runs need."""
    heavy = ("datasets", "transformers", "flwr", "ray", "plotly", "sklearn", "matplotlib", "pandas", "pyarrow")
    heavy += ("scipy", "dp_accounting")
    code = (
        "import fedflat, sys; print('torch' in sys.modules); import fedflat.simulation.run; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert found.stdout.split("\n")[:2] == ["False", "[]"]
