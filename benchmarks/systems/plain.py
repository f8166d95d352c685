"""Plain PyTorch: a loop over clients (``loop``), and the central limit (``limit``): one model, the same examples.

Usage: python -m benchmarks.systems.plain WORKLOAD FOLDER loop|limit fp32|bf16
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.protocol import Gate, Threads, keep_freed_memory
from benchmarks.workloads import BY_NAME, Workload, network, read_data


def train(model: nn.Module, workload: Workload, batches: Iterator[tuple[Tensor, Tensor]], amp: Any) -> None:
    """Plain SGD, or SAM with two passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with amp():
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()

    for x, y in batches:
        backward(x, y)
        if workload.rho:
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            scale = workload.rho / torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p.add_(g, alpha=float(scale))
            backward(x, y)
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p.sub_(g, alpha=float(scale))
        optimizer.step()


def client_batches(
    workload: Workload, rows: Tensor, inputs: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reshuffled minibatches of one client."""
    for _ in range(workload.epochs):
        order = rows[torch.randperm(len(rows))]
        for piece in order.split(workload.batch):
            yield inputs[piece], targets[piece]


def loop_round(model: nn.Module, workload: Workload, round: int, data: tuple[Tensor, Tensor], amp: Any) -> None:
    """Deep copy, train, difference, clip, sum; then noise and the mean."""
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    total = torch.zeros_like(start)
    for client in workload.cohort_of(round):
        local = copy.deepcopy(model)
        train(local, workload, client_batches(workload, torch.from_numpy(workload.part(int(client))), *data), amp)
        update = torch.nn.utils.parameters_to_vector(local.parameters()).detach() - start
        total += update * min(1.0, workload.clip / float(update.norm()))
    total += torch.randn_like(total) * workload.noise * workload.clip
    torch.nn.utils.vector_to_parameters(start + total / workload.cohort, model.parameters())


def limit_round(model: nn.Module, workload: Workload, round: int, data: tuple[Tensor, Tensor], amp: Any) -> None:
    """One model on the cohort's examples: nothing of federated learning or privacy."""
    parts = [torch.from_numpy(workload.part(int(c))) for c in workload.cohort_of(round)]
    if workload.together:
        rows = torch.stack(parts)
        pieces = [rows[:, i : i + workload.batch].reshape(-1) for i in range(0, rows.shape[1], workload.batch)]
        batches = ((data[0].index_select(0, p), data[1][p]) for _ in range(workload.epochs) for p in pieces)
    else:
        batches = itertools.chain.from_iterable(client_batches(workload, p, *data) for p in parts)
    train(model, workload, batches, amp)


def main(name: str, folder: str, kind: str, precision: str) -> None:
    gate, workload, threads = Gate(), BY_NAME[name], Threads()
    if kind == "limit":
        keep_freed_memory()
    inputs, targets = read_data(folder)
    model = network(workload)
    if inputs.dim() == 4 and kind == "limit":
        inputs, model = (
            inputs.contiguous(memory_format=torch.channels_last),
            model.to(memory_format=torch.channels_last),
        )
    low = precision == "bf16"
    amp = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if low else contextlib.nullcontext
    one = loop_round if kind == "loop" else limit_round
    for round in itertools.count():
        if not threads.before(round):
            gate.wait()
        one(model, workload, round, (inputs, targets), amp)
        if not threads.after(round):
            gate.done(threads=torch.get_num_threads())


if __name__ == "__main__":
    main(*sys.argv[1:])
