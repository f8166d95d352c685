"""A pretrained text encoder from a folder, with a linear classifier on the mean of its last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import one_of, wrong
from fedflat.models.headed import Headed
from fedflat.models.pretrained import NATURAL, extra, folder, quiet, readable, same_ids, trainable
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
        """Last hidden states (b, T, n); masks and positions without a branch on values, for ``torch.func.vmap``."""
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
    """Mean of states (b, T, n) over the kept tokens, then mean 0 and variance 1 over its n entries."""
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
    """A BERT, RoBERTa or XLM-RoBERTa encoder in the folder ``path``, with a new linear classifier.

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
