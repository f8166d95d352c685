"""Load ViT-Base and RoBERTa-Base (Liu et al. 2025) through transformers, as modules of one tensor.

Dropout is set to 0 in the configuration: a client's update is then a function of its data and batches alone.
Needs the extra ``fedflat[language]``; the first use of the published weights downloads them.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import hub, missing, set_meanwhile
from fedflat.core.checks import InputError, becoming, first_line, one_of, require, turning, whole, wrong
from fedflat.models.representation import Headed
from fedflat.models.text import text_length
from fedflat.models.vision import image_shape

PUBLISHED = {
    "vit-base": ("google/vit-base-patch16-224-in21k", "ViTConfig", "ViTForImageClassification"),
    "roberta-base": ("FacebookAI/roberta-base", "RobertaConfig", "RobertaForSequenceClassification"),
}
"""Each model's id on the hub, and its classes in transformers."""
ROBERTA_BASE_SIZES = {"max_position_embeddings": 514, "type_vocab_size": 1}
TRAIN = ("all", "head", "lora", "norms")
NATURAL = "public natural data"
"""The prior of published weights."""
LORA_TARGETS = ("q_proj", "v_proj", "query", "value")


class Transformer(Headed):
    """A classifier of transformers. pretrained: whether its weights are the published ones."""

    trained = "body.classifier."

    def __init__(self, body: nn.Module, pretrained: bool) -> None:
        super().__init__()
        self.body, self.config = body, cast(Any, body).config
        self.prior = NATURAL if pretrained else self.prior


class ImageTransformer(Transformer):
    """Images (b, 3 or 1, h, w), resized bilinearly to the model's own size -> logits (b, classes).

    Features: the class token's last hidden state.
    """

    def features(self, images: Tensor) -> Tensor:
        side = int(self.config.image_size)
        if images.shape[1] == 1:
            images = images.expand(-1, self.config.num_channels, -1, -1)
        if tuple(images.shape[2:]) != (side, side):
            images = F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
        return cast(Tensor, self.body.vit(pixel_values=images).last_hidden_state[:, 0])  # type: ignore[operator, union-attr]


def _hidden_states(
    encoder: nn.Module, ids: Tensor, part: Tensor, padding: int, first: int, kinds: int = 1, apart: bool = False
) -> Tensor:
    """Return the last hidden states (b, T, n) of ids (b, T).

    part: 0 for the tokens of a first sentence, 1 for the others. apart: no token sees the other sentence, whose
    positions start anew. first: the position of the first token. kinds: of sentences that the encoder knows.

    Masks and positions are computed here, as RoBERTa does, because transformers looks at the mask's values to choose a
    branch, which ``torch.func.vmap`` forbids.
    """
    keep = ids != padding
    position = keep.long().cumsum(1) - 1
    seen = keep[:, None, :].expand(-1, ids.shape[1], -1)
    if apart:
        seen = seen & (part[:, :, None] == part[:, None, :])
        position = position - part * (keep & (part == 0)).sum(1, keepdim=True)
    dtype = next(encoder.parameters()).dtype
    mask = torch.finfo(dtype).min * (~seen).to(dtype)
    kind = torch.zeros_like(part) if apart else part.clamp(max=kinds - 1)
    position = torch.where(keep, position + first, padding)
    output = encoder(input_ids=ids, attention_mask=mask[:, None], position_ids=position, token_type_ids=kind)
    return cast(Tensor, output.last_hidden_state)


class TextTransformer(Transformer):
    """Ids (b, T) int64 -> logits (b, classes). Features: the last hidden state of the first token."""

    def features(self, ids: Tensor) -> Tensor:
        encoder, padding = cast(nn.Module, self.body.roberta), self.config.pad_token_id
        return _hidden_states(encoder, ids, torch.zeros_like(ids), padding, padding + 1)[:, 0]

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.body.classifier(features[:, None]))  # type: ignore[operator]


def extra(package: str, name: str) -> Any:
    with turning(ImportError, missing(f"model {name}", package, "language")):
        return importlib.import_module(package)


