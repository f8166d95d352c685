"""Load ViT-Base and RoBERTa-Base (Liu et al. 2025) through transformers, as modules of one tensor.

Dropout is set to 0 in the configuration: a client's update is then a function of its data and batches alone.
Needs the extra ``fedflat[language]``; the first use of the published weights downloads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import InputError, one_of, whole, wrong
from fedflat.core.imports import hub, missing
from fedflat.models.representation import Headed
from fedflat.models.text import text_length
from fedflat.models.vision import image_shape

VIT = "google/vit-base-patch16-224-in21k"
ROBERTA = "FacebookAI/roberta-base"
PUBLISHED = (VIT, ROBERTA)
ROBERTA_BASE_SIZES = {"max_position_embeddings": 514, "type_vocab_size": 1}
TRAIN = ("all", "head", "lora", "norms")
NATURAL = "public natural data"
"""The prior of published weights."""
LORA_TARGETS = ("q_proj", "v_proj", "query", "value")


class ImageTransformer(Headed):
    """Images (b, 3 or 1, h, w), resized bilinearly to the model's own size -> logits (b, classes).

    Features: the class token's last hidden state.
    """

    def __init__(self, body: nn.Module, side: int, channels: int) -> None:
        super().__init__()
        self.body = body
        self.side = side
        self.channels = channels

    def features(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, self.channels, -1, -1)
        if tuple(images.shape[2:]) != (self.side, self.side):
            images = F.interpolate(images, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return cast(Tensor, self.body.vit(pixel_values=images).last_hidden_state[:, 0])  # type: ignore[operator, union-attr]

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.body.classifier(features))  # type: ignore[operator]


class TextTransformer(Headed):
    """Ids (b, T) int64 -> logits (b, classes); attention skips the padding id. Features: the first token's last state.

    Mask and positions are computed here, as RoBERTa does, because transformers looks at the mask's values to
    choose a branch, which ``torch.func.vmap`` forbids.
    """

    def __init__(self, body: nn.Module, padding: int) -> None:
        super().__init__()
        self.body = body
        self.padding = padding

    def features(self, ids: Tensor) -> Tensor:
        keep = ids != self.padding
        positions = keep.long().cumsum(1) * keep.long() + self.padding
        length = ids.shape[1]
        dtype = next(self.body.parameters()).dtype
        hidden = torch.finfo(dtype).min * (~keep).to(dtype)
        mask = hidden[:, None, None, :].expand(-1, 1, length, length)
        outputs = self.body.roberta(  # type: ignore[operator, union-attr]
            input_ids=ids, attention_mask=mask, position_ids=positions, token_type_ids=torch.zeros_like(ids)
        )
        return cast(Tensor, outputs.last_hidden_state[:, 0])

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.body.classifier(features[:, None]))  # type: ignore[operator]


def extra(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing(f"model {name}", package, "language") from error


def _configuration(kind: Any, source: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return the published configuration, or one of ``config`` over ``defaults``."""
    pretrained, config = options["pretrained"], options["config"]
    if pretrained and config is not None:
        raise wrong("model.config", "a configuration for published weights", "none, or pretrained: false")
    if pretrained:
        stored = kind.get_config_dict(source)[0].get("model_type", kind.model_type)
        if stored != kind.model_type:  # its weights would fit here and there, and its positions and masks would not
            hint = "Other text encoders: model.name=text-encoder."
            raise wrong("model.path", f"a {stored} at {source}", f"a {kind.model_type}", hint=hint)
        return kind.from_pretrained(source)
    known = set(kind().to_dict())
    for key in config or {}:
        one_of("model.config", key, sorted(known))
    return kind(**{**defaults, **(config or {})})


def _load(
    name: str,
    classes: int,
    kinds: tuple[str, str],
    source: str,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Any]:
    transformers = extra("transformers", name)
    configuration_kind, model_kind = (getattr(transformers, kind) for kind in kinds)
    with readable(name, source), hub() if options["pretrained"] and source in PUBLISHED else nullcontext():
        config = _configuration(configuration_kind, source, options, defaults or {})
        config.num_labels = classes
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        if name == "roberta-base":
            config.classifier_dropout = 0.0
        config._attn_implementation = one_of("model.attention", options["attention"], ("sdpa", "eager"))
        if not options["pretrained"]:
            return model_kind(config), config
        with quiet(transformers):
            # A folder saved with another number of classes keeps its body and gets a new head. Only safetensors:
            # the other format is a pickle, which runs code.
            body = model_kind.from_pretrained(source, config=config, ignore_mismatched_sizes=True, use_safetensors=True)
    return body.float().train(), config


