"""Frozen bodies made from random images: a function of their seed, one image at a time, kept where they were used."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import check_alone
from safetensors.torch import load_file, save_file

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.audit.worlds import Case, Engine, Scenario, Worlds
from fedflat.backends import features
from fedflat.backends.features import computed, with_features
from fedflat.config.recipe import Recipe
from fedflat.core import durable
from fedflat.core.checks import InputError
from fedflat.core.process import listening_to_progress
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.models import build
from fedflat.models.patches import CHUNK, Patches, dead_leaves, normalised
from fedflat.models.representation import Headed, body_of
from fedflat.report.card import card
from fedflat.report.metrics import read_run
from fedflat.simulation.inspection import inspect_run
from fedflat.simulation.result import export

SMALL = {"kind": "patches", "filters": 12, "size": 3, "cells": 2, "dimension": 20, "images": 100}
SHAPE = (1, 8, 8)


def made(**options: Any) -> Any:
    return build("representation", SHAPE, 3, 0, **{"body": SMALL, **options})


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "model": {"name": "representation", "body": SMALL},
        "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 100, "lr": 1.0, "momentum": 0.0},
        "cohort": {"size": 20}, "privacy": {"clip": 0.5, "epsilon": 8, "randomness": "seeded"},
        "server": {"lr": 10.0, "momentum": 0.9}, "engine": {"backend": "sequential"}, **changes,
    }  # fmt: skip


def test_dead_leaves_are_a_function_of_their_seed() -> None:
    found = dead_leaves(CHUNK + 3, (3, 16, 12), 7)
    assert found.shape == (CHUNK + 3, 3, 16, 12) and found.dtype == torch.float32
    assert torch.equal(found, dead_leaves(CHUNK + 3, (3, 16, 12), 7))
    assert not torch.equal(found, dead_leaves(CHUNK + 3, (3, 16, 12), 8))
    assert abs(float(found.mean())) < 1e-4 and abs(float(found.std()) - 1) < 1e-4
    assert len({image.numpy().tobytes() for image in found}) == len(found)


def test_filters_answer_as_the_formula_says() -> None:
    body = made().body.maps
    assert isinstance(body, Patches)
    x = images(3)
    z = body.filters @ normalised(torch.nn.functional.unfold(x, 3)) - body.shift
    pairs = torch.stack([(z - body.threshold).relu(), (-z - body.threshold).relu()], dim=2)
    means = pairs.unflatten(-1, (2, 3, 2, 3)).mean((4, 6)).flatten(1, 2).flatten(2)
    torch.testing.assert_close(body(x), means, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(body.pool.sum(0), torch.ones(4))


def test_whitened_filters_see_white_patches() -> None:
    """In the space of the filters the patches that they were made from have nearly one variance in all directions."""
    options = {"kind": "patches", "filters": 60, "size": 3, "cells": 2, "dimension": 20, "images": 200}
    body = body_of(options, SHAPE)
    patches = normalised(torch.nn.functional.unfold(dead_leaves(200, SHAPE, 0), 3)).transpose(1, 2).reshape(-1, 9)
    answers = patches @ body.maps.filters.T - body.maps.shift.T
    plain = patches @ torch.nn.functional.normalize(patches[:60]).T
    assert float(answers.var(0).std() / answers.var(0).mean()) < float(plain.var(0).std() / plain.var(0).mean())


def test_features_have_length_one_and_no_image_another_s_bits() -> None:
    module, x = made(), images(9)
    found = module.features(x)
    assert found.shape == (9, 20) and module.frozen
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=1), torch.ones(9))
    changed = x.clone()
    changed[1:] = 100 * images(8, 5)
    assert torch.equal(module.features(changed)[0], found[0])
    assert torch.equal(module(x), torch.zeros(9, 3))  # the head starts at zero
    assert torch.equal(module(found), module(x))


def test_mirror_images_have_the_same_features() -> None:
    plain, both, x = made(), made(body={**SMALL, "flip": True}), images(3)
    torch.testing.assert_close(both.features(x), both.features(x.flip(-1)))
    assert not torch.allclose(plain.features(x), plain.features(x.flip(-1)), atol=1e-2)


def test_principal_directions_are_the_synthetic_images_own() -> None:
    projection = made(body={**SMALL, "whitening": 1.0, "dimension": 8}).body.projection
    whole = made(body={**SMALL, "whitening": 0.0}).body
    directions = whole.projection._directions(whole.maps(dead_leaves(100, SHAPE, 0)))[:, whole.projection.chosen]
    variance = directions.var(0, correction=0)
    assert bool((variance[:-1] >= variance[1:] * 0.999).all())
    torch.testing.assert_close(projection.weight, (variance[:8] + 0.5 * variance[7]).rsqrt(), rtol=1e-3, atol=0)


def test_a_body_is_made_once_and_known_by_its_digest(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made()
    (file,) = own_cache.glob("body-*.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedflat.models.patches.dead_leaves", None)  # it is not made again
        assert made().sha256 == first.sha256 == made(sha256=first.sha256).sha256
    file.write_bytes(file.read_bytes()[:-1])  # damaged: made anew
    assert made().sha256 == first.sha256
    assert made(body={**SMALL, "seed": 1}).sha256 != first.sha256
    put_there = own_cache / f"body-{first.sha256}.safetensors"
    shutil.copy(file, put_there)
    monkeypatch.setattr(durable, "KEPT", 7 * file.stat().st_size // 2)
    for seed in range(2, 6):  # as a choice of settings makes them
        made(body={**SMALL, "seed": seed})
    assert len(list(own_cache.glob("body-*"))) == 3 + 1 and put_there.exists() and not file.exists()
    with pytest.raises(InputError, match=r"model\.sha256: found 00.*copy the run's own"):
        made(sha256="0" * 64)


def test_another_machine_takes_the_run_s_own_body(own_cache: Path, tmp_path: Path) -> None:
    other = made(body={**SMALL, "seed": 5})  # stands for what another machine makes of seed 0
    durable.write_tensors(tmp_path / "body.safetensors", other.body.saved())
    taken = made(path=str(tmp_path / "body.safetensors"), sha256=other.sha256)
    assert torch.equal(taken.body.projection.weight, other.body.projection.weight)
    shutil.copy(tmp_path / "body.safetensors", own_cache / f"body-{other.sha256}.safetensors")
    assert torch.equal(made(sha256=other.sha256).body.maps.filters, other.body.maps.filters)


def test_a_file_of_another_body_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "body.safetensors"
    with pytest.raises(InputError, match="a sound body"):
        made(path=str(file))
    durable.write_tensors(file, made(body={**SMALL, "filters": 10}).body.saved())
    with pytest.raises(InputError, match=r"maps\.filters: found shape \(10, 9\)"):
        made(path=str(file))
    whole = load_file(file)
    whole["maps.filters"] += 1
    save_file(whole, file, metadata={"sha256": "0"})
    with pytest.raises(InputError, match="a sound body"):
        made(path=str(file))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"body": "patch"}, "Did you mean patches"),
        ({"body": {"kind": "patches", "filter": 3}}, "Did you mean filters"),
        ({"body": {"kind": "patches", "filters": 0}}, "model.body.filters"),
        ({"body": {"kind": "patches", "whitening": 2}}, "model.body.whitening"),
        ({"body": {"kind": "patches", "flip": 1}}, "model.body.flip: found 1; allowed: true or false"),
        ({"body": {"kind": "patches", "size": 8}}, "at least 10 × 10"),
        ({"body": {**SMALL, "filters": 100_000}}, "the patches there are"),
        ({"head": "line"}, "Did you mean linear"),
        ({"head": {"kind": "linear", "hidden": 3}}, "model.head.hidden"),
        ({"head": {"kind": "mlp", "hidden": 0}}, "model.head.hidden"),
        ({"heads": "mlp"}, "Did you mean head"),
        ({"head": 3}, "model.head: found 3"),
        ({"body": [1]}, "model.body: found"),
        ({"path": 3}, "model.path: found 3"),
        ({"sha256": 12}, "model.sha256: found 12"),
        ({"sha256": "../" * 20 + "aaaa"}, "64 hexadecimal"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        made(**options)
    with pytest.raises(InputError, match="images"):
        build("representation", (64,), 3, 0, body=SMALL)


def test_a_run_keeps_its_body_and_is_loaded_without_making_it(tmp_path: Path, own_cache: Path) -> None:
    durable.write_tensors(tmp_path / "run" / "body.safetensors", made(body={**SMALL, "seed": 5}).body.saved())
    result = fedflat.run(recipe(), out=tmp_path / "run")  # where an earlier start was killed before its recipe
    digest = result.model.sha256
    assert f"sha256: {digest}" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert result.privacy["facts"]["model"]["sha256"] == digest
    assert result.privacy["prior"].startswith("random process")
    assert "body.safetensors" in export(tmp_path / "run", tmp_path / "out").files
    without = {key: value for key, value in recipe(rounds=1).items() if key != "model"}
    for trained in (result, fedflat.load(tmp_path / "run")):  # its weights are no random process's alone
        assert fedflat.run(without, model=trained.model).privacy["prior"].startswith("an earlier run")
    shutil.rmtree(own_cache)
    x = images(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedflat.models.patches.dead_leaves", None)
        for folder in ("run", "out"):
            assert torch.equal(fedflat.load(tmp_path / folder).model(x), result.model(x))


def test_an_altered_body_is_noticed_and_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fedflat.run(recipe(), out=folder)
    assert [c.verdict for c in inspect_run(folder) if c.record == "body.safetensors"] == ["ok"]
    durable.write_tensors(folder / "body.safetensors", made(body={**SMALL, "seed": 9}).body.saved())
    for _ in ("another", "damaged", "missing"):
        (found,) = (c for c in inspect_run(folder) if c.record == "body.safetensors")
        assert found.verdict == "wrong"
        with pytest.raises(InputError, match=r"body\.safetensors"):
            fedflat.load(folder)
        file = folder / "body.safetensors"
        file.write_bytes(b"x") if file.stat().st_size > 1 else file.unlink()
        if not file.exists():
            break
    (found,) = (c for c in inspect_run(folder) if c.record == "body.safetensors")
    assert (found.verdict, found.about) == ("wrong", "missing")


def test_a_body_from_a_file_may_be_anything(tmp_path: Path, own_cache: Path) -> None:
    """Only a body made here is known to be a random process's."""
    file = tmp_path / "mine.safetensors"
    durable.write_tensors(file, made(body={**SMALL, "seed": 9}).body.saved())
    given = recipe(model={"name": "representation", "body": SMALL, "path": str(file)})
    found = fedflat.run(given, out=tmp_path / "run")
    assert found.privacy["prior"].startswith("unknown") and made().prior == "random process"
    shutil.copy(file, own_cache / f"body-{found.model.sha256}.safetensors")
    assert made(sha256=found.model.sha256).prior == "unknown"
    said = card(read_run(tmp_path / "run")).text("Tuning, preprocessing and public data", "Public data and priors")
    assert said.startswith("unknown") and "pretrained" not in said


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    whole = fedflat.run(recipe(), out=tmp_path / "run")
    sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1].unlink()
    again = fedflat.run(tmp_path / "run" / "recipe.yaml", out=tmp_path / "run", resume=True)
    assert torch.equal(whole.model.classifier.weight, again.model.classifier.weight)


