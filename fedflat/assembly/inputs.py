"""The federation and the module of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedflat.algorithms import Factory
from fedflat.assembly import proxy
from fedflat.assembly.plans import NOT_HELD, algorithm_of
from fedflat.assembly.tasks import check_outputs, try_loss
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.config.sections import DataSection, NamedSection, Partition
from fedflat.core.checks import wrong
from fedflat.core.loss import CROSS_ENTROPY, CustomLoss, Objective
from fedflat.core.types import Algorithm
from fedflat.data.clients import GIVEN as PAIRS
from fedflat.data.clients import FederatedData, from_pairs, hold_back, with_test
from fedflat.data.own import clients as own_clients

Clients = FederatedData | Mapping[Any, Any] | Sequence[Any]
"""What ``run(clients=...)`` takes."""


def as_given(
    recipe: Recipe,
    model: nn.Module | None = None,
    clients: Clients | None = None,
    data: FederatedData | None = None,
    algorithm: Algorithm | Factory | None = None,
    loss: CustomLoss | None = None,
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
    if loss is not None:
        given["loss"] = GIVEN
    return recipe.model_copy(update=given)


def data_of(recipe: Recipe, clients: Clients | None, test: Any) -> FederatedData:
    """The federation: clients given in Python, or the recipe's data section."""
    if clients is not None:
        given = _given(clients, test, recipe.task != "classification")
        parts, held = hold_back(given.parts, recipe.data.client_test_fraction, recipe.seed)
        return replace(given, parts=parts, held_back=held)
    if test is not None:
        raise wrong("test", "a test set without clients", "clients=[(inputs, targets), …] as well, or neither")
    if recipe.data.dataset == GIVEN:
        raise wrong("data.dataset", f"{GIVEN}: the run's folder does not hold the data", NOT_HELD)
    if proxy.is_proxy(recipe.data.dataset):
        return proxy.federation(recipe.data, recipe.seed)
    from fedflat.data.sources import load

    return load(recipe.data, recipe.seed)


def _given(clients: Clients, test: Any, fractions: bool) -> FederatedData:
    """Pairs, a dict by user, or what ``fedflat.clients`` made of something else."""
    if isinstance(clients, Mapping):
        return own_clients(clients, test=test)
    if not isinstance(clients, FederatedData):
        return from_pairs(clients, test, fractions=fractions)
    return clients if test is None else with_test(clients, test)


def module_of(
    recipe: Recipe, given: nn.Module | None, data: FederatedData, objective: Objective = CROSS_ENTROPY
) -> tuple[nn.Module, bool]:
    """A module of its own for this run, checked to hold nothing that would leave unclipped; whether its training
    draws from torch's generator."""
    from fedflat.models import build, refuse_unclipped_state
    from fedflat.models.registry import OURS

    if given is not None:
        if not isinstance(given, nn.Module):
            kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            hint = "Net() is one, and Net is not; a model's name stands in the recipe."
            raise wrong("model", kind, "a torch.nn.Module", hint=hint)
        module = copy.deepcopy(given)
    else:
        if recipe.model.name == GIVEN:
            raise wrong("model.name", f"{GIVEN}: the run's folder does not hold the module", NOT_HELD)
        options = options_for(recipe, data.vocabulary, data.padding)
        module = build(recipe.model.name, data.input_shape, data.classes, recipe.seed, **options)
    example = torch.zeros(2, *data.input_shape, dtype=data.inputs.dtype)
    if not example.is_floating_point() and data.inputs.numel():  # the range of token ids
        example.view(-1)[0] = 0 if data.vocabulary else int(data.inputs.min())
        example.view(-1)[-1] = data.vocabulary - 1 if data.vocabulary else int(data.inputs.max())
    draws = bool(refuse_unclipped_state(module, example, known=given is None and recipe.model.name in OURS))
    if given is not None or ":" in recipe.model.name or data.name == PAIRS:  # the others are made for the data
        check_outputs(module, example, data, objective)
    try_loss(objective, module, example, data)
    return module, draws


def options_for(recipe: Recipe, vocabulary: int, padding: int) -> dict[str, Any]:
    """The model's options, with those that its data decide (vocabulary 0: no text)."""
    from fedflat.models.registry import takes

    of_data = {"vocabulary": vocabulary, "padding": padding} if vocabulary else {}
    return {key: value for key, value in of_data.items() if takes(recipe.model.name, key)} | recipe.model.options
