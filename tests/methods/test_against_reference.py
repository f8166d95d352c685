"""``fedflat.run`` against the independent float64 reference: every method, both back ends, several settings."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from torch import nn

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.data.clients import from_pairs, hold_back
from fedflat.engine.batches import Order
from fedflat.engine.train import train

LINEAR, TANH, RELU = ref.Net((6, 3)), ref.Net((6, 5, 3), "tanh"), ref.Net((6, 5, 3), "relu")
SIZES = (7, 1, 0, 12, 5)
BACKENDS = ("sequential", "vectorized")
SEED = 11

OPTIONS = {
    "fedavg": {}, "fedsam": {"rho": 0.3}, "dp-fedavg": {}, "dp-fedavg-blur": {"lam": 0.7},
    "dp-fedavg-lus": {"sparsity": 0.7}, "dp-fedavg-blurs": {"lam": 0.7, "sparsity": 0.4}, "dp-fedsam": {"rho": 0.3},
    "dp-fedsam-topk": {"rho": 0.3, "keep": 0.4}, "dp-fedsam-blur": {"rho": 0.3, "lam": 0.7},
    "dp-fedavg-la": {"strength": 0.8, "absent": 0.05}, "dp-fedavg-ls": {"smoothing": 0.4},
    "dp-fedpgn": {"rho": 0.2, "beta": 0.3}, "dp-fedpgn-ls": {"rho": 0.2, "beta": 0.3, "smoothing": 0.4},
    "dp-fedprox": {"mu": 0.7}, "dp-fedadam": {"beta1": 0.8, "beta2": 0.9}, "dp-fednsam": {"rho": 0.3, "gamma": 0.6},
    "dp-disk": {"kappa": 0.6, "ahead": 0.4}, "dp-fedavg-ft": {}, "dp-fedsam-ft": {"rho": 0.3},
    "dp-scaffold": {"scale": 0.5}, "fed-normec": {"alpha": 0.05}, "fed-smp-randk": {"keep": 0.4},
    "fed-smp-topk": {"keep": 0.4}, "centaur": {"head_lr": 0.05, "head_steps": 2},
    "dp2-fedsam": {"rho": 0.1, "head_lr": 0.05, "head_steps": 2},
    "p-fedsam": {"rho": 0.1, "head_lr": 0.05, "head_steps": 2},
}  # fmt: skip
PGN = ("dp-fedpgn", "dp-fedpgn-ls")
KEEPING = ("dp-scaffold", "fed-normec")
LOCAL_KEYS = ("steps", "lr", "momentum", "lr_decay", "weight_decay", "max_grad_norm")


def data(sizes: Sequence[int] = SIZES, seed: int = 3) -> list[ref.Batch]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 6)).astype(np.float32).astype(np.float64), rng.integers(0, 3, n)) for n in sizes]


def module_of(net: ref.Net, weights: np.ndarray) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(net.sizes, net.sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh() if net.activation == "tanh" else nn.ReLU()]
    module = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for where, parameter in zip(net.tensors, module.parameters()):
            parameter.copy_(torch.tensor(weights[where]).reshape(parameter.shape))
    return module


def weights_of(module: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def start_of(net: ref.Net) -> np.ndarray:
    return (np.random.default_rng(8).normal(size=net.length) * 0.5).astype(np.float32).astype(np.float64)


def pairs(clients: Sequence[ref.Batch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor(x, dtype=torch.float32), torch.tensor(y)) for x, y in clients]


def setting(method: str, **changes: Any) -> ref.Setting:
    options = {**OPTIONS[method], **changes}
    if method in (*PGN, "dp-scaffold"):
        options["momentum"] = 0.0
    return ref.Setting(method, **options)


def recipe_of(s: ref.Setting, backend: str, clients: int, batch_size: int = 100) -> dict[str, Any]:
    """The recipe that the reference's setting stands for."""
    keys = set(OPTIONS[s.method]) | {f.name for f in fields(s) if getattr(s, f.name) != f.default}
    chosen = {"rescale", "finetune_steps", "finetune_lr", "scope", "floor", "adaptive", *OPTIONS[s.method]} & keys
    return {
        "seed": SEED, "rounds": s.rounds, "algorithm": {"name": s.method, **{k: getattr(s, k) for k in chosen}},
        "local": {"batch_size": batch_size, **{k: getattr(s, k) for k in LOCAL_KEYS}},
        "cohort": {"size": s.cohort or clients}, "privacy": {"clip": s.clip, "noise_multiplier": s.noise_multiplier},
        "server": {**{"optimizer" if k == "kind" else k: v for k, v in s.server.items()}, "weights": s.weights},
        "engine": {"backend": backend},
    }  # fmt: skip