@pytest.mark.parametrize("backend", ["vectorized", "lowrank"])
@pytest.mark.parametrize("head", ["linear", {"kind": "mlp", "hidden": 5}])
def test_block_back_ends_train_the_head_as_one_by_one(backend: str, head: Any) -> None:
    model = {"name": "representation", "body": SMALL, "head": head}
    changes = {"model": model, "privacy": {"clip": 0.5, "noise_multiplier": 0.0}}
    one, block = (fedflat.run(recipe(**changes, engine={"backend": name})) for name in ("sequential", backend))
    for a, b in zip(one.model.classifier.parameters(), block.model.classifier.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_features_do_not_follow_the_other_clients() -> None:
    check_alone(made(), *(images(n, n) for n in (5, 70, 9)))


def test_features_that_took_long_are_kept_on_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def federation(name: str, seed: int = 0) -> FederatedData:
        found = from_pairs([(images(9, seed), torch.arange(9) % 3)], (images(4, 9), torch.zeros(4, dtype=torch.int64)))
        object.__setattr__(found, "name", name)
        return found

    module = made()
    kept = lambda: sorted(own_cache.glob("features-*"))  # noqa: E731
    with_features(federation("a set"), module)
    assert not kept()  # quick enough to be computed again
    features._LAST.clear()
    monkeypatch.setattr(features, "WORTH_KEEPING", 0.0)
    with_features(federation("clients"), module)
    assert not kept()  # given in Python: there is no copy of it that was not asked for
    features._LAST.clear()
    first = with_features(federation("a set"), module)
    (file,) = kept()
    features._LAST.clear()
    monkeypatch.setattr(features, "computed", None)
    again = with_features(federation("a set"), module)
    assert torch.equal(again.inputs, first.inputs) and torch.equal(again.test_inputs, first.test_inputs)  # type: ignore[arg-type]
    monkeypatch.setattr(features, "computed", computed)
    features._LAST.clear()
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))  # damaged: computed again
    assert torch.equal(with_features(federation("a set"), module).inputs, first.inputs)
    with monkeypatch.context() as patch:  # where the last bits may differ, under a noise key that does not know of it
        patch.setattr(features, "machine", lambda device: "another")
        with_features(federation("a set"), module)
    assert len(kept()) == 2
    monkeypatch.setattr(durable, "KEPT", 7 * file.stat().st_size // 2)
    for seed in range(1, 6):
        with_features(federation("a set", seed), module)
    assert len(kept()) == 3


def test_who_waits_is_told() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening_to_progress(lambda *news: heard.append(news)):
        computed(made(), images(100))
    assert heard[-1] == ("making features, batch", 2, 2)
    assert ("making the dictionary, random image", 100, 100) in heard
    count = len(heard)
    computed(made(), images(3))
    assert len(heard) == count


def test_a_network_beside_its_prior() -> None:
    assert prepare(Recipe.of(recipe(model="linear"))).problem.pristine is not None
    assert fedflat.run(recipe(model="linear", rounds=1)).privacy["prior"].startswith("none")
    without = {key: value for key, value in recipe(rounds=1).items() if key != "model"}
    own = fedflat.run(without, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    assert own.privacy["prior"].startswith("unknown")


def test_a_network_of_ones_own_inherits_no_prior() -> None:
    class Mine(Headed):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torch.nn.Linear(64, 10)

        def features(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.flatten(1)

        def head(self, features: torch.Tensor) -> torch.Tensor:
            return self.classifier(features)

    without = {key: value for key, value in recipe(rounds=1).items() if key != "model"}
    assert fedflat.run(without, model=Mine()).privacy["prior"].startswith("unknown")


@pytest.mark.parametrize("engine", [Engine("sequential"), Engine("vectorized"), Engine("lowrank")], ids=str)
@pytest.mark.parametrize("method", ["dp-fedavg", "class-statistics"])
def test_one_client_s_images_move_a_release_by_the_clip_at_most(method: str, engine: Engine) -> None:
    privacy = {"clip": 0.05, "noise_multiplier": 1.0, "delta": 1e-5}
    local = {"steps": 2, "batch_size": 3, "lr": 0.3}
    settings = {"rounds": 1, "algorithm": method, "cohort": {"size": 6}, "local": local, "privacy": privacy}
    worlds = Worlds(Scenario(Recipe.of(settings), made(), from_pairs([(images(40), torch.arange(40) % 3)])))
    for case in (Case("ordinary"), Case("cancelling 1e6"), Case("huge 1e14"), Case("pixels", others="pixels")):
        moved = worlds.movement(engine, case)
        assert not moved.over, f"{case.name}: {moved.value} {moved.stopped}"


def test_features_that_mix_clients_would_be_noticed() -> None:
    """The broken twin standardises by what is in its batch, and a client's features follow who else is there."""
    module = made()
    batched = lambda x: (f := module.features(x)) - f.mean(0)  # noqa: E731
    x = images(9)
    changed = x.clone()
    changed[1:] *= 3
    assert not torch.equal(batched(x)[0], batched(changed)[0])
    assert torch.equal(module.features(x)[0], module.features(changed)[0])