def _configuration(kind: Any, source: str, pretrained: bool, config: Any, defaults: Mapping[str, Any]) -> Any:
    """Return the published configuration, or one of ``config`` over ``defaults``."""
    if pretrained and config is not None:
        raise wrong("model.config", "a configuration for published weights", "none, or pretrained: false")
    if pretrained:
        stored = kind.get_config_dict(source)[0].get("model_type", kind.model_type)
        if stored != kind.model_type:  # its weights would fit here and there, and its positions and masks would not
            hint = "Other text encoders: model.name=text-encoder."
            raise wrong("model.path", f"a {stored} at {source}", f"a {kind.model_type}", hint=hint)
        return kind.from_pretrained(source)
    keys = set(kind().to_dict())
    for key in config or {}:
        one_of("model.config", key, sorted(keys))
    return kind(**{**defaults, **(config or {})})


def _published(
    name: str, classes: int, path: str | None, pretrained: bool, config: Any, **defaults: Any
) -> tuple[nn.Module, str]:
    """Return a published classifier or a random one of its form, and where its weights are."""
    published, *names = PUBLISHED[name]
    source = published if path is None else _folder(path)
    with loading(name, source) as transformers, hub() if pretrained and path is None else nullcontext():
        configurations, models = (getattr(transformers, kind) for kind in names)
        configuration = _configuration(configurations, source, pretrained, config, defaults)
        configuration.num_labels, configuration.classifier_dropout = classes, 0.0
        _without_dropout(configuration)
        # A folder saved with another number of classes keeps its body and gets a new head. Only safetensors: the other
        # format is a pickle, which runs code.
        options = {"config": configuration, "ignore_mismatched_sizes": True, "use_safetensors": True}
        body = models.from_pretrained(source, **options) if pretrained else models(configuration)
    return body.float().train(), source


def _without_dropout(config: Any) -> None:
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config._attn_implementation = "sdpa"


def readable(name: str, source: str) -> AbstractContextManager[None]:
    """Whatever transformers raises about missing or broken files as one sentence that names the remedy."""
    where, problem = f"model {name}", f"no readable weights at {source}"
    allowed = (
        "weights that the hub's client can download or has in its cache (HF_HOME), "
        "or a folder that save_pretrained wrote, of the model and its processor or tokenizer (model.path)"
    )
    # transformers, the hub's client and safetensors raise unrelated types
    return becoming(lambda error: wrong(where, problem, allowed, hint=f"({first_line(error)})"), left=InputError)


@contextmanager
def loading(name: str, source: str) -> Iterator[Any]:
    """Give the block transformers without progress bars and table of the classifier's missing weights: it is meant to
    be new. What it raises is as ``readable`` has it."""
    transformers = extra("transformers", name)
    log = transformers.utils.logging
    set_bars = {True: log.enable_progress_bar, False: log.disable_progress_bar}
    no_bars = set_meanwhile(log.is_progress_bar_enabled, lambda enabled: set_bars[enabled](), False)
    with set_meanwhile(log.get_verbosity, log.set_verbosity, log.ERROR), no_bars, readable(name, source):
        yield transformers


def _folder(path: str | None) -> str:
    allowed = "a folder with the weights, written by save_pretrained"
    require(bool(path) and Path(path or "").is_dir(), "model.path", path or "", allowed)
    return str(path)


def trainable(name: str, module: Headed, train: str, rank: int) -> Headed:
    """Choose what is trained: everything, or the classifier with nothing else, low-rank adapters, or the norms."""
    one_of("model.train", train, TRAIN)
    body = cast(nn.Module, module.body)
    if train == "lora":
        peft = extra("peft", name)
        ends = {key.rsplit(".", 1)[-1] for key, _ in body.named_modules()}
        targets = [target for target in LORA_TARGETS if target in ends] or _dense(body)
        settings = {"r": whole("model.rank", rank, 1), "lora_alpha": 2 * rank, "lora_dropout": 0.0}
        module.body = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **settings), body)
    norms = {id(p) for part in module.modules() if type(part).__name__.endswith("Norm") for p in part.parameters()}
    for key, parameter in module.named_parameters():
        chosen = train == "all" or key.startswith(module.trained) or (train == "norms" and id(parameter) in norms)
        parameter.requires_grad_(chosen or (train == "lora" and "lora_" in key))
    return module


