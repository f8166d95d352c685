"""A GPU that is not there: tensors of the processor that behave as a GPU's do, for tests of everything but the kernels.

- ``Elsewhere`` tensors say they lie on ``cuda:0`` and refuse to be mixed with tensors of the processor.
- ``PretendedStream`` records a step's operations with the memory they used, and replays them on it, as a CUDA graph
  does: what Python does between operations happens once, at recording. While it records, anything that a CUDA capture
  refuses is refused: reading a value, copying to or from the processor, indexing with the processor's tensors. Replays
  happen as late as a stream may run them: when the main stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

GPU = torch.device("cuda", 0)
MIXED = ("aten.copy_.default", "aten._to_copy.default", "aten.index.Tensor", "aten.index_put_.default")
"""Operations of a GPU that take the processor's tensors too."""
HOST = (
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.repeat_interleave.Tensor",
)
"""Operations that wait for the device."""

_recording: list[Recorded] | None = None


def leaves(x: Any) -> list[Any]:
    """What lies in an operation's arguments: PyTorch's own trees know more containers, and took most of the time."""
    if isinstance(x, list | tuple):
        return [leaf for part in x for leaf in leaves(part)]
    return [leaf for part in x.values() for leaf in leaves(part)] if isinstance(x, dict) else [x]


def mapped(f: Callable[[Any], Any], x: Any) -> Any:
    """The same containers with every leaf changed."""
    if isinstance(x, list | tuple):
        return type(x)([mapped(f, part) for part in x])
    return {key: mapped(f, part) for key, part in x.items()} if isinstance(x, dict) else f(x)


class Recorded:
    """One operation and the memory it worked on."""

    def __init__(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        self.func, self.args, self.kwargs = func, mapped(_alias, args), mapped(_alias, kwargs)
        self.outs = [_alias(x) for x in leaves(found) if isinstance(x, Tensor)]
        aliases = [r.alias_info for r in func._schema.returns]
        self.view = any(a is not None and not a.is_write for a in aliases)
        self.in_place = any(a is not None and a.is_write for a in aliases)

    def replay(self) -> None:
        """Do it again, on the same memory."""
        if self.view:
            return
        found = self.func(*self.args, **self.kwargs)
        if not self.in_place:
            for old, new in zip(self.outs, [x for x in leaves(found) if isinstance(x, Tensor)], strict=True):
                old.copy_(new)


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


class Elsewhere(torch.Tensor):
    """A tensor of the processor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func)
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        foreign = [x for x in given if not isinstance(x, Elsewhere) and x.dim() > 0]
        if foreign and (name not in MIXED or _recording is not None):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({name})")
        booleans = name == "aten.index.Tensor" and any(x.dtype == torch.bool for x in given[1:])
        if _recording is not None and (name in HOST or booleans):
            raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
        with no_dispatch():
            found = func(*args, **kwargs)
            stays = name == "aten.copy_.default" and not isinstance(args[0], Elsewhere)
            if _recording is not None:
                if stays:
                    raise RuntimeError("operation not permitted when stream is capturing (a copy to the processor)")
                _recording.append(Recorded(func, args, kwargs, found))
            return found if stays else mapped(elsewhere, found)


def elsewhere(x: Any) -> Any:
    """A tensor as one on the GPU; anything else as it is."""
    if not isinstance(x, Tensor) or isinstance(x, Elsewhere):
        return x
    with no_dispatch():
        return torch.Tensor._make_subclass(Elsewhere, x.detach())


def here(x: Tensor) -> Tensor:
    """A copy on the processor."""
    if _recording is not None:
        raise RuntimeError("operation not permitted when stream is capturing (a copy to the processor)")
    with no_dispatch():
        return torch.empty_like(x.detach(), device="cpu").copy_(x.detach()).as_subclass(Tensor)


def _asks_for_gpu(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


class PretendedGpu(TorchFunctionMode):
    """Inside, ``cuda`` is a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for kind in types:
            if not issubclass(kind, Tensor):  # its own rules, with this mode still on
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if func is Tensor.cpu:
            return here(args[0]) if isinstance(args[0], Elsewhere) else args[0]
        if func is Tensor.to:
            return self._to(args[0], list(args[1:]), kwargs)
        if func is Tensor.numpy and isinstance(args[0], Elsewhere):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if _asks_for_gpu(kwargs.get("device")):
            return self._made(func, args, {**kwargs, "device": "cpu"})
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = elsewhere(func(*args, **kwargs))
        if _recording is not None:
            if func in (torch.tensor, torch.as_tensor):
                raise RuntimeError("operation not permitted when stream is capturing (numbers from the processor)")
            with no_dispatch():
                kept = found.detach().clone()
                _recording.append(Recorded(torch.ops.aten.copy_.default, (found, kept), {}, found))
        return found

    def _to(self, x: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Tensor:
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for value in rest:
            if isinstance(value, torch.device | str):
                device = value
            elif isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
        dtype = dtype or x.dtype
        kwargs.pop("non_blocking", None)
        if device is None or _asks_for_gpu(device) == isinstance(x, Elsewhere):
            return x.to(dtype, **kwargs)
        if isinstance(x, Elsewhere):
            return here(x).to(dtype, **kwargs)
        if _recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing (a copy from the processor)")
        moved: Tensor = elsewhere(x.detach().clone()).to(dtype, **kwargs)
        return moved


class PretendedStream:
    """A stream that runs as late as it may."""

    def __init__(self, device: torch.device) -> None:
        self.waiting: list[Callable[[], object]] = []

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run once, then record."""
        global _recording
        self._catch_up()
        step()
        _recording = []
        try:
            found, operations = step(), _recording
        finally:
            _recording = None

        def replay() -> None:
            with no_dispatch():
                for operation in operations:
                    operation.replay()

        return replay, found

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """A copy, later."""
        assert isinstance(buffer, Elsewhere) and not isinstance(value, Elsewhere)
        kept = value.clone()
        self.waiting.append(lambda: buffer.copy_(kept))

    def start(self, replay: Callable[[], None]) -> None:
        """A replay, later, with the generator as it is now: a graph's replay takes seed and offset when it is asked."""
        state = torch.get_rng_state()

        def run() -> None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                replay()

        self.waiting.append(run)

    def finish(self) -> None:
        """Now."""
        self._catch_up()

    def examine(self, step: Callable[[], object]) -> bool:
        """The processor's generator stands for the GPU's, a recording that is thrown away for the watch."""
        global _recording
        self._catch_up()
        before = torch.get_rng_state()
        step()
        _recording = []
        try:
            step()
        finally:
            _recording = None
        return not torch.equal(before, torch.get_rng_state())

    def forget(self) -> None:
        """Nothing to do."""

    def _catch_up(self) -> None:
        for work in self.waiting:
            work()
        self.waiting.clear()


@contextmanager
def pretended_gpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, PyTorch says it has a GPU, and training on it is pretended."""
    from fedflat.backends.cuda import graphs

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: "pretended")
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(graphs, "CudaStream", PretendedStream)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with PretendedGpu():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
