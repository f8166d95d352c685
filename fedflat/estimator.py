"""Private federated training for whoever thinks in scikit-learn: one fit is one run of :func:`fedflat.run`.

    from fedflat import PrivateClassifier

    model = PrivateClassifier(epsilon=8).fit(X, y, users=people)  # people[i]: whose row i is
    model.predict(X_new), model.privacy_["proven_epsilon"]

What is protected is a user with all of their rows; without ``users`` every row is a user's only one. A scaler that is
fitted before it, in a pipeline, reads the rows without noise: name public ``ranges`` instead. Every fit spends ε anew:
``privacy_["epsilon_of_all_fits"]`` adds up what this process has fitted on the same users, so that a cross-validation
shows what it cost.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedflat.core import becoming, counted, first_line, in_range, require, turning, wrong
from fedflat.data.encoding import owners_of
from fedflat.simulation.run import run


@dataclass(eq=False)
class _Fit:
    """Users, ε and δ of one fit of this process; users None: rows without names, which may be anybody's."""

    users: frozenset[Any] | None
    epsilon: float
    delta: float


_FITS: list[_Fit] = []
BEYOND = 30
"""Size of an input from which usual rates are far too high."""
CLASSES = "Which classes there are: they were taken from y. Name them (classes=) where that is private."


