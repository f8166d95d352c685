"""Build image classifiers: images (b, c, h, w) float -> logits (b, classes), no dropout, no running statistics.

Every model is a plain function of its inputs and parameters (no in-place operation, no branch on data), so it runs
under ``torch.func.functional_call`` and ``torch.func.vmap``; it gives the same logits for contiguous and
``channels_last`` inputs, because ``flatten(1)`` follows the logical, not the stored, order.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import whole, wrong


def image_shape(name: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """``input_shape`` as (channels, height, width); raises InputError for anything else."""
    if len(input_shape) != 3 or any(not isinstance(n, int) or n < 1 for n in input_shape):
        raise wrong(f"model {name}: input shape", tuple(input_shape), "images (channels, height, width)")
    return (input_shape[0], input_shape[1], input_shape[2])


def _elements(input_shape: Sequence[int]) -> int:
    return math.prod(whole("model: input shape", n, 1) for n in input_shape)


class Dense(nn.Module):
    """Fully connected layers with ReLU between them; any input shape, flattened first. Output (b, widths[-1])."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return cast(Tensor, self.layers[-1](x))

    def linear_layers(self) -> list[nn.Module]:
        """Return the same function as a list of plain layers, for back ends that write the arithmetic out."""
        listed: list[nn.Module] = [nn.Flatten()]
        for layer in self.layers:
            listed += [layer, nn.ReLU()]
        return listed[:-1]


