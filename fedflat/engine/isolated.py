"""Record a user's own pieces as tensor operations, so that their code never runs on a client's data.

A gradient rule, a transform or a state's function is a function of one client. It is called once for each set of public
numbers, under ``torch.func.vmap(…, randomness="error")``, on made-up numbers of 3 clients and of 2; the tensor
operations that it makes are recorded, and only these run on clients' data. So it cannot see another row, what it stores
is made up, and a draw from a global generator is an error. Python that would follow the numbers (a branch on data,
``.item()``, ``view.generator``) is refused by torch or here; such a piece's clients are trained one by one.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedflat.core import ClientContext, InputError, Layout, becoming, global_generators
from fedflat.core.types import Algorithm, Broadcast, ClientView, GradientFn, Local, broadcast_by
from fedflat.engine.client import steps_of, train_client
from fedflat.engine.factored import Declined
from fedflat.engine.problem import LinearData, LinearProblem

Ask = Callable[[str, int, Tensor], Tensor]
"""What a piece asks of the engine: a name, a number of classes (or 0), and a tensor ``(n, …)`` -> ``(n, …)``."""
Call = Callable[[list[Tensor], ClientView, Ask], Tensor]
"""A piece as it is recorded: one client's tensors, what it may see, and how it asks the engine -> its outcome."""
Traced = Callable[[list[Tensor], dict[str, Tensor], Any, Ask], Tensor]
"""What is recorded: one client's tensors, the broadcast, a generator, and how to ask -> the outcome."""
FEW = (3, 2)
"""Numbers of clients that a piece is recorded on."""
LARGE = 1e6
"""What multiplies numbers of rows that must not show in others."""
KEPT = 4
"""Recordings kept of a piece: for each shape and each phase's public numbers one."""


_RECORDING = threading.RLock()


class Refused(InputError):
    """A piece that cannot be recorded, and why."""


@dataclass(frozen=True)
class _Slot:
    number: int


_ROWS = _Slot(-1)
"""Where a step takes the number of clients."""


@dataclass(frozen=True)
class _Step:
    """One operation: what is called, on which slots and constants, and the slots of its outcome. ``drop``: slots that
    nobody reads afterwards."""

    call: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: tuple[int | None, ...]
    drop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recording:
    """Operations on inputs ``(n, …)``, which are the first slots. result: the slot of the outcome."""

    steps: tuple[_Step, ...]
    result: _Slot
    broadcast: Mapping[str, Tensor]
    rows: int = 0
    """The number of clients that it is for; 0: any."""

    def fits(self, broadcast: Mapping[str, Tensor], rows: int) -> bool:
        """Return whether it was made for these public vectors and so many clients."""
        return self.rows in (0, rows) and all(torch.equal(self.broadcast[name], v) for name, v in broadcast.items())

    def run(self, inputs: Sequence[Tensor], ask: Ask) -> Tensor:
        """Return the outcome for a block's tensors."""
        slots: dict[int, Any] = dict(enumerate(inputs)) | {_ROWS.number: inputs[0].shape[0]}
        for step in self.steps:
            args = [_filled(arg, slots) for arg in step.args]
            call = ask if step.call is None else step.call
            # Factors may hold the tensor written into: they keep a common vector as it is, without a copy.
            beside = not isinstance(inputs[0], Tensor) and isinstance(args[0], Tensor)
            if beside and step.call is not None and step.call._schema.is_mutable:
                raise Declined("a tensor beside the factors that is written into")
            outcome = call(*args, **{k: _filled(v, slots) for k, v in step.kwargs.items()})
            for number, value in zip(step.out, outcome if isinstance(outcome, tuple | list) else (outcome,)):
                if number is not None:
                    slots[number] = value
            for number in step.drop:
                slots.pop(number, None)
        return cast(Tensor, slots[self.result.number])


