"""A run of data, a model or a method given in Python says so in its records; what needs them back refuses in a line."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from fedflat import Algorithm, InputError, Recipe, Result
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.inputs import as_given
from fedflat.assembly.jobs import prepare
from fedflat.audit import audit_run
from fedflat.config.method import algorithm_of
from fedflat.config.reading import GIVEN
from fedflat.data.clients import from_pairs
from fedflat.privacy.statement import is_whole
from fedflat.report.summary import PRIVATE, summary_rows
from fedflat.simulation import run as simulation

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

RECIPE = {
    "name": "own", "rounds": 3, "algorithm": "dp-fedavg", "cohort": {"size": 3}, "local": {"steps": 1, "batch_size": 4},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0},
}  # fmt: skip


def mine() -> nn.Linear:
    """A module that no name of a recipe stands for, the same each time."""
    module = nn.Linear(5, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(5)]


def stopped_run(out: Path, resume: bool = False) -> Result:
    asked = iter((False, True))
    return simulation.run(RECIPE, mine(), clients(), out=out, resume=resume, should_stop=lambda: next(asked))


def test_the_records_name_what_was_given(tmp_path):
    stopped_run(tmp_path / "run")
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    found = yaml.safe_load(text)
    assert found["data"]["dataset"] == GIVEN and found["data"]["partition"]["kind"] == "natural"
    assert found["data"]["clients"] == 5
    assert found["model"] == {"name": GIVEN}
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())["facts"]
    assert (facts["data"]["dataset"], facts["model"]["name"]) == (GIVEN, GIVEN)
    assert "digits" not in text + json.dumps(facts)
    assert Recipe.load(tmp_path / "run").data.dataset == GIVEN


def test_what_needs_the_data_back_is_refused_in_a_line(tmp_path):
    stopped_run(tmp_path / "run")
    loaded = Recipe.load(tmp_path / "run")
    for given in ((), (mine(),)):
        with pytest.raises(InputError, match=r"data\.dataset: found given in Python: .*resume=True"):
            simulation.run(loaded, *given, out=tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"model\.name: found given in Python"):
        prepare(loaded, clients=clients())
    with pytest.raises(InputError, match="given in Python"):
        audit_run(tmp_path / "run", kind="worlds")


@pytest.mark.parametrize("by_folder", [False, True])
def test_it_goes_on_where_the_same_is_given_again(tmp_path, by_folder):
    whole = simulation.run(RECIPE, mine(), clients(), out=tmp_path / "whole")
    stopped_run(tmp_path / "run")
    recipe = Recipe.load(tmp_path / "run") if by_folder else RECIPE
    found = simulation.run(recipe, mine(), clients(), out=tmp_path / "run", resume=True)
    assert found.notes == () and len(found.history) == 3
    assert torch.equal(found.model.weight, whole.model.weight)


def test_a_method_given_in_python_goes_by_its_own_name():
    factory = ALGORITHMS["dp-fedsam"]
    named = Recipe.of({**RECIPE, "algorithm": {"name": "mine", "rho": 0.1}})
    for given, options in ((factory(rho=0.2), {}), (factory, {"rho": 0.1})):
        found = as_given(named, algorithm=given)
        assert found.algorithm.name == "dp-fedsam" and found.algorithm.options == {**options, "source": GIVEN}
        assert as_given(found, algorithm=given) == found
        assert algorithm_of(found, given).name == "dp-fedsam"
        with pytest.raises(InputError, match="the run's folder does not hold the method"):
            algorithm_of(found)
    assert as_given(named) == named


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (7, r"model: found 3 outputs; allowed: at least 8 \(clients\[2\] targets\[4\] is 7\)"),
        (-100, r"clients\[2\], row 4, target: found -100; allowed: class numbers from 0\.$"),
        (float("nan"), r"clients\[2\] targets\[4\]: found a NaN or infinite value"),
    ],
)
@pytest.mark.parametrize("model", [mine, lambda: None])
def test_a_target_that_no_output_is_for_is_refused_before_training(label, sentence, model):
    pairs = clients()
    y = pairs[2][1].float() if label != label else pairs[2][1]
    y[4] = label
    pairs[2] = (pairs[2][0], y)
    recipe = RECIPE | ({} if model() else {"model": {"name": "linear"}})
    if label == 7 and not model():  # a packaged model is made for a public number of classes
        sentence = r"clients: found clients\[2\] targets\[4\] is 7; allowed: class numbers below 3"
    recipe |= {} if model() else {"data": {"classes": 3}}
    with pytest.raises(InputError, match=sentence):
        prepare(Recipe.of(recipe), model(), pairs)


def test_ignored_tokens_are_allowed_and_a_label_for_each_token_needs_as_many_outputs():
    x, y = torch.randint(0, 4, (6, 2)), torch.tensor([[0, -100]] * 6)
    tokens = nn.Embedding(4, 3)  # three classes for each token
    assert prepare(Recipe.of(RECIPE), tokens, [(x, y)] * 5).data.classes == 3  # what the model puts out
    with pytest.raises(InputError, match=r"clients\[0\], row 0, target: found -7; allowed: token ids, or -100"):
        prepare(Recipe.of(RECIPE), tokens, [(x, y.clamp(min=-7))] * 5)
    with pytest.raises(InputError, match="test targets: found -100 alone, which does not count"):
        prepare(Recipe.of(RECIPE), tokens, [(x, y)] * 5, (x, y.clamp(max=-100)))
    with pytest.raises(InputError, match=r"model: found an output of shape \(2, 2, 3\) for 2 examples"):
        prepare(Recipe.of(RECIPE), tokens, [(x, y[:, 0])] * 5)
    with pytest.raises(InputError, match=r"model: found IndexError in a training pass"):
        prepare(Recipe.of(RECIPE), tokens, [(x - 3, y)] * 5)


def test_malformed_messages_are_counted_where_their_owner_sees_it(tmp_path):
    pairs = clients()
    pairs[1] = (torch.full((6, 5), 3e38), pairs[1][1])
    recipe = RECIPE | {"cohort": {"size": 5}, "rounds": 2, "local": {"steps": 2, "batch_size": 6}}
    found = simulation.run(recipe, mine(), pairs, out=tmp_path / "run")
    assert [record["malformed"] for record in found.private_history] == [1, 1]
    assert found.notes[-1] == "2 malformed messages, counted as zero (rounds: 2)"
    assert ("malformed", f"2 messages in 2 rounds, counted as zero {PRIVATE}") in summary_rows(found)
    assert "malformed" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    sound = simulation.run(recipe | {"rounds": 1}, mine(), clients())
    assert not sound.notes and "malformed" not in sound.private_history[0]


def test_what_resuming_finds_damaged_is_said_and_a_lost_ledger_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    stopped_run(folder)
    (folder / "privacy.json").write_text('{"proven_epsilon": 0.1}')
    found = stopped_run(folder, resume=True)
    assert found.notes == (
        "privacy.json is not as it was written; set aside as privacy.json.damaged, a new one comes at the end",
    )
    assert (folder / "privacy.json.damaged").exists() and is_whole(folder / "privacy.json")
    (folder / "ledger.jsonl").unlink()
    (folder / "ledger.lock").unlink()
    with pytest.raises(InputError, match="no line for round 0, which was released"):
        simulation.run(RECIPE, mine(), clients(), out=folder, resume=True)
    assert not list(folder.glob("ledger.*"))


def test_a_recipe_needs_no_method_beside_one_given_in_python() -> None:
    nameless = {key: value for key, value in RECIPE.items() if key != "algorithm"}
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    found = simulation.run(nameless, nn.Linear(4, 3), [(x, y)] * 5, algorithm=Algorithm("mine"))
    assert found.recipe.algorithm.name == "mine"
    with pytest.raises(InputError, match="algorithm"):
        simulation.run(nameless, nn.Linear(4, 3), [(x, y)] * 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": nn.Linear}, r"model: found the class Linear; allowed: a torch.nn.Module. Net\(\) is one"),
        ({"model": mine}, "model: found function; allowed: a torch.nn.Module"),
        ({"model": "mlp"}, "model: found str; allowed: a torch.nn.Module. .* stands in the recipe"),
        ({"model": mine().double()}, "model: found RuntimeError .* takes a batch of shape .* and type torch.float32"),
        ({"clients": [(x > 0, y) for x, y in clients()]}, "model: found RuntimeError .* and type torch.int64"),
        (
            {"clients": [TensorDataset(*pair) for pair in clients()]},
            r"clients\[0\]: found TensorDataset; .* torch data",
        ),
        ({"algorithm": "dp-fedsam"}, "algorithm: found dp-fedsam; .* A method's name stands in the recipe"),
        ({"algorithm": 3}, "algorithm: found 3; allowed: an Algorithm, or a function that returns one"),
    ],
)
def test_what_is_no_module_method_or_pair_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulation.run(RECIPE, **{"model": mine(), "clients": clients(), **given})


def test_a_path_of_pathlib_is_one_and_no_data_are_shown(tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    assert Recipe.of(RECIPE | {"data": {"dataset": table}}).data.dataset == str(table)
    x, y = clients()[0]
    assert repr(from_pairs(clients(), (x + 1, y))) == "<5 clients, inputs (5,), 3 classes, 6 public test examples>"
