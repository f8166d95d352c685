"""Models by name or by import path, with initial weights that depend on the seed and on nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fedflat.core.checks import nearest, whole, wrong
from fedflat.core.imports import imported
from fedflat.core.rng import seeded_torch
from fedflat.models import encoder, pretrained, text, vision
from fedflat.models.representation import representation

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "linear": vision.linear,
    "mlp": vision.mlp,
    "cnn": vision.cnn,
    "cnn-2-layers": vision.cnn_2_layers,
    "cnn-3": vision.cnn_3,
    "resnet10": vision.resnet10,
    "resnet18": vision.resnet18,
    "char-lstm": text.char_lstm,
    "char-gru": text.char_gru,
    "char-linear": text.char_linear,
    "bow": text.bow,
    "bow-linear": text.bow_linear,
    "bow-overlap": text.bow_overlap,
    "vit-base": pretrained.vit_base,
    "roberta-base": pretrained.roberta_base,
    "text-encoder": encoder.text_encoder,
    "representation": representation,
}

OURS = frozenset(name for name, builder in BUILDERS.items() if builder.__module__ != pretrained.__name__)
"""Models whose code is this package's own; the tests make the whole search for hidden state on each."""

NAMES: dict[str, str] = {
    "linear": "logistic regression on the flattened input; 7,850 parameters at 1×28×28, 10 classes",
    "mlp": "one or more hidden layers (hidden: 64); 50,890 parameters at 1×28×28, 10 classes",
    "cnn": "two 5×5 convolutions, dense 512 (Shi et al. 2023a and b); 608,702 parameters at 1×28×28, 62 classes",
    "cnn-2-layers": "two 3×3 convolutions, dense 128 (Cheng et al. 2022); 1,206,590 parameters at 1×28×28, 62 classes",
    "cnn-3": "three 3×3 convolutions, dense 256, 128 (Zhang et al. 2024); 667,402 parameters at 3×32×32, 10 classes",
    "resnet10": "group norm, CIFAR stem (Liu et al. 2025); 4,903,242 parameters at 3×32×32, 10 classes",
    "resnet18": "group norm, CIFAR stem (all five papers); 11,173,962 parameters at 3×32×32, 10 classes",
    "char-lstm": "next character, two LSTM layers of 256; 820,522 parameters with 90 characters",
    "char-gru": "next character, one GRU layer of 128; 64,938 parameters with 90 characters",
    "char-linear": "next character, a score for each of the last three (context); 24,660 parameters with 90 characters",
    "bow": "text classifier, mean of embeddings of 64; 320,130 parameters with vocabulary 5,000, 2 classes",
    "bow-linear": "text classifier, a score a word and class; 10,002 parameters with vocabulary 5,000, 2 classes",
    "bow-overlap": "pairs of sentences, share of words without their like in the other; 4 parameters with 2 classes",
    "vit-base": "ViT-Base/16, ImageNet-21k weights (Liu et al. 2025); 85,806,346 parameters with 10 classes",
    "roberta-base": "RoBERTa-Base (Liu et al. 2025); 124,647,170 parameters with 2 classes",
    "text-encoder": "BERT or RoBERTa from a folder (path); its head has 770 parameters with hidden size 384, 2 classes",
    "representation": "frozen body made from random images (body), trained head; 20,010 parameters with 10 classes",
}


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
    factory = imported(f"model {name}", name) if ":" in name else _named(name)
    given = {"input_shape": shape, "classes": classes}
    if ":" in name:
        accepted = inspect.signature(factory).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        given = {key: value for key, value in given.items() if anything or key in accepted}
    _check_options(name, factory, options, given)
    with seeded_torch(seed, "initial weights"):
        module = factory(**given, **options)
    if not isinstance(module, nn.Module):
        raise wrong(f"model {name}", f"a callable that returned {type(module).__name__}", "one that returns nn.Module")
    return module


def takes(name: str, option: str) -> bool:
    """Whether the built-in model ``name`` has an option of that name; False for unknown names and import paths."""
    return name in BUILDERS and option in inspect.signature(BUILDERS[name]).parameters


def _named(name: str) -> Callable[..., nn.Module]:
    if name not in BUILDERS:
        allowed = ", ".join([*BUILDERS, "package.module:callable", "path/to/file.py:callable"])
        raise wrong("model.name", name, allowed, hint=nearest(name, BUILDERS))
    return BUILDERS[name]


def _check_options(name: str, factory: Callable[..., nn.Module], options: dict[str, Any], given: Iterable[str]) -> None:
    parameters = inspect.signature(factory).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    allowed = [key for key in named if key not in ("input_shape", "classes")]
    for key in options:
        if key in ("input_shape", "classes") or (key not in allowed and not anything):
            raise wrong(f"model {name}: option", key, ", ".join(allowed) or "none", hint=nearest(key, allowed))
    supplied = {*options, *given}
    for key, parameter in parameters.items():
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and (positional or key not in supplied):
            raise wrong(f"model {name}", f"a callable that needs {key}", "input_shape, classes and the options given")