def compare(s: ref.Setting, net: ref.Net, backend: str, clients: list[ref.Batch] | None = None, **more: Any) -> Any:
    """Run both and compare weights, heads and the recorded norms of every round."""
    clients = data() if clients is None else clients
    first, masks = start_of(net), []
    options = recipe_of(s, backend, len(clients), more.pop("batch_size", 100))
    name = options["algorithm"].pop("name")
    algorithm = ALGORITHMS[name](**options["algorithm"])
    options["algorithm"] = name
    if algorithm.mask is not None:  # the masks fedflat draws are given to the reference
        draw = algorithm.mask

        def recorded(view: Any) -> torch.Tensor:
            masks.append(draw(view))
            return masks[-1]

        algorithm = replace(algorithm, mask=recorded)
    result = fedflat.run(
        options, model=module_of(net, first), clients=pairs(clients), algorithm=algorithm,
        on_start=lambda job: masks.clear(),  # those of the trial of the method's pieces belong to no round
    )  # fmt: skip
    assert len(masks) == (0 if algorithm.mask is None else s.rounds)
    expected = ref.simulate(s, net, first, clients, masks=[m.numpy() for m in masks], **more)
    close(weights_of(result.model) - first, expected.weights - first)
    for record, norms in zip(result.private_history, expected.norms):
        filled = [n for n in norms if n is not None]
        # an empty client is part of the cohort and sends zero
        assert record["update_norm_mean"] == pytest.approx(sum(filled) / len(clients), rel=5e-5)
    if s.method in ref.PERSONAL:
        for i, head in result.heads.items():
            close(head.numpy(), expected.heads[i])
        assert {i for i, (_, y) in enumerate(clients) if len(y)} <= set(result.heads)
    return result, expected


def close(found: np.ndarray, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    assert scale > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale)


