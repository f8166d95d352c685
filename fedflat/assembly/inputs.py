"""Build the federation and the module of a run, or data of a random process of the same form.

``data.dataset: random-process/1x28x28/10/60000+10000`` names the shape of the images, the number of classes, and the
training and test examples. Each class has a few dead-leaves images of its own (``models.patches``); an
example is one of them, shifted a little, under another dead-leaves image. Nobody's data are in it.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.assembly.plans import PREFIX, THEIRS, is_proxy, public_examples
from fedflat.assembly.tasks import check_outputs, try_loss
from fedflat.config.method import algorithm_of
from fedflat.config.reading import GIVEN, NOT_HELD
from fedflat.config.recipe import BESIDE_CLIENTS, Recipe
from fedflat.config.sections import DataSection, NamedSection, Partition
from fedflat.core import CROSS_ENTROPY, Algorithm, CustomLoss, Factory, Layout, Objective, layout_of, stream
from fedflat.core.checks import InputError, RunError, require, wrong
from fedflat.data.clients import GIVEN as PAIRS
from fedflat.data.clients import FederatedData, bounded, from_pairs, hold_back, with_test
from fedflat.data.own import clients as own_clients
from fedflat.data.partition import partition
from fedflat.engine.device import refuse_crashing
from fedflat.models import build, refuse_unclipped_state, takes
from fedflat.models.patches import dead_leaves

Clients = FederatedData | Mapping[Any, Any] | Sequence[Any]
"""What ``run(clients=...)`` takes."""


def as_given(
    recipe: Recipe, model: nn.Module | None = None, clients: Clients | None = None,
    data: FederatedData | None = None, algorithm: Algorithm | Factory | None = None, loss: CustomLoss | None = None,
) -> Recipe:  # fmt: skip
    """Return the recipe without the names of data, model and method that were given in Python instead; twice is as
    once.
    """
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model"] = NamedSection(name=GIVEN)
    if clients is not None or (data is not None and data.name == PAIRS):
        # Whose examples are whose came with the data: no seed has a say in it.
        retained = {name: getattr(recipe.data, name) for name in BESIDE_CLIENTS}
        changes["data"] = DataSection(dataset=GIVEN, partition=Partition(kind="natural"), **retained)
    if algorithm is not None:
        options = ({} if isinstance(algorithm, Algorithm) else recipe.algorithm.options) | {"source": GIVEN}
        changes["algorithm"] = NamedSection(name=algorithm_of(recipe, algorithm).name, **options)
    if loss is not None:
        changes["loss"] = GIVEN
    return recipe.model_copy(update=changes)


def data_of(recipe: Recipe, clients: Clients | None, test: Any) -> FederatedData:
    """Return the federation: clients given in Python, or the recipe's data section."""
    if clients is not None:
        if isinstance(clients, Mapping):
            data = own_clients(clients, test=test)
        elif isinstance(clients, FederatedData):
            data = with_test(clients, test)
        else:
            data = from_pairs(clients, test)
        parts, held = hold_back(data.parts, recipe.data.client_test_fraction, recipe.seed)
        return replace(data, parts=parts, held_back=held)
    require(test is None, "test", "a test set without clients", "clients=[(inputs, targets), …] as well, or neither")
    require(recipe.data.dataset != GIVEN, "data.dataset", f"{GIVEN}: the run's folder does not hold the data", NOT_HELD)
    if is_proxy(recipe.data.dataset):
        return federation(recipe.data, recipe.seed)
    from fedflat.data.sources import load

    return load(recipe.data, recipe.seed)


def lacking(recipes: Sequence[Recipe]) -> dict[str, str]:
    """Return the data sets of recipes that cannot be had, each with the reader's one line."""
    from fedflat.data.locate import locate

    absent: dict[str, str] = {}
    for name in dict.fromkeys(recipe.data.dataset for recipe in recipes):
        try:
            # digits comes with scikit-learn.
            if name != "digits":
                locate(name)
        except (InputError, RunError) as error:
            absent[name] = str(error)
    return absent


def layout_for(recipe: Recipe, method: Algorithm, shape: tuple[int, ...], classes: int) -> Layout:
    """Return the layout of a recipe's model for inputs of a shape, which needs no data."""
    from fedflat.models import build

    return layout_of(build(recipe.model.name, shape, classes, 0, **recipe.model.options), method.head)


