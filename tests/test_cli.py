"""The command line: exit statuses, one-line errors, resuming, listing, JSON."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len

from fedflat.cli import main as cli
from fedflat.engine.device import out_of_memory
from fedflat.report.progress import Progress

TINY: dict[str, Any] = {
    "name": "tiny", "rounds": 3, "data": {"dataset": "digits", "clients": 20, "max_examples": 400},
    "model": {"name": "mlp", "hidden": 8}, "algorithm": {"name": "dp-fedsam", "rho": 0.05},
    "local": {"steps": 3, "batch_size": 16}, "cohort": {"size": 8},
    "privacy": {"randomness": "seeded", "noise_multiplier": 1.0, "accountant": "rdp"},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A tiny recipe's file."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return "tiny.yaml"


def test_run_trains_and_ends_with_a_summary(command: Any, recipe: str) -> None:
    said = command("run", recipe, "--out", "here")
    assert said.status == 0 and said.err.startswith("note: The noise drowns") and said.err.count("\n") == 1
    assert "round 3/3" in said.out and "ε of the mechanism" in said.out and "here/report.html" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    files = {path.name for path in Path("here").iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "private", "ledger.jsonl", "privacy.json", "report.html"} <= files
    assert len(Path("here/metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_in_which_every_update_is_nan_fails(command: Any, recipe: str) -> None:
    said = command("run", recipe, "--out", "here", "-o", "local.lr=1e38")
    assert said.status == 1 and Path("here/report.html").exists()
    assert "no update of any client was finite in any round" in said.err.splitlines()[-1]


def test_run_without_out_never_writes_into_an_older_run(command: Any, recipe: str) -> None:
    for _ in range(2):
        assert command("run", recipe, "-o", "rounds=1").status == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny", "tiny-2"]
    assert "*  1/1  " in (shown := command("runs").out) and "\n* ε of the mechanism: " in shown


def test_run_as_json_prints_json_only(command: Any, recipe: str) -> None:
    said = command("run", recipe, "--out", "here", "--json")
    found = json.loads(said.out)
    assert said.status == 0 and found["folder"] == "here" and found["last"]["round"] == 2
    assert found["privacy"]["proven_epsilon"] > 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["-o", "privacy.clp=1"], ["privacy.clp", "Did you mean clip?"]),
        (["-o", "cohort.sampling=poison"], ["cohort.sampling", "poison", "Did you mean poisson?"]),
        (["-o", "rounds"], ["-o: found rounds", "key.path=value"]),
        (["-o", "algorithm.name=dp-fedsm"], ["algorithm.name", "dp-fedsm", "Did you mean dp-fedsam?"]),
        (["-o", "algorithm.roh=1"], ["algorithm.roh", "Did you mean rho?"]),
        (["-o", "algorithm.adaptive=maybe"], ["algorithm.adaptive: found maybe", "true or false"]),
        (["-o", "data.dataset=digts"], ["data.dataset", "digts", "Did you mean digits?"]),
        (["-o", "model.name=mpl"], ["model.name", "mpl", "Did you mean mlp?"]),
        (["-o", "engine.backend=gpu"], ["engine.backend", "gpu"]),
        (["-o", "engine.device=cuda"], ["engine.device", "found cuda", "allowed: cpu or auto"]),
        (["-o", "privacy.epsilon=3"], ["both noise_multiplier and epsilon"]),
        (["-o", "privacy.accountant=rpd"], ["rpd"]),
        (["--ot", "x"], ["--ot"]),
        (["-o", "a\x1b[2J"], ["-o: found a?[2J;"]),  # nothing that was typed steers the terminal
    ],
)
def test_bad_input_is_one_line_and_status_2(command: Any, recipe: str, words: list[str], parts: list[str]) -> None:
    said = command("run", recipe, *words)
    assert said.status == 2
    assert said.err.startswith("fedflat: ") and said.err.count("\n") == 1
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "text", ["a: [1", "- a\n- b\n", "", "rounds: 3\n", "rounds: {}\n\tx: 1\n", "\x00", "a: &x [*x]"]
)
def test_bad_yaml_is_one_line(command: Any, text: str) -> None:
    Path("bad.yaml").write_text(text)
    said = command("run", "bad.yaml")
    assert said.status == 2 and said.err.count("\n") == 1 and "bad.yaml" in said.err


@pytest.mark.parametrize("key", ["rounds", "privacy.epsilon", "local.lr", "data.clients", "privacy.clip"])
def test_true_is_not_the_number_one(command: Any, recipe: str, key: str) -> None:
    said = command("run", recipe, "-o", f"{key}=true")
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert f"{key}: found True; allowed: a number, not true or false." in said.err


def test_a_folder_that_holds_a_run_is_kept(command: Any, recipe: str) -> None:
    said = command("run", recipe, "--out", "there", "-o", "seed=7", "--out=here", "-o", "seed=0")
    assert said.status == 0 and "Warning: -o seed is given twice, and only the last counts, seed=0" in said.err
    before = {path: path.read_bytes() for path in Path("here").iterdir() if path.is_file()}
    said = command("run", recipe, "--out", "here", "-o", "seed=1")
    assert said.status == 2 and "--resume here" in said.err and said.err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in Path("here").iterdir() if path.is_file()}


def stopping(number: int) -> Callable[..., None]:
    """What stands for ``Progress.round``: after the round is shown, this signal comes."""
    known = Progress.round

    def stop(self: Progress, released: Any, private: Any) -> None:
        known(self, released, private)
        signal.raise_signal(number)

    return stop


def test_resume_goes_on_from_the_folders_own_recipe(command: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after two rounds, by a signal each, and resumed: the records and ledger of a run that was not stopped."""
    assert command("run", recipe, "--out", "whole").status == 0
    words: tuple[str, ...] = (recipe, "--out", "parts")
    for rounds, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        with monkeypatch.context() as patch:
            patch.setattr(Progress, "round", stopping(number))
            said = command("run", *words)
        assert said.status == 128 + number and "fedflat run --resume parts" in said.out
        assert len(Path("parts/metrics.jsonl").read_text().splitlines()) == rounds
        words = ("--resume", "parts")
        with monkeypatch.context() as patch:  # stopped once more, before its next round
            patch.setattr(
                "fedflat.assembly.planning.drowned", lambda *given, number=number: signal.raise_signal(number) or []
            )
            said = command("run", *words)
            assert "ended already" not in said.out and "fedflat run --resume parts" in said.out
    said = command("run", *words)
    assert said.status == 0 and said.err.startswith("note: The noise drowns") and said.err.count("\n") == 1
    for file in ("ledger.jsonl", "privacy.json", "recipe.yaml"):
        assert Path("parts", file).read_bytes() == Path("whole", file).read_bytes()
    assert timeless("parts") == timeless("whole")
    Path("parts/metrics.jsonl").write_text(Path("whole/metrics.jsonl").read_text()[1:])  # damaged
    said = command("run", *words).out
    assert "parts: this run had ended already; nothing was trained." in said and "no line for round 0, counted" in said


