"""The federation and the module of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedflat.algorithms import Factory
from fedflat.assembly.plans import NOT_HELD, algorithm_of
from fedflat.config.recipe import GIVEN, DataSection, NamedSection, Partition, Recipe
from fedflat.core.checks import wrong
from fedflat.core.types import Algorithm
from fedflat.data.clients import GIVEN as PAIRS
from fedflat.data.clients import Federated, first_above, from_pairs, hold_back


def as_given(
    recipe: Recipe,
    model: nn.Module | None = None,
    clients: Sequence[Any] | None = None,
    data: Federated | None = None,
    algorithm: Algorithm | Factory | None = None,
) -> Recipe:
    """The recipe without the names of data, model and method that were given in Python instead; twice is as once."""
    given: dict[str, Any] = {}
    if model is not None:
        given["model"] = NamedSection(name=GIVEN)
    if clients is not None or (data is not None and data.name == PAIRS):
        # Whose examples are whose came with the data: no seed has a say in it.
        split, kept = Partition(kind="natural"), recipe.data.client_test_fraction
        given["data"] = DataSection(dataset=GIVEN, partition=split, client_test_fraction=kept)
    if algorithm is not None:
        options = {} if isinstance(algorithm, Algorithm) else recipe.algorithm.options
        options = {**options, "source": GIVEN}
        given["algorithm"] = NamedSection(name=algorithm_of(recipe, algorithm).name, **options)
    return recipe.model_copy(update=given)


def data_of(recipe: Recipe, clients: Sequence[Any] | None, test: Any) -> Federated:
    """The federation: pairs given in Python, or the recipe's data section."""
    if clients is not None:
        given = from_pairs(clients, test)
        parts, held = hold_back(given.parts, recipe.data.client_test_fraction, recipe.seed)
        return replace(given, parts=parts, held_back=held)
    if test is not None:
        raise wrong("test", "a test set without clients", "clients=[(inputs, targets), …] as well, or neither")
    if recipe.data.dataset == GIVEN:
        raise wrong("data.dataset", f"{GIVEN}: the run's folder does not hold the data", NOT_HELD)
    from fedflat.data.sources import load

    return load(recipe.data, recipe.seed)


def module_of(recipe: Recipe, given: nn.Module | None, data: Federated) -> tuple[nn.Module, bool]:
    """A module of its own for this run, checked to hold nothing that would leave unclipped; whether its training
    draws from torch's generator."""
    from fedflat.models import build, refuse_unclipped_state
    from fedflat.models.registry import OURS, takes

    if given is not None:
        module = copy.deepcopy(given)
    else:
        name, options = recipe.model.name, recipe.model.options
        if name == GIVEN:
            raise wrong("model.name", f"{GIVEN}: the run's folder does not hold the module", NOT_HELD)
        if data.vocabulary:
            of_data = {"vocabulary": data.vocabulary, "padding": data.padding}
            options = {key: value for key, value in of_data.items() if takes(name, key)} | options
        module = build(name, data.input_shape, data.classes, recipe.seed, **options)
    example = torch.zeros(2, *data.input_shape, dtype=data.inputs.dtype)
    if not example.is_floating_point() and data.inputs.numel():  # the range of token ids
        example.view(-1)[0] = 0 if data.vocabulary else int(data.inputs.min())
        example.view(-1)[-1] = data.vocabulary - 1 if data.vocabulary else int(data.inputs.max())
    draws = bool(refuse_unclipped_state(module, example, known=given is None and recipe.model.name in OURS))
    if given is not None or ":" in recipe.model.name or data.name == PAIRS:  # the others are made for the data
        _refuse_other_outputs(module, example, data)
    return module, draws


def _refuse_other_outputs(module: nn.Module, example: torch.Tensor, data: Federated) -> None:
    """Refuse a model whose outputs are not one number for each class, of each target."""
    with torch.no_grad():
        out = copy.deepcopy(module).eval()(example)
    if not isinstance(out, torch.Tensor):
        raise wrong("model", f"an output of type {type(out).__name__}", "a tensor of one number for each class")
    expected = (len(example), *data.targets.shape[1:])
    if tuple(out.shape[:-1]) != expected:
        shown = ", ".join(map(str, (*expected, "classes")))
        raise wrong("model", f"an output of shape {tuple(out.shape)} for {len(example)} examples", f"({shown})")
    if out.shape[-1] < data.classes:
        why = first_above(data, out.shape[-1])
        raise wrong("model", f"{out.shape[-1]} outputs", f"at least {data.classes} ({why})")
