"""Every update-averaging method again, in float64 numpy, with explicit loops over rounds, clients and steps.

Written from the equations alone (the table of methods and the papers named there), not from the package: it imports
nothing of it. Slow and plain on purpose. Networks are fully connected with softmax cross-entropy; their gradients
are derived by hand. Weights are one flat vector in the order of the module's parameters: W1, b1, W2, b2, …
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

Vector = np.ndarray
Batch = tuple[np.ndarray, np.ndarray]
Gradient = Callable[[Vector, Batch], Vector]


@dataclass(frozen=True)
class Net:
    """Layers of the given sizes with ``tanh`` or ``relu`` between them."""

    sizes: tuple[int, ...]
    activation: str = "tanh"

    @property
    def tensors(self) -> list[slice]:
        """Where each weight and bias lives in the flat vector."""
        start, found = 0, []
        for inputs, outputs in zip(self.sizes, self.sizes[1:]):
            for length in (inputs * outputs, outputs):
                found.append(slice(start, start + length))
                start += length
        return found

    @property
    def length(self) -> int:
        return self.tensors[-1].stop

    @property
    def head(self) -> np.ndarray:
        """True on the last layer's weight and bias."""
        mask = np.zeros(self.length, dtype=bool)
        mask[self.tensors[-2].start :] = True
        return mask

    def layers(self, w: Vector) -> list[tuple[np.ndarray, np.ndarray]]:
        spans, out = self.tensors, []
        for k, (inputs, outputs) in enumerate(zip(self.sizes, self.sizes[1:])):
            out.append((w[spans[2 * k]].reshape(outputs, inputs), w[spans[2 * k + 1]]))
        return out

    def forward(self, w: Vector, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits, and the input of every layer."""
        inputs, value, layers = [], x, self.layers(w)
        for k, (weight, bias) in enumerate(layers):
            inputs.append(value)
            value = value @ weight.T + bias
            if k < len(layers) - 1:
                value = np.tanh(value) if self.activation == "tanh" else np.maximum(value, 0.0)
        return value, inputs

    def loss(self, w: Vector, batch: Batch) -> float:
        x, y = batch
        logits, _ = self.forward(w, x)
        shifted = logits - logits.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]))

    def accuracy(self, w: Vector, batch: Batch) -> float:
        return float(np.mean(self.forward(w, batch[0])[0].argmax(1) == batch[1]))

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """Gradient of the mean cross-entropy, by hand."""
        x, y = batch
        logits, inputs = self.forward(w, x)
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        error = shifted / shifted.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1.0
        error /= len(y)
        layers, parts = self.layers(w), []
        for k in reversed(range(len(layers))):
            parts = [(error.T @ inputs[k]).ravel(), error.sum(0), *parts]
            if k > 0:
                slope = 1.0 - inputs[k] ** 2 if self.activation == "tanh" else (inputs[k] > 0).astype(float)
                error = (error @ layers[k][0]) * slope
        return np.concatenate(parts)


def norm(v: Vector) -> float:
    return math.sqrt(float(np.dot(v, v)))


def loss_gradient(net: Net, weight_decay: float = 0.0, max_norm: float | None = None) -> Gradient:
    """The loss gradient with the two training aids: its norm limited first, then weight decay added."""

    def gradient(w: Vector, batch: Batch) -> Vector:
        g = net.gradient(w, batch)
        if max_norm is not None and norm(g) > max_norm:
            g = g * (max_norm / norm(g))
        return g + weight_decay * w

    return gradient


def sgd(w: Vector, batches: Sequence[Batch], gradient: Gradient, lr: float, momentum: float = 0.0) -> Vector:
    w, buf = w.copy(), np.zeros_like(w)
    for batch in batches:
        buf = momentum * buf + gradient(w, batch)
        w = w - lr * buf
    return w


def penalised(gradient: Gradient, start: Vector, lam: float, threshold: float) -> Gradient:
    """BLUR: gradient of f + (λ/2)·max(0, ‖w − w^t‖² − S²)."""

    def with_penalty(w: Vector, batch: Batch) -> Vector:
        g, moved = gradient(w, batch), w - start
        if norm(moved) ** 2 > threshold**2:
            g = g + lam * moved
        return g

    return with_penalty


def sam(w: Vector, batches: Sequence[Batch], gradient: Gradient, lr: float, momentum: float, rho: float) -> Vector:
    w, buf = w.copy(), np.zeros_like(w)
    for batch in batches:
        first = gradient(w, batch)
        step = rho * first / norm(first) if norm(first) > 0 else np.zeros_like(w)
        buf = momentum * buf + gradient(w + step, batch)
        w = w - lr * buf
    return w


def adaptive_sam(w: Vector, batches: Sequence[Batch], gradient: Gradient, lr: float, momentum: float, rho) -> Vector:
    """SAM in coordinates u = w/|w_0| of each step: the ball of radius ρ around u, carried back (Kwon et al. 2021)."""
    w, buf = w.copy(), np.zeros_like(w)
    for batch in batches:
        size = np.abs(w)
        in_u = gradient(w, batch) * size
        buf = momentum * buf + gradient(w + size * rho * in_u / norm(in_u), batch)
        w = w - lr * buf
    return w


def pgn(w: Vector, batches, gradient: Gradient, lr: float, memory: Vector, rho: float, beta: float) -> Vector:
    w = w.copy()
    step = rho * memory / norm(memory) if norm(memory) > 0 else np.zeros_like(w)
    for batch in batches:
        w = w - lr * (beta * gradient(w + step, batch) + (1.0 - beta) * memory)
    return w


def partial(w, head_batches, batches, gradient, head, head_lr, lr, momentum, rho=None) -> Vector:
    """K_v SGD steps on the head with the rest frozen, then K_u SGD (or SAM) steps on the rest, the head frozen."""
    w = w.copy()
    where = np.flatnonzero(head)
    rest = np.flatnonzero(~head)

    def block(indices: np.ndarray, frozen: Vector) -> Gradient:
        def gradient_of_block(part: Vector, batch: Batch) -> Vector:
            full = frozen.copy()
            full[indices] = part
            return gradient(full, batch)[indices]

        return gradient_of_block

    w[where] = sgd(w[where], head_batches, block(where, w.copy()), head_lr, momentum)
    move = block(rest, w.copy())
    if rho is None:
        w[rest] = sgd(w[rest], batches, move, lr, momentum)
    else:
        w[rest] = sam(w[rest], batches, move, lr, momentum, rho)
    return w


def nsam(w, batches, gradient: Gradient, lr: float, momentum: float, velocity: Vector, rho, gamma) -> Vector:
    """SAM as its authors write it: from the point w + γ·v, which the update is taken from; here back at w."""
    ahead = gamma * velocity
    return sam(w + ahead, batches, gradient, lr, momentum, rho) - ahead


def proximal(w, batches, gradient: Gradient, lr: float, momentum: float, mu: float) -> Vector:
    """SGD on f + (μ/2)·‖w − w^t‖²."""
    start = w.copy()
    return sgd(w, batches, lambda at, batch: gradient(at, batch) + mu * (at - start), lr, momentum)


def ceil_share(share: float, count: int) -> int:
    """⌈share·count⌉ for a share written in decimals: 0.3 of 10 is 3, not 4."""
    return math.ceil(Fraction(repr(float(share))) * count)


def keep_largest(scores: Vector, values: Vector, count: int) -> Vector:
    """Values where the score is among the ``count`` largest; at ties the lowest index is kept."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    out = np.zeros_like(values)
    for j in order[:count]:
        out[j] = values[j]
    return out


def lus(update: Vector, final: Vector, net: Net, data: Batch, sparsity: float, tensors: Sequence[slice]) -> Vector:
    scores, out = np.abs(net.gradient(final, data)[: len(update)] * update), np.zeros_like(update)
    kept = 1 - Fraction(repr(float(sparsity)))
    for t in tensors:
        out[t] = keep_largest(scores[t], update[t], math.ceil(kept * (t.stop - t.start)))
    return out


def top_k(update: Vector, keep: float, tensors: Sequence[slice]) -> Vector:
    out = np.zeros_like(update)
    for t in tensors:
        out[t] = keep_largest(np.abs(update[t]), update[t], ceil_share(keep, t.stop - t.start))
    return out


def clip(message: Vector, threshold: float) -> Vector:
    if not np.all(np.isfinite(message)):
        return np.zeros_like(message)
    size = norm(message)
    return message if size <= threshold else message * (threshold / size)


def smooth(v: Vector, sigma: float, tensors: Sequence[slice]) -> Vector:
    """A⁻¹v on each tensor, A = I − σ·Lap with the periodic 1-D Laplacian, as a dense matrix."""
    out = v.copy()
    for t in tensors:
        n = t.stop - t.start
        lap = np.zeros((n, n))
        for j in range(n):
            lap[j, j] -= 2.0
            lap[j, (j + 1) % n] += 1.0
            lap[j, (j - 1) % n] += 1.0
        out[t] = np.linalg.solve(np.eye(n) - sigma * lap, v[t])
    return out


@dataclass
class Optimiser:
    """SGD with momentum, Adam or Yogi of Reddi et al. 2021 (no bias correction, v starting at τ²)."""

    kind: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    first: Vector | None = None
    second: Vector | None = None

    def step(self, w: Vector, mean: Vector) -> Vector:
        if self.first is None:
            self.first, self.second = np.zeros_like(w), np.full_like(w, self.tau**2)
        if self.kind == "sgd":
            self.first = self.momentum * self.first + mean
            return w + self.lr * self.first
        self.first = self.beta1 * self.first + (1 - self.beta1) * mean
        square = mean**2
        if self.kind == "adam":
            self.second = self.beta2 * self.second + (1 - self.beta2) * square
        else:
            self.second = self.second - (1 - self.beta2) * square * np.sign(self.second - square)
        return w + self.lr * self.first / (np.sqrt(self.second) + self.tau)


@dataclass
class FreedAdam:
    """Adam (bias corrected) whose second moment is kept of Δ² and freed of the noise's part of it when it is used."""

    lr: float
    beta1: float
    beta2: float
    floor: float | None
    variances: list[float] = field(default_factory=list)
    means: list[Vector] = field(default_factory=list)

    def step(self, w: Vector, mean: Vector, variance: float) -> Vector:
        self.means.append(mean)
        self.variances.append(variance)
        t = len(self.means)
        ages = [t - 1 - s for s in range(t)]
        first = sum((1 - self.beta1) * self.beta1**age * m for age, m in zip(ages, self.means)) / (1 - self.beta1**t)
        weights = [(1 - self.beta2) * self.beta2**age / (1 - self.beta2**t) for age in ages]
        second = sum(weight * m**2 for weight, m in zip(weights, self.means))
        known = sum(weight * v for weight, v in zip(weights, self.variances))
        floor = max(variance, 1e-6) if self.floor is None else self.floor
        return w + self.lr * first / np.sqrt(np.maximum(second - known, floor))


@dataclass(frozen=True)
class Setting:
    """A method and its numbers; the names are the recipe's."""

    method: str
    rounds: int = 3
    steps: int = 3
    lr: float = 0.1
    momentum: float = 0.5
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    clip: float = 1.0
    cohort: int | None = None
    rho: float = 0.5
    lam: float = 0.4
    sparsity: float = 0.7
    keep: float = 0.4
    mu: float = 0.01
    gamma: float = 0.5
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float | None = None
    noise_multiplier: float = 0.0
    rescale: bool = False
    beta: float = 0.3
    smoothing: float = 0.01
    scope: str = "tensor"
    head_steps: int | None = None
    head_lr: float = 0.005
    finetune_steps: int | None = None
    finetune_lr: float | None = None
    server: dict = field(default_factory=dict)
    weights: str = "uniform"
    scale: float = 1.0
    alpha: float = 0.1
    kappa: float = 0.7
    ahead: float = 0.3 / 0.7
    strength: float = 1.0
    absent: float = 0.01
    adaptive: bool = False


@dataclass
class Outcome:
    """Final weights (a head entry is w^0's), heads by client, recorded numbers, what clients keep by client."""

    weights: Vector
    heads: dict[int, Vector]
    norms: list[list[float]]
    personal: list[float]
    kept: dict[int, Vector] = field(default_factory=dict)


PERSONAL = {"centaur": False, "dp2-fedsam": True, "p-fedsam": True}
NOT_PRIVATE = {"fedavg", "fedsam", "p-fedsam"}
BatchesOf = Callable[[int, int, int, int], list[Batch]]


def adjusted(gradient: Gradient, net: Net, labels: np.ndarray, strength: float, absent: float) -> Gradient:
    """The gradient with τ·log((π + s)/(1 + K·s)) added to the logits, through the last bias, which itself stays."""
    classes = net.sizes[-1]
    shares = np.array([np.mean(labels == c) for c in range(classes)])
    shift = strength * np.log((shares + absent) / (1.0 + classes * absent))

    def gradient_there(w: Vector, batch: Batch) -> Vector:
        there = w.copy()
        there[net.tensors[-1]] += shift
        found = gradient(there, batch)
        found[net.tensors[-1]] = 0.0
        return found

    return gradient_there


def local_update(s, net, start, batches, head_batches, gradient, rate, memory, labels) -> Vector:
    """The client's final weights from ``start``."""
    lr, m = s.lr * rate, s.method
    if m in PERSONAL:
        rho = s.rho if PERSONAL[m] else None
        return partial(start, head_batches, batches, gradient, net.head, s.head_lr * rate, lr, s.momentum, rho)
    if m in ("fedsam", "dp-fedsam", "dp-fedsam-topk", "dp-fedsam-ft"):
        return (adaptive_sam if s.adaptive else sam)(start, batches, gradient, lr, s.momentum, s.rho)
    if m in ("dp-fedavg-blur", "dp-fedavg-blurs"):
        return sgd(start, batches, penalised(gradient, start, s.lam, s.clip), lr, s.momentum)
    if m == "dp-fedsam-blur":
        return sam(start, batches, penalised(gradient, start, s.lam, s.clip), lr, s.momentum, s.rho)
    if m == "dp-fedprox":
        return proximal(start, batches, gradient, lr, s.momentum, s.mu)
    if m == "dp-fednsam":
        return nsam(start, batches, gradient, lr, s.momentum, memory, s.rho, s.gamma)
    if m == "dp-fedavg-la":
        return sgd(start, batches, adjusted(gradient, net, labels, s.strength, s.absent), lr, s.momentum)
    if m in ("dp-fedpgn", "dp-fedpgn-ls"):
        return pgn(start, batches, gradient, lr, memory, s.rho, s.beta)
    return sgd(start, batches, gradient, lr, s.momentum)


def message_of(s, net, start, final, data, shared, tensors, memory, rate, mask) -> Vector:
    """What the client sends, before the clip."""
    update = (final - start)[shared]
    if s.method in ("dp-fedavg-lus", "dp-fedavg-blurs"):
        update = lus(update, final, net, data, s.sparsity, tensors)
    if s.method == "dp-fedsam-topk":
        update = top_k(update, s.keep, tensors)
    if s.method.startswith("fed-smp"):
        update = np.where(mask, update, 0.0) / (s.keep if s.rescale else 1.0)
    if s.method in ("dp-fedpgn", "dp-fedpgn-ls"):
        update = update + (1.0 - s.beta) * s.steps * s.lr * rate * memory
    return update


def server_mean(s: Setting, mean: Vector, memory: Vector, rate: float, tensors) -> tuple[Vector, Vector]:
    """Post-processing of the noisy mean: what the server optimiser receives, and g̃ of the next round."""
    whole = [slice(0, len(mean))] if s.scope == "vector" else tensors
    if s.method == "dp-fedavg-la":
        return np.concatenate([mean[: tensors[-1].start], np.zeros(len(mean[tensors[-1]]))]), memory
    if s.method == "dp-fedavg-ls":
        return smooth(mean, s.smoothing, whole), memory
    if s.method in ("dp-fedpgn", "dp-fedpgn-ls"):
        length = s.lr * rate * s.steps
        memory = -(mean - (1.0 - s.beta) * length * memory) / length
        if s.method == "dp-fedpgn-ls":
            memory = smooth(memory, s.smoothing, whole)
        return -length * memory, memory
    if s.method == "dp-fednsam":
        velocity = s.gamma * memory + (1.0 - s.gamma) * mean
        return velocity, velocity
    return mean, memory


def scaffold(s: Setting, net: Net, initial: Vector, clients: Sequence[Batch]) -> Outcome:
    """DP-SCAFFOLD (Karimireddy et al. 2020, Alg. 1, option II), update and control clipped as one vector.

    Everybody with data takes part; the divisor m and the population M count the others too.
    """
    w, c = initial.astype(np.float64).copy(), np.zeros(net.length)
    own = {i: np.zeros(net.length) for i in range(len(clients))}
    gradient = loss_gradient(net, s.weight_decay, s.max_grad_norm)
    optimiser, population, cohort = Optimiser(**s.server), len(clients), s.cohort or len(clients)
    norms = []
    for t in range(s.rounds):
        eta, updates, changes, lengths = s.lr * s.lr_decay**t, [], [], []
        for i, data in enumerate(clients):
            if len(data[1]) == 0:
                continue
            y = w.copy()
            for _ in range(s.steps):
                y -= eta * (gradient(y, data) - own[i] + c)
            new = own[i] - c + (w - y) / (s.steps * eta)
            length = math.sqrt(norm(y - w) ** 2 + (norm(new - own[i]) / s.scale) ** 2)
            factor = min(1.0, s.clip / length)
            updates.append(factor * (y - w))
            changes.append(factor * (new - own[i]))
            own[i] = own[i] + factor * (new - own[i])
            lengths.append(length)
        norms.append(lengths)
        w = optimiser.step(w, sum(updates) / cohort)
        c = c + sum(changes) / population
        np.testing.assert_allclose(c, sum(own.values()) / population, atol=1e-12)  # what the algebra promises
    return Outcome(w, {}, norms, [], own)


def normec(s: Setting, net: Net, initial: Vector, clients: Sequence[Batch]) -> Outcome:
    """Fed-α-NormEC (Shulgin et al. 2025b): normalised differences from a memory, which moves by what was sent."""
    w, memory = initial.astype(np.float64).copy(), np.zeros(net.length)
    own = {i: np.zeros(net.length) for i in range(len(clients))}
    gradient = loss_gradient(net, s.weight_decay, s.max_grad_norm)
    optimiser, population = Optimiser(**s.server), len(clients)
    norms = []
    for t in range(s.rounds):
        eta, lengths = s.lr * s.lr_decay**t, []
        sent = np.zeros(net.length)
        for i, data in enumerate(clients):
            if len(data[1]) == 0:
                continue
            error = sgd(w.copy(), [data] * s.steps, gradient, eta, s.momentum) - w - own[i]
            lengths.append(norm(error))
            message = s.clip * error / (s.alpha + norm(error))
            own[i] = own[i] + message
            sent += message
        norms.append(lengths)
        memory = memory + sent / population
        w = optimiser.step(w, memory)
    return Outcome(w, {}, norms, [], own)


def disk(s: Setting, net: Net, initial: Vector, clients: Sequence[Batch]) -> Outcome:
    """DiSK (Zhang et al. 2024, Alg. 1), a client's K local steps in place of an example's gradient.

    What a client observes, and (1−κ)/κ times how that changes along the last move, are one message to the clip.
    """
    w, estimate, last = initial.astype(np.float64).copy(), None, initial.astype(np.float64).copy()
    plain = loss_gradient(net, s.weight_decay, s.max_grad_norm)
    norms = []
    for t in range(s.rounds):
        move = w - last

        def observed(at: Vector, batch: Batch, move: Vector = move) -> Vector:
            change = (plain(at + s.ahead * move, batch) - plain(at, batch)) / s.ahead
            return plain(at, batch) + (1 - s.kappa) / s.kappa * change

        messages = [
            sgd(w.copy(), [data] * s.steps, observed, s.lr * s.lr_decay**t, s.momentum) - w
            for data in clients
            if len(data[1])
        ]
        norms.append([norm(m) for m in messages])
        mean = sum(clip(m, s.clip) for m in messages) / (s.cohort or len(clients))
        estimate = mean if estimate is None else estimate + s.kappa * (mean - estimate)
        last, w = w, w + s.server.get("lr", 1.0) * estimate
    return Outcome(w, {}, norms, [])


def simulate(
    s: Setting, net: Net, initial: Vector, clients: Sequence[Batch], masks: Sequence[Vector] = (),
    held: Sequence[Batch] | None = None, batches_of: BatchesOf | None = None,
) -> Outcome:  # fmt: skip
    """T rounds with every client taking part and no noise (dp-fedadam reckons with that of ``noise_multiplier``).

    masks: the common mask of each round (Fed-SMP). held: held-back data for personal accuracies.
    batches_of(round, client, phase, steps): minibatches; full batches when absent.
    """
    if s.method in ("dp-scaffold", "fed-normec", "dp-disk"):
        return {"dp-scaffold": scaffold, "fed-normec": normec, "dp-disk": disk}[s.method](s, net, initial, clients)
    w = initial.astype(np.float64).copy()
    personal = s.method in PERSONAL
    shared = ~net.head if personal else np.ones(net.length, dtype=bool)
    tensors = [t for t in net.tensors if shared[t.start]]
    gradient = loss_gradient(net, s.weight_decay, s.max_grad_norm)
    heads = {i: w[~shared].copy() for i in range(len(clients))}
    memory, optimiser = np.zeros(int(shared.sum())), Optimiser(**s.server)
    norms = []
    cohort = s.cohort or len(clients)
    freed = FreedAdam(s.server.get("lr", 0.03), s.beta1, s.beta2, s.floor)

    def batches(t: int, i: int, phase: int, steps: int) -> list[Batch]:
        return batches_of(t, i, phase, steps) if batches_of else [clients[i]] * steps

    for t in range(s.rounds):
        rate, messages, sizes = s.lr_decay**t, [], []
        for i, data in enumerate(clients):
            if len(data[1]) == 0:
                continue
            start = w.copy()
            start[~shared] = heads[i]
            head_batches = batches(t, i, 0, s.head_steps or s.steps) if personal else []
            own = batches(t, i, 1 if personal else 0, s.steps)
            final = local_update(s, net, start, own, head_batches, gradient, rate, memory, data[1])
            mask = masks[t] if masks else None
            messages.append(message_of(s, net, start, final, data, shared, tensors, memory, rate, mask))
            sizes.append(len(data[1]))
            heads[i] = final[~shared]
        norms.append([norm(m) for m in messages])
        private = s.method not in NOT_PRIVATE
        bounded = [clip(m, s.clip if private else math.inf) for m in messages]
        if s.weights == "samples":
            mean = sum(n * m for n, m in zip(sizes, bounded)) / sum(sizes)
        else:
            mean = sum(bounded) / cohort
        mean, memory = server_mean(s, mean, memory, rate, tensors)
        if s.method == "dp-fedadam":
            std = s.noise_multiplier * s.clip * (1 + 2.0**-10)  # of the sum; 2⁻¹⁰ for the sum's rounding
            w = freed.step(w, mean, (std / cohort) ** 2)
        else:
            w[shared] = optimiser.step(w[shared], mean)
    return Outcome(w, heads, norms, personal_accuracies(s, net, w, clients, heads, held, gradient, shared))


def personal_accuracies(s, net, w, clients, heads, held, gradient, shared) -> list[float]:
    """Accuracy of each client on its held-back data: with its own head, or after fine-tuning the global model."""
    out: list[float] = []
    for i, kept in enumerate(held or ()):
        if len(kept[1]) == 0:
            continue
        mine = w.copy()
        if s.method in PERSONAL:
            mine[~shared] = heads[i]
        elif s.method.endswith("-ft") and len(clients[i][1]):
            steps = [clients[i]] * (s.finetune_steps or s.steps)
            lr = s.finetune_lr if s.finetune_lr is not None else s.lr
            if s.method == "dp-fedsam-ft":
                mine = sam(w, steps, gradient, lr, s.momentum, s.rho)
            else:
                mine = sgd(w, steps, gradient, lr, s.momentum)
        out.append(net.accuracy(mine, kept))
    return out
