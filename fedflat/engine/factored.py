"""Compute with blocks of weight vectors that are never written out: v_i = Σ_k a_ik·B_k + Σ_s c_is·g_is.

B_k are dense vectors ``(D,)`` common to the block (w^t, a broadcast direction); g_is is client i's gradient at its s-th
evaluation, which for a linear layer is δᵀx of a few rows. Norms and inner products follow from Gram matrices of those
rows, so a client costs O(rows·(inputs + outputs)) instead of O(inputs·outputs). ``measured`` clips and adds them.

``Factored`` has the arithmetic that local training, gradient rules and linear transforms use on ``(n, D)`` tensors.
What it cannot do it declines (``Declined``): a transform then gets the vectors written out, and for a gradient rule
the block is trained again on vectors written out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedflat.core import Part
from fedflat.engine.mlp import Linear, StackProblem, forward, head, through
from fedflat.engine.problem import Batch, Gradient

Coefficient = float | Tensor
"""A number for the whole block, or one per client ``(n, 1)``."""
CANCELLED = 0.05
"""Below this share of the squared sum of the parts' norms, float32 Gram matrices no longer carry a norm: it is taken
from the vector written out instead."""
LARGEST = 1e30
"""Entry of a Gram matrix from which a norm counts as infinite: products and sums of such leave float32 (3e38)."""


class Declined(Exception):
    """Something that vectors as factors cannot do; it is done again on vectors written out."""


@dataclass
class Trace:
    """All evaluations of a block: each layer's inputs (``acts``, shared by evaluations on the same minibatch) and the
    gradients δ at its outputs, with the Gram matrices that have been needed so far."""

    layers: tuple[Linear, ...]
    clients: int
    size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    acts: list[list[Tensor]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    deltas: list[list[Tensor]] = field(default_factory=list)
    _mixed: dict[tuple[int, tuple[Any, ...]], dict[int, Tensor]] = field(default_factory=dict)
    _grams: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    _squares: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, layer: int, act: Tensor) -> int:
        """Return the number of a layer's input; a tensor that came before keeps its number."""
        while len(self.acts) <= layer:
            self.acts.append([])
        for index, earlier in enumerate(self.acts[layer]):
            if earlier is act:
                return index
        self.acts[layer].append(act)
        return len(self.acts[layer]) - 1

    def record(self, slots: list[int], deltas: list[Tensor]) -> int:
        """Keep one evaluation's gradient; its number s."""
        self.slots.append(slots)
        self.deltas.append(deltas)
        return len(self.slots) - 1

    def gram(self, layer: int, p: int, q: int) -> Tensor:
        """Return the inner products ``(n, b_p, b_q)`` of two inputs' rows."""
        # A product of two inputs is computed once: the other order is its transpose.
        if q > p:
            return self.gram(layer, q, p).transpose(1, 2)
        key = (layer, p, q)
        if key not in self._grams:
            self._grams[key] = torch.bmm(self.acts[layer][p], self.acts[layer][q].transpose(1, 2))
        return self._grams[key]

    def mixed(self, layer: int, steps: Mapping[int, Coefficient]) -> dict[int, Tensor]:
        """Slot -> Σ c_s·δ_s ``(n, b, outputs)`` over the evaluations on that slot; to be read only."""
        # Only mixtures with plain numbers are kept: those with a coefficient per client differ at every step.
        numbers = tuple(item for item in steps.items() if isinstance(item[1], float))
        cached = self._mixed.get((layer, numbers)) if len(numbers) == len(steps) else None
        if cached is not None:
            return cached
        mixture: dict[int, Tensor] = {}
        for s, c in steps.items():
            slot, scaled = self.slots[s][layer], self.deltas[s][layer]
            if isinstance(c, Tensor) or c != 1.0:
                scaled = scaled * (c[:, :, None] if isinstance(c, Tensor) else c)
            mixture[slot] = mixture[slot] + scaled if slot in mixture else scaled
        if len(numbers) == len(steps):
            # One mixture a layer is kept, the last: weights move on, and never come back to an old one.
            self._mixed = {key: value for key, value in self._mixed.items() if key[0] != layer}
            self._mixed[layer, numbers] = mixture
        return mixture

    def square(self, s: int) -> Tensor:
        """Return the squared norm ``(n,)`` of one recorded gradient for each client, in float64."""
        if s not in self._squares:
            self._squares[s] = self.squares({s: 1.0})
        return self._squares[s]

    def squares(self, steps: Mapping[int, Coefficient]) -> Tensor:
        """‖Σ c_s·g_s‖² ``(n,)`` in float64; infinite where a Gram matrix leaves float32's safe range."""
        total = torch.zeros(self.clients, dtype=torch.float64, device=self.device)
        for index, layer in enumerate(self.layers):
            mixed = list(self.mixed(index, steps).items())
            for i, (p, u) in enumerate(mixed):
                for q, v in mixed[: i + 1]:
                    rows, products = self.gram(index, p, q), torch.bmm(u, v.transpose(1, 2))
                    if layer.bias is not None:
                        # The bias is one more input that is always 1, so it adds 1 to every product of inputs.
                        rows = rows + 1
                    term = (rows * products).sum((1, 2), dtype=torch.float64)
                    if p == q:
                        # A norm that overflowed would clip nothing; what comes near float32's end counts as infinite.
                        peak = torch.maximum(rows.abs().amax((1, 2)), products.abs().amax((1, 2)))
                        term = torch.where(peak < LARGEST, term, torch.inf)
                    total += term if p == q else 2 * term
        return total


