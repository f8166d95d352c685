"""Names, options and import paths."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.models import BUILDERS, NAMES, build

FILE = """
import torch
from torch import nn

def fixed():
    return nn.Linear(4, 3)

def sized(classes, input_shape, scale=1.0):
    module = nn.Linear(input_shape[0], classes)
    nn.init.constant_(module.bias, scale)
    return module

def half(classes):
    return nn.Linear(4, classes)

def wide(**kw):
    return nn.Linear(kw["input_shape"][0], kw["classes"] * kw.get("times", 1))

def demanding(vocabulary, classes):
    return nn.Linear(4, classes)

def number():
    return 3

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(4, classes)
constant = 1
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "my_models.py"
    file.write_text(FILE)
    return str(file)


def test_every_name_has_a_builder_and_a_line() -> None:
    assert set(NAMES) == set(BUILDERS)
    assert all("parameters" in line and "\n" not in line for line in NAMES.values())


def test_a_file_path_with_and_without_arguments(path: str) -> None:
    assert build(f"{path}:fixed", (9,), 7, 0).weight.shape == (3, 4)
    assert build(f"{path}:sized", (9,), 7, 0).weight.shape == (7, 9)
    assert build(f"{path}:sized", (9,), 7, 0, scale=2.5).bias.tolist() == [2.5] * 7
    assert build(f"{path}:half", (9,), 7, 0).weight.shape == (7, 4)
    assert build(f"{path}:wide", (9,), 7, 0, times=2).weight.shape == (14, 9)
    assert build(f"{path}:Net", (9,), 7, 0).layer.weight.shape == (7, 4)


def test_a_file_path_follows_the_seed(path: str) -> None:
    a, b, c = (build(f"{path}:half", (4,), 2, seed).weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_package_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(path).parent))
    assert isinstance(build("my_models:sized", (2,), 3, 0), nn.Linear)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet-18", {}, "Did you mean resnet18?"),
        ("cnn3", {}, "Did you mean cnn-3?"),
        ("mlp", {"hiden": 3}, "model mlp: option: found hiden; allowed: hidden. Did you mean hidden?"),
        ("linear", {"hidden": 3}, "model linear: option: found hidden; allowed: none."),
        ("mlp", {"classes_": 3}, "option: found classes_"),
        ("no_such_package_here:net", {}, "no importable module no_such_package_here"),
        (":net", {}, "found :net; allowed: path/to/file.py:callable"),
        ("nowhere/net.py:net", {}, "no file nowhere/net.py"),
        ("{path}:sizde", {}, "Did you mean sized?"),
        ("{path}:constant", {}, "found constant; allowed: a callable"),
        ("{path}:number", {}, "a callable that returned int"),
        ("{path}:demanding", {}, "demanding() missing 1 required positional argument: 'vocabulary'"),
        ("{path}:fixed", {"depth": 2}, "option: found depth; allowed: none"),
    ],
)
def test_errors_are_one_clear_sentence(path: str, name: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError) as error:
        build(name.replace("{path}", path), (4,), 2, 0, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_fails_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    with pytest.raises(InputError, match="ZeroDivisionError while reading"):
        build(f"{file}:net", (4,), 2, 0)
    with pytest.raises(InputError, match="classes: found 0"):
        build("mlp", (4,), 0, 0)
    file.write_text("def net(classes):\n    return [][classes]\n\ndef method(mu=1.0):\n    return mu.no\n")
    with pytest.raises(InputError, match=r"found IndexError at line 2 of broken\.py \(list index out of range\)"):
        build(f"{file}:net", (4,), 2, 0)
    with pytest.raises(InputError, match=r"broken\.py:method: found AttributeError at line 5 of broken\.py"):
        algorithm_of(Recipe.of("quick-start", [f"algorithm.name={file}:method"]))
    (tmp_path / "typo.py").write_text("from fedflat import Phase\ndef method():\n    return Phase(rul=None)\n")
    with pytest.raises(InputError, match=r"found TypeError at line 3 of typo.py .* Did you mean rule\?"):
        algorithm_of(Recipe.of("quick-start", [f"algorithm.name={tmp_path}/typo.py:method"]))
