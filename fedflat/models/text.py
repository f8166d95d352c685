"""Build small text models on ids (b, T) int64.

The recurrent model is written out step by step: torch's own GRU has no batching rule and fails under
``torch.func.vmap``, with which the vectorised engine trains several clients at once.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import require, whole, wrong
from fedflat.models.representation import Headed


def text_length(name: str, input_shape: Sequence[int]) -> int:
    """Return the number of ids per example; raises InputError unless ``input_shape`` is (T,)."""
    if len(input_shape) != 1 or not isinstance(input_shape[0], int) or input_shape[0] < 1:
        raise wrong(f"model {name}: input shape", tuple(input_shape), "sequences of ids (length,)")
    return input_shape[0]


class GRU(nn.Module):
    """One recurrent layer (Cho et al. 2014): (b, T, inputs) -> (b, T, hidden), zero initial state.

    It is torch.nn.GRU with ``bias_hh = 0``; gates are stacked as there (r, z, n).
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(3 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        driven = F.linear(x, self.weight_ih, self.bias)  # (b, T, 3 · hidden): one product for all steps
        state, states = driven.new_zeros(driven.shape[0], self.hidden), []
        for now in driven.unbind(1):
            r, z, n = now.chunk(3, -1)
            hr, hz, hn = F.linear(state, self.weight_hh).chunk(3, -1)
            update = torch.sigmoid(z + hz)
            state = (1 - update) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + update * state
            states.append(state)
        return torch.stack(states, 1)


class CharacterModel(nn.Module):
    """A small GRU for next-character prediction: ids (b, T) int64 -> logits (b, T, classes), one for each position.

    ``classes`` is the vocabulary.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, embedding: int = 8, hidden: int = 128, layers: int = 1
    ) -> None:
        super().__init__()
        text_length("char-gru", input_shape)
        whole("model.embedding", embedding, 1)
        whole("model.hidden", hidden, 1)
        whole("model.layers", layers, 1, 8)
        self.embedding = nn.Embedding(classes, embedding)
        self.layers = nn.Sequential(*(GRU(n, hidden) for n in [embedding] + [hidden] * (layers - 1)))
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layers(self.embedding(ids))))


class CharacterScores(nn.Module):
    """Multinomial logistic regression on the last ``context`` characters: ids (b, T) -> logits (b, T, classes).

    ``classes`` is the vocabulary. A character, or the text's beginning, at each distance has a score for every next
    one; logits are their sum and a bias, all 0 at the start.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, context: int = 3) -> None:
        super().__init__()
        self.vocabulary = classes
        self.context = whole("model.context", context, 1, text_length("char-linear", input_shape))
        self.scores = nn.Parameter(torch.zeros(context * (classes + 1), classes))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, ids: Tensor) -> Tensor:
        total: Tensor = self.bias
        for back in range(self.context):
            earlier = F.pad(ids, (back, 0), value=self.vocabulary)[:, : ids.shape[1]]
            total = total + F.embedding(earlier + back * (self.vocabulary + 1), self.scores)
        return total


class WordCounts(Headed):
    """Logistic regression on a text's words: (b, T) -> (b, classes).

    Features: how often each id but ``padding`` is in the text (b, vocabulary), divided by the root of their number:
    counts of different words have length 1. ``vocabulary`` (required) counts the ids, ``padding`` included; in a recipe
    both come from the data (hashing, or the tokenizer's own) unless they are given.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, vocabulary: int | None = None, padding: int = 0
    ) -> None:
        super().__init__()
        text_length("bow-linear", input_shape)
        allowed, hint = "the number of different ids, padding included", "bow-linear is for texts."
        require(vocabulary is not None, "model.vocabulary", "nothing", allowed, hint=hint)
        self.vocabulary = whole("model.vocabulary", vocabulary, 2)
        self.padding = whole("model.padding", padding, 0)
        self.classifier = nn.Linear(self.vocabulary, classes)

    def features(self, inputs: Tensor) -> Tensor:
        word = (inputs != self.padding).to(self.classifier.weight.dtype)
        counts = word.new_zeros(inputs.shape[0], self.vocabulary).scatter_add(1, inputs, word)
        return counts / word.sum(1, keepdim=True).clamp(min=1.0).sqrt()


class WordOverlap(Headed):
    """Whether two sentences use the same words, and logistic regression on that: (b, T) -> (b, classes).

    One feature: the share of ids without their like in the other sentence, from -1 (none) to 1 (all). The first
    sentence ends at ``separator``. A head so small takes little noise.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, padding: int = 0, separator: int = 1) -> None:
        super().__init__()
        text_length("bow-overlap", input_shape)
        if whole("model.separator", separator, 0) == whole("model.padding", padding, 0):
            raise wrong("model.separator", separator, "the id between the two sentences, which is not the padding's")
        self.padding, self.separator = padding, separator
        self.classifier = nn.Linear(1, classes)

    def features(self, inputs: Tensor) -> Tensor:
        border = inputs == self.separator
        second = border.long().cumsum(1).clamp(max=1)
        word = (inputs != self.padding) & ~border
        same = (inputs[:, :, None] == inputs[:, None, :]) & (second[:, :, None] != second[:, None, :])
        share = (word & ~(same & word[:, None, :]).any(2)).sum(1, keepdim=True) / word.sum(1, keepdim=True).clamp(min=1)
        return (2 * share - 1).to(self.classifier.weight.dtype)