def _filled(arg: Any, slots: Mapping[int, Any]) -> Any:
    if type(arg) is _Slot:
        return slots[arg.number]
    return [_filled(part, slots) for part in arg] if type(arg) is list else arg


class _Recorder(TorchDispatchMode):
    """Notes every operation on tensors; ``inputs`` have the first slots."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._held: list[Any] = list(inputs)  # alive, so that no address is used twice
        self._slots = {id(tensor): number for number, tensor in enumerate(inputs)}
        self._outside = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._count = len(inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its whole compiler, which takes seconds

    def slot(self, tensor: Tensor) -> _Slot | Tensor:
        """Return where a tensor lies; itself if it comes from elsewhere."""
        if (number := self._slots.get(id(tensor))) is not None:
            return _Slot(number)
        self._held.append(tensor)
        self._outside.add(tensor.untyped_storage().data_ptr())
        return tensor

    def note(self, call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outcome: Any) -> None:
        """Add a step."""
        marked = tuple(self._marked(arg) for arg in args), {k: self._marked(v) for k, v in kwargs.items()}
        outs = [self._new(value) for value in (outcome if isinstance(outcome, tuple | list) else (outcome,))]
        self.steps.append(_Step(call, *marked, tuple(outs)))

    def _marked(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.slot(arg)
        return [self._marked(part) for part in arg] if isinstance(arg, list | tuple) else arg

    def _new(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._slots:
            self._slots[id(value)], self._count = self._count, self._count + 1
            self._held.append(value)
        return self._slots[id(value)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # vmap refuses most draws itself; this also finds those on tensors outside of it.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused("draws random numbers")
        if func.namespace not in ("aten", "prims"):  # Python of the user's own, which may remember and branch
            raise Refused(f"calls an operation that is not torch's own ({func})")
        outcome = func(*args, **kwargs)
        self.note(func, args, kwargs, outcome)
        for place, argument in enumerate(func._schema.arguments):
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(written, Tensor):
                self.slot(written)
                # Recorded, such a write would reach the next round, or another client's view of the broadcast.
                if written.untyped_storage().data_ptr() in self._outside:
                    raise Refused("writes into a tensor that it was given or keeps")
        return outcome


class _Asked(torch.autograd.Function):
    """A question to the engine, for all clients of the block at once."""

    generate_vmap_rule = False

    @staticmethod
    def forward(at: Tensor, token: Tensor, ask: Callable[[Tensor], Tensor]) -> Tensor:
        raise Refused("asks for a gradient outside of its own call")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, at: Tensor, token: Tensor, ask: Callable[[Tensor], Tensor]) -> Any:
        """The tensors of all clients -> the engine's answer."""
        return ask(at.expand(info.batch_size, *at.shape) if in_dims[0] is None else at.movedim(in_dims[0], 0)), 0


class _Closed:
    """Placeholder for ``view.generator`` that refuses when it is used."""

    def __getattr__(self, name: str) -> Any:
        raise Refused("draws from view.generator")


def record(call: Traced, inputs: Sequence[Tensor], broadcast: Mapping[str, Tensor]) -> Recording:
    """Record ``call(one client's inputs, broadcast, generator, ask)`` on made-up numbers like ``inputs (n, …)``.

    On few clients, so that weights of a whole block are never written out; on all n where the steps tell more of the
    number of clients than itself. Raises Refused where it cannot be, or where a row reaches another.
    """
    three, two = (_recorded(call, inputs, broadcast, rows, check=rows == FEW[0]) for rows in FEW)
    try:
        steps = tuple(_unified_step(*pair) for pair in zip(three.steps, two.steps, strict=True))
        return replace(three, steps=steps, result=_unified(three.result, two.result), rows=0)
    except ValueError:
        return _recorded(call, inputs, broadcast, inputs[0].shape[0], check=True)


