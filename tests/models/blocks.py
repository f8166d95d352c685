"""Whether clients beside others have the gradients and features that each has alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedflat.backends import features
from fedflat.backends.features import with_features
from fedflat.data.clients import from_pairs


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


def check_alone(module: nn.Module, *inputs: Tensor) -> None:
    """The same bits alone, as in a deployment, as beside the others in a simulation. inputs: by client."""
    pairs = [(x, torch.arange(len(x)) % 3) for x in inputs]
    together = with_features(from_pairs(pairs), module)
    for i, pair in enumerate(pairs):
        features._LAST.clear()
        assert torch.equal(with_features(from_pairs([pair]), module).inputs, together.client(i)[0])