@contextmanager
def readable(name: str, source: str) -> Iterator[None]:
    """Whatever transformers raises about missing or broken files as one sentence that names the remedy."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers, the hub's client and safetensors raise unrelated types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        allowed = (
            "weights that the hub's client can download or has in its cache (HF_HOME), "
            "or a folder written by save_pretrained (model.path)"
        )
        raise wrong(f"model {name}", f"no readable weights at {source}", allowed, hint=f"({reason})") from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no table of the classifier's missing weights: it is meant to be new."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _source(published: str, path: str | None) -> str:
    return published if path is None else folder(path)


def folder(path: str) -> str:
    """``path``, or InputError if there is no folder."""
    if not Path(path).is_dir():
        raise wrong("model.path", path, "an existing folder written by save_pretrained")
    return str(path)


def trainable(name: str, module: Headed, train: str, rank: int) -> Headed:
    """Choose what is trained: everything, or the classifier with nothing else, low-rank adapters, or the norms."""
    one_of("model.train", train, TRAIN)
    body = cast(nn.Module, module.body)
    if train == "lora":
        peft = extra("peft", name)
        ends = {key.rsplit(".", 1)[-1] for key, _ in body.named_modules()}
        config = peft.LoraConfig(
            r=whole("model.rank", rank, 1),
            lora_alpha=2 * rank,
            lora_dropout=0.0,
            target_modules=[target for target in LORA_TARGETS if target in ends] or _dense(body),
        )
        module.body = peft.inject_adapter_in_model(config, body)
    norms = {id(p) for part in module.modules() if type(part).__name__.endswith("Norm") for p in part.parameters()}
    for key, parameter in module.named_parameters():
        chosen = train == "all" or key.startswith(module.trained) or (train == "norms" and id(parameter) in norms)
        parameter.requires_grad_(chosen or (train == "lora" and "lora_" in key))
    return module


def _dense(body: nn.Module) -> list[str]:
    """Return the names of the layers that take adapters in a network without attention."""
    return [
        name for name, part in body.named_modules()
        if isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1)
    ]  # fmt: skip


def vit_base(
    input_shape: Sequence[int],
    classes: int,
    *,
    pretrained: bool = True,
    path: str | None = None,
    config: Mapping[str, Any] | None = None,
    train: str = "all",
    rank: int = 8,
    attention: str = "sdpa",
) -> nn.Module:
    """ViT-Base/16 pre-trained on ImageNet-21k (Liu et al. 2025), with a new classifier.

    Options: ``path`` a local folder in place of the download; ``pretrained=False`` with ``config`` (keys of
    transformers' ViTConfig) random weights; ``train`` all, head, or lora (``rank``, adapters on queries and values);
    ``attention`` sdpa or eager.
    """
    channels = image_shape("vit-base", input_shape)[0]
    options = {"pretrained": pretrained, "config": config, "attention": attention}
    kinds = ("ViTConfig", "ViTForImageClassification")
    body, found = _load("vit-base", classes, kinds, _source(VIT, path), options)
    if channels not in (1, found.num_channels):
        raise wrong("model vit-base: input shape", tuple(input_shape), f"1 or {found.num_channels} channels")
    module = ImageTransformer(body, int(found.image_size), found.num_channels)
    module.prior = NATURAL if pretrained else module.prior
    return trainable("vit-base", module, train, rank)


def roberta_base(
    input_shape: Sequence[int],
    classes: int,
    *,
    pretrained: bool = True,
    path: str | None = None,
    config: Mapping[str, Any] | None = None,
    train: str = "all",
    rank: int = 8,
    attention: str = "sdpa",
    vocabulary: int | None = None,
    padding: int | None = None,
) -> nn.Module:
    """RoBERTa-Base (Liu et al. 2025) with a new classifier.

    Options as for :func:`vit_base`, ``config`` with the keys of transformers' RobertaConfig. ``vocabulary`` and
    ``padding``, which a recipe's data gives, describe the ids: a random model is made for them, published weights
    are refused if they were trained on others (their ids come from their own tokenizer, ``data.tokenizer``).
    """
    length = text_length("roberta-base", input_shape)
    options = {"pretrained": pretrained, "config": config, "attention": attention}
    kinds = ("RobertaConfig", "RobertaForSequenceClassification")
    ids = {"vocab_size": vocabulary, "pad_token_id": padding}
    defaults = ROBERTA_BASE_SIZES | {key: value for key, value in ids.items() if value is not None}
    source = _source(ROBERTA, path)
    body, found = _load("roberta-base", classes, kinds, source, options, defaults)
    same_ids(found, source if pretrained else None, vocabulary, padding)
    longest = found.max_position_embeddings - found.pad_token_id - 1
    if length > longest:
        raise wrong("model roberta-base: input shape", tuple(input_shape), f"at most {longest} ids (data.max_length)")
    module = TextTransformer(body, found.pad_token_id)
    module.prior = NATURAL if pretrained else module.prior
    return trainable("roberta-base", module, train, rank)


def same_ids(found: Any, source: str | None, vocabulary: int | None, padding: int | None) -> None:
    """Raise InputError unless the data's ids are the model's: none beyond its table, and the same one for padding."""
    fits = (vocabulary is None or vocabulary <= found.vocab_size) and padding in (None, found.pad_token_id)
    if fits:
        return
    ids = f"{vocabulary} ids with padding {padding}"
    own = f"at most {found.vocab_size} ids with padding {found.pad_token_id}"
    if source is None:
        raise wrong("model.config", f"{own} for data of {ids}", "vocab_size and pad_token_id of the data, or neither")
    raise wrong("data.tokenizer", ids, f"{own}, which is the model's own tokenizer: data.tokenizer={source}")
