"""Features of a frozen body, computed once: the same run as without them, and never where features would change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.backends import features
from fedflat.backends.features import computed, with_features
from fedflat.core.checks import InputError
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.models.patches import Patches, PatchOptions
from fedflat.models.representation import Headed

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")


class Body(Headed):
    """Embeddings and a squashing as the body, a linear layer on their mean as the head."""

    trained = "classifier."

    def __init__(self, frozen: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.padding = 0
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.drop, self.classifier = nn.Embedding(20, 6), nn.Dropout(dropout), nn.Linear(6, 3)
        self.body.requires_grad_(not frozen)

    def features(self, inputs: Tensor) -> Tensor:
        keep = (inputs != self.padding).float()[..., None]
        return self.drop(torch.tanh((self.body(inputs) * keep).sum(1) / keep.sum(1).clamp(min=1)))

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)


class Live(Body):
    """The twin that runs its body at every step: it does not say that it is frozen."""

    frozen = False  # type: ignore[assignment]


def texts(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(seed)
    ids = torch.from_numpy(draw.integers(1, 20, (count, 8)))
    ids[torch.arange(8)[None] >= torch.from_numpy(draw.integers(1, 9, count))[:, None]] = 0
    return ids, ids[:, 0] % 3


def federation(clients: int = 5) -> FederatedData:
    return from_pairs([texts(17 + i, i) for i in range(clients)], texts(30, 99))


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 3, "algorithm": {"name": "dp-fedsam"}, "local": {"steps": 3, "batch_size": 4, "lr": 0.5},
        "cohort": {"size": 5, "sampling": "fixed"}, "privacy": {"clip": 0.5, "noise_multiplier": 0.5},
        "engine": {"backend": "sequential"}, **changes,
    }  # fmt: skip


KEY = b"\5" * 32


def same_noise(job: Any) -> None:
    """Two bodies are two runs, each with noise of its own; here they are compared under one key."""
    job.key = KEY


def run(module: nn.Module, on_start: Any = same_noise, **changes: Any) -> fedflat.Result:
    pairs = [texts(17 + i, i) for i in range(5)]
    return fedflat.run(recipe(**changes), model=module, clients=pairs, test=texts(30, 99), on_start=on_start)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that went through an embedding; a count in the module itself would be refused."""
    seen, embedding = list[int](), functional.embedding

    def counted(inputs: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append(len(inputs))
        return embedding(inputs, *rest, **named)

    monkeypatch.setattr(functional, "embedding", counted)
    return seen


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    features._LAST.clear()


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
def test_a_run_with_features_is_the_run_without(backend: str, passes: list[int]) -> None:
    engine = {"backend": backend}

    def start(job: Any) -> None:
        same_noise(job)
        passes.clear()

    fast = run(Body(), start, engine=engine)
    assert not passes  # neither training nor the test examples go through the body again
    slow = run(Live(), start, engine=engine)
    assert len(passes) >= 9  # at least once in each of three steps of three rounds
    for a, b in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert [r["test_accuracy"] for r in fast.history] == pytest.approx([r["test_accuracy"] for r in slow.history])
    x, _ = texts(4)
    torch.testing.assert_close(fast.model(x), slow.model(x))  # what comes out still takes ids


def test_stale_features_would_be_noticed() -> None:
    """The broken twin: a body that is trained but says it is frozen ends elsewhere."""

    class Lies(Body):
        frozen = True  # type: ignore[assignment]

    wrong, right = run(Lies(frozen=False)), run(Live(frozen=False))
    assert not torch.allclose(wrong.model.body.weight, right.model.body.weight)
    assert not Body(frozen=False).frozen and not Body(dropout=0.1).frozen and Body().frozen


@pytest.mark.parametrize("module", [Body(frozen=False), Body(dropout=0.1), Live(), nn.Linear(8, 3)])
def test_other_modules_keep_their_inputs(module: nn.Module) -> None:
    data = federation()
    assert with_features(data, module) is data


def test_every_row_is_the_features_of_its_own_example() -> None:
    module, (x, _) = Body(), texts(3 * features.BATCH + 5)
    found = computed(module, x)
    torch.testing.assert_close(found, torch.cat([module.features(row[None]) for row in x]))
    swapped = x.clone()
    swapped[0] = x[1]  # nobody else's features depend on an example
    assert torch.allclose(computed(module, swapped)[2:], found[2:])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    again = computed(module, x)
    torch.set_num_threads(before)
    assert torch.equal(again, found) and computed(module, x[:0]).shape == (0, 6)


def test_images_are_inputs_too() -> None:
    class Image(Body):
        def features(self, inputs: Tensor) -> Tensor:
            return inputs.flatten(1)[:, :6]

    images = torch.randn(70, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(computed(Image(), images), images.flatten(1)[:, :6])


def test_remembered_for_the_same_body_and_data_only(passes: list[int]) -> None:
    module, data = Body(), federation()
    first = with_features(data, module)
    assert sorted(passes) == [17, 18, 19, 20, 21, 30]  # one batch a client, never two clients in one; one of the test
    assert with_features(data, module).inputs is first.inputs and len(passes) == 6
    with torch.no_grad():
        module.classifier.weight += 1  # the head changes no feature
    assert with_features(data, module).inputs is first.inputs
    with torch.no_grad():
        module.body.weight += 1
    assert not torch.allclose(with_features(data, module).inputs, first.inputs)
    other = replace(data, inputs=data.inputs.flip(0))
    assert torch.allclose(with_features(other, module).inputs, computed(module, other.inputs))


def test_another_setting_with_the_same_weights_is_another_body() -> None:
    """The twin that looks at the weights alone would hand out the first one's features."""

    class Scaled(Body):
        scale = 1.0

        def features(self, inputs: Tensor) -> Tensor:
            return super().features(inputs) * self.scale

    one, two, data = Scaled(), Scaled(), federation()
    two.scale = 2.0
    assert torch.allclose(with_features(data, two).inputs, 2 * with_features(data, one).inputs)


def test_a_whole_number_and_code_are_part_of_a_body() -> None:
    """A twin whose name leaves them out hands out another body's features, even from the disk."""

    class Powered(Body):
        power = 1

        def features(self, inputs: Tensor) -> Tensor:
            return super().features(inputs) ** self.power

    def redefined() -> nn.Module:
        class Powered(Body):
            power = 1

            def features(self, inputs: Tensor) -> Tensor:
                return -super().features(inputs)

        Powered.__qualname__ = type(one).__qualname__
        return Powered()

    one, two, data = Powered(), Powered(), federation()
    two.power = 2
    first = with_features(data, one).inputs
    assert torch.allclose(with_features(data, two).inputs, first**2)
    with_features(data, one)
    assert torch.allclose(with_features(data, redefined()).inputs, -first)


def test_patches_of_another_stride_are_another_body() -> None:
    """Two strides can lead to as many patches, so that a body from a file fits both."""
    options = [PatchOptions(filters=4, size=2, stride=stride, cells=2) for stride in (4, 5)]
    one, two = (Patches((1, 12, 12), option) for option in options)
    two.load_state_dict(one.state_dict())
    data = federation()
    assert features._name(data, one, "fp32") != features._name(data, two, "fp32")


def test_a_body_that_cannot_be_looked_into_is_not_remembered(passes: list[int]) -> None:
    body, data = Body(), federation()
    body.secret = (i for i in range(3))  # type: ignore[assignment]
    assert torch.equal(with_features(data, body).inputs, with_features(data, body).inputs) and len(passes) == 12


def test_a_resumed_run_is_the_run_and_its_name_has_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [texts(17 + i, i) for i in range(5)]
    changes: dict[str, Any] = {"model": Body(), "clients": pairs, "test": texts(30, 99)}
    whole = fedflat.run(recipe(), out=tmp_path / "run", **changes)
    for path in sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[1:]:
        path.unlink()
    again = fedflat.run(recipe(), out=tmp_path / "run", resume=True, **changes)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with_them, other = (
        prepare(fedflat.Recipe.of(recipe()), module, pairs, texts(30, 99)) for module in (Body(), Live())
    )
    monkeypatch.setattr("fedflat.assembly.jobs.with_features", lambda data, *_: data)
    without = prepare(fedflat.Recipe.of(recipe()), Body(), pairs, texts(30, 99))
    assert with_them.data.inputs.shape[1:] == (6,) and without.data.inputs.shape[1:] == (8,)
    first, second, third = (replace(one.identity, engine="") for one in (with_them, without, other))
    assert first == second != third and with_them.key == without.key  # a model's code is part of what a run is


def test_features_that_draw_are_refused() -> None:
    class Noisy(nn.Module):
        frozen = True

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def features(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.flatten(1) * torch.randn(1)

    with pytest.raises(InputError, match="features that draw random numbers"):
        with_features(from_pairs([(torch.randn(4, 2, 2), torch.arange(4) % 3)]), Noisy())


def test_features_for_which_there_is_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "free_memory", lambda: 900.0)  # 40 examples of 6 numbers have 960 bytes
    with pytest.raises(InputError, match="features of a frozen body: found 40 examples of 6 numbers"):
        computed(Body(), texts(40)[0])
    assert len(computed(Body(), texts(30)[0])) == 30
