"""Place training on the processor or one GPU, in the memory layout that layers read fastest where that is right.

Server state, noise and ledger stay on the processor.
"""

import copy
import ctypes
import faulthandler
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd

from fedflat.core import CRASHES, Broadcast, Layout, Objective, flatten, seeded_torch, set_meanwhile, stream
from fedflat.core.checks import RunError, becoming, first_line, require, wrong
from fedflat.data.clients import FederatedData, made_rows
from fedflat.engine.problem import LEAST, Batch, ModuleProblem

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
TRIES, EXAMPLES = 3, LEAST
"""Batches that are tried, odd so that one is in the middle, and examples in each: the fewest that go by oneDNN."""
FEW = 16
"""Channels of a group below which the kernel that ``at_fault`` is about is not trusted."""
CLOSE = 1e-4
"""Largest distance of two gradients, relative to their length, in the middle one of the tries: in one of them a pooling
or a ReLU may decide otherwise between two nearly equal numbers, as it also may against exact arithmetic."""
PASSES, ROWS = 4, 16
"""Gradients that a module's first child process takes, since damaged memory shows late, and examples in each."""
SECONDS, PATIENCE = 30, 120
"""Processor time that they may take (damaged memory may also mean an endless loop), and seconds on the clock."""


def device_for(
    name: str, backend: str, module: nn.Module, layout: Layout, data: FederatedData, precision: str, loss: Objective
) -> torch.device:
    """Return the device a recipe asks for, after one gradient there was compared with the processor's.

    name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: a GPU where there is one that gives the processor's numbers.
    Raises InputError where a GPU is asked for by name and there is none, or it computes something else.
    """
    # Worker processes compute on the processor; a GPU is not shared among them.
    processor_only = backend in PROCESSES or not torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and processor_only):
        return CPU
    if backend in PROCESSES:
        raise wrong("engine.device", f"{name} with engine.backend {backend}", "cpu for it, or another back end")
    device = _named("cuda" if name == "auto" else name)
    if not (reason := difference(module, layout, data, precision, device, loss)):
        return device
    require(name == "auto", "engine.device", f"{name}, where {reason}", "cpu")
    warnings.warn(f"engine.device: going on with the processor, for on {device} {reason}", stacklevel=2)
    return CPU


def _named(name: str) -> torch.device:
    """Return an existing GPU by name."""
    if not torch.cuda.is_available():
        built = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no GPU"
        raise wrong("engine.device", f"{name}, but {built}", "cpu or auto")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product; without it sums may vary
    device, count = torch.device(name), torch.cuda.device_count()
    require((device.index or 0) < count, "engine.device", name, f"cuda:0 to cuda:{count - 1}")
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
            actual = gradient(device, precision)
    except Exception as error:  # a layer may fail there in a way of its own
        return f"training fails: {first_line(error)}"
    norm = expected.norm().clamp_min(TINY)
    apart, allowed = float((actual - expected).norm() / norm), TOLERANCE["fp32"]
    if precision != "fp32":
        # bf16 rounds coarsely on every device: the processor's own error is the measure.
        allowed = max(TOLERANCE[precision], COARSER * float((gradient(CPU, precision) - expected).norm() / norm))
    return "" if apart <= allowed else f"a gradient is {apart:.1%} away from the processor's"


def placed(data: FederatedData, device: torch.device) -> FederatedData:
    """Return the federation with its examples on a device; clients' rows stay on the processor, where batches are
    drawn.
    """
    if data.inputs.device == device:
        return data
    names = ("inputs", "targets", "test_inputs", "test_targets")
    tensors = {name: value for name in names if (value := getattr(data, name)) is not None}
    failed = f"engine.device: {sum(t.nbytes for t in tensors.values()) / 2**30:.1f} GiB of data do not go on {device}"
    with becoming(lambda error: RunError(f"{failed}: {error}"), RuntimeError):
        return replace(data, **{name: value.to(device) for name, value in tensors.items()})


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


def refuse_crashing(module: nn.Module, inputs: Tensor) -> None:
    """Raise InputError for a user's module with convolutions whose first gradients crash in compiled code.

    They are taken in a child process, since no ``except`` sees such a crash.
    """
    if (number := _ended_by(module, inputs, last=False)) in CRASHES:
        found = f"a module whose first gradient crashes in compiled code ({signal.Signals(number).name})"
        raise wrong("model", found, "layers that torch can train on this machine")


def in_bearable_layout(module: nn.Module, data: FederatedData) -> FederatedData:
    """Return the federation with images in the plain layout where channels-last ones end a user's module's process."""
    last = data.inputs.dim() == 4 and not data.inputs.is_contiguous()
    return _laid_out(data, torch.contiguous_format) if last and _ended_by(module, data.inputs, last=True) else data


def _ended_by(module: nn.Module, like: Tensor, last: bool) -> int:
    """Return the signal that ended a child process which took gradients of a module on made-up inputs; 0 if none did.

    It is forked, which takes milliseconds, and computes on one thread, since a fork has no other threads. last: images
    channels-last.
    """
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()) or like.device.type != "cpu":
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child needs none of the threads
        # A fork has the module already; a new process would have to be sent it, and import torch.
        child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the C library's last words
            faulthandler.disable()
            torch.set_num_threads(1)
            trained = [p for p in module.train().parameters() if p.requires_grad]
            for _ in range(PASSES):
                inputs = torch.randn(ROWS, *like.shape[1:]).to(like.dtype)
                inputs = inputs.contiguous(memory_format=torch.channels_last) if last else inputs
                torch.autograd.grad(module(inputs).float().square().mean(), trained, allow_unused=True)
        finally:
            os._exit(0)  # an error of its own shows again where it is told
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0
        time.sleep(0.005)
    return os.WTERMSIG(ended[1]) if os.WIFSIGNALED(ended[1]) else 0


