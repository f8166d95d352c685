"""``model: {name: representation, body: …, head: …}``: a frozen body whose features are computed once, and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from fedflat.core.checks import one_of, whole, wrong
from fedflat.models.headed import Headed
from fedflat.models.representation.bodies import BodyOptions, PublicBody, body_of, named
from fedflat.models.vision import image_shape

NAME = "representation"
HEADS = ("linear", "mlp")


class Representation(Headed):
    """Images (b, c, h, w), standardised -> logits (b, classes).

    body: images -> features (b, k) of length 1. sha256: the digest of what is in it. prior: what it was made from.
    """

    trained = "classifier."

    def __init__(self, body: PublicBody, sha256: str, classifier: nn.Module) -> None:
        super().__init__()
        self.body, self.sha256, self.classifier = body, sha256, classifier
        self.prior = body.prior

    def features(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.body(inputs))

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(features))

    def linear_layers(self) -> list[nn.Module]:
        """The head as plain layers, for back ends that write the arithmetic out: they see features only."""
        return list(self.classifier) if isinstance(self.classifier, nn.Sequential) else [self.classifier]


def representation(
    input_shape: Sequence[int],
    classes: int,
    *,
    body: str | Mapping[str, Any] = "patches",
    head: str | Mapping[str, Any] = "linear",
    path: str | None = None,
    sha256: str | None = None,
) -> nn.Module:
    """A frozen body of public or synthetic origin, and a head that is trained.

    ``body``: ``patches`` or ``{kind: patches, filters: 800, size: 6, stride: 1, cells: 3, threshold: 0.25, dimension:
    2000, whitening: 0.8, images: 4000, flip: false, seed: 0}``, a dictionary made from random-process images, of which
    no one's data is a part; ``scattering``, with ``scales: 2, angles: 8, order: 2, cells: null`` and the keys from
    ``dimension`` on; or ``{kind: contrastive, network: FILE, sha256: …, cells: 2, …}``, a network that ``fedflat
    pretrain`` trained on such images. ``head``: ``linear`` (starts at zero) or ``{kind: mlp, hidden: 64}``. ``path``:
    a file with the body, the ``body.safetensors`` of a run; ``sha256``: the digest that it must have. Raises
    InputError.
    """
    shape = image_shape(NAME, input_shape)
    made, found = body_of(BodyOptions.of(body), shape, path, sha256)
    return Representation(made, found, _head(head, len(made.projection.weight), classes))


def _head(given: str | Mapping[str, Any], features: int, classes: int) -> nn.Module:
    options = named("model.head", given)
    kind = one_of("model.head.kind", options.pop("kind", HEADS[0]), HEADS)
    hidden = whole("model.head.hidden", options.pop("hidden", 64), 1) if kind == "mlp" else 0
    for key in options:
        raise wrong(f"model.head.{key}", key, "kind and hidden" if kind == "mlp" else "kind alone, for linear")
    if kind == "mlp":
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    linear = nn.Linear(features, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
