"""Make the method that a recipe names, and settle what the two decide together: server settings, local momentum.

Options are checked against the signature of the method's function.
"""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from fedflat.algorithms import ALGORITHMS
from fedflat.config.reading import GIVEN, NOT_HELD
from fedflat.config.recipe import Recipe
from fedflat.config.sections import ServerSection
from fedflat.core import MOMENTUM, Algorithm, Factory, calling, imported, nearest, one_of, require, wrong


def algorithm_of(recipe: Recipe, algorithm: Algorithm | Factory | None = None) -> Algorithm:
    """Return the algorithm a recipe names, with its options checked against the factory's signature."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    name, options = recipe.algorithm.name, recipe.algorithm.options
    # `source` is what fedflat wrote into a run's recipe, no option of the method.
    source = options.pop("source", None) if options.get("source") == GIVEN else None
    if algorithm is not None:
        if not callable(algorithm):
            hint = "A method's name stands in the recipe." if isinstance(algorithm, str) else ""
            raise wrong("algorithm", algorithm, "an Algorithm, or a function that returns one", hint=hint)
        factory = algorithm
    elif source == GIVEN:
        raise wrong("algorithm.name", f"{name}, {GIVEN}: the run's folder does not hold the method", NOT_HELD)
    elif ":" in name or name.endswith(".py"):
        factory = imported("algorithm.name", name)
    else:
        factory = ALGORITHMS[one_of("algorithm.name", name, ALGORITHMS)]
    _check_options(name, options, factory)
    with calling(f"algorithm {name}"):
        method = factory(**options)
    returned = f"{name}, which returned {type(method).__name__}"
    require(isinstance(method, Algorithm), "algorithm.name", returned, "a function that returns Algorithm")
    return method


def _check_options(name: str, options: Mapping[str, Any], factory: Factory) -> None:
    """Raise InputError for an option that a method does not take, or takes as another kind of value."""
    keys = inspect.signature(factory).parameters
    for key in options:
        allowed = f"for {name}: {', '.join(keys) or 'no key'}"
        require(key in keys, f"algorithm.{key}", key, allowed, hint=nearest(key, keys))
    for parameter in keys.values():
        value = options.get(parameter.name, parameter.default)
        # YAML's 1 and 0 would pass as truth values, and mean numbers elsewhere.
        if isinstance(parameter.default, bool) and not isinstance(value, bool):
            raise wrong(f"algorithm.{parameter.name}", value, "true or false")
        # fedflat's own methods check their numbers, with the range.
        if ":" in name and isinstance(parameter.default, (int, float)) and isinstance(value, str):
            raise wrong(f"algorithm.{parameter.name}", value, "a number")


def is_published(recipe: Recipe, method: Algorithm) -> bool:
    """Return whether a published procedure is asked for; a method without privacy has no other protocol than its
    own."""
    return recipe.privacy.protocol == "published" and method.private


def constant_clip(recipe: Recipe, needing: str) -> float:
    """Return the one number C that ``needing`` is made for. Raises InputError for a clip of another kind."""
    clip = recipe.privacy.clipping
    if clip.value is None:
        raise wrong("privacy.clip", clip.kind, f"one number for {needing}")
    return clip.value


def momentum_of(recipe: Recipe, method: Algorithm) -> float:
    """Return the momentum of local SGD: the recipe's, or else the method's, or else the default, with a warning where
    the method is no packaged one."""
    momentum = method.momentum if recipe.local.momentum is None else recipe.local.momentum
    if momentum is None:
        momentum = MOMENTUM
        if method.name not in ALGORITHMS and recipe.local.optimizer == "sgd":
            problem = f"local.momentum: {momentum}, for neither the recipe nor {method.name} says one"
            warnings.warn(f"{problem}; Algorithm(momentum=0.0) if its equations divide by K·η", stacklevel=3)
    return momentum


def server_of(recipe: Recipe, method: Algorithm) -> ServerSection:
    """Return the recipe's server section with its defaults filled in; ``optimizer`` stays None where the method has its
    own.

    Raises:
        InputError: settings of another optimiser beside the method's own, or a round whose noise it could not know.
    """
    server = recipe.server
    if method.optimizer is None:
        return server.filled()
    require(method.kind == "update", "algorithm.optimizer", f"one of its own with kind {method.kind}", "kind update")
    hint = "Its server optimizer reckons with the noise of the sound round."
    require(not is_published(recipe, method), "privacy.protocol", "published", f"sound for {method.name}", hint=hint)
    foreign = server.model_dump(include={"optimizer", "momentum", "beta1", "beta2", "tau"}, exclude_defaults=True)
    for key, value in foreign.items():
        raise wrong(f"server.{key}", value, f"nothing for {method.name}", hint="The method brings its own optimizer.")
    return server.model_copy(update={"lr": method.server_lr if server.lr is None else server.lr})
