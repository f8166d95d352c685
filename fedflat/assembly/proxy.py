"""Data of a random process with the form of a recipe's: what settings may be tried on without touching a client.

``data.dataset: random-process/1x28x28/10/60000+10000`` names the shape of the images, the number of classes, and the
training and test examples. Each class has a few dead-leaves images of its own (``models.representation.leaves``); an
example is one of them, shifted a little, under another dead-leaves image. Nobody's data are in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.config.recipe import Recipe
from fedflat.config.sections import DataSection, Partition
from fedflat.core.checks import in_range, wrong
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData, bounded, hold_back
from fedflat.data.partition import partition
from fedflat.models.representation.leaves import dead_leaves

PREFIX = "random-process/"
MODES = 3
"""Images that stand for one class."""
POOL = 2000
"""Dead-leaves images that lie over them, each in many places and both ways round."""
SHARE = 0.6
"""The class's part of an example's variance."""
SEED = 20_220_101
"""Of the process itself: the same for every recipe."""


class Form(NamedTuple):
    """Shape (c, h, w), classes, and examples of training and of test."""

    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int

    @property
    def dataset(self) -> str:
        """As ``data.dataset`` names it."""
        return f"{PREFIX}{'x'.join(map(str, self.shape))}/{self.classes}/{self.train}+{self.test}"


def is_proxy(dataset: str) -> bool:
    """Whether a recipe's ``data.dataset`` is a random process."""
    return dataset.startswith(PREFIX)


def form_of(dataset: str) -> Form:
    """What the name of a data set says.

    Raises:
        InputError: it is none of a random process.
    """
    found = re.fullmatch(r"random-process/([13])x(\d+)x(\d+)/(\d+)/(\d+)\+(\d+)", dataset)
    numbers = [int(part) for part in found.groups()] if found else [0]
    if min(numbers) < 1:
        raise wrong("data.dataset", dataset, f"a form such as {PREFIX}1x28x28/10/60000+10000, 1 or 3 channels")
    channels, height, width, classes, train, test = numbers
    return Form((channels, height, width), classes, train, test)


def on_proxy(recipe: Recipe, data: FederatedData) -> Recipe:
    """The recipe on a random process of the same form: shape, classes, number of examples, clients, and their split.

    data: the recipe's federation, of which only public numbers are taken. Natural clients become equal ones, since
    who has how many examples is theirs.
    Raises InputError: the data are no images with classes.
    """
    shape = data.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or not data.inputs.is_floating_point() or data.targets.dim() != 1:
        found = f"inputs of shape {'×'.join(map(str, shape))}"
        raise wrong("--on proxy", found, "images with 1 or 3 channels", hint="Other data have no random process here.")
    train = data.examples_per_client * data.clients
    held = round(train / (1 - recipe.data.client_test_fraction))
    tested = len(data.test_targets) if data.test_targets is not None else max(1, train // 5)
    section = DataSection(
        dataset=Form((shape[0], shape[1], shape[2]), data.classes, held, tested).dataset,
        partition=Partition() if recipe.data.partition.kind == "natural" else recipe.data.partition,
        clients=data.clients,
        client_test_fraction=recipe.data.client_test_fraction,
        max_per_client=recipe.data.max_per_client,
    )
    return recipe.model_copy(update={"data": section})


def federation(options: DataSection, seed: int) -> FederatedData:
    """The federation of a random process; ``seed`` decides who has what, the process has a seed of its own.

    Raises:
        InputError: a key that it does not use, or a form that is none.
    """
    form = form_of(options.dataset)
    used = ("dataset", "partition", "clients", "client_test_fraction", "max_per_client")
    for name in DataSection.model_fields:
        if name not in used and getattr(options, name) != DataSection.model_fields[name].default:
            raise wrong(f"data.{name}", getattr(options, name), "nothing: a random process does not use it")
    images, targets = examples(form, form.train + form.test)
    spec = options.partition.model_dump(exclude_none=True)
    parts = partition(targets[: form.train].numpy(), spec, options.clients, seed)
    if options.max_per_client is not None:
        parts = bounded(parts, options.max_per_client, seed)
    share = in_range("data.client_test_fraction", options.client_test_fraction, 0.0, 1.0, open_high=True)
    parts, held = hold_back(parts, share, seed)
    return FederatedData(
        inputs=images[: form.train],
        targets=targets[: form.train],
        parts=parts,
        held_back=held,
        test_inputs=images[form.train :],
        test_targets=targets[form.train :],
        classes=form.classes,
        name=options.dataset,
        most=options.max_per_client,
    )


def examples(form: Form, count: int) -> tuple[Tensor, Tensor]:
    """``count`` standardised images ``(count, c, h, w)`` float32 and their classes ``(count,)`` int64."""
    stand_for = dead_leaves(form.classes * MODES, form.shape, SEED)
    over = dead_leaves(min(POOL, count), form.shape, SEED + 1)
    images, targets = [], []
    for number, start in enumerate(range(0, count, POOL)):
        draw, size = stream(SEED, "examples of a random process", number), min(POOL, count - start)
        classes = draw.integers(form.classes, size=size)
        under = stand_for[torch.from_numpy(classes * MODES + draw.integers(MODES, size=size))]
        above = over[torch.from_numpy(draw.integers(len(over), size=size))]
        near = max(form.shape[1:]) // 14
        mixed = SHARE**0.5 * _moved(under, draw, near, near) + (1 - SHARE) ** 0.5 * _moved(
            _turned(above, draw), draw, form.shape[1], form.shape[2]
        )
        images.append(mixed)
        targets.append(torch.from_numpy(classes))
    whole = torch.cat(images)
    return (whole - whole.mean()) / whole.std(), torch.cat(targets)


def _moved(images: Tensor, draw: np.random.Generator, down: int, across: int) -> Tensor:
    """Each image shifted by up to so many pixels either way, what leaves at one end coming in at the other."""
    count, _, height, width = images.shape
    up, left = (torch.from_numpy(draw.integers(-most, most + 1, size=count)) for most in (down, across))
    rows = (torch.arange(height)[None] + up[:, None]) % height
    columns = (torch.arange(width)[None] + left[:, None]) % width
    at = torch.arange(count)
    return images[at[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _turned(images: Tensor, draw: np.random.Generator) -> Tensor:
    """Each image, or its mirror image."""
    mirrored = torch.from_numpy(draw.random(len(images)) < 0.5)[:, None, None, None]
    return torch.where(mirrored, images.flip(-1), images)