def _unified_step(three: _Step, two: _Step) -> _Step:
    """Return a step for any number of clients from the two; ValueError where they differ in more than that."""
    if (three.call, three.out, three.drop) != (two.call, two.out, two.drop):
        raise ValueError
    args, kwargs = tree_map(_unified, (three.args, three.kwargs), (two.args, two.kwargs))
    return replace(three, args=args, kwargs=kwargs)


def _unified(three: Any, two: Any) -> Any:
    if type(three) is int and (three, two) == FEW:
        return _ROWS
    if type(three) is not type(two) or getattr(three, "dtype", None) != getattr(two, "dtype", None):
        raise ValueError
    if not (torch.equal(three, two) if isinstance(three, Tensor) else three == two):
        raise ValueError
    return three


def _made_up(x: Tensor, start: int) -> Tensor:
    return 3 * torch.sin(torch.arange(x.numel(), dtype=x.dtype, device=x.device) + start).view(x.shape)


def _recorded(
    call: Traced, inputs: Sequence[Tensor], broadcast: Mapping[str, Tensor], rows: int, check: bool
) -> Recording:
    samples = [_made_up(x.new_zeros((rows, *x.shape[1:])), k) for k, x in enumerate(inputs)]
    vectors = {name: vector.clone() for name, vector in broadcast.items()}
    token = torch.zeros(len(samples[0]), device=samples[0].device)
    recorder = _Recorder([*samples, *vectors.values(), token])

    def one(tensors: list[Tensor], token: Tensor) -> Tensor:
        def ask(name: str, classes: int, at: Tensor) -> Tensor:
            def answer(points: Tensor) -> Tensor:
                # The stand-in's own arithmetic is not part of the piece.
                with torch._C._DisableTorchDispatch():
                    reply = torch.cos(points) if not classes else points.new_full((len(points), classes), 1 / classes)
                recorder.note(None, (name, classes, points), {}, reply)
                return reply

            return cast(Tensor, _Asked.apply(at, token, answer))  # type: ignore[no-untyped-call]

        return call(tensors, vectors, _Closed(), ask)

    before = global_generators()
    # Torch's own refusals have no type of their own.
    with becoming(lambda error: Refused(_in_words(error)), left=Refused), recorder:
        outcome = torch.func.vmap(one, randomness="error")(samples, token)
    if global_generators() != before:
        raise Refused("draws from a global generator")
    result = recorder.slot(outcome)
    if not isinstance(result, _Slot):
        raise Refused("returns a tensor that it keeps")
    recording = Recording(_without_leftovers(recorder.steps, result), result, vectors, rows)
    if check:
        _refuse_mixing(recording, samples, [*vectors.values(), token])
    return recording


def _refuse_mixing(recording: Recording, samples: Sequence[Tensor], rest: Sequence[Tensor]) -> None:
    """Raise Refused where one client's row reaches another's outcome."""

    def answer(name: str, classes: int, at: Tensor) -> Tensor:
        return at.new_ones(len(at), classes) if classes else at * 2

    # NaN must not show in rows without it, nor large numbers: vmap cannot see what a matrix product mixes.
    rows = torch.arange(len(samples[0]), device=samples[0].device)
    with becoming(lambda error: Refused(f"fails on some numbers ({_in_words(error)})"), left=Refused):
        plain = recording.run([*samples, *rest], answer)
        for bit, worse in itertools.product(range((len(rows) - 1).bit_length()), (torch.nan, LARGE)):
            # Of any two rows one is hidden and the other not, some time.
            for hidden in ((rows >> bit) % 2 == 0, (rows >> bit) % 2 == 1):
                broken = [torch.where(hidden[:, None], values * worse, values) for values in samples]
                outcome = recording.run([*broken, *rest], answer)
                if not torch.equal(plain[~hidden].nan_to_num(), outcome[~hidden].nan_to_num()):
                    raise Refused("mixes the clients of a block")