def timeless(folder: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models", "recipes", "accountants"])
def test_list_prints_each_name_with_a_line(command: Any, kind: str) -> None:
    said = command("list", kind)
    names = json.loads(command("list", kind, "--json").out)
    assert said.status == 0 and len(names) >= 2
    for name, about in names.items():
        assert about and name.split()[0] in said.out
    assert len(said.out.splitlines()) == len(names)  # in a pipe one line each, however long


def test_list_alone_lists_everything(command: Any) -> None:
    said = command("list")
    assert said.status == 0 and {"algorithms", "datasets", "models", "recipes", "accountants"} <= set(
        said.out.splitlines()
    )


def test_explain_prints_a_key_and_points_at_the_nearest(command: Any) -> None:
    said = command("explain", "privacy.clip")
    assert said.status == 0 and "privacy.clip.quantile" in said.out
    assert max(map(cell_len, said.out.splitlines())) <= 80
    assert max(map(cell_len, command("explain").out.splitlines())) <= 80
    said = command("explain", "clip")
    assert said.status == 2 and "privacy.clip?" in said.err


@pytest.mark.usefixtures("quick_workers")
def test_compare_finds_what_only_the_data_or_model_can_tell(command: Any, recipe: str) -> None:
    said = command("compare", recipe, "-o", "model.name=mlp,mpl", "--out", "x", "--processes", "1")
    assert said.status == 2 and "Did you mean mlp?" in said.err and said.err.count("\n") == 1
    assert not Path("x").exists()


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["compare", "--help"], ["list", "-h"]])
def test_help_is_there_and_narrow(command: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = command(*words)
    assert said.status == 0 and "Usage" in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_the_real_command_exits_with_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedflat", "run", "nowhere.yaml", "--out", str(tmp_path / "x")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2 and found.stdout == ""
    assert (
        found.stderr.startswith("fedflat: recipe: found no file and no packaged recipe nowhere.yaml")
        and found.stderr.count("\n") == 1
    )


def test_help_and_mistakes_answer_without_torch() -> None:
    """Reading a recipe must not wait for torch, SciPy or the accountants; assembling the commands not for pydantic."""
    code = (
        "import sys; from fedflat.cli import main; main._assemble(); print('pydantic' in sys.modules); "
        "from fedflat.config.recipe import Recipe; Recipe.load('quick-start'); "
        "print([m for m in ('torch', 'scipy', 'dp_accounting') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "[]"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "nosuch.yaml"), "no file and no packaged recipe nosuch.yaml"),
        (("run", "quick-strat"), "Did you mean quick-start?"),
        (("run", "tny.yaml"), "Did you mean tiny.yaml?"),
        (("run", "folder"), "the folder folder without a recipe.yaml"),
        (("run", "empty.yaml"), "an empty file"),
        (("run", "bad.yaml"), "bad.yaml line 2"),
        (("run", "--resume", "folder"), "--resume: found folder, which has no recipe.yaml"),
        (("run", "--resume", "nowhere"), "--resume: found nowhere, which is no folder"),
        (("run", "--resume", "folder", "--out", "x"), "a recipe, -o or --out as well; allowed: --resume DIR alone"),
        (("compare", "tiny.yaml", "--seeds", "two"), "--seeds: found two; allowed: a whole number."),
        (
            ("run", "tiny.yaml", "--epsilon", "4"),
            "option '--epsilon'. A recipe's key is changed with -o privacy.epsilon=VALUE",
        ),
        (("run", "tiny.yaml", "--roundz", "4"), "option '--roundz'. A recipe's key is changed with -o rounds=VALUE"),
        (("run", "tiny.yaml", "--out", "empty.yaml"), "--out: found empty.yaml, which is no folder"),
        (("run", "tiny.yaml", "--out", ""), "--out: found nothing"),
        (("compare", "tiny.yaml", "--out="), "--out: found nothing"),
        (("run", "tiny.yaml", "-o", "name=../../escape"), "name: found ../../escape; allowed: a name that can be"),
        (("compare", "tiny.yaml", "-o", "name=../../escape"), "name: found ../../escape; allowed: a name that can be"),
        (("run", "tiny.yaml", "-o", "rounds=0"), "rounds: found 0; allowed: a number ≥ 1"),
        (("run", "tiny.yaml", "-o", "server=3"), "server: found 3; allowed: a section with some of optimizer, lr"),
        (("run", "tiny.yaml", "-o", "local.lr=-1"), "a number > 0"),
        (("run", "tiny.yaml", "-o", "algorithm.name=own.py"), "name: found own.py; allowed: path/to/file.py:"),
        (("run", "tiny.yaml", "-o", "algorithm.name=own.py:make", "-o", "algorithm.mu=x"), "mu: found x; allowed: a"),
        (("run", "tiny.yaml", "-o", "engine.compile=true"), "engine.compile: found True; allowed: False."),
        (("run", "tiny.yaml", "--out"), "fedflat: Option '--out' requires an argument."),
        (("run", "tiny.yaml", "-o", "data.clients=1e9"), "data.clients: found 1000000000; allowed: at most"),
        (("runs", "nowhere"), "runs: found nowhere, no such folder"),
        (("runs", "folder"), "runs: found folder, without runs"),
        (("verify", "folder", "--witness", "nowhere"), "--witness: found nowhere, no such file"),
        (("predict", "folder"), "predict [OPTIONS] RUN FILE"),
        (("predict", "folder", ""), "the word after folder: found nothing; allowed: a value"),
        (("list", "nosuch"), "algorithms, datasets, models, recipes, accountants"),
        (("list", "algoritms"), "Did you mean algorithms?"),
        (("compare", "tiny.yaml", "-o", "cohort.sampling=full,poison", "--out", "x"), "Did you mean poisson?"),
        (("reproduce", "000"), "found 000 without a table"),
    ],
)
def test_first_mistakes(command: Any, recipe: str, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "own.py").write_text("def make(mu=0.1):\n    raise ValueError('no mu')\n")
    (tmp_path / "bad.yaml").write_text("rounds: [3\nlocal: {a\n")
    said = command(*words)
    assert said.status == 2 and said.out == ""
    assert sentence in said.err and said.err.count("\n") == 1 and len(said.err) < 400
    assert not Path("x").exists()


