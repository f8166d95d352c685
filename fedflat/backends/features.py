"""Compute a frozen body's output for every example once, so that head-only training never runs the body again."""

import hashlib
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.core import StateWatch, cache_folder, digest_of, global_generators, keep, own_code, read_tensors, wrong
from fedflat.core.identity import identity_of
from fedflat.core.process import GIB, free_memory, report_progress, using_threads
from fedflat.data.clients import GIVEN, FederatedData
from fedflat.engine.device import exact
from fedflat.engine.problem import refuse_change
from fedflat.records.opening import machine

BATCH = 64
"""Examples per pass of a module that names no ``batch``, fixed: the number of threads changes no feature's bits."""
WORTH_KEEPING = 10.0
"""Seconds of computing from which features are kept on disk. A client of a deployment, with its few examples, is far
below: no copy of its data comes to lie where nobody looks for it."""


def with_features(data: FederatedData, module: nn.Module, precision: str = "fp32") -> FederatedData:
    """Return the federation with each input replaced by its features ``(n,)``, if ``module`` has a frozen body.

    Only then: with a body that is trained, or draws dropout, features change from step to step. The numbers of a run
    are those of a run without, up to rounding. Each example's features depend on that example alone, so a client in a
    deployment computes its own. precision: ``bf16`` as in the run's arithmetic. The last federation's are remembered.
    """
    if (data.inputs.dim() == 2 and data.inputs.is_floating_point()) or getattr(module, "frozen", False) is not True:
        return data
    device = _device(module, data.inputs)
    # What another machine or version made has other last bits, of which this run's noise key knows nothing.
    name = _name(data, module, f"{precision} {device} {machine(device)}")
    if name is not None and name not in _LAST:
        _LAST.clear()
        # From the disk it is mapped into memory, so that what is not being read need not be there.
        there = read_tensors(cache_folder() / f"features-{name}.safetensors")
        _LAST[name] = there or _of_all(data, module, precision, name)
    features = _of_all(data, module, precision, None) if name is None else _LAST[name]
    return replace(data, inputs=features["inputs"], test_inputs=features.get("test"))


def _of_all(data: FederatedData, module: nn.Module, precision: str, name: str | None) -> dict[str, Tensor]:
    """Return the features of all clients' examples, ``inputs``, and of the test set if there is one, ``test``; kept on
    disk where they took long and have a name.
    """
    began = time.monotonic()
    features = {} if data.test_inputs is None else {"test": computed(module, data.test_inputs, precision)}
    owned = [np.concatenate([rows, held]) for rows, held in zip_longest(data.parts, data.held_back, fillvalue=_NONE)]
    owned = list({rows.tobytes(): rows for rows in owned}.values())  # a plan's made-up clients all have the same rows
    before = global_generators()
    features["inputs"] = computed(module, data.inputs, precision, owned)
    if global_generators() != before:  # how often the others' are drawn would follow from each client's size
        raise wrong("model", "features that draw random numbers", "a frozen body that draws none, or frozen = False")
    if name is not None and time.monotonic() - began >= WORTH_KEEPING and data.name != GIVEN:
        keep("features", name, features)
    return features


_NONE = np.zeros(0, dtype=np.int64)
_LAST: dict[str, dict[str, Tensor]] = {}


