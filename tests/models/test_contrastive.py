"""A network trained without labels on random images: a function of its seed, one image at a time, known by digest."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import check_alone
from safetensors.torch import load_file, save_file

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.durable import digest_of, read_tensors, write_tensors
from fedflat.core.rng import stream
from fedflat.models import build
from fedflat.simulation.inspection import inspect_run
from fedflat.simulation.result import export

SPEC = importlib.util.spec_from_file_location(
    "pretrain_body", Path(__file__).parents[2] / "examples" / "pretrain_body.py"
)
assert SPEC is not None and SPEC.loader is not None
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)
TINY = {"seed": 0, "steps": 4, "images": 12, "batch": 6, "side": 8, "bf16": False}
SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network's file, hardly trained."""
    file = tmp_path_factory.mktemp("network") / "network.safetensors"
    example.pretrain(file, **TINY)
    return file


def body(file: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "contrastive", "network": str(file), "dimension": 20, "images": 100, **options}


def made(file: Path, shape: tuple[int, int, int] = SHAPE, **options: Any) -> Any:
    return build("representation", shape, 3, 0, body=body(file, **options))


def images(count: int, seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def test_a_network_is_a_function_of_its_seed(network: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    told = example.pretrain(again, **TINY)
    assert told == digest_of(read_tensors(again) or {}) == digest_of(read_tensors(network) or {})
    assert example.pretrain(other, **{**TINY, "seed": 1}) == digest_of(read_tensors(other) or {}) != told


def test_training_lowers_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    whole = example.info_nce

    def noted(found: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = whole(found)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(example, "info_nce", noted)
    for name, value in (("WARM", 1), ("JITTER", 0.1), ("SMALLEST", 0.7)):
        monkeypatch.setattr(example, name, value)
    example.pretrain(tmp_path / "network.safetensors", **{**TINY, "steps": 30, "images": 20, "batch": 20, "side": 12})
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_loss_is_that_of_finding_the_other_view() -> None:
    found = torch.nn.functional.normalize(images(6, shape=(1, 1, 5)).flatten(1))
    expected = []
    for i in range(6):
        others = torch.tensor([float(found[i] @ found[j]) / example.TEMPERATURE for j in range(6) if j != i])
        expected.append(torch.logsumexp(others, 0) - (float(found[i] @ found[(i + 3) % 6]) / example.TEMPERATURE))
    torch.testing.assert_close(example.info_nce(3 * found), torch.stack(expected).mean())


def test_views_follow_their_stream_and_their_own_image() -> None:
    x = images(5, shape=(3, 12, 12))
    changed = torch.cat([x[:1], 5 * x[1:]])
    first, again, other = (example.view_of(x, 8, stream(0, "views", i)) for i in (0, 0, 1))
    assert first.shape == (5, 3, 8, 8) and torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(example.view_of(changed, 8, stream(0, "views", 0))[0], first[0])


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 10, 9)])
def test_features_have_length_one_and_no_image_another_s_bits(network: Path, shape: tuple[int, int, int]) -> None:
    module, x = made(network, shape), images(9, shape=shape)
    found = module.features(x)
    assert found.shape == (9, 20) and module.frozen and module.prior == "random process"
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=1), torch.ones(9))
    assert torch.equal(module.features(x[:1])[0], found[0])
    check_alone(module, *(images(n, n, shape) for n in (5, 70, 9)))


def test_a_run_keeps_the_network_and_needs_its_file_no_more(network: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(network.read_bytes())
    recipe = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20, "max_examples": 200, "max_test": 20},
        "model": {"name": "representation", "body": body(file)}, "algorithm": "dp-fedavg-la",
        "local": {"steps": 1, "batch_size": 10, "lr": 1.0, "momentum": 0.0}, "cohort": {"size": 20},
        "privacy": {"clip": 0.5, "epsilon": 8},
    }  # fmt: skip
    result = fedflat.run(recipe, out=tmp_path / "run")
    assert result.privacy["prior"].startswith("random process")
    export(tmp_path / "run", tmp_path / "out")
    file.unlink()
    for folder in ("run", "out"):
        assert torch.equal(fedflat.load(tmp_path / folder).model(images(5)), result.model(images(5)))
    assert [c.verdict for c in inspect_run(tmp_path / "run") if c.record == "body.safetensors"] == ["ok"]


def test_a_file_is_known_by_its_digest(network: Path, tmp_path: Path) -> None:
    digest = digest_of(read_tensors(network) or {})
    first, moved = made(network), tmp_path / "moved.safetensors"
    moved.write_bytes(network.read_bytes())
    assert made(moved, sha256=digest).sha256 == first.sha256
    assert made(network, cells=1).sha256 != first.sha256
    with pytest.raises(InputError, match=r"model\.body\.sha256: found 00"):
        made(network, sha256="0" * 64)
    strange = tmp_path / "strange.safetensors"
    write_tensors(strange, load_file(network))
    assert made(strange).prior == "unknown"  # it does not say what it was made from
    write_tensors(strange, {"a": torch.zeros(3)})
    with pytest.raises(InputError, match=r"model\.body\.network: found a; allowed: a file that examples/pretrain"):
        made(strange)
    altered = load_file(network)
    altered["gain0"] += 1
    save_file(altered, strange, metadata={"sha256": digest})
    for bad in (strange, tmp_path / "none.safetensors"):
        with pytest.raises(InputError, match="a sound file that examples/pretrain"):
            made(bad)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"network": 3}, "model.body.network: found 3"),
        ({"cells": 0}, "model.body.cells"),
        ({"cells": 3}, "at least 12 × 12"),
        ({"filters": 3}, "model.body.filters"),
    ],
)
def test_mistakes_are_one_sentence(network: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        made(network, **options)
    with pytest.raises(InputError, match="1 or 3 channels"):
        made(network, (2, 8, 8))
