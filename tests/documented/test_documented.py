"""What is documented works as users run it: ``make documented`` (``as_user``: new processes, all threads, no caches).

Sizes are the documented ones but for ``SMALL``; engine, back ends and threads are always the default.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from as_user import as_user, works
from pages import NOTEBOOKS, PAGES, ROOT, commands, make_targets, programs

from fedflat.config.reading import names
from fedflat.config.recipe import Recipe

LONG = pytest.mark.documented
"""Not in ``make test``: it takes more than some seconds."""

SMALL = {"compare": "-o rounds=10"}
"""Options for commands whose documented size takes minutes."""

EXAMPLES = ROOT / "examples"
HEADERS = {
    path: found[1].strip().rstrip(".")
    for path in sorted(EXAMPLES.glob("*.py"))
    if (found := re.search(r"\bRun(?: it)?: (.+?)(?:\. |\n|$)", ast.get_docstring(ast.parse(path.read_text())) or ""))
}
PROGRAMS = [(page, number, *found) for page in PAGES for number, found in enumerate(programs(page))]
METHODS = [
    (f"{page.stem}-{name}", code, name)
    for page, _, code, _ in PROGRAMS
    for name in re.findall(r"^def (\w+)\([^)]*\) -> Algorithm:", code, re.MULTILINE)
]
REFUSED = {"centred": "mixes the clients of a block", "follows": "changes once another client was trained"}
"""The pages' examples of methods that are refused, and what the line says."""
NUMBER = re.compile(r"\d+(?:\.\d+)? %|after \d+ rounds")
"""What another processor may round differently."""


@LONG
def test_make_run(tmp_path: Path) -> None:
    """The commands of the target, by the installed ``fedflat``; what it installs is there."""
    planned = ["make", "--no-print-directory", "-n", "-o", ".venv/run.stamp", "run"]
    lines = subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[".venv/bin/fedflat", "compare"]]
    for line in lines:
        left = as_user(line.removeprefix(".venv/bin/"), tmp_path / "here")
        assert works(left), left.out
    assert (tmp_path / "here" / "runs" / "quick-start" / "report.html").is_file()


@LONG
@pytest.mark.parametrize(
    ("page", "number", "code", "shown"), PROGRAMS, ids=[f"{page.stem}-{number}" for page, number, *_ in PROGRAMS]
)
def test_programs_of_the_pages(page: Path, number: int, code: str, shown: str, tmp_path: Path) -> None:
    """Each prints what its page shows; accuracies may differ by what another processor rounds."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "program.py").write_text(code, encoding="utf-8")
    left = as_user("python program.py", folder)
    assert works(left), left.out
    printed = {NUMBER.sub("…", line): line for line in left.out.splitlines()}
    for line in shown.splitlines():
        assert NUMBER.sub("…", line) in printed, f"{line}\n{left.out}"
        there, here = (re.findall(r"(\d+(?:\.\d+)?) %", text) for text in (line, printed[NUMBER.sub("…", line)]))
        assert [float(value) for value in here] == pytest.approx([float(value) for value in there], abs=3)


@LONG
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_of_the_pages(page: Path, tmp_path: Path) -> None:
    """All of a page's commands one after the other, in one folder; Ctrl-C is pressed where the page says so."""
    folder, written = tmp_path / "here", re.compile(r"--out (\S+)")
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert set(words[1:]) <= make_targets(), line
            continue
        assert words[0] == "fedflat", line
        stop: Callable[[], bool] | None = None
        if "Ctrl-C" in line:
            metrics = folder / written.findall(line)[0] / "metrics.jsonl"
            stop = lambda path=metrics: path.exists() and path.read_text().count("\n") > 5  # noqa: E731
        left = as_user(f"{shlex.join(words)} {SMALL.get(words[1], '')}", folder, home=tmp_path / "home", stop_when=stop)
        if stop is None:
            assert works(left), f"{line}\n{left.out}"
        else:
            assert left.status in (0, 130) and "Traceback" not in left.out, f"{line}\n{left.out}"


@LONG
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(notebook: Path, tmp_path: Path) -> None:
    """The cells as one program that no file holds, as in a notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    left = as_user([sys.executable, "-"], tmp_path / "here", stdin=code, MPLBACKEND="Agg", TMPDIR=str(tmp_path))
    assert works(left), left.out


@LONG
@pytest.mark.parametrize("path", list(HEADERS), ids=lambda path: path.stem)
def test_headers_of_the_examples(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(EXAMPLES, folder / "examples")
    left = as_user(HEADERS[path], (folder if "examples/" in HEADERS[path] else folder / "examples"))
    assert works(left), left.out


def test_every_example_but_the_other_frameworks_says_how_to_run_it() -> None:
    assert {path.stem for path in HEADERS} == {
        path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("flower_strategy", "nvflare_aggregator")
    }


@LONG
@pytest.mark.parametrize("name", [name for name in names() if Recipe.load(name).data.dataset == "digits"])
def test_recipes_that_need_no_data(name: str, tmp_path: Path) -> None:
    left = as_user(f"fedflat run {name}", tmp_path / "here")
    assert works(left), left.out


@LONG
def test_a_deployment_on_this_machine(tmp_path: Path) -> None:
    """The first two commands of docs/deploy.md."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^\$ (.+)", text, re.MULTILINE)[:2]
    assert first.startswith("fedflat deploy") and second.startswith("python -m fedflat.federation.local")
    for line in first, second:
        left = as_user(line, tmp_path / "here", home=tmp_path / "home")
        assert works(left), f"{line}\n{left.out}"


@LONG
@pytest.mark.parametrize(("code", "name"), [found[1:] for found in METHODS], ids=[found[0] for found in METHODS])
def test_methods_of_the_pages_by_the_command(code: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    inside = re.search(r"write_text\('''\n(.*?)'''\)", code, re.DOTALL)  # a program that writes the file itself
    (folder / "mine.py").write_text(inside[1] if inside else code, encoding="utf-8")
    left = as_user(f"fedflat run quick-start -o algorithm.name=mine.py:{name} -o rounds=5", folder)
    if name in REFUSED:
        assert left.status == 2 and REFUSED[name] in " ".join(left.out.split())
    else:
        assert works(left), left.out


@LONG
@pytest.mark.parametrize("engine", ["", "-o engine.backend=workers"], ids=["default", "workers"])
def test_a_method_and_a_model_from_files_run_by_the_command(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(EXAMPLES, folder / "examples")
    (folder / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    pass\n\n\ndef make(input_shape, classes):\n"
        "    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, classes))\n"
        "\n\ndef loss(outputs, targets):\n"
        "    return torch.nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    method = "-o algorithm.name=examples/new_method.py:dp_fedprox_sam -o model=net.py:make -o loss=net.py:loss"
    left = as_user(f"fedflat run quick-start {method} -o rounds=2 {engine}", folder)
    assert works(left), left.out