class Factored:
    """n vectors ``(n, D)`` in terms of a trace (see the module's text)."""

    dtype = torch.float32

    def __init__(self, trace: Trace, bases: list[tuple[Tensor, Coefficient]], steps: dict[int, Coefficient]) -> None:
        self.trace, self.bases, self.steps = trace, bases, steps

    @property
    def shape(self) -> torch.Size:
        """``(n, D)``: clients, and weights of each."""
        return torch.Size((self.trace.clients, self.trace.size))

    def data_ptr(self) -> int:
        """Return an identity, as a tensor's address is one."""
        return id(self)

    def dim(self) -> int:
        """2: it stands for a matrix ``(n, D)``, as a tensor would say."""
        return 2

    def is_floating_point(self) -> bool:
        """True: it stands for floating-point weights or gradients."""
        return True

    @property
    def device(self) -> torch.device:
        """The device that its factors are on."""
        return self.trace.device

    def to(self, device: torch.device) -> Any:
        """Return the vectors written out, or itself where it is there already."""
        return self if self.trace.device == device else self.dense().to(device)

    def new_zeros(self, shape: Any) -> Tensor:
        """Return a dense tensor of zeros of the given shape, on the same device."""
        return torch.zeros(shape, device=self.trace.device)

    def detach(self) -> "Factored":
        """Itself: there is no graph."""
        return self

    def clone(self) -> "Factored":
        """A copy that in-place operations on this one do not change."""
        return Factored(self.trace, list(self.bases), dict(self.steps))

    def __getitem__(self, item: Any) -> Any:
        last = item[-1] if isinstance(item, tuple) else None
        if isinstance(last, slice) and item[:-1] == (Ellipsis,):
            start, stop, step = last.indices(self.trace.size)
            if (start, stop, step) == (0, self.trace.size, 1):
                return self
            if stop <= start:
                return torch.zeros(self.trace.clients, 0, device=self.trace.device)
        raise Declined("some rows or columns")

    def _set(self, other: "Factored") -> "Factored":
        self.bases, self.steps = other.bases, other.steps
        return self

    def _mapped(self, change: Callable[[Coefficient], Coefficient]) -> "Factored":
        """Return the vectors with each coefficient changed."""
        bases = [(b, change(c)) for b, c in self.bases]
        return Factored(self.trace, bases, {s: change(c) for s, c in self.steps.items()})

    def mul(self, factor: Any) -> "Factored":
        """Multiply by a number, or ``(n, 1)``."""
        if isinstance(factor, Factored) or (
            isinstance(factor, Tensor) and factor.shape not in ((), (self.shape[0], 1))
        ):
            raise Declined("a product with other vectors")
        if isinstance(factor, Tensor):
            factor = factor.to(torch.float32) if factor.dim() else float(factor)
        return self._mapped(lambda c: c * factor)

    def add(self, other: Any, *, alpha: float = 1.0) -> "Factored":
        """Plus ``alpha`` times other factored vectors of the same block, or a vector ``(D,)``."""
        if isinstance(other, Tensor) and other.shape == (self.trace.size,):
            other = Factored(self.trace, [(other, 1.0)], {})
        if not isinstance(other, Factored):
            raise Declined("a sum that leaves the span of the gradients")
        bases, steps = list(self.bases), dict(self.steps)
        for base, c in other.bases:
            place = next((i for i, (held, _) in enumerate(bases) if _same(held, base)), None)
            if place is None:
                bases.append((base, alpha * c))
            else:
                bases[place] = (base, bases[place][1] + alpha * c)
        for s, c in other.steps.items():
            steps[s] = steps[s] + alpha * c if s in steps else alpha * c
        # Bases that cancelled are dropped, or every step would add products with zero.
        return Factored(self.trace, [(b, c) for b, c in bases if isinstance(c, Tensor) or c != 0.0], steps)

    def sub(self, other: Any, *, alpha: float = 1.0) -> "Factored":
        """Return the difference, still in factors; see ``add``."""
        return self.add(other, alpha=-alpha)

    def mul_(self, factor: Any) -> "Factored":
        """``mul``, replacing its own factors."""
        return self._set(self.mul(factor))

    def add_(self, other: Any, *, alpha: float = 1.0) -> "Factored":
        """``add``, replacing its own factors."""
        return self._set(self.add(other, alpha=alpha))

    def sub_(self, other: Any, *, alpha: float = 1.0) -> "Factored":
        """``sub``, replacing its own factors."""
        return self.add_(other, alpha=-alpha)

    def contiguous(self) -> "Factored":
        """Itself: it has no strides."""
        return self

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __sub__ = sub

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Declined(f"{name} on vectors kept as factors")

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OWN:
            raise Declined(f"{getattr(func, '__name__', func)} on vectors kept as factors")
        return _OWN[func](*args, **(kwargs or {}))

    def common(self) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Return the part common to the whole block ``(D,)``, and bases with a coefficient per client."""
        numbers = [(b, float(c)) for b, c in self.bases if not isinstance(c, Tensor)]
        shared: Tensor | None = None
        for base, c in numbers:
            term = base if c == 1.0 else base * c
            shared = term if shared is None else shared + term
        return shared, [(b, c) for b, c in self.bases if isinstance(c, Tensor)]

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """Return the vectors written out ``(n, D)``, or some rows of them."""
        trace, pick = self.trace, slice(None) if rows is None else rows
        count = trace.clients if rows is None else len(rows)
        shared, others = self.common()
        out = torch.zeros(count, trace.size, device=trace.device) if shared is None else shared.repeat(count, 1)
        for base, c in others:
            out.addcmul_(c[pick], base[None])
        for index, layer in enumerate(trace.layers):
            matrix = layer.matrix(out)
            for slot, u in trace.mixed(index, self.steps).items():
                matrix.baddbmm_(u[pick].transpose(1, 2), trace.acts[index][slot][pick])
                if layer.bias is not None:
                    out[:, layer.bias] += u[pick].sum(1)
        return out

    def norms(self) -> Tensor:
        """L2 norms ``(n,)`` in float64 from float32 products, infinite where an entry is not finite.

        For a client's own gradient rules. The norm that clips is that of ``engine.measured``.
        """
        shared, others = self.common()
        if others:
            return _dense_norms(self.dense())
        if shared is None and len(self.steps) == 1:  # nothing that could cancel
            [(s, c)] = self.steps.items()
            return self._checked(self.trace.square(s) * (c[:, 0].double() if isinstance(c, Tensor) else c) ** 2)
        square = self.trace.squares(self.steps)
        parts = torch.zeros_like(square)
        for s, c in self.steps.items():
            parts += self.trace.square(s).sqrt() * (c[:, 0].abs().double() if isinstance(c, Tensor) else abs(c))
        if shared is not None:
            length = torch.linalg.vector_norm(shared, dtype=torch.float64)
            # ‖s + Σ‖² by its three products; large terms may cancel, which ``parts`` finds out.
            square = square + length**2 + 2 * self._along(shared)
            parts += length
        return self._checked(square, CANCELLED * parts**2)

    def _checked(self, square: Tensor, least: Tensor | float = 0.0) -> Tensor:
        """Return the norms from their squares; from the vectors written out where the square is not finite or below
        ``least``.
        """
        safe = torch.isfinite(square) & (square >= least)
        norms = square.clamp_min(0).sqrt()
        if not bool(safe.all()):
            for row in torch.nonzero(~safe):  # one by one: shapes do not follow from the other clients
                norms[row] = _dense_norms(self.dense(row))
        return norms

    def _along(self, vector: Tensor) -> Tensor:
        """Return the inner products ``(n,)`` of the gradients' combination with a common vector."""
        total = torch.zeros(self.trace.clients, dtype=torch.float64, device=self.trace.device)
        for index, layer in enumerate(self.trace.layers):
            for slot, u in self.trace.mixed(index, self.steps).items():
                projected = self.trace.acts[index][slot] @ layer.matrix(vector).T
                if layer.bias is not None:
                    projected = projected + vector[layer.bias]
                total += (projected * u).sum((1, 2), dtype=torch.float64)
        return total


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _dense_norms(vectors: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, torch.inf))


