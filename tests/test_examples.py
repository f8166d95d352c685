"""The readable twin computes what the engine computes. (That the examples run: ``documented``.)"""

import runpy
from pathlib import Path

import torch
from torch import nn

import fedflat

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_readable_twin_equals_the_engine() -> None:
    one_round = runpy.run_path(str(EXAMPLES / "one_round.py"))["one_round"]
    generator = torch.Generator().manual_seed(3)
    sizes = range(6, 13)
    clients = [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    settings = {"steps": 3, "lr": 0.2, "momentum": 0.5, "rho": 0.1, "threshold": 0.05}
    w = start
    for _ in range(4):
        w = one_round(model, w, clients, q=1.0, noise_multiplier=0.0, generator=generator, **settings)
    nn.utils.vector_to_parameters(start, model.parameters())
    recipe = {
        "rounds": 4, "algorithm": {"name": "dp-fedsam", "rho": 0.1}, "cohort": {"size": 7},
        "local": {"steps": 3, "batch_size": 100, "lr": 0.2, "momentum": 0.5},
        "privacy": {"clip": 0.05, "noise_multiplier": 0},
    }  # fmt: skip
    result = fedflat.run(recipe, model=model, clients=clients)
    ours = nn.utils.parameters_to_vector(result.model.parameters())
    assert torch.linalg.vector_norm(ours - start) > 0.02
    torch.testing.assert_close(ours, w, rtol=1e-5, atol=1e-6)


def test_a_new_method_is_under_thirty_lines() -> None:
    assert len((EXAMPLES / "new_method.py").read_text(encoding="utf-8").splitlines()) < 30