KINDS = {"clip-idle": (TANH, 1e3), "clip-active": (TANH, 0.11), "linear": (LINEAR, 0.11)}
CASES = [(m, kind) for m in sorted(OPTIONS) for kind in KINDS if kind != "linear" or m not in ref.PERSONAL]
"""A single layer cannot be both head and shared part."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_method(method: str, kind: str, backend: str) -> None:
    net, clip = KINDS[kind]
    clip = min(clip, 0.02) if clip < 1 and method in PGN else clip  # β < 1 makes small messages
    clip = min(clip, 0.5) if method == "fed-normec" else clip  # a message's length is nearly C, however large
    _, expected = compare(setting(method, clip=clip, lr_decay=0.8, weight_decay=0.01), net, backend)
    if method not in ref.NOT_PRIVATE and method != "fed-normec":
        clipped = [n > clip for norms in expected.norms for n in norms]
        assert any(clipped) if clip < 1 else not any(clipped)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", KEEPING)
def test_what_clients_keep(method: str, backend: str) -> None:
    """Each client's state, and the server's, which is the mean of all of them."""
    s = setting(method, clip=0.1)
    expected = ref.simulate(s, TANH, start_of(TANH), data())
    recipe = Recipe.of(recipe_of(s, backend, len(data())))
    outcome = train(prepare(recipe, module_of(TANH, start_of(TANH)), pairs(data())))
    ((name, kept),) = outcome.heads.states.items()
    assert set(kept) == {i for i, (_, y) in enumerate(data()) if len(y)}
    for client, state in kept.items():
        close(state.numpy(), expected.kept[client])
    close(outcome.state.slots[name].numpy(), sum(expected.kept.values()) / len(data()))


@pytest.mark.parametrize("method", ["dp-fedsam-topk", "dp-fedavg-blurs", "dp-fedpgn-ls", "dp2-fedsam"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_relu_without_momentum_and_many_steps(method: str, backend: str) -> None:
    compare(setting(method, clip=0.3, momentum=0.0, steps=7, rounds=2), RELU, backend)


@pytest.mark.parametrize("method", ["dp-fedsam", "dp-fedsam-topk"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_sam(method: str, backend: str) -> None:
    compare(setting(method, adaptive=True, clip=0.3, weight_decay=0.01), TANH, backend)


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam", "dp-fedpgn", "dp-fedavg-blur"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_norm_limit_comes_before_weight_decay(method: str, backend: str) -> None:
    compare(setting(method, clip=0.3, max_grad_norm=0.2, weight_decay=0.05), TANH, backend)


@pytest.mark.parametrize(
    "server", [{"lr": 0.7, "momentum": 0.9}, {"kind": "adam", "lr": 0.05}, {"kind": "yogi", "lr": 0.05}]
)
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedpgn", "dp-fedpgn-ls", "fed-smp-randk", "dp2-fedsam"])
def test_server_optimisers(method: str, server: dict[str, Any]) -> None:
    compare(setting(method, clip=0.2, server=server), TANH, "sequential")


@pytest.mark.parametrize(("multiplier", "floor"), [(0.5, None), (3.0, None), (0.5, 1e-5)])
def test_adam_takes_the_known_noise_off(multiplier: float, floor: float | None, monkeypatch: Any) -> None:
    """No noise is drawn, so that the release is known; the plan still says how much there would be."""
    monkeypatch.setattr("fedflat.pieces.mechanisms.GaussianNoise.unit", lambda *known: torch.zeros(known[-1]))
    s = setting("dp-fedadam", clip=0.2, rounds=4, floor=floor, noise_multiplier=multiplier, server={"lr": 0.05})
    result, _ = compare(s, TANH, "sequential")
    first = start_of(TANH)
    for wrong in (0.0, 0.9 * multiplier):  # the twin that reckons with other noise
        other = ref.simulate(replace(s, noise_multiplier=wrong), TANH, first, data())
        with pytest.raises(AssertionError):
            close(weights_of(result.model) - first, other.weights - first)


@pytest.mark.parametrize("server", [{}, {"lr": 0.6}])
def test_the_filter_with_one_gradient(server: dict[str, float]) -> None:
    """A recipe without γ has (1−κ)/κ, at which one gradient is enough; twins with other numbers are noticed."""
    s = setting("dp-disk", clip=0.2, rounds=4, kappa=0.7, ahead=0.3 / 0.7, server=server)
    result, _ = compare(s, TANH, "vectorized")
    recipe = recipe_of(s, "vectorized", len(data())) | {"algorithm": {"name": "dp-disk", "kappa": 0.7}}
    alone = fedflat.run(recipe, model=module_of(TANH, start_of(TANH)), clients=pairs(data()))
    close(weights_of(alone.model) - start_of(TANH), weights_of(result.model) - start_of(TANH))
    for changed in ({"ahead": 2.0}, {"kappa": 0.9}):
        other = ref.simulate(replace(s, **changed), TANH, start_of(TANH), data())
        with pytest.raises(AssertionError):
            close(weights_of(result.model) - start_of(TANH), other.weights - start_of(TANH))


@pytest.mark.parametrize("method", ["dp-fedavg-ls", "dp-fedpgn-ls"])
def test_smoothing_the_whole_vector(method: str) -> None:
    result, _ = compare(setting(method, scope="vector"), TANH, "sequential")
    other, _ = compare(setting(method), TANH, "sequential")
    assert np.abs(weights_of(result.model) - weights_of(other.model)).max() > 1e-4


@pytest.mark.parametrize("method", ["fed-smp-randk", "fed-smp-topk"])
def test_rescaling_happens_before_the_clip(method: str) -> None:
    compare(setting(method, rescale=True, clip=0.2), TANH, "sequential")


def test_sample_weights_are_for_the_non_private_twins() -> None:
    compare(setting("fedavg", weights="samples"), TANH, "sequential")
    with pytest.raises(fedflat.InputError, match=r"server\.weights"):
        compare(setting("dp-fedavg", weights="samples"), TANH, "sequential")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["dp-fedsam", "dp-fedavg-blurs", "dp2-fedsam", "dp-fedpgn"])
def test_minibatches_in_the_documented_order(method: str, backend: str) -> None:
    clients = data()

    def batches(round: int, client: int, phase: int, steps: int) -> list[ref.Batch]:
        x, y = clients[client]
        rows = Order(SEED, round, 4).indices([client], np.array([len(y)]), phase, steps, 4)[0]
        return [(x[row[row >= 0]], y[row[row >= 0]]) for row in rows]

    compare(setting(method, clip=0.2, steps=5), TANH, backend, clients, batches_of=batches, batch_size=4)


def test_a_wrong_reference_would_be_noticed() -> None:
    """The comparison has teeth: a small change of one number fails it."""
    s = setting("dp-fedsam", clip=0.2)
    result, _ = compare(s, TANH, "sequential")
    first = start_of(TANH)
    for changed in ({"rho": 0.301}, {"clip": 0.2002}, {"momentum": 0.501}, {"lr": 0.1001}):
        other = ref.simulate(replace(s, **changed), TANH, first, data())
        with pytest.raises(AssertionError):
            close(weights_of(result.model) - first, other.weights - first)


PERSONAL_METHODS = ["centaur", "dp2-fedsam", "p-fedsam", "dp-fedavg-ft", "dp-fedsam-ft"]


@pytest.mark.parametrize("method", PERSONAL_METHODS)
def test_personal_accuracies_on_held_back_data(method: str) -> None:
    """Own head, or the fine-tuned global model, evaluated on data that the client never trains on."""
    clients = data((24, 30, 0, 18, 40))
    given = from_pairs(pairs(clients))
    kept, held = hold_back(given.parts, 0.4, SEED)
    x, y = given.inputs.numpy().astype(np.float64), given.targets.numpy()
    extra = {"finetune_steps": 4, "finetune_lr": 0.5} if method.endswith("-ft") else {"head_lr": 1.0}
    s = setting(method, lr=0.3, clip=0.5, rounds=2, **extra)
    first = start_of(TANH)
    expected = ref.simulate(s, TANH, first, [(x[r], y[r]) for r in kept], held=[(x[r], y[r]) for r in held])
    recipe = recipe_of(s, "sequential", len(clients)) | {"data": {"client_test_fraction": 0.4}}
    result = fedflat.run(recipe, model=module_of(TANH, first), clients=pairs(clients))
    close(weights_of(result.model) - first, expected.weights - first)
    assert len(expected.personal) == 4
    found = result.private_history[-1]["personal_accuracy"]
    assert found == pytest.approx(np.mean(expected.personal), abs=1e-6)
    shared_only = np.mean([TANH.accuracy(expected.weights, (x[r], y[r])) for r in held if len(r)])
    assert found != pytest.approx(shared_only, abs=1e-6)  # never the global model's own accuracy
    assert "personal_accuracy" not in result.history[-1]  # private to the simulation


def test_a_client_that_never_took_part_is_evaluated_with_the_first_head() -> None:
    clients = data((24, 30))
    s = setting("dp2-fedsam", rounds=1, cohort=1)
    recipe = recipe_of(s, "sequential", 2) | {"data": {"client_test_fraction": 0.4}}
    recipe["cohort"] = {"size": 1, "sampling": "fixed"}
    result = fedflat.run(recipe, model=module_of(TANH, start_of(TANH)), clients=pairs(clients))
    assert len(result.heads) == 1
    np.testing.assert_array_equal(weights_of(result.model)[TANH.head], start_of(TANH)[TANH.head])
