"""Clip and add vectors kept as factors, in float64; ``core/rounding.py`` says why they may be added so.

A client's update is U = Σ_r δ_r x_rᵀ + Σ_k a_k·B_k in float32 factors, whose products are exact in float64 and leave
no range. Its norm may be tiny while b = Σ_r ‖δ_r‖‖x_r‖ + Σ_k |a_k|‖B_k‖ is huge, and every computed product of it is
off by up to γ·b. So

- the norm that clips is N = √(max(G, 0) + γ·b²) ≥ ‖U‖, G from Gram matrices, γ counting all their terms;
- a client stays in factors only while its products, times its factor c, are off by at most ``SHARE``·C, and N by at
  most s·C for accuracy's sake. Any other client is written out: that float64 vector is measured, clipped, and added.

Clients are taken by a constant number at a time and rows that are not there are zero: neither a shape nor a constant
that decides about one client follows from who the others are.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedflat.core import ROUNDING, SHARE, gamma, rounding
from fedflat.engine.factored import Factored
from fedflat.engine.mlp import Linear

Scale = Callable[[Tensor], Tensor]
"""Norms ``(n,)`` -> the clip's factors ``(n,)``, 0 where a norm is not finite."""
ALIGNED = 8
"""Columns of a room are a multiple of it: eight doubles fill a vector register and a line of the cache."""
SPARE = 8
"""Roundings added to each count: more than the scalings, sums and roots that are not counted one by one."""
TOGETHER, TOGETHER_ON_GPU = 32, 256
"""Clients in one product at most, on a processor and on a GPU."""
ROOM = 1 << 21
"""Entries of their inputs in float64 (16 MB)."""
TERMS = 1 << 14
"""At least so many terms are counted for a coordinate of the sum's product."""
PRODUCTS = 1 << 20
"""At least so many terms are counted for a squared norm: pairs of rows, and the lengths of both."""