def linear(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression on the flattened input."""
    return Dense([_elements(input_shape), classes])


def mlp(input_shape: Sequence[int], classes: int, *, hidden: int | Sequence[int] = 64) -> nn.Module:
    """Return a multilayer perceptron; ``hidden`` is one width or a list of widths."""
    widths = list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]
    return Dense([_elements(input_shape), *[whole("model.hidden", width, 1) for width in widths], classes])


class Convolutions(nn.Module):
    """Convolutions (kernel k, stride 1), 2 × 2 max pooling, ReLU; then dense layers.

    layers: of each convolution its channels, and whether it is pooled. widths: of the dense layers.

    Pooling comes before ReLU: both orders give the same numbers, and this one applies ReLU to a quarter of them. Of the
    image, rows and columns at the end that no pooling keeps (an odd side loses one) are not looked at: the same
    function, a sixth less arithmetic for ``cnn-3`` on 32 × 32.
    """

    def __init__(
        self, name: str, input_shape: Sequence[int], layers: Sequence[tuple[int, bool]], widths: Sequence[int],
        kernel: int,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, pools = zip(*layers)
        first, height, width = image_shape(name, input_shape)
        rows, columns = (_left_over(side, pools, kernel) for side in (height, width))
        if min(rows, columns) < 1:
            least, hint = _needed(1, pools, kernel), "Smaller images: mlp or resnet10."
            raise wrong(f"model {name}: image size", f"{height} × {width}", f"at least {least} × {least}", hint=hint)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, kernel) for a, b in pairwise([first, *channels]))
        self.pools = pools
        self.seen = tuple(_needed(left, pools, kernel) for left in (rows, columns))
        self.dense = Dense([channels[-1] * rows * columns, *widths])

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != self.seen and not x.is_mkldnn:  # oneDNN's own tensors cannot be cut
            x = x[..., : self.seen[0], : self.seen[1]]
        for convolution, pool in zip(self.convolutions, self.pools, strict=True):
            x = convolution(x)
            x = F.relu(F.max_pool2d(x, 2, 2) if pool else x)  # the stride written out: oneDNN's gradient wants it
        if x.is_mkldnn and not self.dense.layers[0].weight.is_mkldnn:
            x = x.to_dense()  # the dense layers' own products are faster
        return cast(Tensor, self.dense(x))


def _left_over(side: int, pools: Sequence[bool], kernel: int) -> int:
    for pool in pools:
        side = (side - kernel + 1) // (2 if pool else 1)
    return side


def _needed(left: int, pools: Sequence[bool], kernel: int) -> int:
    """Return the side of the input that ``left`` rows at the end depend on."""
    for pool in reversed(pools):
        left = (2 * left if pool else left) + kernel - 1
    return left


def cnn(input_shape: Sequence[int], classes: int, *, hidden: int = 512) -> nn.Module:
    """Return the EMNIST network of Shi et al. 2023a and b: 5 × 5 convolutions (32, 64), pooling after each, 512 units.
    L = 8.

    Shi et al. 2023b name the layers and not the padding. Unpadded, as in the code of Shi et al. 2023a: 608,702
    parameters at 1 × 28 × 28 with 62 classes.
    """
    widths = [whole("model.hidden", hidden, 1), classes]
    return Convolutions("cnn", input_shape, [(32, True), (64, True)], widths, 5)


def cnn_2_layers(input_shape: Sequence[int], classes: int, *, hidden: int = 128) -> nn.Module:
    """ "CNN-2-Layers" of Cheng et al. 2022, which takes it from Reddi et al. 2021 and calls it about 1.0 M parameters.

    That network, its dropout left out: 3 × 3 convolutions (32, 64), one pooling, 128 units. It has 1,206,590
    parameters on EMNIST (1 × 28 × 28, 62 classes); the cited architecture is kept rather than the rounded number.
    """
    widths = [whole("model.hidden", hidden, 1), classes]
    return Convolutions("cnn-2-layers", input_shape, [(32, False), (64, True)], widths, 3)


def cnn_3(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Return the CIFAR-10 network of Zhang et al. 2024: 3 × 3 convolutions (64, 128, 256), pooling after each, 256, 128
    units.

    The stated 667,402 parameters at 3 × 32 × 32 with 10 classes mean convolutions without padding.
    """
    return Convolutions("cnn-3", input_shape, [(64, True), (128, True), (256, True)], [256, 128, classes], 3)


class Block(nn.Module):
    """The basic residual block of He et al. 2016 with group norm: (b, a, h, w) -> (b, c, h/stride, w/stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        self.stride = stride
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        # The pixels first: oneDNN's strided 1 × 1 convolution may write beyond its memory (core/params.py).
        return F.relu(out + self.shortcut(x[..., :: self.stride, :: self.stride]))


class ResNet(nn.Module):
    """A residual network of basic blocks with a CIFAR stem (3 × 3 convolution, stride 1, no max pooling).

    blocks: of each stage, whose images are half as large as those of the one before. width: channels of the first
    stage, twice as many in each that follows. groups: of every norm.
    """

    def __init__(
        self, name: str, input_shape: Sequence[int], classes: int, blocks: Sequence[int], width: int, groups: int
    ) -> None:
        super().__init__()
        channels, height, columns = image_shape(name, input_shape)
        if min(height, columns) < 8:
            hint = "Three stages halve the image: below 8 × 8 nothing is left to convolve; use mlp."
            raise wrong(f"model {name}: image size", f"{height} × {columns}", "at least 8 × 8", hint=hint)
        if whole("model.width", width, 1) % whole("model.groups", groups, 1):
            raise wrong("model.groups", groups, f"a divisor of the first stage's {width} channels")
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stages.append(Block(inputs, width << stage, 2 if stage and not index else 1, groups))
                inputs = width << stage
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm1(self.conv1(x))))
        return cast(Tensor, self.head(x.mean((2, 3))))


def resnet10(input_shape: Sequence[int], classes: int, *, groups: int = 32, width: int = 64) -> nn.Module:
    """ResNet-10 with group norm (Liu et al. 2025, GNResNet-10): one basic block per stage; L = 38 tensors.

    ``groups``: channel groups of every norm, 32 as in Wu and He 2018; ``width``: channels of the first stage.
    """
    return ResNet("resnet10", input_shape, classes, [1, 1, 1, 1], width, groups)


def resnet18(input_shape: Sequence[int], classes: int, *, groups: int = 32, width: int = 64) -> nn.Module:
    """ResNet-18 with group norm (all five papers): two basic blocks per stage; L = 62 tensors, 11,173,962 parameters.

    ``groups``: channel groups of every norm, 32 as in Wu and He 2018; ``width``: channels of the first stage.
    """
    return ResNet("resnet18", input_shape, classes, [2, 2, 2, 2], width, groups)