def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if ord != 2 or dim not in (-1, 1, [-1], [1]):
        raise Declined("another norm")
    norms: Tensor = x.norms().to(dtype or torch.float32)
    return norms[:, None] if keepdim else norms


def _sum(a: Any, b: Any, *, alpha: float = 1) -> Any:
    return a.add(b, alpha=alpha) if isinstance(a, Factored) else b.mul(alpha).add(a)


def _chosen(mask: Tensor, a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor) or mask.shape != (a.shape[0], 1):
        raise Declined("a choice among entries")
    # Not by products: where nothing is kept of a coefficient, it may be infinite.
    return a._mapped(lambda c: torch.where(mask, c, 0.0)).add(b._mapped(lambda c: torch.where(mask, 0.0, c)))


_ATEN = torch.ops.aten
_OWN: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.zeros_like: lambda x: Factored(x.trace, [], {}),
    torch.atleast_2d: lambda x: x,
    torch.clone: lambda x: x.clone(),
    # The operations that a user's own pieces are recorded as (``engine.isolated``).
    _ATEN.linalg_vector_norm.default: _vector_norm,
    _ATEN.zeros_like.default: lambda x, **_: Factored(x.trace, [], {}),
    _ATEN.clone.default: lambda x, **_: x.clone(),
    _ATEN.detach.default: Factored.detach,
    _ATEN.permute.default: lambda x, order: x if order == [0, 1] else x.permute(order),
    _ATEN.add.Tensor: _sum,
    _ATEN.sub.Tensor: lambda a, b, *, alpha=1: _sum(a, b, alpha=-alpha),
    _ATEN.mul.Tensor: lambda a, b: b.mul(a) if isinstance(b, Factored) else a.mul(b),
    _ATEN.div.Tensor: lambda a, b: a * torch.reciprocal(torch.tensor(float(b)) if isinstance(b, int | float) else b),
    _ATEN.neg.default: lambda x: x.mul(-1.0),
    _ATEN.lerp.Scalar: lambda a, b, weight: _sum(a, _sum(b, a, alpha=-1), alpha=weight),
    _ATEN.where.self: _chosen,
    **{getattr(_ATEN, f"{name}_").Tensor: getattr(Factored, f"{name}_") for name in ("add", "sub", "mul")},
}
"""What torch's own functions do where an argument is ``Factored``."""


