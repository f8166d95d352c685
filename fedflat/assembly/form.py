"""The public form of a federation's data, and what one party of a deployment sees of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedflat.core import require, wrong
from fedflat.data.clients import FederatedData


@dataclass(frozen=True)
class DataSpec:
    """The public form of the data: shape and type of one example, number of classes and clients."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    clients: int
    vocabulary: int = 0
    padding: int = 0

    @classmethod
    def of(cls, data: FederatedData) -> DataSpec:
        """Return the form of a federation's data."""
        kind = str(data.inputs.dtype).removeprefix("torch.")
        return cls(data.name, data.input_shape, kind, data.classes, data.clients, data.vocabulary, data.padding)

    def federation(
        self, client: int = 0, examples: tuple[Tensor, Tensor] | None = None,
        test: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> FederatedData:  # fmt: skip
        """Return what one party sees of the federation: a client's own examples, the public test set if it has one."""
        nobody = torch.zeros(0, *self.input_shape, dtype=getattr(torch, self.input_dtype))
        inputs, targets = examples or (nobody, torch.zeros(0, dtype=torch.int64))
        nothing = (np.empty(0, dtype=np.int64),) * self.clients
        parts = list(nothing)
        parts[client] = np.arange(len(inputs), dtype=np.int64)
        return FederatedData(
            inputs, targets, tuple(parts), nothing, *test, self.classes, self.name, self.vocabulary, self.padding,
            stated=True,
        )  # fmt: skip

    def check(self, where: str, inputs: Tensor, targets: Tensor) -> None:
        """Raise InputError unless a party's examples have this form."""
        shape, wanted = tuple(inputs.shape[1:]), tuple(self.input_shape)
        require(shape == wanted, f"{where}: inputs", f"shape {shape} per example", str(wanted))
        kind = str(inputs.dtype).removeprefix("torch.")
        require(kind == self.input_dtype, f"{where}: inputs", kind, self.input_dtype)
        if targets.dtype != torch.int64 or len(targets) != len(inputs):
            raise wrong(f"{where}: targets", f"{len(targets)} of {targets.dtype}", f"{len(inputs)} of torch.int64")
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            span = f"{int(targets.min())} to {int(targets.max())}"
            raise wrong(f"{where}: targets", span, f"0 to {self.classes - 1}")