def module_of(
    recipe: Recipe, model: nn.Module | None, data: FederatedData, objective: Objective = CROSS_ENTROPY
) -> tuple[nn.Module, bool, int]:
    """Return a module of its own for this run, checked to hold nothing that would leave unclipped; whether its training
    draws from torch's generator; and how many classes there are, of a module that is given as many as it puts out.
    """
    if isinstance(model, nn.Module):
        module = model
    elif model is not None:
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = "Net() is one, and Net is not; a model's name stands in the recipe."
        raise wrong("model", kind, "a torch.nn.Module", hint=hint)
    elif recipe.model.name == GIVEN:
        raise wrong("model.name", f"{GIVEN}: the run's folder does not hold the module", NOT_HELD)
    else:
        preparation = None if data.preparation is None else data.preparation.record()
        options = options_for(recipe, data.vocabulary, data.padding, preparation)
        module = build(recipe.model.name, data.input_shape, data.classes, recipe.seed, **options)
    # Made-up rows: what a module is asked here must not follow from anybody's data.
    example = torch.zeros(2, *data.input_shape, dtype=data.inputs.dtype)
    if not example.is_floating_point() and data.inputs.numel():  # the range of token ids
        example.view(-1)[0] = 0 if data.vocabulary else int(data.inputs.min())
        example.view(-1)[-1] = data.vocabulary - 1 if data.vocabulary else int(data.inputs.max())
    if model is not None or ":" in recipe.model.name:
        # The user's own module stays as it was: its weights are w^0 of further runs too.
        module = _copied(module)
        refuse_crashing(module, example)
    classes, draws = data.classes, refuse_unclipped_state(module, example)
    # A module built for the data fits them; one that was given may have other outputs.
    if model is not None or ":" in recipe.model.name or data.name == PAIRS:  # the others are made for the data
        outputs = check_outputs(module, example, data, objective)
        classes = classes if data.stated else outputs
    try_loss(objective, module, example, data)
    return module, draws, classes


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a user's module. Raises InputError for one that cannot be copied, as old-style weight norm
    cannot, or would lose a hook.
    """
    if hooked := [name for name, parameter in module.named_parameters() if parameter._backward_hooks]:
        allowed = "no hook on a parameter's gradient, for none is run; a gradient rule of the method does the same"
        raise wrong("model", f"a hook on the gradient of {hooked[0]}", allowed)
    try:
        return copy.deepcopy(module)
    except Exception as error:  # any class may refuse in its own way
        hint = "torch.nn.utils.parametrizations.weight_norm can be." if "weight_norm" in str(error) else ""
        raise wrong("model", "a module that cannot be copied", "one that copy.deepcopy copies", hint=hint) from error


def options_for(
    recipe: Recipe, vocabulary: int, padding: int, preparation: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the model's options, with those that its data decide (vocabulary 0: no text).

    preparation: the record of the steps from a row to an input, where there is one.
    """
    for key in ("input_shape", "classes", "seed"):  # what a model is built for besides its options
        if key in recipe.model.options:
            raise wrong(f"model.{key}", recipe.model.options[key], "none: data and seed give it")
    of_data: dict[str, Any] = {"vocabulary": vocabulary, "padding": padding} if vocabulary else {}
    if preparation is not None:
        of_data["pixels"] = {"mean": preparation.get("mean", [0.0]), "std": preparation.get("std", [1.0])}
    return {key: value for key, value in of_data.items() if takes(recipe.model.name, key)} | recipe.model.options


MODES = 3
"""Images that stand for one class."""
POOL = 2000
"""Dead-leaves images that lie over them, each in many places and both ways round."""
SHARE = 0.6
"""The class's part of an example's variance."""
SEED = 20_220_101
"""Of the process itself: the same for every recipe."""


def form_of(dataset: str) -> tuple[tuple[int, int, int], int, int, int]:
    """Return what the name of a data set says: shape (c, h, w), classes, and examples of training and of test.

    Raises:
        InputError: it is none of a random process.
    """
    match = re.fullmatch(r"random-process/([13])x(\d+)x(\d+)/(\d+)/(\d+)\+(\d+)", dataset)
    numbers = [int(part) for part in match.groups()] if match else [0]
    if min(numbers) < 1:
        raise wrong("data.dataset", dataset, f"a form such as {PREFIX}1x28x28/10/60000+10000, 1 or 3 channels")
    channels, height, width, classes, train, test = numbers
    return (channels, height, width), classes, train, test