def _dense(body: nn.Module) -> list[str]:
    """Return the names of the layers that take adapters in a network without attention.

    An adapter is another layer of the same class, so classes of a network's own are left alone.
    """
    kinds = (nn.Linear, nn.Conv2d)
    return [name for name, part in body.named_modules() if type(part) in kinds and getattr(part, "groups", 1) == 1]


def vit_base(
    input_shape: Sequence[int], classes: int, *, pretrained: bool = True, path: str | None = None,
    config: Mapping[str, Any] | None = None, train: str = "all", rank: int = 8,
) -> nn.Module:  # fmt: skip
    """ViT-Base/16 pre-trained on ImageNet-21k (Liu et al. 2025), with a new classifier.

    Options: ``path`` a local folder in place of the download; ``pretrained=False`` with ``config`` (keys of
    transformers' ViTConfig) random weights; ``train`` all, head, or lora (``rank``, adapters on queries and values).
    """
    channels = image_shape("vit-base", input_shape)[0]
    module = ImageTransformer(_published("vit-base", classes, path, pretrained, config)[0], pretrained)
    if channels not in (1, module.config.num_channels):
        raise wrong("model vit-base: input shape", tuple(input_shape), f"1 or {module.config.num_channels} channels")
    return trainable("vit-base", module, train, rank)


def roberta_base(
    input_shape: Sequence[int], classes: int, *, pretrained: bool = True, path: str | None = None,
    config: Mapping[str, Any] | None = None, train: str = "all", rank: int = 8,
    vocabulary: int | None = None, padding: int | None = None,
) -> nn.Module:  # fmt: skip
    """RoBERTa-Base (Liu et al. 2025) with a new classifier.

    Options as for :func:`vit_base`, ``config`` with the keys of transformers' RobertaConfig. ``vocabulary`` and
    ``padding``, which a recipe's data gives, describe the ids: a random model is made for them, published weights
    are refused if they were trained on others (their ids come from their own tokenizer, ``data.tokenizer``).
    """
    ids = {"vocab_size": vocabulary, "pad_token_id": padding}
    defaults = ROBERTA_BASE_SIZES | {key: value for key, value in ids.items() if value is not None}
    body, source = _published("roberta-base", classes, path, pretrained, config, **defaults)
    module = TextTransformer(body, pretrained)
    _check_ids(module.config, source if pretrained else None, vocabulary, padding)
    _check_length("roberta-base", input_shape, module.config.max_position_embeddings - module.config.pad_token_id - 1)
    return trainable("roberta-base", module, train, rank)


def _check_ids(config: Any, source: str | None, vocabulary: int | None, padding: int | None) -> None:
    """Raise InputError unless the data's ids are the model's: none beyond its table, and the same one for padding."""
    if (vocabulary is None or vocabulary <= config.vocab_size) and padding in (None, config.pad_token_id):
        return
    ids = f"{vocabulary} ids with padding {padding}"
    limit = f"at most {config.vocab_size} ids with padding {config.pad_token_id}"
    if source is None:
        raise wrong("model.config", f"{limit} for data of {ids}", "vocab_size and pad_token_id of the data, or neither")
    raise wrong("data.tokenizer", ids, f"{limit}, which is the model's own tokenizer: data.tokenizer={source}")


def _check_length(name: str, input_shape: Sequence[int], longest: int) -> None:
    if text_length(name, input_shape) > longest:
        raise wrong(f"model {name}: input shape", tuple(input_shape), f"at most {longest} ids (data.max_length)")