def add_clipped(
    total: Tensor, vectors: Factored, scale: Scale, bound: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``total (D,)`` += Σ_i weight_i·c_i·v_i in float64, in place -> norms ``(n,)``, factors c ``(n,)``.

    bound: C, to which ``scale`` clips. weights: ``(n,)``, of the sample-weighted mean, and 0 where there is no client:
    such a place is measured like the others, so that nothing follows from who is there, and adds nothing. A vector that
    is not finite adds nothing either, and has an infinite norm.
    """
    rows, norms, factors = _Rows(vectors), [], []
    for start in range(0, vectors.trace.clients, rows.together):
        count = rows.take(start)
        norm, size = rows.measured()
        factor = scale(norm)
        # By the factor times its size a client is judged alone: who else is in the room changes nothing.
        parts = factor * size
        safe = (parts * rows.product_error <= SHARE * bound) & (parts * math.sqrt(rows.norm_error) <= ROUNDING * bound)
        chosen = factor * safe
        for place in torch.nonzero(~safe & (factor > 0))[:, 0].cpu().tolist():
            # What was measured is what is added: this very float64 vector.
            vector = rows.written(place)
            norm[place] = rounding.norm(vector)
            factor[place] = scale(norm[place : place + 1])[0]
            total.add_(vector, alpha=float(factor[place] * (1.0 if weights is None else weights[start + place])))
        if weights is not None:
            chosen[:count] *= weights[start : start + count]
        # Clients that were written out have factor 0 here.
        rows.add_to(total, chosen)
        norms.append(torch.where(torch.isfinite(norm), norm, torch.inf)[:count])
        factors.append(factor[:count])
    return torch.cat(norms), torch.cat(factors)


class _Rows:
    """Some clients' factors in float64, in rooms of one shape; inputs have a column of ones behind them, for b."""

    def __init__(self, vectors: Factored) -> None:
        self.trace, layers = vectors.trace, vectors.trace.layers
        self.mixed = [list(self.trace.mixed(index, vectors.steps).items()) for index in range(len(layers))]
        lengths = [sum(u.shape[1] for _, u in mixed) for mixed in self.mixed]
        columns = [-(-(layer.inputs + 1) // ALIGNED) * ALIGNED for layer in layers]  # faster where rows are aligned
        limit = TOGETHER if self.trace.device.type == "cpu" else TOGETHER_ON_GPU
        largest = 1 + max(rows * width for rows, width in zip(lengths, columns))
        together = max(1, min(limit, TERMS // (1 + max(lengths)), ROOM // largest))
        self.together = 1 << (together.bit_length() - 1)  # places of a lane are alike in rooms too
        empty = torch.zeros(0, dtype=torch.float64, device=self.trace.device)
        self.inputs, self.deltas = list[Tensor](), list[Tensor]()
        for rows, width, layer in zip(lengths, columns, layers):
            self.inputs.append(empty.new_empty(self.together, rows, width))  # ``take`` fills what is not set here
            self.inputs[-1][..., layer.inputs :] = 0.0
            if layer.bias is not None:
                # The bias is one more input that is always 1.
                self.inputs[-1][..., layer.inputs] = 1.0
            self.deltas.append(empty.new_empty(self.together, rows, layer.outputs))
        self._bases(vectors, empty)
        widest, pairs = max(layer.inputs + layer.outputs for layer in layers), sum(rows**2 for rows in lengths)
        # A count of terms that no client's own rows change, so the test does not follow them either.
        self.product_error = gamma(max(TERMS, self.together * max(lengths)) + len(self.bases) + SPARE)
        dense = self.trace.size if len(self.bases) else 0
        self.norm_error = gamma(max(PRODUCTS, widest + pairs) + dense + 2 * SPARE)

    def _bases(self, vectors: Factored, empty: Tensor) -> None:
        """The dense parts ``(K, D)``, and every client's coefficients ``(n, K)``; like ``empty``."""
        clients, count = self.trace.clients, len(vectors.bases)
        self.bases, self.given = empty.new_zeros(count, self.trace.size), empty.new_zeros(clients, count)
        for k, (base, c) in enumerate(vectors.bases):
            self.bases[k], self.given[:, k] = base, torch.as_tensor(c, dtype=torch.float32).flatten()
        self.coefficients = empty.new_zeros(self.together, count)
        self.products = self.bases @ self.bases.T

    def take(self, start: int) -> int:
        """Fill the rooms with the clients from ``start`` on; their number."""
        stop = min(start + self.together, self.trace.clients)
        count = stop - start
        for index, (layer, x, u) in enumerate(zip(self.trace.layers, self.inputs, self.deltas)):
            at = 0
            for slot, delta in self.mixed[index]:
                to = at + delta.shape[1]
                x[:count, at:to, : layer.inputs] = self.trace.acts[index][slot][start:stop]
                u[:count, at:to] = delta[start:stop]
                at = to
            x[count:, :, : layer.inputs], u[count:] = 0.0, 0.0
        self.coefficients[:count], self.coefficients[count:] = self.given[start:stop], 0.0
        return count

    def measured(self) -> tuple[Tensor, Tensor]:
        """Return the norms N and sizes b ``(together,)``; not finite where a factor is not."""
        a = self.coefficients
        square, size = ((a @ self.products) * a).sum(1), a.abs() @ self.products.diagonal().sqrt()
        for layer, x, u in zip(self.trace.layers, self.inputs, self.deltas):
            pairs = torch.bmm(x, x.transpose(1, 2)).mul_(torch.bmm(u, u.transpose(1, 2)))
            size = size + pairs.diagonal(dim1=1, dim2=2).sqrt().sum(1)
            square = square + pairs.sum((1, 2))
            for base, c in zip(self.bases, a.T):
                square = square + 2 * c * (x @ _extended(layer, base, x.shape[2]).T).mul_(u).sum((1, 2))
        return (square.clamp_min(0.0) + self.norm_error * size.square()).sqrt(), size

    def written(self, place: int) -> Tensor:
        """Return one client's vector ``(D,)`` written out."""
        out = self.coefficients[place] @ self.bases
        for layer, x, u in zip(self.trace.layers, self.inputs, self.deltas):
            _add(layer, out, u[place].T @ x[place])
        return out

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        """``total`` += Σ factor·vector over the rooms' clients; one with factor 0 adds nothing, whatever it has."""
        # Left out, as zero times NaN is NaN: the bound on the sum's rounding holds for any number and order of terms.
        there = torch.nonzero(factors)[:, 0]
        some = slice(None) if len(there) == len(factors) else there
        for layer, x, u in zip(self.trace.layers, self.inputs, self.deltas):
            _add(layer, total, (u[some] * factors[some, None, None]).flatten(0, 1).T @ x[some].flatten(0, 1))
        if len(self.bases):
            total.add_(factors[some] @ self.coefficients[some] @ self.bases)


def _extended(layer: Linear, vector: Tensor, width: int) -> Tensor:
    """W of a vector ``(D,)``, b as a column behind it, and zeros: ``(outputs, width)``."""
    out = vector.new_zeros(layer.outputs, width)
    out[:, : layer.inputs] = layer.matrix(vector)
    if layer.bias is not None:
        out[:, layer.inputs] = vector[layer.bias]
    return out


def _add(layer: Linear, vector: Tensor, extended: Tensor) -> None:
    """Add to W, and b, of a vector ``(D,)`` what ``_extended`` would show of it."""
    layer.matrix(vector).add_(extended[:, : layer.inputs])
    if layer.bias is not None:
        vector[layer.bias] += extended[:, layer.inputs]