def on_proxy(recipe: Recipe, data: FederatedData) -> Recipe:
    """Return the recipe on a random process of the same form: shape, classes, number of examples, clients, and their
    split.

    data: the recipe's federation, of which only public numbers are taken. Natural clients become equal ones, since
    who has how many examples is theirs.
    Raises InputError: the data are no images with classes.
    """
    shape = data.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or not data.inputs.is_floating_point() or data.targets.dim() != 1:
        inputs = f"inputs of shape {'×'.join(map(str, shape))}"
        raise wrong("--on proxy", inputs, "images with 1 or 3 channels", hint="Other data have no random process here.")
    # How many examples somebody has is private, so the process takes a stated number.
    per_client = public_examples(recipe, data)
    if per_client is None:
        allowed = "data.examples_per_client or data.max_per_client, public numbers"
        raise wrong("--on proxy", "clients of one's own", allowed, hint=THEIRS)
    train = per_client * data.clients
    held = round(train / (1 - recipe.data.client_test_fraction))
    tested = len(data.test_targets) if data.test_targets is not None else max(1, train // 5)
    section = DataSection(
        dataset=f"{PREFIX}{'x'.join(map(str, shape))}/{data.classes}/{held}+{tested}",
        partition=Partition() if recipe.data.partition.kind == "natural" else recipe.data.partition,
        clients=data.clients,
        client_test_fraction=recipe.data.client_test_fraction,
        max_per_client=recipe.data.max_per_client,
    )
    privacy = recipe.privacy.model_copy(update={"randomness": "seeded"})  # it holds nobody's data
    return recipe.model_copy(update={"data": section, "privacy": privacy})


def federation(options: DataSection, seed: int) -> FederatedData:
    """Return the federation of a random process; ``seed`` decides who has what, the process has a seed of its own.

    Raises:
        InputError: a key that it does not use, or a form that is none.
    """
    shape, classes, train, test = form_of(options.dataset)
    used = {"dataset", "partition", "clients", "client_test_fraction", "max_per_client"}
    for name, value in options.model_dump(exclude=used, exclude_defaults=True).items():
        raise wrong(f"data.{name}", value, "nothing: a random process does not use it")
    images, targets = examples(shape, classes, train + test)
    parts = partition(targets[:train].numpy(), options.partition, options.clients, seed)
    if options.max_per_client is not None:
        parts = bounded(parts, options.max_per_client, seed)
    parts, held = hold_back(parts, options.client_test_fraction, seed)
    return FederatedData(
        inputs=images[:train], targets=targets[:train], parts=parts, held_back=held,
        test_inputs=images[train:], test_targets=targets[train:], classes=classes,
        name=options.dataset, most=options.max_per_client, stated=True,
    )  # fmt: skip


def examples(shape: tuple[int, int, int], classes: int, count: int) -> tuple[Tensor, Tensor]:
    """Return all standardised images ``(n, c, h, w)`` float32 and their classes ``(n,)`` int64."""
    stand_for = dead_leaves(classes * MODES, shape, SEED)
    over = dead_leaves(min(POOL, count), shape, SEED + 1)
    images, targets = [], []
    for number, start in enumerate(range(0, count, POOL)):
        draw, size = stream(SEED, "examples of a random process", number), min(POOL, count - start)
        drawn = draw.integers(classes, size=size)
        under = stand_for[torch.from_numpy(drawn * MODES + draw.integers(MODES, size=size))]
        above = over[torch.from_numpy(draw.integers(len(over), size=size))]
        near = max(shape[1:]) // 14
        under = _shifted(under, draw, near, near)
        turned = torch.from_numpy(draw.random(size) < 0.5)[:, None, None, None]
        above = _shifted(torch.where(turned, above.flip(-1), above), draw, shape[1], shape[2])
        images.append(SHARE**0.5 * under + (1 - SHARE) ** 0.5 * above)
        targets.append(torch.from_numpy(drawn))
    stacked = torch.cat(images)
    return (stacked - stacked.mean()) / stacked.std(), torch.cat(targets)


def _shifted(images: Tensor, draw: np.random.Generator, down: int, across: int) -> Tensor:
    """Return each image shifted by up to so many pixels either way, what leaves at one end coming in at the other."""
    count, _, height, width = images.shape
    up, left = (torch.from_numpy(draw.integers(-most, most + 1, size=count)) for most in (down, across))
    rows = (torch.arange(height)[None] + up[:, None]) % height
    columns = (torch.arange(width)[None] + left[:, None]) % width
    return images[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
