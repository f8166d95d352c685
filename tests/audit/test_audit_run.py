"""Audits of a recipe or a run: the command line and its files."""

import dataclasses
import json
import math

import pytest
import torch

from fedflat.audit import AuditResult, audit_method, audit_run, movements, write_audit
from fedflat.cli.audit import table
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.pieces.clipping import NormClip
from fedflat.simulation import run as simulation

CLIENTS, FEATURES = 20, 40


def recipe(**changes):
    given = {
        "name": "tiny", "rounds": 4, "algorithm": {"name": "dp-fedavg"}, "cohort": {"size": 10},
        "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
        "privacy": {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"device": "cpu", "backend": "sequential"},
    }  # fmt: skip
    return Recipe.of(given | changes)


def model():
    module = torch.nn.Linear(FEATURES, 10)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def clients():
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(4, FEATURES, generator=draw), torch.randint(10, (4,), generator=draw)) for _ in range(CLIENTS)]


def test_an_unknown_kind_is_one_sentence():
    with pytest.raises(InputError, match="Did you mean mechanism"):
        audit_run(recipe(), kind="mechanisms", model=model(), clients=clients())


def result(**changes):
    facts = {
        "kind": "mechanism", "method": "dp-fedavg", "claimed": 1.27, "proven": 1.27, "lower_bound": 0.3,
        "confidence": 1 - 1e-6, "canary": "every tensor at C", "statistic": "energy", "runs": 100, "seconds": 1.0,
        "assumptions": ("Something long. " * 9,),
    }  # fmt: skip
    return AuditResult(**(facts | changes))


def test_exit_status_follows_the_findings():
    assert not result().exceeds_proven
    assert result(lower_bound=1.3).exceeds_proven
    assert result(violations=("the noise is not the same",)).exceeds_proven


def test_table_fits_eighty_columns_and_shows_claim_and_proof_together():
    text = table([
        result(), result(method="published clip", violations=("x " * 70,)),
        result(kind="other", lower_bound=None, confidence=None), result(proven=math.inf, claimed=1.0),
        result(lower_bound=1.5), result(kind="noise", violations=("broken",)),
    ])  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    for words in ("within the proof", "no bound", "\n  broken\n", "NOT AS PLANNED", "OVER THE PROVEN ε", "∞ (none)",
                  "Contract 2b broken: x x", "CONTRACT 2b BROKEN", "99.9999 %", "other, dp-fedavg: what"):  # fmt: skip
        assert words in text


def test_audit_file_of_a_run_is_json_without_infinities(tmp_path):
    path = write_audit(tmp_path, [result(proven=math.inf)])
    assert path.name == "audit.json"
    (entry,) = json.loads(path.read_text())["audits"]
    assert entry["proven"] is None and entry["lower_bound"] == 0.3
    assert entry["exceeds_proven"] is False


def test_command_writes_audit_json_into_the_run_folder(tmp_path, capsys):
    from fedflat.cli.audit import audit

    digits = {
        "name": "r", "rounds": 2, "data": {"dataset": "digits", "clients": 10}, "model": {"name": "mlp", "hidden": 4},
        "algorithm": {"name": "dp-fedavg"}, "cohort": {"size": 5}, "local": {"steps": 1, "batch_size": 8},
        "privacy": {"clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-3},
    }  # fmt: skip
    simulation.run(digits, out=tmp_path / "run")
    audit(str(tmp_path / "run"), kind="mechanism", runs=200, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["kind"] == "mechanism"
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["audits"] == shown


def worlds(**details):
    facts = {
        "movement": 1.0, "limit": 1.002, "back_end": "lowrank", "data": "ordinary", "left_out": 3,
        "refused": {"ray": "engine.backend: " + "no GPU " * 20},
        "table": {"ordinary": {"sequential": 1.0, "lowrank": 1.0}, "a very long name | of others": {"lowrank": 3.4e6}},
    }  # fmt: skip
    return result(kind="worlds", lower_bound=None, confidence=None, canary="ordinary", details=facts | details)


def test_worlds_are_shown_beside_the_epsilons_in_eighty_columns():
    text = table([worlds(), worlds(movement=math.inf)])
    assert max(map(len, text.splitlines())) <= 80
    for words in ("1.000 C", "within C", "3 pairs were left out", "ray: engine.backend", "∞ C"):
        assert words in text
    assert "%" not in text


def test_a_movement_over_c_is_said_and_fails():
    over = dataclasses.replace(worlds(movement=2.7), violations=("lowrank, huge: the release moves by 2.7·C",))
    assert over.exceeds_proven
    assert not worlds().exceeds_proven
    text = table([over])
    assert "OVER C" in text and "the release moves by 2.7·C" in text


@pytest.fixture
def quick_worlds(monkeypatch):
    """As few worlds as there may be, and none for shared noise."""
    monkeypatch.setattr(movements, "SECONDS", 0.0)
    monkeypatch.setattr(movements, "shared_noise", lambda stage: ())


@pytest.mark.usefixtures("quick_worlds")
def test_worlds_of_a_recipe_and_where_there_are_none():
    found = movements.audit_worlds(recipe(), model=model(), clients=clients())
    assert 0.1 < found.details["movement"] <= 1.002 and found.details["left_out"] > 20
    assert found.violations == () and found.claimed == found.proven
    assert json.loads(json.dumps(found.as_dict()))["details"]["table"]["ordinary"]["sequential"] > 0.1
    none = movements.audit_worlds(recipe(algorithm={"name": "fedavg"}), model=model(), clients=clients())
    assert none.details["movement"] is None and "not private" in none.assumptions[0]
    assert "not run" in table([none])


OWN = """import torch, fedflat
class Twice:
    def initial(self, shared): return {}
    def __call__(self, mean, view): return 2 * mean, {}
def largest(update, view):
    return torch.where(update.abs() >= update.abs().topk(5).values[-1], update, 0 * update)
def own(): return fedflat.Algorithm("own", transforms=(largest,), server=(Twice(),), momentum=0.0)
"""


@pytest.mark.usefixtures("quick_worlds")
def test_own_pieces_for_one_vector_and_server_steps_that_scale_are_audited(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    name = f"{tmp_path / 'mine.py'}:own"
    assert not audit_method(name, runs=200).exceeds_proven
    given = {"model": model(), "clients": clients()}
    found = movements.audit_worlds(recipe(algorithm={"name": name}), **given)
    assert 0.1 < found.details["movement"] <= 1.002
    monkeypatch.setattr(NormClip, "scale", lambda self, norms, threshold: 3 * threshold / norms.clamp_min(1e-9))
    assert movements.audit_worlds(recipe(algorithm={"name": name}), **given).exceeds_proven


@pytest.mark.usefixtures("quick_worlds")
def test_a_run_of_data_given_in_python_says_so(tmp_path):
    simulation.run(recipe(rounds=1), model(), clients(), out=tmp_path / "run")
    (found,) = [r for r in audit_run(tmp_path / "run", runs=200) if r.kind == "worlds"]
    assert found.runs == 0 and "given in Python" in found.assumptions[0]
