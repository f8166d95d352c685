"""scikit-learn's estimators: what they learn, what they count, and scikit-learn's own checks."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import fedflat
from fedflat import PrivateClassifier, PrivateRegressor, estimator
from fedflat.core.checks import InputError

QUICK: dict[str, Any] = {"rounds": 2, "steps": 1, "recipe": {"engine": {"backend": "sequential"}}}
USERS = np.array([f"user {row // 8}" for row in range(1200)])


@pytest.fixture(autouse=True)
def _no_fits_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "_FITS", [])


def rows(classes: int = 2) -> tuple[Any, Any]:
    return make_classification(1200, 8, n_informative=6, n_classes=classes, random_state=0)  # type: ignore[no-any-return]


def test_a_classifier_learns_and_states_its_guarantee() -> None:
    x, y = rows()
    labels = np.array(["no", "yes"])[y]
    found = PrivateClassifier(epsilon=8, ranges=[(-4, 4)] * 8).fit(x, labels, users=USERS)
    assert found.score(x, labels) > 0.8 and found.n_users_ == 150 and set(found.predict(x)) == {"no", "yes"}
    assert found.privacy_["proven_epsilon"] <= 8 and found.privacy_["randomness"] == "secret"
    assert np.allclose(found.predict_proba(x[:5]).sum(1), 1)
    with pytest.warns(UserWarning, match="users: 1 user; with fewer than three nobody is protected"):
        PrivateClassifier(**QUICK).fit(x[:8], labels[:8], users=USERS[:8])


def test_a_regressor_answers_in_the_units_of_y() -> None:
    x, y = make_regression(1200, 8, n_informative=6, random_state=0)
    found = PrivateRegressor(ranges=(-4, 4), target_range=(-500, 500)).fit(x, y, users=USERS)
    assert found.score(x, y) > 0.9 and found.predict(x).std() > 50


def test_images_go_through_a_body() -> None:
    draw = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = draw.random((120, 8, 8), dtype=np.float32) + y[:, None, None]
    body = {"kind": "patches", "filters": 20, "size": 3, "dimension": 30, "images": 100}
    model = PrivateClassifier(body=body, rounds=3, recipe={"model": {"side": 3, "features": 16}})
    with pytest.raises(InputError, match="model"):
        model.fit(x, y, users=np.arange(120) // 4)
    found = PrivateClassifier(body=body, rounds=3, recipe={"engine": {"backend": "sequential"}}).fit(x, y)
    assert found.predict(x).shape == (120,)
    with pytest.raises(InputError, match=r"X: found images of shape \(1, 8, 7\); allowed: .*\(1, 8, 8\), as in fit"):
        found.predict(x[..., :7])
    with pytest.raises(InputError, match=r"X: found an array of shape .*moveaxis\(X, -1, 1\) puts channels first"):
        PrivateClassifier(body=body).fit(np.repeat(x[..., None], 3, -1), y)
    with pytest.raises(InputError, match="hidden: found 8; allowed: nothing beside body"):
        PrivateClassifier(body=body, hidden=8).fit(x, y)
    bits = torch.tensor([[[0, 51, 255]]], dtype=torch.uint8)
    assert estimator._images(bits.float(), True).flatten().tolist() == [0, torch.tensor(0.2), 1]


def test_fits_on_the_same_users_are_added_up_and_others_are_not() -> None:
    x, y = rows()
    quick = PrivateClassifier(epsilon=2, **QUICK)
    assert quick.fit(x[:600], y[:600], users=USERS[:600]).privacy_["fits"] == 1
    assert quick.fit(x[600:], y[600:], users=USERS[600:]).privacy_["fits"] == 1, "nobody is in both"
    both = clone(quick).fit(x, y, users=USERS).privacy_
    assert both["fits"] == 3 and both["epsilon_of_all_fits"] == pytest.approx(6, rel=1e-3)
    assert quick.fit(x[:40], y[:40]).privacy_["fits"] == 4, "rows without names may be anybody's"


def test_a_fit_that_fails_leaves_no_model_and_counts_where_it_wrote_files(tmp_path: Path, monkeypatch: Any) -> None:
    x, y = rows()
    model = PrivateClassifier(epsilon=2, **QUICK).fit(x, y, users=USERS)
    with monkeypatch.context() as patch:
        patch.setattr(estimator, "run", Mock(side_effect=KeyboardInterrupt))
        for out in (None, tmp_path / "run"):
            with pytest.raises(KeyboardInterrupt):
                model.set_params(out=out).fit(x, y, users=USERS)
        with pytest.raises(NotFittedError):
            model.predict(x)
    found = model.set_params(out=None, classes=[0, 1]).fit(x, y, users=USERS).privacy_
    assert found["fits"] == 3 and estimator.CLASSES not in found["not_covered"]
    assert estimator.CLASSES in model.set_params(classes=None).fit(x, y, users=USERS).privacy_["not_covered"]


def test_a_cross_validation_in_a_pipeline_counts_every_fit() -> None:
    x, y, users = (every[:400] for every in (*rows(), USERS))
    with sklearn.config_context(enable_metadata_routing=True):
        model = make_pipeline(
            FunctionTransformer(lambda values: values / 4),
            PrivateClassifier(epsilon=1, **QUICK).set_fit_request(users=True),
        )
        scores = cross_val_score(model, x, y, params={"users": users}, cv=3, error_score="raise")
        last = model.fit(x, y, users=users)[-1]
    assert len(scores) == 3 and last.privacy_["fits"] == 4
    assert last.privacy_["epsilon_of_all_fits"] == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "users", "words"),
    [
        ({"ranges": (1, 1)}, None, "ranges: found"),
        ({"ranges": [(0, 1)] * 7}, None, "one such pair for each of the 8 columns"),
        ({"classes": [0, 2]}, None, "y: found 1; allowed: the classes 0, 2"),
        ({}, np.arange(3), "users: found shape"),
        ({}, np.array([" ", *range(1199)], dtype=object), "row 0, users: found a missing value"),
        ({"algorithm": "dp-fedsma"}, None, "Did you mean dp-fedsam"),
        ({"epsilon": -1}, None, "epsilon"), ({"recipe": "quick-start"}, None, "a dict of a recipe's keys"),
        ({"cohort": 200}, None, "cohort: found 200"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(given: dict[str, Any], users: Any, words: str) -> None:
    x, y = rows()
    with pytest.raises(InputError, match=words) as told:
        PrivateClassifier(**{**QUICK, **given}).fit(x, y, users=users)
    assert "\n" not in str(told.value)


def test_a_regressors_target_is_numbers_in_a_range() -> None:
    x, y = rows()
    with pytest.raises(InputError, match="target_range"):
        PrivateRegressor(target_range=(1, 0), **QUICK).fit(x, y)
    with pytest.raises(InputError, match=r"y: found no numbers .*'a'"):
        PrivateRegressor(**QUICK).fit(x, ["a"] * len(x))


TWO_FITS = "two fits have two draws of secret noise"
EXCEPTIONS = {
    PrivateClassifier: dict.fromkeys(("check_classifier_data_not_an_array", "check_supervised_y_2d"), TWO_FITS),
    PrivateRegressor: dict.fromkeys(
        ("check_regressor_data_not_an_array", "check_supervised_y_2d", "check_regressors_int", "check_fit_idempotent"),
        TWO_FITS,
    ),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_scikit_learns_own_checks(kind: Any) -> None:
    check_estimator(kind(random_state=0, **QUICK), expected_failed_checks=EXCEPTIONS[kind])
    assert fedflat.PrivateClassifier is PrivateClassifier