def serves(module: nn.Module, layout: Layout, precision: str, inputs: Tensor) -> bool:
    """Return whether gradients on oneDNN's own tensors are those on plain ones, but for rounding.

    Only layers that oneDNN has (convolution, pooling, ReLU, linear) run on such tensors, in float32. The answer is a
    function of the module with its weights, the shape of ``inputs`` ``(N, c, h, w)``, torch and the processor; only
    made-up images are looked at, so that a resumed run and every worker go the same way. Weights, buffers and
    generators are left as they were.

    Not the same: oneDNN's pooling passes over NaN and its ReLU makes 0 of it. An image that is not finite still shows
    in the gradient, which is multiplied by it, and weights that are not finite in the update.
    """
    served = precision == "fp32" and inputs.dim() == 4 and inputs.device.type == "cpu"
    served = served and inputs.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    if not served or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()) or at_fault(module):
        return False
    if len(inputs) and not inputs.is_contiguous(memory_format=torch.channels_last):
        return False
    fast, plain = (ModuleProblem(module, layout, precision, onednn=onednn) for onednn in (True, False))
    weights = flatten(module, layout)
    try:
        # The middle of three: one ReLU that tips over between equal numbers is no fault.
        distances = sorted(_distance(fast, plain, weights, _images(number, inputs)) for number in range(TRIES))
    except Exception:  # a module may do anything with its inputs, and most of it is not there for these tensors
        return False
    finally:
        plain.bind(weights)  # a forward pass may have written to buffers
    return distances[TRIES // 2] <= CLOSE


def _images(number: int, like: Tensor) -> Batch:
    drawn = stream(0, "images to try layers on", number).standard_normal((EXAMPLES, *like.shape[1:]))
    images = torch.from_numpy(drawn).to(like.dtype).contiguous(memory_format=torch.channels_last)
    return Batch(images, torch.zeros(EXAMPLES, dtype=torch.int64))


def _distance(fast: ModuleProblem, plain: ModuleProblem, weights: Tensor, batch: Batch) -> float:
    """‖g − g′‖/‖g‖ of the two problems' gradients; infinite where either is not finite."""
    with seeded_torch(0, "images to try layers on"):  # neither draws what the run would draw
        actual = fast.gradient(weights, "all", batch).vector
    with seeded_torch(0, "images to try layers on"):
        expected = plain.gradient(weights, "all", batch).vector
    distance = float((actual - expected).norm() / expected.norm())
    return distance if distance >= 0 else float("inf")


_MMAP, _TRIM, _ARENAS = -3, -1, -8
"""``mallopt``'s numbers in glibc's malloc.h: from how many bytes on a block is mapped by itself, how many free ones at
its end the heap keeps, and how many arenas there are at most."""


def at_fault(module: nn.Module) -> bool:
    """Return whether a module has a strided 1 × 1 convolution of few channels.

    On channels-last images with AVX2 the gradient of its weights writes beyond oneDNN's memory (seen with torch 2.13,
    3 and 4 channels, stride 2): the process ends, or never does. On images in the plain layout it is right.
    """
    convolutions = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    few = (layer for layer in convolutions if layer.in_channels // layer.groups < FEW)
    return any(set(layer.kernel_size) == {1} and max(layer.stride) > 1 for layer in few)


def resident(data: FederatedData, module: nn.Module) -> FederatedData:
    """Return the same federation, images channels-last for convolutional models: contiguous max pooling is slow on
    CPUs.

    Images stay as they are where a kernel for channels-last ones is at fault.
    """
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()) or data.inputs.dim() != 4:
        return data
    return _laid_out(data, torch.contiguous_format if at_fault(module) else torch.channels_last)


def _laid_out(data: FederatedData, layout: torch.memory_format) -> FederatedData:
    test = None if data.test_inputs is None else data.test_inputs.contiguous(memory_format=layout)
    return replace(data, inputs=data.inputs.contiguous(memory_format=layout), test_inputs=test)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: local training frees and takes the same sizes all the time.

    1 GiB is more than any block that it takes. One arena for all threads: a thread's own is too small for a block of
    clients and would ask the system each time.
    """
    _tell_malloc({_MMAP: 1 << 30, _TRIM: 1 << 30, _ARENAS: 1})


def return_large_blocks() -> None:
    """Tell glibc to map each block over 64 KiB by itself, and to give it back when it is freed.

    A server frees every reply at once and keeps a few small facts of it; from one heap, those keep the heap from
    shrinking, and memory grows by about a model with every client. Every model's update is larger than 64 KiB.
    """
    _tell_malloc({_MMAP: 1 << 16})


def _tell_malloc(options: Mapping[int, int]) -> None:
    """Set options of glibc's malloc; elsewhere than on glibc this does nothing."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for number, value in options.items():
            mallopt(number, value)