@dataclass(frozen=True)
class LowRankProblem(StackProblem):
    """Gradients at factored weights, as factored vectors. In float32 whatever ``engine.precision`` says: the
    Gram matrices, which norms are taken from, must be, and bf16 in the rest gains little (docs/performance.md).
    """

    def start(self, shared: Tensor, clients: int) -> Factored:
        """w^t for every client of a block."""
        return Factored(Trace(self.layers, clients, self.layout.size, shared.device), [(shared, 1.0)], {})

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """As ``DenseProblem.gradient``, ``weights`` and the found vector being ``Factored``."""
        if not isinstance(weights, Factored) or self.layout.span(part) != self.layout.span("all"):
            raise Declined("weights outside the span of w^t and the gradients, or a personal part")
        at = cast(Factored, weights)
        trace, slots = at.trace, list[int]()
        layers = [_At(at, index) for index in range(len(self.layers))]

        def apply(index: int, x: Tensor) -> Tensor:
            slots.append(trace.slot(index, x))
            return layers[index].forward(slots[index], x)

        states = forward(self.layers, batch.flat, apply)
        loss, right, delta = head(states[-1], batch)
        deltas = [delta]
        for index in range(len(self.layers) - 1, 0, -1):
            delta = through(self.layers[index - 1].activation, layers[index].backward(delta), states[index])
            deltas.append(delta)
        return Gradient(cast(Tensor, Factored(trace, [], {trace.record(slots, deltas[::-1]): 1.0})), loss, right)