def computed(
    module: nn.Module, inputs: Tensor, precision: str = "fp32", owned: Sequence[np.ndarray] | None = None
) -> Tensor:
    """Return the features ``(N, n)`` of ``inputs`` ``(N, …)``, float32; texts of one length together, without their
    padding.

    owned: each client's rows. Examples of different clients never share a batch: its shape, and so its rounding, would
    tell one client of another's. None: all are one owner's. Features of rows that nobody owns are zero.
    """
    body: Any = module
    device = _device(module, inputs)
    if len(inputs) == 0:
        empty: Tensor = body.features(inputs.new_zeros(1, *inputs.shape[1:]).to(device))[:0].detach().to(inputs.device)
        return empty
    lengths = _lengths(module, inputs)
    groups = [torch.arange(len(inputs))] if owned is None else [torch.from_numpy(rows).long() for rows in owned]
    together, fast = int(getattr(module, "batch", BATCH)), precision == "bf16"
    ordered = [group[torch.argsort(lengths[group], stable=True)] for group in groups if len(group)]
    rows = [piece for group in ordered for piece in group.split(together)]

    def one(chosen: Tensor) -> Tensor:
        batch = inputs[chosen]
        if inputs.dim() == 2:
            # Texts of one length share a batch, so padding is not computed on.
            batch = batch[:, : max(1, int(lengths[chosen].max()))]
        with torch.no_grad(), exact(device), torch.autocast(device.type, torch.bfloat16) if fast else nullcontext():
            features: Tensor = body.features(batch.to(device)).float().to(inputs.device)
        if watched is not None:  # what it left behind would reach the next owner
            refuse_change(watched, everything=True)
        return features

    watched = StateWatch(module) if own_code(module) else None
    threads = torch.get_num_threads() if device.type == "cpu" and watched is None else 1

    with using_threads(1), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        first = [one(piece) for piece in rows[:1]]  # before the others: memory may have no room for what they make
        result = _room(len(inputs), first[0].shape[1], inputs.device) if first else torch.zeros(0)
        for step, features in enumerate(itertools.chain(first, pool.map(one, rows[1:]))):
            result[rows[step]] = features
            try:
                report_progress("making features, batch", step + 1, len(rows))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return result


def _room(examples: int, width: int, device: torch.device) -> Tensor:
    """Return zeros ``(examples, width)``; raises InputError where memory has no room for them."""
    size, left = examples * width * 4, free_memory()
    if left is not None and device.type == "cpu" and size > left:
        found = f"{examples:,} examples of {width:,} numbers, {size / GIB:,.1f} GiB"
        allowed = f"no more than the {left / GIB:.1f} GiB of memory that are available"
        hint = "A smaller data.vocabulary or model makes fewer numbers, data.max_examples takes fewer examples."
        raise wrong("features of a frozen body", found, allowed, hint=hint)
    return torch.zeros(examples, width, dtype=torch.float32, device=device)


def _device(module: nn.Module, inputs: Tensor) -> torch.device:
    return next((p.device for p in module.parameters()), inputs.device)


def _lengths(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the ids up to the last that is not padding ``(N,)``; 0 for anything but ids."""
    padding = getattr(module, "padding", None)
    if inputs.dim() != 2 or padding is None:
        return torch.full((len(inputs),), inputs.shape[1] if inputs.dim() == 2 else 0)
    return torch.where(inputs != padding, torch.arange(1, inputs.shape[1] + 1), 0).amax(1)


LIBRARIES = ("torch.", "transformers.", "timm.", "efficientnet_lite_pytorch.")
"""Their layers tell whole numbers in their text or config, or count calls by them."""
_TENSORS = ("_parameters", "_buffers", "_modules", "training")


def _name(data: FederatedData, module: nn.Module, precision: str) -> str | None:
    """Return a hash of everything that the features depend on; None where a user's code or values cannot be looked
    into.
    """
    total = hashlib.sha256(f"{type(module).__qualname__} {module!r} {precision}".encode())
    for layer in module.modules():
        home, settings = f"{type(layer).__module__}.", {k: v for k, v in vars(layer).items() if k not in _TENSORS}
        if home.startswith((*LIBRARIES, "fedflat.")):
            kinds = (float, str, bool, tuple) if home.startswith(LIBRARIES) else (float, str, bool, tuple, int)
            config = getattr(getattr(layer, "config", None), "to_json_string", str)()
            identity: str | None = f"{sorted((k, v) for k, v in settings.items() if isinstance(v, kinds))!r} {config}"
        else:
            identity = identity_of((type(layer), settings))
        if identity is None:
            return None
        total.update(identity.encode())
    fixed = {name: p for name, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())
    total.update(f"{digest_of(fixed)} {data.fingerprint()}".encode())  # of who shares a batch, too
    return total.hexdigest()
