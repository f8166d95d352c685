"""With one local step and ρ = 0 DP-FedPGN is DP-FedAvg with server momentum: its clip and rate are read by that."""

from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

import fedflat

BETA, CLIP, RATE = 0.3, 0.05, 2.0
TINY: dict[str, Any] = {
    "rounds": 5, "data": {"dataset": "digits", "clients": 20, "max_examples": 200}, "model": {"name": "linear"},
    "local": {"steps": 1, "batch_size": 16, "lr": 0.7, "momentum": 0.0}, "cohort": {"size": 20, "sampling": "full"},
}  # fmt: skip


def final(algorithm: dict[str, Any], clip: float, **server: float) -> torch.Tensor:
    own = {"algorithm": algorithm, "privacy": {"noise_multiplier": 0.0, "clip": clip}, "server": server}
    return parameters_to_vector(fedflat.run(TINY | own).model.parameters()).detach()


def test_pgn_without_its_perturbation_is_momentum_with_another_clip_and_rate() -> None:
    pgn = {"name": "dp-fedpgn", "beta": BETA, "rho": 0.0}
    found = final(pgn, BETA * CLIP, lr=RATE / BETA)
    plain = final({"name": "dp-fedavg"}, CLIP, lr=RATE, momentum=1 - BETA)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert (final(pgn, CLIP, lr=RATE / BETA) - plain).norm() > 0.1 * plain.norm(), "with the same clip it is not"