class _At:
    """One layer at factored weights."""

    def __init__(self, at: Factored, index: int) -> None:
        self.layer, self.index, self.trace = at.trace.layers[index], index, at.trace
        self.shared, self.others = at.common()
        self.mixed = at.trace.mixed(index, at.steps)

    def forward(self, slot: int, x: Tensor) -> Tensor:
        """x Wᵀ + b ``(n, b, outputs)``: one product for the whole block, and small ones for what clients learned."""
        layer = self.layer
        y = x.new_zeros(*x.shape[:2], layer.outputs) if self.shared is None else self._common(x, self.shared)
        for base, c in self.others:
            y.addcmul_(self._common(x, base), c[:, :, None])
        for other, u in self.mixed.items():
            y.baddbmm_(self.trace.gram(self.index, slot, other), u)
            if layer.bias is not None:
                y += u.sum(1, keepdim=True)
        return y

    def _common(self, x: Tensor, vector: Tensor) -> Tensor:
        matrix, layer = self.layer.matrix(vector).T, self.layer
        rows = x.flatten(0, 1)
        flat = rows @ matrix if layer.bias is None else torch.addmm(vector[layer.bias], rows, matrix)
        return flat.view(*x.shape[:2], layer.outputs)

    def backward(self, delta: Tensor) -> Tensor:
        """δ W ``(n, b, inputs)``."""
        layer = self.layer
        x = delta.new_zeros(*delta.shape[:2], layer.inputs) if self.shared is None else self._back(delta, self.shared)
        for base, c in self.others:
            x.addcmul_(self._back(delta, base), c[:, :, None])
        for slot, u in self.mixed.items():
            x.baddbmm_(torch.bmm(delta, u.transpose(1, 2)), self.trace.acts[self.index][slot])
        return x

    def _back(self, delta: Tensor, vector: Tensor) -> Tensor:
        return torch.mm(delta.flatten(0, 1), self.layer.matrix(vector)).view(*delta.shape[:2], self.layer.inputs)
