"""Refuse or freeze state that would leave a client unclipped and without noise.

The guarantee covers the flat vector of trainable parameters. Anything else that training changes and that is
averaged or sent, first of all batch norm's running statistics, would be a release of data nobody accounts for.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from fedflat.core import InputError, require, seeded_torch, users_code, using_threads, wrong
from fedflat.core.held import difference, equal, global_generators, snapshot


class FixedNorm(nn.Module):
    """Batch norm with constant statistics: (x − mean)/√(var + eps) · weight + bias, per channel.

    The statistics are buffers that no forward pass changes; weight and bias stay parameters. It computes what
    ``nn.BatchNorm*`` computes in evaluation mode, in either mode.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _NormBase) -> None:
        super().__init__()
        self.eps = norm.eps
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, norm.get_buffer(name).detach().clone())
        self.weight = norm.weight  # given a copy by freeze_batch_norm; sharing keeps tied weights tied
        self.bias = norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def freeze_batch_norm(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose batch norms use their present running statistics as constants.

    Weight and bias stay trainable, so nothing moves outside the clipped update. The statistics must be public
    (a published checkpoint, a public data set): they are released as they are. Raises InputError for lazy norms.
    """
    _refuse_lazy(module)
    result = copy.deepcopy(module)
    norms = [part for part in result.modules() if isinstance(part, _NormBase) and part.running_mean is not None]
    fixed: dict[nn.Module | None, nn.Module] = {norm: FixedNorm(norm).train(norm.training) for norm in norms}
    for parent in list(result.modules()):
        for key, child in parent._modules.items():
            parent._modules[key] = fixed.get(child, child)  # a shared norm stays shared
    return fixed.get(result, result)


def _refuse_lazy(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise wrong(f"model: {name}", "a lazy tensor without a shape", "a module that has seen one batch")


def _refuse_parameters(module: nn.Module) -> None:
    _refuse_lazy(module)
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    require(bool(trainable), "model", "no trainable parameter", "a module with at least one that requires a gradient")
    for name, parameter in trainable:
        if not parameter.is_floating_point():
            raise wrong(f"model: {name}", f"trainable parameter of type {parameter.dtype}", "floating-point types")


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, _NormBase) and child.running_mean is not None:
            raise InputError(
                f"model: {name or 'the module itself'} is {type(child).__name__} with running statistics; they would "
                "leave every client unclipped and without noise. Remedy: group norm (torch.nn.GroupNorm), or, if its "
                "statistics are public, fedflat.models.freeze_batch_norm(module)."
            )


def _batches(example: Tensor) -> list[Tensor]:
    """Two batches of made-up inputs with nothing in common, in the form of ``example``."""
    if example.is_floating_point():
        first = torch.rand_like(example)
        return [first, 1 - first.flip(0)]
    low, high = (int(example.min()), int(example.max())) if example.numel() else (0, 0)
    return [torch.randint(low, high + 1, example.shape), torch.randint(low, high + 1, example.shape)]


def _pass(module: nn.Module, batch: Tensor) -> list[Tensor]:
    """Return the output of a forward pass and, where there is a graph, the gradients of its squared sum."""
    trained = [p for p in module.parameters() if p.requires_grad]
    allowed = f"a module that takes a batch of shape {tuple(batch.shape)} and type {batch.dtype}"
    with users_code("model", allowed, "in a training pass"):
        out = module(batch)
        if not (isinstance(out, Tensor) and out.requires_grad and out.is_floating_point()):
            return [out.detach()] if isinstance(out, Tensor) else []
        grads = torch.autograd.grad(out.square().sum(), trained, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]


def _trained_between(probe: nn.Module, first: Tensor, other: Tensor) -> tuple[bool, bool]:
    """Train on one batch, on another, and on the first again. Whether the outcomes on the first were the same bits,
    wherever a module may keep its memory; and whether torch's generator was drawn from."""
    outcomes, draws = list[list[Tensor]](), False
    for batch in (first, other, first):
        with seeded_torch(0, "check of the model's memory"):
            before = global_generators()
            outcomes.append(_pass(probe, batch))
            after = global_generators()
        draws |= before[0] != after[0]
        found = "a pass that draws from a global generator of NumPy or Python"
        require(before[1:] == after[1:], "model", found, "torch's own generator")
    once, _, again = outcomes
    return len(once) == len(again) and all(map(equal, once, again)), draws


def refuse_unclipped_state(module: nn.Module, example: Tensor) -> bool:
    """Raise InputError if training would change anything of ``module`` besides its trainable parameters.

    ``example`` gives the form of a batch (and the range of token ids). Passes over made-up batches, forward and
    backward, in training and evaluation mode, are made on a copy with slightly moved weights. Refused, by name:
    norms with running statistics in either mode (the engine chooses the mode); anything reachable from the module that
    a pass changes, be it a buffer, a frozen parameter, an attribute, a list, a generator, a hook's closure or a class;
    memory that is out of reach but shows in an outcome; randomness other than torch's own generator; lazy tensors;
    trainable parameters that are not floating point; modules with nothing to train.
    Returns whether training draws from torch's generator.
    """
    _refuse_parameters(module)
    _refuse_running_statistics(module)
    probe = copy.deepcopy(module).train()
    with using_threads(1), seeded_torch(0, "check of the model's state"):
        # State that has settled for the present weights (spectral norm's vectors) moves again when they do.
        with torch.no_grad():
            for parameter in probe.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.05).add_(0.01)
        batches = _batches(example)
        before = snapshot(probe)
        with torch.no_grad():
            _pass(probe.eval(), batches[1])
        if len(batches[0]):
            _pass(probe.train(), batches[0][:1])  # the last batch of an epoch may be one row
        forgets, draws = _trained_between(probe.train(), *batches)
        moved = difference(before, snapshot(probe))
    if moved is not None:
        raise InputError(
            f"model: {moved} is changed by a forward pass, outside the clipped update; it would leave every client "
            "unclipped and without noise, and carry its data to the next. Remedy: a layer without running state, or "
            "the same values held constant."
        )
    if not forgets:
        raise InputError(
            "model: a pass over the same data gives another outcome the second time: it draws from a source that "
            "cannot be seeded, or remembers what it saw, and would carry one client's data to the next. "
            "Remedy: nothing kept between passes, and no randomness but torch's own generator."
        )
    return draws
