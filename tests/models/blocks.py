"""Whether the clients of a block have the gradients that each has alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F


def check_gradients(
    x: Tensor, y: Tensor, *modules: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    rtol: float = 1e-3, atol: float = 1e-5,
) -> None:  # fmt: skip
    """Compare gradients under vmap with single calls. x, y: by client; modules: everybody's, or each client's own."""

    def of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(modules[0], parameters, (x,)), y)

    own = [{k: v.detach() for k, v in m.named_parameters() if v.requires_grad} for m in modules]
    shared = len(own) == 1
    given = own[0] if shared else {k: torch.stack([client[k] for client in own]) for k in own[0]}
    together = vmap(grad(of), in_dims=(None if shared else 0, 0, 0))(given, x, y)
    for i in range(len(x)):
        for key, alone in grad(of)(own[0 if shared else i], x[i], y[i]).items():
            torch.testing.assert_close(together[key][i], alone, rtol=rtol, atol=atol)
