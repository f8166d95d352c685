"""Build models by name or import path, with initial weights that depend on the seed alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import nearest, one_of, whole, wrong
from fedflat.core.imports import imported
from fedflat.core.rng import PortableDraws, seeded_torch
from fedflat.models import image_encoder, pretrained, text, vision
from fedflat.models.pretrained import NATURAL, extra, folder, quiet, readable, same_ids, trainable
from fedflat.models.representation import Headed, representation
from fedflat.models.text import text_length

NAME = "text-encoder"
FIRST_POSITION = {"bert": 0, "roberta": 1, "xlm-roberta": 1}
"""Kinds of encoders, and the position of the first token, counted from the padding id where it is 1."""
POOLING = ("mean", "pair", "distance")
NEAR = 0.01
"""Added to a squared distance before its logarithm: equal sentences have a finite one."""


class TextEncoder(Headed):
    """Ids (b, T) int64 -> logits (b, classes).

    Features: the mean of the last hidden states over the tokens that are not padding, normalised to mean 0 and
    variance 1 in every example (Ba et al. 2016, without weights), so that one learning rate serves every encoder.
    pooling ``pair``: the two sentences u, v are encoded apart, as in Reimers and Gurevych 2019; features
    are |u − v| and u·v entry by entry, which do not depend on the sentences' order. ``distance``: one feature, the
    logarithm of their mean squared difference (0 for unrelated ones): a head so small takes little noise.
    """

    trained = "classifier."
    prior = NATURAL

    def __init__(self, body: nn.Module, classes: int, pooling: str) -> None:
        super().__init__()
        config = cast(Any, body.config)
        self.body, self.pooling, self.padding = body, pooling, int(config.pad_token_id)
        self.first = FIRST_POSITION[config.model_type] * (self.padding + 1)
        self.kinds = int(config.type_vocab_size)
        width = int(config.hidden_size)
        self.classifier = nn.Linear({"mean": width, "pair": 2 * width, "distance": 1}[pooling], classes)

    def features(self, inputs: Tensor) -> Tensor:
        keep = inputs != self.padding
        part = _part(inputs, keep)
        if self.pooling == "mean":
            return _normalised(self._states(inputs, keep, part), keep)
        states = self._states(inputs, keep, part)
        u, v = (_normalised(states, keep & (part == side)) for side in (0, 1))
        if self.pooling == "distance":
            return torch.log((u - v).square().mean(-1, keepdim=True) / 2 + NEAR)
        return torch.cat([(u - v).abs(), u * v], dim=-1)

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(features))

    def _states(self, ids: Tensor, keep: Tensor, part: Tensor) -> Tensor:
        """Return the last hidden states (b, T, n); masks and positions without a branch on values, for
        ``torch.func.vmap``.
        """
        position = keep.long().cumsum(1) - 1
        seen = keep[:, None, :].expand(-1, ids.shape[1], -1)
        if self.pooling != "mean":  # no token sees the other sentence, whose positions start anew
            seen = seen & (part[:, :, None] == part[:, None, :])
            position = position - part * (keep & (part == 0)).sum(1, keepdim=True)
        dtype = next(self.body.parameters()).dtype
        mask = torch.finfo(dtype).min * (~seen).to(dtype)
        kind = part.clamp(max=self.kinds - 1) if self.pooling == "mean" else torch.zeros_like(part)
        outputs = self.body(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=torch.where(keep, position + self.first, self.padding),
            token_type_ids=kind,
        )
        return cast(Tensor, outputs.last_hidden_state)


def _part(ids: Tensor, keep: Tensor) -> Tensor:
    """0 for the tokens of a text's first sentence, its separator included, 1 for the others (b, T).

    The separator is a text's last token, as BERT's and RoBERTa's tokenizers write it.
    """
    last = (keep.sum(1, keepdim=True) - 1).clamp(min=0)
    ends = (ids == ids.gather(1, last)) & keep
    return (ends.long().cumsum(1) - ends.long()).clamp(max=1)


def _normalised(states: Tensor, keep: Tensor) -> Tensor:
    """Return the mean of states (b, T, n) over the kept tokens, then mean 0 and variance 1 over its n entries."""
    weights = keep.to(states.dtype)[..., None]
    mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return F.layer_norm(mean, mean.shape[-1:])


def text_encoder(
    input_shape: Sequence[int],
    classes: int,
    *,
    path: str | None = None,
    train: str = "head",
    rank: int = 8,
    pooling: str = "mean",
    attention: str = "sdpa",
    vocabulary: int | None = None,
    padding: int | None = None,
) -> nn.Module:
    """Return a BERT, RoBERTa or XLM-RoBERTa encoder in the folder ``path``, with a new linear classifier.

    Options: ``path`` (required) a folder written by save_pretrained, with safetensors; ``train`` head (the body is
    frozen, its features are computed once), lora (``rank``) or all; ``pooling`` mean, or pair or distance for two
    sentences; ``attention`` sdpa or eager. ``vocabulary`` and ``padding`` come from a recipe's data, whose tokenizer
    must be the encoder's own. Raises InputError.
    """
    length = text_length(NAME, input_shape)
    if path is None:
        raise wrong("model.path", "nothing", "a folder with the encoder's weights, written by save_pretrained")
    one_of("model.pooling", pooling, POOLING)
    source = folder(path)
    body = _load(source, one_of("model.attention", attention, ("sdpa", "eager")))
    config = cast(Any, body.config)
    same_ids(config, source, vocabulary, padding)
    longest = config.max_position_embeddings - FIRST_POSITION[config.model_type] * (config.pad_token_id + 1)
    if length > longest:
        raise wrong(f"model {NAME}: input shape", tuple(input_shape), f"at most {longest} ids (data.max_length)")
    return trainable(NAME, TextEncoder(body, classes, pooling), train, rank)


def _load(source: str, attention: str) -> nn.Module:
    transformers = extra("transformers", NAME)
    with readable(NAME, source):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        if config.model_type not in FIRST_POSITION:
            raise wrong(f"model {NAME}", f"a {config.model_type} at {source}", ", ".join(FIRST_POSITION))
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        config._attn_implementation = attention
        with quiet(transformers):
            body = transformers.AutoModel.from_pretrained(
                source, config=config, use_safetensors=True, local_files_only=True, add_pooling_layer=False
            )
    return cast(nn.Module, body.float().train())


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
    "text-encoder": text_encoder,
    "image-encoder": image_encoder.image_encoder,
    "representation": representation,
}

LOADED = (pretrained.__name__, image_encoder.__name__)
OURS = frozenset(name for name, builder in BUILDERS.items() if builder.__module__ not in LOADED)
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
    "image-encoder": "public image network (body), frozen or tuned; a head of 12,810 parameters with 10 classes",
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
    with seeded_torch(seed, "initial weights"), PortableDraws(seed, "initial weights"):
        module = factory(**given, **options)
    if not isinstance(module, nn.Module):
        raise wrong(f"model {name}", f"a callable that returned {type(module).__name__}", "one that returns nn.Module")
    return module


def takes(name: str, option: str) -> bool:
    """Return whether the built-in model ``name`` has an option of that name; False for unknown names and import
    paths."""
    return name in BUILDERS and option in inspect.signature(BUILDERS[name]).parameters


def is_sized(name: str) -> bool:
    """Return whether a model by name or import path is built for a number of classes; False for unknown names."""
    factory = imported(f"model {name}", name) if ":" in name else BUILDERS.get(name)
    try:
        found = inspect.signature(factory).parameters if factory is not None else {}
    except ValueError:  # a class of C
        return False
    return "classes" in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


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
