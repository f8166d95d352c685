"""One round of DP-FedSAM, readable from top to bottom: what fedflat's engine computes, without its engine.

Run it: python examples/one_round.py. tests/test_examples.py holds it equal to ``fedflat.run``.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


def gradient(model: nn.Module, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean cross-entropy at the flat weights ``w``."""
    nn.utils.vector_to_parameters(w, model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads])


def local_training(
    model: nn.Module,
    start: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    steps: int,
    lr: float,
    momentum: float,
    rho: float,
) -> torch.Tensor:
    """K full-batch steps of SAM from the broadcast weights; returns the client's update Δ = w_K − w^t."""
    w, buffer = start.clone(), torch.zeros_like(start)
    for _ in range(steps):
        g = gradient(model, w, x, y)
        nearby = w + rho * g / g.norm() if g.norm() > 0 else w  # the worst point within distance ρ
        buffer = momentum * buffer + gradient(model, nearby, x, y)
        w = w - lr * buffer
    return w - start


def clip(update: torch.Tensor, threshold: float) -> torch.Tensor:
    """The whole vector to norm at most C; an update that is not finite counts as zero."""
    norm = update.norm()
    return update * min(1.0, threshold / float(norm)) if torch.isfinite(norm) and norm > 0 else torch.zeros_like(update)


def one_round(
    model: nn.Module,
    w: torch.Tensor,
    clients: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    q: float,
    noise_multiplier: float,
    threshold: float,
    steps: int,
    lr: float,
    momentum: float,
    rho: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """w^t -> w^{t+1}. Sensitivity of the sum under add-remove of one client: the threshold C."""
    cohort = torch.rand(len(clients), generator=generator) < q  # Poisson, and secret
    total = torch.zeros_like(w)
    for (x, y), taken in zip(clients, cohort):
        if taken:
            total += clip(local_training(model, w, x, y, steps=steps, lr=lr, momentum=momentum, rho=rho), threshold)
    noise = torch.randn(len(w), generator=generator) * noise_multiplier * threshold
    expected = q * len(clients)  # a constant: never the realised cohort, never data sizes
    return w + (total + noise) / expected


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 3)
    w = torch.zeros(sum(p.numel() for p in model.parameters()))
    centres = torch.randn(3, 5, generator=generator) * 2
    clients = []
    for _ in range(200):
        y = torch.randint(3, (20,), generator=generator)
        clients.append((centres[y] + torch.randn(20, 5, generator=generator), y))
    local = {"steps": 5, "lr": 0.1, "momentum": 0.5, "rho": 0.05}
    for _ in range(30):
        w = one_round(model, w, clients, q=0.25, noise_multiplier=1.0, threshold=0.5, generator=generator, **local)
    nn.utils.vector_to_parameters(w, model.parameters())
    x, y = (torch.cat(parts) for parts in zip(*clients))
    accuracy = float((model(x).argmax(1) == y).float().mean())
    if not math.isfinite(accuracy):
        raise SystemExit("the model diverged")
    print(f"accuracy after 30 rounds: {accuracy:.3f}")
    import fedflat

    epsilon = fedflat.epsilon(clients=200, cohort=50, rounds=30, noise_multiplier=1.0, delta=1e-4)
    print(f"proven ε at δ = 1e-4: {epsilon:.2f}")


if __name__ == "__main__":
    main()
