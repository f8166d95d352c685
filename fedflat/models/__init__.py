"""Build models by name or import path, with initial weights that depend on the seed alone.

Example::

    from fedflat.models import build

    module = build("mlp", (64,), 10, seed=0, hidden=32)

``vision`` and ``text`` have the networks by name, ``pretrained`` those with public weights; ``representation`` and
``image_encoder`` put a head on a frozen body. ``state`` checks that nothing leaves a client unclipped.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedflat.core import PortableDraws, calling, imported, nearest, one_of, seeded_torch, turning, whole, wrong
from fedflat.models import image_encoder, pretrained, representation, text, vision
from fedflat.models.state import freeze_batch_norm, refuse_unclipped_state

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "linear": vision.linear, "mlp": vision.mlp, "cnn": vision.cnn, "cnn-2-layers": vision.cnn_2_layers,
    "cnn-3": vision.cnn_3, "resnet10": vision.resnet10, "resnet18": vision.resnet18, "char-gru": text.CharacterModel,
    "char-linear": text.CharacterScores, "bow-linear": text.WordCounts, "bow-overlap": text.WordOverlap,
    "vit-base": pretrained.vit_base, "roberta-base": pretrained.roberta_base,
    "text-encoder": pretrained.text_encoder, "image-encoder": image_encoder.image_encoder,
    "representation": representation.representation,
}  # fmt: skip

NAMES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
"""Each model's name, and a line about it."""


SIZES = ("input_shape", "classes")
NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def build(name: str, input_shape: tuple[int, ...], classes: int, seed: int, **options: Any) -> nn.Module:
    """Build the model ``name`` for inputs of ``input_shape`` (without the batch) and ``classes`` outputs.

    ``name`` is a key of :data:`NAMES`, ``package.module:callable`` or ``path/to/file.py:callable``. A callable
    without arguments is called without; otherwise it gets ``input_shape`` and ``classes``, as far as it takes
    them, and the options. The same seed gives the same weights; torch's global generator is left as it was.

    Raises InputError: unknown name or option, an input shape the network cannot take, a callable that fails to
    return a module.
    """
    whole("model: classes", classes, 1)
    shape = tuple(int(n) for n in input_shape)
    factory, accepted, anything = _factory(name)
    sizes = {key: value for key, value in zip(SIZES, (shape, classes)) if anything or key in accepted}
    allowed = [key for key in accepted if key not in SIZES]
    for key in options:
        if key in SIZES or (key not in allowed and not anything):
            raise wrong(f"model {name}: option", key, ", ".join(allowed) or "none", hint=nearest(key, allowed))
    with calling(f"model {name}"), seeded_torch(seed, "initial weights"), PortableDraws(seed, "initial weights"):
        module = factory(**sizes, **options)
    if not isinstance(module, nn.Module):
        raise wrong(f"model {name}", f"a callable that returned {type(module).__name__}", "one that returns nn.Module")
    return module


def takes(name: str, option: str) -> bool:
    """Return whether the built-in model ``name`` has an option of that name; False for unknown names and import
    paths."""
    return name in BUILDERS and option in inspect.signature(BUILDERS[name]).parameters


def is_sized(name: str) -> bool:
    """Return whether a model by name or import path is built for a number of classes."""
    _, accepted, anything = _factory(name)
    return "classes" in accepted or anything


def _factory(name: str) -> tuple[Callable[..., nn.Module], list[str], bool]:
    """Return what builds a model, the names that it takes, and whether it takes any other as well."""
    if ":" not in name:
        one_of("model.name", name, [*BUILDERS, "package.module:callable", "path/to/file.py:callable"])
    factory = imported(f"model {name}", name) if ":" in name else BUILDERS[name]
    with turning(ValueError, wrong("model.name", "a callable without a signature", "a function or class of Python")):
        parameters = inspect.signature(factory).parameters.items()
    taken = [key for key, p in parameters if p.kind in NAMED]
    return factory, taken, any(p.kind is p.VAR_KEYWORD for _, p in parameters)


__all__ = [
    "BUILDERS", "NAMES", "build", "freeze_batch_norm", "is_sized", "patches", "refuse_unclipped_state",
    "representation", "takes",
]  # fmt: skip