def test_a_misspelt_command_is_corrected_once(command: Any) -> None:
    for word, meant in (("comprae", "compare"), ("ruun", "'runs'")):
        said = command(word)
        assert said.status == 2 and said.err.count(meant) == 1


def test_an_output_without_greek_letters_gets_them_spelled() -> None:
    """As with LC_ALL=C: an ε that became a ? would be no statement."""
    done = subprocess.run(
        [sys.executable, "-m", "fedflat", "budget", "--clients", "20", "--cohort", "20", "--rounds", "2",
         "--noise-multiplier", "2", "--trust", "central", "--accountant", "rdp"],
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, check=True,
    )  # fmt: skip
    said = done.stdout.decode("ascii")
    assert "sigma = 2, delta = 0.005" in said and " eps" in said and "?" not in said
    assert "".join(map(cli._ascii, "ε·√Σx² …")) == "eps*sqrtsumx2 ..."


def test_explain_breaks_no_name_of_a_method(command: Any) -> None:
    said = command("explain", "algorithm.rho")
    assert said.status == 0 and "dp-fedsam-topk" in said.out


def test_memory_that_was_short_is_known_by_its_words() -> None:
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert out_of_memory(MemoryError()) and not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_full_disk_is_one_line_wherever_it_was_met() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "run/report.html")
    assert str(cli._refused(full)).startswith("('run/report.html: cannot be written (No space left on device)")
    assert "a file: cannot be written" in str(cli._refused(ValueError("I/O error: File too large (os error 27)")))
    assert str(cli._refused(OSError(errno.ENOENT, "none", "x"))).endswith("read or write.', 2)")
    assert cli._refused(OSError(errno.ENOENT, "none")) is cli._refused(ValueError("28")) is None