FIRST_POSITION = {"bert": 0, "roberta": 1, "xlm-roberta": 1}
"""Kinds of encoders, and the position of the first token, counted from the padding id where it is 1."""
POOLING = ("mean", "distance")
NEAR = 0.01
"""Added to a squared distance before its logarithm: equal sentences have a finite one."""


class TextEncoder(Headed):
    """Ids (b, T) int64 -> logits (b, classes).

    Features: the mean of the last hidden states over the tokens that are not padding, normalised to mean 0 and
    variance 1 in every example (Ba et al. 2016, without weights), so that one learning rate serves every encoder.
    pooling ``distance``: the two sentences are encoded apart, as in Reimers and Gurevych 2019; one feature, the
    logarithm of their mean squared difference (0 for unrelated ones): a head so small takes little noise.
    """

    prior = NATURAL

    def __init__(self, body: nn.Module, classes: int, pooling: str, first: int) -> None:
        super().__init__()
        config = cast(Any, body.config)
        self.body, self.pooling, self.padding, self.first = body, pooling, int(config.pad_token_id), first
        self.kinds = int(config.type_vocab_size)
        width = int(config.hidden_size)
        self.classifier = nn.Linear(width if pooling == "mean" else 1, classes)

    def features(self, inputs: Tensor) -> Tensor:
        keep = inputs != self.padding
        part, apart = _part(inputs, keep), self.pooling != "mean"
        states = _hidden_states(self.body, inputs, part, self.padding, self.first, self.kinds, apart)
        if not apart:
            return _normalised(states, keep)
        u, v = (_normalised(states, keep & (part == side)) for side in (0, 1))
        return torch.log((u - v).square().mean(-1, keepdim=True) / 2 + NEAR)


def _part(ids: Tensor, keep: Tensor) -> Tensor:
    """0 for the tokens of a text's first sentence, its separator included, 1 for the others (b, T).

    The separator is a text's last token, as BERT's and RoBERTa's tokenizers write it.
    """
    ends = (ids == ids.gather(1, (keep.sum(1, keepdim=True) - 1).clamp(min=0))) & keep
    return (ends.long().cumsum(1) - ends.long()).clamp(max=1)


def _normalised(states: Tensor, keep: Tensor) -> Tensor:
    """Return the mean of states (b, T, n) over the kept tokens, then mean 0 and variance 1 over its n entries."""
    weights = keep.to(states.dtype)[..., None]
    mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return F.layer_norm(mean, mean.shape[-1:])


def text_encoder(
    input_shape: Sequence[int], classes: int, *, path: str | None = None, train: str = "head", rank: int = 8,
    pooling: str = "mean", vocabulary: int | None = None, padding: int | None = None,
) -> nn.Module:  # fmt: skip
    """Return a BERT, RoBERTa or XLM-RoBERTa encoder in the folder ``path``, with a new linear classifier.

    Options: ``path`` (required) a folder written by save_pretrained, with safetensors; ``train`` head (the body is
    frozen, its features are computed once), lora (``rank``) or all; ``pooling`` mean, or distance for two
    sentences. ``vocabulary`` and ``padding`` come from a recipe's data, whose tokenizer
    must be the encoder's own. Raises InputError.
    """
    one_of("model.pooling", pooling, POOLING)
    name, source = "text-encoder", _folder(path)
    with loading(name, source) as transformers:
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        if config.model_type not in FIRST_POSITION:
            raise wrong(f"model {name}", f"a {config.model_type} at {source}", ", ".join(FIRST_POSITION))
        _without_dropout(config)
        options = {"use_safetensors": True, "local_files_only": True, "add_pooling_layer": False}
        body = transformers.AutoModel.from_pretrained(source, config=config, **options)
    _check_ids(config, source, vocabulary, padding)
    first = FIRST_POSITION[config.model_type] * (config.pad_token_id + 1)
    _check_length(name, input_shape, config.max_position_embeddings - first)
    return trainable(name, TextEncoder(body.float().train(), classes, pooling, first), train, rank)
