"""A method of your own: DP-FedProx with SAM. One gradient rule, one composition; fedflat does the rest.

Run it: fedflat run quick-start -o algorithm.name=examples/new_method.py:dp_fedprox_sam
"""

from dataclasses import dataclass

from fedflat import Algorithm, ClientView, GradientFn, Phase
from fedflat.pieces.gradients import compose, sam


@dataclass(frozen=True)
class Proximal:
    """FedProx: the gradient of (mu/2)·‖w − w^t‖² on top of the loss (Li et al. 2020)."""

    mu: float

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        return lambda w: gradient(w) + self.mu * (w - view.start)


def dp_fedprox_sam(mu: float = 0.1, rho: float = 0.05) -> Algorithm:
    """The arguments are the recipe's ``algorithm`` keys."""
    return Algorithm("dp-fedprox-sam", phases=(Phase(rule=compose(sam(rho), Proximal(mu))),))