def _in_words(error: Exception) -> str:
    text = str(error)
    if "data-dependent control flow" in text:
        return "branches on a client's numbers"
    if ".item()" in text or "data pointer" in text or "numpy" in text:
        return "reads a client's numbers into Python (.item(), .numpy())"
    if "random" in text:
        return "draws random numbers"
    return f"cannot run under torch.func.vmap ({type(error).__name__}: {(text.splitlines() or [''])[0][:120]})"


def _without_leftovers(steps: Sequence[_Step], result: _Slot) -> tuple[_Step, ...]:
    """Return the steps, each dropping what is read there for the last time."""
    read_later, trimmed = {result.number}, list[_Step]()
    for step in reversed(steps):
        read = (arg.number for arg in tree_leaves((step.args, step.kwargs)) if type(arg) is _Slot)
        used = {*read, *(n for n in step.out if n is not None)}
        trimmed.append(replace(step, drop=tuple(used - read_later)))
        read_later |= used
    return tuple(reversed(trimmed))


# ---------------------------------------------------------------------------------------------------- the pieces


def called(piece: object) -> str:
    """Return a piece's own name: a function's, or its class's."""
    return str(getattr(piece, "__qualname__", None) or type(piece).__qualname__).replace(".<locals>", "")


@dataclass
class Isolated:
    """A piece by its recordings; called as the piece is, with one client's tensors or a block's."""

    piece: Any
    name: str
    _recordings: dict[tuple[Any, ...], Recording] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return type(self), (self.piece, self.name)

    def _run(self, call: Call, view: ClientView, tensors: Sequence[Tensor], ask: Ask) -> Tensor:
        """Return the outcome for one client's tensors ``(…)`` or a block's ``(n, …)``; its states go behind them."""
        single, facts, clients = tensors[0].dim() == 1, (view.clip, view.steps, view.lr), tensors[0].shape[0]
        names, inputs = list(view.state), [*tensors, *view.state.values()]
        block = [x[None] for x in inputs] if single else [x if x.dim() == 2 else x.expand(clients, -1) for x in inputs]
        asked: Ask = ask if not single else lambda name, classes, at: ask(name, classes, at[0])[None]
        shapes = tuple(x.shape[1:] for x in block)
        with _RECORDING:  # blocks of clients train in threads
            recording = self._recordings.get((shapes, facts))
            if recording is None or not recording.fits(view.broadcast, block[0].shape[0]):

                def inner(values: list[Tensor], vectors: dict[str, Tensor], generator: Any, ask: Ask) -> Tensor:
                    state = dict(zip(names, values[len(tensors) :]))
                    seen = replace(view, state=state, broadcast=vectors, generator=generator)
                    return call(values[: len(tensors)], seen, ask)

                with becoming(lambda error: Refused(f"{self.name}: {called(self.piece)} {error}"), Refused):
                    recording = record(inner, block, view.broadcast)  # each is checked: a piece may count its calls
                # Learning rates change each round; old recordings would only pile up.
                if len(self._recordings) >= KEPT:
                    self._recordings.clear()
                self._recordings[shapes, facts] = recording
        outcome = recording.run([*block, *view.broadcast.values(), block[0].new_zeros(block[0].shape[0])], asked)
        return outcome[0] if single else outcome


class IsolatedRule(Isolated):
    """A gradient rule."""

    def __call__(self, gradient: GradientFn, view: ClientView) -> GradientFn:
        """Return the gradient function that the rule makes, as its recording."""

        def call(tensors: list[Tensor], seen: ClientView, ask: Ask) -> Tensor:
            w, start = tensors
            seen = replace(seen, start=start, shares=lambda classes: ask("shares", classes, w))
            return cast(Tensor, self.piece(lambda at: ask("gradient", 0, at), seen)(w))

        def answer(name: str, classes: int, at: Tensor) -> Tensor:
            return gradient(at.contiguous()) if name == "gradient" else view.shares(classes)

        return lambda w: self._run(call, view, [w, view.start], answer)