@dataclass(eq=False, repr=False)
class _Private(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. All parameters are public, and so is the number of users."""

    epsilon: float = 8.0
    delta: float | None = None
    algorithm: Any = "dp-fedavg"
    body: str | Mapping[str, Any] | None = None
    hidden: int | None = None
    rounds: int = 30
    steps: int = 10
    batch_size: int = 16
    lr: float = 0.3
    clip: float = 0.5
    cohort: float = 1.0
    ranges: Sequence[Any] | None = None
    recipe: Mapping[str, Any] | None = None
    out: Any = None
    random_state: Any = None

    def _train(self, inputs: Tensor, targets: Tensor, users: Any, task: str) -> None:
        """Train on one client for each user, and keep the released model and its statement."""
        in_range("cohort", self.cohort, 0, 1, open_low=True)
        places, names = _by_user(users, len(inputs))
        pairs = [(inputs[rows], targets[rows]) for rows in places]
        fit = _Fit(names, self.epsilon, self.delta or 0.0)
        # Counted before anything is released.
        _FITS.append(fit)
        try:
            result = run(self._recipe(len(pairs), task), clients=pairs, task=task, out=self.out, progress=False)
        except BaseException:
            # Without a folder nothing was released.
            if self.out is None:
                _FITS.remove(fit)
            raise
        epsilon = result.privacy["proven_epsilon"]
        if epsilon is None:
            warnings.warn("algorithm: no finite ε is proven, so this model protects nobody", stacklevel=3)
        fit.epsilon, fit.delta = float("inf") if epsilon is None else epsilon, result.privacy["delta"] or 0.0
        if len(pairs) < 3 and epsilon is not None:
            notice = "with fewer than three nobody is protected among others, and noise drowns what they know"
            warnings.warn(f"users: {counted(len(pairs), 'user')}; {notice}", stacklevel=3)
        self.history_, self.n_users_ = result.history, len(pairs)
        self.privacy_ = result.privacy | _of_all_fits(names)
        self.model_ = result.model

    def _recipe(self, clients: int, task: str) -> dict[str, Any]:
        """Return the recipe of a fit: the parameters, and over them what ``recipe`` says section by section."""
        full = self.cohort >= 1
        model: dict[str, Any] = {"name": "linear"} if self.hidden is None else {"name": "mlp", "hidden": self.hidden}
        if self.body is not None:
            for key in ("hidden", "ranges"):
                require(getattr(self, key) is None, key, getattr(self, key), "nothing beside body")
            model = {"name": "image-encoder", "body": self.body}
        recipe: dict[str, Any] = {
            # This seed drives public things only; the noise is secret.
            "seed": int(check_random_state(self.random_state).randint(2**31)), "rounds": self.rounds,
            "algorithm": self.algorithm, "model": model,
            "local": {"steps": self.steps, "batch_size": self.batch_size, "lr": self.lr},
            "cohort": {"size": clients if full else max(1, round(self.cohort * clients))},
            "privacy": {"clip": self.clip, "epsilon": self.epsilon, "delta": self.delta},
        }  # fmt: skip
        recipe["cohort"]["sampling"] = "full" if full else "poisson"
        if task == "classification":
            recipe["data"] = {"classes": len(self.classes_)}
        require(isinstance(self.recipe, Mapping | None), "recipe", self.recipe, "a dict of a recipe's keys, or None")
        for key, value in (self.recipe or {}).items():
            both = isinstance(value, Mapping) and isinstance(recipe.get(key), Mapping)
            recipe[key] = recipe[key] | dict(value) if both else value
        return recipe

    def _inputs(self, rows: Any, targets: Any = "no_validation", *, reset: bool, **checks: Any) -> Any:
        """Return checked rows as a tensor on the public ranges, with checked targets where they are given."""
        if reset:
            # A fit that fails must not leave the model of an earlier one.
            self.__dict__.pop("model_", None)
        validated = validate_data(
            self, rows, targets, reset=reset, dtype=np.float32, allow_nd=self.body is not None, **checks
        )
        x, *rest = validated if isinstance(validated, tuple) else (validated,)
        if self.ranges is not None:
            low, high = _bounds(self.ranges, x.shape[1])
            x = np.clip(2 * (x - low) / (high - low) - 1, -1, 1)
        elif reset and self.body is None and np.abs(x).max() > BEYOND:
            warnings.warn(f"ranges: none given, and inputs are beyond ±{BEYOND}: training may diverge", stacklevel=3)
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        if self.body is not None:
            inputs = _images(inputs, str(getattr(rows, "dtype", "")).endswith("uint8"))
            shape = tuple(inputs.shape[1:])
            self.image_shape_: tuple[int, ...] = shape if reset else self.image_shape_
            expected = f"images of shape {self.image_shape_}, as in fit"
            require(shape == self.image_shape_, "X", f"images of shape {shape}", expected)
        return (inputs, *rest) if rest else inputs

    def _outputs(self, rows: Any) -> Tensor:
        """Return the released model's outputs for new rows."""
        check_is_fitted(self, "model_")
        inputs = self._inputs(rows, reset=False)
        with torch.no_grad():
            return torch.cat([self.model_(some) for some in inputs.split(500)]).double()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # The noise is secret, so two fits differ.
        tags.non_deterministic = True
        return tags


@dataclass(eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """Classify rows by a model that is (ε, δ)-differentially private for each user.

    Args:
        epsilon, delta: the guarantee of one fit; delta None: 0.1 over the number of users.
        algorithm: a method by its name, or a mapping with its options.
        body: None, or frozen features for images: patches, scattering, efficientnet-lite0 or a network's folder; or a
            mapping with its options (docs/representations.md). X is then (n, channels, height, width), in [0, 1] or
            uint8.
        hidden: None for a linear model, or the width of one hidden layer.
        rounds, steps, batch_size, lr, clip: of the training (docs/recipe.md).
        cohort: share of the users that take part in a round, by coins of their own below 1.
        ranges: public (low, high) of all inputs, or one such pair for each column: they are mapped to [-1, 1] and cut
            there.
        recipe: more keys of a recipe, by section, over those above.
        out: a new folder for the run's files.
        random_state: seed of initial weights and batches; the noise is secret whatever it is.
        classes: all classes. None: those in ``y``, which then are public.

    Attributes: ``classes_``, ``privacy_`` (the statement, and what all fits of this process on these users cost),
    ``model_`` (the torch module), ``history_``, ``n_users_``, ``n_features_in_``.

    Raises ValueError as scikit-learn does, and fedflat.InputError (a ValueError) for a setting that cannot be used.
    """

    classes: Sequence[Any] | None = None

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Train on rows X ``(n, columns)``, or images where there is a body, y ``(n,)`` and users ``(n,)``."""
        inputs, labels = self._inputs(X, y, reset=True)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            key = "y" if self.classes is None else "classes"
            raise wrong(key, "1 class", "two classes or more (classes= names those that do not occur)")
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise wrong("y", str(unknown[0]), f"the classes {', '.join(map(str, self.classes_))}")
        self._train(inputs, torch.from_numpy(np.searchsorted(self.classes_, labels)), users, "classification")
        if self.classes is None:
            self.privacy_["not_covered"] = [*self.privacy_["not_covered"], CLASSES]
        return self

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row ``(n,)``."""
        return np.take(indices=self._outputs(X).argmax(-1).numpy(), a=self.classes_)  # first what says "not fitted"

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class ``(n, classes)``, in the order of ``classes_``."""
        return self._outputs(X).softmax(-1).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # On the few rows of scikit-learn's checks noise outweighs the signal.
        tags.classifier_tags.poor_score = True
        return tags


@dataclass(eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """Predict numbers by a model that is (ε, δ)-differentially private for each user.

    Parameters and attributes are those of :class:`PrivateClassifier`, and target_range: the public (low, high) of y,
    which is mapped to [-1, 1] for training, cut there, and mapped back. None: y as it is, best about 1.
    """

    lr: float = 0.1
    target_range: Sequence[float] | None = None

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Train on rows X ``(n, columns)``, or images where there is a body, y ``(n,)`` and users ``(n,)``."""
        with becoming(lambda e: wrong("y", f"no numbers ({first_line(e)})", "a number for each row")):
            # Complex ones are scikit-learn's to refuse, in its own words.
            y = y if y is None or np.iscomplexobj(y) else np.asarray(y, dtype=np.float64)
        inputs, values = self._inputs(X, y, reset=True, y_numeric=True)
        low, high = self.target_range or (-1.0, 1.0)
        require(high > low, "target_range", self.target_range, "(low, high) with low < high")
        self.middle_, self.half_ = (low + high) / 2, (high - low) / 2
        targets = (values.astype(np.float64) - self.middle_) / self.half_
        if self.target_range is not None:
            targets = targets.clip(-1, 1)
        self._train(inputs, torch.from_numpy(targets.astype(np.float32)), users, "regression")
        return self

    def predict(self, X: Any) -> Any:
        """Return the prediction of each row ``(n,)``, in y's own units."""
        return self._outputs(X).reshape(-1).numpy() * self.half_ + self.middle_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


def _images(inputs: Tensor, eight_bits: bool) -> Tensor:
    """Return images (n, channels, height, width), pixels of eight bits over 255. Raises InputError."""
    images = inputs[:, None] if inputs.dim() == 3 else inputs  # grey ones have one channel
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        hint = "np.moveaxis(X, -1, 1) puts channels first." if images.shape[-1] in (1, 3) else ""
        allowed = "(n, channels, height, width) with 1 or 3 channels, or (n, height, width)"
        raise wrong("X", f"an array of shape {tuple(inputs.shape)}", allowed, hint=hint)
    if not eight_bits and images.max() > 1:
        warnings.warn("X: pixels above 1; images are in [0, 1], or of dtype uint8 in 0 to 255", stacklevel=4)
    return images / 255 if eight_bits else images


def _bounds(ranges: Any, columns: int) -> tuple[Any, Any]:
    """Return the lowest and the highest value of all columns, or of each."""
    allowed = f"(low, high) with low < high, or one such pair for each of the {columns} columns"
    with turning((TypeError, ValueError), wrong("ranges", ranges, allowed)):
        bounds = np.asarray(ranges, dtype=np.float32)
    ordered = bounds.shape in ((2,), (columns, 2)) and bool((bounds[..., 1] > bounds[..., 0]).all())
    require(ordered, "ranges", ranges, allowed)
    return bounds[..., 0], bounds[..., 1]


def _by_user(users: Any, rows: int) -> tuple[list[Any], frozenset[Any] | None]:
    """Return the rows of each user, in the order of their first row; and the users' names, None without names."""
    if users is None:
        # Silence would let somebody protect single rows where they meant people.
        notice = "users: none given, so each row is taken as one person; several rows of one are not protected together"
        warnings.warn(notice, stacklevel=4)
        return [slice(row, row + 1) for row in range(rows)], None
    named = np.asarray(users)
    require(named.shape == (rows,), "users", f"shape {named.shape}", f"one name for each of the {rows} rows")
    codes, names = pd.factorize(np.array(owners_of(named.tolist(), "users")))
    return [np.flatnonzero(codes == code) for code in range(len(names))], frozenset(names.tolist())


def _of_all_fits(users: frozenset[Any] | None) -> dict[str, Any]:
    """Return what this process' fits on users that this fit shares have spent, their ε and δ added up."""
    shared = [fit for fit in _FITS if fit.users is None or users is None or fit.users & users]
    # By basic composition: valid whatever the fits have in common.
    total = sum(fit.epsilon for fit in shared)
    return {
        "fits": len(shared),
        "epsilon_of_all_fits": total if np.isfinite(total) else None,
        "delta_of_all_fits": sum(fit.delta for fit in shared),
    }
