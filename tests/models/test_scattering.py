"""The scattering body: kymatio's transform, written for one image at a time, and a body as any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import check_alone

import fedflat
from fedflat.core.checks import InputError
from fedflat.models import build
from fedflat.models.patches import Scattering, ScatteringOptions

SMALL = {"kind": "scattering", "scales": 1, "angles": 4, "dimension": 20, "images": 100}
SHAPE = (1, 8, 8)


def made(**options: Any) -> Any:
    return build("representation", SHAPE, 3, 0, **{"body": SMALL, **options})


def images(count: int, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("shape", "scales", "angles", "order"),
    [((1, 28, 28), 2, 8, 2), ((3, 17, 23), 2, 3, 2), ((1, 32, 32), 3, 4, 2), ((1, 12, 12), 2, 4, 1)],
)
def test_it_is_the_library_s_transform(shape: tuple[int, int, int], scales: int, angles: int, order: int) -> None:
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    body, x = Scattering(shape, ScatteringOptions(scales, angles, order)), images(3, shape)
    plain = ScatteringTorch2D(scales, shape[1:], angles, order, out_type="list")(x)
    # the library counts paths scale by scale and angle by angle, second ones behind all first ones
    order_of = sorted(plain, key=lambda one: (one["j"][:1] + (0,) * (not one["j"]), len(one["j"]), one["j"], one["n"]))
    order_of = [plain[0], *(one for one in order_of if one["j"])]
    wanted = torch.stack([one["coef"] for one in order_of], 2).flatten(3).flatten(1, 2)
    torch.testing.assert_close(body(x), wanted, rtol=1e-4, atol=1e-6)
    # the broken twin, one angle off, is another transform
    assert not torch.allclose(body(x), wanted.roll(1, 1), atol=1e-3)


def test_an_image_has_the_same_bits_whoever_is_there() -> None:
    module, x = made(), images(9)
    found = module.features(x)
    assert found.shape == (9, 20) and module.frozen and module.prior == "random process"
    changed = x.clone()
    changed[1:] *= 100
    assert torch.equal(module.features(changed)[0], found[0])
    for rows in (slice(0, 1), slice(3, 8), slice(1, 9)):  # nor its place, nor how many there are
        assert torch.equal(module.body.maps(x[rows]), module.body.maps(x)[rows])
    check_alone(module, x[:2], x[2:])


def test_a_block_that_is_one_tensor_would_be_noticed() -> None:
    """The broken twin divides by the block's largest mean."""
    module, x = made(), images(9)
    twin = lambda x: (m := module.body.maps(x)) / m.abs().max()  # noqa: E731
    changed = x.clone()
    changed[1:] *= 100
    assert not torch.equal(twin(changed)[0], twin(x)[0])


def test_a_run_keeps_it_and_is_loaded(tmp_path: Path, own_cache: Path) -> None:
    recipe = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "algorithm": "dp-fedavg", "cohort": {"size": 10},
        "model": {"name": "representation", "body": SMALL}, "privacy": {"clip": 0.1, "epsilon": 8.0},
    }  # fmt: skip
    result = fedflat.run(recipe, out=tmp_path / "run")
    assert result.privacy["prior"].startswith("random process")
    assert result.model.sha256 == result.privacy["facts"]["model"]["sha256"]
    for file in own_cache.glob("body-*"):
        file.unlink()
    x = images(3)
    assert torch.equal(fedflat.load(tmp_path / "run").model(x), result.model(x))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scales": 0}, "model.body.scales: found 0"),
        ({"scales": 3}, "model.body: found images of 8 × 8; allowed: at least 9 × 9"),
        ({"order": 3}, "model.body.order: found 3"),
        ({"scale": 2}, "Did you mean scales"),
        ({"filters": 3}, "model.body.filters: found filters; allowed: seed, scales"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        made(body={**SMALL, **changes})
