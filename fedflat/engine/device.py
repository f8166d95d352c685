"""Place training on the processor or one GPU; server state, noise and ledger stay on the processor."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.core.checks import RunError, wrong
from fedflat.core.loss import Objective
from fedflat.core.params import Layout, flatten
from fedflat.core.process import set_meanwhile
from fedflat.core.rng import stream
from fedflat.core.types import Broadcast
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.problem import Batch, ModuleProblem

CPU = torch.device("cpu")
PROCESSES = ("workers", "ray")
"""Back ends whose processes compute on the processor only."""
CHECKED_ROWS = 16
"""Examples whose gradient is compared: a batch as small recipes have it, so that every layer sees several."""
TINY = 1e-12
"""Least norm that a difference is divided by: where the gradient is zero, so must the other be."""
TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2}
"""By how much, relative to its norm, a GPU's sum may differ from another order of adding up."""
COARSER = 3.0
"""In bf16: by how many times the processor's own rounding a GPU's gradient may differ from float32."""
OUT_OF_MEMORY = ("not enough memory", "out of memory", "can't allocate memory", "alloc_failed")


def device_for(
    name: str, backend: str, module: nn.Module, layout: Layout, data: FederatedData, precision: str, loss: Objective
) -> torch.device:
    """Return the device a recipe asks for, after one gradient there was compared with the processor's.

    name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: a GPU where there is one that gives the processor's numbers.
    Raises InputError where a GPU is asked for by name and there is none, or it computes something else.
    """
    # Worker processes compute on the processor; a GPU is not shared among them.
    alone = backend in PROCESSES or not torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and alone):
        return CPU
    if backend in PROCESSES:
        raise wrong("engine.device", f"{name} with engine.backend {backend}", "cpu for it, or another back end")
    device = _named("cuda" if name == "auto" else name)
    reason = difference(module, layout, data, precision, device, loss)
    if not reason:
        return device
    if name != "auto":
        raise wrong("engine.device", f"{name}, where {reason}", "cpu")
    warnings.warn(f"engine.device: going on with the processor, for on {device} {reason}", stacklevel=2)
    return CPU


def _named(name: str) -> torch.device:
    """Return an existing GPU by name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product; without it sums may vary
    if not torch.cuda.is_available():
        built = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no GPU"
        raise wrong("engine.device", f"{name}, but {built}", "cpu or auto")
    device, count = torch.device(name), torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise wrong("engine.device", name, f"cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", device.index or 0)


def difference(
    module: nn.Module, layout: Layout, data: FederatedData, precision: str, device: torch.device, loss: Objective
) -> str:
    """Return what is wrong with a device, found by one gradient on made-up examples: empty where it agrees with the
    processor.

    It draws nothing at random: the module is a copy in eval mode.
    """
    inputs, targets = (side.cpu() for side in made_rows(data, CHECKED_ROWS, stream(0, "rows to check a device with")))
    weights = flatten(module, layout)

    def gradient(at: torch.device, precision: str) -> Tensor:
        problem = ModuleProblem(copy.deepcopy(module).to(at), layout, precision, objective=loss)
        with problem.evaluating():
            return problem.gradient(weights.to(at, copy=True), "all", Batch(inputs.to(at), targets.to(at))).vector.cpu()

    expected = gradient(CPU, "fp32")
    try:
        with exact(device):
            found = gradient(device, precision)
    except Exception as error:  # a layer may fail there in a way of its own
        return f"training fails: {(str(error) or type(error).__name__).splitlines()[0]}"
    whole = expected.norm().clamp_min(TINY)
    apart, allowed = float((found - expected).norm() / whole), TOLERANCE["fp32"]
    if precision != "fp32":
        # bf16 rounds coarsely on every device: the processor's own error is the measure.
        allowed = max(TOLERANCE[precision], COARSER * float((gradient(CPU, precision) - expected).norm() / whole))
    return "" if apart <= allowed else f"a gradient is {apart:.1%} away from the processor's"


def placed(data: FederatedData, device: torch.device) -> FederatedData:
    """Return the federation with its examples on a device; clients' rows stay on the processor, where batches are
    drawn.
    """
    if data.inputs.device == device:
        return data
    names = ("inputs", "targets", "test_inputs", "test_targets")
    whole = {name: value for name in names if (value := getattr(data, name)) is not None}
    try:
        return replace(data, **{name: value.to(device) for name, value in whole.items()})
    except RuntimeError as error:
        size = sum(value.nbytes for value in whole.values()) / 2**30
        raise RunError(f"engine.device: {size:.1f} GiB of data do not go on {device}: {error}") from error


def sent(broadcast: Broadcast, device: torch.device) -> Broadcast:
    """Return the broadcast on a device."""
    if broadcast.shared.device == device:
        return broadcast
    vectors = {name: vector.to(device) for name, vector in broadcast.vectors.items()}
    mask = None if broadcast.mask is None else broadcast.mask.to(device)
    return replace(broadcast, shared=broadcast.shared.to(device), vectors=vectors, mask=mask)


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """On a GPU: the same bits at every call, and float32 products in float32, not TF32. Nothing on the processor.

    A run that was killed could not go on bit for bit otherwise. Kernels without such a variant are used as they are.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda.matmul)
    settings: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    settings.append((torch.utils.deterministic, "fill_uninitialized_memory", False))
    if hasattr(matmul, "fp32_precision"):
        settings += [(owner, "fp32_precision", "ieee") for owner in (matmul, cudnn.conv, cudnn.rnn)]
    else:  # PyTorch before 2.9
        settings += [(owner, "allow_tf32", False) for owner in (matmul, cudnn)]
    strict, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack, warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        for owner, name, value in settings:
            read, write = partial(getattr, owner, name), partial(setattr, owner, name)
            stack.enter_context(set_meanwhile(read, write, value))
        stack.callback(torch.use_deterministic_algorithms, strict, warn_only=warned)
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        yield


def out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory was short."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)
