"""ViT-Base and RoBERTa-Base (paper 002) through transformers, as modules of one tensor.

Dropout is set to 0 in the configuration: a client's update is then a function of its data and batches alone.
Needs the extra ``fedflat[language]``; the first use of the published weights downloads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import InputError, one_of, whole, wrong
from fedflat.models.text import text_length
from fedflat.models.vision import image_shape

VIT = "google/vit-base-patch16-224-in21k"
ROBERTA = "FacebookAI/roberta-base"
ROBERTA_BASE_SIZES = {"max_position_embeddings": 514, "type_vocab_size": 1}
TRAIN = ("all", "head", "lora")
LORA_TARGETS = ("q_proj", "v_proj", "query", "value")


class ImageTransformer(nn.Module):
    """Images (b, 3 or 1, h, w), resized bilinearly to the model's own size -> logits (b, classes)."""

    def __init__(self, body: nn.Module, side: int, channels: int) -> None:
        super().__init__()
        self.body = body
        self.side = side
        self.channels = channels

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, self.channels, -1, -1)
        if tuple(images.shape[2:]) != (self.side, self.side):
            images = F.interpolate(images, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return cast(Tensor, self.body(pixel_values=images).logits)


class TextTransformer(nn.Module):
    """Ids (b, T) int64 -> logits (b, classes); attention skips the padding id.

    Mask and positions are computed here, as RoBERTa does, because transformers looks at the mask's values to
    choose a branch, which ``torch.func.vmap`` forbids.
    """

    def __init__(self, body: nn.Module, padding: int) -> None:
        super().__init__()
        self.body = body
        self.padding = padding

    def forward(self, ids: Tensor) -> Tensor:
        keep = ids != self.padding
        positions = keep.long().cumsum(1) * keep.long() + self.padding
        length = ids.shape[1]
        dtype = next(self.body.parameters()).dtype
        hidden = torch.finfo(dtype).min * (~keep).to(dtype)
        mask = hidden[:, None, None, :].expand(-1, 1, length, length)
        outputs = self.body(
            input_ids=ids, attention_mask=mask, position_ids=positions, token_type_ids=torch.zeros_like(ids)
        )
        return cast(Tensor, outputs.logits)


def _extra(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(f'model {name}: needs the package {package}; install "fedflat[language]".') from error


def _configuration(kind: Any, name: str, source: str, pretrained: bool, config: Mapping[str, Any] | None) -> Any:
    base = dict(ROBERTA_BASE_SIZES) if name == "roberta-base" else {}
    if pretrained and config is not None:
        raise wrong("model.config", "a configuration for published weights", "none, or pretrained: false")
    if pretrained:
        return kind.from_pretrained(source)
    known = set(kind().to_dict())
    for key in config or {}:
        one_of("model.config", key, sorted(known))
    return kind(**{**base, **(config or {})})


def _load(
    name: str, classes: int, kinds: tuple[str, str], source: str, options: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    transformers = _extra("transformers", name)
    configuration_kind, model_kind = (getattr(transformers, kind) for kind in kinds)
    pretrained = bool(options["pretrained"])
    try:
        config = _configuration(configuration_kind, name, source, pretrained, options["config"])
        config.num_labels = classes
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        if name == "roberta-base":
            config.classifier_dropout = 0.0
        config._attn_implementation = one_of("model.attention", options["attention"], ("sdpa", "eager"))
        if not pretrained:
            return model_kind(config), config
        # A folder saved with another number of classes keeps its body and gets a new head.
        body = model_kind.from_pretrained(source, config=config, ignore_mismatched_sizes=True)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        allowed = "weights that can be downloaded, or a folder written by save_pretrained (option path)"
        raise wrong(f"model {name}", f"no readable weights at {source}", allowed) from error
    return body.float().train(), config


def _source(published: str, path: str | None) -> str:
    if path is None:
        return published
    if not Path(path).is_dir():
        raise wrong("model.path", path, "an existing folder written by save_pretrained")
    return str(path)


def _trainable(name: str, body: nn.Module, train: str, rank: int) -> nn.Module:
    """Choose what is trained: everything, the classifier only, or the classifier and low-rank adapters."""
    one_of("model.train", train, TRAIN)
    if train == "lora":
        peft = _extra("peft", name)
        ends = {key.rsplit(".", 1)[-1] for key, _ in body.named_modules()}
        config = peft.LoraConfig(
            r=whole("model.rank", rank, 1),
            lora_alpha=2 * rank,
            lora_dropout=0.0,
            target_modules=[target for target in LORA_TARGETS if target in ends],
        )
        body = cast(nn.Module, peft.inject_adapter_in_model(config, body))
    for key, parameter in body.named_parameters():
        chosen = train == "all" or key.startswith("classifier.")
        parameter.requires_grad_(chosen or (train == "lora" and "lora_" in key))
    return body


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
    """ViT-Base/16 pre-trained on ImageNet-21k (paper 002), with a new classifier.

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
    return ImageTransformer(_trainable("vit-base", body, train, rank), int(found.image_size), found.num_channels)


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
) -> nn.Module:
    """RoBERTa-Base (paper 002) with a new classifier; ids come from its own tokenizer, padded with its padding id.

    Options as for :func:`vit_base`, ``config`` with the keys of transformers' RobertaConfig.
    """
    length = text_length("roberta-base", input_shape)
    options = {"pretrained": pretrained, "config": config, "attention": attention}
    kinds = ("RobertaConfig", "RobertaForSequenceClassification")
    body, found = _load("roberta-base", classes, kinds, _source(ROBERTA, path), options)
    longest = found.max_position_embeddings - found.pad_token_id - 1
    if length > longest:
        raise wrong("model roberta-base: input shape", tuple(input_shape), f"at most {longest} ids")
    return TextTransformer(_trainable("roberta-base", body, train, rank), found.pad_token_id)