class IsolatedTransform(Isolated):
    """A transform of a client's update."""

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        """Return the message that the transform makes, as its recording."""

        def call(tensors: list[Tensor], seen: ClientView, ask: Ask) -> Tensor:
            seen = replace(seen, gradient=lambda: ask("gradient", 0, tensors[0]))
            return cast(Tensor, self.piece(tensors[0], replace(seen, examples=lambda: ask("examples", 1, tensors[0]))))

        def answer(name: str, classes: int, at: Tensor) -> Tensor:
            return view.gradient() if name == "gradient" else view.examples()

        return self._run(call, view, [update], answer)


class IsolatedState(Isolated):
    """The function of a client's state; it is asked for one client at a time."""

    def __call__(self, sent: Tensor, view: ClientView) -> Tensor:
        """Return the client's new state, as ``ClientState.next`` does."""

        def answer(name: str, classes: int, at: Tensor) -> Tensor:
            raise Refused("asks for a gradient")

        return self._run(lambda tensors, seen, ask: cast(Tensor, self.piece(tensors[0], seen)), view, [sent], answer)


def packaged(*pieces: Any) -> bool:
    """Return whether pieces are this package's, which are tested to work row by row; no trial shows what a user's own
    does to the rows of a block once real data are in them.
    """
    for piece in pieces:
        ours = piece is None or piece.__module__.startswith("fedflat.pieces.")  # a function's, or a class's
        # A composed rule is packaged where both of its rules are.
        if not ours or not packaged(*(getattr(piece, name) for name in ("outer", "inner") if hasattr(piece, name))):
            return False
    return True


def isolated(algorithm: Algorithm, layout: Layout, local: Local) -> Algorithm:
    """Return the method with each piece of a user's own by its recordings. Raises Refused, naming the piece and why."""
    names = {id(piece): name for name, piece in pieces_of(algorithm)}
    if packaged(*(piece for _, piece in pieces_of(algorithm))):
        return algorithm

    def of(kind: Callable[[Any, str], Any], piece: Any) -> Any:
        return piece if packaged(piece) else kind(piece, names[id(piece)])

    phases = tuple(replace(phase, rule=of(IsolatedRule, phase.rule)) for phase in algorithm.phases)
    transforms = tuple(of(IsolatedTransform, transform) for transform in algorithm.transforms)
    states = tuple(replace(state, next=of(IsolatedState, state.next)) for state in algorithm.client_state)
    method = replace(algorithm, phases=phases, transforms=transforms, client_state=states)
    _try(method, layout, local)
    return method


def pieces_of(algorithm: Algorithm) -> list[tuple[str, Any]]:
    """Return what clients run of a method, each with its name."""
    pieces: list[tuple[str, Any]] = [(f"algorithm.phases[{i}].rule", p.rule) for i, p in enumerate(algorithm.phases)]
    pieces += [(f"algorithm.transforms[{i}]", transform) for i, transform in enumerate(algorithm.transforms)]
    return pieces + [(f"algorithm.client_state ({state.name})", state.next) for state in algorithm.client_state]


def _try(algorithm: Algorithm, layout: Layout, local: Local) -> None:
    """Let two clients whose loss is flat take a step of each phase, which records every piece."""
    vectors = {name: torch.zeros(layout.dimension) for name in broadcast_by((*algorithm.server, algorithm.optimizer))}
    states = {state.name: torch.zeros(2, layout.dimension) for state in algorithm.client_state}
    broadcast, weights = Broadcast(0, torch.zeros(layout.dimension), 1.0, 1.0, vectors), torch.zeros(2, layout.size)
    data, context = LinearData(torch.zeros(2, 1).expand_as(weights), most=1), ClientContext(states)
    sent = train_client(algorithm, LinearProblem(layout), broadcast, local, data, weights, context).message
    one, steps = {name: state[0] for name, state in states.items()}, steps_of(algorithm.shared_phase, local)
    for state in algorithm.client_state:
        state.next(sent[0], ClientView(steps=steps, lr=local.lr, broadcast=vectors, state=one))
