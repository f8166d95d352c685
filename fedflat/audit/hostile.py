"""Make finite data that a client may bring to break a bound, in the shape and classes of a recipe's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData

Pair = tuple[Tensor, Tensor]
"""One client's inputs ``(n, …)`` and targets ``(n,)`` or ``(n, T)``."""
ROWS = 4
"""Examples of a client, at most: rounding is found with few of them, and many worlds are run."""
LARGEST = 3e38
"""Nearly the largest float32."""
PIXELS = 255


@dataclass(frozen=True)
class Case:
    """What the client whose data is present in one world only has, and what the others have: names of ``kinds``.

    start: the released state before the round; ``w0``, ``even`` (the last linear layer is zero, so that every class is
    as likely, and there is one local step on everything, so that gradients cancel) or ``later`` (after a round of
    ordinary data: memory, momentum).
    noise: whether both worlds add the same noise. last: whether the client is the last of the cohort, not the first.
    """

    client: str
    others: str = "ordinary"
    start: str = "w0"
    noise: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        """The case's name in a table of movements."""
        said = self.client if self.others == "ordinary" else f"{self.client} | {self.others}"
        said += {"w0": "", "even": ", even", "later": ", round 2"}[self.start]
        return said + (", last" if self.last else "") + (", same noise" if self.noise else "")


def cases_for(data: FederatedData) -> tuple[Case, ...]:
    """Return the cases of ``cases.yaml`` that mean something for a federation's examples."""
    text = Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8")
    kind = "numbers" if data.inputs.is_floating_point() else "tokens"
    return tuple(Case(**each) for each in yaml.safe_load(text)[kind])


@dataclass(frozen=True)
class Maker:
    """Makes clients' data for the examples ``template`` has: their shape, kind, classes and vocabulary."""

    template: FederatedData

    def make(self, kind: str, client: int) -> Pair:
        """Return the data of ``kind`` for a client; clients other than 0 have fewer examples, one of them a single
        one."""
        x, y = self.ordinary(client)
        if kind == "ordinary":
            return x, y
        # A client without data is the world in which it is absent.
        if kind == "empty":
            return x[:0], y[:0]
        made = _KINDS[kind](self, x, y, client)
        return made[0].to(x.dtype), made[1]

    def ordinary(self, client: int) -> Pair:
        """Return the examples of the recipe's own training data, different ones for each client."""
        held = np.concatenate(self.template.parts)
        count = max(1, ROWS - client % ROWS)
        rows = torch.from_numpy(held[np.arange(client * ROWS, client * ROWS + count) % len(held)])
        return self.template.inputs[rows], self.template.targets[rows]

    def public(self) -> Pair:
        """Return a few test examples, the last of the last class: it says how many classes there are."""
        x, y = self.ordinary(0)
        x, y = (torch.cat([t, t, t])[:8] for t in (x, y))
        y[-1] = self.template.classes - 1
        return x, y

    def direction(self, client: int) -> Tensor:
        """Return a standard normal example ``(…)``, always the same one for a client."""
        draw = stream(0, "audit: hostile example", client).standard_normal(self.template.input_shape)
        return torch.from_numpy(draw).float()

    def label(self, number: int, like: Tensor) -> Tensor:
        """Return the targets of the form of ``like`` ``(n, …)``, all of class ``number`` (counted round)."""
        return torch.full_like(like, number % self.template.classes)

    def with_all_labels(self, example: Tensor, y: Tensor) -> Pair:
        """Return one example once for each class (at most 64 of them)."""
        count = min(self.template.classes, 64)
        targets = torch.arange(count).reshape(-1, *(1 for _ in y.shape[1:])).expand(count, *y.shape[1:])
        return example.expand(count, *example.shape).clone(), targets.clone()

    def opposite(self, first: Tensor, second: Tensor, y: Tensor) -> Pair:
        """Return two examples of the first and the last class."""
        return torch.stack([first, second]), torch.cat([self.label(0, y[:1]), self.label(-1, y[:1])])


Kind = Callable[[Maker, Tensor, Tensor, int], Pair]


def _cancelling(scale: float) -> Kind:
    """Nearly equal inputs, one of each class: where classes are about as likely, large rows of the gradient cancel."""

    def make(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
        u, (same, labels) = maker.direction(client), maker.with_all_labels(maker.direction(client) * scale, y)
        return same + scale * 1e-6 * torch.arange(len(same)).reshape(-1, *(1 for _ in u.shape)) * u.flip(0), labels

    return make


def _opposite(scale: float) -> Kind:
    """Return two nearly equal inputs, of the first and the last class."""

    def make(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
        u = maker.direction(client) * scale
        return maker.opposite(u, u * (1 + 1e-6), y)

    return make


def _huge(scale: float) -> Kind:
    def make(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
        u = maker.direction(client)
        return (u / u.abs().max().clamp_min(1e-30) * scale).expand(len(x), *u.shape).clone(), y

    return make


def _pixels(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
    """Return two raw images, whole numbers to 255, that differ in one pixel by 1, of opposite classes."""
    draw = stream(0, "audit: pixels", client).integers(0, PIXELS, maker.template.input_shape)
    image = torch.from_numpy(draw).float()
    other = image.clone()
    other.view(-1)[0] += 1
    return maker.opposite(image, other, y)


def _no_gradient(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
    """Return one huge input with every label: from a head of zeros its rows cancel, and the message is zero (or
    rounding).
    """
    if not x.is_floating_point():
        return maker.with_all_labels(x[0], y)
    # With powers of two all products are exact.
    return maker.with_all_labels(maker.direction(client).sign() * 2.0**46, y)


def _token(number: int) -> Kind:
    """Return the texts of one token; -1 for padding."""

    def make(maker: Maker, x: Tensor, y: Tensor, client: int) -> Pair:
        token = maker.template.padding if number < 0 else min(number, max(maker.template.vocabulary - 1, 0))
        return torch.full_like(x, token), y

    return make


_KINDS: Mapping[str, Kind] = {
    **{f"cancelling {scale}": _cancelling(float(scale)) for scale in ("1e6", "1e14")}, "opposite 1e6": _opposite(1e6),
    **{f"huge {scale}": _huge(float(scale)) for scale in ("1e6", "1e14", "3e38")},
    "tiny 1e-30": lambda maker, x, y, client: (maker.direction(client).expand(x.shape) * 1e-30, y),
    "duplicated": lambda maker, x, y, client: (x[:1].expand(x.shape).clone(), y[:1].expand(y.shape).clone()),
    "one class": lambda maker, x, y, client: (x, maker.label(0, y)),
    "constant": lambda maker, x, y, client: (torch.ones_like(x), maker.label(0, y)), "pixels": _pixels,
    "no gradient": _no_gradient, "one text, all labels": lambda maker, x, y, client: maker.with_all_labels(x[0], y),
    "one token": _token(5), "padding": _token(-1),
}  # fmt: skip


def federation(template: FederatedData, pairs: Sequence[Pair], test: Pair) -> FederatedData:
    """Return the template's federation with other clients: one pair each."""
    inputs, targets = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    ends = np.cumsum([0, *(len(x) for x, _ in pairs)], dtype=np.int64)
    parts = tuple(np.arange(a, b, dtype=np.int64) for a, b in pairwise(ends))
    empty = tuple(np.empty(0, dtype=np.int64) for _ in parts)
    return replace(
        template, inputs=inputs, targets=targets, parts=parts, held_back=empty, test_inputs=test[0],
        test_targets=test[1], name="worlds",
    )  # fmt: skip
